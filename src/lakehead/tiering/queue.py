"""Which table gets what, and when: all that a tiering service decides, without a clock, thread, connection or engine.

`TieringQueue.handle` takes what happened and the time, and returns what is to be done now; a shell does it
(`lakehead.tiering.service`) and says how it ended. Tables are known by id: one that is dropped and created again under
its name is another table. It holds that

- one question tells which tables there are and which have news, however many they are;
- a table is due so long before its freshness runs out as its rounds have lately taken;
- whoever is due longest goes next, so that nobody waits for more than one turn of each other table;
- a table has one round at a time, and one maintenance, which may run side by side;
- a round takes no more of a long log than a share of the least freshness allows, so that no backlog makes others late;
- an error of one table delays that table alone;
- a table that another service has taken over is left to it for a while.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

LOOK_SECONDS = 1.0
"""How soon a table that is created joins the queue, and how often a server that is away is asked for."""
LOOK_SHARE = 0.1
"""Of the least freshness of all tables, what lies between two questions at least."""
LOOK_SECONDS_MIN = 0.02
"""However small that is."""
RETRY_SECONDS = (0.5, 60.0)
"""Delay after the first failure of a table, doubled with each until the greatest."""
FENCED_SECONDS = 10.0
"""So long is a table left to the service that has taken it over; a server that knows both gives it to one of them."""
IDLE_SHARE = 0.2
"""Least part of a table's freshness between the starts of two rounds, however long they take."""
ROUND_SHARE = 0.5
"""Of the least freshness of all tables, what a round that leaves records behind should take, at most."""
ROUND_SECONDS_MIN = 0.5
"""However small that is: shorter rounds of a long log would be commits for the most part."""
ROUND_RECORDS = (1 << 17, 1 << 20)
"""Least and first number of records that a round takes if there are as many."""
RECORDS_FACTOR_MAX = 4.0
"""By how much it changes from one round to the next."""
MAINTENANCE_SECONDS = 60.0
"""From the first round that moved rows to the maintenance that looks at what it and those after it made, at most."""
MAINTENANCE_ROUNDS = 20
"""So many rounds that moved rows do not wait for it."""


@dataclass(frozen=True)
class FoundTable:
    """A table of this service, as a server describes it.

    Attributes:
        freshness: seconds.
        maintained: whether it gets maintenance beside rounds.
        end: how far its lake can follow: where its log ends and was overwritten, the sum of all tablets; None: not
            known.
        folder: whose logs these are; a folder that was put back may count to what the one before did.
    """

    table_id: str
    name: str
    freshness: float
    maintained: bool
    end: int | None
    folder: str = ""


# ---- what happens ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Woken:
    """Time has passed."""


@dataclass(frozen=True)
class Looked:
    """The end of `Look`: all tables that are the service's now."""

    tables: tuple[FoundTable, ...]


@dataclass(frozen=True)
class ServerAway:
    """The end of `Look`: nobody answered, or not us."""


@dataclass(frozen=True)
class RoundEnded:
    """The end of `RunRound`.

    Attributes:
        end: how far the lake has followed, counted as that of `FoundTable`.
        moved: whether there was something to move.
        more: whether it left records behind that were there.
    """

    table_id: str
    end: int
    moved: bool
    more: bool = False


@dataclass(frozen=True)
class MaintenanceEnded:
    """The end of `RunMaintenance`.

    Attributes:
        more: whether it stopped for others' sake, with more to do.
    """

    table_id: str
    more: bool = False


@dataclass(frozen=True)
class Failed:
    """A round of the table, or its maintenance, failed; a later try may succeed.

    Attributes:
        late: only because others committed first, who may be done by now.
    """

    table_id: str
    maintenance: bool = False
    late: bool = False


@dataclass(frozen=True)
class Fenced:
    """Another service tiers the table, as a round or its maintenance found."""

    table_id: str
    maintenance: bool = False


@dataclass(frozen=True)
class Gone:
    """No table has this id any more, as a round or its maintenance found."""

    table_id: str
    maintenance: bool = False


@dataclass(frozen=True)
class Stopped:
    """Nothing more is to begin."""


TurnEnded: TypeAlias = RoundEnded | MaintenanceEnded | Failed | Fenced | Gone
Event: TypeAlias = Woken | Looked | ServerAway | TurnEnded | Stopped


# ---- what is to be done ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """Ask which tables are the service's, and where their logs end; ends with `Looked` or `ServerAway`.

    Attributes:
        has: ids of tables that it may be working on.
        without: ids of tables that it leaves to others.
    """

    has: frozenset[str]
    without: frozenset[str]


@dataclass(frozen=True)
class RunRound:
    """Run one tiering round of so many records at most; ends as any `TurnEnded`."""

    table_id: str
    records_max: int


@dataclass(frozen=True)
class RunMaintenance:
    """Compact and expire what the table's lake has gathered; ends as any `TurnEnded`."""

    table_id: str


@dataclass(frozen=True)
class Wait:
    """Come back with `Woken` at this time, or with anything that happens before."""

    until: float


