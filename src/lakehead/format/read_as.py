"""Rows as their table is defined now, whatever definition they were written under.

`FrameBody.rows` gives rows as they lie in the log. Whoever wants rows of the table, from frames, checkpoints or files
of a lake, binds here what was written to what is wanted, by field id: a field that was renamed or moved is the same
one, one that is newer than the rows has its default (`lakehead.format.defaults`), one that was dropped is not read, and
a wider type holds the same values. Rows that were written under the wanted definition pass as they are: not copied,
cast or looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakehead.errors import CorruptionError
from lakehead.format.arrays import to_arrow
from lakehead.format.defaults import absent, absent_may_match
from lakehead.format.frame import FrameBody
from lakehead.format.statistics import may_match
from lakehead.predicate import Bound
from lakehead.types import Schemas, TableSchema, children, field_id, without_ids


def read_as(body: FrameBody, schemas: Schemas, columns: Sequence[int] | None = None) -> pa.RecordBatch:
    """The rows of a frame as rows of the current schema.

    Args:
        columns: as in `FrameBody.rows`, positions in the current schema.

    Raises:
        CorruptionError: the frame cannot be decoded; there is no schema of its id, or it cannot be read as the current.
        SchemaChangedError: it was written under a newer schema.
    """
    wanted = schemas.current
    if body.schema_id == wanted.id:
        return body.rows(wanted.columns, columns)
    written = schemas.written(body.schema_id)
    binding = _binding(written, wanted, columns if columns is None else tuple(columns))
    return _bound(binding, body.rows(written.columns, binding.read), written, wanted)


def rows_as(
    rows: pa.RecordBatch, schema_id: int, schemas: Schemas, columns: Sequence[int] | None = None
) -> pa.RecordBatch:
    """`read_as` for rows that are decoded already; they have all columns that they were written with."""
    wanted = schemas.current
    if schema_id == wanted.id:
        return rows if columns is None else rows.select(list(columns))
    written = schemas.written(schema_id)
    binding = _binding(written, wanted, columns if columns is None else tuple(columns))
    return _bound(binding, rows.select(list(binding.read)), written, wanted)


def given_as(rows: pa.RecordBatch, schema_id: int, schemas: Schemas) -> pa.RecordBatch:
    """Rows that a writer gave under one schema, with all its columns or some, as columns of the current one, in its
    order. What was dropped since is left out; what is newer is not given.

    Raises:
        CorruptionError: there is no schema of this id, or the rows cannot be read as the current.
    """
    written, wanted = schemas.of(schema_id), schemas.current
    given = {field_id(written.fields.field(name)) for name in rows.schema.names}
    fields = [f for f in wanted.fields if field_id(f) in given]
    there = [written.fields.field(name) for name in rows.schema.names]
    binding = Binding.of(there, fields)
    return _bound(binding, rows.select(list(binding.read)), written, wanted)


def cast_to(schema: pa.Schema, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The columns of a schema, by their names, from a batch that has them, perhaps among others, in its types.

    Raises:
        pa.ArrowInvalid: a value does not fit.
    """
    if not len(schema):
        return batch.select([])
    if batch.schema.equals(schema):
        return batch
    columns = zip((batch.column(f.name) for f in schema), schema, strict=True)
    return pa.RecordBatch.from_arrays([_cast(column, f.type) for column, f in columns], schema=schema)


def _cast(column: pa.Array, t: pa.DataType) -> pa.Array:
    """The values in another type, which a lake may have widened.

    Raises:
        pa.ArrowInvalid: one does not fit.
    """
    if column.type == t:
        return column
    cast = column.cast(t)
    if _narrows(column.type, t):
        _require_finite(column, cast)
    return cast


def _narrows(before: pa.DataType, after: pa.DataType) -> bool:
    """Whether doubles become floats, at any depth."""
    if pa.types.is_floating(after):
        return pa.types.is_floating(before) and after.bit_width < before.bit_width
    pairs = zip(children(before), children(after), strict=False)
    return any(_narrows(a.type, b.type) for a, b in pairs)


def _require_finite(before: pa.Array, after: pa.Array) -> None:
    """Refuse what only became infinite, which Arrow does not, as it does integers."""
    if not _narrows(before.type, after.type):
        return
    if pa.types.is_floating(after.type):
        grown = pc.and_kleene(pc.is_inf(after), pc.is_finite(before))
        if pc.any(grown).as_py():
            raise pa.ArrowInvalid(f"Float value {pc.filter(before, grown)[0]} not in range of {after.type}")
    else:
        for inner in zip(_parts(before), _parts(after), strict=True):
            _require_finite(*inner)


def _parts(array: pa.Array) -> list[pa.Array]:
    if pa.types.is_map(array.type):
        whole = _alone(array)
        return [whole.keys, whole.items]
    found: list[pa.Array] = array.flatten() if pa.types.is_struct(array.type) else [array.flatten()]
    return found


def _alone(array: pa.Array) -> pa.Array:
    """The same values with parts of their own: those of a slice begin elsewhere, and hold more."""
    return array.take(to_arrow(np.arange(len(array))))


