"""Rows of a DataFrame on their way into a table: its tasks stage them on the server, straight from their executors, and
what the driver publishes of them is in the table once."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

import pyarrow as pa
from pyspark import TaskContext

from lakehead.api.connection import Connection
from lakehead.api.definition import DEFINITION, definition_of
from lakehead.api.input import rows_for_append, rows_for_delete, rows_for_upsert
from lakehead.api.table import Table, handle_of
from lakehead.client.row_routing import spreads
from lakehead.client.staging import HeldRows, JobBatch, Part, StagedRows
from lakehead.client.table import TableHandle
from lakehead.env.randomness import SystemRandomness
from lakehead.errors import InvalidPropertyError, LakeheadError, TableNotFoundError, WrongTableKindError
from lakehead.format.schema import nearest_name
from lakehead.protocol.staging import BATCH_MAX, GIVEN_BYTES_MAX, StagedPart
from lakehead.spark.column_names import as_named, named_as
from lakehead.spark.connections import worker_table
from lakehead.spark.failures import as_lakeheads
from lakehead.spark.map_in_arrow import Task, map_in_arrow
from lakehead.spark.types import columns_made_of, require_bytewise
from lakehead.types import TableDescriptor, WriteKind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

QUERY = "sql.streaming.queryId"
"""Property that Spark sets where it works on a micro-batch: the id, in its checkpoint, of the query."""
NAMES_COLUMNS = frozenset(("primary_key", "bucket_key", "partition_by"))
"""What of a table's definition names columns."""
STAGED_ROWS = 1 << 16
STAGED_SPREAD_ROWS = 1 << 20
STAGED_BYTES = 32 << 20
"""A task stages what it has once it is so much; rows that spread over many tablets, more at once."""
JOB_CHARACTERS_MAX = 200
"""The rest of what a server takes is for how its batches are written."""
_PARTS = pa.schema([("number", pa.int64()), ("attempt", pa.string()), ("pieces", pa.int64())])


