"""Whatever Lakehead stores or sends comes back as it was: rows, definitions, names, messages, marks, writers' state."""

from __future__ import annotations

import datetime as dt
import enum
import tempfile
from decimal import Decimal
from types import SimpleNamespace
from typing import Annotated, Any, get_args, get_origin

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakehead.config import Limits, TableProperties
from lakehead.env import LocalStorage
from lakehead.format.frame import STATISTICS_ROWS_MIN, WriterStamp, decode_frame, encode_body, encode_header
from lakehead.format.ipc_message import decoded_bytes, read_received
from lakehead.format.schema import schema_from_bytes, schema_to_bytes, validate_definition
from lakehead.format.statistics import encode_statistics
from lakehead.lake.marks import MARK, LakeMark, LakeSnapshot, LakeVersion
from lakehead.log.checkpoint import Footer, LiveBatch, open_checkpoint, write_checkpoint
from lakehead.log.writers import ANSWERS_KEPT, WriterTable
from lakehead.protocol import messages as m
from lakehead.protocol.attachments import unwrap, wrap
from lakehead.protocol.codec import (
    AnyCall,
    AnyStream,
    answer_type,
    decode_call,
    decode_reply,
    decode_stream_request,
    encode,
)
from lakehead.types import (
    TIMESTAMP_TYPE,
    Schemas,
    TableDescriptor,
    TablePath,
    TabletKey,
    parse_partition_name,
    partition_name,
)

FLOAT = st.floats(allow_nan=False)
INT64 = st.integers(-(2**63), 2**63 - 1)
NAMES = st.text(min_size=1, max_size=8).filter(lambda s: s.strip() and not s.startswith("__"))
UNITS = ("s", "ms", "us")
ZONES = (None, "UTC", "Europe/Oslo", "+05:30")

PLAIN_TYPES = st.one_of(
    st.sampled_from([pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()]),
    st.sampled_from([pa.date32(), pa.time32("s"), pa.time32("ms"), pa.time64("us")]),
    st.sampled_from([pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(1), pa.binary(16)]),
    st.builds(pa.timestamp, st.sampled_from(UNITS), st.sampled_from(ZONES)),
    st.integers(1, 38).flatmap(lambda p: st.builds(pa.decimal128, st.just(p), st.integers(0, p))),
)


def nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    fields = st.lists(st.builds(pa.field, NAMES, inner), min_size=1, max_size=3, unique_by=lambda f: f.name.casefold())
    return st.one_of(
        st.builds(pa.list_, inner), st.builds(pa.large_list, inner), fields.map(pa.struct),
        st.builds(pa.map_, st.sampled_from([pa.string(), pa.int32(), pa.date32()]), inner),
    )  # fmt: skip


TYPES = st.recursive(PLAIN_TYPES, nested, max_leaves=4)
PER_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000}


def integers(t: pa.DataType) -> tuple[int, int] | None:
    """The storage integers that a type may have."""
    types = pa.types
    if types.is_time(t):
        return 0, PER_DAY[t.unit] - 1
    if types.is_date(t):
        return -719_162, 2_932_896
    if types.is_timestamp(t):
        return -(10**8), 10**8
    return (-(2 ** (t.bit_width - 1)), 2 ** (t.bit_width - 1) - 1) if types.is_integer(t) else None


def values(t: pa.DataType, *, nullable: bool = True) -> st.SearchStrategy[Any]:
    """Values of a type as `pa.array` takes them."""
    types = pa.types
    bounds = integers(t)
    some: st.SearchStrategy[Any]
    if bounds is not None:
        some = st.integers(*bounds)
    elif types.is_boolean(t):
        some = st.booleans()
    elif types.is_floating(t):
        some = st.floats(width=t.bit_width, allow_nan=False)
    elif types.is_decimal(t):
        unscaled = st.integers(1 - 10**t.precision, 10**t.precision - 1)
        some = unscaled.map(lambda n: Decimal((int(n < 0), tuple(map(int, str(abs(n)))), -t.scale)))
    elif types.is_fixed_size_binary(t):
        some = st.binary(min_size=t.byte_width, max_size=t.byte_width)
    elif types.is_binary(t) or types.is_large_binary(t):
        some = st.binary(max_size=20)
    elif types.is_map(t):
        some = st.lists(st.tuples(values(t.key_type, nullable=False), values(t.item_type)), max_size=3)
    elif types.is_list(t) or types.is_large_list(t):
        some = st.lists(values(t.value_type), max_size=3)
    elif types.is_struct(t):
        some = st.fixed_dictionaries({t.field(i).name: values(t.field(i).type) for i in range(t.num_fields)})
    else:
        some = st.text(max_size=20)
    return st.none() | some if nullable else some


