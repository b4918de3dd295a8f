"""What users can do, over both transports: tables, writes, lookups, scans, types, partitions."""

from __future__ import annotations

import datetime as dt
import decimal
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead import TabletId
from lakehead.format.bucketing import bucket_ids

UTC = dt.UTC
KV = pa.schema([("k", pa.int64()), ("a", pa.string()), ("b", pa.int64())])


def rows_of(table: lh.Table, **how: Any) -> list[tuple[Any, ...]]:
    return [tuple(r.values()) for r in table.scan(**how).to_arrow().to_pylist()]


def changes(table: lh.Table, start: Any = "earliest", **how: Any) -> list[dict[str, Any]]:
    return [r for b in table.subscribe(start, stop="now", **how) for r in b.rows.to_pylist()]


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_create_list_describe_drop(con: lh.Connection, name: str) -> None:
    table = con.create_table(name, KV, primary_key="k", buckets=3, durability="os", compression="zstd")
    assert (table.name, table.primary_key, table.partition_by, table.buckets) == (name, ["k"], [], 3)
    assert not table.schema.field("k").nullable and table.schema.field("a").nullable
    assert table.properties["durability"] == "os" and table.describe()["kind"] == "primary-key"
    assert name in con.tables() and name in con.tables("tests") and "tests" in con.databases()
    assert con.table(name).schema == table.schema
    same = con.create_table(name, KV, primary_key="k", buckets=3, if_not_exists=True)
    assert same.describe()["table_id"] == table.describe()["table_id"]
    with pytest.raises(lh.TableExistsError):
        con.create_table(name, KV, primary_key="k", buckets=3)
    assert con.create_table(name, KV, primary_key="k", buckets=4, if_not_exists=True).buckets == 3
    with pytest.raises(lh.TableExistsError, match="columns or keys"):
        con.create_table(name, KV, if_not_exists=True)
    table.upsert([{"k": 1, "a": "x", "b": 1}])
    con.drop_table(name)
    assert name not in con.tables()
    for call in (lambda: con.table(name), lambda: con.drop_table(name), lambda: table.get(1), table.scan):
        with pytest.raises(lh.TableNotFoundError):
            call()
    with pytest.raises(lh.TableNotFoundError):
        table.upsert([{"k": 1, "a": "x", "b": 1}])
    again = con.create_table(name, KV, primary_key="k")
    assert again.scan().count() == 0


def test_dropping_ends_subscriptions(con: lh.Connection, name: str) -> None:
    table = con.create_table(name, KV)
    feed = table.subscribe("earliest")
    table.append([{"k": 1, "a": None, "b": None}])
    assert next(feed).rows.num_rows == 1
    con.drop_table(name)
    with pytest.raises(lh.ClosedError, match="dropped"):
        next(feed)


def test_a_scan_whose_lake_was_dropped_with_its_table_says_so(con: lh.Connection, name: str) -> None:
    table = con.create_table(name, KV, lake="iceberg")
    table.append([{"k": 1, "a": None, "b": None}])
    con.tier(name)
    pinned, read_before = table.scan(), table.scan()
    assert read_before.to_arrow().num_rows == 1
    con.drop_table(name, purge=True)
    for scan in (pinned, read_before):
        with pytest.raises(lh.TableNotFoundError):
            scan.to_arrow()


# ---- writes ----------------------------------------------------------------------------------------------------------


def test_append(con: lh.Connection, name: str) -> None:
    table = con.create_table(name, KV)
    first = table.append([{"k": 1, "a": "x", "b": None}, {"b": 2, "k": 2, "a": None}][:1])
    assert (first.rows, first.offsets) == (1, {TabletId((), 0): (0, 1)})
    second = table.append(pa.table({"b": [5, 6], "k": [3, 4], "a": ["é", "東"]}))
    assert second.offsets == {TabletId((), 0): (1, 3)}
    assert table.append([]).rows == 0
    assert rows_of(table) == [(1, "x", None), (3, "é", 5), (4, "東", 6)]
    assert table.scan().count() == 3
    [status] = table.status().to_pylist()
    assert (status["start_offset"], status["high_watermark"], status["rows"]) == (0, 3, 3)


def test_appends_go_round_the_buckets(con: lh.Connection, name: str) -> None:
    table = con.create_table(name, KV, buckets=3)
    for i in range(6):
        table.append([{"k": i, "a": None, "b": None}])
    assert [r["rows"] for r in table.status().to_pylist()] == [2, 2, 2]


