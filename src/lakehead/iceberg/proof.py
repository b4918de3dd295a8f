"""Whether the files that a lake snapshot names are there: asked before a log forgets what is in them.

Files and manifests never change, so what was found once need not be asked for again by whoever trims.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from pyarrow.fs import FileType

from lakehead.env.threads import WorkerPool
from lakehead.iceberg.file_io import LOOKS_AT_ONCE, lake_files, locate_file
from lakehead.iceberg.manifests import manifests_of
from lakehead.lake.lake_table import missing_file

if TYPE_CHECKING:
    from pyiceberg.io import FileIO
    from pyiceberg.manifest import ManifestFile
    from pyiceberg.table import Table

_AT_ONCE = 64


@dataclass(frozen=True)
class MissingFile:
    """A file that is not there as its manifest describes it.

    Attributes:
        path: its address.
        size: bytes that it should have.
        found: bytes that it has; None when there is none.
    """

    path: str
    size: int
    found: int | None


def manifest_paths(table: Table, snapshot_id: int | None = None) -> list[str]:
    """Addresses of the manifests of a snapshot, None for the current one; none without a snapshot.

    Raises:
        LakeFileMissingError: the manifest list is gone.
    """
    with lake_files():
        return [m.manifest_path for m in _manifests(table, snapshot_id)]


def missing_files(table: Table, snapshot_id: int | None = None, *, proven: Collection[str] = ()) -> list[MissingFile]:
    """Data and delete files of a lake snapshot, None for the current one, that are gone or have another size.

    Args:
        proven: manifests (`manifest_paths`) whose files were there before.

    Raises:
        LakeFileMissingError: the manifest list or a manifest is gone.
        OSError: the storage does not answer.
    """
    with lake_files(), WorkerPool(LOOKS_AT_ONCE) as pool:
        manifests = [m for m in _manifests(table, snapshot_id) if m.manifest_path not in proven]
        entries = chain.from_iterable(pool.map(lambda m: m.fetch_manifest_entry(table.io), manifests))
        files = list({e.data_file.file_path: e.data_file.file_size_in_bytes for e in entries}.items())
        parts = [files[at : at + _AT_ONCE] for at in range(0, len(files), _AT_ONCE)]
        return list(chain.from_iterable(pool.map(lambda part: _missing(table.io, part), parts)))


def require_files(io: FileIO, files: Iterable[tuple[str, int]]) -> None:
    """That files are there with these sizes.

    Raises:
        LakeFileMissingError: one is not.
    """
    for missing in _missing(io, list(files)):
        raise missing_file(missing.path)


def _manifests(table: Table, snapshot_id: int | None) -> list[ManifestFile]:
    snapshot = table.metadata.snapshot_by_id(snapshot_id) if snapshot_id is not None else table.current_snapshot()
    return manifests_of(snapshot, table.io) if snapshot else []


def _missing(io: FileIO, files: Sequence[tuple[str, int]]) -> list[MissingFile]:
    out = []
    for path, size in files:
        fs, inner = locate_file(io, path)
        info = fs.get_file_info(inner)
        found = info.size if info.type == FileType.File else None
        if found != size:
            out.append(MissingFile(path, size, found))
    return out
