"""What may be written can be tiered, and reads back equal from log and lake, by us, DuckDB and PyIceberg; what may not
is refused whole, with column and row.

``python -m tests.properties.test_values 1000 50`` tries fifty other seeds.
"""

from __future__ import annotations

import random
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.sql_copies import copying_at_once

import lakehead as lh
from lakehead.cli.output import rows_of
from lakehead.format import rows
from lakehead.server import writes

ZONES = ("UTC", "America/New_York", "+14:00", "-11:30", "Europe/Amsterdam", "Asia/Kathmandu")
"""Those of cities had odd local times before there were zones."""
MOMENTS = (  # microseconds
    -(1 << 63), -(1 << 63) + 1, (1 << 63) - 1, -62_135_596_800_000_000, -62_135_596_800_000_001,
    253_402_300_799_999_999, 253_402_300_800_000_000, -1, 0, -9_223_372_022_400_000_001, -2_717_640_000_000_000,
)  # fmt: skip
TEXTS = ("", "\0", "a\0b", "\uffff", "\U0010ffff" * 20, "ä" * 17, "x" * 5000, " ", "é" * 8 + "\U0010ffff" * 9)
BLOBS = (b"", b"\0", b"\xff" * 40, bytes(range(256)), b"\xff\xfe", b"x" * 5000)
NANS = (0x7FF8000000000000, 0x7FF0000000000001, 0xFFF8DEADBEEF0001)


def stored(t: pa.DataType, numbers: Any) -> pa.Array:
    """An array of what is in memory; Arrow checks none of it."""
    return pa.array(numbers, pa.int32() if t.bit_width == 32 else pa.int64()).view(t)


def moments(unit: str, zone: str | None) -> pa.Array:
    factor = {"s": 10**6, "ms": 10**3, "us": 1}[unit]
    # Rounded towards zero, so that what is left of the extremes still fits into microseconds.
    numbers = dict.fromkeys(abs(m) // factor * (1 if m > 0 else -1) for m in MOMENTS)
    return stored(pa.timestamp(unit, zone), list(numbers))


def decimals(precision: int, scale: int) -> pa.Array:
    most = 10**precision - 1
    raw = b"".join(n.to_bytes(16, "little", signed=True) for n in (most, -most, 0, 1, -1))
    return pa.Array.from_buffers(pa.decimal128(precision, scale), 5, [None, pa.py_buffer(raw)])


def pools() -> dict[str, pa.Array]:
    """The extreme values of every type that a column may have."""
    found: dict[str, pa.Array] = {"bool": pa.array([True, False])}
    for bits in (8, 16, 32, 64):
        found[f"int{bits}"] = pa.array([-(1 << bits - 1), (1 << bits - 1) - 1, 0, -1], f"int{bits}")
    floats = np.array([0.0, -0.0, np.inf, -np.inf, 5e-324, 1.7976931348623157e308, 0.1])
    found["float64"] = pa.array(np.concatenate([floats, np.array(NANS, np.uint64).view(np.float64)]))
    found["float32"] = pa.array(
        np.array([0x7FC00000, 0, 1 << 31, 0x7F800000, 0xFF800000, 1], np.uint32).view(np.float32)
    )
    for precision, scale in ((1, 0), (9, 9), (18, 2), (19, 0), (38, 0), (38, 38)):
        found[f"decimal_{precision}_{scale}"] = decimals(precision, scale)
    found["date"] = stored(pa.date32(), [-(1 << 31), (1 << 31) - 1, 0, -719_163, -719_162, 2_932_896, 2_932_897])
    found["time_s"] = stored(pa.time32("s"), [0, 86_399])
    found["time_ms"] = stored(pa.time32("ms"), [0, 86_399_999])
    found["time_us"] = stored(pa.time64("us"), [0, 86_399_999_999])
    for unit in ("s", "ms", "us"):
        found[f"timestamp_{unit}"] = moments(unit, None)
        for i, zone in enumerate(ZONES):
            found[f"timestamp_{unit}_{i}"] = moments(unit, zone)
    for name, t in (("string", pa.string()), ("large_string", pa.large_string())):
        found[name] = pa.array(TEXTS, t)
    for name, t in (("binary", pa.binary()), ("large_binary", pa.large_binary())):
        found[name] = pa.array(BLOBS, t)
    for width in (1, 8, 16, 33):
        found[f"fixed_{width}"] = pa.array([b"\0" * width, b"\xff" * width, b"a" * width], pa.binary(width))
    return found


POOLS = pools()
IDENTIFYING = [
    "bool", "int8", "int64", "decimal_9_9", "decimal_38_0", "date", "time_s", "time_us", "timestamp_s",
    "timestamp_ms_3", "timestamp_us", "timestamp_us_1", "timestamp_us_2", "string", "large_string",
    "binary", "fixed_8", "fixed_33",
]  # fmt: skip


def drawn(pool: pa.Array, rows: int, rng: random.Random, nulls: float = 0.2) -> pa.Array:
    at = [None if rng.random() < nulls else rng.randrange(len(pool)) for _ in range(rows)]
    return pool.take(pa.array(at, pa.int64()))


def lists(pool: pa.Array, rows: int, rng: random.Random, *, large: bool = False) -> pa.Array:
    """Lists of which some are null, and hold something nevertheless."""
    lengths = [rng.randrange(4) for _ in range(rows)]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64() if large else pa.int32())
    kind = pa.LargeListArray if large else pa.ListArray
    return kind.from_arrays(
        offsets, drawn(pool, sum(lengths), rng), mask=pa.array([rng.random() < 0.3 for _ in range(rows)])
    )


