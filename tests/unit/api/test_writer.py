"""The pipelined writer, against a log that remembers what it was asked for."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from tests.waiting import WAIT_SECONDS, wait_until

import lakehead as lh
from lakehead.api import writer as writers
from lakehead.client.batch_writer import BatchWriter, PreparedWrite
from lakehead.config import Limits
from lakehead.types import WriteKind

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.string())])


def test_many_small_batches_arrive_in_order(tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", SCHEMA)
        with table.writer() as writer:
            for i in range(2000):
                writer.append([{"k": i, "v": None}])
        assert table.scan(["k"]).to_arrow()["k"].to_pylist() == list(range(2000))


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("given", ["table", "batch", "pandas", "polars", "texts"])
@pytest.mark.parametrize("writer_id", [None, "w", "none"])
def test_what_was_given_is_sent_whatever_becomes_of_its_memory(
    tmp_path: Path, given: str, keyed: bool, writer_id: str | None
) -> None:
    """A program fills its own arrays again once a call has returned, of a writer or a single one (none)."""
    numbers, texts = np.zeros(100, np.int64), np.zeros(300, np.uint8)
    ends = pa.py_buffer(np.arange(0, 303, 3, dtype=np.int32))
    make: dict[str, Callable[[], object]] = {
        "table": lambda: pa.table({"k": numbers}),
        "batch": lambda: pa.record_batch({"k": numbers}).slice(0, 100),
        "pandas": lambda: pd.DataFrame({"k": numbers}, copy=False),
        "polars": lambda: pl.DataFrame({"k": numbers}),
        "texts": lambda: pa.table(
            {"k": numbers, "v": pa.Array.from_buffers(pa.string(), 100, [None, ends, pa.py_buffer(texts)])}
        ),
    }
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", SCHEMA, primary_key=["k"] if keyed else None)
        single = contextlib.nullcontext(table)
        with single if writer_id == "none" else table.writer(writer_id=writer_id) as writer:
            for n in range(30):
                numbers[:], texts[:] = range(100 * n, 100 * n + 100), ord("0") + n
                (writer.upsert if keyed else writer.append)(make[given]())
            numbers[:], texts[:] = -1, 0
        rows = table.scan().to_arrow().sort_by("k").to_pylist()
        assert [r["k"] for r in rows] == list(range(3000))
        expected = [chr(ord("0") + n // 100) * 3 if given == "texts" else None for n in range(3000)]
        assert [r["v"] for r in rows] == expected


def test_kinds_and_columns_are_never_mixed_in_a_request(tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", SCHEMA, primary_key=["k"])
        with table.writer() as writer:
            for i in range(50):
                writer.upsert([{"k": 1, "v": f"full {i}"}, {"k": 2, "v": "x"}])
                writer.upsert([{"k": 3}])
                writer.delete([2])
        assert table.scan().to_arrow().sort_by("k").to_pylist() == [{"k": 1, "v": "full 49"}, {"k": 3, "v": None}]


def test_a_named_writer_numbers_each_batch(tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", SCHEMA)
        with table.writer("etl") as writer:
            for i in range(20):
                writer.append([{"k": i, "v": None}])
            writer.flush()
            assert writer.last_sequence == 19


def test_a_named_writers_batches_may_span_tablets_while_others_are_answered(tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", SCHEMA, primary_key=["k"], buckets=8)
        with table.writer("etl") as writer:
            for i in range(300):
                writer.upsert([{"k": k, "v": str(i)} for k in range(i, i + 40)])
        assert writer.last_sequence == 299 and table.scan().count() == 339


def test_flush_waits_for_every_batch_before_it(tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", SCHEMA)
        with table.writer() as writer:
            for i in range(300):
                writer.append([{"k": i, "v": "x" * 1000}])
                if i % 100 == 99:
                    writer.flush()
                    assert table.scan().count() == i + 1


def test_a_failure_reaches_the_caller_and_ends_the_writer(tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con:
        writer = con.create_table("t", SCHEMA).writer()
        con.drop_table("t")
        with pytest.raises(lh.TableNotFoundError):
            writer.append([{"k": 1, "v": None}])
            writer.flush()
        with pytest.raises(lh.TableNotFoundError):
            writer.append([{"k": 2, "v": None}])
        with pytest.raises(lh.TableNotFoundError):
            writer.close()


def test_the_next_request_is_encoded_while_one_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queued, encoded_next = threading.Event(), threading.Event()
    sent: list[int] = []
    prepare, send = BatchWriter.prepare, BatchWriter.send

    def prepared(self: BatchWriter, kind: WriteKind, batch: pa.RecordBatch) -> PreparedWrite:
        write = prepare(self, kind, batch)
        if write.sequence == 2:
            encoded_next.set()
        return write

    def waiting(self: BatchWriter, write: PreparedWrite) -> object:
        assert (queued if write.sequence == 0 else encoded_next).wait(WAIT_SECONDS)
        sent.append(write.sequence)
        return send(self, write)

    monkeypatch.setattr(BatchWriter, "prepare", prepared)
    monkeypatch.setattr(BatchWriter, "send", waiting)
    monkeypatch.setattr(writers, "_REQUEST_ROWS_MAX", 1)
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", SCHEMA)
        with table.writer() as writer:
            for i in range(100):
                writer.append([{"k": i, "v": None}])
            queued.set()
        assert table.scan(["k"]).to_arrow()["k"].to_pylist() == sent == list(range(100))


@pytest.mark.parametrize("part", ["prepare", "send"])
@pytest.mark.parametrize("fails", [0, 1, 2, 7, 30])
def test_of_a_request_that_fails_and_all_after_it_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, fails: int
) -> None:
    usual = getattr(BatchWriter, part)
    calls = 0

    def failing(self: BatchWriter, *given: object) -> object:
        nonlocal calls
        calls += 1
        if calls == fails + 1:
            raise lh.LimitExceededError("too much")
        return usual(self, *given)

    monkeypatch.setattr(BatchWriter, part, failing)
    monkeypatch.setattr(writers, "_REQUEST_ROWS_MAX", 1)
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", SCHEMA)
        writer = table.writer()
        with pytest.raises(lh.LimitExceededError):
            for i in range(60):
                writer.append([{"k": i, "v": None}])
            writer.flush()
        with pytest.raises(lh.LimitExceededError):
            writer.close()
        assert table.scan(["k"]).to_arrow()["k"].to_pylist() == list(range(fails))
    assert not any(t.name.startswith("lakehead-writer") for t in threading.enumerate())


def test_bad_rows_are_refused_at_once_and_the_writer_goes_on(tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", SCHEMA)
        with table.writer() as writer:
            with pytest.raises(lh.ColumnNotFoundError):
                writer.append([{"k": 1, "nope": 2}])
            with pytest.raises(lh.WrongTableKindError):
                writer.upsert([{"k": 1, "v": "a"}])
            writer.append([{"k": 1, "v": "a"}])
        assert table.scan().count() == 1
        with pytest.raises(lh.ClosedError):
            writer.append([{"k": 1, "v": "a"}])


def test_a_named_writer_that_ended_well_is_resumed_after_its_last_batch(tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", SCHEMA)
        for i in range(3):
            with table.writer("etl") as writer:
                assert writer.last_sequence == i - 1
                writer.append([{"k": i, "v": "same name, new rows"}])
    with lh.connect(tmp_path) as con:
        table = con.table("t")
        with table.writer("etl") as writer:
            assert writer.last_sequence == 2
            writer.append([{"k": 3, "v": None}])
        assert sorted(table.scan(["k"]).to_arrow()["k"].to_pylist()) == [0, 1, 2, 3]


def test_a_fenced_writer_leaves_no_word(tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", SCHEMA)
        old = table.writer("etl")
        old.append([{"k": 0, "v": None}])
        old.flush()
        new = table.writer("etl")
        assert new.last_sequence == 0
        old.close()
        new.append([{"k": 1, "v": None}])
        new.close()
        assert sorted(table.scan(["k"]).to_arrow()["k"].to_pylist()) == [0, 1]


def threads() -> int:
    return sum(t.name == "lakehead-writer" for t in threading.enumerate())


@pytest.mark.parametrize("writer_id", [None, "etl"])
def test_a_writer_that_is_let_go_of_sends_what_it_accepted_and_ends(tmp_path: Path, writer_id: str | None) -> None:
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", SCHEMA)
        before = threads()
        for i in range(20):
            table.writer(writer_id and f"{writer_id}-{i}").append([{"k": i, "v": None}])
        idle = table.writer(writer_id)
        idle.append([{"k": 20, "v": None}])
        idle.flush()
        del idle
        gc.collect()
        wait_until(lambda: threads() == before)
        assert sorted(table.scan(["k"]).to_arrow()["k"].to_pylist()) == list(range(21))


def test_a_closed_connection_ends_its_writers(tmp_path: Path) -> None:
    before = threads()
    con = lh.connect(tmp_path)
    table = con.create_table("t", SCHEMA)
    idle, late, named = table.writer(), table.writer(), table.writer("etl")
    idle.append([{"k": 0, "v": None}])
    idle.flush()
    con.close()
    wait_until(lambda: threads() == before)
    idle.flush()
    idle.close()
    for refused in (lambda: late.append([{"k": 1, "v": None}]), named.close):
        with pytest.raises(lh.ClosedError, match="connection"):
            refused()
    with pytest.raises(lh.ClosedError, match="closed"):
        late.append([{"k": 1, "v": None}])


@pytest.mark.parametrize("waits", ["flush", "close", "append"])
def test_a_call_that_waits_ends_with_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    monkeypatch.setattr(writers, "Limits", lambda: Limits(writer_batches_max=1))
    closed, send, asked = threading.Event(), BatchWriter.send, threading.Event()

    def send_then(self: BatchWriter, write: PreparedWrite) -> object:
        asked.set()
        closed.wait()
        return send(self, write)

    monkeypatch.setattr(BatchWriter, "send", send_then)
    con = lh.connect(tmp_path)
    writer = con.create_table("t", SCHEMA).writer()
    row = [{"k": 0, "v": None}]
    writer.append(row)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(getattr(writer, waits), *([row] if waits == "append" else []))
        asked.wait()
        con.close()
        closed.set()
        with pytest.raises(lh.ClosedError):
            call.result(timeout=WAIT_SECONDS)


_DIES = """
import os, signal, sys, lakehead as lh
table = lh.connect(sys.argv[1]).table("t")
writer = table.writer("etl")
for batch in eval(sys.argv[2]):
    writer.upsert(batch) if table.primary_key else writer.append(batch)
    writer.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def died(con: lh.Connection, *batches: list[dict[str, object]]) -> None:
    """A named writer of another process that is killed after its last batch was acknowledged."""
    subprocess.run([sys.executable, "-c", _DIES, con.uri, repr(batches)], check=False)


def test_what_was_flushed_counts_though_the_writer_was_killed(tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", SCHEMA)
        died(con, [{"k": 0, "v": "a"}], [{"k": 1, "v": "b"}])
        with table.writer("etl") as writer:
            assert writer.last_sequence == 1
            writer.append([{"k": 2, "v": "other rows, next number"}])
            writer.append([{"k": 3, "v": None}])
        assert table.scan(["k"]).to_arrow()["k"].to_pylist() == [0, 1, 2, 3]


def test_a_delete_never_gets_an_upserts_answer(tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", SCHEMA, primary_key="k", buckets=2)
        died(con, [{"k": 1, "v": "a"}, {"k": 2, "v": "b"}])
        with table.writer("etl") as writer:
            writer.delete([1])
        assert table.scan().to_arrow().to_pylist() == [{"k": 2, "v": "b"}]


@pytest.mark.parametrize("writer_id", ["", 5, b"etl"])
def test_a_writers_name_is_a_text(tmp_path: Path, writer_id: object) -> None:
    with lh.connect(tmp_path) as con, pytest.raises(lh.InvalidRequestError, match="must be a name"):
        con.create_table("t", SCHEMA).writer(writer_id)  # type: ignore[arg-type]