@dataclass(frozen=True)
class End:
    """Nothing is under way, and nothing will be."""


Turn: TypeAlias = RunRound | RunMaintenance
Instruction: TypeAlias = Look | Turn | Wait | End


@dataclass(eq=False)
class QueuedTable:
    """A table in the queue, for others to read.

    Attributes:
        table: as it was last found.
        due: when its next round begins if it has news, and nobody is due longer.
        maintain_at: when maintenance does; None while there is nothing to look at.
        lake_end: how far the lake held the log after the last round; None: not known.
        expected: seconds that its rounds have lately taken.
        failures: in a row.
        rounds: that moved rows since the last maintenance, or the last try.
        records_max: what the next round takes at most.
    """

    table: FoundTable
    due: float
    maintain_at: float | None = None
    lake_end: int | None = None
    expected: float = 0.0
    failures: int = 0
    rounds: int = 0
    records_max: int = ROUND_RECORDS[1]

    @property
    def has_news(self) -> bool:
        """Whether the log has, or may have, what the lake lacks."""
        end = self.table.end
        return self.lake_end is None or end is None or end > self.lake_end

    def turns(self) -> list[tuple[float, Turn]]:
        """What is to be done with it, and when."""
        turns: list[tuple[float, Turn]] = []
        if self.has_news:
            turns.append((self.due, RunRound(self.table.table_id, self.records_max)))
        if self.maintain_at is not None:
            turns.append((self.maintain_at, RunMaintenance(self.table.table_id)))
        return turns


