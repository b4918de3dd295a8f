"""`TableLake`: a table's Iceberg side."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from lakehead.api.display import Displayed, Handle
from lakehead.client.table import TableHandle
from lakehead.config import parse_duration_ms
from lakehead.errors import CommitConflictError, LakeheadError, LakeStateError
from lakehead.lake.formats import format_of
from lakehead.lake.listing import files_table
from lakehead.lake.marks import COLLECTED
from lakehead.lake.pinned_lake import PinnedLake
from lakehead.protocol.messages import LakeReply, LakeUse
from lakehead.protocol.tiering import RoundInfo
from lakehead.tiering.executor import here
from lakehead.types import TIMESTAMP_TYPE, Epoch, Offset, TableDescriptor, TabletId, TabletKey

if TYPE_CHECKING:
    from lakehead.iceberg.version import IcebergTable
    from lakehead.lake.lake_table import LakeTable
    from lakehead.tiering.commit import CommitLock, CommitResult
    from lakehead.tiering.compaction import CompactionResult, LakeSource
    from lakehead.tiering.executor import Executor
    from lakehead.tiering.expiry import ExpiryResult
    from lakehead.tiering.round_plan import HotSource

T = TypeVar("T")
_ORPHANS_SCHEMA = pa.schema(
    [
        pa.field("path", pa.string(), False),
        pa.field("size", pa.int64(), False),
        pa.field("modified", TIMESTAMP_TYPE, False),
    ]
)


@dataclass(frozen=True, repr=False)
class TieringResult(Displayed):
    """What one tiering round did.

    Attributes:
        snapshot_id: the lake snapshot it made; None when there was nothing to move.
        rows: rows added to the lake.
        deletes: lake rows taken away, because the round's changes replaced or deleted them.
        files: data and delete files written.
        offsets: exclusive end of what the lake holds now, per tablet.
    """

    snapshot_id: int | None
    rows: int
    deletes: int
    files: int
    offsets: Mapping[TabletId, int]

    def _facts(self) -> Mapping[str, object]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


class TableLake(Handle):
    """The Iceberg table behind a table, or the one that keeps its changelog, as of each call."""

    def __init__(self, handle: TableHandle, *, changelog: bool = False) -> None:
        self._opened = handle
        self._changelog = changelog

    def _current(self, call: Callable[[TableHandle], T]) -> T:
        """Call with the table under the definition in force: each call is of the lake as it is then."""
        return self._know(self._opened.now()).current(call, self._know)

    def _know(self, now: TableHandle) -> TableHandle:
        self._opened = now
        return now

    def _facts(self) -> Mapping[str, object]:
        desc = _side(self._opened, changelog=self._changelog)
        return {"table": repr(str(desc.path)), "format": desc.lake, "freshness": desc.properties.to_user()["freshness"]}

    @property
    def metadata_location(self) -> str:
        """URI of the current Iceberg metadata file, which any Iceberg reader opens."""
        return self._current(self._info).metadata_location

    @property
    def changelog(self) -> TableLake:
        """The Iceberg table ``t$changelog`` beside the one of a keyed table that was made with
        ``lake_changelog=True``: every record of the log that was tiered, ``__change_type`` among its columns.

        Raises:
            NoLakeError: the lake keeps no changelog.
        """
        _side(self._opened, changelog=True)
        return TableLake(self._opened, changelog=True)

    def iceberg(self) -> IcebergTable:
        """The table in PyIceberg, opened through its catalog."""
        from lakehead.iceberg.iceberg_table import native_table

        return native_table(self._current(self._lake))

    def _info(self, handle: TableHandle) -> LakeReply:
        return handle.lake(changelog=self._changelog)

    def _desc(self, handle: TableHandle) -> TableDescriptor:
        return _side(handle, changelog=self._changelog)

    def _lake(self, handle: TableHandle) -> LakeTable:
        return _lake_of(handle, changelog=self._changelog)

    def offsets(self) -> dict[TabletId, int]:
        """Exclusive end of what the lake holds, per tablet."""

        def found(handle: TableHandle) -> dict[TabletId, int]:
            view = PinnedLake.current(self._desc(handle), self._info(handle))
            return {handle.desc.tablet_id(k): o for k, o in view.offsets.items()}

        return self._current(found)

    def snapshots(self) -> pa.Table:
        """Lake snapshots, oldest first."""
        return self._current(lambda h: format_of(h.desc).at(self._desc(h), self._info(h)).snapshots())

    def files(self) -> pa.Table:
        """Data and delete files of the current lake snapshot."""
        return self._current(
            lambda h: files_table(PinnedLake.current(self._desc(h), self._info(h)).as_committed().plan())
        )

    def tier(self) -> TieringResult:
        """One tiering round of the table in this process; see `Connection.tier`."""
        result = self._current(lambda h: tier_table(h, _lake_of(h), h.log))
        offsets = {self._opened.desc.tablet_id(k): o for k, o in result.offsets.items()}
        return TieringResult(result.snapshot_id, result.rows, result.deletes, result.files, offsets)

    def adopt(self) -> bool:
        """Take the lake table over from the data folder that this one is a copy of, which must be given up: from then
        on that one is refused. A lake inside the folder needs none of this, each copy has its own.

        Returns:
            False when it was this folder's already.

        Raises:
            NoLakeError: the table has no lake.
            FolderCopiedError: another copy has committed since the copy was made; its rows are not of this log.
            LakeStateError: the lake holds more than this log.
        """
        return self._opened.adopt_lake()

    def compact(self) -> CompactionResult:
        """Write live rows of small files, and of files with many deleted rows, to new ones, until nothing is left to
        do. Every snapshot and every read finds what it found before; the tiering service does it by itself, unless the
        table has ``auto_maintenance=False``. A lake table to which another engine added columns is left to that engine:
        what it wrote into them would be lost.

        Raises:
            NoLakeError: the table has no lake.
            CommitConflictError: a round or another engine changed the lake meanwhile; what was done so far stays, try
                again.
            UnavailableError: the lake's catalog cannot be reached.
        """
        from lakehead.tiering.compaction import CompactionResult, compact

        done = CompactionResult(None, 0, 0, 0, True)
        while done.more:
            new = self._current(lambda h: compact(self._lake(h), self._desc(h), h.env))
            done = CompactionResult(
                new.snapshot_id or done.snapshot_id,
                done.rows + new.rows,
                done.files_before + new.files_before,
                done.files_after + new.files_after,
                new.more,
            )
        if done.snapshot_id is not None:
            _report(self._opened)
        return done

    def expire(self, older_than: str | float = "7d", *, keep: int = 20) -> ExpiryResult:
        """Take snapshots out of the lake's list, and remove the files that only they named. What a running read, a
        branch or a tag needs stays. Time travel ends where the list does.

        Args:
            older_than: age from which on a snapshot goes, such as ``"7d"`` or a number of seconds.
            keep: so many of the newest stay, whatever their age.

        Raises:
            NoLakeError: the table has no lake.
            InvalidRequestError: ``keep`` is below 1.
            CommitConflictError: a round or another engine changed the lake meanwhile; nothing was done, try again.
            UnavailableError: the catalog cannot be reached, or what a running read needs cannot be known now.
            LakeStateError: the lake was rolled back, or lacks a file.
        """
        from lakehead.tiering.expiry import expire
        from lakehead.tiering.expiry_plan import Retention

        retention = Retention(keep, parse_duration_ms(older_than, "older_than") * 1000)
        found = self._current(lambda h: expire(self._lake(h), retention, clock=h.env.clock, in_use=lambda: _in_use(h)))
        if found.snapshots:
            _report(self._opened)
        return found

    def remove_orphans(self, older_than: str | float = "1d", *, dry_run: bool = False) -> pa.Table:
        """Remove files in the table's lake folder that no lake snapshot names: crashes and lost commits leave some.

        Args:
            older_than: age from which on a file may go, such as ``"1d"`` or a number of seconds; greater than the
                longest foreign write. A round under way is refused when it commits, and run again.
            dry_run: only say what would go.

        Returns:
            What was removed: ``path``, ``size`` in bytes, ``modified``.

        Raises:
            NoLakeError: the table has no lake.
            LakeStateError: the lake is damaged, or shares its folder with a table that cannot be read.
            UnavailableError: the catalog cannot be reached, or what a running read needs cannot be known now.
            CommitConflictError: others kept changing the table; nothing was removed, try again.
        """
        from lakehead.iceberg.orphans import remove_orphans

        age = parse_duration_ms(older_than, "older_than")
        found = remove_orphans(
            self.iceberg,
            older_than_ms=age,
            clock=self._opened.env.clock,
            also_reachable=_in_use(self._opened),
            dry_run=dry_run,
        )
        return pa.Table.from_pylist([vars(o) for o in found], _ORPHANS_SCHEMA)


def _side(handle: TableHandle, *, changelog: bool) -> TableDescriptor:
    """What a lake table is called and has: the table's own, or that of its changelog."""
    return handle.desc.require_changelog() if changelog else handle.desc


