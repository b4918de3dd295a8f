"""Changing a table's definition: `Table.alter`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import pyarrow as pa

from lakehead.api.definition import is_text
from lakehead.errors import InvalidRequestError, InvalidSchemaError
from lakehead.format.defaults import default_text
from lakehead.format.schema import normalize_schema
from lakehead.protocol.alterations import (
    AddColumn,
    Alteration,
    DropColumn,
    MakeNullable,
    RenameColumn,
    ResetProperty,
    SetComment,
    SetProperty,
    WidenColumn,
)
from lakehead.protocol.schemas import field_to_text


class TableAlteration:
    """Changes of one table, gathered in a ``with`` block and made at its end: all of them in their order, or none.

    Rows are not rewritten. Writers that were opened before go on with the columns that they know; subscriptions go on
    with the new ones.
    """

    def __init__(self, apply: Callable[[Sequence[Alteration]], object]) -> None:
        self._apply = apply
        self._changes: list[Alteration] = []

    def add_column(self, name: str, type: object, default: object = None, after: str | None = None) -> TableAlteration:
        """Add a column, or a field of a struct, which may be null.

        Args:
            name: of a field its full name, as ``address.zip`` or, of a list's structs, ``lines.element.note``.
            type: a `pyarrow.DataType`, or what `pyarrow.type_for_alias` knows.
            default: what the column is in the rows there are, and in all that are written without it: a value of the
                type, which is no list, map or struct. Engines that read the lake's files themselves see null until the
                rows are compacted.
            after: the column behind which it comes; None: the last.

        Raises:
            InvalidSchemaError: the type is not supported, or has no such value.
        """
        f = _field(name, type)
        change = AddColumn(name=name, field=field_to_text(f), after=after, default=default_text(default, f))
        self._changes.append(change)
        return self

    def rename_column(self, old: str, new: str) -> TableAlteration:
        """Call a column, or a field of a struct, something else; no key, bucket-key or partition column.

        Args:
            old: of a field its full name.
            new: of a field the new name alone.
        """
        self._changes.append(RenameColumn(name=old, to=new))
        return self

    def drop_column(self, name: str) -> TableAlteration:
        """Take a column, or a field of a struct, away; no key, bucket-key or partition column. One that is added under
        the name later is another one, without the old values."""
        self._changes.append(DropColumn(name=name))
        return self

    def widen_column(self, name: str, type: object) -> TableAlteration:
        """Give a column, or what is inside one, a type that holds all its values: a wider integer, double for float, a
        decimal of the same scale with more digits. What a list holds is ``name.element``, a map ``name.value``."""
        self._changes.append(WidenColumn(name=name, field=field_to_text(_field(name, type))))
        return self

    def make_nullable(self, name: str) -> TableAlteration:
        """Let a column, or what is inside one, be null."""
        self._changes.append(MakeNullable(name=name))
        return self

    def set_comment(self, column: str | None, text: str | None) -> TableAlteration:
        """Say what a column is, or with None for it, the table; None as text takes it back. At most 4,096 characters.
        It stays with the column when that is renamed."""
        if text is not None and not isinstance(text, str):
            raise InvalidRequestError(f"the comment {text!r} must be a text, or None")
        self._changes.append(SetComment(name=column, text=text))
        return self

    def set_property(self, name: str, value: Any) -> TableAlteration:
        """Set a property, under the name and with a value that `Connection.create_table` takes."""
        if not isinstance(value, str | int | float | bool | None):
            raise InvalidRequestError(f"property {name}={value!r} must be a text, a number, true, false or None")
        self._changes.append(SetProperty(name=name, value=value))
        return self

    def reset_property(self, name: str) -> TableAlteration:
        """Give a property its default again."""
        self._changes.append(ResetProperty(name=name))
        return self

    def __enter__(self) -> TableAlteration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Make the changes, unless the block raised.

        Raises:
            ColumnNotFoundError, InvalidSchemaError, InvalidPropertyError: one is not possible; nothing was changed.
            SchemaChangedError: the table was altered since it was opened; nothing was changed.
            LakeStateError: the lake table has a column of a new name already; nothing was changed.
        """
        if kind is None and self._changes:
            self._apply(self._changes)


def _field(name: object, type: object) -> pa.Field:
    if not is_text(name):
        raise InvalidSchemaError(f"{name!r} is no name of a column: give a text that can be written as UTF-8")
    if isinstance(type, str):
        try:
            type = pa.type_for_alias(type)
        except ValueError:
            raise InvalidSchemaError(f"column {name!r}: {type!r} is no Arrow type, as 'int64' is one") from None
    if not isinstance(type, pa.DataType):
        raise InvalidSchemaError(f"column {name!r}: give a pyarrow type, such as pa.int64(), not {type!r}")
    # The server checks it again; here it is refused before anything is sent.
    return normalize_schema(pa.schema([pa.field(name, type)])).field(0)
