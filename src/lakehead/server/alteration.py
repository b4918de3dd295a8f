"""What becomes of a table's definition when it is altered: pure rules, which see to it that every row stays readable.

Fields keep their ids, so that rows are read under the new definition whatever they were written under
(`lakehead.format.read_as`). What decides where a row lives, or which row it is, stays as it is.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import pyarrow as pa

from lakehead.config import Limits, TableProperties, unknown_name
from lakehead.errors import ColumnNotFoundError, InvalidRequestError, InvalidSchemaError
from lakehead.format.defaults import with_default
from lakehead.format.schema import (
    is_wider,
    nearest_name,
    normalize_schema,
    require_small_schema,
    validate_definition,
)
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
from lakehead.server.field_paths import Path, edited, field_at, full_names, in_map_key
from lakehead.types import Schemas, TableDescriptor, TableSchema, children, field_id, numbered_fields

_COMMENT_MAX = 4096


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

    def _find(self, name: str, verb: str | None) -> Path:
        """Where the column is, or the field inside of one, which is to be changed; None only looks."""
        known = dict(full_names(self._fields))
        path = known.get(name)
        if path is None:
            near = nearest_name(name, known if "." in name else [f.name for f in self._fields])
            raise ColumnNotFoundError(f"{self._desc.path} has no column {name!r}; {near}", column=name)
        if verb is not None and name in self._places:
            raise InvalidSchemaError(
                f"column {name!r} of {self._desc.path} is part of {self._places[name]} and cannot be {verb}: it decides"
                " where rows live, or which row they are; copy the rows to a new table",
                column=name,
            )
        if verb is not None and in_map_key(self._fields, path):
            raise InvalidSchemaError(
                f"{name!r} of {self._desc.path} belongs to the key of a map and cannot be {verb}: lakes keep the"
                " keys of maps as they are; add another column",
                column=name,
            )
        return path

    def _named(self, name: str, verb: str) -> Path:
        """`_find` of what has a name of its own, a column or a field of a struct."""
        path = self._find(name, verb)
        if len(path) > 1 and not pa.types.is_struct(field_at(self._fields, path[:-1]).type):
            raise InvalidSchemaError(
                f"{name!r} of {self._desc.path} is what a list or map holds and cannot be {verb}: change the whole"
                " column, or the fields inside it",
                column=name,
            )
        return path

    def _edit(self, path: Path, edit: Callable[[list[pa.Field], int], object]) -> None:
        self._fields = edited(self._fields, path, edit)

    def _require_free(self, name: str) -> None:
        """That a later change which names the column, or field, can mean one only."""
        if name in dict(full_names(self._fields)):
            raise InvalidSchemaError(
                f"{self._desc.path} would have two columns named {name!r}: rename or drop the other one first",
                column=name,
            )

    def add(self, f: pa.Field, after: str | None, default: bytes | None) -> None:
        full = f.name
        self._require_free(full)
        inside = self._parent(full)
        if inside:
            f = f.with_name(f.name.rpartition(".")[2])
        plain = normalize_schema(pa.schema([f])).field(0)
        if not plain.nullable:
            raise InvalidSchemaError(
                f"column {full!r} cannot be added as non-null: the rows there are have no value for it", column=full
            )
        if inside and default is not None:
            raise InvalidSchemaError(
                f"{full!r} cannot have a default: only whole columns have; add it without, then write it", column=full
            )
        (field,) = numbered_fields([plain], self._ids)
        field = with_default(field, default)
        count = len(children(field_at(self._fields, inside).type)) if inside else len(self._fields)
        at = (*inside, count) if after is None else self._behind(after, inside, full)
        self._edit(at, lambda fields, i: fields.insert(i, field))

    def _parent(self, name: str) -> Path:
        """The struct that a new field of this name is to be in; empty for a column."""
        before, dot, _ = name.rpartition(".")
        known = dict(full_names(self._fields))
        while dot and before not in known:
            before, dot, _ = before.rpartition(".")
        if not dot:
            return ()
        path = known[before]
        if name.count(".") > before.count(".") + 1 or not pa.types.is_struct(field_at(self._fields, path).type):
            raise InvalidSchemaError(
                f"{name!r} cannot be added to {self._desc.path}: {before!r} is"
                f" {field_at(self._fields, path).type}, which has no such field; fields are added to structs, of"
                " lists to 'name.element', of maps to 'name.value'",
                column=name,
            )
        return self._find(before, "changed")

    def _behind(self, after: str, inside: Path, name: str) -> Path:
        path = self._find(after, None)
        if path[:-1] != inside:
            raise InvalidSchemaError(f"{name!r} cannot come after {after!r}, which is in another struct", column=name)
        return (*inside, path[-1] + 1)

    def rename(self, name: str, to: str) -> None:
        path = self._named(name, "renamed")
        if len(path) > 1 and "." in to:
            raise InvalidSchemaError(f"{name!r} cannot become {to!r}: give the field's new name alone", column=name)
        if to != field_at(self._fields, path).name:
            self._require_free(name.removesuffix(field_at(self._fields, path).name) + to)
        self._replace(path, lambda f: f.with_name(to))

    def drop(self, name: str) -> None:
        path = self._named(name, "dropped")
        if len(path) > 1 and len(children(field_at(self._fields, path[:-1]).type)) == 1:
            raise InvalidSchemaError(
                f"{name!r} of {self._desc.path} is the only field of its struct: drop the whole", column=name
            )
        self._edit(path, lambda fields, i: fields.pop(i))

    def widen(self, name: str, to: pa.DataType) -> None:
        path = self._find(name, "widened")
        now = field_at(self._fields, path).type
        if now != to and not is_wider(to, now):
            raise InvalidSchemaError(
                f"column {name!r} of {self._desc.path} is {now} and cannot become {to}: integers may become wider ones,"
                " float double, decimals may get more digits before the point; for all else add a column",
                column=name,
            )
        if now != to:
            self._replace(path, lambda f: f.with_type(to))

    def make_nullable(self, name: str) -> None:
        self._replace(self._find(name, "made nullable"), lambda f: f.with_nullable(True))

    def _replace(self, path: Path, change: Callable[[pa.Field], pa.Field]) -> None:
        def replaced(fields: list[pa.Field], i: int) -> None:
            fields[i] = change(fields[i])

        self._edit(path, replaced)

    def _column(self, name: str) -> pa.Field:
        path = self._find(name, None)
        if len(path) > 1:
            raise InvalidSchemaError(f"{name!r} is inside a column: comments are of whole columns", column=name)
        return self._fields[path[0]]

    def comment(self, name: str | None, text: str | None) -> None:
        about = 0 if name is None else field_id(self._column(name))
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
