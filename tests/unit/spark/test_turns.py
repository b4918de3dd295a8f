"""Two queries of one process that write what follows from what a table has, at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.client.staging import JobBatch, Published, publish_together
from lakehead.spark import change_feed, layers
from lakehead.spark.change_feed import _DELETED, _SEQUENCE, ChangeFeed, ScdType
from lakehead.spark.layers import Layers


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as made:
        yield made


def other_first(module: Any, other: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> threading.Thread:
    """Have another thread run before the first publication, if it is let."""
    thread, begun = threading.Thread(target=other), threading.Event()

    def publish(*args: Any, **kwargs: Any) -> Published:
        if not begun.is_set():
            begun.set()
            thread.start()
            thread.join(0.3)
        return publish_together(*args, **kwargs)

    monkeypatch.setattr(module, "publish_together", publish)
    return thread


def test_what_two_queries_add_to_a_table_is_all_there(con: lh.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    con.create_table("a.sums", pa.schema([("k", pa.int64()), ("n", pa.int64())]), primary_key="k")

    def add(job: str, n: int) -> None:
        out = Layers(con, JobBatch(job), small=True)
        out.accumulate("a.sums", pa.table({"k": [1], "n": [n]}), sum="n")
        out.write()

    thread = other_first(layers, lambda: add("query 2", 10), monkeypatch)
    add("query 1", 1)
    thread.join()
    assert con.table("a.sums").get(1) == {"k": 1, "n": 11}


@pytest.mark.parametrize("scd_type", [1, 2])
def test_the_changes_of_two_queries_are_in_the_order_of_their_sequence(
    con: lh.Connection, monkeypatch: pytest.MonkeyPatch, scd_type: ScdType
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

    thread = other_first(change_feed, lambda: apply("query 2", 2), monkeypatch)
    apply("query 1", 1)
    thread.join()
    found = con.table("a.t").scan().to_arrow().to_pylist()
    if scd_type == 1:
        assert found == [{"k": 1, "v": 2}]
    else:
        assert sorted((r["v"], r["start_at"], r["end_at"]) for r in found) == [(1, 1, 2), (2, 2, None)]
