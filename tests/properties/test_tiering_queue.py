"""Random histories of a tiering queue: tables come, go and are made again, are fenced, fail; the server goes away.

A model plays the shell on a virtual clock, with one or several turns at once, and holds the queue to its promises.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from lakehead.tiering.queue import (
    FENCED_SECONDS,
    LOOK_SECONDS,
    RETRY_SECONDS,
    End,
    Event,
    Failed,
    Fenced,
    FoundTable,
    Gone,
    Instruction,
    Look,
    Looked,
    MaintenanceEnded,
    RoundEnded,
    RunMaintenance,
    RunRound,
    ServerAway,
    Stopped,
    TieringQueue,
    Turn,
    Wait,
    Woken,
)

SEEDS = int(os.environ.get("LAKEHEAD_MODEL_EXAMPLES", "20"))


@dataclass
class Model:
    """A table of the model: how far its log and its lake are, and since when the lake lacks its oldest row."""

    found: FoundTable
    seconds: float
    end: int = 0
    lake: int = 0
    fenced_until: float = 0.0
    known: bool = True
    lacks: list[tuple[float, int]] = field(default_factory=list)


class Shell:
    """Carries out what the queue says on a virtual clock, and checks each step."""

    def __init__(self, seed: int, turns_at_once: int) -> None:
        self.random = random.Random(seed)
        self.queue = TieringQueue(turns_at_once=turns_at_once)
        self.turns_at_once = turns_at_once
        self.now = 0.0
        self.tables: dict[str, Model] = {}
        self.away = False
        self.trouble = 0.3
        self.ids = itertools.count()
        self.order = itertools.count()
        self.under_way: set[Turn] = set()
        self.ending: list[tuple[float, int, Look | Turn, int]] = []
        self.wait: Wait | End = Wait(0.0)
        self.fenced: dict[str, float] = {}
        self.began: Counter[str] = Counter()
        self.late: list[str] = []
        # Of each table that is due: how many turns each other one had begun then.
        self.due_since: dict[str, Counter[str]] = {}

    # ---- the world ----------------------------------------------------------------------------------------------

    def create(self, name: str, freshness: float, seconds: float, *, maintained: bool) -> None:
        found = FoundTable(f"{name}#{next(self.ids)}", name, freshness, maintained, None)
        self.tables[name] = Model(found, seconds)

    def create_any(self, name: str) -> None:
        freshness, seconds = self.random.choice([0.5, 2.0, 30.0]), self.random.choice([0.01, 0.2, 3.0])
        self.create(name, freshness, seconds, maintained=self.random.random() < 0.5)

    def write(self, model: Model) -> None:
        model.end += 1
        model.lacks.append((self.now, model.end))

    def by_id(self, table_id: str) -> Model | None:
        return next((t for t in self.tables.values() if t.found.table_id == table_id), None)

    def happen(self) -> None:
        """Something that the queue is not told."""
        name = f"t{self.random.randrange(6)}"
        model = self.tables.get(name)
        if model is None:
            self.create_any(name)
            return
        match self.random.choice(["write", "write", "write", "drop", "again", "rename", "fence", "server"]):
            case "write":
                self.write(model)
            case "drop":
                del self.tables[name]
            case "again":
                self.create_any(name)
            case "rename":
                other = f"t{self.random.randrange(6)}"
                if other not in self.tables:
                    del self.tables[name]
                    model.found = replace(model.found, name=other)
                    self.tables[other] = model
            case "fence":
                model.fenced_until = self.now + self.random.choice([1.0, 100.0])
            case "server":
                self.away = not self.away
                for table in self.tables.values():
                    table.known = False

    # ---- the shell ----------------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        *instructions, self.wait = self.queue.handle(event, self.now)
        for instruction in instructions:
            self.begin(instruction)
        for table_id, queued in self.queue.tables.items():
            if queued.due <= self.now and queued.has_news and not self.runs(table_id, RunRound):
                self.due_since.setdefault(table_id, self.began.copy())
        for table_id in self.due_since.keys() - self.queue.tables.keys():
            del self.due_since[table_id]

    def begin(self, instruction: Instruction) -> None:
        took = self.random.random() * 0.01
        if not isinstance(instruction, Look):
            assert isinstance(instruction, RunRound | RunMaintenance), instruction
            table_id = instruction.table_id
            assert not self.runs(table_id, type(instruction)), "two turns of a kind of one table"
            assert self.fenced.get(table_id, 0.0) <= self.now, "a fenced table came back"
            assert len(self.under_way) < self.turns_at_once
            self.under_way.add(instruction)
            model = self.by_id(table_id)
            took = model.seconds if model is not None else 0.1
            self.count(instruction)
            heapq.heappush(
                self.ending, (self.now + took, next(self.order), instruction, model.end if model is not None else 0)
            )
            return
        heapq.heappush(self.ending, (self.now + took, next(self.order), instruction, 0))

    def runs(self, table_id: str, kind: type[Turn]) -> bool:
        return any(t.table_id == table_id and isinstance(t, kind) for t in self.under_way)

    def count(self, turn: Turn) -> None:
        """No table waits while another has more than two turns, which are a round and a maintenance."""
        self.due_since.pop(turn.table_id, None) if not isinstance(turn, RunMaintenance) else None
        self.began[turn.table_id] += 1
        for waiting, since in self.due_since.items():
            turns = self.began[turn.table_id] - since[turn.table_id]
            assert turns <= 2, f"{waiting} waits while {turn.table_id} has {turns} turns"

    def end(self, instruction: Look | Turn, seen: int) -> Event:
        if isinstance(instruction, Look):
            if self.away:
                return ServerAway()
            mine = [t for t in self.tables.values() if t.found.table_id not in instruction.without]
            return Looked(tuple(replace(t.found, end=t.end if t.known else None) for t in mine))
        table_id = instruction.table_id
        self.under_way.remove(instruction)
        model, maintenance = self.by_id(table_id), isinstance(instruction, RunMaintenance)
        if model is None:
            return Gone(table_id, maintenance)
        if self.away or self.random.random() < self.trouble / 3:
            return Failed(table_id, maintenance)
        if isinstance(instruction, RunMaintenance):
            return MaintenanceEnded(table_id)
        if model.fenced_until > self.now:
            self.fenced[table_id] = self.now + FENCED_SECONDS
            return Fenced(table_id)
        model.known = True
        moved, model.lake = seen > model.lake, seen
        for written, offset in [w for w in model.lacks if w[1] <= seen]:
            model.lacks.remove((written, offset))
            if self.now - written > model.found.freshness:
                self.late.append(f"{table_id}: a row was {self.now - written:.3f} s old")
        return RoundEnded(table_id, seen, moved)

    def step(self) -> bool:
        """The next thing that happens; False when the queue has ended."""
        if isinstance(self.wait, End):
            assert not self.ending
            return False
        if self.ending and self.ending[0][0] <= self.wait.until:
            self.now, _, instruction, seen = heapq.heappop(self.ending)
            event = self.end(instruction, seen)
        else:
            assert self.wait.until >= self.now, "it waits for what has been"
            self.now, event = self.wait.until, Woken()
        self.tell(event)
        return True

    def run(self, seconds: float, *, happenings: float = 0.0) -> None:
        until = self.now + seconds
        while self.now < until and self.step():
            if self.random.random() < happenings:
                self.happen()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_promises_hold_in_any_history(seed: int) -> None:
    shell = Shell(seed, turns_at_once=1 + seed % 3)
    shell.tell(Woken())
    shell.run(150, happenings=0.3)
    shell.away, shell.trouble = False, 0.0
    shell.run(2 * LOOK_SECONDS + RETRY_SECONDS[1] + 100 + FENCED_SECONDS + 30 + 6 * 3 * 3)
    for model in shell.tables.values():
        assert model.found.table_id in shell.queue.tables
        assert model.lake == model.end, f"{model.found.table_id} is never tiered"
    assert not shell.queue.fenced
    shell.tell(Stopped())
    while shell.step():
        pass
    assert not shell.under_way


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_table_is_in_time_when_there_is_room(seed: int) -> None:
    shell = Shell(seed, turns_at_once=8)
    shell.trouble = 0.0
    for n in range(8):
        freshness = shell.random.choice([0.5, 2.0, 30.0])
        seconds = freshness * shell.random.choice([0.01, 0.1, 0.4])
        shell.create(f"t{n}", freshness, seconds, maintained=False)
        shell.write(shell.tables[f"t{n}"])  # how long its rounds take is learnt from the first
    shell.tell(Woken())
    for _ in range(400):
        shell.run(0.1)
        shell.write(shell.random.choice(list(shell.tables.values())))
    shell.run(60)
    assert not shell.late
