"""`Table`: write, look up, scan, subscribe."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from lakehead.api.alteration import TableAlteration
from lakehead.api.definition import is_text
from lakehead.api.display import Displayed, Handle
from lakehead.api.input import a_dict_is_a_row, in_partitions, rows_for_append, rows_for_delete, rows_for_upsert
from lakehead.api.lake import TableLake, TieringResult, empty_table
from lakehead.api.scan import Scan
from lakehead.api.status import status_table
from lakehead.api.subscription import Subscription, subscribe
from lakehead.api.writer import Writer
from lakehead.client.row_routing import slices
from lakehead.client.table import TableHandle
from lakehead.errors import (
    InvalidRequestError,
    SchemaChangedError,
    SchemaMismatchError,
    WrongTableKindError,
)
from lakehead.format.defaults import default_of
from lakehead.format.plain import PlainKey, PlainRow
from lakehead.format.rows import to_key_table
from lakehead.lake.union_read import Pin, pin_together
from lakehead.protocol.alterations import Alteration
from lakehead.types import TableDescriptor, TabletId, Tier, WriteKind

T = TypeVar("T")
_ATTEMPTS_MAX = 100


@dataclass(frozen=True, repr=False)
class WriteResult(Displayed):
    """What a write did: rows taken (of a delete, rows that existed), and per tablet the offsets ``[start, end)``
    between which its records lie.

    A log tablet's rows fill the range unless another writer wrote at the same time; a keyed tablet's range holds the
    changelog records, of which an update makes two.
    """

    rows: int
    offsets: Mapping[TabletId, tuple[int, int]]

    def _facts(self) -> Mapping[str, object]:
        return {"rows": self.rows, "offsets": self.offsets}


class Table(Handle):
    """A table of a connection. Thread-safe."""

    def __init__(self, handle: TableHandle) -> None:
        self._handle = handle

    def _current(self, call: Callable[[TableHandle], T], *data: object) -> T:
        """Call with the table as it is known, and again where it was altered since and that is what it failed of.

        Args:
            call: what it does is all by the definition that it is given: other threads may find out another one.
            data: what the call reads; nothing that was read is there to be read again.
        """
        once = any(isinstance(d, Iterator | pa.RecordBatchReader) for d in data)
        return self._handle.current(call, self._know, repeat=not once)

    def _know(self, now: TableHandle) -> TableHandle:
        if now.desc.schema_id >= self._handle.desc.schema_id:  # else another thread has a newer one
            self._handle = now
        return self._handle

    def _facts(self) -> Mapping[str, object]:
        desc = self._desc
        return {
            "name": repr(self.name),
            "kind": "primary-key" if desc.keyed else "log",
            "columns": desc.schema.names,
            "primary_key": list(desc.primary_key),
            "partition_by": list(desc.partition_by),
            "buckets": desc.buckets,
            "lake": desc.lake,
            "connection": None if self._handle.open else "closed",
        }

    @property
    def _desc(self) -> TableDescriptor:
        return self._handle.desc

    @property
    def name(self) -> str:
        """``database.table``."""
        return str(self._desc.path)

    @property
    def schema(self) -> pa.Schema:
        """The user's columns; key, bucket-key and partition columns are non-null."""
        return self._desc.schema

    @property
    def primary_key(self) -> list[str]:
        """Key columns; empty for a log table."""
        return list(self._desc.primary_key)

    @property
    def partition_by(self) -> list[str]:
        """Partition columns; empty for a table without."""
        return list(self._desc.partition_by)

    @property
    def buckets(self) -> int:
        """Buckets per partition."""
        return self._desc.buckets

    @property
    def properties(self) -> dict[str, Any]:
        """Properties under the names that `Connection.create_table` takes."""
        return self._desc.properties.to_user()

    def describe(self) -> dict[str, Any]:
        """Everything that defines the table, as plain values; comments and defaults where there are any."""
        desc = self._desc
        return {
            "name": self.name,
            "kind": "primary-key" if desc.keyed else "log",
            "table_id": desc.table_id,
            **_said(desc.comment()),
            "columns": [
                {"name": f.name, "type": str(f.type), "nullable": f.nullable}
                | {**_default(f), **_said(desc.comment(f.name))}
                for f in desc.schemas.current.fields
            ],
            "primary_key": list(desc.primary_key),
            "partition_by": list(desc.partition_by),
            "buckets": desc.buckets,
            "bucket_key": list(desc.bucket_key),
            "lake": desc.lake,
            "properties": self.properties,
        }

    # ---- write ------------------------------------------------------------------------------------------------

    def append(self, data: object) -> WriteResult:
        """Append rows to a log table; returns when they are acknowledged, durable as the table promises.

        Args:
            data: anything with Arrow's C interface (pyarrow, pandas, Polars, DuckDB), a list of dicts, a list of
                tables or batches, a dataset, or an iterator of any of these, which is read to its end. Columns in any
                order; those that may be null may be missing, from single dicts too: they get their default.

        Raises:
            WrongTableKindError: the table has a primary key: upsert.
            SchemaMismatchError, ColumnNotFoundError, NullKeyError: the data does not fit; nothing was written.
        """
        self._require(keyed=False, verb="append", use="upsert")
        return self._current(lambda handle: _write(handle, "append", rows_for_append(handle.desc, data)), data)

    def upsert(self, data: object, *, columns: Sequence[str] | None = None) -> WriteResult:
        """Insert rows, or update those whose key exists. Rows of one key take effect in order.

        Args:
            data: as in `append`. Columns it lacks keep their live value; in rows of new keys they have their default.
            columns: take only these columns of ``data``.

        Raises:
            WrongTableKindError: the table has no primary key: append.
            SchemaMismatchError, ColumnNotFoundError, NullKeyError: the data does not fit; nothing was written.
        """
        self._require(keyed=True, verb="upsert", use="append")
        return self._current(lambda handle: _write(handle, "upsert", rows_for_upsert(handle.desc, data, columns)), data)

    def delete(self, keys: object) -> WriteResult:
        """Delete rows by primary key; keys that do not exist are ignored. ``rows`` of the result is how many existed.

        Args:
            keys: rows that hold at least the primary key columns, or tuples of them; plain values when the key is one
                column.
        """
        self._require(keyed=True, verb="delete", use=None)
        first = self._desc.schema.field(self._desc.primary_key[0]).type
        if isinstance(keys, str) and not (pa.types.is_string(first) or pa.types.is_large_string(first)):
            raise SchemaMismatchError(
                f"delete() of {self.name} takes keys, not a condition such as {keys!r}: find the keys with"
                f" scan(columns={list(self._desc.primary_key)}, where=...)"
            )
        return self._current(lambda handle: _write(handle, "delete", rows_for_delete(handle.desc, keys)), keys)

    def _require(self, *, keyed: bool, verb: str, use: str | None) -> None:
        if self._desc.keyed != keyed:
            kind = "primary-key" if self._desc.keyed else "log"
            hint = f"use {use}()" if use else "its rows expire by log_ttl"
            raise WrongTableKindError(f"cannot {verb} on {self.name}, a {kind} table: {hint}", table=self.name)

    def writer(self, writer_id: str | None = None) -> Writer:
        """A pipelined writer with back-pressure; with ``writer_id`` it resumes (and fences) its predecessor."""
        if writer_id is not None and (not is_text(writer_id) or not writer_id):
            raise InvalidRequestError(f"writer_id={writer_id!r} must be a name, such as 'etl-7'")
        handle = self._handle
        named = handle.writers.named(writer_id) if writer_id is not None else handle.writers.anonymous()
        return Writer(handle, named, named=writer_id is not None)

    # ---- look up ----------------------------------------------------------------------------------------------

    def lookup(self, keys: object) -> pa.Table:
        """Rows of these keys, in the order asked; keys that do not exist are left out.

        Args:
            keys: a table, a list of dicts or a list of tuples of the primary key columns, or a list of values when the
                key is one column.
        """
        self._require(keyed=True, verb="look up", use="scan")
        what = f"keys of {self.name}"
        with a_dict_is_a_row(keys):
            asked = to_key_table(keys, self._desc.key_columns, what=what)

        def found(handle: TableHandle) -> pa.Table:
            parts = [handle.lookups.by_key(batch) for batch in slices(in_partitions(handle.desc, asked, what))]
            return parts[0] if len(parts) == 1 else pa.concat_tables(parts)

        return self._current(found)

    def get(self, key: object) -> dict[str, Any] | None:
        """One row as a dict, or None. ``key``: a value, a tuple in key order, or a dict."""
        if isinstance(key, list | set | range):
            raise SchemaMismatchError(f"get() of {self.name} takes one key, {key!r} may be several: use lookup()")
        self._require(keyed=True, verb="look up", use="scan")
        plain = self._handle.lookups.plain_key(key)
        found = self.lookup([key]) if plain is None else self._current(lambda handle: self._row(handle, plain))
        try:
            return next(iter(found.to_pylist()), None)
        except (OverflowError, ValueError) as e:
            raise InvalidRequestError(
                f"the row of {self.name} holds a moment that is no Python date or datetime ({e}): use lookup(), which"
                " answers in Arrow"
            ) from e

    def _row(self, handle: TableHandle, key: PlainKey) -> pa.Table | PlainRow:
        if not handle.lookups.plain:  # it was altered meanwhile
            return self.lookup([key])
        return PlainRow(handle.desc.schema, handle.lookups.row(key))

    def prefix_lookup(self, prefix: object) -> pa.Table:
        """All rows whose partition columns and bucket key equal one of these, in no particular order.

        Args:
            prefix: rows of those columns, or a list of values when it is one column.

        Raises:
            InvalidRequestError: the bucket key is no prefix of the primary key.
            LimitExceededError: one of them has rows of more than 64 MiB in a tablet: scan for these.
        """
        self._require(keyed=True, verb="look up", use="scan")
        what = f"prefixes of {self.name}"

        def found(handle: TableHandle) -> pa.Table:
            desc = handle.desc
            asked = {*desc.partition_by, *(desc.prefix_key or desc.bucket_key)}
            schema = pa.schema([desc.schema.field(c) for c in desc.primary_key if c in asked])
            prefixes = to_key_table(prefix, schema, what=what)
            return handle.lookups.by_prefix(_one_batch(in_partitions(desc, prefixes, what)))

        return self._current(found, prefix)

    # ---- read -------------------------------------------------------------------------------------------------

    def scan(
        self,
        columns: Sequence[str] | None = None,
        where: str | pc.Expression | None = None,
        *,
        tier: Tier = "union",
        snapshot: int | dt.datetime | None = None,
        limit: int | None = None,
        system_columns: bool = False,
    ) -> Scan:
        """A consistent read of the table as of now.

        Args:
            columns: the columns wanted, in this order; None for all.
            where: SQL text or a `pyarrow.compute.Expression`; pushed into both tiers, applied exactly.
            tier: ``"union"``: lake and log joined at one offset; ``"lake"``: what the lake holds; ``"hot"``: what it
                does not hold yet.
            snapshot: read the lake alone, as of this lake snapshot, or as of a time with a zone.
            limit: at most so many rows, any.
            system_columns: add ``__bucket``, ``__offset`` and ``__timestamp``.

        Raises:
            ColumnNotFoundError, InvalidPredicateError, NoLakeError, SnapshotNotFoundError.
        """
        return self._current(
            lambda handle: Scan(
                handle,
                columns=columns,
                where=where,
                tier=tier,
                snapshot=snapshot,
                limit=limit,
                system_columns=system_columns,
            )
        )

    def subscribe(
        self,
        start: Literal["latest", "earliest", "full"] | dt.datetime | Mapping[TabletId, int] = "latest",
        columns: Sequence[str] | None = None,
        where: str | pc.Expression | None = None,
        stop: Literal["now"] | Mapping[TabletId, int] | None = None,
    ) -> Subscription:
        """Rows pushed as soon as they are readable; each item is a `Batch`.

        When the table is altered, batches have its new columns from some offset of each tablet on; a column that was
        named, here or in ``where``, and is gone ends the subscription with `ColumnNotFoundError` or
        `InvalidPredicateError`.

        Args:
            start: ``"latest"``: what comes from now on; ``"earliest"``: everything there is, then what comes;
                ``"full"``: the current rows, then the changes, joined at one offset; a datetime: from the first row
                committed at or after it; or an offset per tablet (tablets not named start at their beginning).
            columns: the user columns wanted; None for all.
            where: rows wanted; on a keyed table each image is filtered on its own, so that an update may arrive as a
                lone -U or +U.
            stop: None: never ends; ``"now"``: ends at what was readable at the call; or an end offset per tablet.
        """
        return self._current(lambda handle: subscribe(handle, start=start, columns=columns, where=where, stop=stop))

    # ---- lake and state ---------------------------------------------------------------------------------------

    @property
    def lake(self) -> TableLake:
        """The table's lake.

        Raises:
            NoLakeError: it has none.
        """
        self._desc.require_lake()
        return TableLake(self._handle)

    def _tier(self) -> TieringResult:
        self._desc.require_lake()
        return TableLake(self._handle).tier()

    # ---- definition -------------------------------------------------------------------------------------------

    def alter(self) -> TableAlteration:
        """Change the table's columns and properties: ``with table.alter() as a: a.add_column("note", pa.string())``.

        Raises, at the end of the block:
            ColumnNotFoundError, InvalidSchemaError, InvalidPropertyError, SchemaChangedError, LakeStateError: nothing
                was changed.
        """
        return TableAlteration(self._alter)

    def truncate(self) -> dict[TabletId, int]:
        """Take all rows away, out of the log and out of the lake; columns, properties and the lake table stay.

        Rows that are written meanwhile stay if their offset is not below those that are returned. Pinned scans keep
        what they pinned. Subscriptions of a keyed table see each row deleted; those of a log table that are behind go
        on after the rows if the table has a lake, and else end with `OffsetOutOfRangeError`.

        Returns:
            The offset at which it was done, of each tablet; it goes on from there.

        Raises:
            UnavailableError: the lake's catalog cannot be reached; nothing was changed.
            CommitConflictError: others kept changing the lake; nothing was changed.
            CommitUnknownError: whether the lake took it is not known; do it again.
        """
        ends = self._current(empty_table)
        return {self._desc.tablet_id(key): end for key, end in ends.items()}

    def _alter(self, changes: Sequence[Alteration]) -> None:
        self._handle = self._handle.altered(changes)

    def status(self) -> pa.Table:
        """One row a tablet: partition, bucket, start_offset, high_watermark, tiered_offset, rows, lag_rows (records
        that the lake lacks; 1 at least where it has rows of an overwritten partition), lag_seconds (age of the oldest
        row that is not in the lake; null without a lake), damage (what is known to be wrong with the tablet's files;
        null when nothing is)."""
        return self._current(status_table)


