"""Wall clocks that leap, while rows are written, trimmed by age, found by time, and processes stop or die.

The truth is a clock that never leaps. Rows must not leave the log before their time, must leave it soon after, and must
be found from the time at which they were written.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pyarrow as pa
import pytest

from lakehead.config import TableProperties
from lakehead.env import Env, SystemRandomness, SystemThreads
from lakehead.env.clock import SteadyClock
from lakehead.env.interrupts import Latch
from lakehead.errors import ClosedError
from lakehead.format.frame import WriterStamp, encode_body
from lakehead.server.group_commit import PendingWrite
from lakehead.server.tablet import Tablet
from lakehead.testing.storage import FaultyStorage
from lakehead.types import Schemas, TableDescriptor, TablePath, TabletKey

SCHEMA = pa.schema([("n", pa.int64())])
SECOND = 1_000_000
HOUR, DAY = 3600, 86_400
RETENTION = 1800
TURN = 10
START = 1_700_000_000 * SECOND


class Leaping:
    """The clocks of a machine.

    Attributes:
        true: seconds that have passed.
        error: seconds by which the wall clock is wrong.
    """

    def __init__(self) -> None:
        self.true = 0.0
        self.error = 0.0

    def now_us(self) -> int:
        return START + int((self.true + self.error) * SECOND)

    def monotonic(self) -> float:
        return self.true

    def sleep(self, seconds: float) -> None:
        raise AssertionError("no one waits here")


class Machine:
    """One tablet of a log table without a lake, and what is true of its rows."""

    def __init__(self) -> None:
        self.clock = Leaping()
        self.storage = FaultyStorage()
        self.written: list[float] = []
        self.behind = 0.0
        self.early = 0.0
        self.tablet = self.open()

    def open(self) -> Tablet:
        properties = TableProperties(segment_bytes=1500, log_ttl_ms=RETENTION * 1000)
        desc = TableDescriptor("t", TablePath("a", "t"), Schemas.only(SCHEMA), (), (), (), 1, None, properties)

        def none_beside(work: Callable[[], None]) -> None:
            raise RuntimeError

        self.steady = SteadyClock(self.clock)
        return Tablet(
            desc, TabletKey("", 0), folder="/t",
            env=Env(self.steady, self.storage, SystemRandomness(), SystemThreads()),
            on_progress=lambda: None, run_in_background=none_beside, seed=1, moment=threading.Lock(),
        )  # fmt: skip

    def write(self) -> None:
        at = len(self.written)
        batch = pa.RecordBatch.from_pydict({"n": [at]}, schema=SCHEMA)
        body = encode_body(batch, schema_id=0, stamp=WriterStamp(at.to_bytes(16, "little"), 0))
        write = PendingWrite("append", body, None, Latch())
        if self.tablet.submit(write):
            self.tablet.drive()
        assert write.wait() == (at, at + 1)
        self.written.append(self.clock.true)

    def pass_time(self, seconds: float, *, writes: bool = True) -> None:
        end = self.clock.true + seconds
        while self.clock.true < end:
            step = min(TURN, end - self.clock.true)
            self.clock.true += step
            self.behind += step if self.clock.error < 0 else 0
            if writes:
                self.write()
            before = self.tablet.log_start_offset
            self.tablet.maintain(self.steady.now_us(), RETENTION * SECOND, None)
            for at in range(before, self.tablet.log_start_offset):
                self.early = max(self.early, RETENTION - (self.clock.true - self.written[at]))

    def stop(self) -> None:
        self.tablet.close(ClosedError("stopped"))
        self.tablet = self.open()

    def die(self) -> None:
        self.storage.crash()
        self.tablet = self.open()

    def found_since(self, seconds: float) -> int:
        """First offset from a time that long ago, by the wall clock."""
        return self.found(self.steady.now_us() - int(seconds * SECOND))

    def found(self, at_us: int) -> int:
        at = self.tablet.offset_at(at_us)
        return self.tablet.log_start_offset if at is None else at

    def stamps(self) -> list[int]:
        """The timestamp of each row that is in the log."""
        frames = self.tablet.frames(self.tablet.log_start_offset, self.tablet.high_watermark)
        return [frame.timestamp_us for frame in frames for _ in range(frame.base_offset, frame.end_offset)]

    def stamped_since(self, seconds: float) -> int:
        return self.stamped(self.steady.now_us() - int(seconds * SECOND))

    def stamped(self, at_us: int) -> int:
        return self.tablet.log_start_offset + sum(stamp < at_us for stamp in self.stamps())

    def truly_since(self, seconds: float) -> int:
        return sum(written < self.clock.true - seconds for written in self.written)


def leap(machine: Machine, chance: random.Random, sizes: list[int], seconds: float) -> None:
    """The wall clock is wrong for that long."""
    machine.clock.error = chance.choice(sizes)
    machine.pass_time(seconds)
    machine.clock.error = 0


@pytest.mark.parametrize("seed", range(12))
def test_rows_do_not_leave_before_their_time(seed: int) -> None:
    """Leaps ahead that last less than a minute; any back, and from there to the right time."""
    chance, machine = random.Random(seed), Machine()
    machine.pass_time(chance.randint(20, 900))
    restarts = seed % 3
    for _ in range(4):
        if chance.random() < 0.5:
            leap(machine, chance, [HOUR, DAY, 365 * DAY], chance.choice([TURN, 40]))
        else:
            leap(machine, chance, [-HOUR, -DAY, -365 * DAY], chance.choice([TURN, 300, 2 * HOUR]))
        machine.pass_time(chance.choice([70, RETENTION]))
        if restarts:
            machine.stop() if restarts == 1 else machine.die()
    # What a restart forgets is by how much rows of a time with a clock behind are younger than they say.
    assert machine.early <= (machine.behind if restarts else TURN + 1)


@pytest.mark.parametrize("seed", range(12))
def test_rows_leave_and_are_found_whatever_the_clock_did(seed: int) -> None:
    chance, machine = random.Random(seed), Machine()
    for _ in range(3):
        machine.pass_time(chance.choice([30, 600]))
        leap(machine, chance, [s * d for s in (1, -1) for d in (HOUR, DAY, 365 * DAY)], chance.choice([20, 90, HOUR]))
        if chance.random() < 0.6:
            chance.choice([machine.stop, machine.die])()
    machine.pass_time(600)
    for seconds in (0, 5, 60, 300, 500):
        found, truly = machine.found_since(seconds), machine.truly_since(seconds)
        assert truly - 4 <= found <= truly, seconds
    assert machine.found_since(-HOUR) == machine.stamped_since(-HOUR), "by their own timestamps"
    [lag] = [machine.tablet.timestamp_at(len(machine.written) - 10)]
    assert lag is not None and 80 <= (machine.steady.now_us() - lag) / SECOND <= 130
    machine.pass_time(RETENTION + 700)
    assert machine.truly_since(RETENTION + 650) <= machine.tablet.log_start_offset <= machine.truly_since(RETENTION)
    machine.pass_time(RETENTION + 700, writes=False)
    assert machine.tablet.log_start_offset == machine.tablet.high_watermark == len(machine.written)


@pytest.mark.parametrize("seed", range(12))
def test_a_row_is_found_by_its_own_timestamp_however_clocks_are_set(seed: int) -> None:
    """By up to a minute; by more while the timestamp lies ahead."""
    chance, machine = random.Random(seed), Machine()
    for _ in range(6):
        machine.pass_time(chance.choice([20, 200]))
        machine.clock.error = chance.choice([-29, -2, -0.5, 0, 2, 29] if seed % 2 else [-HOUR, -50, 50, HOUR])
        for writes in (False, True):
            ahead = machine.steady.now_us() if seed % 2 == 0 else 0
            for stamp in [s for s in machine.stamps() if s > ahead][:: chance.randint(1, 5)]:
                assert machine.found(stamp) <= machine.stamped(stamp)
            machine.pass_time(TURN, writes=writes)


@pytest.mark.parametrize("kind", ["rows came meanwhile", "none did"])
def test_a_turn_that_began_before_rows_came_says_nothing_of_them(kind: str) -> None:
    """What a lake's catalog takes to answer lies between a turn's beginning and what it does to a tablet."""
    machine = Machine()
    machine.pass_time(60)
    began = machine.steady.now_us()
    machine.clock.true += 5
    if kind == "rows came meanwhile":
        machine.write()
    machine.tablet.maintain(began, RETENTION * SECOND, None)
    machine.clock.true += 5
    machine.write()
    assert machine.found_since(9) == machine.truly_since(9)
    assert machine.found_since(4) == machine.truly_since(4)
