"""When a table is due again, and what a server that is away may not end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.spark import tiering
from lakehead.spark.tiering import IDLE_SHARE, TieringService, budget

NOW = 1000.0
NO_SPARK: Any = None


def test_next_round_ends_before_rows_are_too_old() -> None:
    for freshness in (1.0, 5.0, 30.0):
        for took in (0.05, 0.2, 0.4):
            assert budget(freshness, took) + took <= freshness


def test_slow_rounds_leave_a_pause() -> None:
    assert budget(5.0, 60.0) == IDLE_SHARE * 5.0


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as con:
        for name in ("t.a", "t.b"):
            con.create_table(name, pa.schema([("id", pa.int64())]), lake="iceberg")
        yield con


def fail(monkeypatch: pytest.MonkeyPatch, con: lh.Connection, error: Exception | None) -> None:
    def tables() -> list[str]:
        if error is not None:
            raise error
        return ["t.a", "t.b"]

    monkeypatch.setattr(con, "tables", tables)


def test_back_off_ends_when_the_server_answers(con: lh.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    service = TieringService(None, con)
    service._list_tables(NO_SPARK, NOW)
    (_, _, first), (_, _, second) = service._queue
    service._queue.clear()
    for _ in range(20):
        delay = service._failed(first, lh.UnavailableError("away"))
    assert delay == tiering.RETRY_SECONDS[1], "bounded"
    service._push(first, NOW + delay)
    service._push(second, NOW + 30)
    for error in (lh.UnavailableError("away"), lh.RequestTimeoutError("silent"), lh.StorageError("disk")):
        fail(monkeypatch, con, error)
        service._list_tables(NO_SPARK, NOW)
    assert [due for due, _, _ in sorted(service._queue)] == [NOW + 30, NOW + delay]
    fail(monkeypatch, con, None)
    service._list_tables(NO_SPARK, NOW)
    assert sorted((due, e.name) for due, _, e in service._queue) == [(NOW, first.name), (NOW + 30, second.name)]
    assert first.failures == 0


def test_another_token_is_taken_from_the_files(
    con: lh.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = TieringService(None, con)
    service._list_tables(NO_SPARK, NOW)
    old = [e for _, _, e in service._queue]
    fail(monkeypatch, con, lh.AuthenticationError("refused"))

    def not_yet(uri: str, **_: object) -> lh.Connection:
        raise lh.UnavailableError(uri)

    monkeypatch.setattr(tiering, "open_server", not_yet)
    service._list_tables(NO_SPARK, NOW)
    assert service._con is con
    again = lh.connect(tmp_path / "data")
    monkeypatch.setattr(tiering, "open_server", lambda uri, **_: again)
    monkeypatch.setattr(tiering, "bind_session", lambda spark, con: None)
    service._list_tables(NO_SPARK, NOW)
    service._list_tables(NO_SPARK, NOW)
    assert service._con is again and all(e.gone for e in old)
    fresh = [e for _, _, e in service._queue if not e.gone]
    assert sorted(e.name for e in fresh) == ["t.a", "t.b"]
    assert all(e.table._client._endpoint is again._endpoint for e in fresh)
    again.close()


def test_a_closed_connection_ends_it(con: lh.Connection) -> None:
    service = TieringService(None, con)
    con.close()
    with pytest.raises(lh.ClosedError):
        service._list_tables(NO_SPARK, NOW)


def test_who_is_asked_whether_to_stop_may_fail(con: lh.Connection) -> None:
    def ask() -> bool:
        raise lh.UnavailableError("away")

    assert not TieringService._says_so(ask) and TieringService._says_so(lambda: True)


def test_a_table_that_is_made_again_without_a_lake_is_let_go(con: lh.Connection) -> None:
    con.create_table("t.plain", pa.schema([("id", pa.int64())]))
    with pytest.raises(lh.NoLakeError):
        TieringService(None, con, ["t.plain"])._list_tables(NO_SPARK, NOW)
    service = TieringService(None, con, ["t.a", "t.b"])
    service._list_tables(NO_SPARK, NOW)
    con.drop_table("t.a")
    service._list_tables(NO_SPARK, NOW)
    con.create_table("t.a", pa.schema([("id", pa.int64())]))
    service._list_tables(NO_SPARK, NOW)
    assert [e.name for _, _, e in service._queue if not e.gone] == ["t.b"]