def test_bucket_key_rows_lie_where_the_hash_says(con: lh.Connection, name: str) -> None:
    table = con.create_table(name, KV, buckets=5, bucket_key="a")
    values = [f"value {i}" for i in range(200)]
    table.append(pa.table({"k": range(200), "a": values, "b": range(200)}, schema=table.schema))
    found = {r["a"]: r["__bucket"] for r in table.scan(system_columns=True).to_arrow().to_pylist()}
    assert [found[v] for v in values] == bucket_ids([pa.array(values)], 5).tolist()


@pytest.mark.parametrize("compression", ["none", "zstd", "lz4"])
@pytest.mark.parametrize("durability", ["sync", "os"])
def test_upsert_partial_delete(con: lh.Connection, name: str, compression: str, durability: str) -> None:
    table = con.create_table(name, KV, primary_key="k", buckets=2, compression=compression, durability=durability)
    table.upsert([{"k": 1, "a": "x", "b": 1}, {"k": 2, "a": "y", "b": 2}, {"k": 1, "a": "z", "b": 3}])
    assert table.get(1) == {"k": 1, "a": "z", "b": 3}
    table.upsert([{"k": 1, "b": 9}, {"k": 3, "b": 7}])
    table.upsert(pa.table({"k": [2], "a": ["new"], "b": [100]}), columns=["k", "a"])
    assert sorted(rows_of(table)) == [(1, "z", 9), (2, "new", 2), (3, None, 7)]
    assert table.delete([1, 99]).rows == 1
    table.delete([{"k": 3}])
    assert rows_of(table) == [(2, "new", 2)] and table.get(1) is None and table.scan().count() == 1
    state: dict[int, Any] = {}
    for r in changes(table):
        assert r["__change_type"] in ("+I", "-U", "+U", "-D")
        image = (r["a"], r["b"])
        if r["__change_type"] in ("-U", "-D"):
            assert state.pop(r["k"]) == image
        else:
            state[r["k"]] = image
    assert state == {2: ("new", 2)}


def test_lookups_come_in_the_order_asked(con: lh.Connection, name: str) -> None:
    table = con.create_table(name, KV, primary_key="k", buckets=4)
    table.upsert([{"k": k, "a": str(k), "b": -k} for k in range(300)])
    asked = [5, 299, 1000, 5, 0, -1, 17, 298]
    assert table.lookup(asked)["k"].to_pylist() == [5, 299, 5, 0, 17, 298]
    assert table.lookup([{"k": k} for k in asked])["a"].to_pylist() == ["5", "299", "5", "0", "17", "298"]
    many = random.Random(1).sample(range(-500, 500), 1000)
    assert table.lookup(pa.table({"k": many}))["k"].to_pylist() == [k for k in many if 0 <= k < 300]
    for nothing in ([], [1000], [1000, 1001, 1002, 1003, -5]):
        found = table.lookup(nothing)
        assert found.num_rows == 0 and found.schema == table.schema
    assert table.get({"k": 3}) == {"k": 3, "a": "3", "b": -3} and table.get((3,)) == table.get(3)


def test_prefix_lookup(con: lh.Connection, name: str) -> None:
    schema = pa.schema([("p", pa.string()), ("u", pa.int32()), ("n", pa.string()), ("v", pa.float64())])
    table = con.create_table(name, schema, primary_key=["p", "u", "n"], partition_by="p", bucket_key="u", buckets=3)
    table.upsert([{"p": p, "u": u, "n": n, "v": 0.5} for p in "ab" for u in range(10) for n in "xyz"])
    table.delete([{"p": "a", "u": 4, "n": "y"}])
    found = table.prefix_lookup([{"p": "a", "u": 4}]).to_pylist()
    assert sorted((r["p"], r["u"], r["n"]) for r in found) == [("a", 4, "x"), ("a", 4, "z")]
    assert table.prefix_lookup([{"p": "c", "u": 4}]).num_rows == 0
    assert table.prefix_lookup([{"p": p, "u": u} for p in "ab" for u in (1, 2)]).num_rows == 12
    with pytest.raises(lh.InvalidRequestError, match="bucket_key"):
        con.create_table(name + "_plain", KV, primary_key="k").prefix_lookup([1])


