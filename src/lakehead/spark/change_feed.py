"""Changes of rows, in whatever order they come, as a keyed table that has the newest of each, or all of them with the
time that they were in force (slowly changing dimensions of type 1 and 2).

A table beside the target remembers what its rows do not tell: the sequence of the last change of each key, or where
rows were deleted. Both are written in one go, once for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as st

from lakehead.api.connection import Connection
from lakehead.api.definition import definition_of
from lakehead.api.input import rows_for_delete, rows_for_upsert
from lakehead.api.table import Table, handle_of
from lakehead.client.staging import HeldRows, JobBatch, Part, StagedRows, publish_together
from lakehead.client.table import TableHandle
from lakehead.errors import (
    InvalidRequestError,
    InvalidSchemaError,
    NullKeyError,
    SchemaMismatchError,
    TableNotFoundError,
    WrongTableKindError,
)
from lakehead.format.arrays import to_numbers
from lakehead.format.joins import rows_at
from lakehead.format.rows import to_key_table
from lakehead.format.schema import is_wider
from lakehead.spark.change_columns import Names, columns_named, condition_of, expression_of, require_columns
from lakehead.spark.column_names import named_as
from lakehead.spark.connections import connection_of, worker_address, worker_table
from lakehead.spark.floats import quoted
from lakehead.spark.foreach_batch import started, writer_of
from lakehead.spark.key_join import names_alike, places_of
from lakehead.spark.sequence import ordering_text
from lakehead.spark.staged_rows import described, discarded_on_failure, staged_by, task_number, with_floats
from lakehead.spark.turns import in_turn
from lakehead.spark.types import columns_made_of, written_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

ScdType: TypeAlias = Literal[1, 2]
_SEQUENCE, _DELETED = "__lakehead_sequence", "__lakehead_deleted"
_REMEMBERED = "sequence"
START_AT, END_AT = "start_at", "end_at"
"""Columns of a table of type 2: the sequences at which a row came into force, and at which it was not any more."""


@dataclass(frozen=True)
class ChangeFeed:
    """How changes become rows; as of one table.

    Attributes:
        table, beside: names of the target, and of the table that remembers sequences or deletes.
        keys: columns that say which row is meant.
        columns: those of the changes that the target gets, the keys among them.
    """

    uri: str
    table: str
    beside: str
    keys: tuple[str, ...]
    columns: tuple[str, ...]
    scd_type: ScdType

    def require_tables(self, con: Connection, schema: pa.Schema, *, make: bool = True) -> None:
        """Return once both exist, and fit; made from the schema of `prepared` changes where they do not.

        Args:
            make: without it, return if they could be made.

        Raises:
            WrongTableKindError, SchemaMismatchError, InvalidRequestError: the target has another key, other columns, or
                cannot be looked up by these keys.
        """
        schema = columns_made_of(schema)
        sequence = schema.field(_SEQUENCE).type
        self._require_sequence(sequence)
        fields = [schema.field(c) for c in self.columns]
        keys = [schema.field(c).with_nullable(False) for c in self.keys]
        if taken := [c for c in self.keys if c.casefold() == _REMEMBERED]:
            raise InvalidRequestError(
                f"a key cannot be called {taken[0]!r}, as a column of {self.beside} is: rename it in the changes"
            )
        if self.scd_type == 1:
            expected = remembered = list(self.keys)
            columns = pa.schema(fields)
        else:
            if taken := [c for c in self.columns if c.casefold() in (START_AT, END_AT)]:
                raise InvalidRequestError(f"columns {taken} are those of a table of type 2: rename them in the changes")
            columns = pa.schema([*fields, pa.field(START_AT, sequence), pa.field(END_AT, sequence)])
            expected, remembered = [*self.keys, START_AT], [*self.keys, _REMEMBERED]
        bucket_key = list(self.keys)
        sequences = pa.schema([*keys, pa.field(_REMEMBERED, sequence, False)])
        # Neither is made before both are known to be possible.
        target, beside = _table(con, self.table), _table(con, self.beside)
        if target is None and beside is not None and beside.scan().count():
            raise InvalidRequestError(
                f"{self.beside} is of a table {self.table} that was dropped, and would leave out what it remembers as"
                " older: drop it, too"
            )
        if target is None:
            definition_of(self.table, columns, primary_key=expected, bucket_key=bucket_key)
        else:
            self._require_fits(target, expected, columns)
        if beside is None:
            definition_of(self.beside, sequences, primary_key=remembered, bucket_key=bucket_key)
        else:
            self._require_fits(beside, remembered, sequences)
        if not make:
            return
        if target is None:
            target = con.create_table(self.table, columns, primary_key=expected, bucket_key=bucket_key)
        if beside is None:
            con.create_table(
                self.beside,
                sequences,
                primary_key=remembered,
                bucket_key=bucket_key,
                buckets=target.buckets,
                if_not_exists=True,
            )

    def begin(self, con: Connection, schema: pa.Schema, batch: JobBatch) -> None:
        """Before the first micro-batch that a query is given: that of its checkpoint makes the tables, others find
        them. Made again, they would take changes for new ones that are older than what was there.

        Raises:
            TableNotFoundError: one was dropped while the query was down.
        """
        gone = [name for name in (self.table, self.beside) if _table(con, name) is None]
        if gone and batch.number:
            raise TableNotFoundError(
                f"what the query of this checkpoint has written to {' and '.join(gone)} is gone, which someone dropped:"
                f" begin with another checkpoint, and without {self.table} and {self.beside}",
                table=gone[0],
            )
        self.require_tables(con, schema)

    def _require_sequence(self, t: pa.DataType) -> None:
        """Refuse what does not order changes, or what no table has or has as a key."""
        try:
            definition_of(self.beside, {_REMEMBERED: t}, primary_key=_REMEMBERED if self.scd_type == 2 else None)
            possible = not (pa.types.is_nested(t) or pa.types.is_null(t))
        except InvalidSchemaError:
            possible = False
        if not possible:
            no_float = " that is no float" if pa.types.is_floating(t) else ""
            raise InvalidRequestError(
                f"sequence_by is of type {t}: changes are ordered by one number{no_float}, string or time, such as"
                " format_string('%019d-%019d', a, b) of two; those of type 1 also by a struct of integers, booleans,"
                " dates and timestamps, whose last field may be a string"
            )

    def _require_fits(self, table: Table, key: Sequence[str], columns: pa.Schema) -> None:
        if not table.primary_key:
            raise WrongTableKindError(f"{table.name} is a log table: changes are applied to one with keys")
        if set(table.primary_key) != set(key):
            raise SchemaMismatchError(
                f"the primary key of {table.name} is {list(table.primary_key)}, and stored_as_scd_type="
                f"{self.scd_type} with keys={list(self.keys)} needs {list(key)}"
            )
        _fitting(table, columns.empty_table())
        for name in (_REMEMBERED, START_AT, END_AT):
            if name in columns.names and is_wider(wide := columns.field(name).type, table.schema.field(name).type):
                remedy = f"widen it, con.sql('alter table {table.name} alter {name} type ...'), or "
                raise SchemaMismatchError(
                    f"column {name!r} of {table.name} is {table.schema.field(name).type}, and sequence_by {wide}:"
                    f" {'' if name in table.primary_key else remedy}cast sequence_by to the type of the column",
                    column=name,
                )
        if self.scd_type == 2:
            desc = handle_of(table).desc
            if {*desc.partition_by, *(desc.prefix_key or desc.bucket_key)} != set(self.keys):
                whole = [c for c in self.keys if c not in desc.partition_by]
                raise SchemaMismatchError(
                    f"all versions of a key are looked up in {table.name}, which its bucket key"
                    f" {list(desc.bucket_key)} does not allow: make the table with bucket_key={whole}"
                )
            table.prefix_lookup(_keys(table, columns.empty_table(), list(self.keys)))

    def prepared(
        self, df: DataFrame, columns: Sequence[str], sequence_by: str | Column, deletes: str | Column | None
    ) -> DataFrame:
        """The changes, of the columns that the target gets, with their sequence and whether they delete.

        Args:
            columns: what the changes call ``self.columns``.

        Raises:
            ColumnNotFoundError, InvalidRequestError: an expression is none on the changes, or says not whether.
        """
        sequence, _ = expression_of(df, "sequence_by", sequence_by)
        deleted = F.lit(False) if deletes is None else condition_of(df, "apply_as_deletes", deletes)
        both = zip(self.columns, columns, strict=True)
        given = {**{name: F.col(quoted(c)) for name, c in both}, _SEQUENCE: sequence}
        types = df.select(*(c.alias(name) for name, c in given.items())).schema
        of_several = types[_SEQUENCE].dataType
        if self.scd_type == 1 and isinstance(of_several, st.StructType):
            alike = names_alike(df)
            if len({alike(n) for n in of_several.names}) < len(of_several.names):
                raise InvalidRequestError(
                    f"sequence_by has fields {of_several.names}, of which Spark takes some for one: name them, as in"
                    " struct(a as first, b as second)"
                )
            text = ordering_text(sequence, of_several)
            given[_SEQUENCE] = sequence if text is None else text
        for name in (*self.keys, _SEQUENCE):
            # Keys are told apart, and changes ordered, by bytes: a collation has Spark sort them by something else.
            if isinstance(t := types[name].dataType, st.StringType) and t.collation != "UTF8_BINARY":
                given[name] = given[name].cast("string")
        return df.select(*(c.alias(name) for name, c in given.items()), deleted.alias(_DELETED))

    def apply(self, con: Connection, changes: DataFrame, batch: JobBatch, *, small: bool) -> None:
        """Apply `prepared` changes, once for a batch; ``small`` has rows pass through the driver, without a shuffle."""
        tables = [con.table(name) for name in (self.table, self.beside)]
        handles = [handle_of(table) for table in tables]

        def applied(turns: Mapping[str, int]) -> None:
            parts = self._staged(tables, handles, changes, batch, small=small)
            together = [(h.staging, p) for h, p in zip(handles, parts, strict=True)]
            publish_together(batch, together, lasting=True, whole=True, turns=turns)

        in_turn(handles, batch, applied)

    def _staged(
        self,
        tables: Sequence[Table],
        handles: Sequence[TableHandle],
        changes: DataFrame,
        batch: JobBatch,
        *,
        small: bool,
    ) -> Sequence[Sequence[Part]]:
        apply = _Apply(self, batch)
        with discarded_on_failure(batch, handles):
            if small:
                rows = changes.toArrow()
                order = pc.sort_indices(rows, [(c, "ascending") for c in (*self.keys, _SEQUENCE)])
                rows = rows_at(rows, to_numbers(order).astype(np.int64))
                held = [h.staging.held() for h in handles]
                apply.add(tables, held, rows.to_batches())
                return [[rows_of] for rows_of in held]
            ordered = changes.repartition(*map(quoted, self.keys))
            return staged_by(ordered.sortWithinPartitions(*map(quoted, self.keys), _SEQUENCE), apply, tables=2)


@dataclass(frozen=True)
class _Apply:
    """What a task does with its changes, of which those of a key are next to each other, by their sequence."""

    feed: ChangeFeed
    batch: JobBatch

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        tables = [worker_table(self.feed.uri, name, planned=True) for name in (self.feed.table, self.feed.beside)]
        staged = [handle_of(table).staging.rows(self.batch, share=task_number()) for table in tables]
        self.add(tables, staged, batches)
        yield described([rows.done() for rows in staged])

    def add(
        self, tables: Sequence[Table], to: Sequence[StagedRows | HeldRows], batches: Iterable[pa.RecordBatch]
    ) -> None:
        """Add what becomes of changes to what is written to the target and to the table beside it."""
        target, beside = to
        change = _newest if self.feed.scd_type == 1 else _versions
        for chunk in whole_keys(batches, self.feed.keys):
            _require_keys(self.feed.table, chunk.select(list(self.feed.keys)))
            require_sequences(self.feed.table, chunk[_SEQUENCE])
            made = change(self.feed, tables[0], tables[1], chunk)
            # A version that is deleted may come again in the same batch, never the other way round.
            if len(made.removed):
                target.add("delete", rows_for_delete(handle_of(tables[0]).desc, made.removed))
            if len(made.rows):
                target.add("upsert", _fitting(tables[0], made.rows))
            if len(made.beside):
                beside.add("upsert", _fitting(tables[1], made.beside))


def _fitting(table: Table, rows: pa.Table) -> pa.Table:
    return rows_for_upsert(handle_of(table).desc, with_floats(table.schema, rows), None)


def _require_keys(table: str, keys: pa.Table) -> None:
    """Refuse changes that are of no row.

    Raises:
        NullKeyError: a key is null.
    """
    for name, column in zip(keys.column_names, keys.columns, strict=True):
        if column.null_count:
            raise NullKeyError(
                f"changes for {table} have {column.null_count:,} nulls in the key column {name!r}: leave them out, as"
                f' with where("{quoted(name)} is not null")',
                column=name,
            )


def require_sequences(table: str, sequence: pa.ChunkedArray) -> None:
    """Refuse changes that nothing orders; NaN would be the last of all for ever.

    Raises:
        InvalidRequestError: a sequence is null or NaN.
    """
    nan = pa.types.is_floating(sequence.type) and pc.any(pc.is_nan(sequence)).as_py()
    if sequence.null_count or nan:
        raise InvalidRequestError(
            f"changes for {table} have no sequence (sequence_by is {'null' if sequence.null_count else 'NaN'}, or"
            " has a field that is): leave them out, or say what orders them"
        )


@dataclass(frozen=True)
class _Made:
    """Rows for the target, keys of those that it is to lose, and rows for the table beside it."""

    rows: pa.Table
    removed: pa.Table
    beside: pa.Table


def _newest(feed: ChangeFeed, target: Table, beside: Table, chunk: pa.Table) -> _Made:
    """Type 1: of each key the last change, unless a later one was applied before."""
    keys = list(feed.keys)
    ends = np.append(_differs_from_next(chunk, keys), True)
    last = chunk.filter(pa.array(ends))
    of_key = np.cumsum(ends) - ends  # which key each change is of
    at, known = places_of(beside, _keys(beside, last, keys))
    before = known[_REMEMBERED].take(pa.array(at, mask=at < 0))
    sequence = _sequences(beside, chunk[_SEQUENCE], before.type)
    counts = np.asarray(pc.fill_null(pc.greater_equal(sequence, before.take(pa.array(of_key))), True))
    kept = last.filter(pa.array(counts[ends]))
    deleted = counts & np.asarray(chunk[_DELETED])
    if set(target.schema.names) == set(feed.columns):
        deleted &= ends
    # A row that comes again after it was deleted begins anew, also in columns that the changes do not have.
    gone = np.unique(of_key[deleted])
    return _Made(
        kept.filter(pc.invert(kept[_DELETED])).select(list(feed.columns)),
        rows_at(last.select(keys), gone),
        kept.select([*keys, _SEQUENCE]).rename_columns([*keys, _REMEMBERED]),
    )


_DELETE, _VERSION, _CHANGE = 0, 1, 2


def _versions(feed: ChangeFeed, target: Table, beside: Table, chunk: pa.Table) -> _Made:
    """Type 2: what was in force when, with these changes among those that were applied before."""
    keys, columns = list(feed.keys), list(feed.columns)
    given = _keys(target, chunk, keys)
    asked = given.group_by(keys, use_threads=False).aggregate([])
    versions, deletes = target.prefix_lookup(asked), beside.prefix_lookup(asked)
    kinds = pc.if_else(chunk[_DELETED], _DELETE, _CHANGE)
    # A target that was there before may have wider types than the changes, and so than the table beside it.
    starts = versions[START_AT]
    forgotten, until, sequence = (
        _sequences(target, c, starts.type) for c in (deletes[_REMEMBERED], versions[END_AT], chunk[_SEQUENCE])
    )
    history = _history(
        [
            _events(_keys(target, deletes, keys), forgotten, pa.array([_DELETE] * len(deletes), pa.int32())),
            _events(_keys(target, versions, keys), starts, pa.array([_VERSION] * len(versions)), until),
            _events(given, sequence, kinds),
        ]
    )
    new = history.filter(pc.equal(history["kind"], _CHANGE))
    old = history.filter(pc.equal(history["kind"], _VERSION))
    old = old.filter(pa.array(_unlike(old["until"], old["ends"])))
    added = rows_at(chunk.select([*columns, _SEQUENCE]), np.asarray(new["place"]))
    ended = rows_at(versions.select([*columns, START_AT]), np.asarray(old["place"]))
    rows = [
        _fitting(target, pa.table([*part.columns, ends], [*columns, START_AT, END_AT]))
        for part, ends in ((added, new["ends"]), (ended, old["ends"]))
    ]
    gone = chunk.filter(chunk[_DELETED]).select([*keys, _SEQUENCE])
    removed, remembered = gone.rename_columns([*keys, START_AT]), gone.rename_columns([*keys, _REMEMBERED])
    return _Made(pa.concat_tables(rows), removed, remembered)


def _sequences(table: Table, given: pa.ChunkedArray, t: pa.DataType) -> pa.ChunkedArray:
    """Sequences as a table has them.

    Raises:
        SchemaMismatchError: it does not hold one.
    """
    try:
        return given.cast(t)
    except pa.ArrowException as e:
        raise SchemaMismatchError(f"sequence_by does not fit into {t}, as {table.name} has it: {e}") from e


def _events(keys: pa.Table, sequence: Any, kind: Any, until: Any = None) -> pa.Table:
    """What happened to keys: of which kind, at which place of its rows, and until when a version was to last."""
    known = {"sequence": sequence, "kind": kind.cast(pa.int8()), "place": pa.array(np.arange(len(keys)))}
    known["until"] = pa.nulls(len(keys), sequence.type) if until is None else until
    events = pa.table({f"key {n}": column for n, column in enumerate(keys.columns)} | known)
    return events.cast(pa.schema([f.with_nullable(True) for f in events.schema]))


def _history(events: Sequence[pa.Table]) -> pa.Table:
    """One event for each key and sequence, of the last table that has one; ``ends`` is the sequence of the next."""
    together = pa.concat_tables(events)
    together = together.append_column("later", pa.array(np.arange(len(together))))
    of_key = [n for n in together.column_names if n.startswith("key ")]
    order = [(n, "ascending") for n in (*of_key, "sequence", "later")]
    ordered = together.take(pc.sort_indices(together, sort_keys=order))
    counts = np.append(_differs_from_next(ordered, [*of_key, "sequence"]), True)[: len(ordered)]
    kept = ordered.filter(pa.array(counts))
    last = np.append(_differs_from_next(kept, of_key), True)[: len(kept)]
    following = np.arange(1, len(kept) + 1)
    return kept.append_column("ends", kept["sequence"].take(pa.array(following, mask=last)))


def _table(con: Connection, name: str) -> Table | None:
    try:
        return con.table(name)
    except TableNotFoundError:
        return None


def _keys(table: Table, rows: pa.Table, keys: list[str]) -> pa.Table:
    """Key columns in the table's types; errors as of `lakehead.Table.delete`."""
    fields = pa.schema([handle_of(table).desc.schema.field(k) for k in keys])
    return to_key_table(rows.select(keys), fields, what=f"keys for {table.name}")


