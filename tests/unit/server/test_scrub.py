"""The scrub: all bytes in the end, few at a time; what it finds is told once, and stops no one else."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import pyarrow as pa
import pytest
from tests.log_writing import write
from tests.unit.server.empty_lake import EmptyLake

from lakehead.config import Limits, TableProperties
from lakehead.env import Env, SystemRandomness, SystemThreads
from lakehead.errors import CorruptionError, LakeFileMissingError, UnavailableError
from lakehead.format.frame import WriterStamp, encode_body
from lakehead.log.checkpoint import CheckpointPolicy
from lakehead.protocol import messages as m
from lakehead.server.endpoint import LocalEndpoint
from lakehead.server.scrub import PAUSE_SECONDS, Scrub
from lakehead.server.service import Service
from lakehead.testing.storage import FaultyStorage
from lakehead.types import Schemas, TableDescriptor, TablePath, TabletKey

SCHEMA = pa.schema([("n", pa.int64())])


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now_us(self) -> int:
        return 10**15 + int(self.seconds * 1e6)

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class Lake(EmptyLake):
    """A lake that answers with an error, if it has one."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def proven_offsets(
        self, desc: TableDescriptor, overwritten: Mapping[TabletKey, int] = {}
    ) -> Mapping[TabletKey, int]:
        if self.error is not None:
            raise self.error
        return {}


class Served:
    """A service with two tables of several sealed segments; the second has a lake."""

    def __init__(self) -> None:
        self.storage, self.clock, self.lake = FaultyStorage(), Hands(), Lake()
        self.service = Service(
            "/data", env=Env(self.clock, self.storage, SystemRandomness(), SystemThreads()), limits=Limits(),
            lake=self.lake, checkpoint_policy=CheckpointPolicy(log_bytes=2000),
        )  # fmt: skip
        self.tables = [self.create("a.one", None), self.create("a.two", "iceberg")]
        self.scrub = Scrub(self.service._tables, self.lake, self.clock)

    def create(self, name: str, lake: str | None) -> str:
        properties = TableProperties(segment_bytes=1500)
        desc = TableDescriptor("", TablePath.parse(name), Schemas.only(SCHEMA), (), (), (), 1, lake, properties)
        reply, _ = LocalEndpoint(self.service).call(m.CreateTable(info=m.TableInfo.of(desc), if_not_exists=False))
        [tablet] = self.service._tables.get(reply.info.table_id).tablets.values()
        for at in range(20):
            batch = pa.RecordBatch.from_pydict({"n": [at] * 20}, schema=SCHEMA)
            body = encode_body(batch, schema_id=0, stamp=WriterStamp(at.to_bytes(16, "little"), 0))
            write(tablet._log, [body], 1)
            tablet._log.sync()
            tablet._log.advance_high_watermark()
        return reply.info.table_id

    def files(self, table_id: str) -> list[str]:
        folder = self.service._tables.get(table_id).folder + "/partition-0/bucket-0"
        return [f"{folder}/{n}" for n in self.storage.list_files(folder) if n.endswith(".log")][:-1]

    def damage_of(self, table_id: str) -> str | None:
        reply, _ = LocalEndpoint(self.service).call(m.Watermarks(table_id=table_id, sync=False))
        return reply.tablets[0].damage

    def read(self, table_id: str) -> int:
        [tablet] = self.service._tables.get(table_id).tablets.values()
        return sum(f.body.row_count for f in tablet.frames(0, tablet.high_watermark))


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.service.close()


def test_a_turn_looks_at_so_many_bytes_and_a_pass_at_all(served: Served) -> None:
    read: list[str] = []
    served.storage.before = lambda action, path: read.append(path) if action == "read" else None
    turns = 0
    while not turns or served.scrub._pass is not None:
        before = len(read)
        served.scrub.turn(1000)
        turns += 1
        assert len(read) - before <= 2
    expected = {path for table in served.tables for path in served.files(table)}
    assert set(read) == expected and turns > len(expected)
    served.scrub.turn()
    assert len(read) == len(expected), "the next pass is not due"
    served.clock.sleep(PAUSE_SECONDS)
    served.scrub.turn()
    assert len(read) == 2 * len(expected)


def test_damage_is_told_once_stands_in_the_status_and_goes(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    one, two = served.tables
    bad = served.files(one)[1]
    served.storage.flip_bit(bad, 300)
    with caplog.at_level(logging.ERROR, "lakehead.server.scrub"):
        for _ in range(3):
            served.scrub.turn()
            served.clock.sleep(PAUSE_SECONDS)
    [told] = [r.getMessage() for r in caplog.records]
    assert bad in told and "a.one" in told
    assert bad in (served.damage_of(one) or "") and served.damage_of(two) is None
    with pytest.raises(CorruptionError) as raised:
        served.read(one)
    assert raised.value.context["path"] == bad
    assert served.read(two) == 400
    served.storage.flip_bit(bad, 300)
    served.clock.sleep(PAUSE_SECONDS)
    served.scrub.turn()
    assert served.damage_of(one) is None and served.read(one) == 400


def test_a_lake_is_asked_for_its_files(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    for error, level in (
        (LakeFileMissingError("s3://gone is missing"), logging.ERROR),
        (UnavailableError("no answer"), logging.WARNING),
    ):
        caplog.clear()
        served.lake.error = error
        with caplog.at_level(logging.WARNING, "lakehead.server.scrub"):
            served.scrub.turn()
        assert [(r.levelno, error.message in r.getMessage()) for r in caplog.records] == [(level, True)]
        served.clock.sleep(PAUSE_SECONDS)


def test_damage_or_a_lake_without_answer_keeps_no_tablet_from_its_checkpoint(served: Served) -> None:
    one, _ = served.tables
    served.lake.error = UnavailableError("no answer")
    served.storage.flip_bit(served.files(one)[1], 20)
    [damaged] = served.service._tables.get(one).tablets.values()
    list(damaged.scrub())
    assert damaged.damages()
    for table in served.tables:
        [tablet] = served.service._tables.get(table).tablets.values()
        assert tablet._log.checkpoint is None
    served.clock.sleep(10 * 3600)
    served.service.maintain()
    for table in served.tables:
        [tablet] = served.service._tables.get(table).tablets.values()
        assert tablet._log.checkpoint is not None
