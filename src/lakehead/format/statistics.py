r"""Statistics of one batch, by which readers skip it without decoding it.

::

      0  u32  row count
      4  u16  column count
      6  u16  zero
      8  24 bytes for each column, in the schema's order:
           0  u32  null count, 0xFFFFFFFF for unknown
           4  u8   kind of bounds: 0 none, 1 integers, 2 floats, 3 bytes
           5  u8   kind 3: length of the lower bound, at most 16
           6  u8   kind 3: length of the upper bound, at most 16; 0xFF for none
           7  u8   zero
           8       kind 1: i64 min, i64 max     kind 2: f64 min, f64 max
                   kind 3: u32 position of the lower bound from byte 0, u32 of the upper bound, 8x zero
      .  bytes of kind 3 bounds

All integers are little-endian. Kind 1 holds the storage integers of bool, integers, date, time, timestamp, duration and
decimal (unscaled). Kind 3 is for text and binary: the lower bound is a prefix of the least value, the upper bound the
greatest value or a shorter text above it. There are no bounds for a column that holds NaN or only nulls, for values
beyond 64 bits and for nested types. Text and binary cost 11 ns a row, so they have bounds only in batches of up to
`TEXT_ROWS_MAX` rows; everything else costs about 0.5 ns a row.
"""

from __future__ import annotations

import bisect
import datetime as dt
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from lakehead.errors import CorruptionError
from lakehead.predicate import Bound

PREFIX_BYTES = 16
TEXT_ROWS_MAX = 1024
NULLS_UNKNOWN = 0xFFFFFFFF
NO_UPPER = 0xFF

_HEADER = struct.Struct("<IHH")
_COLUMN = struct.Struct("<IBBBx16s")
_INTEGERS = struct.Struct("<qq")
_FLOATS = struct.Struct("<dd")
_POSITIONS = struct.Struct("<II8x")
_NONE, _INTEGER, _FLOAT, _BYTES = range(4)
_ENTRY_BYTES = 24
assert _HEADER.size == 8 and _COLUMN.size == _ENTRY_BYTES
assert PREFIX_BYTES < NO_UPPER

_Limits: TypeAlias = tuple[int, int] | tuple[float, float] | tuple[bytes, bytes | None]
Data: TypeAlias = bytes | memoryview | pa.Buffer

_NUMPY_TYPES: dict[int, type[np.generic]] = {
    t.id: n
    for t, n in (
        (pa.int8(), np.int8),
        (pa.int16(), np.int16),
        (pa.int32(), np.int32),
        (pa.int64(), np.int64),
        (pa.uint8(), np.uint8),
        (pa.uint16(), np.uint16),
        (pa.uint32(), np.uint32),
        (pa.uint64(), np.uint64),
        (pa.float16(), np.float16),
        (pa.float32(), np.float32),
        (pa.float64(), np.float64),
        (pa.date32(), np.int32),
        (pa.date64(), np.int64),
        (pa.time32("s"), np.int32),
        (pa.time64("us"), np.int64),
        (pa.timestamp("us"), np.int64),
        (pa.duration("us"), np.int64),
    )
}
_BOOL = pa.bool_().id
_DECIMAL = pa.decimal128(1).id
_TEXT = {t.id for t in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(1))}


@dataclass(frozen=True)
class ColumnStatistics:
    """What is known of one column of a batch.

    Attributes:
        null_count: None for unknown.
        lower, upper: storage integers, floats or byte prefixes that enclose every non-null value; None for unknown.
    """

    rows: int
    null_count: int | None
    lower: int | float | bytes | None
    upper: int | float | bytes | None


# -- encoding ---------------------------------------------------------------------------------------


