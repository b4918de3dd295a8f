"""The values every layer speaks of: table paths, tablet ids, change types, partition names, schemas, descriptors."""

from __future__ import annotations

import datetime as dt
import decimal
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cached_property
from typing import Literal, TypeAlias, get_args
from urllib.parse import quote, unquote

import msgspec
import pyarrow as pa

from lakehead.config import TableProperties
from lakehead.errors import CorruptionError, InvalidRequestError, NoLakeError, SchemaChangedError

Offset: TypeAlias = int
"""Dense position of a row in one tablet, from 0; also what stands after the last row of a range."""
Epoch: TypeAlias = int
"""Monotonic owner number: whoever holds a lower one is fenced."""
WriteKind: TypeAlias = Literal["append", "upsert", "delete"]
"""What a write does with its rows; a log table takes appends, a keyed one the others."""
Tier: TypeAlias = Literal["union", "hot", "lake"]
"""What a read takes: lake and log joined at one offset, what the lake does not hold yet, or what it holds."""
PartitionValue: TypeAlias = str | int | bool | bytes | dt.date | dt.time | dt.datetime | decimal.Decimal

BUCKET_COLUMN = "__bucket"
OFFSET_COLUMN = "__offset"
TIMESTAMP_COLUMN = "__timestamp"
CHANGE_TYPE_COLUMN = "__change_type"
PREV_OFFSET_COLUMN = "__prev_offset"
RESERVED_PREFIX = "__"
TIMESTAMP_TYPE = pa.timestamp("us", "UTC")
SYSTEM_FIELDS = (
    pa.field(BUCKET_COLUMN, pa.int32()),
    pa.field(OFFSET_COLUMN, pa.int64()),
    pa.field(TIMESTAMP_COLUMN, TIMESTAMP_TYPE),
)
"""System columns in the order they follow the user's columns, in every read and in the lake."""
FIELD_ID = b"PARQUET:field_id"
"""Metadata of an Arrow field: its id, spelled as in the files of a lake."""
DEFAULT = b"LAKEHEAD:default"
"""Metadata of an Arrow field: what it is in rows that were written without it (`lakehead.format.defaults`)."""
_CHANGE_TYPE_ID = 1 << 30
"""Field id of the change type in the lake's changelog: no column of a table ever has it."""
UNPARTITIONED = ""
"""Partition name of tables without ``partition_by``."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")


def require_tier(tier: object) -> Tier:
    """The tier that a reader names.

    Raises:
        InvalidRequestError: there is no such tier.
    """
    for known in get_args(Tier):
        if isinstance(tier, str) and tier == known:
            return known
    raise InvalidRequestError(f"tier={tier!r}: use 'union', 'hot' or 'lake'")


class ChangeType(IntEnum):
    """What a log row does to its table; the integer is the byte stored in a batch frame."""

    APPEND = 0
    INSERT = 1
    UPDATE_BEFORE = 2
    UPDATE_AFTER = 3
    DELETE = 4

    @property
    def symbol(self) -> str:
        """The field's two-character name: ``+A +I -U +U -D``."""
        return CHANGE_SYMBOLS[self]


CHANGE_SYMBOLS = ("+A", "+I", "-U", "+U", "-D")


@dataclass(frozen=True, order=True)
class TablePath:
    """``database.table``; a bare name lives in ``default``. Names are ``[A-Za-z_][A-Za-z0-9_]*``, at most 128 long."""

    database: str
    table: str

    @classmethod
    def parse(cls, text: str) -> TablePath:
        """Read ``"db.table"`` or ``"table"``.

        Raises:
            InvalidRequestError: the text is not one or two plain names joined by a dot.
        """
        parts = text.split(".") if isinstance(text, str) else []
        if len(parts) == 1:
            parts = ["default", *parts]
        if len(parts) != 2 or not all(_NAME.match(p) for p in parts) or any(p.startswith("__") for p in parts):
            raise InvalidRequestError(
                f"{text!r} is not a table name: use 'database.table' with letters (a to z), digits and underscores, at"
                " most 128 in each, that does not start with '__'",
                table=str(text),
            )
        return cls(parts[0], parts[1])

    def __str__(self) -> str:
        return f"{self.database}.{self.table}"