def test_read_your_writes_from_many_threads(con: lh.Connection, name: str) -> None:
    table = con.create_table(name, KV, primary_key="k", buckets=4, durability="os")

    def work(i: int) -> None:
        for n in range(15):
            table.upsert([{"k": i, "a": str(n), "b": n}])
            assert table.get(i) == {"k": i, "a": str(n), "b": n}
            assert table.scan(where=f"k = {i}").to_arrow()["b"].to_pylist() == [n]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_concurrent_partial_updates_end_as_the_model(con: lh.Connection, name: str) -> None:
    columns = [f"c{i}" for i in range(8)]
    schema = pa.schema([("k", pa.int32()), *((c, pa.int64()) for c in columns)])
    table = con.create_table(name, schema, primary_key="k", buckets=12, durability="os")
    model: dict[int, dict[str, Any]] = {}
    lock = threading.Lock()

    def work(i: int) -> None:
        choose = random.Random(i)
        for n in range(12):
            keys = choose.sample(range(400), 100)
            table.upsert(pa.table({"k": keys, columns[i]: [n * 1000 + k for k in keys]}))
            with lock:
                for k in keys:
                    model.setdefault(k, {"k": k, **dict.fromkeys(columns)})[columns[i]] = n * 1000 + k

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    found = {r["k"]: r for r in table.scan().to_arrow().to_pylist()}
    assert found == model
    assert {r["k"]: r for r in table.lookup(list(range(400))).to_pylist()} == model


# ---- named and pipelined writers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer_id", [None, "etl"])
def test_pipelined_writer_keeps_order(con: lh.Connection, name: str, writer_id: str | None) -> None:
    table = con.create_table(name, KV, bucket_key="k", buckets=2)
    with table.writer(writer_id) as writer:
        for i in range(100):
            writer.append([{"k": 7, "a": None, "b": i}])
        writer.append([])
        writer.flush()
        if writer_id is not None:
            assert writer.last_sequence == 100
        assert [r[2] for r in rows_of(table)] == list(range(100))
    with pytest.raises(lh.ClosedError):
        writer.append([{"k": 7, "a": None, "b": 0}])


def test_writer_errors_come_with_flush_and_nothing_follows_them(con: lh.Connection, name: str) -> None:
    table = con.create_table(name, KV, primary_key="k")
    writer = table.writer()
    with pytest.raises(lh.NullKeyError):
        writer.upsert([{"k": None, "a": None, "b": 1}])
    with pytest.raises(lh.WrongTableKindError):
        writer.append([{"k": 1, "a": None, "b": 1}])
    writer.upsert([{"k": 1, "a": "x", "b": 1}])
    writer.delete([2])
    writer.flush()
    con.drop_table(name)
    writer.upsert([{"k": 2, "a": None, "b": 1}])
    with pytest.raises(lh.TableNotFoundError):
        writer.flush()
    with pytest.raises(lh.TableNotFoundError):
        writer.close()


def test_named_writer_resumes_and_fences(con: lh.Connection, name: str) -> None:
    table = con.create_table(name, KV, buckets=3)
    batches = [[{"k": i, "a": f"{i}-{n}", "b": n} for n in range(3)] for i in range(12)]
    first = table.writer("etl-7")
    assert first.last_sequence == -1
    for batch in batches[:8]:
        first.append(batch)
    first.flush()
    second = table.writer("etl-7")
    # What the first one was answered last, it could not tell the server any more.
    assert second.last_sequence in (6, 7)
    for batch in batches[second.last_sequence + 1 :]:
        second.append(batch)
    second.flush()
    first.append(batches[8])
    with pytest.raises(lh.WriterFencedError):
        first.flush()
    with pytest.raises(lh.WriterFencedError):
        first.close()
    second.close()
    assert sorted(rows_of(table)) == sorted(tuple(r.values()) for b in batches for r in b)


