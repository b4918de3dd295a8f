"""What a table's schema may be: supported types, keys and partitions, the lake's types, and schemas as bytes and text.

A table's schema is an Arrow schema in one canonical form (`normalize_schema`): no dictionary, view or metadata, only
types that Arrow, Parquet, Iceberg, DuckDB and Spark all hold without loss. Iceberg lacks some of them; `lake_schema`
names what it stores instead, and ``table.cast(schema)`` leads back.

    ours                                lake
    int8, int16                         int32
    large_string, large_binary          string, binary
    large_list<T>                       list<T>
    time32[s, ms]                       time64[us]
    timestamp[s, ms]                    timestamp[us]
    timestamp[s, ms, us, any zone]      timestamp[us, UTC]
    all others                          the same
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn

import pyarrow as pa

from lakehead.config import Limits
from lakehead.errors import CorruptionError, InvalidSchemaError
from lakehead.format.bucketing import can_hash
from lakehead.types import RESERVED_PREFIX

_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
NESTING_MAX = 20
"""Levels of lists, maps and structs in a column; Arrow's own messages and Parquet files end at some thirty maps."""
_NOT_IN_PARTITION_NAMES = "=&/%"
"""Partition names are ``column=value`` joined by '&' and become folder names in the lake."""


def normalize_schema(schema: object) -> pa.Schema:
    """The canonical Arrow schema of anything that has one.

    Takes a pa.Schema, an object with ``__arrow_c_schema__`` or ``__arrow_c_stream__``, an object whose ``schema`` is
    one (table, record batch, reader), or what ``pa.schema`` takes (pairs of name and type). Dictionary types become
    their value types and views their plain types at every level, date64 becomes date32, nanosecond timestamps become
    microsecond ones, metadata is dropped.
    Column order and nullability stay.

    Raises:
        InvalidSchemaError: it is not a schema; it has no columns; a name is empty, reserved or used twice, if only
            but for case; a type is nested too deep, or is not supported (the message says what to use instead).
    """
    arrow = _to_arrow_schema(schema)
    if not len(arrow):
        raise InvalidSchemaError("the schema has no columns: a table needs at least one")
    for name in arrow.names:
        if name.startswith(RESERVED_PREFIX):
            raise InvalidSchemaError(
                f"column {name!r}: names that start with '__' are reserved for system columns; rename it", column=name
            )
    _check_names(arrow.names, "the schema")
    canonical = pa.schema([pa.field(f.name, _canonical(f.type, f.name), f.nullable) for f in arrow])
    if (twins := twin_names(canonical)) is not None:
        one, other = twins
        alike = f"the full name {one!r} twice" if one == other else f"{one!r} and {other!r}, equal but for case"
        raise InvalidSchemaError(
            f"the schema has {alike}: SQL, Iceberg and Spark cannot tell them apart; rename one", column=other
        )
    return canonical


