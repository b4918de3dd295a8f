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

PARTS_MAX = 100
"""Calls that choose, of one condition: each takes a pass over rows of its own, two at most."""
_JOINS = {"and_kleene": False, "or_kleene": True}
_CHOOSES = frozenset((*_JOINS, "if_else", "coalesce"))
_Mask = npt.NDArray[np.bool_]


def soon_done(tree: Node) -> bool:
    """Whether the condition chooses between parts, and not too many of them."""
    parts = sum(_chooses(node) for node in walk(tree))
    return 0 < parts <= PARTS_MAX


def computed(arrow: pc.Expression, rows: pa.Table) -> pa.Array:
    """The value of an expression in each row.

    Raises:
        pa.ArrowException: it fails on a row.
    """
    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(rows))
    told = acero.Declaration("project", acero.ProjectNodeOptions([arrow], ["value"]))
    return acero.Declaration.from_sequence([source, told]).to_table(use_threads=False).column(0).combine_chunks()


def value_in_turn(node: Node, rows: pa.Table) -> pa.Array:
    """The value of a condition, or of a part of one, in each row.

    Raises:
        pa.ArrowException: a part fails on a row that it is needed for.
    """
    if not any(map(_chooses, walk(node))):
        return computed(_expression(node), rows)
    assert isinstance(node, Call)
    if node.function in _JOINS:
        return _joined(list(_chain(node, node.function)), rows, stops=_JOINS[node.function])
    if node.function in ("if_else", "coalesce"):
        # Of all its parts; what each has in itself may be narrower.
        t = computed(_expression(node), rows.slice(0, 0)).type
        return _chosen(node, rows, t) if node.function == "if_else" else _first_valid(node.arguments, rows, t)
    given = []
    for argument in node.arguments:
        if any(map(_chooses, walk(argument))):
            name = next(n for n in map("value {}".format, itertools.count()) if n not in rows.column_names)
            rows, argument = rows.append_column(name, value_in_turn(argument, rows)), Field((name,))
        given.append(argument)
    return computed(_expression(replace(node, arguments=given)), rows)


def _chooses(node: Node) -> bool:
    return isinstance(node, Call) and node.function in _CHOOSES


def _chain(node: Node, function: str) -> Iterator[Node]:
    """What calls of one function that stand in one another join, in order."""
    pending = [node]
    while pending:
        at = pending.pop()
        if isinstance(at, Call) and at.function == function:
            pending += reversed(at.arguments)
        else:
            yield at


def _joined(parts: list[Node], rows: pa.Table, *, stops: bool) -> pa.Array:
    """AND, whose parts are not asked where one of them is false, or OR, where one is true: ``stops``. A part that fails
    has a second chance after the others."""
    join = pc.or_kleene if stops else pc.and_kleene
    met = pa.repeat(pa.scalar(not stops), rows.num_rows)
    for last in (False, True):
        failed = []
        for part in parts:
            asked = ~_bools(pc.equal(met, stops).fill_null(False))
            try:
                found = value_in_turn(part, rows.filter(pa.array(asked)))
            except pa.ArrowException:
                if last:
                    raise
                failed.append(part)
            else:
                met = join(met, _placed([(asked, found)], pa.repeat(pa.scalar(stops), rows.num_rows)))
        parts = failed
    return met


def _chosen(node: Call, rows: pa.Table, t: pa.DataType) -> pa.Array:
    condition = value_in_turn(node.arguments[0], rows)
    valid = _bools(condition.is_valid())
    true = _bools(condition.fill_null(False))
    parts = [(mask, value_in_turn(part, rows.filter(pa.array(mask))))
             for mask, part in zip((true, valid & ~true), node.arguments[1:], strict=True)]  # fmt: skip
    return _placed(parts, pa.nulls(rows.num_rows, t))


def _first_valid(parts: list[Node], rows: pa.Table, t: pa.DataType) -> pa.Array:
    found = pa.nulls(rows.num_rows, t)
    for part in parts:
        missing = ~_bools(found.is_valid())
        found = _placed([(missing, value_in_turn(part, rows.filter(pa.array(missing))))], found)
    return found


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
