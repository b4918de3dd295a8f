"""What one statement read of the log serves the next ones, as long as it is the same; no file stays behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from tests.integration.conftest import ServerProcess, embedded_only
from tests.integration.put_back import require_no_lost_rows

import lakehead as lh
import lakehead.spark as lhs
from lakehead.api.table import handle_of
from lakehead.lake.union_read import UnionRead
from lakehead.spark import dead_rows, kept_frame
from lakehead.spark.kept import kept_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, embedded_only]

SCHEMA = pa.schema([pa.field("k", pa.int64(), False), ("v", pa.string()), ("x", pa.float64())])
KINDS = [(keyed, lake) for keyed in (False, True) for lake in (None, "iceberg")]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is read of logs, by the driver."""
    seen: list[str] = []

    def counted(name: str) -> None:
        found = getattr(UnionRead, name)

        def read(self: UnionRead, *columns: Any) -> Any:
            seen.append(name)
            return found(self, *columns)

        monkeypatch.setattr(UnionRead, name, read)

    counted("batches")
    counted("_hot_changes")
    return seen


def put(table: lh.Table, ids: range, v: str) -> None:
    (table.upsert if table.primary_key else table.append)([{"k": n, "v": v, "x": n / 2} for n in ids])


def rows_of(spark: SparkSession, name: str, where: str = "true") -> list[tuple[Any, ...]]:
    return sorted(tuple(r) for r in lhs.sql(spark, f"select * from {name} where {where}").collect())


def scratch(spark: SparkSession) -> set[str]:
    return {name for name in os.listdir(spark.sparkContext._temp_dir) if name.endswith(".parquet")}


@pytest.mark.parametrize(("keyed", "lake"), KINDS)
def test_the_next_statement_reads_no_log(
    con: lh.Connection, spark: SparkSession, reads: list[str], keyed: bool, lake: str | None
) -> None:
    name = f"k.t_{keyed}_{lake}".lower()
    table = con.create_table(name, SCHEMA, primary_key=["k"] if keyed else None, buckets=2, lake=lake)
    put(table, range(100), "old")
    if lake:
        con.tier(name)
    put(table, range(90, 120), "hot")
    others = scratch(spark)  # of frames before, which go when the JVM notices
    first = lhs.table(spark, name)
    told = rows_of(spark, name)
    files, count = scratch(spark) - others, len(reads)
    for where in ("true", "k > 95", "x = 50.0"):
        assert rows_of(spark, name, where) == [
            r for r in told if where == "true" or r[2] == 50.0 or (r[0] > 95 and "k" in where)
        ]
    joined = lhs.sql(spark, f"select count(*) n from {name} a join {name} b on a.k = b.k and a.v = b.v")
    assert joined.first().n == len(told)  # type: ignore[union-attr]
    a, b = lhs.table(spark, name), lhs.table(spark, name)
    assert a.join(b, (a.k == b.k) & (a.v == b.v)).count() == len(told)
    assert lhs.table(spark, name, columns=["v", "k"]).count() == len(told)
    assert (len(told), scratch(spark) >= files) == (120 if keyed else 130, True)
    assert len(reads) <= count + 1, "other columns alone are read anew"
    put(table, range(5), "newer")
    assert {r[0] for r in rows_of(spark, name, "v = 'newer'")} == set(range(5))
    assert first.count() == len(told)
    if lake:
        con.tier(name)
        again = rows_of(spark, name)
        assert len(again) == (120 if keyed else 135)
        put(table, range(200, 201), "last")
        assert len(rows_of(spark, name)) == len(again) + 1
    with table.alter() as a:
        a.rename_column("v", "w")
    assert {r[0] for r in rows_of(spark, name, "w = 'newer'")} == set(range(5))


def plan(spark: SparkSession, text: str) -> str:
    return str(lhs.sql(spark, text)._jdf.queryExecution().executedPlan().toString())


