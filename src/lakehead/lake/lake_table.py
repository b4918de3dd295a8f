"""What Lakehead needs of a lake table: its versions, its files, reads of them, and one compare-and-swap.

Rounds (`lakehead.tiering`) and reads (`lakehead.lake.union_read`) know lake tables as `LakeTable` alone. Partition
values, delete files, manifests and catalogs are the format's business. Iceberg implements it in
`lakehead.iceberg.iceberg_table`, a model in `lakehead.testing.lake`, and one contract test holds both. Nothing here
tries again: an attempt ends in one of three ways, and what to do next is not the table's to say.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from lakehead.errors import LakeFileMissingError
from lakehead.lake.census import Census
from lakehead.lake.marks import LakeVersion
from lakehead.log.netchange import Offsets
from lakehead.predicate import Bound
from lakehead.predicate.read_spec import ReadSpec
from lakehead.protocol.messages import LakeUse
from lakehead.types import Epoch, TabletKey

Superseded: TypeAlias = Mapping[TabletKey, Offsets]
"""Offsets of replaced rows per tablet, sorted."""


@dataclass(frozen=True)
class LakeFile:
    """One data file of a lake snapshot; a plain value, which workers are sent.

    Attributes:
        path: its address as the format spells it.
        size: bytes.
        record_count: rows, deleted ones too.
        tablet: whose rows it holds; None for rows that belong to no tablet.
        partition: by name the one that all its rows are of; None when it may hold rows of several.
        offsets: least and greatest ``__offset``; None when the format does not say, or every one is null.
        null_offsets: rows that others added, without identity; None when the format does not say.
        delete_files: addresses of the files that say which of its rows are deleted.
        without_nan: float columns of which is known that no row holds NaN.
    """

    path: str
    size: int
    record_count: int
    tablet: TabletKey | None
    offsets: tuple[int, int] | None
    null_offsets: int | None
    delete_files: tuple[str, ...]
    without_nan: frozenset[str] = frozenset()
    partition: str | None = None


@dataclass(frozen=True)
class WrittenFile:
    """A data file that is written and durable, but in no snapshot yet; picklable.

    Attributes:
        path: its full address.
        size: bytes.
        record_count: rows.
        tablet: whose rows they are.
        own: what its format has to know besides.
    """

    path: str
    size: int
    record_count: int
    tablet: TabletKey
    own: Any = field(default=None, repr=False)

    def as_added(self) -> LakeFile:
        """The file in the snapshot that adds it."""
        return LakeFile(self.path, self.size, self.record_count, self.tablet, None, 0, ())


@dataclass(frozen=True)
class LakeChange:
    """What a commit makes of the version it is planned on: all of it in one snapshot.

    Attributes:
        table_id, epoch, round_id, offsets, rows, overwritten: the mark; its snapshot is the commit's own.
        added: files to add.
        removed: files of the version to take out, because files to add hold their live rows, or all rows are to go.
        deleted: offsets of rows to delete, sorted, per tablet; they stand in files of the version that stay.
        stale: the same of rows of files to add: they were deleted where these were read from.
    """

    table_id: str
    epoch: Epoch
    round_id: str
    offsets: Mapping[TabletKey, int]
    added: tuple[WrittenFile, ...] = ()
    removed: tuple[LakeFile, ...] = ()
    deleted: Mapping[TabletKey, Offsets] = field(default_factory=dict)
    stale: Mapping[TabletKey, Offsets] = field(default_factory=dict)
    rows: Mapping[TabletKey, int] | None = None
    overwritten: Mapping[TabletKey, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class StagedCommit:
    """A commit that is written and that no catalog knows of; it may be published more than once.

    Attributes:
        base: the version it can land on.
        snapshot_id: the lake snapshot that it makes if it lands.
        written: files that staging wrote beside those of the change; nobody needs them unless it lands.
        own: what its format publishes.
    """

    base: LakeVersion
    snapshot_id: int
    written: tuple[str, ...]
    own: Any = field(repr=False)


class Outcome(enum.Enum):
    """How an attempt to commit ended, as far as the one who made it was told."""

    LANDED = "landed"
    REFUSED = "refused"
    """The catalog says that the table has moved on. A request that was delivered twice is told so of its own commit."""
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class CommitAnswer:
    """The end of one attempt; ``cause`` is what the catalog raised."""

    outcome: Outcome
    cause: Exception | None = None


@dataclass(frozen=True)
class Expired:
    """So many snapshots were taken out of the list, and so many files removed: data, deletes, manifests and their
    lists."""

    snapshots: int
    files: int


class DataWriter(Protocol):
    """Writes data files of one table; picklable where tasks run in other processes."""

    def write(self, batches: Iterable[pa.RecordBatch], tablet: TabletKey) -> list[WrittenFile]:
        """Write rows of one tablet, in offset order, as durable files that no snapshot names yet.

        Returns:
            The files; none when there are no rows. After an error none remains.
        """
        ...


class LakeTable(Protocol):
    """One lake table. Versions given to its methods come from its own `load`, files from its own `plan`."""

    @property
    def lands_late(self) -> bool:
        """Whether an attempt that ended `Outcome.UNKNOWN` may still land after a `load` that does not show it."""
        ...

    def load(self) -> LakeVersion:
        """The table as its catalog has it now.

        Raises:
            LakeStateError: it is gone, another table has its name, or its columns or partitions are not ours any more.
            UnavailableError: the catalog cannot be reached.
        """
        ...

    # ---- what it holds ------------------------------------------------------------------------------------------

    def plan(
        self, version: LakeVersion, bounds: Sequence[Bound] = (), *, snapshot_id: int | None = None
    ) -> Sequence[LakeFile]:
        """Data files of a snapshot, None for the current one, that can hold rows within the bounds, in tablet and
        offset order. All files of one snapshot are planned once, however often they are asked for.

        Raises:
            LakeStateError: it has deletes that cannot be read.
            LakeFileMissingError: a file that lists files is gone.
        """
        ...

    def read(
        self, files: Sequence[LakeFile], spec: ReadSpec, superseded: Superseded | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Live rows of planned files, in the table's own types; in no order across files, in the file's order within
        one. The limit is the caller's to keep.

        Args:
            superseded: rows to leave out. Rows without an offset always stay.

        Raises:
            LakeStateError: a file holds values that do not fit the table's types, or rows that may be superseded but
                belong to no tablet.
            LakeFileMissingError: a file is gone.
        """
        ...

    def count(self, files: Sequence[LakeFile], superseded: Superseded | None = None) -> int:
        """How many rows `read` yields without a predicate."""
        ...

    def snapshot_at(self, version: LakeVersion, time_us: int) -> int | None:
        """The snapshot that was current at a time; None when there was none, or it is not listed any more."""
        ...

    def snapshots(self) -> pa.Table:
        """Every listed snapshot, oldest first, of a table that others broke too; see `lakehead.lake.listing`."""
        ...

    def census(self, version: LakeVersion, *, snapshot_id: int | None = None) -> Census:
        """Live rows of a snapshot, None for the current one.

        Raises:
            LakeFileMissingError: a file is gone.
        """
        ...

    def foreign_columns(self, version: LakeVersion) -> tuple[str, ...]:
        """Columns that the table lacks: other engines added them, and may have written values into them, which `read`
        does not give."""
        ...

    # ---- what becomes of it -------------------------------------------------------------------------------------

    def writer(self, version: LakeVersion, *, target_file_bytes: int) -> DataWriter:
        """What writes new data files; a file is ended when it has that size."""
        ...

    def stage(self, base: LakeVersion, change: LakeChange) -> StagedCommit:
        """Write all that a commit of the change needs; calls no catalog.

        Raises:
            LakeStateError: the version lacks rows that are to be deleted.
            LakeFileMissingError: a file of the version is gone.
            CommitConflictError: a file that is to be added is gone.
            Exception: nothing remains of it.
        """
        ...

    def publish(self, staged: StagedCommit) -> CommitAnswer:
        """Try once to make a staged commit the current version. It lands only on the very table and the very snapshot
        of its base.

        Raises:
            Exception: nothing was sent.
        """
        ...

    def added_paths(self, version: LakeVersion, snapshot_id: int) -> frozenset[str] | None:
        """Data and delete files that a snapshot added; None when it is not listed."""
        ...

    def expire(
        self, version: LakeVersion, snapshot_ids: Collection[int], in_use: Callable[[], Iterable[LakeUse]]
    ) -> Expired:
        """Take snapshots out of the list, but for what branches and tags name and what somebody reads, then remove the
        files that only they named. A process that ends in between leaves orphans.

        Args:
            in_use: what somebody reads; an address is the ``state`` of a version. Asked before and after the snapshots
                are taken out: who came in between finds his files, too.

        Raises:
            CommitConflictError: the table has moved on; nothing was changed.
            UnavailableError: the catalog does not answer, or what is in use cannot be known; no file was removed.
            LakeStateError: the table lacks a file that it names.
        """
        ...

    def discard(self, paths: Iterable[str]) -> None:
        """Remove files that no snapshot names; what cannot be removed is left to orphan clean-up."""
        ...


def files_of(files: Iterable[LakeFile], tablets: Collection[TabletKey]) -> Iterator[LakeFile]:
    """Those that hold rows of these tablets, or rows of their partitions that other engines added."""
    partitions = {tablet.partition for tablet in tablets}
    return (f for f in files if f.tablet in tablets or (f.offsets is None and f.partition in partitions))


def missing_file(path: str) -> LakeFileMissingError:
    """The error for a file that is gone."""
    return LakeFileMissingError(
        f"the lake file {path} is gone, though the lake table names it: restore it; if the table was dropped or"
        " overwritten, or another engine expired the snapshot, while it was read, read again",
        path=path,
    )
