"""What a server knows of its lake tables, from their catalog: the server's `LakeState`.

A lake table belongs to one folder: its property `lakehead.owner` names the start of the folder that claimed it last. A
copy of the folder is not that folder. What lies inside the copy was copied with it, so it follows it (see
`lakehead.iceberg.relocation`) and is the copy's own; what lies elsewhere is the original's until `adopt`.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table.update import AssertRefSnapshotId

from lakehead.config import LakeConfig
from lakehead.env.clock import Clock
from lakehead.errors import CommitConflictError, FolderCopiedError, LakeStateError, UnavailableError
from lakehead.iceberg.contract import definition_of
from lakehead.iceberg.data_files import discard_files
from lakehead.iceberg.evolution import evolve, evolved
from lakehead.iceberg.iceberg_table import IcebergLakeTable
from lakehead.iceberg.lake_catalog import LakeCatalog, catalog_errors
from lakehead.iceberg.proof import manifest_paths, missing_files
from lakehead.iceberg.reader_sessions import ReaderSessions
from lakehead.iceberg.relocation import relocate_table
from lakehead.iceberg.staging import StagingTransaction
from lakehead.iceberg.version import read_mark
from lakehead.lake.lake_table import missing_file
from lakehead.lake.marks import INCARNATION, OWNER
from lakehead.lake.pinned_lake import checked_mark
from lakehead.protocol.messages import LakeReply
from lakehead.types import TableDescriptor, TabletKey

if TYPE_CHECKING:
    from pyiceberg.table import Table

    from lakehead.iceberg.lake_catalog import LakeCatalog
    from lakehead.server.lake_state import LakeOwner


_ATTEMPTS_MAX = 20


class CatalogLakeState:
    """Lake tables of one PyIceberg catalog, opened when the first one is used. Thread-safe."""

    def __init__(self, config: LakeConfig, folder: str, clock: Clock) -> None:
        self._config = config
        self._sessions = ReaderSessions(config, clock)
        self._folder = os.path.abspath(folder)
        self._lake = os.path.join(self._folder, "lake")
        # A link to elsewhere is copied as a link: then two folders have one lake.
        inside = os.path.realpath(self._lake) == os.path.join(os.path.realpath(folder), "lake")
        self._inside = inside and not config.catalog
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._one_at_a_time = threading.Lock()
        self._catalog: LakeCatalog | None = None
        self._proven: dict[str, frozenset[str]] = {}
        self._owner: LakeOwner | None = None
        self._in_place: set[str] = set()

    kinds = frozenset({"iceberg"})

    def serve(self, owner: LakeOwner) -> None:
        """See `LakeState.serve`."""
        self._owner = owner

    @property
    def _me(self) -> LakeOwner:
        assert self._owner is not None, "the server says who it is before it asks"
        return self._owner

    def _open(self) -> LakeCatalog:
        with self._lock:
            if self._catalog is None:
                self._catalog = LakeCatalog(self._config, self._folder)
            return self._catalog

    def _alone(self, desc: TableDescriptor) -> threading.Lock:
        """Held while one lake table is looked at or changed. Where the catalog is a server, each table has its own: one
        that is answered late would keep all others waiting. The file beside the data takes one at a time anyway."""
        if not self._config.catalog:
            return self._one_at_a_time
        with self._lock:
            return self._locks.setdefault(desc.table_id, threading.Lock())

    def create(self, desc: TableDescriptor) -> None:
        """See `LakeState.create`."""
        with self._alone(desc):
            self._relocate(desc)
            catalog, owner = self._open(), str(self._me.incarnation)
            try:
                catalog.create_table(desc, owner=owner)
            except LakeStateError as e:
                found = e.context.get("found")
                if found is None or not self._removed_leftover(desc, str(found)):
                    raise
                catalog.create_table(desc, owner=owner)

    def _removed_leftover(self, desc: TableDescriptor, found: str) -> bool:
        """Drop what has a new table's name in the lake, if it is of a table of ours that never was: whoever made it was
        not told so, and could not take it back, as the catalog was away."""
        left = dataclasses.replace(desc, table_id=found)
        if self._me.has_lake_table(found):
            return False
        table = self._open().load(left)
        if table.metadata.snapshots or OWNER not in table.properties or not self._is_own(table):
            return False
        self._open().drop_table(left, purge=True)
        return True

    def drop(self, desc: TableDescriptor, *, purge: bool) -> None:
        """See `LakeState.drop`."""
        with self._alone(desc):
            try:
                self._load_own(desc)
            except FolderCopiedError:
                if purge:
                    raise
                return
            except LakeStateError:  # missing, or another table's: the catalog decides
                pass
            self._open().drop_table(desc, purge=purge)
            self._in_place.discard(desc.table_id)
            self._proven.pop(desc.table_id, None)
        with self._lock:
            self._locks.pop(desc.table_id, None)

    def info(self, desc: TableDescriptor, *, reading: bool = False) -> LakeReply:
        """See `LakeState.info`."""
        with self._alone(desc):
            table = self._follow(desc)
            catalog = self._open()
        storage = catalog.storage_properties(table)
        return LakeReply(
            metadata_location=table.metadata_location,
            catalog_name=self._config.name,
            catalog_properties=catalog.properties,
            storage_properties=self._sessions.storage(table.location(), storage) if reading else storage,
            incarnation=str(self._me.incarnation),
            owner=table.properties.get(OWNER, ""),
            name=".".join(table.name()),
        )

    def require_alterable(self, desc: TableDescriptor) -> None:
        """See `LakeState.require_alterable`."""
        with self._alone(desc):
            table = self._load_own(desc)
        evolved(table, desc, desc.schemas.of(definition_of(table, desc)))

    def require_free(self, desc: TableDescriptor, *, besides: Sequence[str]) -> None:
        """See `LakeState.require_free`."""
        with self._alone(desc):
            self._open().require_free(desc, besides=besides)

    def _follow(self, desc: TableDescriptor) -> Table:
        """The lake table, once it has the table's name and definition."""
        for _ in range(_ATTEMPTS_MAX):
            table = self._open().named_as(self._load_own(desc), desc, leaves=self._is_own)
            try:
                with catalog_errors(self._config.name):
                    evolve(table, desc)
                return table
            except CommitFailedException:
                continue
        raise UnavailableError(f"others keep changing the lake table of {desc.path}: try again", table=str(desc.path))

    def tiered_offsets(self, desc: TableDescriptor) -> Mapping[TabletKey, int]:
        """See `LakeState.tiered_offsets`."""
        with self._alone(desc):
            try:
                mark = read_mark(self._load_own(desc))
            except FolderCopiedError:
                return {}
        return mark.offsets if mark else {}

    def folders(self, desc: TableDescriptor) -> Sequence[str]:
        """See `LakeState.folders`."""
        # As `LakeCatalog` chooses it when the lake table is made.
        return [f"{self._lake}/{desc.origin.database}/{desc.origin.table}-{desc.table_id}"] if self._inside else []

    def proven_offsets(
        self, desc: TableDescriptor, overwritten: Mapping[TabletKey, int] = {}
    ) -> Mapping[TabletKey, int]:
        """See `LakeState.proven_offsets`."""
        with self._alone(desc):
            try:
                table = self._follow(desc)
            except FolderCopiedError:
                return {}
        lake = IcebergLakeTable(lambda: table, desc)
        mark = checked_mark(desc, lake, lake.load())
        if mark is None:
            return {}
        for missing in missing_files(table, proven=self._proven.get(desc.table_id, ())):
            raise missing_file(missing.path)
        self._proven[desc.table_id] = frozenset(manifest_paths(table))
        return mark.held(overwritten)

    def adopt(self, desc: TableDescriptor, ends: Mapping[TabletKey, int]) -> bool:
        """See `LakeState.adopt`."""
        me = self._me
        with self._alone(desc):
            self._relocate(desc, adopt=True)
            table = self._open().load(desc)
            if self._is_own(table):
                return False
            last = table.properties.get(INCARNATION)
            if last is not None and not me.is_ancestor(last):
                raise FolderCopiedError(
                    f"the lake table of {desc.path} holds rows of {last}, another copy of this folder, written after"
                    " the copy was made, so it and this log are two histories: drop the table here without purge, or go"
                    " on with that copy",
                    table=str(desc.path),
                    owner=last,
                )
            lake = IcebergLakeTable(lambda: table, desc)
            mark = checked_mark(desc, lake, lake.load())
            for key, tiered in (mark.offsets if mark else {}).items():
                if ends.get(key, 0) < tiered:
                    raise LakeStateError(
                        f"the log of {desc.path} tablet {key} ends at {ends.get(key, 0)}, but the lake holds rows up to"
                        f" {tiered}, which are not of this log: drop the table here without purge, or go on with the"
                        " folder that wrote them",
                        table=str(desc.path),
                        tablet=str(key),
                    )
            self._claim(table, desc)
        return True

    def _claim(self, table: Table, desc: TableDescriptor) -> None:
        """Have the lake table belong to this folder, if it is still as it was looked at: whoever it belonged to until
        now may have committed since, and its rows are not of this log."""
        transaction = StagingTransaction(table)
        current = table.metadata.current_snapshot_id
        as_it_was = AssertRefSnapshotId.model_validate({"ref": "main", "snapshot-id": current})
        transaction._apply((), (as_it_was,))
        transaction.set_properties({OWNER: str(self._me.incarnation)})
        staged = transaction.staged()
        try:
            with catalog_errors(self._config.name):
                staged.publish()
        except CommitFailedException as e:
            discard_files(table.io, staged.written)
            raise CommitConflictError(
                f"others changed the lake table of {desc.path} while it was adopted: try again", table=str(desc.path)
            ) from e

    # ---- whose it is --------------------------------------------------------------------------------------------

    def _load_own(self, desc: TableDescriptor) -> Table:
        self._relocate(desc)
        table = self._open().load(desc)
        if not self._is_own(table):
            raise self._copied(desc)
        return table

    def _is_own(self, table: Table) -> bool:
        owner = table.properties.get(OWNER)
        if self._inside:
            return True
        # Lakes of older versions name no owner: they are of the folder that has the table, if that is no copy.
        return self._me.is_own(owner) if owner is not None else not self._me.is_copy

    def _copied(self, desc: TableDescriptor) -> FolderCopiedError:
        return FolderCopiedError(
            f"the lake table of {desc.path} belongs to the folder that {self._folder} is a copy of, or to another copy"
            " of it, so it is neither read nor changed from here: if that folder is given up, run"
            f" 'lakehead adopt {desc.path} --uri {self._folder}'",
            table=str(desc.path),
            folder=self._folder,
        )

    def _relocate(self, desc: TableDescriptor, *, adopt: bool = False) -> None:
        """Have a lake beside the data follow its folder."""
        if self._config.catalog or desc.table_id in self._in_place:
            return

        if not self._inside and self._me.is_copy and not adopt:
            return
        catalog_db, owner = os.path.join(self._lake, "catalog.db"), str(self._me.incarnation)
        relocate_table(catalog_db, self._config.name, desc, self._lake, owner)
        self._in_place.add(desc.table_id)
