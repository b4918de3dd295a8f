"""Frames are committed once, and applied alike by whoever gets them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pytest
from msgspec.structs import replace
from tests import standby
from tests.standby import Standby, as_bytes, flat
from tests.waiting import WAIT_SECONDS

import lakehead as lh
from lakehead.config import TableProperties
from lakehead.env import Env, SystemClock, SystemRandomness, SystemThreads
from lakehead.errors import CorruptionError
from lakehead.format.frame import WriterStamp, encode_body
from lakehead.kv import KvTablet
from lakehead.server.committer import local_committer
from lakehead.server.endpoint import LocalEndpoint
from lakehead.server.group_commit import PendingWrite
from lakehead.server.notes import MakeCheckpoint, Roll, Trim
from lakehead.server.tablet import Tablet
from lakehead.testing.storage import FaultyStorage
from lakehead.types import Schemas, TableDescriptor, TablePath, TabletKey

SCHEMA = pa.schema([pa.field("k", pa.int64(), False), ("v", pa.string())])
KEY = TabletKey("", 0)
KEYED = TableDescriptor("t1", TablePath("a", "t"), Schemas.only(SCHEMA), ("k",), (), ("k",), 1, None, TableProperties())


def opened(storage: FaultyStorage, *, followed: bool = False) -> tuple[Tablet, list[Standby]]:
    behind: list[Standby] = []

    def committers(desc: TableDescriptor, key: TabletKey, fence: object) -> Standby:
        behind.append(Standby(desc, key, lambda: None))
        return behind[0]

    return Tablet(
        KEYED,
        KEY,
        env=Env(SystemClock(), storage, SystemRandomness(), SystemThreads()),
        folder="/t",
        on_progress=lambda: None,
        run_in_background=lambda work: work(),
        seed=1,
        moment=SystemThreads().lock(),
        committers=committers if followed else local_committer,
    ), behind  # fmt: skip


def upsert(tablet: Tablet, sequence: int, keys: list[int]) -> tuple[int, int]:
    rows = pa.RecordBatch.from_pydict({"k": keys, "v": [f"{k} of {sequence}" for k in keys]}, schema=SCHEMA)
    body = encode_body(rows, schema_id=0, stamp=WriterStamp(b"w" * 16, sequence, sequence - 1))
    write = PendingWrite("upsert", body, rows, SystemThreads().done())
    if tablet.submit(write):
        tablet.drive()
    return write.wait()


def state(tablet: Tablet) -> tuple[object, ...]:
    kv = tablet._kv
    assert isinstance(kv, KvTablet)
    offsets, rows = flat(kv)
    return tablet._log.state.offset, tablet.writers.state(), offsets.tolist(), rows.to_pylist()


def test_leader_restart_and_standby_have_one_state() -> None:
    storage = FaultyStorage()
    leader, _ = opened(storage)
    for sequence in range(20):
        upsert(leader, sequence, [sequence % 7, sequence % 5, 100 + sequence])
        if sequence == 8:
            leader.apply_note(MakeCheckpoint())
    restarted, _ = opened(storage)
    standby, _ = opened(FaultyStorage())
    frames = list(leader.frames(0, leader.high_watermark))
    standby.apply(frames[:5])
    for frame in frames[5:]:
        standby.apply([frame])
    assert state(leader) == state(restarted) == state(standby)
    assert [as_bytes(f) for f in standby.frames(0, 10**9)] == [as_bytes(f) for f in frames]
    with pytest.raises(CorruptionError, match="come twice"):
        standby.apply(frames[-1:])
    assert upsert(standby, 20, [1]) == (leader.high_watermark, leader.high_watermark + 2), "it may lead on"


def test_frames_of_a_schema_that_the_catalog_does_not_have_yet_are_not_written() -> None:
    leader, _ = opened(FaultyStorage())
    upsert(leader, 0, [1, 2])
    upsert(leader, 1, [3])
    first, second = leader.frames(0, leader.high_watermark)
    newer = replace(second, body=replace(second.body, schema_id=1))
    storage = FaultyStorage()
    standby, _ = opened(storage)
    with pytest.raises(CorruptionError, match="schema 1"):
        standby.apply([first, newer])
    standby, _ = opened(storage)
    assert not list(standby.frames(0, 10**9))
    standby.apply([first, second])
    assert state(standby) == state(leader)


def test_what_is_due_changes_nothing_until_it_is_done() -> None:
    storage = FaultyStorage()
    leader, _ = opened(storage)
    upsert(leader, 0, [1, 2])
    later = SystemClock().now_us() + 3_600_000_000
    for expected in (Roll(), MakeCheckpoint(), Trim(2), None):
        assert leader.due(later, 0, 2) == leader.due(later, 0, 2) == expected
        if expected is not None:
            leader.apply_note(expected)
    assert leader.log_start_offset == 2
    assert leader.due(later, 0, 0) is None


def test_a_tablet_that_follows_is_compared() -> None:
    before = standby.comparisons
    leader, [_] = opened(FaultyStorage(), followed=True)
    for sequence in range(30):
        upsert(leader, sequence, [sequence % 3])
    assert standby.comparisons == before + 5


@pytest.mark.parametrize(("durability", "rows", "threads"), [("os", 40, 1), ("sync", 40, 4), ("os", 80_000, 4)])
def test_parts_that_wait_for_a_disk_or_are_large_are_written_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Literal["sync", "os"], rows: int, threads: int
) -> None:
    drive = Tablet.drive
    drove: list[int] = []
    together = threading.Barrier(threads)

    def noted(self: Tablet) -> None:
        drove.append(threading.get_ident())
        if threads > 1:
            together.wait(WAIT_SECONDS)
        drive(self)

    monkeypatch.setattr(Tablet, "drive", noted)
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", SCHEMA, primary_key=["k"], buckets=4, durability=durability)
        given = pa.table({"k": range(rows), "v": ["x" * 20] * rows}, schema=SCHEMA)
        table.upsert(given.slice(0, min(rows, 1 << 16)))
        assert len(drove) == 4 and len(set(drove)) == threads
        assert table.scan().count() == min(rows, 1 << 16)


def test_where_no_other_thread_can_be_had_all_parts_are_written(tmp_path: Path) -> None:
    def refused(work: object) -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")

    with lh.connect(tmp_path) as con:
        table = con.create_table("t", SCHEMA, primary_key=["k"], buckets=4, durability="sync")
        endpoint = con._server
        assert isinstance(endpoint, LocalEndpoint)
        endpoint.service._writes._run_in_background = refused
        for n in range(3):
            table.upsert([{"k": k, "v": str(n)} for k in range(40)])
        assert table.scan().to_arrow()["v"].to_pylist() == ["2"] * 40