@dataclass(frozen=True, order=True)
class TabletId:
    """One (partition, bucket) of a table. ``partition`` holds the partition columns' values in ``partition_by`` order,
    and is empty for an unpartitioned table."""

    partition: tuple[PartitionValue, ...] = ()
    bucket: int = 0


class TabletKey(msgspec.Struct, frozen=True, order=True):
    """A tablet by its partition *name* (canonical text): the form used on the wire, on disk and in lake summaries."""

    partition: str
    bucket: int

    def __str__(self) -> str:
        return f"{self.partition}/{self.bucket}"

    @classmethod
    def parse(cls, text: str) -> TabletKey:
        """Inverse of ``str``; partition names hold no '/' because values are percent-encoded."""
        partition, _, bucket = text.rpartition("/")
        return cls(partition, int(bucket))


@dataclass(frozen=True)
class Incarnation:
    """One start of the owner of one data folder: who wrote a frame, committed to a lake, or answered.

    Attributes:
        folder_id: identity of the folder; a copy gets its own when it is first served.
        number: of the start, greater than that of any start before it of this folder or of the one it is a copy of.
        start_id: unique for ever: tells apart the starts of copies that nobody could see to be copies.
    """

    folder_id: str
    number: int
    start_id: str

    def __str__(self) -> str:
        return f"{self.folder_id}/{self.number}/{self.start_id}"


@dataclass(frozen=True, eq=False)
class TableSchema:
    """One definition of a table's columns.

    A field keeps its id when it is renamed, moved or widened, and no other field of the table ever has it, so that
    rows can be read under another definition than the one they were written under (`lakehead.format.read_as`).

    Attributes:
        id: by which frames and checkpoints name what they were written under.
        fields: the columns; they and all fields inside have their id as metadata `FIELD_ID`; some have a `DEFAULT`.
    """

    id: int
    fields: pa.Schema

    @classmethod
    def of(cls, schema_id: int, schema: pa.Schema) -> TableSchema:
        """The definition that was stored as this Arrow schema.

        Fields without ids get those that a lake table made for them has: columns are numbered from 1, system columns
        go on from there, then come the fields inside of columns, level by level.

        Raises:
            CorruptionError: some fields have an id and others none, or two the same.
        """
        ids = list(_ids_in(list(schema)))
        if not any(ids):
            numbered = numbered_fields([*schema, *SYSTEM_FIELDS], itertools.count(1))
            return cls(schema_id, pa.schema(numbered[: len(schema)]))
        if None in ids or len(set(ids)) < len(ids):
            raise CorruptionError(f"schema {schema_id} has fields without an id, or with the same: {ids}")
        return cls(schema_id, schema.remove_metadata())

    @cached_property
    def columns(self) -> pa.Schema:
        """The columns as rows have them: without ids and defaults."""
        return pa.schema(without_ids(list(self.fields)))

    @cached_property
    def stored(self) -> pa.Schema:
        """What `of` makes the same definition of: the bare columns where that is enough."""
        return self.columns if TableSchema.of(self.id, self.columns) == self else self.fields

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TableSchema):
            return NotImplemented
        return self.id == other.id and bool(self.fields.equals(other.fields, check_metadata=True))

    def __hash__(self) -> int:
        return hash((self.id, self.fields))


def field_id(f: pa.Field) -> int | None:
    """The id of an Arrow field; None for one without."""
    found = (f.metadata or {}).get(FIELD_ID, b"")
    return int(found) if found.isdigit() else None


def children(t: pa.DataType) -> list[pa.Field]:
    """The fields inside of a struct, the item of a list, key and value of a map; none of another type."""
    return [t.key_field, t.item_field] if pa.types.is_map(t) else [t.field(i) for i in range(t.num_fields)]


def with_children(t: pa.DataType, fields: Sequence[pa.Field]) -> pa.DataType:
    """The type with other `children`."""
    if pa.types.is_map(t):
        return pa.map_(*fields)
    if pa.types.is_struct(t):
        return pa.struct(fields)
    if pa.types.is_large_list(t):
        return pa.large_list(*fields)
    return pa.list_(*fields) if pa.types.is_list(t) else t


def numbered_fields(fields: Sequence[pa.Field], ids: Iterator[int]) -> list[pa.Field]:
    """Fields with ids: theirs first, then, field by field, of what is inside."""
    own = [next(ids) for _ in fields]
    types = [with_children(f.type, numbered_fields(children(f.type), ids)) for f in fields]
    whole = zip(fields, types, own, strict=True)
    return [pa.field(f.name, t, f.nullable, {FIELD_ID: str(i)}) for f, t, i in whole]