def _lake_of(handle: TableHandle, *, changelog: bool = False) -> LakeTable:
    """The lake table, to commit to it."""
    return format_of(handle.desc).open(_side(handle, changelog=changelog), handle.lake(changelog=changelog))


def tier_table(
    handle: TableHandle,
    lake: LakeTable,
    source: HotSource,
    *,
    executor_of: Callable[[int], Executor] = here,
    epoch: int | None = None,
    records_max: int | None = None,
    commit_lock: CommitLock | None = None,
    job: str = "",
) -> CommitResult:
    """One tiering round of a table, here or on Spark, and what follows its commit.

    Where the lake keeps the changelog, its part is committed first: what the lake has of the table is always there.

    Args:
        source: the table's log, as the tasks reach it.
        executor_of, epoch, records_max, commit_lock: see `run_round`, and there for errors too.
        job: who runs it, for people.
    """
    from lakehead.tiering.round import HeldBack, run_round

    run = functools.partial(
        run_round,
        env=handle.env,
        executor_of=executor_of,
        epoch=epoch,
        records_max=records_max,
        commit_lock=commit_lock or contextlib.nullcontext(),
    )
    if handle.desc.changelog is None:
        result = run(lake, handle.desc, source)
    else:
        kept = run(_lake_of(handle, changelog=True), handle.desc.changelog, source)
        result = run(lake, handle.desc, HeldBack(source, kept.offsets))
        seconds = {"changelog": sum(kept.seconds.values()), **result.seconds}
        cpu_seconds = kept.cpu_seconds + result.cpu_seconds
        result = replace(result, seconds=seconds, cpu_seconds=cpu_seconds, more=kept.more or result.more)
    if result.snapshot_id is not None:
        _report(
            handle,
            RoundInfo(
                job=job,
                snapshot_id=result.snapshot_id,
                records=result.records,
                rows=result.rows,
                deletes=result.deletes,
                files=result.files,
                bytes=result.bytes,
                seconds=dict(result.seconds),
                cpu_seconds=result.cpu_seconds,
            ),
        )
    return result