def structs(pool: pa.Array, rows: int, rng: random.Random) -> pa.Array:
    children = [drawn(pool, rows, rng), lists(pool, rows, rng)]
    mask = pa.array([rng.random() < 0.3 for _ in range(rows)])
    return pa.StructArray.from_arrays(children, ["x", "y z"], mask=mask)


def maps(pool: pa.Array, rows: int, rng: random.Random) -> pa.Array:
    lengths = [rng.randrange(3) for _ in range(rows)]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    keys = pa.array([f"k{i}" for i in range(sum(lengths))])
    return pa.MapArray.from_arrays(offsets, keys, drawn(pool, sum(lengths), rng))


def column(pool: pa.Array, rows: int, rng: random.Random) -> pa.Array:
    shape = rng.choice([drawn, drawn, lists, structs, maps])
    array = shape(pool, rows + 3, rng)
    return array.slice(rng.randrange(4), rows)


def encoded(array: pa.Array, rng: random.Random) -> pa.Array | pa.ChunkedArray:
    """The same values as other libraries hand them over."""
    t = array.type
    if pa.types.is_string(t) or pa.types.is_binary(t):
        view = pa.string_view() if pa.types.is_string(t) else pa.binary_view()
        array = rng.choice([array, array.cast(view), array.dictionary_encode()])
    elif pa.types.is_integer(t) or pa.types.is_decimal(t):
        array = rng.choice([array, array.dictionary_encode()])
    cut = rng.randrange(len(array) + 1)
    return rng.choice([array, pa.chunked_array([array.slice(0, cut), array.slice(cut)])])


def value(s: Any) -> Any:
    """A scalar as something that can be compared: bits of floats, microseconds of moments, bytes of texts."""
    if isinstance(s, pa.DictionaryScalar):
        s = s.value
    t = s.type
    if not s.is_valid:
        return None
    if pa.types.is_struct(t):
        return tuple(value(s[i]) for i in range(t.num_fields))
    if pa.types.is_nested(t):
        return [value(v) for v in s.values]
    if pa.types.is_floating(t):
        number = s.as_py()
        return "NaN" if number != number else struct.pack("<d", number)
    if pa.types.is_time(t) or pa.types.is_timestamp(t):
        return s.value * {"s": 10**6, "ms": 10**3, "us": 1, "ns": 0}[t.unit]
    if pa.types.is_date(t):
        return s.value
    return s.as_buffer().to_pybytes() if hasattr(s, "as_buffer") else s.as_py()


def values(table: pa.Table, columns: list[str]) -> list[tuple[Any, ...]]:
    table = table.sort_by("n")
    return list(zip(*([value(v) for v in table.column(c)] for c in columns), strict=True))


def require_equal(expected: pa.Table, con: lh.Connection, table: lh.Table, where: str) -> None:
    columns = expected.column_names
    wanted = values(expected, columns)
    quoted = ", ".join(f'"{c}"' for c in columns)
    found = {"scan": table.scan().to_arrow(), "sql": con.sql(f"select {quoted} from {table.name}").to_arrow_table()}
    with copying_at_once():
        found["sql, copied"] = con.sql(f"select {quoted} from {table.name}").to_arrow_table()
    if where == "lake":
        found["lake"] = table.scan(tier="lake").to_arrow()
        found["pyiceberg"] = table.lake.iceberg().scan().to_arrow()
    for reader, got in found.items():
        assert got.num_rows == expected.num_rows, (where, reader)
        for name, before, after in zip(
            columns, zip(*wanted, strict=True), zip(*values(got, columns), strict=True), strict=True
        ):
            assert before == after, (where, reader, name, expected.schema.field(name).type)
    assert table.scan().count() == expected.num_rows


