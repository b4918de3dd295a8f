"""One streaming query that writes several tables from each micro-batch: all of them, or none, and once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.util import inheritable_thread_target

from lakehead.api.connection import Connection
from lakehead.api.table import Table, handle_of
from lakehead.client.staging import JobBatch, Part, publish_together
from lakehead.env.threads import WorkerPool
from lakehead.errors import InvalidPropertyError, InvalidRequestError, TableNotFoundError
from lakehead.spark.column_names import named_as
from lakehead.spark.combine import Combine, plain, require_combinable
from lakehead.spark.connections import connection_of, worker_address
from lakehead.spark.foreach_batch import started, writer_of
from lakehead.spark.staged_rows import (
    Target,
    discarded_on_failure,
    gone_is_told,
    of_job,
    of_run,
    stage_frame,
)
from lakehead.spark.turns import in_turn
from lakehead.spark.types import collations, written_schema
from lakehead.types import WriteKind

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

Rows: TypeAlias = "DataFrame | ArrowStream"


class ArrowStream(Protocol):
    """Arrow data of any library: a table, record batches, a reader."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


class Layers:
    """What one micro-batch writes. Nothing is in a table until the step has returned and all its rows are staged; then
    all of it is, at once for each tablet.

    Rows of one table land in the order of the calls. A step that reads these tables sees them as of before the
    micro-batch; what it makes of a micro-batch that they have already is let go.

    Rows are a DataFrame, or Arrow data (anything with ``__arrow_c_stream__``): what a step has in Arrow already, as of
    ``batch.toArrow()``, needs no further Spark job.

    Tables that do not exist are made, with the columns of the rows; keyword arguments are those of
    `lakehead.Connection.create_table`, and mean nothing for a table that is there. One that is dropped while the query
    runs ends it, with `TableNotFoundError`.
    """

    def __init__(
        self, con: Connection, batch: JobBatch, *, small: bool = False, tables: OpenTables | None = None
    ) -> None:
        """``small`` has rows pass through the driver, which costs less than tasks do as long as they are few;
        ``tables`` are those that earlier micro-batches opened."""
        self._con = con
        self._batch = batch
        self._small = small
        self._tables = OpenTables(con) if tables is None else tables
        self._writes: list[_Write] = []

    def append(self, table: str, rows: Rows, **definition: Any) -> None:
        """Append rows to a log table."""
        self._add(table, rows, "append", None, definition)

    def upsert(self, table: str, rows: Rows, *, columns: Sequence[str] | None = None, **definition: Any) -> None:
        """Insert or update rows of a keyed table; of ``columns``, the others stay as they are."""
        self._add(table, rows, "upsert", _listed(columns), definition)

    def delete(self, table: str, rows: Rows) -> None:
        """Delete the rows with these keys."""
        self._add(table, rows, "delete", None, {})

    def accumulate(
        self,
        table: str,
        rows: Rows,
        *,
        sum: Sequence[str] = (),
        min: Sequence[str] = (),
        max: Sequence[str] = (),
        **definition: Any,
    ) -> None:
        """Add to what a keyed table has: the new value of a column is the sum, the least or the greatest of the old one
        and of those in these rows; a null counts for nothing, and NaN is greater than all numbers, as in Spark.

        Args:
            rows: the keys, and the columns that are named; several rows of a key count as if they were one after the
                other, so they need not be grouped before. One row a key and task comes to the driver.
            sum, min, max: names of columns, or one name. Of whole numbers and decimals the sum is exact: one that its
                column does not hold fails the micro-batch with `SchemaMismatchError`, and nothing is written.

        Raises:
            ColumnNotFoundError, SchemaMismatchError: a column is not in the rows, or has no sum (text) or no order
                (lists, maps, structs).
            InvalidRequestError: a column is named twice, or the step writes it to this table in another way, too: what
                is added to would not be known.
        """
        named = [(c, way) for way, given in (("sum", sum), ("min", min), ("max", max)) for c in _listed(given) or ()]
        how = dict(named)
        if not how or len({c.lower() for c in how}) < len(named):
            raise InvalidRequestError("accumulate needs columns to sum, or to take the min or max of, each named once")
        self._add(table, rows, "upsert", None, definition, how)

    def _add(
        self,
        table: str,
        rows: Rows,
        kind: WriteKind,
        columns: tuple[str, ...] | None,
        definition: Mapping[str, Any],
        how: Mapping[str, str] | None = None,
    ) -> None:
        collated = collations(rows.schema) if isinstance(rows, DataFrame) else {}
        target = Target(worker_address(self._con), table, kind, columns, definition, collated)
        given = rows if isinstance(rows, DataFrame) else pa.table(rows)
        write = _Write(target, given, how)
        if how is not None:
            own = named_as(write.schema.names, list(how))
            write = _Write(target, given, dict(zip(own, how.values(), strict=True)))
            require_combinable(table, write.schema, write.how or {})
        for other in self._writes:
            if other.target.table == table and (write.adds_to(other) or other.adds_to(write)):
                raise InvalidRequestError(
                    f"a step accumulates columns of {table} once, and does not write them in another way: put all of it"
                    " into one call"
                )
        self._writes.append(write)

    def write(self) -> int:
        """Stage what tasks write, then publish everything; returns how many rows that were, 0 for what was there
        before."""
        if not self._writes:
            return 0
        known = self._tables.known
        try:
            return self._write(as_opened=known)
        except InvalidRequestError:  # nothing was changed
            if not known:
                raise
        self._tables.forget()
        return self._write(as_opened=False)

    def _write(self, *, as_opened: bool) -> int:
        tables = {write.target.table: self._tables.open(write.target, write.schema) for write in self._writes}
        # What is added to the table is the same rows whatever it has by then.
        stages = [write.stager(tables[write.target.table], self._batch, small=self._small) for write in self._writes]

        def published(turns: Mapping[str, int]) -> int:
            parts: dict[str, list[Part]] = {}
            with discarded_on_failure(self._batch, map(handle_of, tables.values())):
                for write, staged in zip(self._writes, self._staged(stages), strict=True):
                    parts.setdefault(write.target.table, []).extend(staged)
            together = [(handle_of(tables[name]).staging, of_table) for name, of_table in parts.items()]
            batch = self._batch
            done = publish_together(batch, together, lasting=True, as_opened=as_opened, turns=turns, whole=True)
            return done.rows

        added_to = [handle_of(tables[write.target.table]) for write in self._writes if write.how is not None]
        return in_turn(added_to, self._batch, published)

    def _staged(self, stages: Sequence[Stage]) -> list[Sequence[Part]]:
        """What each write has. Spark's jobs go side by side, as most of a small one is waiting; what is in Arrow is
        requests of less than a millisecond, which threads would only make dearer."""

        def staged(stage: Stage) -> Sequence[Part]:
            return stage()

        frame = next((w.rows for w in self._writes if isinstance(w.rows, DataFrame)), None)
        if frame is None or len(stages) < 2:
            return [stage() for stage in stages]
        # A thread that has ended lets go of its connection to the JVM, and stops with the query.
        staged = inheritable_thread_target(frame.sparkSession)(staged)
        with WorkerPool(len(stages), "lakehead-pipeline") as pool:
            return list(pool.map(staged, stages))


