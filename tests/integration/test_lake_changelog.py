"""The lake keeps the changelog of a keyed table: all that ever changed is read where the log has forgotten it."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.api.backup import back_up, restore
from lakehead.api.lake import _lake_of
from lakehead.api.table import handle_of
from lakehead.errors import InvalidPropertyError, LakeFileMissingError, NoLakeError, OffsetOutOfRangeError
from lakehead.lake.marks import mark_of
from lakehead.tiering import round as round_module
from lakehead.tiering.round import run_round

SCHEMA = pa.schema([("id", pa.int64()), ("city", pa.string()), ("price", pa.float64())])
FORGETS: dict[str, Any] = {"hot_retention": "0s", "segment_bytes": 1024}


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as made:
        yield made


def orders(con: lh.Connection, **how: Any) -> lh.Table:
    how = {"primary_key": ["id"], "buckets": 2, "lake": "iceberg", "lake_changelog": True, **FORGETS, **how}
    return con.create_table("shop.orders", SCHEMA, **how)


def change(table: lh.Table, n: int) -> None:
    table.upsert([{"id": i, "city": f"{n}", "price": float(i)} for i in range(0, 40, 1 + n % 3)])
    table.upsert([{"id": i, "price": float(n)} for i in range(n, 40, 7)])
    table.delete([n, n + 1])


def trim(con: lh.Connection, table: lh.Table) -> None:
    con.tier(table.name)
    con._server.service.maintain()  # type: ignore[attr-defined]


def forgotten(table: lh.Table) -> int:
    return sum(table.status()["start_offset"].to_pylist())


def rows_of(batches: Any) -> list[dict[str, Any]]:
    """Each tablet's in order of offsets."""
    rows = [row for batch in batches for row in batch.rows.to_pylist()]
    return sorted(rows, key=lambda r: (r["__bucket"], r["__offset"]))


def changed(con: lh.Connection, table: lh.Table, rounds: int = 6) -> list[dict[str, Any]]:
    """Have the table changed and its log forget most of that; what a subscriber saw who was there."""
    with table.subscribe("earliest") as feed:
        seen: list[dict[str, Any]] = []
        for n in range(rounds):
            change(table, n)
            trim(con, table)
        change(table, rounds)
        end = sum(table.status()["high_watermark"].to_pylist())
        while len(seen) < end:
            seen += next(feed).rows.to_pylist()
    assert forgotten(table) > end // 2
    return sorted(seen, key=lambda r: (r["__bucket"], r["__offset"]))


