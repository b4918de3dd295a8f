"""Orphan clean-up: files in a lake table's folder that nothing names any more.

A crash between writing a file and committing it leaves one, and so does a commit that lost, or whose outcome was never
known. They cost room and nothing else, so this errs on the side of keeping. A file goes when it is of a kind that
Iceberg tables are made of, lies in the table's folder and in no other table's, is older than any round may take, and
when nothing reachable has even its name. Names are unique, addresses are not: ``file:/x`` is ``file:///x``.

Age is judged by clocks, and a process may stand still for long. So before anything goes the clean-up is announced in
the table, and a round that was planned before can no longer commit.
"""

from __future__ import annotations

import datetime as dt
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil

from lakehead.env.clock import Clock
from lakehead.env.randomness import SystemRandomness
from lakehead.env.storage import storage_errors
from lakehead.env.threads import WorkerPool
from lakehead.errors import CommitConflictError, LakeStateError, UnavailableError
from lakehead.iceberg.data_files import discard_files
from lakehead.iceberg.file_io import FILES_AT_ONCE, lake_files, locate_file
from lakehead.iceberg.known_metadata import read_metadata
from lakehead.iceberg.manifests import manifests_of
from lakehead.iceberg.own_place import require_collectable, require_own_folder
from lakehead.iceberg.rowdelta import RowDelta
from lakehead.iceberg.settings import require_format
from lakehead.iceberg.staging import StagingTransaction
from lakehead.lake.marks import CLEANUP
from lakehead.protocol.messages import LakeUse

if TYPE_CHECKING:
    from pyiceberg.io import FileIO
    from pyiceberg.manifest import ManifestFile
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot

_ANNOUNCEMENTS_MAX = 5
_LOOKS_MAX = 5
_METADATA = (".metadata.json", ".metadata.json.gz")
_KINDS = (".parquet", ".orc", ".avro", ".puffin", ".stats", *_METADATA)


@dataclass(frozen=True)
class Orphan:
    """A file that nothing names.

    Attributes:
        path: its address, spelled as the table's location is.
        size: bytes.
        modified: when it was last written, by the storage's clock; UTC.
    """

    path: str
    size: int
    modified: dt.datetime


