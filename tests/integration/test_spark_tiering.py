"""The tiering service on Spark: fresh lakes, one table's trouble kept from others, fenced services that stop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from tests.waiting import WAIT_SECONDS

import lakehead as lh
import lakehead.spark as lhs
from lakehead.api.table import handle_of
from lakehead.env import Env
from lakehead.errors import InvalidRequestError, NoLakeError, UnavailableError
from lakehead.iceberg.iceberg_table import IcebergLakeTable
from lakehead.lake.marks import next_epoch
from lakehead.spark.executor import SharedJobs
from lakehead.spark.tiering import SMALL_ROUND_RECORDS, SparkTables
from lakehead.tiering.round import run_round

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lakehead.tiering.service import RoundReport

pytestmark = pytest.mark.spark

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as con:
        yield con


def rows(start: int, end: int, v: str = "a") -> list[dict[str, object]]:
    return [{"id": i, "v": v} for i in range(start, end)]


def _refuse_zero(n: int) -> int:
    if n == 0:
        raise NoLakeError("zero")
    return n


def test_tables_are_tiered_until_told_to_stop(spark: SparkSession, con: lh.Connection) -> None:
    log = con.create_table("t.log", SCHEMA, buckets=2, lake="iceberg", freshness="1s")
    keyed = con.create_table("t.keyed", SCHEMA, primary_key=["id"], buckets=2, lake="iceberg", freshness="1s")
    con.create_table("t.plain", SCHEMA).append(rows(0, 10))
    log.append(rows(0, 3000))
    keyed.upsert(rows(0, 1000))
    reports: list[RoundReport] = []
    late: list[lh.Table] = []

    def on_round(report: RoundReport) -> None:
        reports.append(report)
        if len(reports) == 2:
            log.append(rows(3000, 4000))
            keyed.upsert(rows(500, 1500, "b"))
            keyed.delete([{"id": i} for i in range(100)])
            late.append(con.create_table("t.late", SCHEMA, lake="iceberg", freshness="1s"))
            late[0].append(rows(0, 5))

    service = lhs.tiering_service(spark, con, on_round=on_round)
    service.run(lambda: len(reports) >= 5)
    assert sorted({r.table for r in reports}) == ["t.keyed", "t.late", "t.log"]
    assert log.scan(tier="lake").count() == 4000
    assert keyed.scan(tier="lake").to_arrow().sort_by("id").to_pylist() == rows(100, 500) + rows(500, 1500, "b")
    assert lhs.table(spark, "t.keyed").count() == 1400
    assert [r.deletes for r in reports if r.table == "t.keyed"] == [0, 600]


def test_idle_tables_get_no_rounds(spark: SparkSession, con: lh.Connection) -> None:
    t = con.create_table("t.idle", SCHEMA, lake="iceberg", freshness="100ms")
    t.append(rows(0, 10))
    lhs.tiering_service(spark, con, ["t.idle"]).run(1.5)
    assert t.lake.snapshots().num_rows == 1


def test_trouble_of_one_table_stays_with_it(spark: SparkSession, con: lh.Connection) -> None:
    good = con.create_table("t.good", SCHEMA, lake="iceberg", freshness="200ms")
    bad = con.create_table("t.bad", SCHEMA, lake="iceberg", freshness="200ms")
    bad.append(rows(0, 10))
    good.append(rows(0, 10))
    with bad.lake.iceberg().update_schema() as update:
        update.delete_column("v")
    reports: list[RoundReport] = []
    lhs.tiering_service(spark, con, on_round=reports.append).run(lambda: bool(reports))
    assert [r.table for r in reports] == ["t.good"]
    assert not list(Path(bad.lake.iceberg().location().removeprefix("file://")).glob("data/*.parquet"))


def test_a_newer_service_takes_over(spark: SparkSession, con: lh.Connection) -> None:
    t = con.create_table("t.f", SCHEMA, lake="iceberg", freshness="100ms")
    t.append(rows(0, 10))
    fenced = threading.Event()
    reports: list[RoundReport] = []

    def on_round(report: RoundReport) -> None:
        reports.append(report)
        t.append(rows(10, 20))
        lake = IcebergLakeTable(t.lake.iceberg, handle_of(t).desc)
        run_round(lake, handle_of(t).desc, handle_of(t).log, Env.system(), epoch=next_epoch(lake.load()))
        t.append(rows(20, 30))
        fenced.set()

    service = lhs.tiering_service(spark, con, on_round=on_round)
    service.run(lambda: fenced.is_set() and bool(service.queue.fenced))
    assert len(reports) == 1
    assert t.scan(tier="lake").count() == 20
    assert t.scan().count() == 30


def test_stop_from_another_thread(spark: SparkSession, con: lh.Connection) -> None:
    service = lhs.tiering_service(spark, con)
    told: list[bool] = []

    def stop() -> None:
        told.append(True)
        service.stop()

    timer = threading.Timer(0.3, stop)
    timer.start()
    service.run()
    assert told, "not before"
    timer.join()


def test_rounds_that_wait_share_a_job(spark: SparkSession, con: lh.Connection) -> None:
    names = [f"t.many{n}" for n in range(12)]
    for name in names:
        con.create_table(name, SCHEMA, lake="iceberg", freshness="1s").append(rows(0, 10))
    reports: list[RoundReport] = []
    tracker = spark.sparkContext.statusTracker()
    before = set(tracker.getJobIdsForGroup())
    lhs.tiering_service(spark, con, ["t.many*"], on_round=reports.append).run(lambda: len(reports) == len(names))
    jobs = set(tracker.getJobIdsForGroup()) - before
    assert {r.table for r in reports} == set(names) and len(jobs) < len(names)
    assert all(con.table(name).scan(tier="lake").count() == 10 for name in names)


def test_small_rounds_may_run_in_the_driver(spark: SparkSession, con: lh.Connection) -> None:
    table = con.create_table("t.k", SCHEMA, primary_key=["id"], lake="iceberg", freshness="1s")
    table.upsert(rows(0, 100))
    tracker = spark.sparkContext.statusTracker()
    before = set(tracker.getJobIdsForGroup())
    reports: list[RoundReport] = []
    service = lhs.tiering_service(spark, con, on_round=reports.append, small_rounds="driver")
    service.run(lambda: len(reports) == 1)
    assert set(tracker.getJobIdsForGroup()) == before
    table.upsert(rows(0, SMALL_ROUND_RECORDS))
    service.run(lambda: len(reports) == 2)
    assert set(tracker.getJobIdsForGroup()) > before
    assert table.scan(tier="lake").count() == SMALL_ROUND_RECORDS
    with pytest.raises(InvalidRequestError, match="small_rounds"):
        lhs.tiering_service(spark, con, small_rounds="here")  # type: ignore[arg-type]


def test_maintenance_runs_as_tasks(spark: SparkSession, con: lh.Connection) -> None:
    how: dict[str, Any] = {"primary_key": ["id"], "buckets": 2, "lake": "iceberg", "lake_changelog": True}
    table = con.create_table("t.worn", SCHEMA, **how)
    for n in range(5):
        table.upsert(rows(n * 10, 100))
        con.tier("t.worn")
    before = table.scan(system_columns=True).to_arrow().sort_by("id")
    changes = table.lake.changelog.iceberg().scan().to_arrow().num_rows
    tracker = spark.sparkContext.statusTracker()
    jobs = set(tracker.getJobIdsForGroup())
    tables = SparkTables(spark, con, ["t.worn"])
    (found,) = tables.look(frozenset(), frozenset()).tables
    assert tables.maintain(found.table_id) is False
    new = sorted(set(tracker.getJobIdsForGroup()) - jobs)
    described = [spark.sparkContext._jsc.sc().statusStore().job(j).description().get() for j in new]
    assert described == [f"lakehead: compaction of {name}" for name in ("t.worn", "t.worn$changelog")]
    assert (table.lake.files().num_rows, table.lake.changelog.files().num_rows) == (2, 2)
    assert table.scan(tier="lake", system_columns=True).to_arrow().sort_by("id").equals(before)
    assert table.lake.changelog.iceberg().scan().to_arrow().num_rows == changes
    tables.close()


def _divide(n: int) -> int:
    return 1 // n


def test_who_shares_a_job_shares_no_failure(spark: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    jobs = SharedJobs(spark, Env.system().threads)
    assert jobs.run(abs, [-1, 2]) == [1, 2] and jobs.run(abs, []) == []
    undone: list[int] = []
    with pytest.raises(UnavailableError, match="ZeroDivisionError"):
        jobs.run(_divide, [1, 0])
    with pytest.raises(NoLakeError):
        jobs.run(_refuse_zero, [1, 0], undo=undone.extend)
    assert undone == [1] and "shared" not in caplog.text
    with ThreadPoolExecutor(8) as pool:
        with jobs._job:  # so that all wait for one
            good = [pool.submit(jobs.run, abs, [-n, n]) for n in range(6)]
            bad = pool.submit(jobs.run, _divide, [0])
            refused = pool.submit(jobs.run, _refuse_zero, [0])
            while len(jobs._waiting) < 8:
                threading.Event().wait(0.001)
        assert [g.result(WAIT_SECONDS) for g in good] == [[n, n] for n in range(6)]
        assert isinstance(bad.exception(60), UnavailableError) and isinstance(refused.exception(60), NoLakeError)
    assert "the Spark job that 8 rounds shared failed" in caplog.text