def without_ids(fields: Sequence[pa.Field]) -> list[pa.Field]:
    """The fields, and those inside, without metadata."""
    return [pa.field(f.name, with_children(f.type, without_ids(children(f.type))), f.nullable) for f in fields]


def _ids_in(fields: Sequence[pa.Field]) -> Iterator[int | None]:
    for f in fields:
        yield field_id(f)
        yield from _ids_in(children(f.type))


@dataclass(frozen=True)
class Schemas:
    """The definitions that rows of one table were written under, the one in force last."""

    known: tuple[TableSchema, ...]

    @classmethod
    def only(cls, schema: pa.Schema, schema_id: int = 0) -> Schemas:
        """Those of a table that never had another."""
        return cls((TableSchema.of(schema_id, schema),))

    @property
    def current(self) -> TableSchema:
        """What rows are written under, and read as."""
        return self.known[-1]

    def as_of(self, schema_id: int) -> Schemas:
        """The same definitions, for who reads as this one.

        Raises:
            CorruptionError: there is none of this id.
        """
        wanted = self.of(schema_id)
        return self if wanted is self.current else Schemas((*(s for s in self.known if s is not wanted), wanted))

    @property
    def oldest_id(self) -> int:
        """The least id."""
        return min(s.id for s in self.known)

    @property
    def newest_id(self) -> int:
        """The greatest id; ids grow."""
        return max(s.id for s in self.known)

    @property
    def last_field_id(self) -> int:
        """No field, system columns included, ever had a greater id."""
        system = max(len(s.fields) for s in self.known) + len(SYSTEM_FIELDS)
        return max(system, *(i for s in self.known for i in _ids_in(list(s.fields)) if i is not None))

    def written(self, schema_id: int) -> TableSchema:
        """The definition with this id, of rows that are to be read as the current one.

        Raises:
            SchemaChangedError: it is newer, whether its columns fit or not: a round that read rows without columns
                which came since would leave them behind.
            CorruptionError: there is none of this id.
        """
        found = self.of(schema_id)
        if schema_id > self.current.id:
            raise SchemaChangedError(
                f"rows of schema {schema_id} are not read as the older schema {self.current.id}: the table was altered,"
                " open it again",
                schema_id=schema_id,
            )
        return found

    def of(self, schema_id: int) -> TableSchema:
        """The definition with this id.

        Raises:
            CorruptionError: there is none.
        """
        for schema in reversed(self.known):
            if schema.id == schema_id:
                return schema
        raise CorruptionError(
            f"rows were written under schema {schema_id}, the table has only {[s.id for s in self.known]}: its"
            " metadata is older than its files, restore both from one backup",
            schema_id=schema_id,
        )