@pytest.fixture(scope="module")
def con(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path_factory.mktemp("values")) as made:
        yield made


def try_all_types(con: lh.Connection, seed: int, *, keyed: bool) -> None:
    rng, count = random.Random(seed), 40
    arrays = {name: column(pool, count, rng) for name, pool in POOLS.items()}
    given = pa.table({"n": pa.array(range(count)), **arrays})
    table = con.create_table(
        f"all_{seed}_{keyed}", given.schema, primary_key=["n"] if keyed else None, lake="iceberg", durability="os"
    )
    write = table.upsert if keyed else table.append
    half = count // 2
    for part in (given.slice(0, half), given.slice(half)):
        write(pa.table([encoded(part.column(c).combine_chunks(), rng) for c in given.column_names], given.column_names))
        require_equal(given.slice(0, table.scan().count()), con, table, "log")
        con.tier(table.name)
        require_equal(given.slice(0, table.scan().count()), con, table, "lake")
    if keyed:
        found = table.lookup(list(range(count)))
        assert values(found, given.column_names) == values(given, given.column_names)


@pytest.mark.parametrize("keyed", [False, True], ids=["log", "keyed"])
@pytest.mark.parametrize("seed", [1])
def test_every_value_is_the_same_in_log_and_lake(con: lh.Connection, seed: int, keyed: bool) -> None:
    try_all_types(con, seed, keyed=keyed)


def can_name(v: Any) -> bool:
    """Whether a value can name a partition."""
    if pa.types.is_date(v.type):
        return bool(-719_162 <= v.value <= 2_932_896)
    if pa.types.is_timestamp(v.type):
        return bool(-62_135_596_800_000_000 <= value(v) < 253_402_300_800_000_000)
    return True


# Booleans are no keys.
ROLES = [(name, role) for name in IDENTIFYING for role in ("key", "partition") if (name, role) != ("bool", "key")]


@pytest.mark.parametrize(("name", "role"), ROLES)
def test_keys_and_partitions_may_have_every_value(con: lh.Connection, name: str, role: str) -> None:
    pool, how = POOLS[name], {"primary_key": ["x"], "buckets": 3}
    if role == "partition":
        pool, how = (
            pool.filter(pa.array([can_name(v) for v in pool])),
            {"primary_key": ["x", "n"], "partition_by": ["x"]},
        )
    given = pa.table({"x": pool, "n": pa.array(range(len(pool)))})
    table = con.create_table(f"{role}_{name}", given.schema, lake="iceberg", durability="os", **how)
    table.upsert(given)
    require_equal(given, con, table, "log")
    con.tier(table.name)
    require_equal(given, con, table, "lake")
    found = table.lookup(given.select(table.primary_key))
    assert values(found, given.column_names) == values(given, given.column_names)


def test_what_lies_under_a_null_is_no_value(con: lh.Connection) -> None:
    beyond = NOT_VALUES["too late for microseconds"]
    hidden = pa.StructArray.from_arrays([beyond, pa.array([1])], ["at", "n"], mask=pa.array([True]))
    given = pa.table({"n": [1], "x": hidden, "l": pa.ListArray.from_arrays([0, 1], beyond, mask=pa.array([True]))})
    table = con.create_table("hidden", given.schema, lake="iceberg")
    table.append(given)
    require_equal(given, con, table, "log")
    con.tier(table.name)
    require_equal(given, con, table, "lake")


def test_bounds_that_cannot_be_told_are_left_out_and_the_others_stay(con: lh.Connection) -> None:
    schema = pa.schema([("n", pa.int64()), ("d", pa.date32()), ("t", pa.timestamp("us", "America/New_York"))])
    table = con.create_table("bounds", schema, lake="iceberg")
    last, beyond = 2_932_896, 3_000_000
    for days in ([0, beyond], [-800_000, 1], [last, 2]):
        moments = [d * 86_400_000_000 for d in days]
        arrays = [pa.array(days, pa.int64()), stored(schema.types[1], days), stored(schema.types[2], moments)]
        table.append(pa.table(arrays, schema=schema))
        con.tier("bounds")
    metrics = [m for f in table.lake.iceberg().inspect.files().to_pylist() for m in [f["readable_metrics"]]]
    assert sorted(m["n"]["lower_bound"] for m in metrics) == [-800_000, 0, 2]
    for c in ("d", "t"):
        assert sum(m[c]["lower_bound"] is not None for m in metrics) == 1, "of the file that Python knows all days of"
    for where, expected in (
        ("d > date '2100-01-01'", [last, beyond]), ("d < date '1969-01-01'", [-800_000]),
        ("t > timestamptz '2100-01-01 00:00:00+00:00'", [last, beyond]),
        ("d is not null and n < 3", [-800_000, 0, 1, 2]),
    ):  # fmt: skip
        assert sorted(table.scan(where=where).to_arrow()["n"].to_pylist()) == expected