@pytest.mark.parametrize("partitioned", [False, True])
def test_a_table_that_stands_still_is_read_as_plain_files(
    con: lh.Connection, spark: SparkSession, partitioned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second statement on: files of the lake as they are, and what is live in those with dead rows in one of
    the session's own."""
    name = f"k.still_{partitioned}".lower()
    keys = ["k", "v"] if partitioned else ["k"]
    table = con.create_table(name, SCHEMA, primary_key=keys, partition_by="v" if partitioned else None, lake="iceberg")
    monkeypatch.setattr(dead_rows, "DEAD_IN_PLAN_MAX", 0)
    for ids, v in ((range(50), "a"), (range(50, 100), "b")):
        put(table, ids, v)
        con.tier(name)
    put(table, range(40, 50), "a" if partitioned else "new")  # of the first file alone
    held = lhs.table(spark, name)
    told = sorted(tuple(r) for r in held.collect())
    assert len(told) == 100
    for _ in range(3):
        assert rows_of(spark, name) == told
        assert rows_of(spark, name, "k > 93 and x > 3") == [r for r in told if r[0] > 93]
    text = plan(spark, f"select v from {name} where x > 3")
    assert "Join" not in text and "Union" not in text
    files = {os.path.basename(f) for f in lhs.sql(spark, f"select * from {name}").inputFiles()}
    of_lake = [os.path.basename(f) for f in table.lake.files()["path"].to_pylist() if "data" in f]
    assert sum(f in files for f in of_lake) == 1, "the file without dead rows"
    joined = lhs.sql(spark, f"select count(*) n from {name} a join {name} b on a.k = b.k and a.v = b.v")
    assert joined.first().n == 100  # type: ignore[union-attr]
    put(table, range(100, 101), "a")
    assert len(rows_of(spark, name)) == 101 and sorted(tuple(r) for r in held.collect()) == told
    table.delete([dict(zip(keys, (100, "a"), strict=False))])
    for _ in range(3):
        assert rows_of(spark, name) == told


@pytest.mark.parametrize("lake", [None, "iceberg"])
def test_what_others_removed_is_read_anew(con: lh.Connection, spark: SparkSession, lake: str | None) -> None:
    """Who tidies temporary folders knows nothing of us."""
    name = f"k.emptied_{lake}".lower()
    table = con.create_table(name, SCHEMA, primary_key=["k"], lake=lake)
    put(table, range(10), "a")
    if lake:
        con.tier(name)
    put(table, range(5), "b")
    told = [rows_of(spark, name) for _ in range(3)][-1]
    for entry in kept_of(spark)._entries.values():
        if entry.file is not None:
            Path(entry.file.path).unlink(missing_ok=True)
    assert [rows_of(spark, name) for _ in range(3)] == [told] * 3
    other = spark.newSession()
    lhs.attach(other, con)
    assert [rows_of(other, name) for _ in range(3)] == [told] * 3
    put(table, range(20, 21), "c")
    assert len(rows_of(spark, name)) == len(rows_of(other, name)) == len(told) + 1


def test_frames_of_two_statements_can_be_joined(con: lh.Connection, spark: SparkSession) -> None:
    """However often the table was asked before: each has columns of its own."""
    table = con.create_table("k.joined", SCHEMA, primary_key=["k"])
    put(table, range(4), "a")
    some = "select * from k.joined where k < 2"
    for n in range(4):
        for a in (lhs.sql(spark, "select * from k.joined"), lhs.table(spark, "k.joined")):
            b = lhs.sql(spark, some)
            joined = a.join(b, a.k == b.k, "left")
            found = sorted(tuple(r) for r in joined.select(a.k, b.k).collect())
            assert found == [(0, 0), (1, 1), (2, None), (3, None)]
            left = joined.drop(b.k).drop(b.v).drop(b.x)
            assert sorted(r.k for r in left.where(left.v.isNotNull()).collect()) == [0, 1, 2, 3]
        if n == 2:
            put(table, range(1), "b")


def test_hot_rows_of_a_base_without_any_go_on(con: lh.Connection, spark: SparkSession) -> None:
    table = con.create_table("k.hot", SCHEMA, primary_key="k", lake="iceberg", hot_retention="0s")
    put(table, range(9), "old")
    con.tier("k.hot")
    for n in range(4):  # the first two find the base; what comes later supersedes rows that the lake alone has
        if n > 1:
            put(table, range(n), f"new{n}")
        hot = lhs.table(spark, "k.hot", tier="hot")
        assert sorted(map(tuple, hot.collect())) == [(k, f"new{n}", k / 2) for k in range(n if n > 1 else 0)]


def test_what_cannot_be_written_leaves_no_file(
    con: lh.Connection, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = con.create_table("k.fails", SCHEMA)
    put(table, range(4), "a")
    before = scratch(spark)
    found = UnionRead.hot_rows

    def fails(self: UnionRead) -> Any:
        superseded, rows = found(self)

        def some() -> Iterator[pa.RecordBatch]:
            yield from rows
            raise lh.UnavailableError("not now")

        return superseded, some()

    monkeypatch.setattr(UnionRead, "hot_rows", fails)
    for _ in range(3):
        with pytest.raises(lh.UnavailableError):
            lhs.table(spark, "k.fails")
    assert scratch(spark) <= before


def test_many_bytes_are_no_base(con: lh.Connection, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    table = con.create_table("k.heavy", SCHEMA, primary_key=["k"], lake="iceberg")
    put(table, range(100), "a" * 100)
    monkeypatch.setattr(kept_frame, "BASE_BYTES_MAX", 2000)
    for n in range(4):
        assert len(rows_of(spark, "k.heavy")) == 100 + n
        put(table, range(100 + n, 101 + n), "b")
    keys: list[Any] = list(kept_of(spark)._entries)
    assert handle_of(table).desc.table_id not in [key[1].table_id for key in keys if key[0] == "base"]


def test_files_go_once_nothing_reads_them(
    con: lh.Connection, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lakehead.spark import kept
    from lakehead.spark.scratch import sweep

    def settled(count: int) -> None:
        for _ in range(50):
            gc.collect()
            spark.sparkContext._jvm.java.lang.System.gc()  # type: ignore[union-attr]
            sweep()
            if len(scratch(spark)) <= count:
                return
        raise AssertionError(f"{len(scratch(spark))} scratch files are still there")

    kept.kept_of(spark).clear()
    settled(0)
    monkeypatch.setattr(kept, "ENTRIES_MAX", 4)
    table = con.create_table("k.many", SCHEMA, primary_key=["k"])
    frames = []
    for n in range(8):
        put(table, range(n, n + 1), "a")
        frames.append(lhs.table(spark, "k.many"))
        lhs.sql(spark, "select * from k.many$changelog").count()
    assert len(kept.kept_of(spark)) <= 4
    assert [f.count() for f in frames] == list(range(1, 9)), "what was let go of is still read"
    del frames
    settled(4)
    monkeypatch.setattr(kept, "BYTES_MAX", 1)
    put(table, range(50, 51), "a")
    assert lhs.table(spark, "k.many").count() == 9
    kept.kept_of(spark).clear()
    settled(0)


def test_files_go_when_the_read_that_wanted_them_fails(con: lh.Connection, spark: SparkSession) -> None:
    from lakehead.spark import scratch as of_scratch

    table = con.create_table("k.gone", SCHEMA, primary_key=["k"], lake="iceberg")
    put(table, range(5), "old")
    con.tier("k.gone")
    put(table, range(3, 9), "hot")
    before = scratch(spark)
    (file,) = table.lake.files()["path"].to_pylist()
    path = Path(file.removeprefix("file://"))
    path.rename(path.with_suffix(".away"))
    with pytest.raises(lh.LakeFileMissingError, match=path.name):
        lhs.table(spark, "k.gone")
    path.with_suffix(".away").rename(path)
    made = {f"{spark.sparkContext._temp_dir}/{name}" for name in scratch(spark) - before}
    assert made and not any(of_scratch._files[name].wanted for name in made)
    assert lhs.table(spark, "k.gone").count() == 9


def test_other_rows_at_the_same_offsets_are_not_what_was_kept(
    con: lh.Connection, spark: SparkSession, tmp_path: Path
) -> None:
    server = ServerProcess(tmp_path / "data")
    try:
        with server.connect() as other:
            lhs.attach(spark, other)
            require_no_lost_rows(server, tmp_path / "before", other, lambda name: [r[1] for r in rows_of(spark, name)])
    finally:
        lhs.attach(spark, con)
        server.stop()