@st.composite
def schemas(draw: st.DrawFn) -> pa.Schema:
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique_by=str.casefold))
    return pa.schema([pa.field(n, draw(TYPES), draw(st.booleans())) for n in names])


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    """Rows of any accepted types, empty ones and slices in the middle of larger buffers among them."""
    schema = draw(schemas())
    few = draw(st.integers(0, 6))
    repeat = draw(st.sampled_from([1, 1, 20]))
    arrays = []
    for f in schema:
        column = draw(st.lists(values(f.type, nullable=f.nullable), min_size=few, max_size=few))
        arrays.append(pa.array(column * repeat, f.type))
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    start = draw(st.integers(0, batch.num_rows))
    return batch.slice(start, draw(st.none() | st.integers(0, batch.num_rows - start)))


COMPRESSIONS = st.sampled_from(["none", "lz4", "zstd"])
STAMPS = st.builds(
    WriterStamp,
    st.binary(min_size=16, max_size=16),
    st.integers(5, 2**63 - 1),
    st.integers(-1, 4),
    st.integers(-1, 2**63 - 1),
    st.integers(0, 2**32 - 1),
)


@given(batches(), STAMPS, COMPRESSIONS, st.integers(0, 2**32 - 1), st.booleans(), st.data())
def test_frames(
    batch: pa.RecordBatch, stamp: WriterStamp, compression: str, schema_id: int, changes: bool, data: st.DataObject
) -> None:
    rows = batch.num_rows
    types = np.arange(rows, dtype=np.int8) % 5 if changes else None
    previous = np.arange(rows, dtype=np.int64) - 1 if changes else None
    body = encode_body(
        batch, schema_id=schema_id, stamp=stamp, compression=compression, change_types=types, prev_offsets=previous
    )
    base, time, synced = (data.draw(st.integers(0, 2**62)) for _ in range(3))
    header = encode_header(body, base_offset=base, timestamp_us=time, synced_end=synced, epoch=7)
    frame = decode_frame(pa.py_buffer(header + body.buffer.to_pybytes()), check=True)
    assert (frame.base_offset, frame.timestamp_us, frame.synced_end, frame.epoch) == (base, time, synced, 7)
    assert frame.end_offset == base + rows and frame.length == 64 + body.buffer.size
    assert (frame.body.stamp, frame.body.schema_id, frame.body.row_count) == (stamp, schema_id, rows)
    assert frame.body.rows(batch.schema).equals(batch)
    chosen = data.draw(st.lists(st.sampled_from(range(batch.num_columns)), unique=True))
    projected = frame.body.rows(batch.schema, chosen)
    assert projected.num_rows == rows and projected.equals(batch.select(chosen))
    assert frame.body.change_types.tolist() == (types.tolist() if types is not None else [0] * rows)
    if previous is not None:
        assert frame.body.prev_offsets.tolist() == previous.tolist()
    else:
        assert body.received_rows(batch.schema, bytes_max=1 << 20).equals(batch)
    assert frame.body.statistics.size == 0 or rows >= STATISTICS_ROWS_MIN
    many = pa.concat_batches([batch] * (STATISTICS_ROWS_MIN // rows + 1)) if rows else batch
    assert encode_body(many, schema_id=0, stamp=stamp).statistics.to_pybytes() == (
        encode_statistics(many) if rows else b""
    )


@given(batches())
def test_messages_of_rows(batch: pa.RecordBatch) -> None:
    message = batch.serialize()
    assert read_received(message, batch.schema, bytes_max=1 << 20).equals(batch)
    assert decoded_bytes(message) <= message.size


@given(schemas())
def test_schemas(schema: pa.Schema) -> None:
    assert schema_from_bytes(schema_to_bytes(schema)).equals(schema)


KEY_TYPES = [pa.int8(), pa.int64(), pa.string(), pa.date32(), pa.binary(4), pa.timestamp("us"), pa.decimal128(9, 2)]


@given(schemas(), st.lists(st.sampled_from(KEY_TYPES), min_size=1, max_size=3), st.data())
@settings(max_examples=50)
def test_definitions(schema: pa.Schema, key_types: list[pa.DataType], data: st.DataObject) -> None:
    names = [f"key {i}" for i in range(len(key_types))]
    parts = data.draw(st.integers(0, len(names) - 1))
    keyed = data.draw(st.booleans())
    rest = [f for f in schema if f.name not in names]
    plain, keys, partitions, bucketing = validate_definition(
        pa.schema([*rest, *zip(names, key_types, strict=True)]),
        primary_key=names if keyed else None,
        partition_by=names[:parts],
        bucket_key=data.draw(st.sampled_from([None, names[parts:]])),
        buckets=data.draw(st.integers(1, 1024)),
        limits=Limits(),
    )
    desc = TableDescriptor(
        table_id="t" * 32,
        path=TablePath("a", "b"),
        schemas=Schemas.only(plain, data.draw(st.integers(0, 2**31))),
        primary_key=keys,
        partition_by=partitions,
        bucket_key=bucketing,
        buckets=3,
        lake=data.draw(st.sampled_from([None, "iceberg"])),
        properties=data.draw(PROPERTIES),
    )
    asked = m.GetTable(database="d", table="t")
    sent = decode_reply(encode(m.TableReply(info=m.TableInfo.of(desc))), asked)
    assert isinstance(sent, m.TableReply) and sent.info.descriptor() == desc


PROPERTIES = st.builds(
    TableProperties,
    freshness_ms=st.integers(0, 2**53),
    durability=st.sampled_from(["sync", "os"]),
    compression=COMPRESSIONS,
    hot_retention_ms=st.integers(0, 2**53),
    log_ttl_ms=st.none() | st.integers(0, 2**53),
    auto_maintenance=st.booleans(),
    lake_changelog=st.booleans(),
    segment_bytes=st.integers(1, 2**53),
)


def of_type(t: Any) -> st.SearchStrategy[Any]:
    """Values of a message field's type."""
    if t == m.Int64:
        return INT64
    if isinstance(t, type) and issubclass(t, msgspec.Struct):
        return messages(t)
    if isinstance(t, type) and issubclass(t, enum.Enum):
        return st.sampled_from(t)
    if t is Any:
        return st.none() | st.booleans() | INT64 | st.text(max_size=5)
    args = get_args(t)
    if get_origin(t) is Annotated:  # bounded values: those that are drawn here are smaller than any upper bound
        (meta,) = t.__metadata__
        if meta.pattern is not None:
            return st.from_regex(meta.pattern.removesuffix("$") + r"\Z")
        if meta.min_length is not None and get_origin(args[0]) is list:
            return st.lists(of_type(get_args(args[0])[0]), min_size=meta.min_length, max_size=3)
        if meta.min_length is not None:
            return st.text(min_size=meta.min_length, max_size=9)
        if args[0] is float:
            return st.floats(meta.gt, meta.le, exclude_min=True)
        return st.integers(meta.ge, meta.le) if meta.ge is not None else of_type(args[0])
    origin = getattr(t, "__origin__", None)
    if origin is list:
        return st.lists(of_type(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(of_type(args[0]), of_type(args[1]), max_size=3)
    if origin is tuple:
        return st.lists(of_type(args[0]), max_size=3).map(tuple) if args[-1] is ... else st.tuples(*map(of_type, args))
    if args and all(isinstance(a, str) for a in args):
        return st.sampled_from(args)
    if args:
        return st.one_of(*(of_type(a) for a in args))
    plain = {str: st.text(max_size=9), int: INT64, bool: st.booleans(), bytes: st.binary(max_size=20), float: FLOAT}
    return st.none() if t is type(None) else plain[t]


def messages(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    return st.builds(cls, **{f.name: of_type(f.type) for f in msgspec.structs.fields(cls)})


@pytest.mark.parametrize("cls", get_args(AnyCall), ids=lambda c: c.__name__)
@settings(max_examples=15)
@given(data=st.data())
def test_calls(cls: type[m.Request[Any]], data: st.DataObject) -> None:
    message = data.draw(messages(cls))
    assert decode_call(encode(message)) == message
    reply = data.draw(messages(answer_type(cls)) | messages(m.ErrorReply))
    assert decode_reply(encode(reply), message) == reply


@pytest.mark.parametrize("cls", get_args(AnyStream), ids=lambda c: c.__name__)
@settings(max_examples=15)
@given(data=st.data())
def test_stream_requests(cls: type[m.Request[m.Stream]], data: st.DataObject) -> None:
    message = data.draw(messages(cls))
    assert decode_stream_request(encode(message)) == message


@given(st.binary(max_size=50), st.lists(st.binary(max_size=7000), max_size=6))
def test_attachments(message: bytes, parts: list[bytes]) -> None:
    pairs = iter(wrap(message, [pa.py_buffer(p) for p in parts]))

    def read() -> Any:
        batch, metadata = next(pairs)
        return SimpleNamespace(data=batch, app_metadata=metadata)

    found, attachments = unwrap(read, bytes_max=sum(map(len, parts)))
    assert found == message and [a.to_pybytes() for a in attachments] == parts
    assert next(pairs, None) is None


PARTITION_VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.string(): st.text(),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): INT64,
    pa.bool_(): st.booleans(),
    pa.binary(): st.binary(),
    pa.date32(): st.dates(),
    pa.time64("us"): st.times(),
    pa.timestamp("us"): st.datetimes(),
    pa.timestamp("us", "UTC"): st.datetimes(timezones=st.just(dt.UTC)),
    pa.decimal128(12, 3): st.decimals("-999999999.999", "999999999.999", places=3),
}


@given(st.lists(st.sampled_from(list(PARTITION_VALUES)), max_size=4), st.data())
def test_partition_names_and_tablet_keys(types: list[pa.DataType], data: st.DataObject) -> None:
    columns = tuple(f"c{i}" for i in range(len(types)))
    drawn = tuple(data.draw(PARTITION_VALUES[t]) for t in types)
    name = partition_name(columns, drawn)
    assert parse_partition_name(name, tuple(types)) == drawn
    assert "/" not in name
    key = TabletKey(name, data.draw(st.integers(0, 1023)))
    assert TabletKey.parse(str(key)) == key
    other = tuple(data.draw(PARTITION_VALUES[t]) for t in types)
    assert (partition_name(columns, other) == name) == (other == drawn), "one name a value"


@given(
    st.dictionaries(st.builds(TabletKey, st.text().map(lambda s: s.replace("/", "%2F")), st.integers(0, 99)), INT64),
    st.integers(0, 2**31),
    st.text(min_size=1),
)
def test_marks(offsets: dict[TabletKey, int], epoch: int, round_id: str) -> None:
    mark = LakeMark(7, "t", epoch, round_id, offsets, 3)
    assert LakeSnapshot(7, None, 3, mark.to_summary()).mark == mark
    properties = mark.to_properties()
    assert LakeVersion("l", "t", None, {}, properties).stored_mark == mark and set(properties) == {MARK}


@given(batches(), st.data())
@settings(max_examples=30)
def test_checkpoints(batch: pa.RecordBatch, data: st.DataObject) -> None:
    table = WriterTable()
    at = 0
    for writer, epoch in data.draw(st.lists(st.tuples(st.binary(min_size=16, max_size=16), st.integers(0, 3)))):
        for sequence in range(data.draw(st.integers(1, ANSWERS_KEPT + 3))):
            table.note(WriterStamp(writer, sequence, sequence - 1, sequence - 1, epoch), at, at + 2)
            at += 2
    rows = batch.num_rows
    offsets = np.arange(rows, dtype=np.int64) * 3
    times = pa.array(offsets).cast(TIMESTAMP_TYPE)
    footer = Footer(max(at, 3 * rows), 99, 4, 0, table.state())
    with tempfile.TemporaryDirectory() as folder:
        made = write_checkpoint(LocalStorage(), folder, footer, batch.schema, [LiveBatch(offsets, times, batch)])
        found = open_checkpoint(LocalStorage(), made.path)
        assert found.footer == msgspec.structs.replace(footer, rows=rows)
        again = WriterTable()
        again.restore(found.footer.writers)
        assert again.state() == table.state()
        parts = list(found.batches())
        assert [o for p in parts for o in p.offsets.tolist()] == offsets.tolist()
        held = pa.Table.from_batches([p.rows for p in parts], batch.schema)
        assert held.equals(pa.Table.from_batches([batch]))
        assert all(p.timestamps.cast(pa.int64()).to_pylist() == p.offsets.tolist() for p in parts)
