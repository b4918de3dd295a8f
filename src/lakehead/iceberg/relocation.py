"""Relocation: a lake that lies inside a data folder follows it when the folder is moved or copied.

Iceberg names files by absolute address, in the metadata file, in manifest lists, in manifests and in position-delete
files. All of those that lead to a table's old place are written again beside the old ones, under names of their own,
and then the catalog is pointed to the new metadata file at once: a crash before leaves the table as it was, and doing
it again writes the same files again. Data files stay as they are. What is read, is read at the new place, so that the
folder that this one may be a copy of is never touched.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import sqlite3
import uuid
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakehead.env.storage import LocalStorage, open_private, storage_errors, sync_file
from lakehead.errors import LakeheadError, LakeStateError, UnavailableError
from lakehead.iceberg.avro_file import Branch, edit_avro
from lakehead.iceberg.lake_catalog import lake_names
from lakehead.iceberg.own_place import SCHEMES, lies_in, local_path
from lakehead.iceberg.settings import require_format
from lakehead.lake.marks import OWNER
from lakehead.types import TableDescriptor

_PATH_FIELD = 2147483546
"""Field id of ``file_path`` in position-delete files."""
_MOVED_NAME = re.compile(r"-m[0-9a-f]{8}(?=\.)")
_DELETES = 1


@dataclass(frozen=True)
class Move:
    """A lake folder's old and new path."""

    old: str
    new: str

    def address(self, address: str) -> str:
        """An address as it is after the move, spelled as before; one that lies elsewhere stays."""
        for scheme in SCHEMES:
            if address == scheme + self.old or address.startswith(f"{scheme}{self.old}/"):
                return scheme + self.new + address[len(scheme) + len(self.old) :]
        return address

    def concerns(self, address: str) -> bool:
        """Whether an address is one of the old place."""
        return self.address(address) != address


def relocate_table(catalog_db: str, catalog_name: str, desc: TableDescriptor, lake: str, owner: str) -> bool:
    """Have the lake table of a default catalog name its files where they are; nothing happens when it does.

    Args:
        catalog_db: the catalog's SQLite file.
        lake: the folder that holds it now.
        owner: the incarnation that the table belongs to from now on.

    Returns:
        Whether it was relocated.

    Raises:
        LakeStateError: what the catalog or a file says cannot be understood.
        StorageError, UnavailableError: the disk or the catalog refused; nothing has changed, do it again.
    """
    name, location = _pointer(catalog_db, catalog_name, desc)
    if location is None or location.startswith(f"file://{lake}/"):
        return False
    move = _move_of(desc, location, lake)
    if move is None:
        return False
    relocation = _Relocation(move)
    try:
        made = relocation.metadata(desc, location, owner)
    except (OSError, pa.ArrowException) as e:
        raise UnavailableError(f"the lake of {desc.path} cannot follow its folder to {lake}: {e}", path=lake) from e
    _point(catalog_db, catalog_name, desc, name, location, made)
    relocation.remove_replaced()
    return True


def _move_of(desc: TableDescriptor, location: str, lake: str) -> Move | None:
    """How the folder of a metadata file's lake was moved; None: not at all, and another engine has had the file written
    elsewhere."""
    inside = f"/{desc.origin.database}/{desc.origin.table}-{desc.table_id}/metadata/"
    path = local_path(location)
    at = path.rfind(inside)
    if at > 0 and path.startswith("/"):
        return Move(path[:at], lake)
    with contextlib.suppress(LakeheadError):
        values = _read_metadata(path)
        former = [entry.get("metadata-file", "") for entry in values.get("metadata-log", ())]
        if any(lies_in(address, lake) for address in (values.get("location", ""), *former)):
            return None
    raise LakeStateError(
        f"the lake table of {desc.path} lies at {location}, neither in this data folder nor where it was in a"
        " former one. If another engine had its metadata written there (write.metadata.path), a folder that is moved or"
        " copied cannot follow: move it back, have the property removed and a round run, and move it then. Else restore"
        " the lake/catalog.db that belongs to this folder",
        table=str(desc.path),
    )


def _read_metadata(path: str) -> dict[str, Any]:
    with storage_errors(path, "read"), open(path, "rb") as f:
        data = f.read()
    try:
        values: dict[str, Any] = json.loads(gzip.decompress(data) if ".gz." in path or path.endswith(".gz") else data)
    except (ValueError, EOFError, gzip.BadGzipFile) as e:
        raise LakeStateError(f"the lake's metadata file {path} cannot be read ({e}): restore it", path=path) from e
    return values


