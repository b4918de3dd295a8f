"""The tables of a connection, as a tiering service reaches them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.api.table import handle_of
from lakehead.api.tiering import ConnectionTables
from lakehead.client.table import TableHandle
from lakehead.iceberg.iceberg_table import IcebergLakeTable
from lakehead.protocol.tiering import ReportTiered

RECORDS = 1000
NONE: frozenset[str] = frozenset()
SCHEMA = pa.schema([("id", pa.int64())])


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as con:
        for name in ("t.a", "t.b"):
            con.create_table(name, SCHEMA, lake="iceberg", freshness="5s")
        yield con


def table_id(con: lh.Connection, name: str) -> str:
    return handle_of(con.table(name)).desc.table_id


def test_tables_are_found_with_what_the_queue_needs(con: lh.Connection) -> None:
    con.create_table("t.plain", SCHEMA)
    con.create_table("t.left", SCHEMA, lake="iceberg", auto_maintenance=False).append([{"id": 1}, {"id": 2}])
    tables = ConnectionTables(con)
    found = {t.name: t for t in tables.look(NONE, NONE).tables}
    assert sorted(found) == ["t.a", "t.b", "t.left"]
    b, left = found["t.b"], found["t.left"]
    assert (b.table_id, b.freshness, b.maintained, b.end) == (table_id(con, "t.b"), 5.0, True, None)
    assert (left.freshness, left.maintained, left.end) == (30.0, False, 2)
    tables.close()
    assert {t.name for t in ConnectionTables(con, "t.l*").look(NONE, NONE).tables} == {"t.left"}


def test_a_round_by_id(con: lh.Connection) -> None:
    tables = ConnectionTables(con)
    tables.look(NONE, NONE)
    con.table("t.a").append([{"id": 1}])
    result = tables.run_round(table_id(con, "t.a"), RECORDS)
    assert (result.rows, list(result.offsets.values())) == (1, [1])


@pytest.mark.parametrize("there", ["it is", "it was dropped", "nobody can say"])
def test_what_a_turn_fails_of_is_told_unless_its_table_is_gone(
    con: lh.Connection, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    """A table that is dropped meanwhile lacks a file here, a folder there."""
    tables = ConnectionTables(con)
    tables.look(NONE, NONE)
    con.table("t.a").append([{"id": 1}])
    a = table_id(con, "t.a")

    def failing(*_: object) -> None:
        if there == "it was dropped":
            con.drop_table("t.a", purge=True)
        if there == "nobody can say":
            patch.setattr(TableHandle, "now", lambda _: (_ for _ in ()).throw(lh.UnavailableError("away")))
        raise lh.StorageError("no such folder")

    with monkeypatch.context() as patch:
        patch.setattr(IcebergLakeTable, "stage", failing)
        expected = lh.TableNotFoundError if there == "it was dropped" else lh.StorageError
        with pytest.raises(expected) as raised:
            tables.run_round(a, RECORDS)
    assert type(raised.value) is expected


def test_a_round_and_maintenance_of_a_table_commit_one_at_a_time(
    con: lh.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a compaction of files that each round changes never gets through."""
    tables = ConnectionTables(con)
    tables.look(NONE, NONE)
    ids = [table_id(con, name) for name in ("t.a", "t.b")]
    held: list[list[bool]] = []
    stage = IcebergLakeTable.stage

    def noting(lake: IcebergLakeTable, *given: Any) -> Any:
        held.append([tables._commit_locks[i].locked() if i in tables._commit_locks else False for i in ids])  # type: ignore[attr-defined]
        return stage(lake, *given)

    monkeypatch.setattr(IcebergLakeTable, "stage", noting)
    for n in range(12):
        con.table("t.a").append([{"id": n}])
        tables.run_round(ids[0], RECORDS)
    tables.maintain(ids[0])
    assert len(held) == 13 and {tuple(h) for h in held} == {(True, False)}
    con.drop_table("t.a")
    tables.look(frozenset(ids), NONE)
    tables.look(NONE, NONE)
    assert not tables._commit_locks


