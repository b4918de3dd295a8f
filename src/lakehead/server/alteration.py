"""What becomes of a table's definition when it is altered: pure rules, which see to it that every row stays readable.

Fields keep their ids, so that rows are read under the new definition whatever they were written under
(`lakehead.format.read_as`). What decides where a row lives, or which row it is, stays as it is.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pyarrow as pa

from lakehead.config import Limits, TableProperties, unknown_name
from lakehead.errors import ColumnNotFoundError, InvalidRequestError, InvalidSchemaError
from lakehead.format.defaults import with_default
from lakehead.format.schema import nearest_name, normalize_schema, require_small_schema, validate_definition
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
from lakehead.protocol.schemas import field_from_text
from lakehead.types import Schemas, TableDescriptor, TableSchema, field_id, numbered_fields

_COMMENT_MAX = 4096
_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64())


def altered(desc: TableDescriptor, changes: Sequence[Alteration], limits: Limits) -> TableDescriptor:
    """The definition after these changes, in their order; the same where they change nothing.

    Args:
        desc: with all schemas that the table ever had.

    Raises:
        ColumnNotFoundError: a column does not exist, or not any more.
        InvalidRequestError: a comment is too long.
        InvalidSchemaError: a change is not possible; the message names it and the remedy.
        InvalidPropertyError: a property is unknown or cannot be read.
    """
    columns, properties = _Columns(desc), dict[str, object]()
    for change in changes:
        match change:
            case SetProperty():
                properties[change.name] = change.value
            case ResetProperty():
                defaults = TableProperties().to_user()
                if change.name not in defaults:
                    raise unknown_name("table property", change.name, list(defaults))
                properties[change.name] = defaults[change.name]
            case AddColumn():
                columns.add(field_from_text(change.field).with_name(change.name), change.after, change.default)
            case RenameColumn():
                columns.rename(change.name, change.to)
            case DropColumn():
                columns.drop(change.name)
            case WidenColumn():
                columns.widen(change.name, field_from_text(change.field).type)
            case MakeNullable():
                columns.make_nullable(change.name)
            case SetComment():
                columns.comment(change.name, change.text)
    return dataclasses.replace(
        desc,
        schemas=columns.schemas(limits),
        properties=desc.properties.changed(properties),
        comments=columns.comments(),
    )


class _Columns:
    def __init__(self, desc: TableDescriptor) -> None:
        self._desc = desc
        self._fields: list[pa.Field] = list(desc.schemas.current.fields)
        self._comments: dict[int, str] = dict(desc.comments)
        self._ids = itertools.count(desc.schemas.last_field_id + 1)
        self._places = {
            **dict.fromkeys(desc.bucket_key, "the bucket key"),
            **dict.fromkeys(desc.partition_by, "the partitions"),
            **dict.fromkeys(desc.primary_key, "the primary key"),
        }

    def _at(self, name: str, verb: str | None) -> int:
        """Where the column is, which is to be changed; None only looks."""
        names = [f.name for f in self._fields]
        if name not in names:
            raise ColumnNotFoundError(
                f"{self._desc.path} has no column {name!r}; {nearest_name(name, names)}", column=name
            )
        if verb is not None and name in self._places:
            raise InvalidSchemaError(
                f"column {name!r} of {self._desc.path} is part of {self._places[name]} and cannot be {verb}: it decides"
                " where rows live, or which row they are; copy the rows to a new table",
                column=name,
            )
        return names.index(name)

    def _require_free(self, name: str) -> None:
        """That a later change which names the column can mean one only."""
        if name in (f.name for f in self._fields):
            raise InvalidSchemaError(
                f"{self._desc.path} would have two columns named {name!r}: rename or drop the other one first",
                column=name,
            )

    def add(self, f: pa.Field, after: str | None, default: bytes | None) -> None:
        plain = normalize_schema(pa.schema([f])).field(0)
        if not plain.nullable:
            raise InvalidSchemaError(
                f"column {f.name!r} cannot be added as non-null: the rows there are have no value for it", column=f.name
            )
        self._require_free(f.name)
        (field,) = numbered_fields([plain], self._ids)
        field = with_default(field, default)
        self._fields.insert(len(self._fields) if after is None else self._at(after, None) + 1, field)

    def rename(self, name: str, to: str) -> None:
        at = self._at(name, "renamed")
        if to != name:
            self._require_free(to)
        self._fields[at] = self._fields[at].with_name(to)

    def drop(self, name: str) -> None:
        del self._fields[self._at(name, "dropped")]

    def widen(self, name: str, to: pa.DataType) -> None:
        at = self._at(name, "widened")
        now = self._fields[at].type
        if now != to and not _holds(to, now):
            raise InvalidSchemaError(
                f"column {name!r} of {self._desc.path} is {now} and cannot become {to}: integers may become wider ones,"
                " float double, decimals may get more digits before the point; for all else add a column",
                column=name,
            )
        self._fields[at] = self._fields[at].with_type(to)

    def make_nullable(self, name: str) -> None:
        at = self._at(name, "made nullable")
        self._fields[at] = self._fields[at].with_nullable(True)

    def comment(self, name: str | None, text: str | None) -> None:
        about = 0 if name is None else field_id(self._fields[self._at(name, None)])
        if text is not None and len(text) > _COMMENT_MAX:
            raise InvalidRequestError(f"the comment has {len(text):,} characters: say it in {_COMMENT_MAX:,}")
        assert about is not None
        if text:
            self._comments[about] = text
        else:
            self._comments.pop(about, None)

    def comments(self) -> tuple[tuple[int, str], ...]:
        there = {0, *map(field_id, self._fields)}
        return tuple(sorted((about, text) for about, text in self._comments.items() if about in there))

    def schemas(self, limits: Limits) -> Schemas:
        known = self._desc.schemas
        if self._fields == list(known.current.fields) and all(
            a.equals(b, check_metadata=True) for a, b in zip(self._fields, known.current.fields, strict=True)
        ):
            return known
        schema = TableSchema(known.newest_id + 1, pa.schema(self._fields))
        require_small_schema(schema.stored, limits.schema_bytes_max)
        desc = self._desc
        checked, *_ = validate_definition(
            schema.columns,
            primary_key=desc.primary_key,
            partition_by=desc.partition_by,
            buckets=desc.buckets,
            bucket_key=desc.bucket_key or None,
            limits=limits,
        )
        if checked != schema.columns:
            raise InvalidRequestError(f"{desc.path} would not have the columns {schema.columns}, but {checked}")
        return Schemas((*known.known, schema))


def _holds(wide: pa.DataType, narrow: pa.DataType) -> bool:
    """Whether the type has every value of the other, as Iceberg widens types."""
    if narrow in _INTEGERS and wide in _INTEGERS:
        return _INTEGERS.index(wide) > _INTEGERS.index(narrow)
    if pa.types.is_decimal128(narrow) and pa.types.is_decimal128(wide):
        return bool(wide.scale == narrow.scale and wide.precision > narrow.precision)
    return bool(narrow == pa.float32() and wide == pa.float64())
