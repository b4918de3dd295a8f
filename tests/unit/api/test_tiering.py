"""The tables of a connection, as a tiering service reaches them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.api.table import handle_of
from lakehead.api.tiering import ConnectionTables

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


def test_tables_are_listed_with_what_the_queue_needs(con: lh.Connection) -> None:
    con.create_table("t.plain", SCHEMA, auto_maintenance=False)
    tables = ConnectionTables(con)
    found = tables.list(NONE)
    assert found.names == {"t.a", "t.b", "t.plain"}
    assert [(t.table_id, t.name) for t in found.tables] == [(table_id(con, n), n) for n in sorted(found.names)]
    _, b, plain = found.tables
    assert (b.freshness, b.has_lake, b.maintained) == (5.0, True, True)
    assert (plain.freshness, plain.has_lake, plain.maintained) == (30.0, False, False)
    settled = tables.list(frozenset(["t.a"]))
    assert settled.names == found.names and [t.name for t in settled.tables] == ["t.b", "t.plain"]


def test_a_round_by_id(con: lh.Connection) -> None:
    tables = ConnectionTables(con)
    tables.list(NONE)
    con.table("t.a").append([{"id": 1}])
    (end,) = tables.watermarks(table_id(con, "t.a")).values()
    assert end == 1
    result = tables.run_round(table_id(con, "t.a"), RECORDS)
    assert (result.rows, list(result.offsets.values())) == (1, [1])
    with pytest.raises(lh.UnavailableError):
        tables.run_round("never listed", RECORDS)


def test_an_older_service_is_fenced_for_good(con: lh.Connection) -> None:
    older, newer = ConnectionTables(con), ConnectionTables(con)
    a = table_id(con, "t.a")
    for tables in (older, newer):
        tables.list(NONE)
        con.table("t.a").append([{"id": 1}])
        assert tables.run_round(a, RECORDS).rows == 1
    con.table("t.a").append([{"id": 2}])
    for _ in range(2):
        with pytest.raises(lh.FencedError):
            older.run_round(a, RECORDS)
    con.drop_table("t.a")
    with pytest.raises(lh.TableNotFoundError):
        older.watermarks(a)
    con.create_table("t.a", SCHEMA, lake="iceberg").append([{"id": 1}])
    again = next(t.table_id for t in older.list(NONE).tables if t.name == "t.a")
    assert again != a and older.run_round(again, RECORDS).rows == 1


def test_chosen_tables_exist_and_have_lakes(con: lh.Connection) -> None:
    con.create_table("plain", SCHEMA)
    with pytest.raises(lh.TableNotFoundError, match="did you mean"):
        ConnectionTables(con, ["t.x"])
    with pytest.raises(lh.NoLakeError):
        ConnectionTables(con, ["plain"]).list(NONE)
    chosen = ConnectionTables(con, ["t.a", "t.b"])
    assert chosen.list(NONE).names == {"t.a", "t.b"}
    con.drop_table("t.a")
    con.create_table("t.a", SCHEMA)
    assert [t.has_lake for t in chosen.list(NONE).tables] == [False, True], "later it is let go"


def test_a_server_that_comes_later(con: lh.Connection) -> None:
    servers: list[Any] = [lh.UnavailableError("away"), lh.UnavailableError("away"), con, con]

    def connect() -> lh.Connection:
        found = servers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    tables = ConnectionTables(connect, ["t.a", "t.x"])
    with pytest.raises(lh.UnavailableError):
        tables.list(NONE)
    with pytest.raises(lh.TableNotFoundError):
        tables.list(NONE)


def test_another_token_is_taken_from_the_files(
    con: lh.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached: list[lh.Connection] = []

    class Attaching(ConnectionTables[lh.Connection]):
        def attach(self, con: lh.Connection) -> None:
            attached.append(con)

    def refused() -> list[str]:
        raise lh.AuthenticationError("refused")

    def another(of: lh.Connection) -> lh.Connection:
        if not known:
            raise lh.UnavailableError(of.uri)
        return known[0]

    known: list[lh.Connection] = []
    tables = Attaching(con, again=another)
    tables.list(NONE)
    monkeypatch.setattr(con, "tables", refused)
    with pytest.raises(lh.UnavailableError):
        tables.list(NONE)
    again = lh.connect(tmp_path / "data")
    known.append(again)
    found = tables.list(frozenset(["t.a", "t.b"]))
    assert [t.name for t in found.tables] == ["t.a", "t.b"], "looked up through the new connection"
    assert attached == [con, again]
    assert all(handle._routes is again._routes for handle in tables._handles.values())
    tables.close()
    with pytest.raises(lh.ClosedError):
        again.tables()
    assert "t" in con.databases(), "a connection that was given stays its owner's"


def test_a_closed_connection_ends_it(con: lh.Connection) -> None:
    tables = ConnectionTables(con)
    con.close()
    with pytest.raises(lh.ClosedError):
        tables.list(NONE)


def test_an_error_of_one_table_hides_no_other(con: lh.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    tables, open_table = ConnectionTables(con), con.table
    errors: list[Exception] = [lh.CorruptionError("damaged"), lh.UnavailableError("away", gone=True)]

    def table(name: str) -> lh.Table:
        if name == "t.a":
            raise errors[0]
        return open_table(name)

    monkeypatch.setattr(con, "table", table)
    found = tables.list(NONE)
    assert found.names == {"t.a", "t.b"} and [t.name for t in found.tables] == ["t.b"]
    errors.pop(0)
    with pytest.raises(lh.UnavailableError):
        tables.list(NONE)