@dataclass(frozen=True)
class TableDescriptor:
    """Everything that defines a table; stored in the catalog and sent to clients.

    ``schema`` is the user's Arrow schema with key, bucket-key and partition columns non-null, without system columns,
    without dictionary types. ``table_id`` is unique for ever: a dropped and re-created table has another one.
    ``former`` are the names that it had before, oldest first; ``comments`` are texts by field id, 0 for the table's.
    """

    table_id: str
    path: TablePath
    schemas: Schemas
    primary_key: tuple[str, ...]
    partition_by: tuple[str, ...]
    bucket_key: tuple[str, ...]
    buckets: int
    lake: str | None
    properties: TableProperties = field(default_factory=TableProperties)
    former: tuple[TablePath, ...] = ()
    comments: tuple[tuple[int, str], ...] = ()

    @property
    def origin(self) -> TablePath:
        """The name that it was created under: its folders, in the data folder and in the lake, are named after it."""
        return self.former[0] if self.former else self.path

    def comment(self, column: str | None = None) -> str | None:
        """What somebody said of a column, or of the table."""
        about = 0 if column is None else field_id(self.schemas.current.fields.field(column))
        return next((text for of, text in self.comments if of == about), None)

    def renamed(self, to: TablePath) -> TableDescriptor:
        """The same table under another name."""
        return replace(self, path=to, former=(*self.former, self.path))

    @cached_property
    def changelog(self) -> TableDescriptor | None:
        """What the lake keeps the changelog of a keyed table as, if it does: a log table beside the table's own, with
        all records and, as a column, their change types (``+I``)."""
        if not self.properties.lake_changelog or not self.keyed:
            return None
        told = pa.field(CHANGE_TYPE_COLUMN, pa.string(), False, {FIELD_ID: str(_CHANGE_TYPE_ID)})
        return replace(
            self,
            table_id=changelog_id(self.table_id),
            path=_changelog_of(self.path),
            schemas=Schemas(tuple(TableSchema(s.id, pa.schema([*s.fields, told])) for s in self.schemas.known)),
            primary_key=(),
            former=tuple(map(_changelog_of, self.former)),
        )

    def require_changelog(self) -> TableDescriptor:
        """Its `changelog`.

        Raises:
            NoLakeError: its lake keeps none.
        """
        self.require_lake()
        if self.changelog is None:
            raise NoLakeError(
                f"the lake of {self.path} keeps no changelog: create the table with lake_changelog=True",
                table=str(self.path),
            )
        return self.changelog

    @property
    def lake_tables(self) -> tuple[TableDescriptor, ...]:
        """What its lake has of it: its table, and that of its changelog where it keeps one; only of one with a lake."""
        return (self,) if self.changelog is None else (self, self.changelog)

    @cached_property
    def schema(self) -> pa.Schema:
        return self.schemas.current.columns

    @cached_property
    def schema_id(self) -> int:
        return self.schemas.current.id

    @property
    def keyed(self) -> bool:
        """True for a primary-key table, False for a log table."""
        return bool(self.primary_key)

    def as_of(self, schema_id: int) -> TableDescriptor:
        """The same table under one of its other definitions; see `Schemas.as_of`."""
        return self if schema_id == self.schema_id else replace(self, schemas=self.schemas.as_of(schema_id))

    def require_schema(self, schema_id: int) -> None:
        """That a schema is the one in force; -1 always is.

        Raises:
            SchemaChangedError: it is not.
        """
        if schema_id not in (-1, self.schema_id):
            raise self._altered(self.schema_id)

    def require_newest(self, schema_id: int) -> None:
        """That nobody has found a newer definition than this one.

        Raises:
            SchemaChangedError: somebody has.
        """
        if schema_id > self.schema_id:
            raise self._altered(schema_id)

    def require_as_opened(self, name: str, schema_id: int) -> None:
        """That the table is still called so, and a schema is the one in force.

        Raises:
            SchemaChangedError: it is not.
        """
        if name != str(self.path) or schema_id != self.schema_id:
            raise self._altered(self.schema_id)

    def _altered(self, schema_id: int) -> SchemaChangedError:
        lies = (
            "; if it stays so, someone has set lakehead.schema of its lake table" if schema_id > self.schema_id else ""
        )
        return SchemaChangedError(
            f"table {self.path} was altered since it was opened: open it again{lies}",
            table=str(self.path),
            schema_id=schema_id,
        )

    @property
    def log_decides(self) -> bool:
        """Whether the logs decide alone which rows there are: a lake of the table follows them."""
        return self.lake is None or self.keyed

    def require_replaceable(self) -> None:
        """Return if rows of single partitions can be replaced.

        Raises:
            InvalidRequestError: there are no partitions.
        """
        if not self.partition_by:
            raise InvalidRequestError(
                f"{self.path} has no partitions that could be overwritten one by one: overwrite the whole table, or"
                " make it with partition_by"
            )

    def require_lake(self) -> str:
        """The kind of its lake.

        Raises:
            NoLakeError: it has none.
        """
        if self.lake is None:
            raise NoLakeError(f"table {self.path} has no lake: create it with lake='iceberg'", table=str(self.path))
        return self.lake

    @cached_property
    def key_columns(self) -> pa.Schema:
        """The primary key's columns, in key order."""
        return pa.schema([self.schema.field(c) for c in self.primary_key])

    @property
    def partition_types(self) -> tuple[pa.DataType, ...]:
        return tuple(self.schema.field(c).type for c in self.partition_by)

    @property
    def prefix_key(self) -> tuple[str, ...]:
        """Columns that `prefix_lookup` asks by, beside the partition columns: the bucket key where it is a proper
        prefix of the primary key without its partition columns, else none."""
        inside = self.tablet_key_columns
        n = len(self.bucket_key)
        return self.bucket_key if n < len(inside) and inside[:n] == self.bucket_key else ()

    @property
    def tablet_key_columns(self) -> tuple[str, ...]:
        """The primary key without the partition columns: what tells rows of one tablet apart."""
        return tuple(c for c in self.primary_key if c not in self.partition_by)

    def tablet_id(self, key: TabletKey) -> TabletId:
        """The user-facing id (with typed partition values) of a tablet key."""
        return TabletId(self.partition_values(key.partition), key.bucket)

    def partition_values(self, name: str) -> tuple[PartitionValue, ...]:
        """The values that a partition is named after."""
        found = self._known_partitions.get(name)
        return parse_partition_name(name, self.partition_types) if found is None else found

    def may_have(self, key: TabletKey) -> bool:
        """Whether a tablet of the table may be called so."""
        there = 0 <= key.bucket < self.buckets
        return there and (key.partition in self._known_partitions or self._may_have_partition(key.partition))

    @cached_property
    def _known_partitions(self) -> dict[str, tuple[PartitionValue, ...]]:
        """Values by names that were looked at: a server tells of all at each read. Whoever asks decides on the names:
        few and short ones are remembered."""
        return {} if self.partition_by else {UNPARTITIONED: ()}

    def _may_have_partition(self, name: str) -> bool:
        try:
            values = parse_partition_name(name, self.partition_types)
            canonical = partition_name(self.partition_by, values)
        except (ValueError, IndexError, ArithmeticError):
            return False
        is_one = canonical == name
        if is_one and len(self._known_partitions) < PARTITIONS_KNOWN_MAX and len(name) <= _KNOWN_NAME_MAX:
            self._known_partitions[name] = values
        return is_one

    def tablet_key(self, tablet: TabletId) -> TabletKey:
        """Inverse of `tablet_id`."""
        return TabletKey(partition_name(self.partition_by, tablet.partition), tablet.bucket)

    def __getstate__(self) -> dict[str, object]:
        """Pickles take the definition along, and nothing that was made of it."""
        return {f.name: self.__dict__[f.name] for f in fields(self)}