class _Relocation:
    def __init__(self, move: Move) -> None:
        self._move = move
        self._token = hashlib.sha256(move.new.encode()).hexdigest()[:8]
        self._manifests: dict[str, tuple[str, int] | None] = {}
        self._deletes: dict[str, _DeleteFile | None] = {}
        self._replaced: list[str] = []

    def metadata(self, desc: TableDescriptor, location: str, owner: str) -> str:
        """Write all that a metadata file leads to, then the file itself; its new address."""
        at = self._here(location)
        values = _read_metadata(at)
        require_format(str(desc.path), values.get("format-version"))  # others have files that are unlike these
        moved = self._move.address
        values["location"] = moved(values["location"])
        former = [entry["metadata-file"] for entry in values.get("metadata-log", ())]
        self._replaced += [self._here(address) for address in former if self._move.concerns(address)]
        values["metadata-log"] = []
        for snapshot in values.get("snapshots", ()):
            if "manifest-list" in snapshot:
                snapshot["manifest-list"] = self._manifest_list(snapshot["manifest-list"])
            if "manifests" in snapshot:
                snapshot["manifests"] = [self._manifest(m)[0] for m in snapshot["manifests"]]
        for entry in (*values.get("statistics", ()), *values.get("partition-statistics", ())):
            entry["statistics-path"] = moved(entry["statistics-path"])
        properties = {k: moved(v) for k, v in values.get("properties", {}).items()}
        values["properties"] = {**properties, OWNER: owner}
        self._replaced.append(at)
        name = self._metadata_name(os.path.basename(at))
        LocalStorage().write_atomic(os.path.join(os.path.dirname(at), name), json.dumps(values).encode())
        return f"{moved(location).rpartition('/')[0]}/{name}"

    def remove_replaced(self) -> None:
        """Remove what was written again; what cannot be removed is left to orphan clean-up."""
        for path in self._replaced:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _here(self, address: str) -> str:
        return local_path(self._move.address(address))

    def _metadata_name(self, name: str) -> str:
        """PyIceberg takes the next number from the name; the same name each time that this move is made."""
        number = int(name.split("-")[0]) if name.split("-")[0].isdecimal() else 0
        return f"{number + 1:05d}-{uuid.uuid5(uuid.NAMESPACE_URL, f'{self._move.new}/{name}')}.metadata.json"

    def _beside(self, address: str) -> str:
        """The new address of a file that is written again."""
        folder, _, name = self._move.address(address).rpartition("/")
        stem, dot, suffix = _MOVED_NAME.sub("", name).rpartition(".")
        return f"{folder}/{stem}-m{self._token}{dot}{suffix}"

    def _read(self, address: str) -> bytes | None:
        """A file of the old place; None when it is gone, or not this folder's, so that its address is all there is."""
        if not self._move.concerns(address):
            return None
        try:
            with open(self._here(address), "rb") as f:
                return f.read()
        except FileNotFoundError:
            return None

    def _write(self, address: str, data: bytes) -> str:
        made = self._beside(address)
        LocalStorage().write_atomic(local_path(made), data)
        self._replaced.append(self._here(address))
        return made

    def _manifest_list(self, address: str) -> str:
        data = self._read(address)
        if data is None:
            return self._move.address(address)

        def edit(record: dict[str, Any]) -> None:
            record["manifest_path"], length = self._manifest(record["manifest_path"])
            record["manifest_length"] = record["manifest_length"] if length is None else length

        return self._write(address, edit_avro(data, edit, self._here(address)))

    def _manifest(self, address: str) -> tuple[str, int | None]:
        """New address and length of a manifest; no length for one that is not written again."""
        if address not in self._manifests:
            data = self._read(address)
            if data is None:
                self._manifests[address] = None
            else:
                edited = edit_avro(data, self._edit_entry, self._here(address))
                self._manifests[address] = (self._write(address, edited), len(edited))
        return self._manifests[address] or (self._move.address(address), None)

    def _edit_entry(self, record: dict[str, Any]) -> None:
        file = record["data_file"]
        address = file["file_path"]
        file["file_path"] = self._move.address(address)
        referenced = file.get("referenced_data_file")
        if isinstance(referenced, Branch) and isinstance(referenced.value, str):
            file["referenced_data_file"] = Branch(referenced.index, self._move.address(referenced.value))
        if file.get("content", 0) != _DELETES:
            return
        if address not in self._deletes:
            self._deletes[address] = self._delete_file(address)
        made = self._deletes[address]
        if made is None:
            return
        file["file_path"], file["file_size_in_bytes"] = made.address, made.size
        for name, bound in (("lower_bounds", made.first), ("upper_bounds", made.last)):
            bounds = file.get(name)
            for entry in (bounds.value if isinstance(bounds, Branch) else bounds) or ():
                if entry["key"] == _PATH_FIELD:
                    entry["value"] = bound.encode()

    def _delete_file(self, address: str) -> _DeleteFile | None:
        """Write a position-delete file again; None for one that is gone or lies elsewhere."""
        if not self._move.concerns(address):
            return None
        source, made = self._here(address), self._beside(address)
        if not os.path.exists(source):
            return None
        target = local_path(made)
        temporary = f"{target}.tmp"
        bounds: list[str] = []
        with pq.ParquetFile(source) as file:
            schema = file.schema_arrow
            if "file_path" not in schema.names:
                raise LakeStateError(f"{source} is no position-delete file: compact the lake table", path=source)
            column = schema.get_field_index("file_path")
            with storage_errors(target, "write"):
                open_private(temporary).close()
            with storage_errors(target, "write"), pq.ParquetWriter(temporary, schema, compression="zstd") as out:
                for group in range(file.num_row_groups):
                    rows, field = file.read_row_group(group), schema.field(column)
                    paths = self._moved_column(rows.column(column).cast(pa.string()))
                    out.write_table(rows.set_column(column, field, paths.cast(field.type)))
                    bounds += [v.as_py() for v in pc.min_max(paths).values() if v.is_valid]
        with storage_errors(target, "write"):
            os.replace(temporary, target)
        sync_file(target)
        self._replaced.append(source)
        first, last = (min(bounds), max(bounds)) if bounds else ("", "")
        return _DeleteFile(made, os.path.getsize(target), first, last)

    def _moved_column(self, paths: pa.ChunkedArray) -> pa.ChunkedArray:
        coded = paths.combine_chunks().dictionary_encode() if len(paths) else None
        if coded is None:
            return paths
        coded = coded.combine_chunks() if isinstance(coded, pa.ChunkedArray) else coded
        moved = pa.array([self._move.address(p) for p in coded.dictionary.to_pylist()], pa.string())
        return pa.chunked_array([moved.take(coded.indices)])