def may_match_as(body: FrameBody, schemas: Schemas, bounds: Iterable[Bound]) -> bool:
    """False only when no row of a frame with statistics satisfies all bounds, which name columns of the current schema.

    Raises:
        CorruptionError: the statistics contradict themselves; there is no schema of the frame's id.
    """
    wanted = schemas.current
    if body.schema_id == wanted.id:
        return may_match(body.statistics, wanted.columns, bounds)
    written = schemas.written(body.schema_id)
    names = {field_id(f): f.name for f in written.fields}
    known = []
    for bound in bounds:
        at = wanted.fields.get_field_index(bound.column)
        if at < 0:
            continue
        f = wanted.fields.field(at)
        name = names.get(field_id(f))
        if name is not None:
            known.append(replace(bound, column=name))
        elif not absent_may_match(f, bound):
            return False
    return may_match(body.statistics, written.columns, known)


@lru_cache(maxsize=256)
def _binding(written: TableSchema, wanted: TableSchema, columns: tuple[int, ...] | None) -> Binding:
    positions = range(len(wanted.fields)) if columns is None else columns
    binding = Binding.of(written.fields, [wanted.fields.field(i) for i in positions])
    for f, at in zip(binding.schema, binding.places, strict=True):
        if at is None and not f.nullable:
            raise CorruptionError(
                f"schema {wanted.id} requires column {f.name!r}, which rows of schema {written.id} do not have",
                column=f.name,
            )
    return binding


def _bound(binding: Binding, rows: pa.RecordBatch, written: TableSchema, wanted: TableSchema) -> pa.RecordBatch:
    try:
        return binding.rows(rows)
    except pa.ArrowException as e:
        raise CorruptionError(f"rows of schema {written.id} cannot be read as schema {wanted.id}: {e}") from e


@dataclass(frozen=True)
class Binding:
    """Where the columns wanted are among those written, inside too.

    Attributes:
        read: positions of the written columns that are needed.
        places: per wanted column its place in ``read``; None for one that is not there.
        schema: the columns wanted, as rows have them.
    """

    read: tuple[int, ...]
    places: tuple[int | None, ...]
    schema: pa.Schema
    _there: tuple[pa.DataType, ...]
    _wanted: tuple[pa.Field, ...]

    @classmethod
    def of(cls, written: Iterable[pa.Field], wanted: Sequence[pa.Field]) -> Binding:
        """Bind by id: all fields have one, but for those that are written and not wanted."""
        there = list(written)
        ids = _by_id(there)
        found = [ids.get(field_id(f)) for f in wanted]
        read = [at for at in found if at is not None]
        places = iter(range(len(read)))
        return cls(
            tuple(read),
            tuple(None if at is None else next(places) for at in found),
            pa.schema(without_ids(wanted)),
            tuple(there[at].type for at in read),
            tuple(wanted),
        )

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows with the columns wanted, from a batch with the columns of ``read``.

        Raises:
            pa.ArrowInvalid: a value does not fit.
        """
        if not len(self.schema):
            return batch.select([])
        return pa.RecordBatch.from_arrays(list(self._columns(batch)), schema=self.schema)

    def _columns(self, batch: pa.RecordBatch) -> Iterator[pa.Array]:
        for at, f, wanted in zip(self.places, self.schema, self._wanted, strict=True):
            if at is None:
                yield absent(wanted, batch.num_rows)
            else:
                yield _cast(_pick(batch.column(at), self._there[at], wanted.type), f.type)


def _by_id(fields: Iterable[pa.Field]) -> dict[int | None, int]:
    """Place of each field that has an id."""
    return {i: at for at, f in enumerate(fields) if (i := field_id(f)) is not None}


def same_inside(written: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values have the same fields inside, by id, name and place."""
    a, b = children(written), children(wanted)
    if pa.types.is_struct(wanted) and [(field_id(f), f.name) for f in a] != [(field_id(f), f.name) for f in b]:
        return False
    return len(a) == len(b) and all(same_inside(x.type, y.type) for x, y in zip(a, b, strict=True))


def _pick(array: pa.Array, there: pa.DataType, wanted: pa.DataType) -> Any:
    """The array with the fields inside that are wanted, by their names; their types may be narrower still."""
    if not pa.types.is_nested(wanted) or same_inside(there, wanted):
        return array
    if pa.types.is_null(there):  # as writers write a column without values
        return pa.nulls(len(array), wanted)
    if any(is_one(there) != is_one(wanted) for is_one in (pa.types.is_nested, pa.types.is_struct, pa.types.is_map)):
        raise pa.ArrowInvalid(f"{there} is no {wanted}")
    array = _alone(array)
    if pa.types.is_struct(wanted):
        fields, ids = children(there), _by_id(children(there))
        parts = []
        for f in children(wanted):
            at = ids.get(field_id(f))
            parts.append(
                pa.nulls(len(array), f.type) if at is None else _pick(array.field(at), fields[at].type, f.type)
            )
        named = [pa.field(f.name, part.type) for f, part in zip(children(wanted), parts, strict=True)]
        return pa.StructArray.from_arrays(parts, fields=named, mask=array.is_null())
    mask = array.is_null()
    if pa.types.is_map(wanted):
        keys, items = (
            _pick(part, a.type, b.type)
            for part, a, b in zip((array.keys, array.items), children(there), children(wanted), strict=True)
        )
        return pa.MapArray.from_arrays(array.offsets, keys, items, mask=mask)
    values = _pick(array.values, there.value_type, wanted.value_type)
    kind = pa.LargeListArray if pa.types.is_large_list(there) else pa.ListArray
    return kind.from_arrays(array.offsets, values, mask=mask)
