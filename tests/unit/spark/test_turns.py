"""Queries that write what follows from what a table has, at the same time, of one process and of several."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.client.staging import JobBatch, Published, publish_together
from lakehead.spark import change_feed, layers, turns
from lakehead.spark.change_feed import _DELETED, _SEQUENCE, ChangeFeed, ScdType
from lakehead.spark.combine import Combine
from lakehead.spark.layers import Layers

SUMS = pa.schema([("k", pa.int64()), ("n", pa.int64())])


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as made:
        yield made


def other_first(
    module: Any, other: Callable[[], None], monkeypatch: pytest.MonkeyPatch, published: list[bool]
) -> threading.Thread:
    """Have another thread run before the first publication, if it is let; note which of them landed."""
    thread, begun = threading.Thread(target=other), threading.Event()

    def publish(*args: Any, **kwargs: Any) -> Published:
        if not begun.is_set():
            begun.set()
            thread.start()
            thread.join(0.3)
        published.append(False)
        answer = publish_together(*args, **kwargs)
        published[-1] = True
        return answer

    monkeypatch.setattr(module, "publish_together", publish)
    return thread


@pytest.fixture(params=["one process", "two processes"])
def apart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the queries know nothing of one another but through the server."""
    if apart := request.param == "two processes":
        monkeypatch.setattr(turns, "_alone", contextlib.nullcontext)
    return apart


def add(con: lh.Connection, job: str, n: int, number: int = 0) -> None:
    out = Layers(con, JobBatch(job, number), small=True)
    out.accumulate("a.sums", pa.table({"k": [1], "n": [n]}), sum="n")
    out.write()


def test_what_two_queries_add_to_a_table_is_all_there(
    con: lh.Connection, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    con.create_table("a.sums", SUMS, primary_key="k")
    published: list[bool] = []
    thread = other_first(layers, lambda: add(con, "query 2", 10), monkeypatch, published)
    add(con, "query 1", 1)
    thread.join()
    assert con.table("a.sums").get(1) == {"k": 1, "n": 11}
    assert published == ([True, False, True] if apart else [True, True]), "those of one process wait"


def test_what_is_combined_for_a_table_is_combined_once(
    con: lh.Connection, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    con.create_table("a.sums", SUMS, primary_key="k")
    collected, combined = Combine.collected, list[object]()

    def counted(self: Combine, given: Any, small: bool) -> pa.Table:
        combined.append(given)
        return collected(self, given, small)

    monkeypatch.setattr(Combine, "collected", counted)
    thread = other_first(layers, lambda: add(con, "query 2", 10), monkeypatch, [])
    add(con, "query 1", 1)
    thread.join()
    assert len(combined) == 2


ADDS = """
import sys
import lakehead as lh
from tests.unit.spark.test_turns import add
with lh.connect(sys.argv[1]) as con:
    sys.stdin.readline()
    for number in range(40):
        add(con, sys.argv[2], 1, number)
"""


def test_what_processes_add_to_a_table_is_all_there(con: lh.Connection) -> None:
    con.create_table("a.sums", SUMS, primary_key="k")
    processes = [
        subprocess.Popen([sys.executable, "-c", ADDS, con.uri, f"query {n}"], stdin=subprocess.PIPE, text=True)
        for n in range(3)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert con.table("a.sums").get(1) == {"k": 1, "n": 120}


@pytest.mark.parametrize("scd_type", [1, 2])
def test_the_changes_of_two_queries_are_in_the_order_of_their_sequence(
    con: lh.Connection, monkeypatch: pytest.MonkeyPatch, scd_type: ScdType, apart: bool
) -> None:
    names = pa.schema([("k", pa.int64()), (_SEQUENCE, pa.int64()), (_DELETED, pa.bool_())])
    feed = ChangeFeed("", "a.t", "a.beside", ("k",), ("k", "v"), scd_type)
    schema = names.insert(1, pa.field("v", pa.int64()))
    feed.require_tables(con, schema)

    class Changes:
        def __init__(self, sequence: int) -> None:
            self._rows = [{"k": 1, "v": sequence, _SEQUENCE: sequence, _DELETED: False}]

        def toArrow(self) -> pa.Table:
            return pa.Table.from_pylist(self._rows, schema)

    def apply(job: str, sequence: int) -> None:
        feed.apply(con, Changes(sequence), JobBatch(job), small=True)  # type: ignore[arg-type]

    thread = other_first(change_feed, lambda: apply("query 2", 2), monkeypatch, [])
    apply("query 1", 1)
    thread.join()
    found = con.table("a.t").scan().to_arrow().to_pylist()
    if scd_type == 1:
        assert found == [{"k": 1, "v": 2}]
    else:
        assert sorted((r["v"], r["start_at"], r["end_at"]) for r in found) == [(1, 1, 2), (2, 2, None)]
