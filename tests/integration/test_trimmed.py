"""Everything still holds once the log has been trimmed: reads join lake and log, subscribers cross, state survives."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead import TabletId
from lakehead.api.table import handle_of
from lakehead.env.clock import SystemClock
from lakehead.errors import OffsetOutOfRangeError
from lakehead.predicate.read_spec import ReadSpec

KV = pa.schema([("k", pa.int64()), ("a", pa.string())])
ONE = TabletId((), 0)


def metadata_in_use(table: lh.Table) -> list[str]:
    handle = handle_of(table)
    return [use.metadata for use in handle.leases.lake_uses(handle.desc.table_id)]


def trim(con: lh.Connection) -> None:
    con._server.service.maintain()  # type: ignore[attr-defined]


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as made:
        yield made


def reopened(con: lh.Connection, folder: Path) -> lh.Connection:
    con.close()
    return lh.connect(folder / "data")


def rows(*numbers: int, text: str = "row") -> list[dict[str, Any]]:
    return [{"k": n, "a": f"{text} {n}"} for n in numbers]


def read(table: lh.Table, **how: Any) -> list[tuple[int, str]]:
    return sorted((r["k"], r["a"]) for r in table.scan(**how).to_arrow().to_pylist())


def start(table: lh.Table) -> int:
    found: int = table.status()["start_offset"].to_pylist()[0]
    return found


def pushed(table: lh.Table, **how: Any) -> list[dict[str, Any]]:
    return [r for b in table.subscribe(stop="now", **how) for r in b.rows.to_pylist()]


def test_a_log_table_goes_on_from_the_lake(con: lh.Connection, tmp_path: Path) -> None:
    table = con.create_table("a.t", KV, lake="iceberg", hot_retention="0s")
    for i in range(0, 30, 10):
        table.append(rows(*range(i, i + 10)))
        con.tier("a.t")
    trim(con)
    assert start(table) == 30
    table.append(rows(*range(30, 35)))
    for _ in range(2):
        everything = pushed(table, start="earliest")
        assert [r["k"] for r in everything] == list(range(35)) == [r["__offset"] for r in everything]
        assert all(r["__timestamp"] for r in everything)
        assert [r["k"] for r in pushed(table, start={ONE: 7})] == list(range(7, 35))
        assert [r["k"] for r in pushed(table, start={ONE: 32})] == [32, 33, 34]
        assert [r["k"] for r in pushed(table, start="earliest", where="k % 7 = 0", columns=["k"])] == [0, 7, 14, 21, 28]
        since = everything[12]["__timestamp"]
        assert [r["k"] for r in pushed(table, start=since)] == [r["k"] for r in everything if r["__timestamp"] >= since]
        stopped = table.subscribe(start="earliest", stop={ONE: 12})
        assert [r["k"] for b in stopped for r in b.rows.to_pylist()] == list(range(12))
        assert read(table) == [(n, f"row {n}") for n in range(35)] and table.scan(where="k < 9").count() == 9
        con = reopened(con, tmp_path)
        table = con.table("a.t")
    con.close()


def test_end_offsets_of_the_lake_part_resume(con: lh.Connection) -> None:
    table = con.create_table("a.t", KV, lake="iceberg", hot_retention="0s")
    for i in range(4):
        table.append(rows(*range(i * 5, i * 5 + 5)))
        con.tier("a.t")
    trim(con)
    table.append(rows(20))
    seen: list[int] = []
    at = 0
    while len(seen) < 21:
        with table.subscribe({ONE: at}) as feed:
            batch = next(feed)
            seen += batch.rows.column("k").to_pylist()
            at = batch.end_offset or 0
    assert seen == list(range(21))


def test_a_slow_subscriber_is_overtaken_and_goes_on_from_the_lake(con: lh.Connection) -> None:
    table = con.create_table("a.t", KV, lake="iceberg", hot_retention="0s")
    table.append(rows(0))
    with table.subscribe("earliest") as feed:
        seen = next(feed).rows.column("k").to_pylist()
        for i in range(1, 600):
            table.append(rows(i))
        con.tier("a.t")
        trim(con)
        table.append(rows(600))
        while len(seen) < 601:
            seen += next(feed).rows.column("k").to_pylist()
    assert seen == list(range(601)) and start(table) == 600


@pytest.mark.parametrize("stop", [None, "now"])
def test_what_is_trimmed_before_the_first_row_is_no_part_of_what_is_earliest(con: lh.Connection, stop: Any) -> None:
    table = con.create_table("a.t", KV, primary_key="k", lake="iceberg", hot_retention="0s")
    table.upsert(rows(1, 2))
    table.upsert(rows(2, text="new"))
    con.tier("a.t")
    with table.subscribe("earliest", stop=stop) as feed:
        trim(con)
        assert start(table) == 4
        table.upsert(rows(3))
        found = [row["a"] for batch in itertools.islice(feed, 1) for row in batch.rows.to_pylist()]
        assert sorted(found) in (["new 2", "row 1"], ["new 2", "row 1", "row 3"])
        table.upsert(rows(4))
        con.tier("a.t")
        trim(con)
        if stop is None:  # rows that come later are all there, or it ends
            with pytest.raises(OffsetOutOfRangeError):
                while True:
                    found += next(feed).rows["a"].to_pylist()


def test_latest_sees_nothing_old(con: lh.Connection) -> None:
    table = con.create_table("a.t", KV, lake="iceberg", hot_retention="0s", buckets=2)
    table.append(rows(1))
    con.tier("a.t")
    trim(con)
    with table.subscribe() as feed:
        table.append(rows(2))
        assert next(feed).rows.column("k").to_pylist() == [2]


def test_a_keyed_table_has_its_rows_but_not_its_old_changes(con: lh.Connection, tmp_path: Path) -> None:
    table = con.create_table("a.t", KV, primary_key="k", lake="iceberg", hot_retention="0s")
    table.upsert(rows(*range(20)))
    con.tier("a.t")
    table.upsert(rows(*range(5), text="new"))
    table.delete([19])
    con.tier("a.t")
    trim(con)
    assert start(table) == 31
    before = dt.datetime.now(dt.UTC)
    table.upsert(rows(4, 50, text="newer"))
    expected = sorted(
        [(n, f"new {n}") for n in range(4)]
        + [(n, f"row {n}") for n in range(5, 19)]
        + [(4, "newer 4"), (50, "newer 50")]
    )
    for _ in range(2):
        assert read(table) == expected and table.scan().count() == 20
        assert read(table, where="a like 'newer%'") == [(4, "newer 4"), (50, "newer 50")]
        assert table.lookup(list(range(60))).num_rows == 20
        first = pushed(table, start="earliest")
        assert sorted((r["k"], r["a"]) for r in first) == expected and {r["__change_type"] for r in first} == {"+I"}
        assert [r["__change_type"] for r in pushed(table, start=before)] == ["-U", "+U", "+I"]
        with pytest.raises(lh.OffsetOutOfRangeError, match="'full'"):
            table.subscribe({ONE: 3})
        with pytest.raises(lh.OffsetOutOfRangeError, match="'full'"):
            table.subscribe(before - dt.timedelta(days=1))
        con = reopened(con, tmp_path)
        table = con.table("a.t")
    con.tier("a.t")
    assert read(table, tier="lake") == expected
    con.close()


@pytest.mark.parametrize("keyed", [False, True], ids=["log", "keyed"])
def test_a_pinned_scan_keeps_what_it_holds(con: lh.Connection, keyed: bool) -> None:
    key: dict[str, Any] = {"primary_key": "k"} if keyed else {}
    table = con.create_table("a.t", KV, lake="iceberg", hot_retention="0s", segment_bytes=1000, **key)
    put = table.upsert if keyed else table.append
    put(rows(*range(50)))
    con.tier("a.t")
    put(rows(*range(50, 80)))
    scan, hot = table.scan(), table.scan(tier="hot")
    relation = con.sql("select count(*), sum(k) from a.t")
    con.tier("a.t")
    put(rows(*range(80, 90)))
    con.tier("a.t")
    trim(con)
    assert start(table) == 90
    put(rows(100))
    for _ in range(2):
        assert sorted(scan.to_arrow()["k"].to_pylist()) == list(range(80)) and scan.count() == 80
        assert sorted(hot.to_arrow()["k"].to_pylist()) == list(range(50, 80))
    assert relation.fetchall() == [(80, sum(range(80)))]
    assert table.scan().count() == 91


def test_a_keyed_table_without_a_lake_bounds_its_changelog_not_its_rows(con: lh.Connection, tmp_path: Path) -> None:
    table = con.create_table("a.t", KV, primary_key="k", log_ttl="0s")
    table.upsert(rows(*range(100)))
    scan = table.scan(system_columns=True)
    first = scan.to_arrow()
    trim(con)
    assert start(table) == 100
    table.upsert(rows(*range(90, 110), text="new"))
    table.delete(list(range(10)))
    later = table.scan(columns=["k"])
    trim(con)
    table.delete(list(range(10, 20)))
    for _ in range(2):
        expected = [(n, f"row {n}") for n in range(20, 90)] + [(n, f"new {n}") for n in range(90, 110)]
        assert read(table) == expected and table.scan().count() == 90
        assert read(table, where="a = 'new 95'", limit=5) == [(95, "new 95")]
        assert {r["__change_type"] for r in pushed(table, start="full")} == {"+I"}
        found = table.scan(system_columns=True, where="k = 50").to_arrow().to_pylist()
        assert found == first.filter(pa.compute.equal(first["k"], 50)).to_pylist(), "offset and commit time are kept"
        con = reopened(con, tmp_path)
        table = con.table("a.t")
    con.close()
    assert later.schema.names == ["k"]


def test_a_log_table_without_a_lake_forgets_by_ttl(con: lh.Connection) -> None:
    table = con.create_table("a.t", KV, log_ttl="0s")
    table.append(rows(*range(10)))
    scan = table.scan()
    trim(con)
    table.append(rows(10, 11))
    assert read(table) == [(10, "row 10"), (11, "row 11")] and scan.count() == 10
    assert sorted(scan.to_arrow()["k"].to_pylist()) == list(range(10))
    assert [r["k"] for r in pushed(table, start="earliest")] == [10, 11]
    with pytest.raises(lh.OffsetOutOfRangeError, match=r"\[10, 12\]"):
        table.subscribe({ONE: 3})


def test_retention_keeps_what_is_young_or_not_tiered(con: lh.Connection) -> None:
    kept = con.create_table("a.kept", KV, lake="iceberg", hot_retention="1h")
    untiered = con.create_table("a.untiered", KV, lake="iceberg", hot_retention="0s")
    young = con.create_table("a.young", KV, log_ttl="1h")
    for_ever = con.create_table("a.forever", KV)
    for table in (kept, untiered, young, for_ever):
        table.append(rows(*range(10)))
    con.tier("a.kept")
    trim(con)
    assert [start(t) for t in (kept, untiered, young, for_ever)] == [0, 0, 0, 0]


def test_a_named_writer_goes_on_after_trimming_and_a_restart(con: lh.Connection, tmp_path: Path) -> None:
    table = con.create_table("a.t", KV, lake="iceberg", hot_retention="0s")
    for life in range(3):
        with table.writer("etl-7") as writer:
            assert writer.last_sequence == life * 2 - 1
            writer.append(rows(life * 2))
            writer.flush()
            writer.append(rows(life * 2 + 1))
        con.tier("a.t")
        trim(con)
        con = reopened(con, tmp_path)
        table = con.table("a.t")
    assert read(table) == [(n, f"row {n}") for n in range(6)]
    con.close()


def test_a_lease_ends_with_its_scan_or_after_a_time(con: lh.Connection) -> None:
    table = con.create_table("a.t", KV, lake="iceberg", hot_retention="0s")
    leases = con._server.service._leases  # type: ignore[attr-defined]
    empty = table.scan()
    assert len(leases._open) == 1 and metadata_in_use(table) == [], "of an empty lake nothing is needed"
    del empty
    table.append(rows(1))
    con.tier("a.t")
    scan = table.scan()
    assert len(leases._open) == 1 and metadata_in_use(table) == [table.lake.metadata_location]
    del scan
    again = table.scan()
    assert len(leases._open) == 1, "let go with the next one"
    leases._clock = _Later(leases._limits.lease_seconds + 1)
    assert metadata_in_use(table) == []
    assert again.count() == 1, "a lease that is over reads what there is"


class _Later(SystemClock):
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def monotonic(self) -> float:
        return super().monotonic() + self._seconds


def test_orphan_clean_up_keeps_what_pinned_scans_read(con: lh.Connection) -> None:
    table = con.create_table("a.t", KV, lake="iceberg")
    table.append(rows(*range(10)))
    con.tier("a.t")
    scan = table.scan()
    iceberg = table.lake.iceberg()
    data = {t.file.file_path for t in iceberg.scan().plan_files()}
    iceberg.overwrite(iceberg.scan().to_arrow())
    iceberg.maintenance.expire_snapshots().by_ids([s.snapshot_id for s in iceberg.snapshots()[:-1]]).commit()
    assert not data & set(table.lake.remove_orphans(0)["path"].to_pylist())
    assert sorted(scan.to_arrow()["k"].to_pylist()) == list(range(10))
    del scan
    again = con.table("a.t").scan()
    assert data <= set(table.lake.remove_orphans(0)["path"].to_pylist())
    assert again.count() == 10


def test_a_tablet_that_has_reached_its_stop_may_be_trimmed_before_its_stream_opens(con: lh.Connection) -> None:
    table = con.create_table("a.t", KV, lake="iceberg", hot_retention="0s", buckets=2, segment_bytes=500)
    table.append([*rows(*range(100))])
    con.tier("a.t")
    trim(con)
    tablets = {t.key: t.log_start for t in handle_of(table).log.tablets()}
    assert any(tablets.values())
    zero = dict.fromkeys(tablets, 0)
    spec = ReadSpec(("k", "a"))
    with pytest.raises(OffsetOutOfRangeError):
        handle_of(table).log.subscribe(starts=zero, default="earliest", stops=tablets, spec=spec)
    assert list(handle_of(table).log.subscribe(starts=zero, default="earliest", stops=zero, spec=spec)) == []