PARTITIONS_KNOWN_MAX = 10_000
_KNOWN_NAME_MAX = 200


def changelog_id(table_id: str) -> str:
    """By which lakes know the changelog of the table of this id."""
    return f"{table_id}-changelog"


def _changelog_of(path: TablePath) -> TablePath:
    return TablePath(path.database, f"{path.table}$changelog")


def partition_name(columns: tuple[str, ...], values: tuple[PartitionValue, ...]) -> str:
    """Canonical text of partition values: ``col=value`` joined by '&', values percent-encoded, "" when unpartitioned.

    Dates and timestamps are ISO 8601 (a zone's timestamp in UTC), binary is hexadecimal, booleans ``true``/``false``.
    """
    if len(values) != len(columns):
        raise ValueError(f"{values!r} names no partition by {', '.join(columns) or 'nothing'}")
    return "&".join(f"{c}={quote(_value_text(v), safe='')}" for c, v in zip(columns, values, strict=True))


def _value_text(value: PartitionValue) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dt.datetime):
        return (value.astimezone(dt.UTC) if value.tzinfo else value).isoformat(timespec="microseconds")
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    return str(value)


def parse_partition_name(name: str, types: tuple[pa.DataType, ...]) -> tuple[PartitionValue, ...]:
    """Values of a `partition_name`, as Python values of the given Arrow types."""
    if name == UNPARTITIONED:
        return ()
    texts = [unquote(part.split("=", 1)[1]) for part in name.split("&")]
    return tuple(_parse_value(text, t) for text, t in zip(texts, types, strict=True))


def _parse_value(text: str, t: pa.DataType) -> PartitionValue:
    if pa.types.is_boolean(t):
        return text == "true"
    if pa.types.is_integer(t):
        return int(text)
    if pa.types.is_decimal(t):
        value = decimal.Decimal(text)
        if value.as_tuple().exponent != -t.scale:
            raise ValueError(f"{text} is no value of {t}")
        return value
    if pa.types.is_binary(t) or pa.types.is_large_binary(t) or pa.types.is_fixed_size_binary(t):
        return bytes.fromhex(text)
    if pa.types.is_date(t):
        return dt.date.fromisoformat(text)
    if pa.types.is_time(t):
        return dt.time.fromisoformat(text)
    if pa.types.is_timestamp(t):
        return dt.datetime.fromisoformat(text)
    return text
