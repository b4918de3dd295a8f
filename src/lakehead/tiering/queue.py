"""Which table gets what, and when: all that a tiering service decides, without a clock, thread, connection or engine.

`TieringQueue.handle` takes what happened and the time, and returns what is to be done now; a shell does it
(`lakehead.tiering.service`) and says how it ended. Tables are known by id: one that is dropped and created again under
its name is another table. It holds that

- a table is due so long before its freshness runs out as its rounds have lately taken;
- whoever is due longest goes next, so that nobody waits for more than one turn of each other table;
- nothing is done to a table while something else is;
- a round takes no more of a long log than a share of the least freshness allows, so that no backlog makes others late;
- an error of one table delays that table alone;
- a table that a newer service has taken over never comes back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from lakehead.types import TabletKey

RELIST_SECONDS = 2.0
"""How soon a table that is created joins the queue, and how often a server that is away is asked for."""
LOOKUPS_MAX = 100
"""So many tables whose names are known are looked up again with each listing."""
RETRY_SECONDS = (0.5, 60.0)
"""Delay after the first failure of a table, doubled with each until the greatest."""
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
class ListedTable:
    """A table as the server defines it.

    Attributes:
        freshness: seconds.
        has_lake: those without are not tiered.
        maintained: whether it gets maintenance beside rounds.
    """

    table_id: str
    name: str
    freshness: float
    has_lake: bool
    maintained: bool


# ---- what happens ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Woken:
    """Time has passed."""


@dataclass(frozen=True)
class Listed:
    """The end of `ListTables`.

    Attributes:
        names: of all tables there are.
        tables: those that were looked up; a name that could not be is left out, and looked up again next time.
    """

    names: frozenset[str]
    tables: tuple[ListedTable, ...]


@dataclass(frozen=True)
class ServerAway:
    """The end of `ListTables`: nobody answered, or not us."""


@dataclass(frozen=True)
class Watermarks:
    """The end of `AskWatermarks`: where the logs of the table's tablets end."""

    table_id: str
    ends: Mapping[TabletKey, int]


@dataclass(frozen=True)
class RoundEnded:
    """The end of `RunRound`.

    Attributes:
        offsets: what the lake holds now, per tablet.
        moved: whether there was something to move.
        more: whether it left records behind that were there.
    """

    table_id: str
    offsets: Mapping[TabletKey, int]
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
    """What was being done to the table failed; a later try may succeed."""

    table_id: str


@dataclass(frozen=True)
class Fenced:
    """A newer service tiers the table."""

    table_id: str


@dataclass(frozen=True)
class Gone:
    """No table has this id any more."""

    table_id: str


@dataclass(frozen=True)
class Stopped:
    """Nothing more is to begin."""


TurnEnded: TypeAlias = Watermarks | RoundEnded | MaintenanceEnded | Failed | Fenced | Gone
Event: TypeAlias = Woken | Listed | ServerAway | TurnEnded | Stopped


# ---- what is to be done ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ListTables:
    """Ask which tables there are, and look up all but the settled ones; ends with `Listed` or `ServerAway`."""

    settled: frozenset[str]


@dataclass(frozen=True)
class AskWatermarks:
    """Ask where the table's logs end; ends as any `TurnEnded`."""

    table_id: str


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


Turn: TypeAlias = AskWatermarks | RunRound | RunMaintenance
Instruction: TypeAlias = ListTables | Turn | Wait | End


@dataclass(eq=False)
class QueuedTable:
    """A table in the queue, for others to read.

    Attributes:
        due: when its next turn begins, if nobody is due longer.
        maintain_at: when maintenance does; None while there is nothing to look at.
        offsets: what the lake held after the last round; None: not known.
        expected: seconds that its rounds have lately taken.
        failures: in a row.
        rounds: that moved rows since the last maintenance, or the last try.
        records_max: what the next round takes at most.
    """

    table: ListedTable
    due: float
    maintain_at: float | None = None
    offsets: Mapping[TabletKey, int] | None = None
    expected: float = 0.0
    failures: int = 0
    rounds: int = 0
    records_max: int = ROUND_RECORDS[1]


