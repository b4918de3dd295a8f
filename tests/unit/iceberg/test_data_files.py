"""Files on disk: types, statistics that readers skip by, rolling, and nothing left after an error."""

from __future__ import annotations

import datetime as dt
import pickle
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakehead.config import LakeConfig
from lakehead.env import Env
from lakehead.errors import LakeStateError
from lakehead.iceberg import data_files
from lakehead.iceberg.data_files import LakeWriteSpec, is_small, write_data_files, write_position_deletes
from lakehead.iceberg.iceberg_table import IcebergLakeTable
from lakehead.iceberg.lake_catalog import LakeCatalog
from lakehead.testing.hot import MemoryHotSource
from lakehead.tiering.round import run_round
from lakehead.types import Schemas, TableDescriptor, TablePath

TYPES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "b": (pa.bool_(), [True, None]),
    "i8": (pa.int8(), [-128, None]),
    "i16": (pa.int16(), [32767, None]),
    "i32": (pa.int32(), [-(1 << 31), None]),
    "i64": (pa.int64(), [(1 << 63) - 1, None]),
    "f32": (pa.float32(), [0.5, None]),
    "f64": (pa.float64(), [float("inf"), None]),
    "dec": (pa.decimal128(38, 10), [Decimal("1.5000000000"), None]),
    "small_dec": (pa.decimal128(5, 2), [Decimal("-999.99"), None]),
    "date": (pa.date32(), [dt.date(1, 1, 1), None]),
    "t32s": (pa.time32("s"), [dt.time(23, 59, 59), None]),
    "t64": (pa.time64("us"), [dt.time(23, 59, 59, 999999), None]),
    "ts_s": (pa.timestamp("s"), [dt.datetime(1950, 1, 1), None]),
    "ts_us": (pa.timestamp("us"), [dt.datetime(2050, 1, 1, 0, 0, 0, 1), None]),
    "tz_ms": (pa.timestamp("ms", "America/New_York"), [dt.datetime(2020, 6, 1, tzinfo=dt.UTC), None]),
    "s": (pa.string(), ["ünï", None]),
    "ls": (pa.large_string(), ["", None]),
    "bin": (pa.binary(), [b"\xff\xff", None]),
    "lbin": (pa.large_binary(), [b"", None]),
    "fixed": (pa.binary(3), [b"abc", None]),
    "list": (pa.list_(pa.int16()), [[1, None], None]),
    "llist": (pa.large_list(pa.large_string()), [["x"], []]),
    "map": (pa.map_(pa.string(), pa.int8()), [[("a", 1), ("b", None)], None]),
    "struct": (pa.struct([("x", pa.int8()), ("y", pa.list_(pa.timestamp("ms")))]), [{"x": 1, "y": []}, None]),
    "a.b": (pa.int64(), [1, 2]),
}


def describe(schema: pa.Schema, **options: Any) -> TableDescriptor:
    names = {"primary_key": (), "partition_by": (), "bucket_key": (), "buckets": 1, **options}
    return TableDescriptor("t1", TablePath("db", "t"), Schemas.only(schema, 1), lake="iceberg", **names)


def test_every_type_comes_back(tmp_path: Path) -> None:
    from lakehead.iceberg.planner import plan_files
    from lakehead.iceberg.reader import read_lake

    desc = describe(pa.schema([(name, t) for name, (t, _) in TYPES.items()]))
    catalog = LakeCatalog(LakeConfig(), str(tmp_path))
    catalog.create_table(desc)
    hot = MemoryHotSource(desc)
    hot.write([{n: values[i] for n, (_, values) in TYPES.items()} for i in range(2)])
    run_round(IcebergLakeTable(lambda: catalog.load(desc), desc), desc, hot, Env.system())
    table = catalog.load(desc)
    (batch,) = read_lake(table, desc, plan_files(table))
    expected = pa.RecordBatch.from_pylist(hot.rows(), desc.schema)
    assert batch.schema.equals(desc.schema) and batch.to_pylist() == expected.to_pylist()
    assert table.scan().to_arrow().num_rows == 2
    (written,) = tmp_path.rglob("data/*.parquet")
    assert pq.read_schema(written).metadata is None or b"ARROW:schema" not in pq.read_schema(written).metadata


