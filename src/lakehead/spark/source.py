"""The data source ``lakehead``: a table read in partitions, each an Arrow stream from a worker's own connection.

A read is pinned once, while it is planned; partitions carry plain values (files, offset ranges, superseded offsets), so
all of them see the same lake snapshot and watermarks. Filters are Spark's to apply: it plans a relation of a Python
source once for all its scans, and a filter taken for one of them would hold for the others
([RFC 0014](../../../docs/rfcs/0014-spark-filters.md)).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import StructType

from lakehead.api.table import Table, handle_of
from lakehead.config import unknown_name
from lakehead.errors import ColumnNotFoundError, InvalidPropertyError, InvalidRequestError
from lakehead.format.read_as import cast_to
from lakehead.format.schema import nearest_name
from lakehead.lake.pinned_lake import PinnedLake
from lakehead.lake.union_read import Pin, UnionRead, pin
from lakehead.log.netchange import Offsets, between
from lakehead.predicate.read_spec import ReadSpec
from lakehead.spark.connections import planned_handle, worker_table
from lakehead.spark.sink import batch_writer, stream_writer
from lakehead.spark.types import arrow_schema, comma_separated, spark_schema
from lakehead.types import SYSTEM_FIELDS, TableDescriptor, TabletKey, Tier, require_tier

if TYPE_CHECKING:
    from lakehead.lake.lake_table import LakeFile

Ranges: TypeAlias = Mapping[TabletKey, tuple[int, int]]

LAKE_BYTES = 32 << 20
"""Lake files of so many bytes together make a partition."""
HOT_ROWS = 512 << 10
"""Log records that make a partition; a keyed tablet is never cut."""
OPTIONS = ("uri", "table", "columns", "tier", "snapshot", "ranges", "lease", "schema_id")
_INTERNAL = ("ranges", "lease", "schema_id")


@dataclass(frozen=True)
class ReadOptions:
    """Options of one read.

    Attributes:
        uri: address of the server.
        table: the table's name.
        columns: the columns wanted, in order; None for all of the user's.
        tier: see `lakehead.Table.scan`.
        snapshot: read the lake alone, at this lake snapshot.
        ranges: read exactly these log offsets, and of the lake ``snapshot`` or nothing; how a union read ships its
            pin, with its ``lease``.
        schema_id: the definition under which that was pinned; -1 for what is pinned with the plan.
    """

    uri: str
    table: str
    columns: tuple[str, ...] | None
    tier: Tier
    snapshot: int | None
    ranges: Ranges | None
    lease: str | None = None
    schema_id: int = -1

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        """Read the texts of ``.option(name, value)``; names in any case.

        Raises:
            InvalidPropertyError: one is missing, unknown or cannot be read.
        """
        given = {name.lower(): value for name, value in options.items()}
        for name in given:
            if name not in OPTIONS:
                raise unknown_name("option of the lakehead source", name, [o for o in OPTIONS if o not in _INTERNAL])
        for name in ("uri", "table"):
            if not given.get(name):
                raise InvalidPropertyError(
                    f"spark.read.format('lakehead') needs .option({name!r}, ...): uri is con.uri, table 'db.table'"
                )
        try:
            tier = require_tier(given.get("tier", "union"))
        except InvalidRequestError as e:
            raise InvalidPropertyError(f"option {e.message}") from e
        snapshot = given.get("snapshot")
        if snapshot is not None and not snapshot.isdigit():
            raise InvalidPropertyError(f"option snapshot={snapshot!r} is not the id of a lake snapshot")
        ranges = given.get("ranges")
        return cls(
            given["uri"],
            given["table"],
            comma_separated(given.get("columns")),
            tier,
            int(snapshot) if snapshot is not None else None,
            None if ranges is None else {TabletKey.parse(k): (s, e) for k, (s, e) in json.loads(ranges).items()},
            given.get("lease"),
            int(given.get("schema_id", -1)),
        )


@dataclass(frozen=True, eq=False)
class LakePart:
    """Lake files to read, and offsets of rows to leave out, under the lease and the definition of the plan."""

    table_id: str
    schema_id: int
    files: tuple[LakeFile, ...]
    superseded: Mapping[TabletKey, Offsets]
    lease: str | None = None


@dataclass(frozen=True, eq=False)
class HotPart:
    """Log offsets to read, under the lease and the definition of the plan; whole tablets where the table is keyed."""

    table_id: str
    schema_id: int
    ranges: Ranges
    lease: str | None = None


class LakeheadDataSource(DataSource):
    """``spark.read.format("lakehead")``, with `ReadOptions`; ``df.write`` and ``df.writeStream``, with those of
    `lakehead.spark.sink.WriteOptions`."""

    @classmethod
    def name(cls) -> str:
        return "lakehead"

    def schema(self) -> StructType:
        options = ReadOptions.parse(self.options)
        return spark_schema(_chosen(worker_table(options.uri, options.table), options.columns))

    def reader(self, schema: StructType) -> LakeheadReader:
        return LakeheadReader(ReadOptions.parse(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return stream_writer(self.options, schema, overwrite)


def _chosen(table: Table, columns: Sequence[str] | None) -> pa.Schema:
    """The columns wanted, which may be system columns."""
    own = pa.schema([*table.schema, *SYSTEM_FIELDS])
    if columns is None:
        return table.schema
    for c in columns:
        if c not in own.names:
            near = nearest_name(c, table.schema.names)
            raise ColumnNotFoundError(f"table {table.name} has no column {c!r}{near}", column=c)
    return pa.schema([own.field(c) for c in columns])


class LakeheadReader(DataSourceReader):
    """Plans one read on the driver's side, and carries out its partitions on executors."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    # ---- planning -------------------------------------------------------------------------------------------------

    def partitions(self) -> Sequence[InputPartition]:
        table = self._table()
        handle, options = handle_of(table), self._options
        handle.desc.require_schema(options.schema_id)
        if options.ranges is not None:
            at = options.snapshot
            lake = None if at is None else PinnedLake.at(handle.desc, handle.lake(), at)
            pinned = Pin(lake, options.ranges, options.lease)
        else:
            pinned = pin(handle, tier=options.tier, snapshot=options.snapshot, planned=True)
        parts: list[LakePart | HotPart] = []
        view = pinned.lake
        if view is not None and view.snapshot_id is not None:
            superseded: Mapping[TabletKey, Offsets] = {}
            if handle.desc.keyed and pinned.ranges:
                superseded = UnionRead(handle, pinned, ReadSpec(())).hot_changes()[0]
            parts += lake_parts(handle.desc, view.plan(), superseded, pinned.lease)
        parts += hot_parts(handle.desc, pinned.ranges, pinned.lease)
        return [InputPartition(p) for p in parts]

    # ---- reading --------------------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        part = partition.value
        if part is None:
            return
        handle = planned_handle(self._options.uri, self._options.table, part.table_id, part.schema_id)
        names = self._schema.names
        system = {f.name for f in SYSTEM_FIELDS}
        user = [n for n in names if n not in system]
        target = arrow_schema(self._schema)
        batches: Iterator[pa.RecordBatch]
        if isinstance(part, LakePart):
            lake = PinnedLake.current(handle.desc, handle.lake())
            batches = lake.read(part.files, ReadSpec(tuple(names)), part.superseded)
        else:
            spec = ReadSpec(tuple(user), system_columns=len(user) < len(names))
            read = UnionRead(handle, Pin(None, part.ranges, part.lease), spec)
            batches = read.batches()
        with handle.leases.used(part.lease):
            for batch in batches:
                yield cast_to(target, batch)

    def _table(self) -> Table:
        return worker_table(self._options.uri, self._options.table)