def test_what_an_earlier_version_took_says_what_to_do(con: lh.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = pa.schema([("n", pa.int64()), ("x", pa.timestamp("s"))])
    table = con.create_table("old", schema, primary_key=["n"], lake="iceberg")
    with monkeypatch.context() as earlier:
        for module in (rows, writes):
            earlier.setattr(module, "check_storable", lambda *_: None)
        table.upsert(pa.table([pa.array([1, 2]), stored(pa.timestamp("s"), [0, 1 << 60])], schema=schema))
    for _ in range(2):
        with pytest.raises(lh.LakeStateError, match=r"offset 1 .*'x'.*delete it or upsert another value"):
            con.tier("old")
    assert table.scan().count() == 2
    table.delete([2])
    assert con.tier("old").rows == 1 and table.scan(tier="lake").count() == 1


def test_a_moment_that_python_lacks_is_a_typed_error_where_python_values_are_asked_for(con: lh.Connection) -> None:
    schema = pa.schema([("n", pa.int64()), ("d", pa.date32())])
    table = con.create_table("lacking", schema, primary_key=["n"])
    table.upsert(pa.table([pa.array([1]), stored(pa.date32(), [3_000_000])], schema=schema))
    with pytest.raises(lh.InvalidRequestError, match="lookup"):
        table.get(1)
    assert rows_of(table.lookup([1])) == [{"n": 1, "d": "10183-09-21"}]


NOT_VALUES: dict[str, pa.Array] = {
    "too late for microseconds": stored(pa.timestamp("s"), [(1 << 63) // 10**6 + 1]),
    "too early for microseconds": stored(pa.timestamp("ms", "Asia/Tokyo"), [-(1 << 63) // 10**3 - 1]),
    "after the end of the day": stored(pa.time32("s"), [86_400]),
    "before its start": stored(pa.time64("us"), [-1]),
    "too many digits": pa.Array.from_buffers(
        pa.decimal128(5, 2), 1, [None, pa.py_buffer((10**9).to_bytes(16, "little"))]
    ),
    "not UTF-8": pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xff\xfe")]
    ),
}  # fmt: skip


@pytest.mark.parametrize("lake", [None, "iceberg"])
@pytest.mark.parametrize("what", NOT_VALUES)
def test_what_no_lake_holds_is_refused_whole_with_its_place(con: lh.Connection, what: str, lake: Any) -> None:
    bad = NOT_VALUES[what]
    schema = pa.schema([("n", pa.int64()), ("x", bad.type)])
    table = con.create_table(f"no_{list(NOT_VALUES).index(what)}_{lake}", schema, lake=lake)
    good = pa.nulls(70_000, bad.type)
    for column in (pa.chunked_array([good, bad]), pa.chunked_array([good.slice(0, 5), bad])):
        with pytest.raises(lh.SchemaMismatchError) as caught:
            table.append(pa.table({"n": pa.array(range(len(column))), "x": column}))
        assert caught.value.context["column"] == "x" and caught.value.context["row"] == len(column) - 1
    assert table.scan().count() == 0


@pytest.mark.parametrize("name", ["date", "timestamp_s", "timestamp_us", "timestamp_ms_1"])
def test_what_cannot_name_a_partition_is_refused(con: lh.Connection, name: str) -> None:
    pool = POOLS[name]
    table = con.create_table(f"parts_{name}", pa.schema([("p", pool.type), ("n", pa.int64())]), partition_by=["p"])
    beyond = [i for i, v in enumerate(pool) if not can_name(v)]
    assert beyond
    for i in beyond:
        with pytest.raises(lh.SchemaMismatchError, match="partition"):
            table.append(pa.table({"p": pool.slice(i, 1), "n": [1]}))
    assert table.scan().count() == 0


if __name__ == "__main__":
    first, count = (int(a) for a in sys.argv[1:])
    for number in range(first, first + count):
        with tempfile.TemporaryDirectory() as folder, lh.connect(Path(folder) / "data") as made:
            print(number, flush=True)
            try_all_types(made, number, keyed=bool(number % 2))