def encode_statistics(batch: pa.RecordBatch) -> bytes:
    """Statistics of a batch's columns, in the layout above."""
    rows = batch.num_rows
    columns = batch.columns
    parts = [_HEADER.pack(rows, len(columns), 0)]
    tail: list[bytes] = []
    tail_at = _HEADER.size + _ENTRY_BYTES * len(columns)
    for column in columns:
        nulls = column.null_count
        limits = _limits(column, rows, nulls) if nulls < rows else None
        kind, lengths, payload = _NONE, (0, 0), bytes(16)
        if limits is not None:
            low, high = limits
            if isinstance(low, bytes):
                assert high is None or isinstance(high, bytes)
                kind, lengths = _BYTES, (len(low), NO_UPPER if high is None else len(high))
                payload = _POSITIONS.pack(tail_at, tail_at + len(low))
                tail += (low, high or b"")
                tail_at += len(low) + len(high or b"")
            elif isinstance(low, float):
                kind, payload = _FLOAT, _FLOATS.pack(low, high)
            else:
                kind, payload = _INTEGER, _INTEGERS.pack(low, high)
        parts.append(_COLUMN.pack(nulls if _counts_nulls(column.type) else NULLS_UNKNOWN, kind, *lengths, payload))
    return b"".join(parts + tail)


def _counts_nulls(t: pa.DataType) -> bool:
    """Whether null_count counts all nulls: not those inside a dictionary, union, run or wrapped type."""
    return t.id in _NUMPY_TYPES or t.id in _TEXT or types.is_primitive(t) or _plain(t)


def _plain(t: pa.DataType) -> bool:
    return bool(
        types.is_decimal(t)
        or types.is_struct(t)
        or types.is_list(t)
        or types.is_large_list(t)
        or types.is_fixed_size_list(t)
        or types.is_map(t)
        or types.is_null(t)
    )


def _limits(column: pa.Array, rows: int, nulls: int) -> _Limits | None:
    """Bounds of a column with at least one value; None where it has none."""
    identity = column.type.id
    numpy_type = _NUMPY_TYPES.get(identity)
    if numpy_type is not None:
        _, data = column.buffers()
        values = np.frombuffer(data, numpy_type, rows, column.offset * np.dtype(numpy_type).itemsize)
        return _numpy_limits(values if not nulls else values[_valid(column, rows)])
    if identity == _BOOL:
        return int(column.false_count == 0), int(column.true_count > 0)
    if identity == _DECIMAL:
        return _decimal_limits(column, rows, nulls)
    if identity in _TEXT and rows <= TEXT_ROWS_MAX:
        return _text_limits(column)
    return None


def _valid(column: pa.Array, rows: int) -> npt.NDArray[np.bool_]:
    bitmap = np.frombuffer(column.buffers()[0], np.uint8)
    start, offset = column.offset >> 3, column.offset & 7
    bits = np.unpackbits(bitmap[start : (column.offset + rows + 7) >> 3], count=offset + rows, bitorder="little")
    return bits[offset:].view(np.bool_)


def _numpy_limits(values: npt.NDArray[np.generic]) -> _Limits | None:
    low, high = values.min().item(), values.max().item()
    if low != low or high != high:
        return None
    return None if isinstance(high, int) and high >= 1 << 63 else (low, high)


def _decimal_limits(column: pa.Array, rows: int, nulls: int) -> _Limits | None:
    words = np.frombuffer(column.buffers()[1], np.int64, 2 * rows, 16 * column.offset)
    low, high = words[0::2], words[1::2]
    if nulls:
        valid = _valid(column, rows)
        low, high = low[valid], high[valid]
    if column.type.precision > 18 and not np.array_equal(low >> 63, high):
        return None
    return int(low.min()), int(low.max())


def _text_limits(column: pa.Array) -> _Limits:
    low, high = (s.as_buffer().to_pybytes() for s in pc.min_max(column).values())
    return low[:PREFIX_BYTES], _upper_prefix(high)


def _upper_prefix(value: bytes) -> bytes | None:
    """The value where it is short, else the least prefix-long bytes above everything that starts as it does."""
    if len(value) <= PREFIX_BYTES:
        return value
    kept = value[:PREFIX_BYTES].rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None