def remove_orphans(
    load_table: Callable[[], Table],
    *,
    older_than_ms: int,
    clock: Clock,
    also_reachable: Iterable[LakeUse] = (),
    dry_run: bool = False,
) -> list[Orphan]:
    """Remove the orphans of one lake table.

    Args:
        load_table: loads it anew from its catalog.
        older_than_ms: age from which on a file may go; greater than the longest round of any engine that writes to it.
        also_reachable: what somebody still reads, though the table may have expired it.
        dry_run: only say what would go.

    Returns:
        What was removed, by path.

    Raises:
        LakeStateError: the table lacks a file that it names, a table that cannot be read shares its folder, or others
            may need what lies there; nothing was removed.
        UnavailableError: what a running read needs cannot be known, or the catalog does not answer; nothing was
            removed. Try again later.
        CommitConflictError: others keep changing the table; nothing was removed.
        StorageError: the storage refused; some may be removed.
    """
    table = load_table()
    require_format(".".join(table.name()), table.metadata.format_version)
    require_collectable(table)
    require_own_folder(table)
    fs, folder = locate_file(table.io, table.location())
    oldest = dt.datetime.fromtimestamp((clock.now_us() // 1000 - older_than_ms) / 1000, dt.UTC)
    # Files first: what is committed after this look is reachable in the next.
    listed = list(_list_files(fs, folder))
    reached = Reached(table.io)
    table = reached.add_current(load_table)
    for use in also_reachable:
        reached.add_use(use, table.metadata)
    others = list(_folders_of_others(table, fs, listed, reached))
    orphans = []
    for info in listed:
        old = info.mtime is not None and info.mtime <= oldest
        if old and info.base_name not in reached.names and not info.path.startswith(tuple(others)):
            orphans.append(info)
    if orphans and not dry_run:
        # A round that was planned before cannot commit any more; what landed until now is reached.
        _announce(load_table)
        table = reached.add_current(load_table)
        orphans = [i for i in orphans if i.base_name not in reached.names]
        for info in orphans:
            with storage_errors(info.path, "remove"):
                try:
                    fs.delete_file(info.path)
                except FileNotFoundError:
                    continue
    base = table.location().rstrip("/")
    start = len(folder.rstrip("/"))
    return sorted((Orphan(base + i.path[start:], i.size, i.mtime) for i in orphans), key=lambda o: o.path)


def _announce(load_table: Callable[[], Table]) -> None:
    """Commit a snapshot without files that says that orphans will be removed: rounds that were planned before are
    refused from then on, and what landed before is in the version that it was made from.

    Raises:
        CommitConflictError: others keep changing the table.
        UnavailableError: the catalog does not answer; it may be announced.
        StorageError: the disk refused; it is not announced.
    """
    for _ in range(_ANNOUNCEMENTS_MAX):
        table = load_table()
        transaction = StagingTransaction(table)
        values = {CLEANUP: SystemRandomness().uuid_hex()}
        delta = RowDelta(transaction, values)
        try:
            with lake_files():
                delta.commit()
            transaction.set_properties(values)
            staged = transaction.staged()
        except BaseException:
            delta.discard()
            raise
        try:
            staged.publish()
            return
        except CommitFailedException:
            # A request that was delivered twice is refused the second time: the table may be what was staged.
            if load_table().metadata.snapshot_by_id(delta.snapshot_id) is not None:
                return
            delta.discard()
            discard_files(table.io, staged.written)
        except Exception as e:
            raise UnavailableError(f"the lake's catalog did not take the announcement of a clean-up: {e}") from e
    raise CommitConflictError("others keep changing the lake table while orphans are to be removed: try again")


def _list_files(fs: FileSystem, folder: str) -> Iterator[FileInfo]:
    for info in fs.get_file_info(FileSelector(folder, recursive=True, allow_not_found=True)):
        if info.type == FileType.File and info.base_name.endswith(_KINDS):
            yield info


class Reached:
    """All files that metadata leads to.

    Attributes:
        addresses: as whoever names them spells them.
        names: without their folders.
    """

    def __init__(self, io: FileIO) -> None:
        self._io = io
        self.addresses: set[str] = set()
        self.names: set[str] = set()
        self._manifests: set[str] = set()

    def _add(self, addresses: Iterable[str]) -> None:
        for address in addresses:
            self.addresses.add(address)
            name = address.rpartition("/")[2]
            self.names |= {name, unquote(name)}

    def add_metadata(self, location: str, metadata: TableMetadata, *, may_lack: bool) -> None:
        """A metadata file, those before it, and all that its snapshots hold; ``may_lack`` passes over what is gone."""
        self._add([location, *(entry.metadata_file for entry in metadata.metadata_log)])
        self._add(s.statistics_path for s in (*metadata.statistics, *metadata.partition_statistics))
        self.add_snapshots(metadata.snapshots, may_lack=may_lack)

    def add_current(self, load_table: Callable[[], Table]) -> Table:
        """All that a table leads to now, and that version of it: what is gone because others expired it meanwhile, the
        next version does not name.

        Raises:
            LakeStateError: a file that it names is gone.
        """
        for left in reversed(range(_LOOKS_MAX)):
            table = load_table()
            try:
                self.add_metadata(table.metadata_location, table.metadata, may_lack=False)
                break
            except LakeStateError:
                if not left or load_table().metadata_location == table.metadata_location:
                    raise
        return table

    def add_use(self, use: LakeUse, now: TableMetadata) -> None:
        """What somebody reads, of a table of which all that it lists now is reached."""
        if use.snapshot is not None and now.snapshot_by_id(use.snapshot) is not None:
            self._add([use.metadata])
        else:
            self.add_metadata(use.metadata, metadata_in_use(self._io, use.metadata), may_lack=True)

    def add_snapshots(self, snapshots: Sequence[Snapshot], *, may_lack: bool) -> None:
        """All that these snapshots hold."""
        self._add(s.manifest_list for s in snapshots)
        with WorkerPool(FILES_AT_ONCE) as pool:
            manifests: dict[str, ManifestFile] = {}
            for found in pool.map(lambda s: self._read(s, self._list_manifests, may_lack), snapshots):
                manifests |= {m.manifest_path: m for m in found}
            new = [m for path, m in manifests.items() if path not in self._manifests]
            self._add(m.manifest_path for m in new)
            for paths in pool.map(lambda m: self._read(m, self._list_entries, may_lack), new):
                self._add(paths)
            self._manifests |= manifests.keys()

    def _list_manifests(self, snapshot: Snapshot) -> list[Any]:
        return list(manifests_of(snapshot, self._io))

    def _list_entries(self, manifest: ManifestFile) -> list[Any]:
        return [e.data_file.file_path for e in manifest.fetch_manifest_entry(self._io)]

    def _read(self, what: Any, read: Callable[[Any], list[Any]], may_lack: bool) -> list[Any]:
        try:
            return read(what)
        except FileNotFoundError as e:
            if may_lack:
                return []
            raise LakeStateError(
                f"the lake table lacks a file that a snapshot names ({e}): restore it, or expire that snapshot, before"
                " orphans are removed"
            ) from e


def metadata_in_use(io: FileIO, location: str) -> TableMetadata:
    """What a metadata file says at which somebody reads the table.

    Raises:
        CorruptionError: it is damaged.
        UnavailableError: it is gone, or the storage does not say.
    """
    try:
        return read_metadata(io, location)
    except OSError as e:
        raise UnavailableError(
            f"the metadata file {location}, at which somebody reads the lake table, cannot be read ({e}), so what he"
            " needs is not known: remove files when the read has ended",
            path=location,
        ) from e


def _folders_of_others(table: Table, fs: FileSystem, listed: Iterable[FileInfo], reached: Reached) -> Iterator[str]:
    """Folders inside the table's that are other tables'; what tables in the very same folder hold is marked reached.

    A catalog may give a new table the folder of one that was dropped, and dropped tables can be registered again.
    """
    own = locate_file(table.io, table.location())[1].rstrip("/")
    for info in listed:
        if not info.base_name.endswith(_METADATA) or info.base_name in reached.names:
            continue
        values = _read_json(fs, info)
        if not isinstance(values, dict) or values.get("table-uuid") == str(table.metadata.table_uuid):
            continue
        try:
            metadata = TableMetadataUtil.parse_obj(values)
        except Exception as e:
            raise LakeStateError(
                f"{info.path}, in the folder of lake table {'.'.join(table.name())}, is the metadata of a table of an"
                f" unknown kind ({e}), so whose files are whose cannot be told: move one of them",
                path=info.path,
            ) from e
        theirs = locate_file(table.io, metadata.location)[1].rstrip("/")
        if theirs.startswith(f"{own}/"):
            yield f"{theirs}/"
        reached.add_metadata(info.path, metadata, may_lack=True)


def _read_json(fs: FileSystem, info: FileInfo) -> object:
    """What a metadata file says; None when its writer was stopped half-way, so that nobody can have committed it, and
    when it is gone: tables that go on remove their oldest."""
    try:
        with fs.open_input_stream(info.path, compression=None) as stream:
            data = stream.read()
    except FileNotFoundError:
        return None
    try:
        return json.loads(gzip.decompress(data) if ".gz" in info.base_name else data)
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error):
        return None