KEYS = {n: t for n, (t, v) in TYPES.items() if n not in ("b", "f32", "f64", "a.b") and not pa.types.is_nested(t)}


@pytest.mark.parametrize("name", KEYS)
def test_every_key_type_finds_its_lake_partition(tmp_path: Path, name: str) -> None:
    from lakehead.iceberg.planner import plan_files

    value = TYPES[name][1][0]
    schema = pa.schema([pa.field("p", KEYS[name], False), pa.field("k", KEYS[name], False), pa.field("v", pa.int64())])
    keys = {"primary_key": ("p", "k"), "partition_by": ("p",), "bucket_key": ("k",)}
    desc = describe(schema, buckets=5, **keys)
    catalog = LakeCatalog(LakeConfig(), str(tmp_path))
    catalog.create_table(desc)
    hot = MemoryHotSource(desc)
    for v in range(2):
        hot.write([{"p": value, "k": value, "v": v}])
        run_round(IcebergLakeTable(lambda: catalog.load(desc), desc), desc, hot, Env.system())
    table = catalog.load(desc)
    assert {f.tablet for f in plan_files(table)} == set(hot.watermarks())
    assert table.scan().to_arrow()["v"].to_pylist() == [1]
    # Iceberg's own bucket of the key is the tablet's.
    field = table.spec().fields[-1]
    source = table.schema().find_type(field.source_id)
    lake_key = table.scan().to_arrow()["k"]
    assert field.transform.num_buckets == 5
    stored = value if isinstance(value, bytes | str | int | Decimal | dt.date | dt.time) else lake_key[0].as_py()
    assert {t.bucket for t in hot.watermarks()} == {field.transform.transform(source)(stored)}


@pytest.fixture
def spec(log: Any) -> LakeWriteSpec:
    return LakeWriteSpec.of(log.load(), target_file_bytes=1)


def batch(*ids: int) -> pa.RecordBatch:
    return pa.record_batch({"id": ids, "code": ids, "v": pa.array([0] * len(ids), pa.int8()), "__offset": ids})


def test_a_spec_and_files_travel_between_processes(spec: LakeWriteSpec) -> None:
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec and hash(again) == hash(spec)
    (written,) = write_data_files(again, [batch(1, 2)], (0,))
    assert pickle.loads(pickle.dumps(written)) == written
    assert (written.record_count, written.partition) == (2, (0,))


def test_a_new_file_begins_at_the_target_size(spec: LakeWriteSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "ROW_GROUP_ROWS", (2, 2))
    written = write_data_files(spec, [batch(1), batch(2), batch(), batch(3)], (0,))
    assert [f.record_count for f in written] == [2, 1]
    assert write_data_files(spec, [batch()], (0,)) == []


def test_nothing_is_left_after_an_error(log: Any, spec: LakeWriteSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "ROW_GROUP_ROWS", (1, 1))

    def failing() -> Iterator[pa.RecordBatch]:
        yield batch(1)
        yield batch(2)
        raise ConnectionError("the log went away")

    with pytest.raises(ConnectionError):
        write_data_files(spec, failing(), (0,))
    with pytest.raises(LakeStateError, match="no column 'new'"):
        write_data_files(spec, [batch(1), pa.record_batch({"new": [1]})], (0,))
    assert log.data_files() == set()


def test_bounds_of_one_row_group_are_not_taken_for_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "ROW_GROUP_ROWS", (1, 1))
    desc = describe(pa.schema([("s", pa.string()), ("f", pa.float64())]))
    table = LakeCatalog(LakeConfig(), str(tmp_path)).create_table(desc)
    spec = LakeWriteSpec.of(table, target_file_bytes=1 << 20)
    rows = [{"s": "a", "f": 1.0}, {"s": "b" * 10_000, "f": float("nan")}]
    batches = [pa.RecordBatch.from_pylist([r], desc.schema) for r in rows]
    (written,) = write_data_files(spec, batches, (0,))
    # Parquet keeps no bounds of the long string and of NaN: the file must not seem to end at "a" and 1.0.
    assert 1 not in written.statistics["upper_bounds"] and 2 not in written.statistics["upper_bounds"]