# ---- scans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_scans(con: lh.Connection, name: str, keyed: bool, compression: str) -> None:
    table = con.create_table(name, KV, primary_key="k" if keyed else None, buckets=2, compression=compression)
    put = table.upsert if keyed else table.append
    for start in range(0, 200, 50):
        put([{"k": k, "a": None if k % 7 == 0 else f"name {k % 5}", "b": k * 2} for k in range(start, start + 50)])
    model = [(k, None if k % 7 == 0 else f"name {k % 5}", k * 2) for k in range(200)]
    assert sorted(rows_of(table)) == model
    assert rows_of(table, where="k = 150") == [model[150]]
    wanted = [(r[2], r[0]) for r in model if r[1] == "name 3" and r[0] > 100]
    assert sorted(rows_of(table, columns=["b", "k"], where="a = 'name 3' and k > 100")) == wanted
    assert table.scan(where="a is null").count() == sum(r[1] is None for r in model)
    assert len(rows_of(table, limit=13)) == 13 and rows_of(table, limit=0) == []
    assert table.scan(limit=13).count() == 13 and table.scan(columns=["b"]).schema.names == ["b"]
    assert table.scan(columns=[]).count() == 200
    system = table.scan(columns=["k"], system_columns=True, where="k < 10").to_arrow()
    assert system.schema.names == ["k", "__bucket", "__offset", "__timestamp"] and system.num_rows == 10
    assert len({(r["__bucket"], r["__offset"]) for r in system.to_pylist()}) == 10
    now = dt.datetime.now(UTC)
    assert all(dt.timedelta(0) <= now - t < dt.timedelta(minutes=5) for t in system["__timestamp"].to_pylist())
    assert pa.table(table.scan(columns=["k"])).num_rows == 200
    assert "200" in table.scan().explain()


def test_a_scan_is_pinned_when_it_is_made(con: lh.Connection, name: str) -> None:
    table = con.create_table(name, KV, primary_key="k")
    table.upsert([{"k": 1, "a": "old", "b": 1}])
    scan = table.scan()
    table.upsert([{"k": 1, "a": "new", "b": 2}, {"k": 2, "a": "more", "b": 2}])
    table.delete([1])
    assert scan.to_arrow().to_pylist() == [{"k": 1, "a": "old", "b": 1}]
    assert scan.count() == 1 and rows_of(table) == [(2, "more", 2)]


# ---- types and partitions --------------------------------------------------------------------------------------------

TYPES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "bool": (pa.bool_(), [True, False]),
    "int8": (pa.int8(), [-128, 127]),
    "int16": (pa.int16(), [-(2**15), 2**15 - 1]),
    "int32": (pa.int32(), [-(2**31), 2**31 - 1]),
    "int64": (pa.int64(), [-(2**63), 2**63 - 1]),
    "float32": (pa.float32(), [0.5, float("-inf")]),
    "float64": (pa.float64(), [1e300, -0.25]),
    "decimal": (pa.decimal128(38, 6), [decimal.Decimal("-0.000001"), decimal.Decimal("9" * 32 + ".999999")]),
    "date": (pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31)]),
    "time_s": (pa.time32("s"), [dt.time(0), dt.time(23, 59, 59)]),
    "time_ms": (pa.time32("ms"), [dt.time(0), dt.time(1, 2, 3, 4000)]),
    "time_us": (pa.time64("us"), [dt.time(0), dt.time(23, 59, 59, 999999)]),
    "ts_s": (pa.timestamp("s"), [dt.datetime(1, 1, 1), dt.datetime(2024, 2, 29, 1, 2, 3)]),
    "ts_ms": (pa.timestamp("ms"), [dt.datetime(1969, 12, 31, 23, 59, 59, 999000), dt.datetime(2024, 1, 1)]),
    "ts_us": (pa.timestamp("us"), [dt.datetime(1970, 1, 1), dt.datetime(2024, 1, 1, 0, 0, 0, 1)]),
    "ts_zone": (pa.timestamp("us", "UTC"), [dt.datetime(1960, 1, 1, tzinfo=UTC), dt.datetime(2024, 1, 1, tzinfo=UTC)]),
    "string": (pa.string(), ["", "søk/東=&%. '\"\n"]),
    "large_string": (pa.large_string(), ["a", "b" * 1000]),
    "binary": (pa.binary(), [b"", b"\x00\xff/"]),
    "large_binary": (pa.large_binary(), [b"a", b"b" * 1000]),
    "fixed": (pa.binary(5), [b"12345", b"\x00" * 5]),
    "list": (pa.list_(pa.int32()), [[], [1, None, 3]]),
    "large_list": (pa.large_list(pa.string()), [["a", None], []]),
    "map": (pa.map_(pa.string(), pa.float64()), [[("a", 1.5), ("b", None)], []]),
    "struct": (
        pa.struct([("x", pa.int64()), ("y", pa.list_(pa.struct([("z", pa.string())])))]),
        [{"x": 1, "y": [{"z": "deep"}, {"z": None}]}, {"x": None, "y": None}],
    ),
}
KEYS = [n for n in TYPES if n not in ("bool", "float32", "float64", "list", "large_list", "map", "struct")]