class TieringQueue:
    """The queue of one tiering service; used by one thread at a time.

    Args:
        turns_at_once: so many tables are worked on at the same time.
        maintenance_at_once: so many of them are maintained, at most; None for all.
        relist_seconds: instead of `RELIST_SECONDS`.
        retry_seconds: instead of `RETRY_SECONDS`.
        maintenance_rounds: instead of `MAINTENANCE_ROUNDS`.
    """

    def __init__(
        self,
        *,
        turns_at_once: int = 1,
        maintenance_at_once: int | None = None,
        relist_seconds: float = RELIST_SECONDS,
        retry_seconds: tuple[float, float] = RETRY_SECONDS,
        maintenance_rounds: int = MAINTENANCE_ROUNDS,
    ) -> None:
        self.relist_seconds = relist_seconds
        self.turns_at_once = turns_at_once
        self._maintenance_at_once = maintenance_at_once or turns_at_once
        self._retry_seconds = retry_seconds
        self._maintenance_rounds = maintenance_rounds
        self._tables: dict[str, QueuedTable] = {}
        # Table ids by name, of all tables, what was looked up longest ago first.
        self._names: dict[str, str] = {}
        self._fenced: set[str] = set()
        self._under_way: dict[str, tuple[Turn, float]] = {}
        self._listing: ListTables | None = None
        self._list_at = -math.inf
        self._away = False
        self._stopped = False

    @property
    def tables(self) -> Mapping[str, QueuedTable]:
        """Tables that are tiered, by id."""
        return self._tables

    @property
    def fenced(self) -> frozenset[str]:
        """Ids of tables that were left to newer services."""
        return frozenset(self._fenced)

    @property
    def away(self) -> bool:
        """Whether the last listing failed."""
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
        instructions: list[Instruction] = []
        match event:
            case Woken():
                pass
            case Stopped():
                self._stopped = True
            case Listed():
                self._listed(event, now)
            case ServerAway():
                self._away = True
                self._listing, self._list_at = None, now + self.relist_seconds
            case _:
                instructions += self._turn_ended(event, now)
        return [*instructions, *self._due(now), self._wait()]

    # ---- tables -------------------------------------------------------------------------------------------------

    def _listed(self, event: Listed, now: float) -> None:
        settled = self._listing.settled if self._listing is not None else frozenset()
        self._listing, self._list_at = None, now + self.relist_seconds
        if self._away:
            self._away = False
            self._server_back(now)
        for name in list(self._names):
            if name not in event.names:
                del self._names[name]
            elif name not in settled:
                self._names[name] = self._names.pop(name)
        for table in event.tables:
            self._names[table.name] = table.table_id
            self._take_up(table, now)
        for table_id in self._tables.keys() - set(self._names.values()):
            del self._tables[table_id]

    def _server_back(self, now: float) -> None:
        """Nobody waits any longer for a server that answers again."""
        for queued in self._tables.values():
            if queued.failures:
                queued.due, queued.failures = min(queued.due, now), 0

    def _take_up(self, table: ListedTable, now: float) -> None:
        queued = self._tables.get(table.table_id)
        if queued is not None:
            if table.freshness < queued.table.freshness:
                queued.due = min(queued.due, now + budget(table.freshness, queued.expected))
            queued.table = table
        elif table.has_lake and table.table_id not in self._fenced:
            self._tables[table.table_id] = QueuedTable(table, now)

    # ---- turns --------------------------------------------------------------------------------------------------

    def _turn_ended(self, event: TurnEnded, now: float) -> list[Instruction]:
        """Take in how a turn ended; what it leads to at once is another turn of the same table."""
        turn, began = self._under_way.pop(event.table_id, (None, now))
        if isinstance(event, Fenced):
            self._fenced.add(event.table_id)
        if isinstance(event, Fenced | Gone):
            self._tables.pop(event.table_id, None)
        if isinstance(event, Gone):
            # Whatever has the name now is looked up with the next listing.
            self._names = {name: i for name, i in self._names.items() if i != event.table_id}
        queued = self._tables.get(event.table_id)
        if turn is None or queued is None:
            return []  # let go while it was under way
        match event:
            case Failed() if isinstance(turn, RunMaintenance):
                queued.maintain_at = now + MAINTENANCE_SECONDS
                queued.rounds = 0
            case Failed():
                queued.failures += 1
                queued.offsets = None
                queued.due = now + self.retry_delay(queued.failures)
            case MaintenanceEnded():
                queued.maintain_at = now if event.more else None
                queued.rounds = 0
            case Watermarks() if not self._stopped and _has_news(queued, event):
                return [self._begin(RunRound(event.table_id, queued.records_max), began)]
            case RoundEnded():
                self._round_ended(queued, event, began, now)
            case _:
                queued.failures = 0
                queued.due = began + budget(queued.table.freshness, queued.expected)
        return []

    def _round_ended(self, queued: QueuedTable, event: RoundEnded, began: float, now: float) -> None:
        queued.failures = 0
        queued.offsets = event.offsets
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
            queued.due = now
            share = self._round_seconds() / max(now - began, 1e-3)
            factor = min(max(share, 1 / RECORDS_FACTOR_MAX), RECORDS_FACTOR_MAX)
            queued.records_max = max(int(queued.records_max * factor), ROUND_RECORDS[0])

    def _round_seconds(self) -> float:
        least = min(q.table.freshness for q in self._tables.values())
        return max(ROUND_SHARE * least, ROUND_SECONDS_MIN)

    def _begin(self, turn: Turn, began: float) -> Turn:
        self._under_way[turn.table_id] = (turn, began)
        return turn

    # ---- what is due --------------------------------------------------------------------------------------------

    def _due(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        if self._stopped:
            return out
        if self._listing is None and self._list_at <= now:
            self._listing = ListTables(frozenset(list(self._names)[LOOKUPS_MAX:]))
            out.append(self._listing)
        while (following := self._next()) is not None and following[0] <= now:
            out.append(self._begin(following[1], now))
        return out

    def _next(self) -> tuple[float, Turn] | None:
        """The turn that is due first, of tables that have none; None when no more may be under way."""
        if len(self._under_way) >= self.turns_at_once:
            return None
        maintained = sum(isinstance(turn, RunMaintenance) for turn, _ in self._under_way.values())
        kinds = RunRound | AskWatermarks if maintained >= self._maintenance_at_once else Turn
        turns = (t for i, q in self._tables.items() if i not in self._under_way for t in _turns(i, q))
        return min((t for t in turns if isinstance(t[1], kinds)), key=lambda turn: turn[0], default=None)

    def _wait(self) -> Wait | End:
        if self._stopped:
            return Wait(math.inf) if self._under_way or self._listing is not None else End()
        following = self._next()
        listing = self._list_at if self._listing is None else math.inf
        return Wait(min(listing, math.inf if following is None else following[0]))


def _turns(table_id: str, queued: QueuedTable) -> list[tuple[float, Turn]]:
    turn: Turn = RunRound(table_id, queued.records_max) if queued.offsets is None else AskWatermarks(table_id)
    turns = [(queued.due, turn)]
    return turns if queued.maintain_at is None else [*turns, (queued.maintain_at, RunMaintenance(table_id))]


def _has_news(queued: QueuedTable, event: Watermarks) -> bool:
    known = queued.offsets or {}
    return any(end > known.get(tablet, 0) for tablet, end in event.ends.items())


def budget(freshness: float, expected: float) -> float:
    """Seconds from the start of a round to that of the next, so that a row which the first just missed is in the lake
    before it is ``freshness`` old, if the next takes half as long again as ``expected``."""
    return max(freshness - 1.5 * expected - 0.1 * freshness, IDLE_SHARE * freshness)
