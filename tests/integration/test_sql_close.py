"""A connection that is closed ends the statements that other threads run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.waiting import WAIT_SECONDS

import lakehead as lh

SCHEMA = pa.schema([("k", pa.int64())])
LONG = "select sum(hash(a.i, b.i)) from range(10000000) a(i), range(10000000) b(i), t"


def stream(con: Any) -> None:
    for _ in con.sql(
        "select a.i, hash(a.i, b.i) h from range(10000000) a(i), range(10000000) b(i), t"
    ).to_arrow_reader():
        pass


RUNS: list[Callable[[Any], object]] = [
    lambda con: con.sql(LONG).fetchall(),
    lambda con: con.sql(LONG).to_arrow_table(),
    lambda con: con.sql(LONG).df(),
    lambda con: con.sql(LONG + " where t.k > ?", params=[0]),
    lambda con: con.sql(LONG, unrestricted=True).fetchone(),
    stream,
]


@pytest.fixture(params=["serving", "remote"])
def con(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path) as serving:
        serving.create_table("t", SCHEMA).append([{"k": 1}])
        if request.param == "serving":
            yield serving
        else:
            with lh.connect(serving.uri) as remote:
                yield remote


@pytest.mark.parametrize("run", RUNS)
def test_what_runs_ends_with_closed_error(con: lh.Connection, run: Callable[[Any], object]) -> None:
    ended: list[BaseException] = []

    def work() -> None:
        try:
            run(con)
        except BaseException as e:
            ended.append(e)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while not any(r._runs for engine in list(con._sql.values()) for r in list(engine.readings)):
        thread.join(0.01)
        assert not ended
    con.close()
    deadline = time.monotonic() + WAIT_SECONDS
    while thread.is_alive() and time.monotonic() < deadline:  # what DuckDB has not begun yet no interrupt ends
        for engine in con._sql.values():
            engine.close()
        thread.join(0.05)
    assert [type(e) for e in ended] == [lh.ClosedError], ended


def test_statements_that_begin_meanwhile_do_not_hinder_closing(con: lh.Connection) -> None:
    usual, kept = sys.getswitchinterval(), []
    failed: list[BaseException] = []

    def begin() -> None:
        try:
            while True:
                kept.append(con.sql("select 1"))
        except lh.ClosedError:
            return
        except BaseException as e:
            failed.append(e)

    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=begin, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        while len(kept) < 50:
            threads[0].join(0.01)
        con.close()
        for thread in threads:
            thread.join(WAIT_SECONDS)
    finally:
        sys.setswitchinterval(usual)
    assert not failed


def test_what_was_read_before_stays(con: lh.Connection) -> None:
    relation = con.sql("select 1 as one")
    assert relation.fetchall() == [(1,)]
    con.close()
    assert relation.fetchall() == [(1,)]
