"""The tiering service without Spark, on servers in other processes: begun before its server, and outliving it."""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from tests.integration.put_back import put_back
from tests.waiting import WAIT_SECONDS

import lakehead as lh
from lakehead.api.connection import reopened
from lakehead.api.table import handle_of
from lakehead.api.tiering import ConnectionTables
from lakehead.env import Env
from lakehead.iceberg.lake_catalog import LakeCatalog
from lakehead.tiering.queue import TieringQueue
from lakehead.tiering.service import RoundReport, TieringService

if TYPE_CHECKING:
    from tests.integration.conftest import ServerProcess

    from lakehead.tiering.commit import CommitResult

SCHEMA = pa.schema([("id", pa.int64())])


@contextmanager
def running(tables: ConnectionTables[lh.Connection]) -> Iterator[list[RoundReport]]:
    reports: list[RoundReport] = []
    queue = functools.partial(TieringQueue, look_seconds=0.1)
    service = TieringService(tables, Env.system(), on_round=reports.append, make_queue=queue)
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        yield reports
        assert thread.is_alive()
    finally:
        service.stop()
        thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


def test_a_service_may_begin_before_its_server_and_outlives_it(
    server: ServerProcess, wait_until: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    with server.connect() as con:
        con.create_table("t.t", SCHEMA, lake="iceberg", freshness="200ms").append([{"id": 1}])
    server.stop()
    tables = ConnectionTables(functools.partial(lh.connect, server.uri), again=reopened)
    with caplog.at_level(logging.WARNING, "lakehead.tiering"), running(tables) as reports:
        wait_until(lambda: "cannot be looked for" in caplog.text)
        server.start()
        wait_until(lambda: [r.rows for r in reports] == [1])
        for token in (server.token, "another token"):
            server.kill()
            server.token = token
            server.start()
            with server.connect() as con:
                con.table("t.t").append([{"id": 2}])
            rounds = len(reports)
            wait_until(lambda before=rounds: len(reports) > before)
    with server.connect() as con:
        assert con.table("t.t").scan(tier="lake").count() == 3


@pytest.mark.parametrize("into_it", [False, True])
def test_a_service_goes_on_when_the_folder_is_put_back(
    server: ServerProcess,
    wait_until: Callable[..., None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    into_it: bool,
) -> None:
    """At once: no other service has the tables then."""
    with server.connect() as con:
        table = con.create_table("t.t", SCHEMA, lake="iceberg", freshness="100ms")
        table.append([{"id": 1}])
        with running(ConnectionTables(con)) as reports:
            wait_until(lambda: [r.rows for r in reports] == [1])
            server.stop()
            shutil.copytree(server.folder, tmp_path / "before")
            server.start()
            table.append([{"id": 2}])
            wait_until(lambda: sum(r.rows for r in reports) == 2)
            server.stop()
            put_back(server, tmp_path / "before", into_it=into_it)
            con.table("t.t").append([{"id": 3}])  # as many as there were
            wait_until(lambda: sum(r.rows for r in reports) == 3)
        assert "left to another" not in caplog.text
        assert sorted(con.table("t.t").scan(tier="lake").to_arrow()["id"].to_pylist()) == [1, 3]


@pytest.mark.parametrize("partitioned", [False, True])
@pytest.mark.parametrize("keyed", [False, True])
def test_a_table_that_was_truncated_is_as_fresh_as_before(
    lakes: lh.Connection, wait_until: Callable[..., None], keyed: bool, partitioned: bool
) -> None:
    """However few rows come after it."""
    table = lakes.create_table(
        "t.after",
        pa.schema([pa.field("day", pa.string(), False), pa.field("id", pa.int64(), False)]),
        primary_key=["day", "id"] if keyed else None,
        partition_by="day" if partitioned else None,
        lake="iceberg",
        freshness="100ms",
    )
    put = table.upsert if keyed else table.append
    with running(ConnectionTables(lakes, ["t.after"])):
        for rows in (20, 2, 1):
            for n in range(2):
                put([{"day": "ab"[n], "id": id} for id in range(rows)])
                wait_until(lambda count=(n + 1) * rows: table.scan(tier="lake").count() == count)
            table.truncate()


def test_services_share_the_tables_of_a_server(server: ServerProcess, wait_until: Callable[..., None]) -> None:
    with server.connect() as con:
        tables = [con.create_table(f"t.t{n}", SCHEMA, lake="iceberg", freshness="100ms") for n in range(4)]

        def move_all(*reports: list[RoundReport]) -> None:
            for of_one in reports:
                of_one.clear()
            for table in tables:
                table.append([{"id": 1}])
            wait_until(lambda: len({r.table for of_one in reports for r in of_one}) == 4)

        with running(ConnectionTables(con)) as first:
            move_all(first)
            with running(ConnectionTables(con)) as second:
                while len({r.table for r in second}) < 2:
                    move_all(first, second)
                move_all(first, second)
                assert not {r.table for r in first} & {r.table for r in second}
            move_all(first)


def test_tables_of_a_silent_service_go_to_others(
    server: ServerProcess, wait_until: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    with server.connect() as con:
        table = con.create_table("t.t", SCHEMA, lake="iceberg", freshness="100ms")
        table.append([{"id": 1}])
        silent = ConnectionTables(con)
        (found,) = silent.look(frozenset(), frozenset()).tables
        assert silent.run_round(found.table_id, 10).rows == 1
        table.append([{"id": 2}])
        with running(ConnectionTables(con)) as other:
            wait_until(lambda: [r.rows for r in other] == [1])
        table.append([{"id": 3}])
        with pytest.raises(lh.FencedError):
            silent.run_round(found.table_id, 10)


def test_a_fenced_table_that_is_made_again_is_tiered(
    server: ServerProcess, wait_until: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    with server.connect() as con:

        def create() -> lh.Table:
            table = con.create_table("t.t", SCHEMA, lake="iceberg", freshness="200ms")
            table.append([{"id": 1}])
            return table

        table = create()
        with running(ConnectionTables(con)) as older:
            wait_until(lambda: len(older) == 1)
            unasked = ConnectionTables(con)
            unasked._names[handle_of(table).desc.table_id] = table.name
            while "left to another tiering service" not in caplog.text:
                table.append([{"id": 2}])
                with contextlib.suppress(lh.CommitConflictError):
                    unasked.run_round(handle_of(table).desc.table_id, 10)
            older.clear()
            con.drop_table("t.t")
            create()
            wait_until(lambda: [r.rows for r in older] == [1])


@pytest.mark.parametrize("turn", ["round", "maintenance"])
def test_a_table_that_is_being_dropped_is_gone(
    lakes: lh.Connection, monkeypatch: pytest.MonkeyPatch, turn: str
) -> None:
    """Its lake table goes before it does: whoever works on it is told so, not that others took its lake away."""
    table = lakes.table("t.a")
    table.append([{"id": 1}])
    tables = ConnectionTables(lakes, ["t.a"])
    (found,) = tables.look(frozenset(), frozenset()).tables
    tables.run_round(found.table_id, 10)
    table.append([{"id": 2}])
    gone, go = threading.Event(), threading.Event()
    drop = LakeCatalog.drop_table

    def slowly(*given: Any, **how: Any) -> None:
        drop(*given, **how)
        gone.set()
        assert go.wait(WAIT_SECONDS)

    monkeypatch.setattr(LakeCatalog, "drop_table", slowly)
    work = {
        "round": lambda: tables.run_round(found.table_id, 10),
        "maintenance": lambda: tables.maintain(found.table_id),
    }
    with ThreadPoolExecutor() as pool:
        dropping = pool.submit(lakes.drop_table, "t.a", purge=True)
        assert gone.wait(WAIT_SECONDS)
        working = pool.submit(work[turn])
        go.set()
        dropping.result(WAIT_SECONDS)
        with pytest.raises(lh.TableNotFoundError):
            working.result(WAIT_SECONDS)


@pytest.fixture
def lakes(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as con:
        for name in ("t.a", "t.b"):
            con.create_table(name, SCHEMA, lake="iceberg", freshness="200ms")
        yield con


def test_in_the_background_of_a_program(lakes: lh.Connection, wait_until: Callable[..., None]) -> None:
    table = lakes.table("t.a")
    table.append([{"id": 1}])
    with lakes.tiering("t.a") as tiering:
        wait_until(lambda: table.status()["lag_rows"].to_pylist() == [0])
        table.append([{"id": 2}])
        wait_until(lambda: table.status()["lag_rows"].to_pylist() == [0])
        lakes.table("t.b").append([{"id": 3}])
        with tiering:
            pass
    assert table.scan(tier="lake").count() == 2 and lakes.table("t.b").scan(tier="lake").count() == 0
    with lakes.tiering():
        pass  # may end before it has begun


def test_what_ends_it_in_the_background_is_told_at_the_end(lakes: lh.Connection) -> None:
    lakes.create_table("plain", SCHEMA)
    with pytest.raises(lh.TableNotFoundError):
        lakes.tiering(["t.x"])
    ended = lakes.tiering(["plain"])
    with pytest.raises(lh.NoLakeError), ended:
        assert ended._running is not None
        ended._running.join()
    with pytest.raises(ValueError, match="mine"), lakes.tiering(["plain"]):
        raise ValueError("mine")
    with lh.connect(lakes.uri) as remote, remote.tiering():
        remote.close()


def test_a_long_round_keeps_no_other_table_waiting(lakes: lh.Connection) -> None:
    """Of two cores; each table's round waits until the other's has begun."""
    tables = ConnectionTables(lakes)
    both = threading.Barrier(2, timeout=WAIT_SECONDS)
    run_round = tables.run_round

    def meets_another(table_id: str, records_max: int) -> CommitResult:
        both.wait()
        return run_round(table_id, records_max)

    tables.run_round = meets_another  # type: ignore[method-assign]
    reports: list[RoundReport] = []
    for name in ("t.a", "t.b"):
        lakes.table(name).append([{"id": 1}])
    queue = functools.partial(TieringQueue, turns_at_once=2)
    TieringService(tables, Env.system(), on_round=reports.append, make_queue=queue).run(lambda: len(reports) == 2)
    assert {r.table for r in reports} == {"t.a", "t.b"}
    assert all(lakes.table(name).scan(tier="lake").count() == 1 for name in ("t.a", "t.b"))


def test_a_round_under_way_is_waited_for(lakes: lh.Connection) -> None:
    tables = ConnectionTables(lakes, "t.a")
    began, may_go = threading.Event(), threading.Event()
    run_round = tables.run_round

    def held(table_id: str, records_max: int) -> CommitResult:
        began.set()
        assert may_go.wait(WAIT_SECONDS)
        return run_round(table_id, records_max)

    tables.run_round = held  # type: ignore[method-assign]
    lakes.table("t.a").append([{"id": 1}])
    queue = functools.partial(TieringQueue, turns_at_once=2)
    service = TieringService(tables, Env.system(), make_queue=queue)
    thread = threading.Thread(target=service.run)
    thread.start()
    assert began.wait(WAIT_SECONDS)
    service.stop()
    assert thread.is_alive()
    may_go.set()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive() and lakes.table("t.a").scan(tier="lake").count() == 1


def test_a_connection_that_was_closed_tiers_nothing(tmp_path: Path) -> None:
    con = lh.connect(tmp_path)
    con.close()
    with pytest.raises(lh.ClosedError):
        con.tiering()