def lake_parts(
    desc: TableDescriptor, files: Iterable[LakeFile], superseded: Mapping[TabletKey, Offsets], lease: str | None = None
) -> Iterator[LakePart]:
    """Files in order, cut where `LAKE_BYTES` are reached; each part with the superseded offsets of its tablets."""
    for group in _grouped(files, lambda f: f.size, LAKE_BYTES):
        tablets = {f.tablet for f in group if f.tablet is not None}
        mine = {k: _within(superseded[k], [f for f in group if f.tablet == k]) for k in tablets if k in superseded}
        yield LakePart(desc.table_id, desc.schema_id, tuple(group), mine, lease)


def _within(offsets: Offsets, files: Sequence[LakeFile]) -> Offsets:
    bounds = [f.offsets for f in files if f.offsets is not None]
    if len(bounds) < len(files):
        return offsets
    return between(offsets, min(b[0] for b in bounds), max(b[1] for b in bounds) + 1)


def hot_parts(desc: TableDescriptor, ranges: Ranges, lease: str | None = None) -> Iterator[HotPart]:
    """Log ranges, cut or gathered to about `HOT_ROWS` records."""
    pieces: list[tuple[TabletKey, int, int]] = []
    for key, (start, end) in sorted(ranges.items()):
        step = max(end - start, 1) if desc.keyed else HOT_ROWS
        pieces += [(key, at, min(at + step, end)) for at in range(start, end, step)]
    for group in _grouped(pieces, lambda p: p[2] - p[1], HOT_ROWS):
        # A tablet's pieces are neighbours, so that those in one group are one range.
        joined: dict[TabletKey, tuple[int, int]] = {}
        for key, start, end in group:
            joined[key] = (joined[key][0] if key in joined else start, end)
        yield HotPart(desc.table_id, desc.schema_id, joined, lease)


def _grouped(items: Iterable[Any], size: Callable[[Any], int], limit: int) -> Iterator[list[Any]]:
    group: list[Any] = []
    total = 0
    for item in items:
        if group and total + size(item) > limit:
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group