_TRUNCATE_ATTEMPTS = 20


def empty_table(handle: TableHandle) -> Mapping[TabletKey, Offset]:
    """Take all rows of a table away; see `Table.truncate`."""
    desc = handle.desc
    if desc.lake is None or desc.keyed:
        return handle.truncate()
    from lakehead.tiering.truncation import empty_lake

    lake = _lake_of(handle)
    for left in reversed(range(_TRUNCATE_ATTEMPTS)):
        ends = handle.truncate()
        try:
            empty_lake(lake, desc, ends, handle.env)
            break
        except CommitConflictError:
            if not left:
                raise
    handle.truncate(ends)
    return ends


def maintain_table(
    handle: TableHandle,
    lake: LakeTable,
    *,
    epoch: Epoch,
    commit_lock: CommitLock,
    executor_of: Callable[[int], Executor] = here,
    source_of: Callable[[bool], LakeSource | None] = lambda changelog: None,
) -> bool:
    """A turn of a table's maintenance: one compaction, and expiry once there is nothing to compact.

    Args:
        executor_of, commit_lock: see `compact`.
        source_of: the lake, or what it keeps of the changelog, as the tasks reach it.

    Returns:
        Whether there is more to do.
    """
    from lakehead.tiering.compaction import compact
    from lakehead.tiering.expiry import expire
    from lakehead.tiering.expiry_plan import USUAL

    desc, more, changed = handle.desc, False, False
    for side in desc.lake_tables:
        changelog = side is not desc
        table = _lake_of(handle, changelog=True) if changelog else lake
        source = source_of(changelog)
        done = compact(
            table, side, handle.env, source=source, executor_of=executor_of, epoch=epoch, commit_lock=commit_lock
        )
        changed |= done.snapshot_id is not None
        more |= done.more
        if not done.more:
            try:
                expired = expire(table, USUAL, clock=handle.env.clock, in_use=lambda: _in_use(handle))
                changed |= expired.snapshots > 0
            except LakeStateError as e:
                if e.context.get("name") != COLLECTED:  # then nothing is to go
                    raise
    if changed:
        _report(handle)
    return more


def _in_use(handle: TableHandle) -> Iterator[LakeUse]:
    """What somebody reads now. To be asked once the table was loaded: what is pinned later is in that."""
    yield from handle.leases.lake_uses(handle.desc.table_id)


def _report(handle: TableHandle, round: RoundInfo | None = None) -> None:
    # A hint, and the commit has landed without it.
    with contextlib.suppress(LakeheadError):
        handle.report_tiered(round)
