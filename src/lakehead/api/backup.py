"""Backups of a data folder, also while it is served, and what is made of them.

Every part of a backup is a state that a crash could have left, and together they fit: the lake of a table is copied as
of one of its versions, then the table's log, which is never behind it, then the metadata. Tables that jobs publish to
are as of one moment (`lakehead.api.moment`). What is acknowledged before the backup begins is in it. The owner serves
on; it notices nothing but leases.

A backup is a folder with ``data``, a data folder, and ``backup.json``, which names each file with its size and checksum
and is written last: without it a backup is not one. It says that it is a copy, so whatever is made of it is a folder of
its own, and leaves a lake outside the folder alone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lakehead.api.backup_files import OpenFiles, copy_database, copy_file, database, digest
from lakehead.api.connection import Connection
from lakehead.api.moment import Moment, groups
from lakehead.api.table import Table, handle_of
from lakehead.client.table import TableHandle
from lakehead.env import LocalStorage
from lakehead.env.place import real_path
from lakehead.env.storage import storage_errors, sync_file
from lakehead.errors import (
    ChecksumError,
    CorruptionError,
    InvalidRequestError,
    LakeFileMissingError,
    LakeStateError,
    SchemaChangedError,
    TableNotFoundError,
    UnavailableError,
    UnsupportedFormatError,
)
from lakehead.format.frame import WriterStamp
from lakehead.lake.formats import format_of
from lakehead.lake.marks import LakeMark, mark_of
from lakehead.log import LogTablet
from lakehead.log.cut import cut_log
from lakehead.protocol import messages as m
from lakehead.server.incarnations import disown
from lakehead.types import Offset, TableDescriptor, TabletKey

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
        InvalidRequestError: the destination holds something already, or is inside the folder.
        LakeStateError, CorruptionError: the folder or its lake is damaged.
        UnavailableError: a table went on faster than it was copied, each time that it was tried; make the backup again.
        StorageError: the disk refused; make the backup again.
    """
    folder, destination = real_path(folder), real_path(destination)
    data = _begin(folder, destination)
    acked = _writers_acked(folder)
    copies: dict[frozenset[str], _Copy] = {}
    for left in reversed(range(_ATTEMPTS)):
        # Names change while tables are copied, and jobs publish to others: what was passed over is seen when they are
        # listed again.
        found = [_opened(con, name) for name in con.tables()]
        tables = {handle_of(t).desc.table_id: handle_of(t) for t in found if t}
        missing = [
            (ids, published)
            for ids, published in groups(os.path.join(folder, "metadata.db"), tables).items()
            if not any(ids <= done and (copy.moment is not None or not published) for done, copy in copies.items())
        ]
        if not missing and None not in found:
            break
        for ids, published in missing:
            copies = {done: copy for done, copy in copies.items() if not done & ids}
            group = sorted((tables[table_id] for table_id in ids), key=lambda table: str(table.desc.path))
            cut = published or any(table.desc.buckets > 1 or table.desc.partition_by for table in group)
            if (copied := _copy_group(group, folder, data, report, cut=cut, last=not left)) is not None:
                copies[ids] = copied
    inside = {table_id: pointers for copy in copies.values() for table_id, pointers in copy.inside.items()}
    outside = [table_id for copy in copies.values() for table_id in copy.outside]
    if inside:
        # Before the metadata, which know what a table was called before.
        copy_database(os.path.join(folder, "lake", "catalog.db"), os.path.join(data, "lake", "catalog.db"))
    kept = _copy_metadata(folder, data, acked, list(copies.values()))
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
        InvalidRequestError: there is no finished backup, or the folder holds something already, or is inside it.
        UnsupportedFormatError: a newer version made the backup.
        ChecksumError, CorruptionError: a file of the backup is not what was written; nothing was made.
        StorageError: the disk refused; restore again.
    """
    backup, folder = real_path(backup), real_path(folder)
    if folder == backup or folder.startswith(f"{backup}{os.sep}"):
        raise InvalidRequestError(f"{folder} lies in the backup itself: name another place", path=folder)
    made, checksums = _read_manifest(backup)
    if _holds_else(folder, set()):
        raise InvalidRequestError(
            f"{folder} holds something already: restore to a folder that is new or empty", path=folder
        )
    staging = f"{folder}.restoring"
    if os.path.islink(staging) or _holds_else(staging, {_DATA}):
        raise InvalidRequestError(f"{staging} is in the way: move it", path=staging)
    LocalStorage().remove_tree(staging)
    LocalStorage().make_folder(os.path.join(staging, _DATA))
    for name, size in made.files.items():
        source, target = os.path.join(backup, _DATA, name), os.path.join(staging, _DATA, name)
        if not os.path.isfile(source):
            raise CorruptionError(f"the backup lacks {source}: use another one", path=source)
        with storage_errors(source, "copy"):
            copied = copy_file(source, target)
        if copied != (size, checksums[name]):
            raise ChecksumError(f"{source} of the backup is not what was written: use another one", path=source)
        sync_file(target)
    LocalStorage().rename(os.path.join(staging, _DATA), folder)
    LocalStorage().remove_tree(staging)
    return made


def _holds_else(folder: str, known: set[str]) -> bool:
    """Whether there is something else at a path than nothing, or a folder with no more than what is known."""
    with storage_errors(folder, "look at"):
        return os.path.lexists(folder) and (not os.path.isdir(folder) or bool(set(os.listdir(folder)) - known))


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
        raise InvalidRequestError(
            f"{destination} holds a backup or something else already: name a folder that is new or empty",
            path=destination,
        )
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


@dataclass
class _Copy:
    """What was copied of tables that are of one moment; that moment, where they have several logs, or jobs publish to
    them.

    Attributes:
        tables: their ids.
        inside: metadata files of the lakes in the folder, by table.
        outside: tables whose lake lies elsewhere.
    """

    tables: frozenset[str]
    inside: dict[str, list[str]]
    outside: list[str]
    moment: Moment | None = None


class _Passed(Exception):
    """What is copied now does not fit to what was before: it went on too fast."""


def _copy_group(
    tables: Sequence[TableHandle], folder: str, data: str, report: Report, *, cut: bool, last: bool
) -> _Copy | None:
    """Copy the lakes, then what they keep of the changelogs, then the logs, so that none is behind; ``cut`` to one
    moment, or each as it is.

    Returns:
        None where it is to begin anew, as files that the owner trims, cleans up and drops make it, and so do a change
        of columns, and what takes rows out of a lake; the ``last`` time it raises.
    """
    handles = [handle for table in tables if (handle := _still_there(table))]
    for table in tables:
        LocalStorage().remove_tree(os.path.join(data, _table_folder(table)))
    for handle in handles:
        report(str(handle.desc.path))
    try:
        with contextlib.ExitStack() as held:
            return _copied(handles, folder, data, held, cut=cut)
    except (LakeFileMissingError, LakeStateError, SchemaChangedError):
        if last:
            raise
    except (FileNotFoundError, TableNotFoundError, _Passed) as e:
        if last:
            names = ", ".join(str(table.desc.path) for table in tables)
            raise UnavailableError(f"files of {names} keep going while they are copied ({e}): try again") from e
    tables[0].env.clock.sleep(_PAUSE_SECONDS)  # a table is being dropped, perhaps, its lake first
    return None


def _still_there(table: TableHandle) -> TableHandle | None:
    """Under the definition in force; None for one that was dropped."""
    with contextlib.suppress(TableNotFoundError):
        handle = table.now()
        handle.log.watermarks()
        return handle
    return None


def _copied(
    handles: Sequence[TableHandle],
    folder: str,
    data: str,
    held: contextlib.ExitStack,
    *,
    cut: bool,
) -> _Copy:
    copy = _Copy(frozenset(handle.desc.table_id for handle in handles), {}, [])
    marks: dict[str, LakeMark | None] = {}
    for handle in handles:
        sides = [found for side in handle.desc.lake_tables if (found := _copy_lake(handle, side, folder, data, held))]
        if sides:
            copy.inside[handle.desc.table_id] = [pointer for pointer, _ in sides]
            marks[handle.desc.table_id] = sides[0][1]
        elif handle.desc.lake:
            copy.outside.append(handle.desc.table_id)
    files = OpenFiles(held)
    if cut:
        copy.moment = moment = Moment.now(os.path.join(folder, "metadata.db"), handles)
        if moment is None:
            raise _Passed("jobs publish all the time")
        # What is open by now stays, whoever trims, or carries out what was decided.
        for handle in handles:
            for name in moment.staged(handle.desc.table_id, _table_folder(handle)):
                files.open(os.path.join(folder, name))
        for handle in handles:
            for _, tablet in _tablet_folders(folder, handle):
                files.open_all(os.path.join(folder, tablet), _LOG_FILES)
    for handle in handles:
        starts = _copy_logs(handle, folder, data, copy.moment, files)
        if handle.desc.table_id in marks:
            _require_reaching(handle, starts, marks[handle.desc.table_id], copy.moment)
    return copy


def _copy_logs(
    handle: TableHandle, folder: str, data: str, moment: Moment | None, files: OpenFiles
) -> dict[TabletKey, Offset]:
    """The logs of a table, as they are, or were at a moment, with what waits to be published; where they begin."""
    table_id, starts, surplus = handle.desc.table_id, {}, False
    if moment is None:
        for key, tablet in _tablet_folders(folder, handle):
            log = _copy_tablet(os.path.join(folder, tablet), os.path.join(data, tablet), handle, files)
            starts[key] = log.log_start_offset
        return starts
    for name in moment.staged(table_id, _table_folder(handle)):
        files.copy(os.path.join(folder, name), os.path.join(data, name))
    later = moment.later(table_id)
    for key, tablet in _tablet_folders(folder, handle):
        if key in moment.logs[table_id]:
            source, target, then = os.path.join(folder, tablet), os.path.join(data, tablet), moment.logs[table_id][key]
            log = _copy_tablet(source, target, handle, files, then, later)
            starts[key] = log.log_start_offset
            surplus |= any(map(later, _without_rows_at_the_end(log)))
    if surplus and not moment.lasts(os.path.join(folder, "metadata.db")):
        raise _Passed(f"a checkpoint of {handle.desc.path} was taken that knows of later batches")
    return starts


def _without_rows_at_the_end(log: LogTablet) -> Iterator[WriterStamp]:
    """Of a log that ends where its checkpoint was taken, the batches there that had no rows."""
    end = log.log_end_offset
    if log.checkpoint is None or log.checkpoint_offset != end:
        return
    for writer in log.checkpoint.footer.writers:
        answers = zip(*(writer.answers[i::3] for i in range(3)), strict=True)
        for sequence, start, after in answers:
            if start == after == end:
                yield WriterStamp(writer.writer_id, sequence, epoch=writer.epoch)


def _require_reaching(
    handle: TableHandle, starts: Mapping[TabletKey, Offset], mark: LakeMark | None, moment: Moment | None
) -> None:
    """Return if the copied logs reach back to what the copied lake has, of which no rows went since."""
    ends = {} if mark is None else mark.offsets
    followed = {} if mark is None else mark.overwritten
    overwritten = {} if moment is None else moment.overwritten(handle.desc.table_id)
    for key, start in starts.items():
        before = overwritten.get(key, 0)
        if start > (before if before > followed.get(key, 0) else ends.get(key, 0)):
            raise _Passed(f"the log of {key} was trimmed")
    if mark is not None and _was_emptied(handle, mark):
        raise _Passed(f"{handle.desc.path} was truncated")


def _was_emptied(handle: TableHandle, mark: LakeMark) -> bool:
    """Whether the lake had no rows at some time after this mark."""
    version = format_of(handle.desc).at(handle.desc, handle.lake()).load()
    after = mark.sequence_number or 0
    since = itertools.takewhile(lambda s: s.sequence_number > after, version.lineage())
    return any(snapshot.records == 0 for snapshot in since)


def _table_folder(handle: TableHandle) -> str:
    desc = handle.desc
    return f"tables/{desc.origin}-{desc.table_id[:8]}"


def _tablet_folders(folder: str, handle: TableHandle) -> list[tuple[TabletKey, str]]:
    """Where the logs of a table are that there are by now."""
    base, table_id = _table_folder(handle), handle.desc.table_id
    numbers = {"": 0}
    if handle.desc.partition_by:
        with database(os.path.join(folder, "metadata.db")) as db:
            numbers = dict(db.execute("select name, id from partitions where table_id = ? order by id", (table_id,)))
    return [
        (TabletKey(name, bucket), path)
        for name, number in numbers.items()
        for bucket in range(handle.desc.buckets)
        if os.path.isdir(os.path.join(folder, path := f"{base}/partition-{number}/bucket-{bucket}"))
    ]


def _copy_tablet(
    source: str,
    target: str,
    handle: TableHandle,
    files: OpenFiles,
    then: tuple[Offset, Offset] | None = None,
    later: Callable[[WriterStamp], bool] = lambda _: False,
) -> LogTablet:
    """The files of a log as they are listed at one moment, each up to some byte: what a crash could have left. Opening
    them once cuts the batch that was being written, checks what is there, and notes how far it goes.

    Args:
        then: where it began and ended at an earlier moment, which it is cut to; ``later`` as of `cut_log`.

    Returns:
        The copy, closed.
    """
    for name in files.names(source, _LOG_FILES):
        files.copy(os.path.join(source, name), os.path.join(target, name))
    if then is not None and not cut_log(LocalStorage(), target, then[1], later):
        raise _Passed(f"a checkpoint was taken in {source}")
    segment_bytes = handle.desc.properties.segment_bytes
    log = LogTablet(LocalStorage(), target, segment_bytes=segment_bytes, epoch=_ANY_EPOCH)
    try:
        if then is not None and (log.log_start_offset > then[0] or log.log_end_offset != then[1]):
            raise _Passed(f"the log in {source} went on")
        return log
    finally:
        log.close()


def _copy_lake(
    handle: TableHandle, side: TableDescriptor, folder: str, data: str, held: contextlib.ExitStack
) -> tuple[str, LakeMark | None] | None:
    """Copy all files of one version of a lake table, of which some may have been copied before; returns its metadata
    file and its mark, None when it lies outside. A lease holds it until ``held`` ends."""
    if side.lake is None:
        return None
    info = handle.lake(changelog=side is not handle.desc)
    inside = f"file://{folder}/lake/"
    if not info.metadata_location.startswith(inside) or os.path.realpath(f"{folder}/lake") != f"{folder}/lake":
        return None
    from lakehead.iceberg.inventory import inventory

    (lease,) = handle.leases.open([handle.leased(m.LakeUse(metadata=info.metadata_location))])
    held.callback(handle.leases.release, lease.lease)
    wanted = set()
    for address, needed in inventory(info):
        if not address.startswith(inside):
            continue
        name = address.removeprefix(f"file://{folder}/")
        try:
            if not os.path.lexists(os.path.join(data, name)):  # they never change
                copy_file(os.path.join(folder, name), os.path.join(data, name))
            wanted.add(name)
        except FileNotFoundError:
            if needed:
                raise
    for name in _files_in(data, _lake_folder(side)):
        if name not in wanted:
            LocalStorage().remove(os.path.join(data, name))  # of an earlier version
    return info.metadata_location, mark_of(format_of(side).at(side, info).load())


def _lake_folder(side: TableDescriptor) -> str:
    return f"lake/{side.origin.database}/{side.origin.table}-{side.table_id}"


def _files_in(data: str, folder: str) -> list[str]:
    found = os.walk(os.path.join(data, folder))
    return [os.path.relpath(os.path.join(at, name), data) for at, _, names in found for name in names]


def _copy_metadata(
    folder: str,
    data: str,
    acked: Mapping[tuple[str, bytes], int],
    copies: Sequence[_Copy],
) -> dict[str, m.TableInfo]:
    """The metadata of the tables that were copied; their definitions by id.

    Epochs of writers are those of now, not lower than any in a log; what the writers had seen answered is as of before
    the logs were copied, so that no log lacks it. How far jobs had published, and which partitions were overwritten, is
    as of the moment at which the copied logs end.
    """
    target = os.path.join(data, "metadata.db")
    copy_database(os.path.join(folder, "metadata.db"), target)
    with database(target) as db:
        stored = [msgspec.msgpack.decode(info, type=m.TableInfo) for (info,) in db.execute("select info from tables")]
        copied = [i for i in stored if any(i.table_id in copy.tables for copy in copies)]
        for gone in {i.table_id for i in stored} - {i.table_id for i in copied}:
            for name in (
                "tables", "schemas", "partitions", "writers", "truncations", "overwritten", "publications", "planned",
            ):  # fmt: skip
                db.execute(f"delete from {name} where table_id = ?", (gone,))
        for table_id, writer_id in db.execute("select table_id, writer_id from writers").fetchall():
            db.execute(
                "update writers set acked_through = ? where table_id = ? and writer_id = ?",
                (acked.get((table_id, writer_id), -1), table_id, writer_id),
            )
        for name in ("publications", "overwritten"):
            db.execute(f"delete from {name}")
        for copy in copies:
            if copy.moment is not None:
                copy.moment.write(db, {i.table_id for i in copied})
        db.execute("delete from dropped")
        disown(db)
    return {i.table_id: i for i in copied}


def _log_folder(info: m.TableInfo) -> str:
    return f"{info.database}.{info.table}-{info.table_id[:8]}"


def _writers_acked(folder: str) -> dict[tuple[str, bytes], int]:
    with database(os.path.join(folder, "metadata.db")) as db:
        rows = db.execute("select table_id, writer_id, acked_through from writers").fetchall()
    return {(str(table_id), bytes(writer_id)): int(acked) for table_id, writer_id, acked in rows}


def _keep_tables(data: str, kept: Mapping[str, m.TableInfo]) -> None:
    """Remove what was copied of tables that were dropped meanwhile."""
    folders = {_log_folder(info) for info in kept.values()}
    for name in LocalStorage().list_files(os.path.join(data, "tables")):
        if name not in folders:
            LocalStorage().remove_tree(os.path.join(data, "tables", name))


def _point_catalog(data: str, pointers: Sequence[str]) -> None:
    """Have the copied catalog name the copied lake tables alone, at the versions that were copied."""
    with database(os.path.join(data, "lake", "catalog.db")) as db:
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
            files[os.path.relpath(path, data)] = digest(path)
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
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        raise CorruptionError(f"{path} cannot be read ({e}): use another backup", path=path) from e
    if any(os.path.isabs(name) or ".." in name.split(os.sep) for name in files):
        raise CorruptionError(f"{path} names files outside the backup: use another one", path=path)
    made = Backup(backup, tables, outside, {name: size for name, (size, _) in files.items()})
    return made, {name: checksum for name, (_, checksum) in files.items()}
