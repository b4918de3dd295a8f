"""One row outside of Arrow is the row that Arrow gives: `get` by the short way equals `lookup`."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lakehead as lh
from lakehead.format.plain import has_plain_rows, plain_key

INT64 = st.integers(-(2**63), 2**63 - 1)
KEYS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int8(): st.integers(-128, 127),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): INT64,
    pa.string(): st.text(max_size=9),
    pa.large_string(): st.text(max_size=3),
    pa.binary(): st.binary(max_size=20),
    pa.large_binary(): st.binary(max_size=5),
}
VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    **KEYS,
    pa.int16(): st.integers(-(2**15), 2**15 - 1),
    pa.bool_(): st.booleans(),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.float64(): st.floats(allow_nan=False),
    pa.date32(): st.dates(),
    pa.time32("s"): st.times().map(lambda t: t.replace(microsecond=0)),
    pa.time64("us"): st.times(),
    pa.timestamp("s"): st.datetimes().map(lambda t: t.replace(microsecond=0)),
    pa.timestamp("ms"): st.datetimes().map(lambda t: t.replace(microsecond=1000)),
    pa.timestamp("us"): st.datetimes(),
    pa.timestamp("us", "UTC"): st.datetimes(timezones=st.just(dt.UTC)),
    pa.timestamp("us", "Europe/Berlin"): st.datetimes(dt.datetime(2, 1, 1), timezones=st.just(dt.UTC)),
    pa.timestamp("ms", "+05:30"): st.datetimes(dt.datetime(2, 1, 1), dt.datetime(9998, 1, 1)).map(
        lambda t: t.replace(microsecond=0, tzinfo=dt.UTC)
    ),
}
COLUMNS = [pa.field(f"v{i}", t) for i, t in enumerate(VALUES)]
ROW = st.tuples(*(st.none() | values for values in VALUES.values()))


@pytest.fixture(scope="module")
def con(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path_factory.mktemp("plain")) as con:
        yield con


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_get_is_lookup(con: lh.Connection, data: st.DataObject) -> None:
    types = data.draw(st.lists(st.sampled_from(list(KEYS)), min_size=1, max_size=3))
    key = [f"k{i}" for i in range(len(types))]
    keys = st.tuples(*(KEYS[t] for t in types))
    schema = pa.schema([*(pa.field(name, t, False) for name, t in zip(key, types, strict=True)), *COLUMNS])
    table = con.create_table(
        f"t{len(con.tables())}",
        schema,
        primary_key=key,
        partition_by=key[: data.draw(st.integers(0, len(key) - 1))],
        buckets=data.draw(st.integers(1, 4)),
        durability="os",
    )
    rows = data.draw(st.dictionaries(keys, ROW, min_size=1, max_size=5))
    table.upsert([dict(zip(schema.names, (*k, *row), strict=True)) for k, row in rows.items()])
    gone = next(iter(rows))
    table.delete([gone])
    assert has_plain_rows(table.schema)
    for asked in [*rows, data.draw(keys)]:
        assert plain_key(asked, table._desc.key_columns) == asked
        [expected] = table.lookup([asked]).to_pylist() or [None]
        assert (expected is None) == (asked == gone or asked not in rows)
        given_as = [asked, dict(zip(key, asked, strict=True)), *asked[: len(key) == 1]]
        for one in given_as:
            found = table.get(one)
            assert found == expected and repr(found) == repr(expected)


KEY = pa.schema([("a", pa.int8()), ("b", pa.string())])


@pytest.mark.parametrize(
    "key",
    [
        (1,), (1, "a", 2), (True, "a"), (128, "a"), (-129, "a"), (1.0, "a"), (None, "a"), (1, None), (1, "\ud800"),
        (1, b"a"), {"a": 1}, {"a": 1, "c": "x"}, {"a": 1, "b": "x", "c": 2}, 1, "a", None,
    ],
    ids=ascii,
)  # fmt: skip
def test_other_keys_are_not_plain(key: object) -> None:
    assert plain_key(key, KEY) is None
    assert plain_key((1, "a"), pa.schema([("a", pa.int8()), ("b", pa.date32())])) is None


@pytest.mark.parametrize("t", [pa.decimal128(5, 2), pa.list_(pa.int8()), pa.struct([("a", pa.int8())])], ids=str)
def test_other_rows_are_not_plain_and_found_all_the_same(con: lh.Connection, t: pa.DataType) -> None:
    schema = pa.schema([("k", pa.int64()), ("v", t)])
    assert not has_plain_rows(schema)
    table = con.create_table(f"t{len(con.tables())}", schema, primary_key="k", durability="os")
    table.upsert([{"k": 1, "v": None}])
    assert table.get(1) == {"k": 1, "v": None} and table.get(2) is None


def test_a_table_that_was_altered_meanwhile(con: lh.Connection) -> None:
    schema = pa.schema([("k", pa.int32()), ("v", pa.string())])
    table = con.create_table("altered", schema, primary_key="k", durability="os")
    table.upsert([{"k": 1, "v": "a"}])
    for name, t in (("plain", pa.int64()), ("list", pa.list_(pa.int64()))):
        old = con.table("altered")
        with table.alter() as change:
            change.add_column(name, t)
        assert old.get(1) == table.get(1) == table.lookup([1]).to_pylist()[0]
        assert old.get(1)[name] is None  # type: ignore[index]
