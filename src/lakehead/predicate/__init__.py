"""Filters: one exact Arrow expression, the columns it reads, and bounds by which data can be skipped.

A predicate comes from SQL text (`sql`) or from a ``pyarrow.compute`` expression. On the wire it is Arrow's
own serialization of the expression, never a pickle; its tree is read (`tree`) for both kinds of input, to
find columns and bounds. It is for messages between peers of one version, not for storage.

`Predicate.filter` alone decides which rows match, wherever they come from. Whoever skips data by statistics asks for a
necessary condition (`bounds`, or one made from `tree`) and filters what is left.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from lakehead.env.late_imports import load
from lakehead.env.storage import storage_errors
from lakehead.errors import InvalidPredicateError
from lakehead.predicate.bounds import Bound, bounds_of
from lakehead.predicate.in_turn import InTurn, computed
from lakehead.predicate.nodes import Field, Node, walk
from lakehead.predicate.tree import first_line, read_tree
from lakehead.predicate.work import Work

__all__ = ["PREDICATE_BYTES_MAX", "Bound", "Predicate", "Work", "parse_predicate", "tree_of"]

PREDICATE_BYTES_MAX = 16 << 20
_Rows = TypeVar("_Rows", pa.Table, pa.RecordBatch)


@dataclass(frozen=True, eq=False)
class Predicate:
    """A filter over the rows of one schema.

    Attributes:
        arrow: the exact condition; rows for which it is false or null are dropped.
        columns: top-level columns it reads, sorted.
        bounds: necessary conditions, for skipping data only; may be empty.
        tree: the condition as a tree, to derive other necessary conditions from.
        work: what it takes to compute it.
    """

    arrow: pc.Expression
    columns: tuple[str, ...]
    bounds: tuple[Bound, ...]
    tree: Node = field(repr=False)
    work: Work = field(repr=False)

    def to_bytes(self) -> bytes:
        """The wire form, for `from_bytes`."""
        data: bytes = _serialize(self.arrow).to_pybytes()
        return data

    @classmethod
    def from_bytes(cls, data: bytes, schema: pa.Schema) -> Predicate:
        """Read a wire form and bind it to a schema.

        Raises:
            InvalidPredicateError: the bytes are no predicate, or one that does not fit the schema.
        """
        if len(data) > PREDICATE_BYTES_MAX:
            raise InvalidPredicateError(f"a filter is at most {PREDICATE_BYTES_MAX} bytes long, this has {len(data)}")
        buffer = pa.py_buffer(data)
        tree = read_tree(buffer)
        try:
            arrow: pc.Expression = pc.Expression._deserialize(buffer)
        except (pa.ArrowException, OSError, ValueError, LookupError, MemoryError) as e:
            raise InvalidPredicateError(f"a filter's bytes cannot be read: {e}") from e
        return _bind(arrow, tree, schema)

    def filter(self, table: _Rows, live: pa.BooleanArray | None = None) -> _Rows:
        """The rows for which the predicate is true, in order, with the input's schema.

        Args:
            live: which rows are there; the others are dropped, and the condition is not asked of them. None: all.

        Raises:
            InvalidPredicateError: the condition fails on a row (overflow, text that is no number) which nothing in it
                keeps from that, or a column lacks.
        """
        try:
            met = self._met(table)
        except (pa.ArrowException, KeyError) as e:
            if live is not None and live.false_count:  # it may have failed on one that is not there
                return self.filter(table.filter(live))
            met = self._met_in_turn(table, e)
        if live is not None:
            met = pc.and_(met, live)
        kept = pc.sum(met).as_py() or 0
        return table if kept == table.num_rows else table.filter(met) if kept else table.slice(0, 0)

    def _met(self, table: _Rows) -> pa.Array:
        """Whether each row meets the condition, or null."""
        met = computed(self.arrow, self._read(table))
        if not pa.types.is_boolean(met.type):
            raise pa.ArrowTypeError(f"the condition is of type {met.type}, not bool")
        return met

    def _met_in_turn(self, table: pa.Table | pa.RecordBatch, failure: Exception) -> pa.Array:
        """The same, where the whole condition failed on a row that a part of it may keep the others from."""
        if isinstance(failure, pa.ArrowInvalid) and table.num_rows and (in_turn := InTurn(self.tree)).is_soon_done:
            try:
                return in_turn.value(self._read(table))
            except pa.ArrowException as e:
                failure = e
        raise InvalidPredicateError(f"a filter failed on the rows it read: {first_line(failure)}") from failure

    def _read(self, table: pa.Table | pa.RecordBatch) -> pa.Table:
        read = table.select(self.columns) if self.columns else table
        return read if isinstance(read, pa.Table) else pa.Table.from_batches([read])


def parse_predicate(where: str | pc.Expression, schema: pa.Schema) -> Predicate:
    """A predicate over the schema's columns from SQL text or an Arrow expression.

    SQL follows DuckDB: three-valued logic, NaN is the greatest float. Names match exactly first, else without regard
    to case. Literals take the type of what they are compared with; against a column with a time zone, a timestamp
    without one is UTC.

    Raises:
        InvalidPredicateError: it cannot be parsed, uses something unsupported, does not fit the schema or is no
            condition.
        StorageError: this process may open no more files, and it is the first that is parsed.
    """
    if isinstance(where, str):
        with storage_errors("lakehead.predicate.sql", "load"):
            load("lakehead.predicate.sql")
            from lakehead.predicate.sql import translate

        arrow = translate(where, schema)
    elif isinstance(where, pc.Expression):
        arrow = where
    else:
        raise InvalidPredicateError(
            f"a filter is SQL text or a pyarrow.compute expression, not a {type(where).__name__}"
        )
    return _bind(arrow, tree_of(arrow), schema)


def tree_of(arrow: pc.Expression) -> Node:
    """The tree of an expression.

    Raises:
        InvalidPredicateError: columns are not given by name, or it uses functions that filters may not.
    """
    return read_tree(_serialize(arrow))


def _serialize(arrow: pc.Expression) -> pa.Buffer:
    try:
        buffer: pa.Buffer = arrow.__reduce__()[1][0]
        return buffer
    except pa.ArrowException as e:
        raise InvalidPredicateError(f"a filter's columns must be given by name, its functions by Arrow's: {e}") from e


def _bind(arrow: pc.Expression, tree: Node, schema: pa.Schema) -> Predicate:
    """Check the expression against the schema by filtering no rows with it."""
    columns = tuple(sorted({node.path[0] for node in walk(tree) if isinstance(node, Field)}))
    missing = [c for c in columns if schema.get_field_index(c) < 0]
    if missing:
        raise InvalidPredicateError(f"a filter reads {missing[0]!r}, which is not one of the columns {schema.names}")
    predicate = Predicate(arrow, columns, bounds_of(tree, schema), tree, Work.of(tree, schema))
    try:
        predicate.filter(schema.empty_table())
    except InvalidPredicateError as e:
        raise InvalidPredicateError(f"the filter {_short(arrow)} does not fit the table: {first_line(e)}") from e
    return predicate


def _short(arrow: pc.Expression) -> str:
    text = str(arrow)
    return text if len(text) <= 200 else text[:197] + "..."
