"""Tables that are emptied: no read finds a row of before, pinned ones keep theirs, and no crash leaves it half done."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.api import backup, folder
from lakehead.api.table import handle_of
from lakehead.errors import CommitConflictError, OffsetOutOfRangeError, StorageError, UnavailableError
from lakehead.iceberg.iceberg_table import IcebergLakeTable
from lakehead.kv import tablet as kv_tablet
from lakehead.log import LogTablet
from lakehead.server.maintenance import Maintenance
from lakehead.server.tables import LiveTable
from lakehead.server.tablet import Tablet

SCHEMA = pa.schema([pa.field("k", pa.int64(), False), ("a", pa.string())])
KINDS = [(keyed, lake) for keyed in ("log", "keyed") for lake in (None, "iceberg")]


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as con:
        yield con


def make(con: lh.Connection, kind: tuple[str, str | None], **how: Any) -> lh.Table:
    key = ["k"] if kind[0] == "keyed" else None
    return con.create_table("shop.t", SCHEMA, primary_key=key, lake=kind[1], **{"buckets": 2, **how})


def put(table: lh.Table, *keys: int) -> None:
    (table.upsert if table.primary_key else table.append)([{"k": k, "a": str(k)} for k in keys])


def keys_of(table: lh.Table, **scan: Any) -> list[int]:
    return sorted(table.scan(**scan).to_arrow()["k"].to_pylist())


def ends_of(table: lh.Table) -> dict[int, int]:
    return {t["bucket"]: t["high_watermark"] for t in table.status().to_pylist()}


def require_empty(con: lh.Connection, table: lh.Table) -> None:
    assert (keys_of(table), table.scan().count()) == ([], 0)
    assert con.sql("select count(*) from shop.t").fetchall() == [(0,)]
    assert list(table.subscribe("full", stop="now")) == [] or table.primary_key
    if table.primary_key:
        assert (table.get(1), sum(t["rows"] for t in table.status().to_pylist())) == (None, 0)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_row_is_left_anywhere(con: lh.Connection, kind: tuple[str, str | None]) -> None:
    table = make(con, kind)
    put(table, 1, 2, 3)
    if kind[1]:
        con.tier("shop.t")
    put(table, 3, 4)
    pinned, before = table.scan(), ends_of(table)
    pinned_rows = pinned.to_arrow().num_rows
    definition = table.describe()
    ends = table.truncate()
    assert {t.bucket: end for t, end in ends.items()} == before
    require_empty(con, table)
    assert pinned.to_arrow().num_rows == pinned_rows == (5 if kind[0] == "log" else 4)
    after = ends_of(table)
    assert after == before if kind[0] == "log" else sum(after.values()) == sum(before.values()) + 4
    if kind[1]:
        con.tier("shop.t")
        assert (keys_of(table, tier="lake"), keys_of(table, tier="hot")) == ([], [])
        assert table.lake.iceberg().scan().to_arrow().num_rows == 0
        rounds = table.lake.snapshots().num_rows
        assert table.truncate() and con.tier("shop.t").snapshot_id is None
        assert table.lake.snapshots().num_rows == rounds
    put(table, 1, 9)
    assert (keys_of(table), table.describe()) == ([1, 9], definition)
    assert sum(ends_of(table).values()) == sum(after.values()) + 2
    if kind[1]:
        con.tier("shop.t")
        assert keys_of(table, tier="lake") == table.lake.iceberg().scan().to_arrow()["k"].sort().to_pylist() == [1, 9]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_it_holds_after_a_restart(tmp_path: Path, kind: tuple[str, str | None]) -> None:
    with lh.connect(tmp_path / "data") as con:
        table = make(con, kind, durability="os")
        put(table, *range(50))
        table.truncate()
        ends = ends_of(table)
    with lh.connect(tmp_path / "data") as con:
        table = con.table("shop.t")
        require_empty(con, table)
        assert ends_of(table) == ends
        put(table, 7)
        assert keys_of(table) == [7]


def test_a_keyed_subscription_sees_each_row_go(con: lh.Connection) -> None:
    table = make(con, ("keyed", None))
    put(table, 1, 2)
    put(table, 2)
    subscription = table.subscribe("latest")
    ends = table.truncate()
    seen = []
    while len(seen) < 2:
        batch = next(subscription)
        assert min(batch.rows["__offset"].to_pylist()) >= ends[batch.tablet]
        seen += [(r["__change_type"], r["k"], r["a"]) for r in batch.rows.to_pylist()]
    subscription.close()
    assert sorted(seen) == [("-D", 1, "1"), ("-D", 2, "2")]


@pytest.mark.parametrize("lake", [None, "iceberg"])
def test_a_log_subscription_that_is_behind(con: lh.Connection, lake: str | None) -> None:
    table = make(con, ("log", lake), buckets=1)
    put(table, 1, 2)
    position = {lh.TabletId(): 1}
    (end,) = table.truncate().values()
    put(table, 3)
    if lake is None:
        with pytest.raises(OffsetOutOfRangeError, match=r"the log holds \[2, 3\]"):
            list(table.subscribe(position, stop="now"))
    else:
        (batch,) = table.subscribe(position, stop="now")
        assert (batch.rows["k"].to_pylist(), batch.rows["__offset"].to_pylist()) == ([3], [end])
    (batch,) = table.subscribe("earliest", stop="now")
    assert batch.rows["__offset"].to_pylist() == [end]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_partitions(con: lh.Connection, kind: tuple[str, str | None]) -> None:
    schema = SCHEMA.append(pa.field("day", pa.string(), False))
    key = ["day", "k"] if kind[0] == "keyed" else None
    table = con.create_table("shop.t", schema, primary_key=key, partition_by=["day"], lake=kind[1])
    write = table.upsert if key else table.append
    assert table.truncate() == {}
    write([{"k": k, "a": "", "day": d} for k in range(3) for d in ("mo", "tu")])
    if kind[1]:
        con.tier("shop.t")
    write([{"k": 9, "a": "", "day": "we"}])
    assert {t.partition[0] for t in table.truncate()} == {"mo", "tu", "we"}
    assert keys_of(table) == []
    write([{"k": 1, "a": "", "day": "mo"}])
    if kind[1]:
        con.tier("shop.t")
    assert keys_of(table) == [1]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_writers_go_on_meanwhile(con: lh.Connection, kind: tuple[str, str | None]) -> None:
    """A row is gone exactly when its offset is below the one that was returned."""
    table = make(con, kind, durability="os")
    offsets: dict[int, tuple[int, int]] = {}
    stop = threading.Event()

    def write() -> None:
        for k in range(10_000):
            row = {"k": k, "a": "x"}
            result = (table.upsert if table.primary_key else table.append)([row])
            ((tablet, (start, _)),) = result.offsets.items()
            offsets[k] = (tablet.bucket, start)
            if stop.is_set():
                return

    writing = threading.Thread(target=write)
    writing.start()
    ends: dict[int, int] = {}
    try:
        for _ in range(4):
            for _ in range(2):
                if kind[1]:
                    con.tier("shop.t")
            ends = {t.bucket: end for t, end in table.truncate().items()}
    finally:
        stop.set()
        writing.join()
    if kind[1]:
        con.tier("shop.t")
    stay = sorted(k for k, (bucket, at) in offsets.items() if at >= ends[bucket])
    assert keys_of(table) == stay
    if kind[1]:
        assert keys_of(table, tier="lake") == stay


class Killed(BaseException):
    """The process ends here."""


STEPS: dict[str, tuple[Any, str]] = {
    "decided": (LiveTable, "_truncate"),
    "deleted": (LogTablet, "append_frames"),
    "trimmed": (LogTablet, "trim"),
    "tablet": (Tablet, "truncate"),
    "lake": (IcebergLakeTable, "publish"),
    "forgotten": (LiveTable, "forget"),
}


def taken(kind: tuple[str, str | None]) -> dict[str, int]:
    """How often a truncation of two tablets takes each step: it deletes eight rows at a time, or else trims the log and
    empties the lake."""
    if kind[0] == "keyed":
        return {"decided": 1, "deleted": 8, "tablet": 2}
    return {"decided": 1, "trimmed": 2, "tablet": 2, **({"lake": 1, "forgotten": 1} if kind[1] else {})}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_steps(con: lh.Connection, monkeypatch: pytest.MonkeyPatch, kind: tuple[str, str | None]) -> None:
    monkeypatch.setattr(kv_tablet, "_GATHER_ROWS", 8)
    table = make(con, kind)
    put(table, *range(60))
    seen: Counter[str] = Counter()

    def counted(step: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[step] += 1
            return real(*args, **kwargs)

        return call

    for step, (of, method) in STEPS.items():
        monkeypatch.setattr(of, method, counted(step, getattr(of, method)))
    if kind[1]:
        con.tier("shop.t")
        seen.clear()
    monkeypatch.setattr(Maintenance, "_maintain", lambda *_: None)  # it may come before the client that cuts the log
    table.truncate()
    assert seen == taken(kind)


@pytest.mark.parametrize("kind", [("log", "iceberg"), ("keyed", "iceberg")], ids=str)
def test_maintenance_cuts_logs_for_clients_of_log_tables_alone(
    con: lh.Connection, monkeypatch: pytest.MonkeyPatch, kind: tuple[str, str]
) -> None:
    table = make(con, kind)
    put(table, *range(20))
    con.tier("shop.t")
    assert con._folder is not None
    service = folder._hosts[con._folder][0].service
    live = service._tables.get(table._handle.desc.table_id)
    cut: list[object] = []
    monkeypatch.setattr(LiveTable, "forget", lambda *how: cut.append(how))
    live.truncating = {key: tablet.high_watermark for key, tablet in live.tablets.items()}  # as while it is under way
    service.maintain()
    live.truncating = {}
    assert bool(cut) is (kind[0] == "log"), "the server itself truncates the others, from beginning to end"


ENDS = [(kind, step, nth) for kind in KINDS for step, times in taken(kind).items() for nth in range(1, times + 1)]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("kind", "step", "nth"), ENDS, ids=str)
def test_what_a_crash_leaves_is_completed_or_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: tuple[str, str | None], step: str, nth: int, after: bool
) -> None:
    monkeypatch.setattr(kv_tablet, "_GATHER_ROWS", 8)
    folder, left = tmp_path / "data", tmp_path / "left"
    keys = list(range(60))
    calls = 0
    with monkeypatch.context() as patch, lh.connect(folder) as con:
        # It would take a step in another thread, which the round of tiering wakes and which does not end with this one.
        patch.setattr(Maintenance, "run", lambda _: None)
        table = make(con, kind)
        put(table, *keys[:40])
        if kind[1]:
            con.tier("shop.t")
        put(table, *keys[40:])
        of, method = STEPS[step]
        real: Callable[..., Any] = getattr(of, method)

        def die(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls < nth:
                return real(*args, **kwargs)
            if after:
                real(*args, **kwargs)
            if not left.exists():
                shutil.copytree(folder, left, ignore=shutil.ignore_patterns("LOCK", "endpoint.json"))
            raise Killed

        patch.setattr(of, method, die)
        with pytest.raises((Killed, lh.LakeheadError)):
            table.truncate()
        patch.undo()
    assert left.exists(), "the step was not taken"
    with lh.connect(left) as con:
        table = con.table("shop.t")
        assert keys_of(table) in ([], keys)
        if keys_of(table) == keys:
            assert step == "lake" and not after
            table.truncate()
        require_empty(con, table)
        put(table, 1)
        for _ in range(2):
            if kind[1]:
                con.tier("shop.t")
                assert keys_of(table, tier="lake") == [1]
            assert keys_of(table) == [1]
        put(table, 2)
        assert keys_of(table) == [1, 2]


def test_a_round_that_comes_first(con: lh.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make(con, ("log", "iceberg"))
    put(table, 1, 2)
    real = IcebergLakeTable.publish
    rounds = 0

    def publish(self: IcebergLakeTable, staged: Any) -> Any:
        nonlocal rounds
        if rounds < 2:
            rounds += 1
            monkeypatch.setattr(IcebergLakeTable, "publish", real)
            put(table, 10 + rounds)
            con.tier("shop.t")
            monkeypatch.setattr(IcebergLakeTable, "publish", publish)
        return real(self, staged)

    monkeypatch.setattr(IcebergLakeTable, "publish", publish)
    ends = table.truncate()
    assert (rounds, sum(ends.values()), keys_of(table)) == (2, 4, [])


def test_a_client_that_dies_before_the_log_is_cut_leaves_it_to_the_server(
    con: lh.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make(con, ("log", "iceberg"))
    put(table, *range(20))
    con.tier("shop.t")

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(LiveTable, "forget", die)
        patch.setattr(Maintenance, "_maintain", lambda *_: None)
        table.truncate()
    assert keys_of(table) == [] and [b.rows.num_rows for b in table.subscribe("earliest", stop="now")]
    con._server.service._maintenance.round_reported(handle_of(table).desc.table_id)  # type: ignore[attr-defined]
    con._server.service.maintain()  # type: ignore[attr-defined]
    assert not list(table.subscribe("earliest", stop="now"))
    put(table, 1)
    con.tier("shop.t")
    assert keys_of(table) == keys_of(table, tier="lake") == [1]


def test_a_round_that_was_planned_before_lands_nothing_of_before(
    con: lh.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make(con, ("log", "iceberg"))
    put(table, 1, 2)
    con.tier("shop.t")
    put(table, 3, 4)
    real = IcebergLakeTable.publish

    def publish(self: IcebergLakeTable, staged: Any) -> Any:
        monkeypatch.setattr(IcebergLakeTable, "publish", real)
        table.truncate()
        return real(self, staged)

    monkeypatch.setattr(IcebergLakeTable, "publish", publish)
    with pytest.raises(CommitConflictError):
        con.tier("shop.t")
    put(table, 5)
    con.tier("shop.t")
    assert keys_of(table) == keys_of(table, tier="lake") == [5]


def test_a_catalog_out_of_reach_changes_nothing(con: lh.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make(con, ("log", "iceberg"))
    put(table, 1)

    def refuse(_: object) -> None:
        raise UnavailableError("away")

    with monkeypatch.context() as patch:
        patch.setattr(IcebergLakeTable, "load", refuse)
        with pytest.raises(UnavailableError, match="away"):
            table.truncate()
    assert keys_of(table) == [1]


def test_a_disk_that_refuses(con: lh.Connection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = make(con, ("log", None))
    put(table, 1, 2)

    def refuse(*_: object) -> None:
        raise StorageError("full")

    with monkeypatch.context() as patch:
        patch.setattr(LogTablet, "trim", refuse)
        with pytest.raises(StorageError, match="full"):
            table.truncate()
    put(table, 3)
    con.close()
    with lh.connect(tmp_path / "data") as again:
        assert keys_of(again.table("shop.t")) == [3]


def test_a_backup_of_before_and_after(con: lh.Connection, tmp_path: Path) -> None:
    table = make(con, ("log", "iceberg"))
    put(table, 1, 2)
    con.tier("shop.t")
    for n, wanted in enumerate(([1, 2], [])):
        backup.back_up(con, str(tmp_path / "data"), str(tmp_path / f"backup{n}"))
        table.truncate()
        backup.restore(str(tmp_path / f"backup{n}"), str(tmp_path / f"restored{n}"))
        with lh.connect(tmp_path / f"restored{n}") as restored:
            assert keys_of(restored.table("shop.t")) == wanted