class OpenTables:
    """Tables that stay open from one micro-batch to the next, which says when it publishes what it knows of them. One
    thread at a time. A table that is gone after a micro-batch opened it was dropped: made anew, it would have a part of
    the rows, or sums of a part.

    Attributes:
        known: whether some were opened before, and may have been altered, renamed, or made anew since.
    """

    def __init__(self, con: Connection) -> None:
        self._con = con
        self._tables: dict[str, Table] = {}
        self._opened: set[str] = set()
        self._taken: set[tuple[object, ...]] = set()

    @property
    def known(self) -> bool:
        return bool(self._tables)

    def forget(self) -> None:
        """Open them anew."""
        self._tables.clear()
        self._taken.clear()

    def open(self, target: Target, schema: pa.Schema) -> Table:
        """See `Target.opened`, of a table that may be open.

        Raises:
            TableNotFoundError: it was dropped, or renamed, since a micro-batch opened it.
        """
        taken = (target.table, target.operation, target.columns, tuple(target.collated.items()), schema)
        table = self._tables.get(target.table)
        if table is None and target.table in self._opened and target.checked(self._con, schema) is None:
            raise TableNotFoundError(
                f"table {target.table}, which this query writes, was dropped or renamed: started again from its"
                " checkpoint, the query makes another one for what comes from then on",
                table=target.table,
            )
        if table is None:
            table = self._tables[target.table] = target.opened(self._con, schema)
            self._opened.add(target.table)
        elif taken not in self._taken:
            target.require_taken(handle_of(table), schema)
        self._taken.add(taken)
        return table


Stage: TypeAlias = "Callable[[], Sequence[Part]]"
"""Stages what one call of a step writes, and says what that is."""


