"""Changes of tables for tests: what may be done next, and what a table is then, in plain values.

A column is known by a number of its own, whatever it is called: so models of tables hold rows by these numbers.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
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
    """One column of a `Shape`; no other of its table ever has its number."""

    number: int
    name: str
    type: pa.DataType
    nullable: bool
    default: Any = None

    def of(self, row: Row) -> Any:
        """What it is in a row."""
        return row.get(self.number, self.default)


@dataclass(frozen=True)
class Shape:
    """The columns of a table as they are now; ``next`` is the number of the next one."""

    columns: tuple[Column, ...]
    next: int

    @classmethod
    def of(cls, schema: pa.Schema) -> Shape:
        """That of a table that is new."""
        columns = [Column(i, f.name, f.type, f.nullable) for i, f in enumerate(schema)]
        return cls(tuple(columns), len(columns))

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([pa.field(c.name, c.type, c.nullable) for c in self.columns])

    @property
    def names(self) -> list[str]:
        return [c.name for c in self.columns]

    def named(self, name: str) -> Column:
        return next(c for c in self.columns if c.name == name)

    def shown(self, row: Row) -> dict[str, Any]:
        """A row as the table shows it now."""
        return {c.name: c.of(row) for c in self.columns}

    def held(self, row: Mapping[str, Any], old: Row | None = None) -> dict[int, Any]:
        """Inverse of `shown`, over what the row was, of which columns that are not given are left."""
        return {**(old or {}), **{self.named(name).number: value for name, value in row.items()}}

    def after(self, change: Alteration) -> Shape:
        """The columns once this is done."""
        columns = list(self.columns)
        if isinstance(change, AddColumn):
            at = len(columns) if change.after is None else columns.index(self.named(change.after)) + 1
            default = default_of(with_default(pa.field(change.name, type_of(change)), change.default))
            value = None if default is None else default.as_py()
            columns.insert(at, Column(self.next, change.name, type_of(change), nullable=True, default=value))
            return Shape(tuple(columns), self.next + 1)
        assert isinstance(change, RenameColumn | DropColumn | WidenColumn | MakeNullable)
        at = columns.index(self.named(change.name))
        match change:
            case RenameColumn():
                columns[at] = replace(columns[at], name=change.to)
            case DropColumn():
                del columns[at]
            case WidenColumn():
                columns[at] = replace(columns[at], type=type_of(change))
            case MakeNullable():
                columns[at] = replace(columns[at], nullable=True)
        return Shape(tuple(columns), self.next)

    def next_change(self, choose: Choose[Any], *, fixed: Sequence[str], types: Sequence[pa.DataType]) -> Alteration:
        """Some change that is possible; ``fixed`` columns stay as they are. Names that were given up come again."""
        free = [c.name for c in self.columns if c.name not in fixed]
        taken = {c.name for c in self.columns}
        names = [n for n in ("a", "b", "c", *(f"n{i}" for i in range(len(taken) + 1))) if n not in taken][:4]
        wider = [c.name for c in self.columns if c.name in free and c.type in _WIDER]
        strict = [c.name for c in self.columns if c.name in free and not c.nullable]
        kinds = ["add"] if len(self.columns) < 12 else []
        kinds += [*(["rename"] if free else []), *(["drop"] if len(free) > 1 else [])]
        match choose([*kinds, *(["widen"] if wider else []), *(["null"] if strict else [])]):
            case "add":
                after = choose([None, *(c.name for c in self.columns)])
                t = choose(types)
                default = None if pa.types.is_nested(t) else choose([None, *range(5)])
                return added(choose(names), t, after=after, default=value_of(t, default))
            case "rename":
                return RenameColumn(name=choose(free), to=choose(names))
            case "drop":
                return DropColumn(name=choose(free))
            case "widen":
                name = choose(wider)
                return widened(name, choose(_WIDER[self.named(name).type]))
        return MakeNullable(name=choose(strict))


def value_of(t: pa.DataType, n: int | None) -> Any:
    """A value of a type of `TYPES`, which every wider type has, too; the same for the same number."""
    if n is None:
        return None
    if pa.types.is_struct(t):
        return {"x": n, "tags": [str(n), None] if n % 2 else None}
    if pa.types.is_decimal(t):
        return Decimal(n % 1000).scaleb(-2)
    if pa.types.is_date(t):
        return dt.date(2020, 1, 1) + dt.timedelta(days=n)
    if pa.types.is_string(t):
        return ["", "text", "a longer text, past what fits inline", "é"][n % 4]
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