@dataclass(frozen=True)
class Target:
    """Where rows go, and what is done with them there.

    Attributes:
        uri: address of the server, or `worker_address` where the driver fills this in.
        table: the table's name. A table that does not exist is made, with the DataFrame's columns and ``definition``.
        operation: ``append``, ``upsert`` or ``delete``; None for what the kind of the table takes, append or upsert.
        columns: of an upsert, the columns to take; the others stay as they are.
        definition: arguments of `lakehead.Connection.create_table`, for the table that is made.
        collated: columns of the rows that Spark compares by a collation, and by which.
    """

    uri: str
    table: str
    operation: WriteKind | None = None
    columns: tuple[str, ...] | None = None
    definition: Mapping[str, Any] = field(default_factory=dict)
    collated: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises: InvalidPropertyError: there is no such operation, or the definition says what no table has."""
        if self.operation not in (None, *get_args(WriteKind)):
            raise InvalidPropertyError(f"option operation={self.operation!r} must be append, upsert or delete")
        for name in self.definition:
            if name not in DEFINITION:
                raise InvalidPropertyError(f"{name!r} defines no table; {nearest_name(name, DEFINITION)}", name=name)

    def way(self, desc: TableDescriptor, overwritten: Sequence[str] | None = None) -> str:
        """Begins the name of a job that writes so: a step may write to a table in several ways, as it upserts rows and
        deletes others.

        Args:
            overwritten: the partitions that it replaces, none for those that rows are written to; None for no such.
        """
        if overwritten is not None:
            return f"overwrite {_digest(overwritten)}"
        if self.operation == "delete":
            return "delete "
        return "" if self.columns is None else f"columns {_digest(named_as(desc.schema.names, self.columns))}"

    def checked(self, con: Connection, schema: pa.Schema) -> Table | None:
        """The table, if it is there, which takes such rows; errors as of `opened`, which would make it."""
        try:
            table = con.table(self.table)
        except TableNotFoundError:
            if self.operation == "delete" or self.columns is not None:
                raise
            made = definition_of(self.table, columns_made_of(schema), **self._definition(schema.names))
            self._kind(made, "would be made as")
            self._require_bytewise(made)
            return None
        self.require_taken(handle_of(table), schema)
        return table

    def opened(self, con: Connection, schema: pa.Schema) -> Table:
        """The table, which takes such rows, and has these columns if it is made now. May be called again.

        Raises:
            TableNotFoundError: there is none, and this deletes rows or takes some columns.
            WrongTableKindError, SchemaMismatchError: the table does not take them.
        """
        table = self.checked(con, schema)
        if table is None:
            definition = self._definition(schema.names)
            table = con.create_table(self.table, columns_made_of(schema), if_not_exists=True, **definition)
            self.require_taken(handle_of(table), schema)
        return table

    def _definition(self, columns: Sequence[str]) -> dict[str, Any]:
        """What defines the table if it is made of these columns, whatever the case that it names them in."""
        given = dict(self.definition)
        for name in NAMES_COLUMNS & given.keys():
            given[name] = as_named(columns, given[name])
        return given

    def require_taken(self, handle: TableHandle, schema: pa.Schema) -> None:
        """Refuse what the table does not take.

        Raises:
            WrongTableKindError, SchemaMismatchError: it does not take such rows.
        """
        self._require_bytewise(handle.desc)
        self.rows(handle, self.kind(handle), schema.empty_table())

    def _require_bytewise(self, desc: TableDescriptor) -> None:
        """Refuse rows of which Spark may take several for one of the table's, or spread them otherwise."""
        columns = (*desc.primary_key, *desc.partition_by, *desc.bucket_key)
        named = named_as(desc.schema.names, list(self.collated))
        collated = dict(zip(named, self.collated.values(), strict=True))
        require_bytewise(columns, collated, f"rows for {self.table}")

    @property
    def handle(self) -> TableHandle:
        return handle_of(worker_table(self.uri, self.table, planned=True))

    def kind(self, handle: TableHandle) -> WriteKind:
        """What is done with rows.

        Raises:
            WrongTableKindError: the table does not take that.
        """
        return self._kind(handle.desc, "is")

    def _kind(self, desc: TableDescriptor, is_: str) -> WriteKind:
        kind: WriteKind = self.operation or ("upsert" if desc.keyed else "append")
        if desc.keyed == (kind == "append"):
            table, other = ("primary-key", "without") if desc.keyed else ("log", "with")
            raise WrongTableKindError(
                f"{self.table} {is_} a {table} table: operation={kind!r} is for tables {other} a primary key"
            )
        if self.columns is not None and kind != "upsert":
            raise WrongTableKindError(f"option columns is for upserts: {self.table} gets whole rows, or keys to delete")
        return kind

    def rows(self, handle: TableHandle, kind: WriteKind, given: pa.Table) -> pa.Table:
        """Rows of a DataFrame as the table takes them, under Spark's own rules: names without regard to case, and
        decimals for floats; errors as of `lakehead.Table.append`, `upsert` and `delete`."""
        known = handle.desc.schema.names
        given = with_floats(handle.desc.schema, given.rename_columns(named_as(known, given.schema.names)))
        match kind:
            case "append":
                return rows_for_append(handle.desc, given)
            case "upsert":
                columns = None if self.columns is None else named_as(known, self.columns)
                return rows_for_upsert(handle.desc, given, columns)
            case "delete":
                return rows_for_delete(handle.desc, given)

    def stage(self, batch: JobBatch, batches: Iterable[pa.RecordBatch]) -> StagedPart:
        """Stage what this task writes, some batches at a time."""
        handle = self.handle
        staged = handle.staging.rows(batch, share=task_number())
        with gone_is_told(self.table):
            self._add(staged, batches, handle)
        return staged.done()

    def given(self, batch: JobBatch, rows: pa.Table, handle: TableHandle) -> Part:
        """What the driver itself writes to a table that it has open: held until it is published, or staged now if it is
        much."""
        held = handle.staging.held() if rows.nbytes <= GIVEN_BYTES_MAX else handle.staging.rows(batch)
        self._add(held, rows.to_batches(), handle)
        return held.done()

    def _add(self, staged: StagedRows | HeldRows, batches: Iterable[pa.RecordBatch], handle: TableHandle) -> None:
        kind = self.kind(handle)
        held: list[pa.RecordBatch] = []
        rows = size = 0
        rows_max = STAGED_SPREAD_ROWS if spreads(handle.desc) else STAGED_ROWS
        for part in batches:
            held.append(part)
            rows, size = rows + part.num_rows, size + part.nbytes
            if rows >= rows_max or size >= STAGED_BYTES:
                staged.add(kind, self.rows(handle, kind, pa.Table.from_batches(held)))
                held, rows, size = [], 0, 0
        if rows:
            staged.add(kind, self.rows(handle, kind, pa.Table.from_batches(held)))