def validate_definition(
    schema: object,
    *,
    primary_key: Sequence[str] | None,
    partition_by: Sequence[str] | None,
    buckets: int,
    bucket_key: Sequence[str] | None,
    limits: Limits,
) -> tuple[pa.Schema, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Check a new table's definition and fill in its defaults.

    An empty or missing ``primary_key`` defines a log table. A lone string counts as a list of one name. The default
    bucket key is the primary key without the partition columns; a log table's is none.

    Returns:
        The schema (canonical; key, bucket-key and partition columns non-null), primary key, partition columns and
        bucket key, each in the order given.

    Raises:
        InvalidSchemaError: a rule is broken; the message names it and the column.
    """
    arrow = normalize_schema(schema)
    if len(arrow) > limits.columns_max:
        raise InvalidSchemaError(
            f"the schema has {len(arrow)} columns, at most {limits.columns_max} are allowed", limit=limits.columns_max
        )
    if not isinstance(buckets, int) or isinstance(buckets, bool) or not 1 <= buckets <= limits.buckets_max:
        raise InvalidSchemaError(f"buckets={buckets!r} must be a whole number from 1 to {limits.buckets_max}")
    primary = _named_columns(arrow, primary_key, "primary_key")
    partition = _named_columns(arrow, partition_by, "partition_by")
    bucket = _named_columns(arrow, bucket_key, "bucket_key")
    for column in partition:
        _check_partition_column(arrow, column, primary)
    _check_key_types(arrow, [c for c in primary if c not in partition], "primary_key")
    if overlap := [c for c in bucket if c in partition]:
        raise InvalidSchemaError(
            f"bucket_key column {overlap[0]!r} is a partition column, equal in all rows of a partition: leave it out",
            column=overlap[0],
        )
    if primary:
        bucket = bucket or tuple(c for c in primary if c not in partition)
        if not bucket:
            raise InvalidSchemaError(
                "primary_key holds partition columns only: add the column that identifies a row within a partition"
            )
        if outside := [c for c in bucket if c not in primary]:
            raise InvalidSchemaError(
                f"bucket_key column {outside[0]!r} is not part of primary_key ({', '.join(primary)}): rows of one key"
                " must share a bucket",
                column=outside[0],
            )
    _check_key_types(arrow, bucket, "bucket_key")
    required = {*primary, *partition, *bucket}
    fields = [f.with_nullable(False) if f.name in required else f for f in arrow]
    return pa.schema(fields), primary, partition, bucket


def twin_names(schema: pa.Schema) -> tuple[str, str] | None:
    """Two columns or fields that a reader who ignores case takes for one, by their full names; None without such."""
    seen: dict[str, str] = {}
    for name in _full_names(schema):
        # Unicode's caseless form; and the i of Turkish, which Java takes for the other.
        folded = name.replace("\u0130", "i").replace("\u0131", "i").casefold()
        if folded in seen:
            return seen[folded], name
        seen[folded] = name
    return None


def _full_names(fields: Iterable[pa.Field], path: str = "") -> Iterator[str]:
    """Names of columns and of all that is in them, as Iceberg spells them."""
    for f in fields:
        name = path + f.name
        yield name
        t = f.type
        if pa.types.is_struct(t):
            yield from _full_names([t.field(i) for i in range(t.num_fields)], f"{name}.")
        elif pa.types.is_list(t) or pa.types.is_large_list(t):
            yield from _full_names([t.value_field.with_name("element")], f"{name}.")
        elif pa.types.is_map(t):
            yield from _full_names([t.key_field.with_name("key"), t.item_field.with_name("value")], f"{name}.")


def is_wider(wide: pa.DataType, narrow: pa.DataType) -> bool:
    """Whether a type is another one than ``narrow`` and has every value of it, as Iceberg widens types."""
    if narrow in _INTEGERS and wide in _INTEGERS:
        return _INTEGERS.index(wide) > _INTEGERS.index(narrow)
    if pa.types.is_decimal128(narrow) and pa.types.is_decimal128(wide):
        return bool(wide.scale == narrow.scale and wide.precision > narrow.precision)
    return bool(narrow == pa.float32() and wide == pa.float64())


def lake_type(t: pa.DataType) -> pa.DataType:
    """The type that Iceberg stores a canonical type as; at every level of nested types."""
    if pa.types.is_int8(t) or pa.types.is_int16(t):
        return pa.int32()
    if pa.types.is_large_string(t):
        return pa.string()
    if pa.types.is_large_binary(t):
        return pa.binary()
    if pa.types.is_time(t):
        return pa.time64("us")
    if pa.types.is_timestamp(t):
        return pa.timestamp("us", "UTC" if t.tz else None)
    if pa.types.is_large_list(t):
        t = pa.list_(t.value_field)
    return map_children(t, lambda child, _: lake_type(child))


def lake_schema(schema: pa.Schema) -> pa.Schema:
    """`lake_type` of every column; names, order and nullability stay."""
    return pa.schema([pa.field(f.name, lake_type(f.type), f.nullable) for f in schema])


def schema_to_bytes(schema: pa.Schema) -> bytes:
    """The schema as an encapsulated Arrow IPC schema message."""
    data: bytes = schema.serialize().to_pybytes()
    return data


def schema_from_bytes(data: bytes) -> pa.Schema:
    """Inverse of `schema_to_bytes`.

    Raises:
        CorruptionError: the bytes are no Arrow IPC schema message.
    """
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(data))
        _decode_names(list(schema))
        return schema
    except (pa.ArrowException, OSError, EOFError, ValueError) as e:
        raise CorruptionError(f"a stored schema cannot be read: {e}", size=len(data)) from e


def _decode_names(fields: Sequence[pa.Field]) -> None:
    """Arrow decodes names when they are asked for, and would raise then."""
    for field in fields:
        _ = field.name
        _decode_names([field.type.field(i) for i in range(field.type.num_fields)])


def require_small_schema(schema: pa.Schema, bytes_max: int) -> None:
    """Return if a definition takes no more room than that where it is stored and sent.

    Raises:
        InvalidSchemaError: it takes more.
    """
    size = len(schema_to_bytes(schema))
    if size > bytes_max:
        raise InvalidSchemaError(
            f"the schema takes {size:,} bytes, over the limit of {bytes_max:,}: give its columns and fields shorter"
            " names, or have fewer",
            schema_bytes_max=bytes_max,
        )


def nearest_name(name: str, known: Iterable[str]) -> str:
    """The hint for a column that does not exist: the nearest one that does, or all of them."""
    known = list(known)
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f"did you mean {near[0]!r}?"
    more = ", ..." if len(known) > 20 else ""
    return f"columns: {', '.join(known[:20])}{more}"


# Canonical form


def _to_arrow_schema(schema: object) -> pa.Schema:
    if isinstance(schema, pa.Schema):
        return schema
    try:
        if hasattr(schema, "__arrow_c_schema__"):
            return pa.schema(schema)
        inner = getattr(schema, "schema", None)
        if isinstance(inner, pa.Schema) or hasattr(inner, "__arrow_c_schema__"):
            return pa.schema(inner)
        if hasattr(schema, "__arrow_c_stream__"):
            return pa.RecordBatchReader.from_stream(schema).schema
        if isinstance(schema, list | tuple | dict):
            return pa.schema(schema)
    except (pa.ArrowException, TypeError, ValueError) as e:
        raise InvalidSchemaError(
            f"the schema cannot be read: {e}; give for example pa.schema([('id', pa.int64()), ('city', pa.string())])"
        ) from e
    raise InvalidSchemaError(
        f"a {type(schema).__name__} is not a schema: pass a pyarrow.Schema, or data that has an Arrow schema"
    )


def _check_names(names: list[str], where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if not name.strip():
            raise InvalidSchemaError(f"{where} has a column without a name: name it")
        if name in seen:
            raise InvalidSchemaError(f"{where} has two columns named {name!r}: rename one", column=name)
        seen.add(name)


def _canonical(t: pa.DataType, path: str, depth: int = 0) -> pa.DataType:
    if depth > NESTING_MAX:
        column = path.split(".", 1)[0]
        raise InvalidSchemaError(
            f"column {column!r} nests lists, maps and structs more than {NESTING_MAX} levels deep: flatten it, or store"
            " what is inside as text",
            column=column,
        )
    if isinstance(t, pa.BaseExtensionType):
        _refuse(t, path, f"its storage type {t.storage_type}")
    if pa.types.is_dictionary(t):
        return _canonical(t.value_type, path, depth + 1)
    if pa.types.is_string_view(t):
        return pa.string()
    if pa.types.is_binary_view(t):
        return pa.binary()
    if pa.types.is_date(t):
        return pa.date32()
    if pa.types.is_timestamp(t) and t.unit == "ns":  # what pandas makes of datetimes; rows must fit microseconds
        return pa.timestamp("us", t.tz)
    if pa.types.is_decimal(t):
        return _canonical_decimal(t, path)
    if pa.types.is_list_view(t):
        t = pa.list_(t.value_field)
    elif pa.types.is_large_list_view(t):
        t = pa.large_list(t.value_field)
    if pa.types.is_struct(t):
        if not t.num_fields:
            _refuse(t, path, "a struct with at least one field")
        _check_names([t.field(i).name for i in range(t.num_fields)], f"struct {path!r}")
    elif not _is_supported(t) or (pa.types.is_fixed_size_binary(t) and not t.byte_width):
        _refuse(t, path, _instead_of(t))
    return map_children(t, lambda child, name: _canonical(child, f"{path}.{name}", depth + 1))


def _canonical_decimal(t: pa.DataType, path: str) -> pa.DataType:
    if pa.types.is_decimal256(t):
        _refuse(t, path, "decimal128 with at most 38 digits")
    if not 0 <= t.scale <= t.precision:
        _refuse(t, path, "a scale from 0 to the precision")
    return pa.decimal128(t.precision, t.scale)


def _is_supported(t: pa.DataType) -> bool:
    """Of types that are neither struct nor handled before: plain types, lists and maps; children are not looked at."""
    types = pa.types
    return (
        types.is_boolean(t)
        or can_hash(t)
        or types.is_float32(t)
        or types.is_float64(t)
        or types.is_list(t)
        or types.is_large_list(t)
        or types.is_map(t)
    )


def _instead_of(t: pa.DataType) -> str:
    types = pa.types
    if types.is_unsigned_integer(t):
        return "decimal128(20, 0)" if t.bit_width == 64 else f"int{2 * t.bit_width}"
    if types.is_float16(t):
        return "float32"
    if types.is_timestamp(t):
        return "microseconds: " + (f'timestamp("us", "{t.tz}")' if t.tz else 'timestamp("us")')
    if types.is_time(t):
        return 'microseconds: time64("us")'
    if types.is_null(t):
        return "the type that its values will have"
    if types.is_duration(t) or types.is_interval(t):
        return "int64 with the unit in the column's name"
    if types.is_fixed_size_list(t):
        return "list"
    if types.is_run_end_encoded(t):
        return str(t.value_type)
    if types.is_fixed_size_binary(t):
        return "binary"
    if types.is_union(t):
        return "a struct with one nullable field per alternative"
    return "another type"


def _refuse(t: pa.DataType, path: str, instead: str) -> NoReturn:
    raise InvalidSchemaError(f"column {path!r} has the type {t}, which is not supported: use {instead}", column=path)


def map_children(t: pa.DataType, change: Callable[[pa.DataType, str], pa.DataType]) -> pa.DataType:
    """A list, map or struct with each child's type changed, metadata dropped and standard child names; else ``t``."""
    if pa.types.is_list(t) or pa.types.is_large_list(t):
        item = pa.field("item", change(t.value_type, "item"), t.value_field.nullable)
        return pa.large_list(item) if pa.types.is_large_list(t) else pa.list_(item)
    if pa.types.is_map(t):
        item = pa.field("value", change(t.item_type, "value"), t.item_field.nullable)
        return pa.map_(pa.field("key", change(t.key_type, "key"), False), item)
    if pa.types.is_struct(t):
        fields = [t.field(i) for i in range(t.num_fields)]
        return pa.struct([pa.field(f.name, change(f.type, f.name), f.nullable) for f in fields])
    return t


# Keys and partitions


def _named_columns(schema: pa.Schema, names: Sequence[str] | None, what: str) -> tuple[str, ...]:
    columns = (names,) if isinstance(names, str) else tuple(names or ())
    for column in columns:
        if column not in schema.names:
            hint = nearest_name(str(column), schema.names)
            raise InvalidSchemaError(f"{what} names column {column!r}, which the schema lacks; {hint}", column=column)
        if columns.count(column) > 1:
            raise InvalidSchemaError(f"{what} names column {column!r} twice", column=column)
    return columns


def _check_partition_column(schema: pa.Schema, column: str, primary: tuple[str, ...]) -> None:
    t = schema.field(column).type
    if primary and column not in primary:
        raise InvalidSchemaError(
            f"partition_by column {column!r} is not part of primary_key: add it there (keys are unique per partition)",
            column=column,
        )
    if not (can_hash(t) or pa.types.is_boolean(t)):
        raise InvalidSchemaError(
            f"partition_by column {column!r} has the type {t}: use an integer, string, binary, boolean, date, time,"
            " timestamp or decimal column",
            column=column,
        )
    if any(c in column for c in _NOT_IN_PARTITION_NAMES):
        raise InvalidSchemaError(
            f"partition_by column {column!r} has one of {' '.join(_NOT_IN_PARTITION_NAMES)} in its name: rename it",
            column=column,
        )


def _check_key_types(schema: pa.Schema, columns: Sequence[str], what: str) -> None:
    for column in columns:
        t = schema.field(column).type
        if not can_hash(t):
            raise InvalidSchemaError(
                f"{what} column {column!r} has the type {t}: use an integer, string, binary, date, time, timestamp or"
                " decimal column",
                column=column,
            )


# Schemas as text

_TEXT_TYPES: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "bool": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
    "string": pa.string(),
    "varchar": pa.string(),
    "text": pa.string(),
    "binary": pa.binary(),
    # Arrow's names, where SQL's would mislead: int64 is not int.
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
}
_PARAMETRIC = ("decimal", "fixed", "list", "map", "struct")
_TOKEN = re.compile(
    r"""\s*(?:(?P<word>[^\W\d][\w.$-]*)|(?P<quoted>"[^"]+"|`[^`]+`)|(?P<number>\d+)|(?P<mark>[,<>():]))"""
)