def _default(f: pa.Field) -> dict[str, Any]:
    value = default_of(f)
    return {} if value is None else {"default": value.as_py()}


def _said(comment: str | None) -> dict[str, str]:
    return {} if comment is None else {"comment": comment}


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [c.combine_chunks() if c.num_chunks != 1 else c.chunk(0) for c in table.columns], schema=table.schema
    )


def _write(handle: TableHandle, kind: WriteKind, rows: pa.Table) -> WriteResult:
    if rows.num_rows == 0:
        return WriteResult(0, {})
    parts = handle.writers.write(kind, rows)
    # The records of a delete are the rows that it took away.
    changed = sum(end - start for _, (start, end) in parts) if kind == "delete" else rows.num_rows
    return _write_result(handle.desc, changed, parts)


def _write_result(desc: TableDescriptor, rows: int, parts: Sequence[tuple[Any, tuple[int, int]]]) -> WriteResult:
    """Join the parts of a write per tablet."""
    ranges: dict[TabletId, tuple[int, int]] = {}
    for key, (start, end) in parts:
        tablet = desc.tablet_id(key)
        low, high = ranges.get(tablet, (start, end))
        ranges[tablet] = (min(low, start), max(high, end))
    return WriteResult(rows, ranges)


def pinned_together(open_table: Callable[[str], Table], names: Iterable[str]) -> dict[str, tuple[Table, Pin]]:
    """Tables of one connection by their names, and a union read of each, all pinned as of one moment.

    Raises:
        SchemaChangedError: one of them is altered all the time.
        LakeStateError: as `lakehead.lake.union_read.pin`.
    """
    names = sorted(names)
    for left in reversed(range(_ATTEMPTS_MAX)):
        tables = {name: open_table(name) for name in names}
        try:
            pins = pin_together([handle_of(t) for t in tables.values()])
            return dict(zip(tables, zip(tables.values(), pins, strict=True), strict=True))
        except SchemaChangedError:  # altered since it was opened a moment ago
            if not left:
                raise
    return {}


def handle_of(table: Table) -> TableHandle:
    """What a table is to engines and tools that are built on it."""
    return table._handle
