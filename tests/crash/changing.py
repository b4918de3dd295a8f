"""Tables that are altered, renamed and emptied while they are written and followed."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.crash.changing_history import VERSION, ChangingHistory, Column, Row, as_table, schema_of, tablet_of
from tests.crash.follower import watermarks
from tests.crash.history import WrongDataError, require
from tests.crash.processes import wait_until
from tests.crash.workload import UNKNOWN, Actor, Gate, Load

import lakehead as lh
from lakehead.api.alteration import TableAlteration
from lakehead.api.table import handle_of

KEYS = 40
COLUMNS_MAX = 4
NAMES = ("x", "y", "z", "u", "w")
FOLLOW_SECONDS = 60.0
_ALL = {"segment_bytes": 16_000, "freshness": "1s", "partition_by": "p", "durability": "os"}
PROPERTIES: dict[str, dict[str, Any]] = {
    "log": {},
    "log_lake": {"lake": "iceberg", "hot_retention": "0s"},
    "kv": {"primary_key": ["p", "k"]},
    "kv_lake": {"primary_key": ["p", "k"], "lake": "iceberg", "hot_retention": "0s", "lake_changelog": True},
}
WITH_LAKE = ("log_lake", "kv_lake")


class ChangingWriter(Actor):
    """Writes with the columns that it knows, which others change meanwhile."""

    def __init__(self, gate: Gate, table: lh.Table, history: ChangingHistory, seed: int, load: Load) -> None:
        super().__init__(gate, f"changing {table.name}", seed, load.pause)
        self._table, self._history, self._rows = table, history, load.rows
        self._next = 0

    def act(self) -> bool:
        rows = self._drawn()
        batch = as_table(rows, handle_of(self._table).desc.schema)
        self._history.begin(rows)
        write = self._table.append if not self._history.keyed else self._table.upsert
        try:
            result = (self._table.delete if rows[0][1] is None else write)(batch)
        except UNKNOWN:
            self._history.unanswered(handle_of(self._table).desc.schema_id)
            self.unanswered += 1
            return False
        except (lh.SchemaMismatchError, lh.ColumnNotFoundError):
            # It learned that the columns are others, and what it was given has those of before.
            self._history.refused()
            return True
        self._history.answered(result.offsets, handle_of(self._table).desc.schema_id)
        if self.random.random() < 0.1:
            with contextlib.suppress(*UNKNOWN):
                self._table.scan().count()
        return True

    def _drawn(self) -> list[tuple[int, dict[str, int] | None]]:
        desc = handle_of(self._table).desc
        columns = self._history.columns[desc.schema_id]
        require(desc.schema.names == schema_of(columns).names, f"{self.name} has {desc.schema}, not {columns}")
        count = self.random.randint(1, self._rows)
        names = [c.name for c in columns if self.random.random() < 0.7]
        if not self._history.keyed:
            keys: Any = range(self._next, self._next + count)
        else:
            keys = self.random.sample(range(KEYS), min(count, KEYS))
            if self.random.random() < 0.15:
                return [(k, None) for k in keys]
        self._next += count
        return [(k, {"v": self._next, **{n: self._next * 8 + i for i, n in enumerate(names)}}) for k in keys]


class ChangeFollower(threading.Thread):
    """Follows a table through all its definitions and names: each row of a log once, and the live rows that the changes
    of a keyed one make."""

    def __init__(self, table: lh.Table) -> None:
        super().__init__(name=f"follow {table.name}", daemon=True)
        self._table = table
        self._keyed = bool(table.primary_key)
        self._over = threading.Event()
        self._feed: lh.Subscription | None = None
        self.positions: dict[lh.TabletId, int] = {}
        self.live: dict[int, int] = {}
        """Version of each key, or number of a log."""
        self.problem: BaseException | None = None

    def run(self) -> None:
        start: Any = "full" if self._keyed else "earliest"
        while not self._over.is_set():
            try:
                with self._table.subscribe(start) as feed:
                    self._feed = feed
                    for batch in feed:
                        self._take(batch)
            except lh.OffsetOutOfRangeError:
                start = self._anew()
            except (lh.UnavailableError, lh.ClosedError):
                start = self._anew() if self._trimmed() else dict(self.positions)
                self._over.wait(0.02)
            except BaseException as e:
                self.problem = e
                return

    def _anew(self) -> str:
        if not self._keyed:  # what was taken away was taken from it, too
            return "earliest"
        self.positions.clear()
        self.live.clear()
        return "full"

    def _trimmed(self) -> bool:
        """Whether the log lacks changes that come next; of a log table the lake has them, or nobody."""
        if not self.positions:
            return True
        if not self._keyed:
            return False
        while not self._over.is_set():
            try:
                return any(start > self.positions.get(t, 0) for t, (start, _) in watermarks(self._table).items())
            except (lh.UnavailableError, lh.ClosedError):
                self._over.wait(0.02)
        return False

    def _take(self, batch: lh.Batch) -> None:
        rows = batch.rows
        keys, versions = rows["k"].to_pylist(), rows["v"].to_pylist()
        if self._keyed:
            for change, k, v in zip(rows["__change_type"].to_pylist(), keys, versions, strict=True):
                if change == "-D":
                    self.live.pop(k, None)
                elif change != "-U":
                    self.live[k] = v
        elif keys:
            at = self.positions.get(batch.tablet, 0)
            offsets = rows["__offset"].to_pylist()
            require(offsets[0] >= at, f"{batch.tablet}: offset {offsets[0]} came again, {at} is next")
            twice = [k for k in keys if k in self.live]
            require(not twice, f"{batch.tablet}: rows {twice} came twice")
            self.live.update(zip(keys, versions, strict=True))
        if batch.end_offset is not None:
            self.positions[batch.tablet] = batch.end_offset

    def check(self, name: str, rows: Mapping[int, Row], ends: Mapping[lh.TabletId, int]) -> None:
        """It has seen what is there, up to these high watermarks."""

        def reached() -> bool:
            return self.problem is not None or all(self.positions.get(t, 0) >= e for t, e in ends.items())

        met = wait_until(reached, FOLLOW_SECONDS)
        if self.problem is not None:
            raise WrongDataError(f"follower of {name}: {self.problem!r}") from self.problem
        require(met, f"{name}: a follower is at {self.positions}, the table at {ends}")
        expected = {k: row[VERSION] for k, row in rows.items()}
        seen = self.live if self._keyed else {k: v for k, v in self.live.items() if k in expected}
        wrong = sorted(k for k in seen.keys() | expected.keys() if seen.get(k) != expected.get(k))
        require(not wrong, f"{name}: a follower has {[(k, seen.get(k), expected.get(k)) for k in wrong[:5]]}")

    def stop(self) -> None:
        """End; the thread is joined."""
        self._over.set()
        if self._feed is not None:
            self._feed.close()
        self.join(30)


@dataclass
class Changed:
    """One such table. Writer and follower have it open for ever, under whatever name it was opened."""

    name: str
    table: lh.Table
    history: ChangingHistory
    writer: ChangingWriter
    follower: ChangeFollower

    @property
    def table_id(self) -> str:
        return handle_of(self.table).desc.table_id


class Changing:
    """The tables of one deployment that change, in a database of their own."""

    def __init__(self, con: lh.Connection, folder: Path, gate: Gate, seed: int, load: Load) -> None:
        """Make them, and begin to follow and to write them while the gate is open."""
        self._con, self._folder = con, folder
        self._random = random.Random(f"changes {seed}")
        self.tables: dict[str, Changed] = {}
        self._renaming: dict[str, str] | None = None
        """Names that tables may have, of which an answer is still to come."""
        self._count = 0
        for label, own in PROPERTIES.items():
            name = f"c.{label}"
            table = con.create_table(name, schema_of(()), **_ALL, **own)
            history = ChangingHistory(keyed=label.startswith("kv"))
            writer = ChangingWriter(gate, con.table(name), history, seed, load)
            self.tables[label] = Changed(name, table, history, writer, ChangeFollower(con.table(name)))
        for changed in self.tables.values():
            changed.writer.start()
            changed.follower.start()

    def stop(self) -> None:
        for changed in self.tables.values():
            changed.follower.stop()

    def lakes(self) -> dict[str, lh.Table]:
        """Tables with a lake, by the names that they have now."""
        return {self.tables[label].name: self.tables[label].table for label in WITH_LAKE}

    # ---- changes ----------------------------------------------------------------------------------------------------

    def alter(self, changed: Changed) -> None:
        """Change columns in one step; raises what the call raises, and `check` tells what it came to."""
        history = changed.history
        if history.altering:
            return
        columns, calls = self._altered(history.now)
        # Whoever was not told that a change came to be does not have it yet.
        changed.table = self._con.table(changed.name)
        history.begin_alter(columns)
        with changed.table.alter() as a:
            for call in calls:
                call(a)
        desc = handle_of(changed.table).desc
        require(desc.schema_id == history.schema_id + 1, f"{changed.name}: an alter led to schema {desc.schema_id}")
        history.altered(changed.name, desc.schema_id, desc.schema)

    def _altered(
        self, columns: tuple[Column, ...]
    ) -> tuple[tuple[Column, ...], list[Callable[[TableAlteration], object]]]:
        """Columns that come next, by one change or two."""
        calls: list[Callable[[TableAlteration], object]] = []
        now = list(columns)
        for _ in range(self._random.randint(1, 2)):
            free = [n for n in NAMES if n not in {c.name for c in now}]
            kinds = ["add"] if not now else ["add", "rename", "drop", "widen"]
            kind = self._random.choice(kinds if len(now) < COLUMNS_MAX else kinds[1:])
            at = self._random.randrange(len(now)) if now else 0
            name = self._random.choice(free)
            if kind == "add":
                self._count += 1
                now.append(Column(self._count, name))
                calls.append(lambda a, name=name: a.add_column(name, pa.int32()))
            elif kind == "rename":
                old, now[at] = now[at], Column(now[at].number, name, now[at].wide)
                calls.append(lambda a, old=old.name, name=name: a.rename_column(old, name))
            elif kind == "drop":
                old = now.pop(at)
                calls.append(lambda a, old=old.name: a.drop_column(old))
            elif not now[at].wide:
                now[at] = Column(now[at].number, now[at].name, wide=True)
                calls.append(lambda a, old=now[at].name: a.widen_column(old, pa.int64()))
        return (tuple(now), calls) if tuple(now) != columns else self._altered(columns)

    def rename(self, label: str, other: str | None = None) -> None:
        """Give a table a name that none had, or let two have each other's; see `alter`."""
        if self._renaming is not None:
            return
        old = self.tables[label].name
        self._count += 1
        to = f"c.{label}_{self._count}" if other is None else self.tables[other].name
        self._renaming = {label: to} if other is None else {label: to, other: old}
        self._con.rename_table(old, to, swap=other is not None)
        self._settle_names()

    def _settle_names(self) -> None:
        """All tables are found under the names of before, or all under the new ones."""
        found = {handle_of(self._con.table(name)).desc.table_id: name for name in self._con.tables("c")}
        before = {c.table_id: c.name for c in self.tables.values()}
        after = {c.table_id: (self._renaming or {}).get(label, c.name) for label, c in self.tables.items()}
        require(found in (before, after), f"tables are called {found}, not {before} or {after}")
        for changed in self.tables.values():
            changed.name = found[changed.table_id]
        self._renaming = None

    @contextlib.contextmanager
    def truncating(self, changed: Changed) -> Iterator[Callable[[Mapping[lh.TabletId, int]], None]]:
        """Around a truncation; what is given is to be told its offsets."""
        changed.history.begin_truncate()
        yield changed.history.truncated

    def truncate(self, changed: Changed) -> None:
        """Take all rows away; see `alter`."""
        with self.truncating(changed) as done:
            done(changed.table.truncate())

    # ---- check ------------------------------------------------------------------------------------------------------

    def check(self) -> int:
        """Compare all tables with what was acknowledged; nothing is written meanwhile. Returns how many rows."""
        self._settle_names()
        rows = sum(self._check_table(changed) for changed in self.tables.values())
        self._check_lakes()
        return rows

    def _check_table(self, changed: Changed) -> int:
        name, history = changed.name, changed.history
        table = changed.table = self._con.table(name)
        history.altered(name, handle_of(table).desc.schema_id, handle_of(table).desc.schema)
        ends = {t: end for t, (_, end) in watermarks(table).items()}
        rows = history.check(name, table.scan(system_columns=True).to_arrow(), ends)
        changed.follower.check(name, rows, ends)
        if history.keyed and rows:
            asked = [{"p": tablet_of(k).partition[0], "k": k} for k in rows]
            shown = table.lookup(asked)
            require(shown.sort_by("k").equals(table.scan().to_arrow().sort_by("k")), f"{name}: lookups differ")
        return len(rows)

    def _check_lakes(self) -> None:
        """Lake tables have the names and the columns of their tables; whoever steps aside comes second."""
        lakes = {name: (table, table.lake) for name, table in self.lakes().items()}
        kept = [name for name, (table, _) in lakes.items() if table.properties["lake_changelog"]]
        lakes |= {f"{name}$changelog": (lakes[name][0], lakes[name][1].changelog) for name in kept}
        for _, lake in (*lakes.values(), *lakes.values()):
            lake.iceberg()
        for name, (table, lake) in lakes.items():
            columns = [f.name for f in lake.iceberg().schema().fields if not f.name.startswith("__")]
            require(columns == table.schema.names, f"{name}: the lake has {columns}, the table {table.schema.names}")
        with contextlib.closing(sqlite3.connect(self._folder / "lake" / "catalog.db", timeout=30)) as db:
            sql = "select table_name from iceberg_tables where table_namespace = 'c'"
            found = {f"c.{n}" for (n,) in db.execute(sql)}
        require(found == set(lakes), f"lake tables are called {found}, their tables {set(lakes)}")
