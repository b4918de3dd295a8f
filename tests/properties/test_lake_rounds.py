"""Rounds on the model of a lake table, while everything goes wrong that may: each row is in lake ∪ hot exactly once."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lakehead.env import Env
from lakehead.env.clock import SystemClock
from lakehead.env.randomness import SeededRandomness
from lakehead.errors import (
    CommitConflictError,
    CommitUnknownError,
    LakeStateError,
    OffsetOutOfRangeError,
    TieringFencedError,
    UnavailableError,
)
from lakehead.lake.marks import mark_of
from lakehead.testing.hot import MemoryHotSource
from lakehead.testing.lake import Fault, MemoryLake
from lakehead.tiering.compaction import compact
from lakehead.tiering.expiry import expire
from lakehead.tiering.expiry_plan import Retention
from lakehead.tiering.round import run_round
from lakehead.types import OFFSET_COLUMN, PREV_OFFSET_COLUMN, ChangeType, Schemas, TableDescriptor, TablePath, TabletKey

SCHEMA = pa.schema([pa.field("id", pa.int64(), False), pa.field("code", pa.int64(), False), pa.field("v", pa.int64())])
STEPS = ("commit", "write deletes", "load", "write data", "committed", "watermarks", "read")
EXPECTED = (CommitConflictError, CommitUnknownError, TieringFencedError, UnavailableError)

DISTURBANCES = ["trim", "append", "compact", "backwards", "delete", "expire", "late", "clean", "maintenance"]

ids = st.lists(st.integers(0, 9), min_size=1, max_size=6)
faults = st.lists(st.none() | st.sampled_from(Fault), max_size=6)
events = st.lists(
    st.tuples(
        st.sampled_from(STEPS),
        st.sampled_from(["crash", "down", "rival", *DISTURBANCES]),
    ),
    max_size=5,
)


class Killed(BaseException):
    """A process that ends."""


class Instant(SystemClock):
    """Nobody waits."""

    def sleep(self, seconds: float) -> None:
        pass


class Log(MemoryHotSource):
    """A log whose reads are steps of a round, and fail below its start."""

    on_step: Callable[[str], None]

    def watermarks(self) -> Any:
        self.on_step("watermarks")
        return super().watermarks()

    def read(self, tablet: TabletKey, start: int, end: int, columns: Any = None) -> Any:
        for batch in super().read(tablet, start, end, columns):
            self.on_step("read")
            if start < super().watermarks()[tablet][0]:
                raise OffsetOutOfRangeError(f"{start} was trimmed")
            yield batch


class Rounds(RuleBasedStateMachine):
    """One table; services that tier it, and die; a catalog that is not to be relied on; other engines."""

    @initialize(keyed=st.booleans(), buckets=st.integers(1, 2), late=st.booleans())
    def create(self, keyed: bool, buckets: int, late: bool) -> None:
        key = ("id", "code") if keyed else ()
        self.desc = TableDescriptor(
            "t1", TablePath("db", "t"), Schemas.only(SCHEMA, 1), key, (), key, buckets, "iceberg"
        )
        self.log = Log(self.desc, batch_rows=4)
        self.log.on_step = self.step
        self.randomness = SeededRandomness(1)
        self.lake = MemoryLake(self.desc, self.randomness, lands_late=late)
        self.lake.on_step = self.step
        self.lake.fault = lambda change: self.faults.pop(0) if self.faults else None
        self.faults: list[Fault | None] = []
        self.events: list[tuple[str, str]] = []
        self.foreign = 0
        self.epoch = 1
        self.busy = False

    def step(self, step: str) -> None:
        """What happens at a step of a round; what happens there has steps of its own, at which nothing does."""
        while not self.busy and (due := [e for e in self.events if e[0] == step]):
            self.events.remove(due[0])
            event = due[0][1]
            if event == "crash" and step != "read":
                raise Killed
            if event == "down" and step in ("load", "commit"):
                raise UnavailableError("down")
            self.busy, faults, self.faults = True, self.faults, []
            try:
                self.disturb(event)
            finally:
                self.busy, self.faults = False, faults

    def disturb(self, event: str) -> None:
        if event == "rival":
            self.tier(self.epoch)
        elif event == "trim":
            self.trim()
        elif event == "append" and not self.desc.keyed:
            self.foreign += 1
            self.lake.append_foreign([{"id": -1, "code": 0, "v": 0}])
        elif event in ("compact", "backwards"):
            self.lake.rewrite_foreign(backwards=event == "backwards")
        elif event == "delete":
            self.delete_by_others()
        elif event == "expire":
            current = self.lake._known().current_id
            self.lake.forget(*(i for i in self.lake.snapshot_ids() if i != current), files=True)
        elif event == "maintenance":
            self.maintain()
        elif event == "clean":
            self.lake.clean_up()
        elif event == "late":
            self.lake.deliver()

    def maintain(self) -> None:
        """What the service of the newest epoch does between rounds."""
        env = dataclasses.replace(Env.system(), clock=Instant(), randomness=self.randomness)
        with contextlib.suppress(*EXPECTED):
            compact(self.lake, self.desc, env, epoch=self.epoch)
            expire(self.lake, Retention(1, 0), clock=Instant(), in_use=tuple)

    def delete_by_others(self) -> None:
        """Rows that are gone stop every round, until whoever took them takes that back."""
        offsets = [r[OFFSET_COLUMN] for r in self.lake.rows() if r[OFFSET_COLUMN] is not None]
        if offsets:
            before = self.lake._known().current_id
            assert before is not None
            self.lake.delete_foreign(lambda r: r[OFFSET_COLUMN] == min(offsets))
            with pytest.raises(LakeStateError, match="roll it back"):
                self.tier(self.epoch)
            self.lake.roll_back(before)

    def trim(self) -> None:
        """What servers do: never above what the lake holds."""
        mark = mark_of(self.lake.load())
        for tablet, offset in (mark.offsets if mark else {}).items():
            self.log.trim(tablet, offset)

    def tier(self, epoch: int, records_max: int | None = None) -> bool:
        try:
            run_round(
                self.lake,
                self.desc,
                self.log,
                dataclasses.replace(Env.system(), clock=Instant(), randomness=self.randomness),
                epoch=epoch,
                rows_per_task=5,
                records_max=records_max,
            )
        except EXPECTED:
            return False
        return True

    # ---- rules --------------------------------------------------------------------------------------------------

    @rule(ids=ids, v=st.integers(0, 99))
    def write(self, ids: list[int], v: int) -> None:
        self.log.write([{"id": i, "code": i, "v": v} for i in ids])

    @precondition(lambda self: self.desc.keyed)
    @rule(ids=ids)
    def delete(self, ids: list[int]) -> None:
        self.log.delete([{"id": i, "code": i} for i in ids])

    @rule(
        ids=ids,
        events=events,
        faults=faults,
        newer=st.booleans(),
        asleep=st.booleans(),
        records_max=st.none() | st.integers(1, 8),
    )
    def round(
        self,
        ids: list[int],
        events: list[tuple[str, str]],
        faults: list[Fault | None],
        newer: bool,
        asleep: bool,
        records_max: int | None,
    ) -> None:
        self.write(ids, -1)
        if newer:
            self.epoch += 1
        self.events, self.faults = list(events), list(faults)
        try:
            self.tier(self.epoch - asleep, records_max)
        except Killed:
            pass
        finally:
            self.events, self.faults = [], []

    @rule(event=st.sampled_from(DISTURBANCES))
    def disturbance(self, event: str) -> None:
        self.disturb(event)

    @rule()
    def catch_up(self) -> None:
        assert self.tier(self.epoch)
        mark = mark_of(self.lake.load())
        tiered = mark.offsets if mark else {}
        assert all(tiered.get(k, 0) == at.high_watermark for k, at in self.log.watermarks().items())

    # ---- what always holds --------------------------------------------------------------------------------------

    @invariant()
    def the_lake_is_the_log_up_to_its_mark(self) -> None:
        if not hasattr(self, "lake"):
            return
        mark = mark_of(self.lake.load())
        tiered = mark.offsets if mark else {}
        expected = {(k, o) for k, log in self.log._logs.items() for o in live(log.records[: tiered.get(k, 0)])}
        rows = self.lake.rows()
        held = [(TabletKey("", r["__bucket"]), r[OFFSET_COLUMN]) for r in rows if r[OFFSET_COLUMN] is not None]
        assert len(held) == len(set(held)) and set(held) == expected
        assert len(rows) - len(held) == self.foreign
        assert self.lake.reachable() <= self.lake.stored(), "snapshots name files that are gone"
        assert all(at.log_start <= tiered.get(k, 0) for k, at in self.log.watermarks().items())


def live(records: list[dict[str, Any]]) -> set[int]:
    """Offsets of the rows that a changelog leaves."""
    out: set[int] = set()
    for r in records:
        if r["__change_type"] in (ChangeType.UPDATE_AFTER, ChangeType.DELETE):
            out.discard(r[PREV_OFFSET_COLUMN])
        if r["__change_type"] in (ChangeType.APPEND, ChangeType.INSERT, ChangeType.UPDATE_AFTER):
            out.add(r[OFFSET_COLUMN])
    return out


TestRounds = Rounds.TestCase
TestRounds.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
