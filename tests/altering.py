"""Changes of tables for tests: what may be done next, and what a table is then, in plain values.

A column is known by a number of its own, whatever it is called: so models of tables hold rows by these numbers.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, TypeVar

import pyarrow as pa

from lakehead.format.defaults import default_of, default_text, with_default
from lakehead.protocol.alterations import (
    AddColumn,
    Alteration,
    DropColumn,
    MakeNullable,
    RenameColumn,
    WidenColumn,
)
from lakehead.protocol.schemas import field_from_text, field_to_text

T = TypeVar("T")
Choose = Callable[[Sequence[T]], T]
Row = Mapping[int, Any]
"""Values by the numbers of their columns; what is not there has the default of its column."""

SPOT = pa.struct([("x", pa.int32()), ("tags", pa.list_(pa.string()))])
TYPES = (
    pa.int8(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string(), pa.bool_(), pa.date32(),
    pa.decimal128(5, 2), SPOT,
)  # fmt: skip
_TEXTS = ("", "text", "x" * 40, "é", "é" * 20 + "x", "a longer text, past what fits inline")
"""Of no byte, of as many as live rows hold by slot, and of one more."""
_WIDER = {
    pa.int8(): (pa.int16(), pa.int32(), pa.int64()),
    pa.int16(): (pa.int32(), pa.int64()),
    pa.int32(): (pa.int64(),),
    pa.float32(): (pa.float64(),),
    pa.decimal128(5, 2): (pa.decimal128(9, 2), pa.decimal128(38, 2)),
    pa.decimal128(9, 2): (pa.decimal128(38, 2),),
}


@dataclass(frozen=True)
class Column:
    """One column of a `Shape`, or one field of a struct; no other of its table ever has its number.

    Values of structs are held by the numbers of their fields, too.
    """

    number: int
    name: str
    plain: pa.DataType
    nullable: bool
    default: Any = None
    inside: tuple[Column, ...] = ()

    @classmethod
    def of_field(cls, f: pa.Field, numbers: Iterator[int], default: Any = None) -> Column:
        number = next(numbers)
        inside = tuple(cls.of_field(i, numbers) for i in f.type) if pa.types.is_struct(f.type) else ()
        return cls(number, f.name, f.type, f.nullable, default, inside)

    @property
    def field(self) -> pa.Field:
        return pa.field(self.name, self.type, self.nullable)

    @property
    def type(self) -> pa.DataType:
        return pa.struct([c.field for c in self.inside]) if self.inside else self.plain

    def of(self, row: Row) -> Any:
        """What it is in a row."""
        if self.number not in row:
            return self.default
        value = row[self.number]
        return {c.name: c.of(value) for c in self.inside} if self.inside and value is not None else value

    def held(self, value: Any) -> Any:
        """Inverse of `of`."""
        if not self.inside or value is None:
            return value
        return {c.number: c.held(value.get(c.name)) for c in self.inside}


@dataclass(frozen=True)
class Shape:
    """The columns of a table as they are now; ``next`` is the number of the next one."""

    columns: tuple[Column, ...]
    next: int

    @classmethod
    def of(cls, schema: pa.Schema) -> Shape:
        """That of a table that is new."""
        numbers = itertools.count()
        columns = tuple(Column.of_field(f, numbers) for f in schema)
        return cls(columns, next(numbers))

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([c.field for c in self.columns])

    @property
    def names(self) -> list[str]:
        return [c.name for c in self.columns]

    def named(self, name: str) -> Column:
        return _named(self.columns, name)

    def shown(self, row: Row) -> dict[str, Any]:
        """A row as the table shows it now."""
        return {c.name: c.of(row) for c in self.columns}

    def held(self, row: Mapping[str, Any], old: Row | None = None) -> dict[int, Any]:
        """Inverse of `shown`, over what the row was, of which columns that are not given are left."""
        new = {c.number: c.held(value) for name, value in row.items() for c in (self.named(name),)}
        return {**(old or {}), **new}

    def after(self, change: Alteration) -> Shape:
        """The columns once this is done."""
        assert isinstance(change, AddColumn | RenameColumn | DropColumn | WidenColumn | MakeNullable)
        numbers = itertools.count(self.next)
        columns = _after(self.columns, change.name.split("."), change, numbers)
        return Shape(columns, next(numbers))

    def next_change(self, choose: Choose[Any], *, fixed: Sequence[str], types: Sequence[pa.DataType]) -> Alteration:
        """Some change that is possible; ``fixed`` columns stay as they are. Names that were given up come again."""
        whole = [c for c in self.columns if c.inside and c.name not in fixed]
        if whole and choose([False, False, True]):
            within = choose(whole)
            return _next_change(within.inside, choose, f"{within.name}.", fixed=(), types=types)
        return _next_change(self.columns, choose, "", fixed=fixed, types=types)


def _named(columns: Sequence[Column], name: str) -> Column:
    return next(c for c in columns if c.name == name)


def _after(
    before: Sequence[Column], path: Sequence[str], change: Alteration, numbers: Iterator[int]
) -> tuple[Column, ...]:
    columns, (name, *rest) = list(before), path
    if isinstance(change, AddColumn) and not rest:
        at = len(columns) if change.after is None else columns.index(_named(columns, change.after.split(".")[-1])) + 1
        f = pa.field(name, type_of(change))
        default = default_of(with_default(f, change.default))
        columns.insert(at, Column.of_field(f, numbers, None if default is None else default.as_py()))
        return tuple(columns)
    column = _named(columns, name)
    at = columns.index(column)
    if rest:
        columns[at] = replace(column, inside=_after(column.inside, rest, change, numbers))
        return tuple(columns)
    match change:
        case RenameColumn():
            columns[at] = replace(column, name=change.to)
        case DropColumn():
            del columns[at]
        case WidenColumn():
            columns[at] = replace(column, plain=type_of(change))
        case MakeNullable():
            columns[at] = replace(column, nullable=True)
    return tuple(columns)


def _next_change(
    columns: Sequence[Column], choose: Choose[Any], before: str, *, fixed: Sequence[str], types: Sequence[pa.DataType]
) -> Alteration:
    free = [c.name for c in columns if c.name not in fixed]
    taken = {c.name for c in columns}
    names = [n for n in ("a", "b", "c", *(f"n{i}" for i in range(len(taken) + 1))) if n not in taken][:4]
    wider = [c.name for c in columns if c.name in free and c.type in _WIDER]
    strict = [c.name for c in columns if c.name in free and not c.nullable]
    kinds = ["add"] if len(columns) < 12 else []
    kinds += [*(["rename"] if free else []), *(["drop"] if len(free) > 1 else [])]
    match choose([*kinds, *(["widen"] if wider else []), *(["null"] if strict else [])]):
        case "add":
            after = choose([None, *(c.name for c in columns)])
            t = choose(types)
            default = None if before or pa.types.is_nested(t) else choose([None, *range(5)])
            name = before + choose(names)
            return added(name, t, after=after and before + after, default=value_of(t, default))
        case "rename":
            return RenameColumn(name=before + choose(free), to=choose(names))
        case "drop":
            return DropColumn(name=before + choose(free))
        case "widen":
            name = choose(wider)
            return widened(before + name, choose(_WIDER[_named(columns, name).type]))
    return MakeNullable(name=before + choose(strict))


def value_of(t: pa.DataType, n: int | None) -> Any:
    """A value of a type of `TYPES`, which every wider type has, too; the same for the same number."""
    if n is None:
        return None
    if pa.types.is_struct(t):
        return {f.name: value_of(f.type, n) for f in t}
    if pa.types.is_list(t):
        return [str(n), None] if n % 2 else None
    if pa.types.is_decimal(t):
        return Decimal(n % 1000).scaleb(-2)
    if pa.types.is_date(t):
        return dt.date(2020, 1, 1) + dt.timedelta(days=n)
    if pa.types.is_string(t):
        return _TEXTS[n % len(_TEXTS)]
    if pa.types.is_boolean(t):
        return n % 3 == 0
    return n / 2 if pa.types.is_floating(t) else n % 100


def added(name: str, t: pa.DataType, *, after: str | None = None, default: object = None) -> AddColumn:
    f = pa.field(name, t)
    return AddColumn(name=name, field=field_to_text(f), after=after, default=default_text(default, f))


def widened(name: str, t: pa.DataType) -> WidenColumn:
    return WidenColumn(name=name, field=field_to_text(pa.field(name, t)))


def type_of(change: AddColumn | WidenColumn) -> pa.DataType:
    return field_from_text(change.field).type
