"""Two drivers that share a checkpoint write each row once, whichever of them Spark ends."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from tests.integration.conftest import embedded_only
from tests.integration.spark_twice import copying, error_of, source
from tests.waiting import WAIT_SECONDS

import lakehead as lh

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, embedded_only, pytest.mark.timeout(900)]

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
TOO_LATE = r"CONCURRENT_STREAM_LOG_UPDATE|streaming queries are concurrently using"
"""What Spark says of a checkpoint that another query has written to: where it looks first, and where it finds out."""


class Driver:
    """Another process with a session and a query of its own."""

    def __init__(self, con: lh.Connection) -> None:
        script = Path(__file__).with_name("spark_twice.py")
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, str(script), con.uri], **pipes)

    def ask(self, **wanted: str) -> dict[str, Any]:
        """Have a query on a checkpoint and a table, or, of nothing, the same one, do all that there is."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(wanted) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@pytest.fixture(scope="module")
def other(con: lh.Connection) -> Iterator[Driver]:
    made = Driver(con)
    yield made
    made.process.communicate(timeout=WAIT_SECONDS)


class Copied:
    """A table, and the one that it is copied to."""

    def __init__(self, con: lh.Connection, name: str, *, keyed: bool) -> None:
        how: dict[str, Any] = {"primary_key": "id"} if keyed else {}
        self.to = con.create_table(name, SCHEMA, buckets=2, **how)
        self.source = con.create_table(f"{name}_source", SCHEMA)
        self.sent = 0

    def send(self, count: int) -> None:
        """One append to one tablet: whoever looks sees all of it or nothing."""
        self.source.append(pa.table({"id": range(self.sent, self.sent + count), "v": ["x"] * count}, SCHEMA))
        self.sent += count

    @property
    def whole(self) -> bool:
        """Whether each row was written, and once: a row that is upserted twice stands twice in the log."""
        written = [(r["id"], r["v"]) for b in self.to.subscribe("earliest", stop="now") for r in b.rows.to_pylist()]
        return sorted(written) == [(n, "x") for n in range(self.sent)]


def test_two_drivers_on_one_checkpoint_write_each_row_once(
    spark: SparkSession, con: lh.Connection, other: Driver, keyed: bool, name: str, tmp_path: Path
) -> None:
    """Both find the same rows; Spark ends who comes second to its checkpoint, and that one begins again."""
    copied = Copied(con, name, keyed=keyed)
    checkpoint = str(tmp_path / "checkpoint")
    copied.send(60)
    ours = theirs = None
    for _ in range(3):
        if ours is None:
            ours = copying(source(spark, con.uri, name), con.uri, name, checkpoint).start()
        assert error_of(ours) is None
        if theirs is None:
            theirs = other.ask(table=name, checkpoint=checkpoint)
            assert theirs == {"id": ours.id, "error": None}, "both are the same query"
        copied.send(60)
        errors = error_of(ours), other.ask()["error"]
        assert any(errors), "neither was told"
        assert all(e is None or re.search(TOO_LATE, e) for e in errors), errors
        ours, theirs = (None if e else q for q, e in zip((ours, theirs), errors, strict=True))
        assert copied.whole or not any(q for q in (ours, theirs))
    if ours is not None:
        ours.stop()
    last = copying(source(spark, con.uri, name), con.uri, name, checkpoint).trigger(availableNow=True).start()
    assert last.awaitTermination(300)
    assert copied.whole


def test_a_driver_that_ends_a_micro_batch_late_writes_nothing_again(
    spark: SparkSession,
    con: lh.Connection,
    other: Driver,
    keyed: bool,
    name: str,
    tmp_path: Path,
    wait_until: Callable[..., None],
) -> None:
    """It has planned a micro-batch, and stages its rows after another driver has written them and gone on."""
    copied = Copied(con, name, keyed=keyed)
    checkpoint, gate = tmp_path / "checkpoint", tmp_path / "gate"
    os.mkfifo(gate)
    copied.send(60)
    ours = copying(behind(gate, source(spark, con.uri, name)), con.uri, name, str(checkpoint)).start()
    wait_until((checkpoint / "offsets" / "0").exists)
    assert other.ask(table=name, checkpoint=str(checkpoint)) == {"id": ours.id, "error": None}
    assert copied.whole
    copied.send(60)
    assert other.ask()["error"] is None
    wait_until(lambda: opened(gate))
    assert re.search(TOO_LATE, str(error_of(ours)))
    copied.send(60)
    assert other.ask()["error"] is None
    assert copied.whole


def behind(gate: Path, stream: DataFrame) -> DataFrame:
    """The rows, from a task that waits for its gate first."""
    path = str(gate)

    def through(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with open(path):
            yield from batches

    return stream.mapInArrow(through, stream.schema)


def opened(gate: Path) -> bool:
    """Open it, if a task waits there."""
    try:
        os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as e:
        if e.errno != errno.ENXIO:
            raise
        return False
    return True
