"""The pipelined writer, against a log that remembers what it was asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import lakehead as lh

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.string())])


def test_many_small_batches_arrive_in_order(tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", SCHEMA)
        with table.writer() as writer:
            for i in range(2000):
                writer.append([{"k": i, "v": None}])
        assert table.scan(["k"]).to_arrow()["k"].to_pylist() == list(range(2000))


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