def test_the_table_never_passes_its_changelog(con: lh.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come between the two commits of a round: those wait for the next."""
    table = orders(con)
    change(table, 0)

    def with_rows_after(*args: Any, **how: Any) -> Any:
        result = run_round(*args, **how)
        change(table, 1)
        return result

    monkeypatch.setattr(round_module, "run_round", with_rows_after)
    for _ in range(3):
        con.tier(table.name)
        kept, held = (mark_of(_lake_of(handle_of(table), changelog=changelog).load()) for changelog in (True, False))
        assert kept is not None and held is not None and kept.offsets == held.offsets
    monkeypatch.undo()
    con.tier(table.name)
    assert con.sql("select * from shop.orders$lake").to_arrow_table().num_rows == table.scan().count()


def test_every_change_is_read_from_the_beginning(con: lh.Connection) -> None:
    table = orders(con)
    seen = changed(con, table)
    assert Counter(r["__change_type"] for r in seen).keys() == {"+I", "-U", "+U", "-D"}
    assert rows_of(table.subscribe("earliest", stop="now")) == seen
    assert (
        con.sql("select * from shop.orders$changelog order by __bucket, __offset")
        .to_arrow_table()
        .select(list(seen[0]))
        .to_pylist()
        == seen
    )
    some = [r for r in seen if r["price"] > 3 and r["__change_type"] == "-U"]
    counted = con.sql("select count(*) from shop.orders$changelog where price > 3 and __change_type = '-U'")
    assert counted.fetchall() == [(len(some),)]
    where = rows_of(table.subscribe("earliest", stop="now", where="price > 3", columns=["id", "price"]))
    assert [(r["id"], r["__offset"]) for r in where] == [(r["id"], r["__offset"]) for r in seen if r["price"] > 3]


def test_a_subscriber_begins_anywhere_and_goes_on_over_the_end_of_the_lake(con: lh.Connection) -> None:
    table = orders(con)
    seen = changed(con, table)
    for at in (0, 5, len(seen) // 3):
        starts = {lh.TabletId((), b): at for b in (0, 1)}
        want = [r for r in seen if r["__offset"] >= at]
        assert rows_of(table.subscribe(starts, stop="now")) == want
    middle = seen[len(seen) // 4]["__timestamp"]
    since = rows_of(table.subscribe(middle, stop="now"))
    assert since == [r for r in seen if r["__timestamp"] >= middle]
    assert len(rows_of(table.subscribe(dt.datetime(2001, 1, 1, tzinfo=dt.UTC), stop="now"))) == len(seen)
    with table.subscribe("earliest") as feed:
        found = [next(feed).rows for _ in range(2)]
        change(table, 9)
        trim(con, table)
        end = sum(table.status()["high_watermark"].to_pylist())
        while sum(map(len, found)) < end:
            found.append(next(feed).rows)
    places = [(r["__bucket"], r["__offset"]) for part in found for r in part.to_pylist()]
    assert len(set(places)) == len(places) == end


def test_other_engines_read_it_as_a_table_of_its_own(con: lh.Connection) -> None:
    table = orders(con)
    seen = changed(con, table)
    con.tier(table.name)
    lake = table.lake.changelog
    want = {(r["__bucket"], r["__offset"], r["__change_type"], r["id"], r["city"]) for r in seen}
    columns = ("__bucket", "__offset", "__change_type", "id", "city")
    rows = lake.iceberg().scan().to_arrow()
    assert {tuple(r[c] for c in columns) for r in rows.to_pylist()} == want
    assert lake.iceberg().name() == ("shop", "orders$changelog")
    assert lake.offsets() == table.lake.offsets()
    assert "orders$changelog" in repr(lake)
    assert lake.compact().rows == len(seen)
    assert lake.expire(older_than="0s", keep=1).snapshots
    assert rows_of(table.subscribe("earliest", stop="now")) == seen
    assert lake.remove_orphans("0s").num_rows >= 0
    assert rows_of(table.subscribe("earliest", stop="now")) == seen


def test_what_the_lake_has_of_the_table_its_changelog_has(con: lh.Connection) -> None:
    """A round that ends between its two commits is made up for by the next, and nothing is there twice."""
    table = orders(con)
    change(table, 0)
    handle = handle_of(table)
    kept = run_round(_lake_of(handle, changelog=True), handle.desc.require_changelog(), handle.log, handle.env)
    assert kept.rows == sum(table.status()["high_watermark"].to_pylist())
    assert table.lake.offsets() == {}
    con._server.service.maintain()  # type: ignore[attr-defined]
    assert forgotten(table) == 0  # rows that are in the changelog alone stay
    change(table, 1)
    seen = changed(con, table)
    assert rows_of(table.subscribe("earliest", stop="now")) == seen


def test_the_log_keeps_what_a_changelog_has_lost(con: lh.Connection) -> None:
    table = orders(con)
    change(table, 0)
    handle = handle_of(table)
    run_round(_lake_of(handle, changelog=True), handle.desc.require_changelog(), handle.log, handle.env)
    gone = Path(table.lake.changelog.files()["path"][0].as_py().removeprefix("file://"))
    held = gone.read_bytes()
    gone.unlink()
    change(table, 1)
    trim(con, table)
    assert forgotten(table) == 0
    gone.write_bytes(held)
    for n in range(2, 5):
        change(table, n)
        trim(con, table)
    assert forgotten(table)
    gone.unlink()
    with pytest.raises(LakeFileMissingError):
        rows_of(table.subscribe("earliest", stop="now"))


def test_it_follows_its_table(con: lh.Connection, tmp_path: Path) -> None:
    """Columns, names, restarts, backups and copies of the folder."""
    table = orders(con)
    changed(con, table)
    with table.alter() as a:
        a.add_column("note", "string")
        a.rename_column("city", "town")
    table.upsert([{"id": 1, "town": "Oslo", "note": "new"}])
    with table.alter() as a:
        a.drop_column("price")
        a.add_column("price", "int32")
    table.upsert([{"id": 2, "town": "Bergen", "price": 7}])
    trim(con, table)
    con.rename_table("shop.orders", "shop.sales")
    table = con.table("shop.sales")
    table.upsert([{"id": 3, "town": "Moss"}])
    trim(con, table)
    assert table.lake.changelog.iceberg().name() == ("shop", "sales$changelog")
    seen = rows_of(table.subscribe("earliest", stop="now"))
    assert [o for b in (0, 1) for o in (r["__offset"] for r in seen if r["__bucket"] == b)] == [
        o for end in table.status()["high_watermark"].to_pylist() for o in range(end)
    ]
    assert {r["town"] for r in seen} >= {"0", "Oslo", "Bergen", "Moss"}
    assert {r["price"] for r in seen} == {None, 7}
    back_up(con, str(tmp_path / "data"), str(tmp_path / "kept"))
    con.close()
    restore(str(tmp_path / "kept"), str(tmp_path / "again"))
    for folder in ("data", "again"):
        with lh.connect(tmp_path / folder) as other:
            table = other.table("shop.sales")
            assert rows_of(table.subscribe("earliest", stop="now")) == seen
            table.upsert([{"id": 4, "town": folder}])
            trim(other, table)
            assert len(rows_of(table.subscribe("earliest", stop="now"))) > len(seen)
            other.drop_table("shop.sales", purge=True)
            assert list((tmp_path / folder / "lake" / "shop").iterdir()) == []


def test_a_log_table_has_all_of_it_in_its_lake_anyway(con: lh.Connection) -> None:
    table = con.create_table("shop.clicks", SCHEMA, lake="iceberg", **FORGETS)
    for n in range(6):
        table.append([{"id": n * 100 + i, "city": "x" * 20, "price": 0.0} for i in range(100)])
        trim(con, table)
    assert forgotten(table)
    found = con.sql("select __change_type, count(*), count(distinct id) from shop.clicks$changelog group by all")
    assert found.fetchall() == [("+A", 600, 600)]


def test_it_is_decided_when_the_table_is_made(con: lh.Connection) -> None:
    for how in ({"primary_key": None}, {"lake": None}):
        with pytest.raises(InvalidPropertyError, match="lake_changelog=True is for tables with"):
            orders(con, **how)
    table = orders(con, lake_changelog=False)
    for value in (True, "true"):
        with pytest.raises(InvalidPropertyError, match="as the table was created"), table.alter() as a:
            a.set_property("lake_changelog", value)
    with pytest.raises(NoLakeError, match="keeps no changelog"):
        _ = table.lake.changelog
    for n in range(6):
        change(table, n)
        trim(con, table)
    with pytest.raises(OffsetOutOfRangeError):
        rows_of(table.subscribe({lh.TabletId((), 0): 0}, stop="now"))
    assert table.properties["lake_changelog"] is False
