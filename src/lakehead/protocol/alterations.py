"""Changes of a table's definition, as plain values.

Each names columns, or fields inside of them by their full names, as they are called after the changes before it.
``field`` is as `lakehead.protocol.schemas.field_to_text` makes it.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class _Change(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class AddColumn(_Change, frozen=True, kw_only=True):
    """A new column, behind ``after``, or behind all others.

    ``default`` is what it is in rows that are written without it, those there are among them, as
    `lakehead.format.defaults.default_text` makes it; without one they are null.
    """

    name: str
    field: str
    after: str | None = None
    default: bytes | None = None


class RenameColumn(_Change, frozen=True, kw_only=True):
    name: str
    to: str


class DropColumn(_Change, frozen=True, kw_only=True):
    """Its values are gone for readers; a column that is added under the name later is another one."""

    name: str


class WidenColumn(_Change, frozen=True, kw_only=True):
    """A type that holds every value of the old one."""

    name: str
    field: str


class MakeNullable(_Change, frozen=True, kw_only=True):
    name: str


class SetComment(_Change, frozen=True, kw_only=True):
    """What is said of a column, or of the table; nothing with None."""

    name: str | None
    text: str | None


class SetProperty(_Change, frozen=True, kw_only=True):
    """Under the name and with a value as users write them."""

    name: str
    value: str | int | float | bool | None


class ResetProperty(_Change, frozen=True, kw_only=True):
    """Its default again."""

    name: str


Alteration: TypeAlias = (
    AddColumn | RenameColumn | DropColumn | WidenColumn | MakeNullable | SetComment | SetProperty | ResetProperty
)
