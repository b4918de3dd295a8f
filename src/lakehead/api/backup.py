"""Backups of a data folder, also while it is served, and what is made of them.

Every part of a backup is a state that a crash could have left, and together they fit: the lake of a table is copied as
of one of its versions, then the table's log, which is never behind it, then the metadata. What is acknowledged before
the backup begins is in it. The owner serves on; it notices nothing but leases.

A backup is a folder with ``data``, a data folder, and ``backup.json``, which names each file with its size and checksum
and is written last: without it a backup is not one. It says that it is a copy, so whatever is made of it is a folder of
its own, and leaves a lake outside the folder alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lakehead.api.connection import Connection
from lakehead.api.table import Table, handle_of
from lakehead.client.table import TableHandle
from lakehead.env import LocalStorage
from lakehead.env.storage import make_private, open_private, storage_errors, sync_file
from lakehead.errors import (
    ChecksumError,
    CorruptionError,
    InvalidRequestError,
    LakeFileMissingError,
    LakeStateError,
    SchemaChangedError,
    StorageError,
    TableNotFoundError,
    UnavailableError,
    UnsupportedFormatError,
)
from lakehead.log import LogTablet
from lakehead.protocol import messages as m
from lakehead.server.incarnations import disown
from lakehead.types import TableDescriptor, TabletKey

FORMAT = 1
"""Version of ``backup.json``."""
_MANIFEST = "backup.json"
_UNFINISHED = "backup.unfinished"
_DATA = "data"
_LOG_FILES = (".log", ".checkpoint", ".start")
_ATTEMPTS = 20
_PAUSE_SECONDS = 0.05
_ANY_EPOCH = 2**32 - 1
"""Whichever start of the owner wrote a log: nothing is written to its copy."""
_CHUNK = 1 << 20
Report = Callable[[str], None]


@dataclass(frozen=True)
class Backup:
    """A finished backup.

    Attributes:
        path: its folder.
        tables: names of the tables in it.
        lakes_outside: those whose lake lies outside the data folder, and is not in the backup.
        files: bytes of each file, by its path in the data folder.
    """

    path: str
    tables: tuple[str, ...]
    lakes_outside: tuple[str, ...]
    files: Mapping[str, int]

    @property
    def size_bytes(self) -> int:
        return sum(self.files.values())


def back_up(con: Connection, folder: str, destination: str, report: Report = lambda _: None) -> Backup:
    """Copy a data folder of this machine, to which ``con`` is a connection, while it may be written to.

    Args:
        destination: a folder that does not exist, is empty, or holds a backup that was not finished.
        report: called with the name of each table before it is copied.

    Raises:
        InvalidRequestError: the destination is in use, or inside the folder.
        LakeStateError, CorruptionError: the folder or its lake is damaged.
        StorageError: the disk refused; make the backup again.
    """
    folder, destination = os.path.realpath(folder), os.path.realpath(destination)
    data = _begin(folder, destination)
    before, published = _writers_acked(folder), _published(folder)
    inside: dict[str, list[str]] = {}
    outside: list[str] = []
    overwritten: dict[str, Mapping[TabletKey, int]] = {}
    copied: set[str] = set()
    for _ in range(_ATTEMPTS):
        # Names change while tables are copied: what was passed over is seen when they are listed again.
        found = [_opened(con, name) for name in con.tables()]
        left = {handle_of(t).desc.table_id: t for t in found if t and handle_of(t).desc.table_id not in copied}
        if not left and None not in found:
            break
        for table_id, table in left.items():
            report(table.name)
            copied.add(table_id)
            with contextlib.suppress(TableNotFoundError):
                pointers, overwritten[table_id] = _copy_table(table, folder, data)
                if pointers:
                    inside[table_id] = pointers
                elif table.describe()["lake"]:
                    outside.append(table_id)
    if inside:
        # Before the metadata, which know what a table was called before.
        _copy_database(os.path.join(folder, "lake", "catalog.db"), os.path.join(data, "lake", "catalog.db"))
    kept = _copy_metadata(folder, data, before, published, overwritten)
    _keep_tables(data, kept)
    if inside:
        _point_catalog(data, [p for table_id, pointers in inside.items() if table_id in kept for p in pointers])
    names = {table_id: str(info.path) for table_id, info in kept.items()}
    lakes_outside = sorted(names[i] for i in outside if i in names)
    return _finish(destination, tuple(sorted(names.values())), tuple(lakes_outside))


def restore(backup: str, folder: str) -> Backup:
    """Make a data folder of a backup, every byte of it checked.

    It is another folder than the one that was backed up: both may be served, and neither touches the other's lake.

    Args:
        folder: does not exist, or is empty. It appears when all is in it.

    Raises:
        InvalidRequestError: there is no finished backup, or the folder is in use.
        UnsupportedFormatError: a newer version made the backup.
        ChecksumError, CorruptionError: a file of the backup is not what was written; nothing was made.
        StorageError: the disk refused; restore again.
    """
    backup, folder = os.path.realpath(backup), os.path.realpath(folder)
    made, checksums = _read_manifest(backup)
    if os.path.lexists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise InvalidRequestError(f"{folder} is in use: restore to a folder that is new or empty", path=folder)
    staging = f"{folder}.restoring"
    if os.path.lexists(staging) and set(os.listdir(staging)) - {_DATA}:
        raise InvalidRequestError(f"{staging} is in the way: move it", path=staging)
    LocalStorage().remove_tree(staging)
    LocalStorage().make_folder(os.path.join(staging, _DATA))
    for name, size in made.files.items():
        source, target = os.path.join(backup, _DATA, name), os.path.join(staging, _DATA, name)
        if not os.path.isfile(source):
            raise CorruptionError(f"the backup lacks {source}: use another one", path=source)
        if _copy(source, target) != (size, checksums[name]):
            raise ChecksumError(f"{source} of the backup is not what was written: use another one", path=source)
        sync_file(target)
    LocalStorage().rename(os.path.join(staging, _DATA), folder)
    LocalStorage().remove_tree(staging)
    return made


# ---- the steps of a backup ----------------------------------------------------------------------------------------


def _begin(folder: str, destination: str) -> str:
    """An empty ``data`` folder; what an unfinished backup left there is removed."""
    if destination == folder or destination.startswith(f"{folder}{os.sep}"):
        raise InvalidRequestError(f"{destination} lies in the data folder itself: name another place", path=destination)
    marker, data = os.path.join(destination, _UNFINISHED), os.path.join(destination, _DATA)
    with storage_errors(destination, "look at"):
        found = set(os.listdir(destination)) if os.path.lexists(destination) else set()
    ours = found <= {f"{_UNFINISHED}.tmp"} or _UNFINISHED in found
    if not ours or _MANIFEST in found:
        raise InvalidRequestError(f"{destination} is in use: name a folder that is new or empty", path=destination)
    LocalStorage().make_folder(destination)
    LocalStorage().write_atomic(marker, b"")
    LocalStorage().remove_tree(data)
    LocalStorage().make_folder(data)
    return data


def _opened(con: Connection, name: str) -> Table | None:
    """A table; None for one that was dropped or renamed since it was listed."""
    with contextlib.suppress(TableNotFoundError):
        return con.table(name)
    return None


def _copy_table(table: Table, folder: str, data: str) -> tuple[list[str], Mapping[TabletKey, int]]:
    """Copy the lake, then what it keeps of the changelog, then the log, so that neither is behind; returns the metadata
    files of the lake, none of one outside the folder, and below which offsets the lake's rows were gone meanwhile.

    Files that the owner removes meanwhile, as it trims, cleans up and drops, make it begin anew, and so does a change
    of the table's columns, and a partition that is overwritten.
    """
    handle = handle_of(table)
    last: Exception | None = None
    for _ in range(_ATTEMPTS):
        _remove_table(data, table)
        try:
            handle = handle.now()
            overwritten = _overwritten(handle)
            pointers = [found for t in handle.desc.lake_tables if (found := _copy_lake(handle, t, folder, data))]
            handle.log.watermarks()
            for tablet in _tablet_folders(folder, table):
                _copy_tablet(os.path.join(folder, tablet), os.path.join(data, tablet), table)
            if _overwritten(handle) == overwritten:
                return pointers, overwritten
            last = UnavailableError("partitions were overwritten")
        except (FileNotFoundError, LakeFileMissingError, LakeStateError, SchemaChangedError) as e:
            last = e
            handle.log.watermarks()  # it may have been dropped
            handle.env.clock.sleep(_PAUSE_SECONDS)  # or is being dropped, its lake first
    if isinstance(last, LakeFileMissingError | LakeStateError | SchemaChangedError):
        raise last
    raise UnavailableError(f"files of {table.name} keep going while they are copied ({last}): try again") from last


def _overwritten(handle: TableHandle) -> dict[TabletKey, int]:
    return {tablet: at.overwritten for tablet, at in handle.log.watermarks().items() if at.overwritten}


def _table_folder(table: Table) -> str:
    desc = handle_of(table).desc
    return f"tables/{desc.origin}-{desc.table_id[:8]}"


def _lake_folders(table: Table) -> list[str]:
    tables = handle_of(table).desc.lake_tables
    return [f"lake/{t.origin.database}/{t.origin.table}-{t.table_id}" for t in tables]


def _remove_table(data: str, table: Table) -> None:
    for part in (_table_folder(table), *_lake_folders(table)):
        LocalStorage().remove_tree(os.path.join(data, part))


def _tablet_folders(folder: str, table: Table) -> list[str]:
    base = os.path.join(folder, _table_folder(table))
    found = []
    for at, folders, files in os.walk(base):
        folders.sort()
        if any(f.endswith(_LOG_FILES) for f in files):
            found.append(os.path.relpath(at, folder))
    return found


def _copy_tablet(source: str, target: str, table: Table) -> None:
    """The files of a log as they are listed at one moment, each up to some byte: what a crash could have left. Opening
    them once cuts the batch that was being written, checks what is there, and notes how far it goes."""
    for name in sorted(os.listdir(source)):
        if name.endswith(_LOG_FILES):
            _copy(os.path.join(source, name), os.path.join(target, name))
    segment_bytes = handle_of(table).desc.properties.segment_bytes
    LogTablet(LocalStorage(), target, segment_bytes=segment_bytes, epoch=_ANY_EPOCH).close()


def _copy_lake(handle: TableHandle, side: TableDescriptor, folder: str, data: str) -> str | None:
    """Copy all files of one version of a lake table; returns its metadata file, None when that lies outside."""
    if side.lake is None:
        return None
    info = handle.lake(changelog=side is not handle.desc)
    inside = f"file://{folder}/lake/"
    if not info.metadata_location.startswith(inside) or os.path.realpath(f"{folder}/lake") != f"{folder}/lake":
        return None
    from lakehead.iceberg.inventory import inventory

    (lease,) = handle.leases.open([handle.leased(m.LakeUse(metadata=info.metadata_location))])
    try:
        for address, needed in inventory(info):
            if not address.startswith(inside):
                continue
            name = address.removeprefix(f"file://{folder}/")
            try:
                _copy(os.path.join(folder, name), os.path.join(data, name))
            except FileNotFoundError:
                if needed:
                    raise
    finally:
        handle.leases.release(lease.lease)
    return info.metadata_location


def _copy_metadata(
    folder: str,
    data: str,
    acked: Mapping[tuple[str, bytes], int],
    published: Mapping[tuple[str, str], tuple[int, int]],
    overwritten: Mapping[str, Mapping[TabletKey, int]],
) -> dict[str, m.TableInfo]:
    """The metadata of the tables that were copied; their definitions by id.

    Epochs of writers are those of now, not lower than any in a log; what the writers had seen answered is as of before
    the logs were copied, so that no log lacks it; so is how far jobs had published, and what tablets have beyond that
    they do not take again. Which partitions were overwritten is as of when the logs were copied.
    """
    target = os.path.join(data, "metadata.db")
    _copy_database(os.path.join(folder, "metadata.db"), target)
    with _database(target) as db:
        stored = [msgspec.msgpack.decode(info, type=m.TableInfo) for (info,) in db.execute("select info from tables")]
        copied = [i for i in stored if os.path.isdir(f"{data}/tables/{_log_folder(i)}")]
        for gone in {i.table_id for i in stored} - {i.table_id for i in copied}:
            for name in ("tables", "schemas", "partitions", "writers", "truncations", "overwritten", "publications"):
                db.execute(f"delete from {name} where table_id = ?", (gone,))
        for table_id, writer_id in db.execute("select table_id, writer_id from writers").fetchall():
            db.execute(
                "update writers set acked_through = ? where table_id = ? and writer_id = ?",
                (acked.get((table_id, writer_id), -1), table_id, writer_id),
            )
        db.execute("delete from overwritten")
        for table_id in {i.table_id for i in copied} & overwritten.keys():
            rows = [(table_id, str(tablet), before) for tablet, before in overwritten[table_id].items()]
            db.executemany("insert into overwritten values (?, ?, ?, '', -1)", rows)
        for job in db.execute("select table_id, job from publications").fetchall():
            db.execute(
                "update publications set batch = ?, sequence = ?, begun = null, parts = null"
                " where table_id = ? and job = ?",
                (*published.get(job, (-1, 0)), *job),
            )
        db.execute("delete from dropped")
        disown(db)
    return {i.table_id: i for i in copied}


def _log_folder(info: m.TableInfo) -> str:
    return f"{info.database}.{info.table}-{info.table_id[:8]}"


def _writers_acked(folder: str) -> dict[tuple[str, bytes], int]:
    with _database(os.path.join(folder, "metadata.db")) as db:
        rows = db.execute("select table_id, writer_id, acked_through from writers").fetchall()
    return {(str(table_id), bytes(writer_id)): int(acked) for table_id, writer_id, acked in rows}


def _published(folder: str) -> dict[tuple[str, str], tuple[int, int]]:
    with _database(os.path.join(folder, "metadata.db")) as db:
        rows = db.execute("select table_id, job, batch, sequence from publications").fetchall()
    return {(str(table_id), str(job)): (int(batch), int(sequence)) for table_id, job, batch, sequence in rows}


def _keep_tables(data: str, kept: Mapping[str, m.TableInfo]) -> None:
    """Remove what was copied of tables that were dropped meanwhile."""
    folders = {_log_folder(info) for info in kept.values()}
    for name in LocalStorage().list_files(os.path.join(data, "tables")):
        if name not in folders:
            LocalStorage().remove_tree(os.path.join(data, "tables", name))


def _point_catalog(data: str, pointers: Sequence[str]) -> None:
    """Have the copied catalog name the copied lake tables alone, at the versions that were copied."""
    with _database(os.path.join(data, "lake", "catalog.db")) as db:
        copied = {os.path.dirname(pointer): pointer for pointer in pointers}
        rows = db.execute("select table_namespace, table_name, metadata_location from iceberg_tables").fetchall()
        for *where, now in rows:
            if (pointer := copied.get(os.path.dirname(now))) is None:
                db.execute("delete from iceberg_tables where table_namespace = ? and table_name = ?", where)
                continue
            db.execute(
                "update iceberg_tables set metadata_location = ?, previous_metadata_location = null"
                " where table_namespace = ? and table_name = ?",
                (pointer, *where),
            )


def _finish(destination: str, tables: tuple[str, ...], outside: tuple[str, ...]) -> Backup:
    data = os.path.join(destination, _DATA)
    files: dict[str, tuple[int, str]] = {}
    for at, _, names in os.walk(data):
        for name in names:
            path = os.path.join(at, name)
            sync_file(path)
            files[os.path.relpath(path, data)] = _digest(path)
    values = {
        "format": FORMAT,
        "tables": list(tables),
        "lakes_outside": list(outside),
        "files": {name: list(found) for name, found in sorted(files.items())},
    }
    LocalStorage().write_atomic(os.path.join(destination, _MANIFEST), json.dumps(values, indent=1).encode())
    LocalStorage().remove(os.path.join(destination, _UNFINISHED))
    return Backup(destination, tables, outside, {name: size for name, (size, _) in files.items()})


def _read_manifest(backup: str) -> tuple[Backup, dict[str, str]]:
    path = os.path.join(backup, _MANIFEST)
    data = LocalStorage().read_file(path)
    if data is None:
        raise InvalidRequestError(f"{backup} holds no finished backup: there is no {_MANIFEST} in it", path=backup)
    try:
        values: dict[str, Any] = json.loads(data)
        if int(values["format"]) > FORMAT:
            raise UnsupportedFormatError(
                f"{path} has format {values['format']}, this version reads up to {FORMAT}: upgrade Lakehead", path=path
            )
        files = {str(name): (int(size), str(checksum)) for name, (size, checksum) in values["files"].items()}
        tables, outside = tuple(map(str, values["tables"])), tuple(map(str, values["lakes_outside"]))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CorruptionError(f"{path} cannot be read ({e}): use another backup", path=path) from e
    if any(os.path.isabs(name) or ".." in name.split(os.sep) for name in files):
        raise CorruptionError(f"{path} names files outside the backup: use another one", path=path)
    made = Backup(backup, tables, outside, {name: size for name, (size, _) in files.items()})
    return made, {name: checksum for name, (_, checksum) in files.items()}


# ---- files ----------------------------------------------------------------------------------------------------------


def _copy(source: str, target: str) -> tuple[int, str]:
    """Copy what a file holds now, unsynced; size and checksum of the copy.

    Raises:
        FileNotFoundError: the source is gone.
    """
    size, checksum = 0, hashlib.sha256()
    with open(source, "rb") as read, storage_errors(target, "write"):
        _make_folder_of(target)
        with open_private(target) as write:
            while part := read.read(_CHUNK):
                write.write(part)
                checksum.update(part)
                size += len(part)
    return size, checksum.hexdigest()


def _make_folder_of(path: str) -> None:
    """Make a file's folder, and its name durable. One that is there was made by this run, as what others left was
    removed before: it need not be made durable for every file."""
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        LocalStorage().make_folder(folder)


def _digest(path: str) -> tuple[int, str]:
    with storage_errors(path, "read"), open(path, "rb") as f:
        return os.fstat(f.fileno()).st_size, hashlib.file_digest(f, "sha256").hexdigest()


def _copy_database(source: str, target: str) -> None:
    """One state of an SQLite database that others may be writing to, as a single file."""
    _make_folder_of(target)
    with storage_errors(target, "write"):
        make_private(target)
    with _database(source) as read, _database(target) as write:
        read.backup(write)
    with _database(target) as db:
        db.execute("pragma journal_mode=delete")


@contextlib.contextmanager
def _database(path: str) -> Iterator[sqlite3.Connection]:
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as db:
            yield db
    except sqlite3.Error as e:
        raise StorageError(f"cannot copy the database {path}: {e}", path=path) from e
