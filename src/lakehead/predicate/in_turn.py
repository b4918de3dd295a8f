"""A condition part by part, each asked only of the rows that it is needed for.

Arrow computes all parts of an expression for all rows. So a cast fails on a row that another condition of the filter
drops, or that a CASE keeps from it. In SQL both are how one guards a cast. What is computed here has the same value
wherever all parts can be computed; it takes several times as long, and is for rows on which the whole condition failed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

# Not pyarrow.acero, which re-exports these but also imports pyarrow.dataset and with it pandas: 0.8 s.
from pyarrow import _acero as acero

from lakehead.predicate.nodes import Call, Field, Node, Scalar, walk

NODES_MAX = 1000
"""Of a condition that is computed so."""
_TIMES, _MORE = 4, 1000
"""So often, on the average, may a node be computed, and so many more: parts that fail are asked again, and so are those
within them, which doubles with each level."""
_JOINS = {"and_kleene": False, "or_kleene": True}
_CHOOSES = frozenset((*_JOINS, "if_else", "coalesce"))
_Mask = npt.NDArray[np.bool_]


def computed(arrow: pc.Expression, rows: pa.Table) -> pa.Array:
    """The value of an expression in each row, all of it for all rows.

    Raises:
        pa.ArrowException: it fails on a row.
    """
    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(rows))
    told = acero.Declaration("project", acero.ProjectNodeOptions([arrow], ["value"]))
    return acero.Declaration.from_sequence([source, told]).to_table(use_threads=False).column(0).combine_chunks()


class InTurn:
    """A condition that is computed part by part.

    Args:
        tree: of the condition.
    """

    def __init__(self, tree: Node) -> None:
        self._tree = tree
        self._sizes: dict[int, int] = {}
        self._choosing: set[int] = set()
        self._left = 0
        self._measure(tree)

    def _measure(self, tree: Node) -> None:
        """Note how many nodes are in each, and which of them chooses, or has one that does."""
        for node in reversed(list(walk(tree))):  # what is within a node comes after it
            within = node.arguments if isinstance(node, Call) else []
            self._sizes[id(node)] = 1 + sum(self._sizes[id(n)] for n in within)
            if (isinstance(node, Call) and node.function in _CHOOSES) or any(id(n) in self._choosing for n in within):
                self._choosing.add(id(node))

    @property
    def is_soon_done(self) -> bool:
        """Whether the condition chooses between parts at all, and has not too many of them."""
        return id(self._tree) in self._choosing and self._sizes[id(self._tree)] <= NODES_MAX

    def value(self, rows: pa.Table) -> pa.Array:
        """The value of the condition in each row.

        Raises:
            pa.ArrowException: a part fails on a row that it is needed for, or parts fail again and again.
        """
        self._left = _TIMES * self._sizes[id(self._tree)] + _MORE
        return self._value(self._tree, rows)

    def _value(self, node: Node, rows: pa.Table, t: pa.DataType | None = None) -> pa.Array:
        """Of one node; ``t`` is the type that is needed of one that chooses a value, None its own."""
        if id(node) not in self._choosing:
            return self._computed(node, rows, self._sizes[id(node)])
        assert isinstance(node, Call)
        if node.function in _JOINS:
            return self._joined(list(_chain(node, node.function)), rows, stops=_JOINS[node.function])
        if node.function in ("if_else", "coalesce"):
            # What each part has in itself may be narrower than what all have together.
            t = t or self._computed(node, rows.slice(0, 0), self._sizes[id(node)]).type
            return self._chosen(node, rows, t) if node.function == "if_else" else self._first_valid(node, rows, t)
        given = []
        for argument in node.arguments:
            if id(argument) in self._choosing:
                name = next(n for n in map("value {}".format, itertools.count()) if n not in rows.column_names)
                rows, argument = rows.append_column(name, self._value(argument, rows)), Field((name,))
            given.append(argument)
        return self._computed(replace(node, arguments=given), rows, self._sizes[id(node)])

    def _computed(self, node: Node, rows: pa.Table, size: int) -> pa.Array:
        self._left -= size
        if self._left < 0:
            raise pa.ArrowInvalid("its parts fail again and again on the rows that others leave")
        return computed(_expression(node), rows)

    def _joined(self, parts: list[Node], rows: pa.Table, *, stops: bool) -> pa.Array:
        """AND, whose parts are not asked where one of them is false, or OR, where one is true: ``stops``. A part that
        fails has a second chance after the others."""
        join = pc.or_kleene if stops else pc.and_kleene
        met = pa.repeat(pa.scalar(not stops), rows.num_rows)
        for last in (False, True):
            failed = []
            for part in parts:
                asked = ~_bools(pc.equal(met, stops).fill_null(False))
                try:
                    found = self._value(part, rows.filter(pa.array(asked)))
                except pa.ArrowException:
                    if last or len(parts) == 1 or self._left < 0:
                        raise
                    failed.append(part)
                else:
                    met = join(met, _placed([(asked, found)], pa.repeat(pa.scalar(stops), rows.num_rows)))
            parts = failed
        return met

    def _chosen(self, node: Call, rows: pa.Table, t: pa.DataType) -> pa.Array:
        condition = self._value(node.arguments[0], rows)
        valid = _bools(condition.is_valid())
        true = _bools(condition.fill_null(False))
        parts = [(mask, self._value(part, rows.filter(pa.array(mask)), t))
                 for mask, part in zip((true, valid & ~true), node.arguments[1:], strict=True)]  # fmt: skip
        return _placed(parts, pa.nulls(rows.num_rows, t))

    def _first_valid(self, node: Call, rows: pa.Table, t: pa.DataType) -> pa.Array:
        found = pa.nulls(rows.num_rows, t)
        for part in node.arguments:
            missing = ~_bools(found.is_valid())
            found = _placed([(missing, self._value(part, rows.filter(pa.array(missing)), t))], found)
        return found


def _chain(node: Node, function: str) -> Iterator[Node]:
    """What calls of one function that stand in one another join, in order."""
    pending = [node]
    while pending:
        at = pending.pop()
        if isinstance(at, Call) and at.function == function:
            pending += reversed(at.arguments)
        else:
            yield at


def _bools(values: pa.Array) -> _Mask:
    found: _Mask = values.to_numpy(zero_copy_only=False)
    return found


def _placed(parts: list[tuple[_Mask, pa.Array]], others: pa.Array) -> pa.Array:
    """``others`` with the values of each part, as their type, where its mask is true."""
    at, end = np.arange(len(others)), len(others)
    for mask, values in parts:
        at[mask] = np.arange(end, end + len(values))
        end += len(values)
    return pa.concat_arrays([others, *(values.cast(others.type) for _, values in parts)]).take(pa.array(at))


def _expression(node: Node) -> pc.Expression:
    """A tree as Arrow's expression; see `tree` for how it is serialized."""
    pairs: list[tuple[str, str]] = []
    scalars: list[Any] = []

    def add(value: pa.Scalar) -> str:
        scalars.append(value)
        return str(len(scalars) - 1)

    pending: list[Node | tuple[str, str]] = [node]
    while pending:
        at = pending.pop()
        if isinstance(at, tuple):
            pairs.append(at)
        elif isinstance(at, Field):
            nested = [("nested_field_ref", str(len(at.path)))] if len(at.path) > 1 else []
            pairs += [*nested, *(("field_ref", name) for name in at.path)]
        elif isinstance(at, Scalar):
            pairs.append(("literal", add(at.value)))
        else:
            pairs.append(("call", at.function))
            pending.append(("end", at.function))
            pending += [("options", add(at.options))] if at.options is not None else []
            pending += reversed(at.arguments)
    schema = pa.schema([pa.field(str(i), s.type) for i, s in enumerate(scalars)], metadata=pa.KeyValueMetadata(pairs))
    columns = [pa.repeat(s, 1) for s in scalars]
    rows = pa.RecordBatch.from_arrays(columns, schema=schema) if columns else _no_columns(schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(rows)
    return pc.Expression._deserialize(sink.getvalue())


def _no_columns(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_struct_array(pa.array([{}], pa.struct([]))).replace_schema_metadata(schema.metadata)