def whole_keys(batches: Iterable[pa.RecordBatch], keys: Sequence[str]) -> Iterator[pa.Table]:
    """The same rows in tables of which none ends between two rows of a key; rows of a key are next to each other."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        if batch.num_rows == 0:
            continue
        if held:
            seam = pa.Table.from_batches([held[-1].slice(held[-1].num_rows - 1), batch.slice(0, 1)])
            if _differs_from_next(seam, keys)[0]:
                yield pa.Table.from_batches(held)
                held = []
        ends = np.flatnonzero(_differs_from_next(pa.Table.from_batches([batch]), keys))
        cut = int(ends[-1]) + 1 if len(ends) else 0
        if cut:
            yield pa.Table.from_batches([*held, batch.slice(0, cut)])
            held = []
        held.append(batch.slice(cut))
    if held:
        yield pa.Table.from_batches(held)


def _differs_from_next(rows: pa.Table, names: Sequence[str]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Of each row but the last, whether the next one has something else in one of these columns."""
    differs = np.zeros(max(len(rows) - 1, 0), bool)
    for name in names:
        column = rows[name]
        differs |= _unlike(column.slice(0, len(differs)), column.slice(1))
    return differs


def _unlike(a: Any, b: Any) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which values are not the same; a null is like a null."""
    apart = pc.fill_null(pc.not_equal(a, b), True)
    return np.asarray(pc.and_not(apart, pc.and_(pc.is_null(a), pc.is_null(b))))


def apply_changes(
    changes: DataFrame,
    table: str,
    *,
    keys: Names,
    sequence_by: str | Column,
    apply_as_deletes: str | Column | None,
    column_list: Names | None,
    except_column_list: Names | None,
    stored_as_scd_type: int | str,
    checkpoint: str | None,
    name: str | None,
    trigger: str | None,
) -> StreamingQuery:
    """See `lakehead.spark.apply_changes`."""
    if str(stored_as_scd_type) not in ("1", "2"):
        raise InvalidRequestError(f"stored_as_scd_type={stored_as_scd_type!r} must be 1 or 2")
    if not isinstance(name, str | None):
        raise InvalidRequestError(f"name={name!r} must be text: what Spark calls the query")
    con = connection_of(changes.sparkSession)
    if not changes.isStreaming:
        raise InvalidRequestError("a DataFrame of spark.read does not grow: begin with spark.readStream")
    if column_list is not None and except_column_list is not None:
        raise InvalidRequestError("column_list and except_column_list say the same in two ways: give one of them")
    alike = names_alike(changes)
    of_key = columns_named(changes, "keys", keys, alike)
    not_these: Names = () if except_column_list is None else except_column_list
    left_out = columns_named(changes, "except_column_list", not_these, alike)
    listed = changes.columns if column_list is None else columns_named(changes, "column_list", column_list, alike)
    columns = tuple(c for c in listed if c not in left_out)
    if not of_key or set(of_key) - set(columns):
        raise InvalidRequestError(f"keys={list(of_key)} must name columns that the table gets, {list(columns)}")
    require_columns(changes, of_key, columns, alike)
    scd_type: ScdType = 1 if str(stored_as_scd_type) == "1" else 2
    beside = f"{table}__sequences" if scd_type == 1 else f"{table}__deletes"
    target = _table(con, table)
    known = () if target is None else target.schema.names
    feed = ChangeFeed(
        worker_address(con), table, beside, tuple(named_as(known, of_key)), tuple(named_as(known, columns)), scd_type
    )
    prepared = feed.prepared(changes, columns, sequence_by, apply_as_deletes)
    try:
        schema = written_schema(prepared.schema)
    except InvalidSchemaError as e:
        if e.context.get("column") != _SEQUENCE:
            raise
        raise InvalidRequestError(
            f"sequence_by is of type {prepared.schema[_SEQUENCE].dataType.simpleString()}: changes are ordered by one"
            " number, string or time"
        ) from e
    writer = writer_of(prepared, checkpoint=checkpoint, name=name, trigger=trigger)
    feed.require_tables(con, schema, make=False)
    there: list[int] = []

    def work(rows: DataFrame, batch: JobBatch, *, small: bool) -> None:
        if not there:
            feed.begin(con, schema, batch)
            there.append(batch.number)
        feed.apply(con, rows, batch, small=small)

    return started(prepared, writer, con, work)
