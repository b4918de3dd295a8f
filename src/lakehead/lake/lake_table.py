"""What a tiering round needs of a lake table: its versions, its files by offset, and one compare-and-swap.

Whatever a round decides (`lakehead.tiering`) it decides against `LakeTable`. PyIceberg
implements it in `lakehead.iceberg.iceberg_table`, a model in `lakehead.testing.lake`, and one contract test holds both.
Nothing here tries again: an attempt ends in one of three ways, and what to do next is not the table's to say.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from lakehead.errors import LakeFileMissingError
from lakehead.lake.census import Census
from lakehead.lake.marks import LakeVersion
from lakehead.log.netchange import Offsets
from lakehead.types import TabletKey


@dataclass(frozen=True)
class LakeFile:
    """One data file of a lake snapshot.

    Attributes:
        path: its address as the manifest spells it.
        size: bytes.
        record_count: rows, deleted ones too.
        tablet: whose rows it holds; None for rows that belong to no tablet.
        offsets: least and greatest ``__offset``; None when the manifest does not say, or every one is null.
        null_offsets: rows that others added, without identity; None when the manifest does not say.
        delete_files: addresses of the position-delete files that apply.
        partition: values as Iceberg holds them.
        without_nan: float columns of which the manifest says that no row holds NaN.
    """

    path: str
    size: int
    record_count: int
    tablet: TabletKey | None
    offsets: tuple[int, int] | None
    null_offsets: int | None
    delete_files: tuple[str, ...]
    partition: tuple[object, ...]
    without_nan: frozenset[str] = frozenset()


@dataclass(frozen=True)
class WrittenFile:
    """A file that is written and durable, but in no snapshot yet.

    Attributes:
        path: its full address.
        size: bytes.
        record_count: rows, or deleted positions.
        spec_id: partition spec of ``partition``.
        partition: values as Iceberg holds them, in the order of the spec.
        statistics: what manifests keep about it, by the names of Iceberg's data file.
        deletes_in: for position deletes, the data file; None for a data file.
        tablet: whose rows they are; None when the writer was not told.
    """

    path: str
    size: int
    record_count: int
    spec_id: int
    partition: tuple[object, ...]
    statistics: Mapping[str, Any] = field(repr=False)
    deletes_in: str | None = None
    tablet: TabletKey | None = None


@dataclass(frozen=True, eq=False)
class Hit:
    """Rows of one data file.

    Attributes:
        positions: sorted, each once.
    """

    file: LakeFile
    positions: Offsets


@dataclass(frozen=True)
class LakeChange:
    """What a commit makes of the version it is planned on.

    Attributes:
        table_id, epoch, round_id, offsets, rows: the mark; its snapshot is the commit's own.
        data: files to add.
        deletes: position-delete files to add; they apply to data files of the version.
    """

    table_id: str
    epoch: int
    round_id: str
    offsets: Mapping[TabletKey, int]
    data: tuple[WrittenFile, ...]
    deletes: tuple[WrittenFile, ...]
    rows: Mapping[TabletKey, int] | None = None


class Outcome(enum.Enum):
    """How an attempt to commit ended, as far as the one who made it was told."""

    LANDED = "landed"
    REFUSED = "refused"
    """The catalog says that the table has moved on. A request that was delivered twice is told so of its own commit."""
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class CommitAnswer:
    """The end of one attempt.

    Attributes:
        snapshot_id: the lake snapshot that the attempt makes if it lands.
        leftovers: files the attempt wrote beside those of the change; nobody needs them unless it landed.
        cause: what the catalog raised.
    """

    outcome: Outcome
    snapshot_id: int
    leftovers: tuple[str, ...] = ()
    cause: Exception | None = None


class DataWriter(Protocol):
    """Writes data files of one table; picklable where tasks run in other processes."""

    def write(self, batches: Iterable[pa.RecordBatch], tablet: TabletKey) -> list[WrittenFile]:
        """Write rows of one tablet, in offset order, as durable files that no snapshot names yet.

        Returns:
            The files; none when there are no rows. After an error none remains.
        """
        ...


class LakeTable(Protocol):
    """One lake table in its catalog. Versions given to its methods come from its own `load`."""

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

    def writer(self, version: LakeVersion, *, target_file_bytes: int) -> DataWriter:
        """What writes new data files; a file is ended when it has that size."""
        ...

    def files(self, version: LakeVersion) -> Sequence[LakeFile]:
        """Data files of the version's current snapshot.

        Raises:
            LakeStateError: it has deletes that cannot be read.
        """
        ...

    def census(self, version: LakeVersion) -> Census:
        """Live rows of the version's current snapshot.

        Raises:
            LakeFileMissingError: a file is gone.
        """
        ...

    def find_offsets(self, wanted: Sequence[tuple[LakeFile, Offsets]]) -> list[tuple[Offsets, Offsets]]:
        """Per file, where rows with these offsets (sorted) stand, and their offsets; deleted rows are found too.

        Raises:
            LakeFileMissingError: a file is gone.
        """
        ...

    def write_deletes(self, version: LakeVersion, hits: Sequence[Hit]) -> list[WrittenFile]:
        """Write one position-delete file per data file of the version; after an error none remains."""
        ...

    def commit(self, base: LakeVersion, change: LakeChange) -> CommitAnswer:
        """Try once to make the change. It lands only on the very table and the very snapshot of ``base``.

        Raises:
            Exception: nothing was sent, nothing remains of the attempt.
        """
        ...

    def added_paths(self, version: LakeVersion, snapshot_id: int) -> frozenset[str] | None:
        """Data and delete files that a snapshot added; None when it is not listed."""
        ...

    def discard(self, paths: Iterable[str]) -> None:
        """Remove files that no snapshot names; what cannot be removed is left to orphan clean-up."""
        ...


def missing_file(path: str) -> LakeFileMissingError:
    """The error for a file that is gone."""
    return LakeFileMissingError(
        f"the lake file {path} is gone, though the lake table names it: restore it; if another engine expired the"
        " snapshot while it was read, read again",
        path=path,
    )