@dataclass(frozen=True)
class _DeleteFile:
    """A position-delete file that was written again: its address, size in bytes, least and greatest ``file_path``."""

    address: str
    size: int
    first: str
    last: str


# ---- the catalog's pointer ----------------------------------------------------------------------------------------

_ROW = "catalog_name = ? and table_namespace = ? and table_name = ?"


def _pointer(catalog_db: str, catalog_name: str, desc: TableDescriptor) -> tuple[tuple[str, ...], str | None]:
    """What the catalog calls a table, and the metadata file that it names for it; None when it names none."""
    names = lake_names(desc)
    if not os.path.exists(catalog_db):
        return names[0], None
    with _catalog(catalog_db) as db:
        if not db.execute("select 1 from sqlite_master where name = 'iceberg_tables'").fetchone():
            return names[0], None
        for name in names:
            row = db.execute(
                f"select metadata_location from iceberg_tables where {_ROW}", (catalog_name, *name)
            ).fetchone()
            # A name that the table had, or is to get, may be another's.
            if row and row[0] and (not desc.former or f"-{desc.table_id}/" in row[0]):
                return name, str(row[0])
    return names[0], None


def _point(
    catalog_db: str, catalog_name: str, desc: TableDescriptor, name: tuple[str, ...], old: str, new: str
) -> None:
    """Name another metadata file, if the catalog still names the old one."""
    with _catalog(catalog_db) as db:
        changed = db.execute(
            f"update iceberg_tables set metadata_location = ?, previous_metadata_location = null where {_ROW}"
            " and metadata_location = ?",
            (new, catalog_name, *name, old),
        ).rowcount
    if changed != 1:
        raise UnavailableError(f"the lake table of {desc.path} changed while it followed its folder: try again")


@contextlib.contextmanager
def _catalog(path: str) -> Any:
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=30)) as db:
            db.execute("pragma synchronous=full")
            with db:
                yield db
    except sqlite3.Error as e:
        raise UnavailableError(f"the lake's catalog {path} cannot be read or written: {e}", path=path) from e
