"""Reads of Spark hold leases as long as something can read under them, and not longer."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import lakehead as lh
import lakehead.spark as lhs
from lakehead.api.table import handle_of
from lakehead.lake.union_read import pin

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lakehead.server.leases import Leases

pytestmark = pytest.mark.spark

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.string())])


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as con:
        yield con


@pytest.fixture
def table(con: lh.Connection) -> lh.Table:
    t = con.create_table("s.t", SCHEMA, primary_key="k", lake="iceberg")
    t.upsert([{"k": i, "v": "lake"} for i in range(100)])
    con.tier("s.t")
    t.upsert([{"k": i, "v": "hot"} for i in range(90, 110)])
    return t


def leases(con: lh.Connection) -> Leases:
    server: Any = con._server
    return server.service._leases  # type: ignore[no-any-return]


def test_a_frame_holds_its_lease_until_nothing_is_made_of_it(
    spark: SparkSession, con: lh.Connection, table: lh.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakehead.spark.kept_frame.COPIED_ROWS_MAX", -1)
    derived = lhs.table(spark, "s.t").where("k < 95").select("v")
    told = lhs.sql(spark, "select count(*) n from s.t a join s.t b on a.k = b.k")
    gc.collect()
    con._leases._open("full", [handle_of(table).leased(None)], planned=True)
    assert held(con) == 2, "Python has no reference to the frames that were read, the JVM has"
    assert derived.count() == 95 and told.collect()[0].n == 110
    del derived, told
    let_go(con, lambda: held(con) == 0)


def test_a_frame_that_reads_files_of_the_session_alone_holds_no_lease(spark: SparkSession, con: lh.Connection) -> None:
    con.create_table("s.log", SCHEMA).append([{"k": 1, "v": "hot"}])
    con.create_table("s.new", SCHEMA, primary_key="k", lake="iceberg").upsert([{"k": 1, "v": "hot"}])
    frames = [lhs.table(spark, name) for name in ("s.log", "s.new")]
    gc.collect()
    assert held(con) == 0 and [f.count() for f in frames] == [1, 1]


def test_a_session_that_stops_holds_nothing(
    spark: SparkSession, con: lh.Connection, table: lh.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakehead.spark.kept_frame.COPIED_ROWS_MAX", -1)
    frames = [lhs.table(spark, "s.t") for _ in range(5)]
    source = spark.read.format("lakehead").options(uri=con.uri, table="s.t").load()
    assert source.count() == 110
    assert held(con) == 5 and planned(con) == 1
    spark.stop()
    limits = leases(con)._limits
    leases(con)._limits = dataclasses.replace(limits, leases_max=8)
    for _ in range(8):
        pin(handle_of(table), held=False)
    with pytest.raises(lh.OverloadedError):
        pin(handle_of(table), held=False)
    assert len(frames) == 5 and planned(con) == 0


def test_readers_are_not_kept_out_by_frames_that_are_gone(
    spark: SparkSession, con: lh.Connection, table: lh.Table
) -> None:
    leases(con)._limits = dataclasses.replace(leases(con)._limits, leases_max=3)
    for _ in range(5):
        spark.read.format("lakehead").options(uri=con.uri, table="s.t").load().take(1)
    for _ in range(10):
        lhs.table(spark, "s.t")
    assert table.scan().count() == 110


def test_what_is_read_without_the_server_holds_nothing(spark: SparkSession, con: lh.Connection) -> None:
    t = con.create_table("s.plain", SCHEMA, primary_key="k")
    t.upsert([{"k": 1, "v": "a"}])
    frame = lhs.table(spark, "s.plain")
    con._leases.renew()
    assert not leases(con)._open and frame.count() == 1


def held(con: lh.Connection) -> int:
    con._leases.renew()
    return sum(not lease.planned for lease in leases(con)._open.values())


def planned(con: lh.Connection) -> int:
    return sum(lease.planned for lease in leases(con)._open.values())


def let_go(con: lh.Connection, condition: Callable[[], bool]) -> None:
    """The JVM is asked to collect, which it may do late."""
    for _ in range(50):
        gc.collect()
        for holder in con._leases.before:
            holder("full")
        if condition():
            return
    raise AssertionError("leases of frames that are gone are still held")