# -- decoding ---------------------------------------------------------------------------------------


class BatchStatistics:
    """Encoded statistics, of which single columns are decoded when asked for."""

    __slots__ = ("_columns", "_data", "_schema", "_size", "rows")

    def __init__(self, data: Data, schema: pa.Schema) -> None:
        self._data = memoryview(data)
        self._size = self._data.nbytes
        self._schema = schema
        if self._size < _HEADER.size:
            raise CorruptionError(f"batch statistics are cut off after {self._size} bytes")
        self.rows, self._columns, _ = _HEADER.unpack_from(self._data)
        if _HEADER.size + _ENTRY_BYTES * self._columns > self._size:
            raise CorruptionError(f"batch statistics of {self._columns} columns are cut off after {self._size} bytes")

    def check(self, rows: int) -> None:
        """Read all of them once, so that no reader trips over them later.

        Raises:
            CorruptionError: they contradict themselves, or are of another schema or number of rows.
        """
        if self.rows != rows or self._columns != len(self._schema):
            raise CorruptionError(
                f"batch statistics of {self.rows} rows and {self._columns} columns belong to a batch of {rows} rows and"
                f" {len(self._schema)} columns"
            )
        for position in range(self._columns):
            self.column(position)

    def column(self, position: int) -> ColumnStatistics:
        """Statistics of the column at a position; all unknown for one the batch was written without.

        Raises:
            CorruptionError: they contradict themselves.
        """
        if not 0 <= position < self._columns:
            return ColumnStatistics(self.rows, None, None, None)
        at = _HEADER.size + _ENTRY_BYTES * position
        nulls, kind, low_length, high_length, payload = _COLUMN.unpack_from(self._data, at)
        null_count = None if nulls == NULLS_UNKNOWN else nulls
        if kind == _NONE:
            return ColumnStatistics(self.rows, null_count, None, None)
        if kind == _INTEGER:
            return ColumnStatistics(self.rows, null_count, *_INTEGERS.unpack(payload))
        if kind == _FLOAT:
            return ColumnStatistics(self.rows, null_count, *_FLOATS.unpack(payload))
        if kind != _BYTES or low_length > PREFIX_BYTES:
            raise CorruptionError(f"batch statistics hold bounds of the unknown kind {kind}", column=position)
        low_at, high_at = _POSITIONS.unpack(payload)
        lower = self._bytes(low_at, low_length)
        return ColumnStatistics(
            self.rows, null_count, lower, None if high_length == NO_UPPER else self._bytes(high_at, high_length)
        )

    def _bytes(self, at: int, length: int) -> bytes:
        if at + length > self._size:
            raise CorruptionError("batch statistics are cut off", position=at, size=self._size)
        return bytes(self._data[at : at + length])

    def may_match(self, bounds: Iterable[Bound]) -> bool:
        """False only when no row of the batch satisfies all bounds."""
        return all(self._may_match(bound) for bound in bounds)

    def _may_match(self, bound: Bound) -> bool:
        position = self._schema.get_field_index(bound.column)
        if position < 0:
            return True
        column = self.column(position)
        if bound.op == "is_null":
            return column.null_count != 0
        if column.null_count == column.rows:
            return False
        if bound.op == "not_null" or (column.lower is None and column.upper is None):
            return True
        t = self._schema.field(position).type
        if bound.op == "in":
            return _some_possible(column, bound.ordered, t)
        return _possible(bound.op, column, _stored(bound.value, t))


def _possible(op: str, column: ColumnStatistics, value: int | float | bytes | None) -> bool:
    """Whether a value between lower and upper can be ``op value``; True where that is not known."""
    lower, upper = column.lower, column.upper
    if value is None or lower is None or isinstance(value, bytes) is not isinstance(lower, bytes):
        return True
    if op in ("==", "<=") and lower > value:  # type: ignore[operator]
        return False
    if op == "<" and lower >= value:  # type: ignore[operator]
        return False
    if upper is None:
        return True
    if op in ("==", ">=") and upper < value:  # type: ignore[operator]
        return False
    return not (op == ">" and upper <= value)  # type: ignore[operator]