def test_a_name_that_means_another_table_by_now(con: lh.Connection) -> None:
    tables = ConnectionTables(con)
    tables.look(NONE, NONE)
    a = table_id(con, "t.a")
    con.drop_table("t.a")
    with pytest.raises(lh.TableNotFoundError):
        tables.run_round(a, RECORDS)
    con.create_table("t.a", SCHEMA, lake="iceberg")
    with pytest.raises(lh.TableNotFoundError):
        tables.run_round(a, RECORDS)


def test_a_table_that_was_handed_on_before_its_turn_began(con: lh.Connection) -> None:
    tables = ConnectionTables(con)
    tables.look(NONE, NONE)
    a = table_id(con, "t.a")
    tables.look(NONE, frozenset([a]))
    with pytest.raises(lh.TableNotFoundError):
        tables.run_round(a, RECORDS)


def test_what_rounds_did_is_kept_of_tables_that_there_are(con: lh.Connection) -> None:
    con.table("t.a").append([{"id": 1}])
    con.tier("t.a")
    (told,) = con.tiering_status().tables
    assert told.table == "t.a" and [r.rows for r in told.rounds] == [1]
    with pytest.raises(lh.TableNotFoundError):
        con._ask(ReportTiered(table_id="none", round=told.rounds[0]))
    assert list(con._server.service._definitions._jobs._rounds) == [table_id(con, "t.a")]  # type: ignore[attr-defined]
    con.drop_table("t.a")
    assert not con.tiering_status().tables


def test_services_share_tables_and_take_over_what_another_left(con: lh.Connection) -> None:
    first, second = ConnectionTables(con), ConnectionTables(con)

    def found(tables: ConnectionTables[lh.Connection], has: frozenset[str] = NONE) -> frozenset[str]:
        return frozenset(t.table_id for t in tables.look(has, NONE).tables)

    has = found(first)
    assert len(has) == 2
    assert not found(second), "the first may be at work on both"
    has = found(first, has)
    (kept,) = has
    assert found(first, has) == has
    (given,) = found(second)
    con.table("t.a").append([{"id": 1}])
    con.table("t.b").append([{"id": 1}])
    assert first.run_round(kept, RECORDS).rows == second.run_round(given, RECORDS).rows == 1
    first.close()
    assert found(second, frozenset([given])) == {kept, given}
    con.table("t.a").append([{"id": 2}])
    con.table("t.b").append([{"id": 2}])
    assert second.run_round(kept, RECORDS).rows == second.run_round(given, RECORDS).rows == 1


def test_a_service_that_lost_a_table_is_fenced_until_it_is_told_of_it_again(con: lh.Connection) -> None:
    older, newer = ConnectionTables(con), ConnectionTables(con)
    a = table_id(con, "t.a")
    older.look(NONE, NONE)
    con.table("t.a").append([{"id": 1}])
    assert older.run_round(a, RECORDS).rows == 1
    newer._names[a] = "t.a"  # as of a server that does not know the older one
    con.table("t.a").append([{"id": 1}])
    assert newer.run_round(a, RECORDS).rows == 1
    con.table("t.a").append([{"id": 2}])
    for _ in range(2):
        with pytest.raises(lh.FencedError):
            older.run_round(a, RECORDS)
    older.look(NONE, frozenset([a]))
    older.look(NONE, NONE)
    assert older.run_round(a, RECORDS).rows == 1


def test_chosen_tables_exist_and_have_lakes(con: lh.Connection) -> None:
    con.create_table("plain", SCHEMA)
    with pytest.raises(lh.TableNotFoundError, match="did you mean"):
        ConnectionTables(con, ["t.x"])
    with pytest.raises(lh.NoLakeError):
        ConnectionTables(con, ["plain"]).look(NONE, NONE)
    chosen = ConnectionTables(con, ["t.a", "t.b"])
    assert {t.name for t in chosen.look(NONE, NONE).tables} == {"t.a", "t.b"}
    con.drop_table("t.a")
    con.create_table("t.a", SCHEMA)
    assert [t.name for t in chosen.look(NONE, NONE).tables] == ["t.b"], "later it is let go"