class TieringQueue:
    """The queue of one tiering service; used by one thread at a time.

    Args:
        turns_at_once: so many rounds and maintenances run at the same time.
        maintenance_at_once: so many maintenances of these, at most; None: as many.
        look_seconds: instead of `LOOK_SECONDS`.
        retry_seconds: instead of `RETRY_SECONDS`.
        maintenance_rounds: instead of `MAINTENANCE_ROUNDS`.
    """

    def __init__(
        self,
        *,
        turns_at_once: int = 1,
        maintenance_at_once: int | None = None,
        look_seconds: float = LOOK_SECONDS,
        retry_seconds: tuple[float, float] = RETRY_SECONDS,
        maintenance_rounds: int = MAINTENANCE_ROUNDS,
    ) -> None:
        self.look_seconds = look_seconds
        self.turns_at_once = turns_at_once
        self._maintenance_at_once = maintenance_at_once or turns_at_once
        self._retry_seconds = retry_seconds
        self._maintenance_rounds = maintenance_rounds
        self._tables: dict[str, QueuedTable] = {}
        self._fenced: dict[str, float] = {}
        self._under_way: dict[_Key, float] = {}
        self._looking = False
        self._asked_at = self._answered_at = -math.inf
        self._away = False
        self._stopped = False

    @property
    def tables(self) -> Mapping[str, QueuedTable]:
        """Tables that are tiered, by id."""
        return self._tables

    @property
    def fenced(self) -> frozenset[str]:
        """Ids of tables that are left to other services for now."""
        return frozenset(self._fenced)

    @property
    def away(self) -> bool:
        """Whether the last question had no answer."""
        return self._away

    def retry_delay(self, failures: int) -> float:
        """Seconds until a table is tried again that failed so many times in a row."""
        first, greatest = self._retry_seconds
        return min(first * 2.0 ** min(failures - 1, 16), greatest)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take in what happened, and decide.

        Args:
            now: seconds on a clock that never goes back.

        Returns:
            What to begin now, in this order, and last `Wait`, which replaces the one before, or `End`.
        """
        match event:
            case Woken():
                pass
            case Stopped():
                self._stopped = True
            case Looked():
                self._looked(event, now)
            case ServerAway():
                self._away, self._looking, self._answered_at = True, False, now
            case _:
                self._turn_ended(event, now)
        return [*self._due(now), self._wait()]

    # ---- tables -------------------------------------------------------------------------------------------------

    def _looked(self, event: Looked, now: float) -> None:
        self._looking, self._answered_at = False, now
        if self._away:
            self._away = False
            self._server_back(now)
        for table in event.tables:
            self._take_up(table, now)
        for table_id in self._tables.keys() - {t.table_id for t in event.tables}:
            del self._tables[table_id]
        # Those that are due soon would ask the same again.
        soon = now + self._pause()
        for table_id, queued in self._tables.items():
            if queued.due <= soon and (table_id, False) not in self._under_way and not queued.has_news:
                queued.failures = 0
                queued.due = self._asked_at + budget(queued.table.freshness, queued.expected)

    def _server_back(self, now: float) -> None:
        """Nobody waits any longer for a server that answers again."""
        for queued in self._tables.values():
            if queued.failures:
                queued.due, queued.failures = min(queued.due, now), 0

    def _take_up(self, table: FoundTable, now: float) -> None:
        queued = self._tables.get(table.table_id)
        if queued is not None:
            if table.freshness < queued.table.freshness:
                queued.due = min(queued.due, now + budget(table.freshness, queued.expected))
            if table.folder != queued.table.folder:
                queued.lake_end = None
            queued.table = table
        elif table.table_id not in self._fenced:
            self._tables[table.table_id] = QueuedTable(table, now)

    # ---- turns --------------------------------------------------------------------------------------------------

    def _turn_ended(self, event: TurnEnded, now: float) -> None:
        began = self._under_way.pop(_key(event), None)
        if isinstance(event, Fenced):
            self._fenced[event.table_id] = now + FENCED_SECONDS
        if isinstance(event, Fenced | Gone):
            self._tables.pop(event.table_id, None)
        queued = self._tables.get(event.table_id)
        if began is None or queued is None:
            return  # let go while it was under way
        match event:
            case Failed() if event.maintenance:
                queued.maintain_at = now + MAINTENANCE_SECONDS
                queued.rounds = 0
            case Failed():
                queued.failures += 1
                queued.lake_end = None
                queued.due = now + self.retry_delay(1 if event.late else queued.failures)
            case MaintenanceEnded():
                queued.maintain_at = now if event.more else None
                queued.rounds = 0
            case RoundEnded():
                self._round_ended(queued, event, began, now)

    def _round_ended(self, queued: QueuedTable, event: RoundEnded, began: float, now: float) -> None:
        queued.failures = 0
        queued.lake_end = event.end
        if queued.table.end is None:
            queued.table = replace(queued.table, end=event.end)
        if event.moved:
            took = now - began
            queued.expected = took if took > queued.expected else (queued.expected + took) / 2
            queued.rounds += 1
            if queued.table.maintained and queued.maintain_at is None:
                queued.maintain_at = now + MAINTENANCE_SECONDS
            if queued.maintain_at is not None and queued.rounds >= self._maintenance_rounds:
                queued.maintain_at = min(queued.maintain_at, now)
        queued.due = began + budget(queued.table.freshness, queued.expected)
        if event.more:
            queued.lake_end, queued.due = None, now
            share = self._round_seconds() / max(now - began, 1e-3)
            factor = min(max(share, 1 / RECORDS_FACTOR_MAX), RECORDS_FACTOR_MAX)
            queued.records_max = max(int(queued.records_max * factor), ROUND_RECORDS[0])

    def _round_seconds(self) -> float:
        return max(ROUND_SHARE * self._least_freshness(), ROUND_SECONDS_MIN)

    def _least_freshness(self) -> float:
        return min((q.table.freshness for q in self._tables.values()), default=0.0)

    # ---- what is due --------------------------------------------------------------------------------------------

    def _due(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        if self._stopped:
            return out
        if self._look_at() <= now:
            self._fenced = {i: until for i, until in self._fenced.items() if until > now}
            self._looking, self._asked_at = True, now
            has = frozenset(self._tables) | {table_id for table_id, _ in self._under_way}
            out.append(Look(has, frozenset(self._fenced)))
        while (following := self._next()) is not None and following[0] <= now:
            self._under_way[_key(following[1])] = now
            out.append(following[1])
        return out

    def _look_at(self) -> float:
        """When to ask for news: when a table is due of which none is known, but not all the time."""
        if self._looking:
            return math.inf
        latest = self._answered_at + self.look_seconds
        waiting = [q.due for i, q in self._tables.items() if (i, False) not in self._under_way and not q.has_news]
        if self._away or not waiting:
            return latest
        return min(max(min(waiting), self._answered_at + self._pause()), latest)

    def _pause(self) -> float:
        return max(LOOK_SHARE * self._least_freshness(), LOOK_SECONDS_MIN)

    def _next(self) -> tuple[float, Turn] | None:
        """The turn that is due first, of those that are not under way; None when no more may be."""
        if len(self._under_way) >= self.turns_at_once:
            return None
        maintained = sum(maintenance for _, maintenance in self._under_way)
        kinds = RunRound if maintained >= self._maintenance_at_once else Turn
        turns = (t for q in self._tables.values() for t in q.turns() if _key(t[1]) not in self._under_way)
        return min((t for t in turns if isinstance(t[1], kinds)), key=lambda turn: turn[0], default=None)

    def _wait(self) -> Wait | End:
        if self._stopped:
            return Wait(math.inf) if self._under_way or self._looking else End()
        following = self._next()
        return Wait(min(self._look_at(), math.inf if following is None else following[0]))


_Key: TypeAlias = tuple[str, bool]
"""A table's id, and whether it is its maintenance."""


def _key(of: Turn | TurnEnded) -> _Key:
    maintenance = isinstance(of, RunMaintenance | MaintenanceEnded) or getattr(of, "maintenance", False)
    return of.table_id, maintenance


def budget(freshness: float, expected: float) -> float:
    """Seconds from the start of a round to that of the next, so that a row which the first just missed is in the lake
    before it is ``freshness`` old, if the next takes half as long again as ``expected``."""
    return max(freshness - 1.5 * expected - LOOK_SHARE * freshness, IDLE_SHARE * freshness)