def _some_possible(column: ColumnStatistics, members: Sequence[object] | None, t: pa.DataType) -> bool:
    """Whether a value between lower and upper can be one of these, which are in order; True where that is not known."""
    if members is None or column.lower is None:
        return True
    key: Callable[[object], Any] = lambda value: _stored(value, t)  # noqa: E731
    try:
        first = bisect.bisect_left(members, column.lower, key=key)
    except TypeError:  # one has no stored form, or one of another kind
        return True
    return first < len(members) and _possible("==", column, _stored(members[first], t))


def decode_statistics(data: Data, schema: pa.Schema) -> BatchStatistics:
    """Statistics of a batch of that schema; columns are decoded when asked for.

    Raises:
        CorruptionError: the bytes are cut off.
    """
    return BatchStatistics(data, schema)


def may_match(data: Data, schema: pa.Schema, bounds: Iterable[Bound]) -> bool:
    """False only when no row of the batch that ``data`` describes satisfies all bounds.

    Raises:
        CorruptionError: the statistics contradict themselves.
    """
    return BatchStatistics(data, schema).may_match(bounds)


# -- values of bounds as they are stored --------------------------------------------------------------

_EPOCH = dt.datetime(1970, 1, 1)
_EPOCH_UTC = _EPOCH.replace(tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def _stored(value: object, t: pa.DataType) -> int | float | bytes | None:
    """A bound's value in the form of a column's limits; None where it has none, or is no value of the column's type."""
    if isinstance(value, str):
        return value.encode(errors="surrogatepass") if t.id in _TEXT else None
    if isinstance(value, bytes):
        return value if t.id in _TEXT else None
    convert = _CONVERSIONS.get(type(value))
    return convert(value, t) if convert is not None else None


def _stored_number(value: object, t: pa.DataType) -> int | float | None:
    assert isinstance(value, int | float)
    plain = types.is_integer(t) or types.is_floating(t) or types.is_boolean(t)
    return value if plain and value == value else None


def _stored_decimal(value: object, t: pa.DataType) -> int | None:
    assert isinstance(value, Decimal)
    if t.id != _DECIMAL or t.scale < 0 or not value.is_finite():
        return None
    numerator, denominator = value.as_integer_ratio()
    return _whole(numerator * 10**t.scale, denominator)


def _stored_instant(value: object, t: pa.DataType) -> int | None:
    assert isinstance(value, dt.datetime)
    if not types.is_timestamp(t) or (value.tzinfo is None) is not (t.tz is None):
        return None
    microseconds = (value - (_EPOCH if value.tzinfo is None else _EPOCH_UTC)) // _MICROSECOND
    return _whole(microseconds * _PER_SECOND[t.unit], 10**6)


def _stored_date(value: object, t: pa.DataType) -> int | None:
    assert isinstance(value, dt.date)
    days = value.toordinal() - _EPOCH.toordinal()
    return days if types.is_date32(t) else days * 86_400_000 if types.is_date64(t) else None


def _stored_time(value: object, t: pa.DataType) -> int | None:
    assert isinstance(value, dt.time)
    if not types.is_time(t) or value.tzinfo is not None:
        return None
    microseconds = ((value.hour * 60 + value.minute) * 60 + value.second) * 10**6 + value.microsecond
    return _whole(microseconds * _PER_SECOND[t.unit], 10**6)


def _whole(numerator: int, denominator: int) -> int | None:
    quotient, rest = divmod(numerator, denominator)
    return None if rest else quotient


_CONVERSIONS: dict[type, Callable[[object, pa.DataType], int | float | None]] = {
    bool: _stored_number,
    int: _stored_number,
    float: _stored_number,
    Decimal: _stored_decimal,
    dt.datetime: _stored_instant,
    dt.date: _stored_date,
    dt.time: _stored_time,
}