def test_a_server_that_comes_later(con: lh.Connection) -> None:
    servers: list[Any] = [lh.UnavailableError("away"), lh.UnavailableError("away"), con, con]

    def connect() -> lh.Connection:
        found = servers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    tables = ConnectionTables(connect, ["t.a", "t.x"])
    with pytest.raises(lh.UnavailableError):
        tables.look(NONE, NONE)
    with pytest.raises(lh.TableNotFoundError):
        tables.look(NONE, NONE)


def test_another_token_is_taken_from_the_files(
    con: lh.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached: list[lh.Connection] = []

    class Attaching(ConnectionTables[lh.Connection]):
        def attach(self, con: lh.Connection) -> None:
            attached.append(con)

    def refused(request: object) -> object:
        raise lh.AuthenticationError("refused")

    def another(of: lh.Connection) -> lh.Connection:
        if not known:
            raise lh.UnavailableError(of.uri)
        return known[0]

    known: list[lh.Connection] = []
    tables = Attaching(con, again=another)
    tables.look(NONE, NONE)
    monkeypatch.setattr(con, "_ask", refused)
    with pytest.raises(lh.UnavailableError):
        tables.look(NONE, NONE)
    again = lh.connect(tmp_path / "data")
    known.append(again)
    found = tables.look(NONE, NONE)
    assert sorted(t.name for t in found.tables) == ["t.a", "t.b"], "through the new connection"
    assert attached == [con, again]
    tables.run_round(found.tables[0].table_id, RECORDS)
    assert all(handle._routes is again._routes for handle in tables._handles.values())
    tables.close()
    with pytest.raises(lh.ClosedError):
        again.tables()
    monkeypatch.undo()
    assert "t" in con.databases(), "a connection that was given stays its owner's"


def test_a_closed_connection_ends_it(con: lh.Connection) -> None:
    tables = ConnectionTables(con)
    con.close()
    with pytest.raises(lh.ClosedError):
        tables.look(NONE, NONE)


def test_an_error_of_one_table_hides_no_other(con: lh.Connection, tmp_path: Path) -> None:
    a = con.table("t.a")
    a.append([{"id": 1}])
    con.close()
    for log in (tmp_path / "data").glob("tables/t.a-*/**/*.log"):
        log.write_bytes(b"x" * 100 + log.read_bytes()[100:])
    with lh.connect(tmp_path / "data") as con:
        tables = ConnectionTables(con)
        found = {t.name: t for t in tables.look(NONE, NONE).tables}
        assert sorted(found) == ["t.a", "t.b"]
        with pytest.raises(lh.CorruptionError):
            tables.run_round(found["t.a"].table_id, RECORDS)
        tables.run_round(found["t.b"].table_id, RECORDS)


_ENDS = """
import os, sys, threading, lakehead as lh

con = lh.connect(sys.argv[1])
table = con.create_table("t", [("id", "int64")], lake="iceberg", freshness="10ms")
table.append([{"id": 1}])
moved = threading.Event()
tiering = con.tiering(on_round=lambda _: moved.set())
tiering.__enter__()
if sys.argv[2] == "after a round":
    moved.wait()
if sys.argv[2] == "in a child":
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.parametrize("when", ["at once", "after a round", "in a child"])
def test_a_program_that_ends_ends_its_tiering_in_good_order(tmp_path: Path, when: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _ENDS, str(tmp_path), when]
    done = subprocess.run(command, timeout=100, check=False, capture_output=True, text=True)
    assert done.returncode == 0 and "round failed" not in done.stderr and "NoneType" not in done.stderr, done.stderr