@pytest.mark.parametrize("compression", ["none", "lz4"])
@pytest.mark.parametrize("keyed", [False, True])
def test_every_type_with_nulls(con: lh.Connection, name: str, keyed: bool, compression: str) -> None:
    schema = pa.schema([("k", pa.int32()), *((n, t) for n, (t, _) in TYPES.items())])
    table = con.create_table(name, schema, primary_key="k" if keyed else None, compression=compression)
    rows = [{"k": i, **{n: v[i] for n, (_, v) in TYPES.items()}} for i in range(2)]
    rows.append({"k": 2, **dict.fromkeys(TYPES)})
    put = table.upsert if keyed else table.append
    put(pa.Table.from_pylist(rows, schema))
    put(rows[:1] if keyed else [])
    expected = pa.Table.from_pylist(rows, table.schema)
    assert table.scan().to_arrow().sort_by("k").equals(expected)
    if keyed:
        assert table.lookup([0, 1, 2]).equals(expected)
        table.upsert([{"k": 2, "string": "only this"}])
        assert table.get(2) == {**expected.to_pylist()[2], "string": "only this"}
    some = ["struct", "bool", "map"]
    assert table.scan(columns=some, where="k = 1").to_arrow().equals(expected.slice(1, 1).select(some))


@pytest.mark.parametrize("kind", KEYS)
def test_every_key_type(con: lh.Connection, name: str, kind: str) -> None:
    t, values = TYPES[kind]
    schema = pa.schema([("key", t), ("v", pa.int32())])
    table = con.create_table(name, schema, primary_key="key", buckets=3)
    table.upsert(pa.table({"key": pa.array(values, t), "v": pa.array([1, 2], pa.int32())}))
    table.upsert(pa.table({"key": pa.array(values[:1], t), "v": pa.array([3], pa.int32())}))
    assert table.lookup(pa.table({"key": pa.array(values, t)}))["v"].to_pylist() == [3, 2]
    table.delete(pa.table({"key": pa.array(values[1:], t)}))
    assert table.scan().to_arrow()["key"].to_pylist() == values[:1]


@pytest.mark.parametrize("kind", ["bool", *KEYS])
@pytest.mark.parametrize("keyed", [False, True])
def test_every_partition_type(con: lh.Connection, name: str, kind: str, keyed: bool) -> None:
    t, values = TYPES[kind]
    schema = pa.schema([("id", pa.int32()), ("part", t), ("tag", pa.string())])
    table = con.create_table(
        name, schema, primary_key=["id", "part"] if keyed else None, partition_by="part", buckets=2, bucket_key="id"
    )
    assert table.scan().count() == 0 and table.status().num_rows == 0 and changes(table) == []
    data = pa.table(
        {"id": pa.array(range(20), pa.int32()), "part": pa.array(values * 10, t), "tag": ["a"] * 20},
        schema=table.schema,
    )
    result = (table.upsert if keyed else table.append)(data)
    assert {tablet.partition for tablet in result.offsets} == {(v,) for v in values}
    assert table.scan().to_arrow().sort_by("id").equals(data)
    assert {(b.tablet.partition[0]) for b in table.subscribe("earliest", stop="now")} == set(values)
    tablet = TabletId((values[1],), 1)
    start = {tablet: result.offsets[tablet][0] + 1}
    stop = {t: end for t, (_, end) in result.offsets.items() if t == tablet}
    later = [r for b in table.subscribe(start, stop=stop) if b.tablet == tablet for r in b.rows.to_pylist()]
    assert len(later) == result.offsets[tablet][1] - result.offsets[tablet][0] - 1
    if keyed:
        assert table.lookup(data.select(["id", "part"])).equals(data)
        table.delete(data.slice(0, 5))
        assert table.scan().to_arrow().sort_by("id").equals(data.slice(5))


def test_partitions_by_several_columns(con: lh.Connection, name: str) -> None:
    schema = pa.schema([("day", pa.date32()), ("region", pa.string()), ("n", pa.int32())])
    table = con.create_table(name, schema, partition_by=["region", "day"])
    rows = [
        {"day": dt.date(2024, 1, d), "region": r, "n": i}
        for i, (d, r) in enumerate([(1, "a=b&c/d%"), (2, ""), (1, ""), (2, "a=b&c/d%"), (1, "é")] * 3)
    ]
    result = table.append(rows)
    assert set(result.offsets) == {TabletId((r["region"], r["day"]), 0) for r in rows}
    assert sorted(rows_of(table), key=lambda r: r[2]) == [tuple(r.values()) for r in rows]