def with_floats(schema: pa.Schema, rows: pa.Table) -> pa.Table:
    """Decimals as the nearest floats where a table has those: 1.5 is a decimal in Spark's SQL."""
    for at, given in enumerate(rows.schema):
        wanted = schema.field(given.name).type if schema.get_field_index(given.name) >= 0 else given.type
        if pa.types.is_decimal(given.type) and pa.types.is_floating(wanted):
            # By their digits: Arrow's own cast may miss the nearest by one.
            floats = rows.column(at).cast(pa.string()).cast(wanted)
            rows = rows.set_column(at, given.with_type(wanted), floats)
    return rows


def of_query(query_id: str, number: int, planned: str = "") -> JobBatch:
    """A micro-batch, which is known by the first two for as long as its tables live; ``planned`` as of `planned_as`."""
    return JobBatch(f"query {query_id}", number, planned)


def of_run() -> JobBatch:
    """What a job writes that runs once."""
    return JobBatch(f"run {SystemRandomness().uuid_hex()}")


def of_job(job: object, batch: object, way: str = "") -> JobBatch:
    """A batch of a job of the user's, which is written once; a number may be a text.

    Args:
        way: as of `Target.way`: each is known by itself, and what is written in the same way is the same again.

    Raises:
        InvalidPropertyError: one of the two is missing, the name is too long, or the number is none that a batch may
            have.
    """
    number = batch if type(batch) is int else int(batch) if isinstance(batch, str) and batch.isdecimal() else -1
    if not isinstance(job, str) or not job or not 0 <= number <= BATCH_MAX:
        raise InvalidPropertyError(
            "job and batch go together: a name of your own for the job, and a number that grows with each of its"
            f" batches, as foreachBatch has one; {BATCH_MAX:,} is the greatest"
        )
    if len(job) > JOB_CHARACTERS_MAX:
        raise InvalidPropertyError(f"a job's name has {JOB_CHARACTERS_MAX} characters at most, and this one {len(job)}")
    return JobBatch(f"{way}job {job}", number)


def _digest(names: Iterable[str]) -> str:
    """Of some names, in any order; nothing for none."""
    said = sorted(set(names))
    return f"{hashlib.sha256(repr(said).encode()).hexdigest()[:8]} " if said else ""


@contextlib.contextmanager
def gone_is_told(table: str) -> Iterator[None]:
    """Say which table is gone: the server knows it by its id alone.

    Raises:
        TableNotFoundError: it was.
    """
    try:
        yield
    except TableNotFoundError as e:
        if "table" in e.context:
            raise
        raise TableNotFoundError(
            f"table {table} was dropped, or overwritten, while rows were written to it: run the job again, or start the"
            " query again from its checkpoint",
            table=table,
        ) from e


@contextlib.contextmanager
def discarded_on_failure(batch: JobBatch, handles: Iterable[TableHandle]) -> Iterator[None]:
    """Forget what was staged for tables if staging the rest fails: the server need not keep it for a day."""
    try:
        yield
    except BaseException:
        for handle in handles:
            with contextlib.suppress(LakeheadError):
                handle.staging.discard(batch)
        raise


def task_number() -> int:
    """The partition that this task works on; 0 outside tasks."""
    context = TaskContext.get()
    return 0 if context is None else context.partitionId()


class _StageTask:
    """What a task of `stage_frame` does: its rows are staged, and named in one row."""

    def __init__(self, target: Target, batch: JobBatch) -> None:
        self._target = target
        self._batch = batch

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield described([self._target.stage(self._batch, batches)])


def stage_frame(target: Target, df: DataFrame, batch: JobBatch) -> list[StagedPart]:
    """Have the tasks of a DataFrame stage its rows, in one Spark job; the parts in the order of its partitions."""
    (parts,) = staged_by(df, _StageTask(target, batch), tables=1)
    return parts


def described(parts: Sequence[StagedPart]) -> pa.RecordBatch:
    """What a task has staged for each of its tables, as the rows that it hands to the driver."""
    return pa.RecordBatch.from_pylist(
        [{"number": n, "attempt": part.attempt, "pieces": part.pieces} for n, part in enumerate(parts)], _PARTS
    )


def staged_by(df: DataFrame, task: Task, tables: int) -> list[list[StagedPart]]:
    """Run a task that ends with `described` over each partition; what was staged, table by table.

    Raises:
        LakeheadError: what a task raised.
    """
    with as_lakeheads():
        rows = map_in_arrow(df, task, "number bigint, attempt string, pieces bigint").collect()
    return [
        [StagedPart(attempt=r.attempt, pieces=r.pieces) for r in rows if r.number == n and r.pieces]
        for n in range(tables)
    ]