@pytest.fixture(scope="module")
def of_texts(tmp_path_factory: pytest.TempPathFactory) -> LakeWriteSpec:
    desc = describe(pa.schema([("s", pa.string()), ("b", pa.binary())]))
    table = LakeCatalog(LakeConfig(), str(tmp_path_factory.mktemp("texts"))).create_table(desc)
    return LakeWriteSpec.of(table, target_file_bytes=1 << 20)


# What is at the ends of the characters, of their encodings and of the gap between them, around the 16 that are kept.
EXTREME = st.sampled_from("\0a\x7f\x80\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010fffe\U0010ffff")
TEXTS = st.builds(
    lambda head, c, n, tail: head + c * n + tail,
    st.text(EXTREME, max_size=3),
    EXTREME,
    st.integers(10, 18),
    st.text(EXTREME, max_size=3),
)
BYTES = st.builds(
    lambda c, n, tail: c * n + tail,
    st.sampled_from([b"\0", b"\x7f", b"\xff"]),
    st.integers(13, 18),
    st.binary(max_size=3),
)


@given(st.lists(st.tuples(TEXTS, BYTES), min_size=1, max_size=4))
def test_bounds_of_text_are_text_and_enclose_it(of_texts: LakeWriteSpec, rows: list[tuple[str, bytes]]) -> None:
    columns = {"s": pa.array([s for s, _ in rows]), "b": pa.array([b for _, b in rows])}
    (written,) = write_data_files(of_texts, [pa.record_batch(columns)], (0,))
    lower, upper = written.statistics["lower_bounds"], written.statistics["upper_bounds"]
    texts, raw = [s.encode() for s, _ in rows], [b for _, b in rows]
    for field, values, last in ((1, texts, chr(0x10FFFF).encode()), (2, raw, b"\xff")):
        assert lower[field] <= min(values)
        # None where what is kept of the greatest has nothing above it.
        kept = max(values).decode()[:16].encode() if field == 1 else max(values)[:16]
        assert upper[field] >= max(values) if field in upper else kept == last * 16
    assert len(upper.get(1, b"").decode()) <= 16 and len(upper.get(2, b"")) <= 16


def test_a_file_counts_its_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "ROW_GROUP_ROWS", (1, 1))
    desc = describe(pa.schema([("f", pa.float64()), ("g", pa.float32()), ("s", pa.string())]))
    spec = LakeWriteSpec.of(LakeCatalog(LakeConfig(), str(tmp_path)).create_table(desc), target_file_bytes=1 << 20)
    rows = [{"f": float("nan"), "g": 1.0}, {"f": float("nan"), "g": None}, {"f": 1.0, "g": None}]
    batches = [pa.RecordBatch.from_pylist([r], desc.schema) for r in rows]
    (written,) = write_data_files(spec, batches, (0,))
    assert written.statistics["nan_value_counts"] == {1: 2, 2: 0}


def test_position_deletes_name_files_in_their_order(spec: LakeWriteSpec) -> None:
    import numpy as np

    at = {"file:///x/b.parquet": np.array([3, 5], np.int64), "file:///x/a.parquet": np.array([7], np.int64)}
    deletes = write_position_deletes(spec, at, spec_id=0, partition=(0,))
    rows = pq.read_table(deletes.path.removeprefix("file://"), partitioning=None)
    assert rows.to_pydict() == {
        "file_path": ["file:///x/a.parquet", *["file:///x/b.parquet"] * 2],
        "pos": [7, 3, 5],
    }
    assert deletes.record_count == 3 and deletes.deletes
    assert deletes.statistics["lower_bounds"] == {2147483546: b"file:///x/a.parquet"}
    assert deletes.statistics["upper_bounds"] == {2147483546: b"file:///x/b.parquet"}


def test_names_of_small_files_lie_after_all_others(tmp_path: Path) -> None:
    desc = describe(pa.schema([("i", pa.int64())]))
    spec = LakeWriteSpec.of(LakeCatalog(LakeConfig(), str(tmp_path)).create_table(desc), target_file_bytes=1 << 30)

    def written(rows: int) -> str:
        (file,) = write_data_files(spec, [pa.record_batch({"i": pa.array(range(rows), pa.int64())})], (0,))
        return file.path

    small, large = [written(10) for _ in range(4)], [written(300_000) for _ in range(4)]
    assert max(large) < min(small) and all(map(is_small, small)) and not any(map(is_small, large))