def parse_schema_text(text: str) -> pa.Schema:
    """Read a schema as written on the command line: ``"id bigint not null, tags list<string>, price decimal(12,2)"``.

    Types: boolean (bool), tinyint, smallint, int (integer), bigint (long), float (real), double, decimal(p,s), date,
    time, timestamp (microseconds, no zone), timestamptz (microseconds, UTC), string (varchar, text), binary, fixed(n),
    ``list<T>``, ``map<K,V>``, ``struct<name T, ...>``; they nest. Columns, struct fields, list elements and map values
    may end in ``not null``. Names with other characters than letters, digits and ``_ . $ -`` are quoted ("..." or
    `...`).

    Raises:
        InvalidSchemaError: the text has another form (the message says where), or `normalize_schema` refuses it.
    """
    try:
        schema = _SchemaText(text).schema()
    except RecursionError as e:
        raise InvalidSchemaError("schema text: types are nested too deep to read") from e
    return normalize_schema(schema)


class _SchemaText:
    """Recursive descent over the tokens of one schema text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str, int]] = []
        self._next = 0
        at = 0
        while text[at:].strip():
            found = _TOKEN.match(text, at)
            if not found:
                self._fail("a name, a type or one of , < > ( )", len(text) - len(text[at:].lstrip()))
            kind = str(found.lastgroup)
            self._tokens.append((kind, found[kind], found.start(kind)))
            at = found.end()
        self._tokens.append(("end", "", len(text)))

    def schema(self) -> pa.Schema:
        fields = self._fields()
        if self._tokens[self._next][0] != "end":
            self._fail("',' or the end")
        return pa.schema(fields)

    def _fields(self) -> list[pa.Field]:
        fields = [self._field()]
        while self._accept(","):
            fields.append(self._field())
        return fields

    def _field(self) -> pa.Field:
        kind, name, _ = self._tokens[self._next]
        if kind not in ("word", "quoted"):
            self._fail("a column name")
        self._next += 1
        self._accept(":")
        t = self._type()
        return pa.field(name.strip('"`') if kind == "quoted" else name, t, self._nullable())

    def _nullable(self) -> bool:
        if not self._accept("not"):
            return True
        self._expect("null")
        return False

    def _type(self) -> pa.DataType:
        kind, word, _ = self._tokens[self._next]
        name = word.lower()
        if kind != "word" or (name not in _TEXT_TYPES and name not in _PARAMETRIC):
            near = difflib.get_close_matches(name, [*_TEXT_TYPES, *_PARAMETRIC], 1) if kind == "word" else []
            self._fail("a type" + (f" (did you mean {near[0]!r}?)" if near else f" ({', '.join(_TEXT_TYPES)}, ...)"))
        at = self._next
        self._next += 1
        if name in _TEXT_TYPES:
            return _TEXT_TYPES[name]
        if name in ("decimal", "fixed"):
            return self._sized_type(name, at)
        self._expect("<")
        t = self._nested_type(name)
        self._expect(">")
        return t

    def _sized_type(self, name: str, at: int) -> pa.DataType:
        self._expect("(")
        first = self._number()
        second = self._number() if name == "decimal" and self._accept(",") else 0
        self._expect(")")
        try:
            return pa.decimal128(first, second) if name == "decimal" else pa.binary(first)
        except (pa.ArrowException, ValueError, OverflowError) as e:
            raise InvalidSchemaError(f"{name} at position {self._tokens[at][2] + 1}: {e}", text=self._text) from e

    def _nested_type(self, name: str) -> pa.DataType:
        if name == "struct":
            return pa.struct(self._fields())
        first = self._type()
        if name == "list":
            return pa.list_(pa.field("item", first, self._nullable()))
        self._expect(",")
        value = self._type()
        return pa.map_(first, pa.field("value", value, self._nullable()))

    def _number(self) -> int:
        kind, text, _ = self._tokens[self._next]
        if kind != "number":
            self._fail("a number")
        self._next += 1
        return int(text)

    def _accept(self, text: str) -> bool:
        kind, found, _ = self._tokens[self._next]
        hit = kind in ("word", "mark") and found.lower() == text
        self._next += hit
        return hit

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            self._fail(repr(text))

    def _fail(self, expected: str, at: int | None = None) -> NoReturn:
        if at is None:
            at = self._tokens[self._next][2]
        found = repr(self._text[at : at + 20]) if at < len(self._text) else "the end"
        raise InvalidSchemaError(
            f"schema text: expected {expected} at position {at + 1}, found {found}", text=self._text, position=at + 1
        )
