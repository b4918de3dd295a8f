"""What the files of an Iceberg table on this machine's disks say, without a catalog; nothing is changed."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any

from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, DataFileContent
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

from lakehead.errors import CorruptionError, InvalidFileError
from lakehead.iceberg.lake_catalog import open_metadata
from lakehead.iceberg.manifests import manifests_of
from lakehead.iceberg.snapshots import snapshots_table
from lakehead.lake.marks import TABLE_ID

_METADATA = ".metadata.json"
_VERSION = re.compile(r"v?(\d+)")


@dataclass
class LakeTableReport:
    """What a lake table's metadata file holds, and the files of its current snapshot.

    Attributes:
        path: the metadata file.
        table_id: of the table whose rows these are; None where Lakehead did not make it.
        partition_by: the fields of the partition spec, each ``name: transform(column)``.
        snapshots: as `TableLake.snapshots` lists them, without their summaries.
        rows: of its data files; ``deleted`` is how many of them its position deletes name.
        problems: each a sentence that says which file, what is wrong, and what to do.
    """

    path: str
    format_version: int
    table_id: str | None
    location: str
    columns: list[str]
    partition_by: list[str]
    current_snapshot: int | None
    snapshots: list[dict[str, Any]]
    rows: int = 0
    deleted: int = 0
    data_files: int = 0
    delete_files: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)


def metadata_file(path: str) -> str:
    """The metadata file that a path means, or an address such as catalogs tell: itself, or the newest of a table's
    folder.

    Raises:
        InvalidFileError: there is none.
    """
    path = path.removeprefix("file://")
    if not os.path.isdir(path):
        return path
    for folder in (os.path.join(path, "metadata"), path):
        names = [n for n in os.listdir(folder) if n.endswith(_METADATA)] if os.path.isdir(folder) else []
        found = [os.path.join(folder, name) for name in names]
        if found:
            return max(found, key=_age)
    raise InvalidFileError(
        f"{path} is no lake table: name a folder below which metadata/*{_METADATA} lie, or such a file", path=path
    )


def _age(path: str) -> tuple[int, float]:
    version = _VERSION.match(os.path.basename(path))
    return (int(version[1]) if version else -1), os.path.getmtime(path)


def read_lake_table(path: str) -> LakeTableReport:
    """Read a metadata file and the manifests of its current snapshot, and look whether the files they name are there.

    Raises:
        CorruptionError: the metadata file is damaged.
        UnavailableError: it cannot be read.
    """
    table = open_metadata(f"file://{os.path.abspath(path)}", {})
    metadata, schema = table.metadata, table.schema()
    report = LakeTableReport(
        path=path,
        format_version=metadata.format_version,
        table_id=table.properties.get(TABLE_ID),
        location=metadata.location,
        columns=[f"{f.name} {f.field_type}" + (" not null" if f.required else "") for f in schema.fields],
        partition_by=[f"{f.name}: {f.transform}({schema.find_column_name(f.source_id)})" for f in table.spec().fields],
        current_snapshot=metadata.current_snapshot_id,
        snapshots=snapshots_table(table).drop_columns(["summary"]).to_pylist(),
    )
    if (snapshot := table.current_snapshot()) is not None:
        _read_files(table, snapshot, report)
    return report


def _read_files(table: Table, snapshot: Snapshot, report: LakeTableReport) -> None:
    at = snapshot.manifest_list
    try:
        for manifest in manifests_of(snapshot, table.io):
            at = manifest.manifest_path
            for entry in manifest.fetch_manifest_entry(table.io):
                _add(table.io, entry.data_file, report)
    except CorruptionError as e:
        report.problems.append(f"{e}; restore the file from a backup")
    except OSError as e:
        report.problems.append(f"{at} cannot be read ({e}): restore it, or roll the lake table back")


def _add(io: FileIO, file: DataFile, report: LakeTableReport) -> None:
    if file.content == DataFileContent.DATA:
        report.data_files += 1
        report.rows += file.record_count
    else:
        report.delete_files += 1
        report.deleted += file.record_count
    report.bytes += file.file_size_in_bytes
    try:
        size = len(io.new_input(file.file_path))
    except FileNotFoundError:
        report.problems.append(f"{file.file_path} is gone: restore it from a backup, or roll the lake table back")
    except OSError as e:
        report.problems.append(f"{file.file_path} cannot be read ({e}): see who may read it")
    else:
        if size != file.file_size_in_bytes:
            report.problems.append(
                f"{file.file_path} has {size} bytes, its manifest says {file.file_size_in_bytes}: restore it from a"
                " backup"
            )