@dataclass(frozen=True)
class _Write:
    target: Target
    rows: DataFrame | pa.Table
    how: Mapping[str, str] | None

    @property
    def schema(self) -> pa.Schema:
        return written_schema(self.rows.schema) if isinstance(self.rows, DataFrame) else self.rows.schema

    def adds_to(self, other: _Write) -> bool:
        """Whether it adds to a column that the other one writes."""
        if self.how is None or other.how is None:
            return self.how is not None
        return not {c.lower() for c in self.how}.isdisjoint(c.lower() for c in other.how)

    def stager(self, table: Table, batch: JobBatch, *, small: bool) -> Stage:
        """What stages it, any number of times; rows that are added to the table are combined once."""
        handle = handle_of(table)
        if self.how is not None:
            given, names = self.schema.names, named_as(table.schema.names, self.schema.names)
            of_table = dict(zip(given, names, strict=True))
            renamed = pa.schema([f.with_name(of_table[f.name]) for f in self.schema])
            combine = Combine.of(table, renamed, {of_table[c]: way for c, way in self.how.items()})
            rows = self.rows
            if isinstance(rows, DataFrame):
                rows = rows if names == given else rows.toDF(*names)
            else:
                rows = plain(table, rows.rename_columns(names))
            combined = functools.cache(lambda: combine.collected(rows, small))
            return lambda: [self.target.given(batch, combine.added(table, combined()), handle)]
        if isinstance(self.rows, DataFrame) and not small:
            return functools.partial(stage_frame, self.target, self.rows, batch)
        return lambda: [self.target.given(batch, self._arrow(), handle)]

    def _arrow(self) -> pa.Table:
        return self.rows.toArrow() if isinstance(self.rows, DataFrame) else self.rows


def write_once(
    df: DataFrame,
    table: str,
    *,
    columns: Sequence[str] | None,
    operation: WriteKind | None,
    job: str | None,
    batch: int | None,
    definition: Mapping[str, Any],
) -> int:
    """See `lakehead.spark.write`."""
    con = connection_of(df.sparkSession)
    if df.isStreaming:
        raise InvalidRequestError(
            f"lhs.write writes the rows that there are, and this DataFrame is a stream: write it to {table} with"
            " df.writeStream.format('lakehead'), or with lhs.pipeline"
        )
    if "mode" in definition:
        raise InvalidPropertyError(
            "lhs.write appends, upserts or deletes: to overwrite, df.write.format('lakehead').mode('overwrite')"
        )
    target = Target(worker_address(con), table, operation, _listed(columns), definition, collations(df.schema))
    # Asked before a table is made.
    once = None if job is None and batch is None else of_job(job, batch)
    handle = handle_of(target.opened(con, written_schema(df.schema)))
    written = of_run() if once is None else of_job(job, batch, target.way(handle.desc))
    with discarded_on_failure(written, [handle]):
        parts = stage_frame(target, df, written)
    with gone_is_told(table):
        done = handle.staging.publish(written, parts, lasting=job is not None)
    return 0 if done.before else done.rows


def _listed(columns: str | Sequence[str] | None) -> tuple[str, ...] | None:
    return (columns,) if isinstance(columns, str) else None if columns is None else tuple(columns)


Step: TypeAlias = "Callable[[DataFrame, Layers], None]"


def run_pipeline(
    stream: DataFrame,
    step: Step,
    *,
    checkpoint: str | None,
    name: str | None,
    trigger: str | None,
    output_mode: str,
) -> StreamingQuery:
    """See `lakehead.spark.pipeline`."""
    _require_step(step)
    writer = writer_of(stream, checkpoint=checkpoint, name=name, trigger=trigger, output_mode=output_mode)
    con = connection_of(stream.sparkSession)
    tables = OpenTables(con)

    def work(rows: DataFrame, batch: JobBatch, *, small: bool) -> None:
        layers = Layers(con, batch, small=small, tables=tables)
        step(rows, layers)
        layers.write()

    return started(stream, writer, con, work)


def _require_step(step: Step) -> None:
    """Refuse at once what each micro-batch would fail with."""
    wanted = "give a function of two: the rows of a micro-batch, and what they are written with"
    if not callable(step):
        raise InvalidRequestError(f"step={step!r} is no function: {wanted}")
    try:
        inspect.signature(step).bind(None, None)
    except TypeError as e:
        raise InvalidRequestError(f"step={step!r} does not take two arguments ({e}): {wanted}") from e
    except ValueError:  # compiled code need not tell what it takes
        pass
