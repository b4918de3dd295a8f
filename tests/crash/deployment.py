"""A server with its tables, load, followers and rounds; what must hold whenever the load is paused."""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.crash.changing import Changing
from tests.crash.follower import Follower, watermarks
from tests.crash.history import (
    KEYED_SCHEMA,
    LOG_SCHEMA,
    KeyedHistory,
    LogHistory,
    WrongDataError,
    differences,
    keyed_rows,
    require,
)
from tests.crash.processes import Rounds, Server, Task, wait_until
from tests.crash.workload import Actor, Gate, KeyedWriter, Load, LogAppender, NamedAppender, Scanner

import lakehead as lh
from lakehead.api.lake import TableLake
from lakehead.api.table import handle_of

FOLLOW_SECONDS = 60.0
PATIENCE_SECONDS = 1.0
"""Servers are killed on purpose here, and start again only once their clients were told."""
LAKE_TABLES = ("t.log_lake", "t.kv_lake")
PROPERTIES: dict[str, dict[str, Any]] = {
    "t.log_sync": {"buckets": 2, "durability": "sync"},
    "t.log_ttl": {"buckets": 1, "durability": "os", "log_ttl": "0s"},
    "t.log_lake": {"partition_by": "p", "buckets": 2, "durability": "os", "lake": "iceberg", "hot_retention": "0s"},
    "t.kv_os": {"primary_key": "k", "buckets": 2, "durability": "os"},
    "t.kv_lake": {
        "primary_key": ["p", "k"], "partition_by": "p", "durability": "sync", "lake": "iceberg", "hot_retention": "0s",
        "lake_changelog": True,
    },
}  # fmt: skip


@dataclass
class Counts:
    """What a run came to, over all its deployments."""

    kills: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    start_seconds: list[float] = field(default_factory=list)
    answer_seconds: list[float] = field(default_factory=list)
    """From the start of a server to its first lookup."""
    takeover_seconds: list[float] = field(default_factory=list)
    """From the end of a tiering job until the other has done rounds of all tables."""
    starts: int = 0
    checks: int = 0
    rows_checked: int = 0
    rounds: Counter[str] = field(default_factory=Counter)
    maintenance: Counter[str] = field(default_factory=Counter)
    """How its turns ended, and what they came to."""
    scans_held: int = 0
    """Through maintenance that was killed, and read again."""
    orphans: int = 0
    acknowledged: int = 0
    unanswered: int = 0
    scans: int = 0
    lookups: int = 0
    writers_resumed: int = 0
    feeds_resumed: int = 0
    feeds_restarted: int = 0
    prefixes_checked: int = 0
    prefixes_unseen: int = 0
    deepest_trim: int = 0


class Deployment:
    """One data folder and all that is done to it."""

    def __init__(
        self,
        work: Path,
        seed: int,
        counts: Counts,
        load: Load | None = None,
        *,
        points: bool = True,
        properties: Mapping[str, Mapping[str, Any]] | None = None,
        answers_kept: int = 5000,
    ) -> None:
        """Start a server, make the tables and start the load, paused.

        Args:
            properties: of tables by name, over `PROPERTIES`.
            answers_kept: how many answers of appends are remembered with their offsets.
        """
        work.mkdir(parents=True)
        self.work, self.seed, self.counts = work, seed, counts
        self.load = load or Load()
        self.server = Server(work, points=points)
        self.actors: list[Actor] = []
        self.followers: dict[str, Follower] = {}
        self.gate = Gate()
        self._changing: Changing | None = None
        self._rounds: list[Rounds] = []
        self._rounds_started = 0
        self.start()
        self.con = self.server.connect()
        for name, own in PROPERTIES.items():
            schema = KEYED_SCHEMA if name.startswith("t.kv") else LOG_SCHEMA
            given = {"segment_bytes": 16_000, "freshness": "1s", **own, **(properties or {}).get(name, {})}
            self.con.create_table(name, schema, **given)
        self.tables = {name: self.con.table(name) for name in PROPERTIES}
        self._incomplete = {
            name
            for name, table in self.tables.items()
            if not table.primary_key and name not in LAKE_TABLES and table.properties["log_ttl"] is not None
        }
        self.logs = {
            n: LogHistory(partitioned=n == "t.log_lake", answers_kept=answers_kept)
            for n in self.tables
            if n.startswith("t.log")
        }
        self.keyed = {n: KeyedHistory() for n in self.tables if n.startswith("t.kv")}
        self._start_load()

    def _start_load(self) -> None:
        t, logs, keyed, gate, seed, load = self.tables, self.logs, self.keyed, self.gate, self.seed, self.load
        self.actors = [
            *(LogAppender(gate, t["t.log_sync"], logs["t.log_sync"], w, seed, load) for w in (1, 2)),
            LogAppender(gate, t["t.log_ttl"], logs["t.log_ttl"], 1, seed, load),
            LogAppender(gate, t["t.log_lake"], logs["t.log_lake"], 1, seed, load),
            NamedAppender(gate, t["t.log_lake"], logs["t.log_lake"], 2, seed, load),
            *(KeyedWriter(gate, t["t.kv_os"], keyed["t.kv_os"], w, seed, load, patient=w == 1) for w in (1, 2)),
            *(KeyedWriter(gate, t["t.kv_lake"], keyed["t.kv_lake"], w, seed, load, patient=w == 1) for w in (1, 2)),
            Scanner(
                gate,
                {n: (t[n], h) for n, h in logs.items() if n not in self._incomplete},
                {n: (t[n], h) for n, h in keyed.items()},
                seed,
                10 * load.pause,
            ),
        ]
        self.followers = {n: Follower(t[n], keep_changes=n == "t.kv_lake") for n in self.tables if n != "t.log_ttl"}
        for thread in (*self.actors, *self.followers.values()):
            thread.start()

    def changing(self) -> Changing:
        """Tables that change, made when they are first asked for; from then on they are written and checked, too."""
        if self._changing is None:
            self._changing = Changing(self.con, self.server.folder, self.gate, self.seed, self.load)
            self.actors += [c.writer for c in self._changing.tables.values()]
        return self._changing

    def lakes(self) -> dict[str, lh.Table]:
        """Tables with a lake, by the names that they have now."""
        changing = {} if self._changing is None else self._changing.lakes()
        return {name: self.tables[name] for name in LAKE_TABLES} | changing

    @property
    def acknowledged(self) -> int:
        """Rows whose write was answered."""
        changing = () if self._changing is None else (c.history for c in self._changing.tables.values())
        return sum(h.answered_rows for h in (*self.logs.values(), *self.keyed.values(), *changing))

    @property
    def last_restart(self) -> tuple[float, float]:
        """Seconds until the server last said that it serves, and until it answered a lookup (0 before a restart)."""
        return self.counts.start_seconds[-1], (self.counts.answer_seconds or [0.0])[-1]

    # ---- processes ----------------------------------------------------------------------------------------------

    def start(self) -> bool:
        """Start the server; False when an armed point killed it before it was ready."""
        self.counts.starts += 1
        seconds = self.server.start()
        if seconds is None:
            require(self.server.reached, f"the server does not start: {self.server.errors[-3000:]}")
            return False
        self.counts.start_seconds.append(seconds)
        return True

    def restart(self) -> None:
        """Start the server after it was killed; measures until it answers a lookup."""
        self.server.disarm()
        begin = time.perf_counter()
        require(self.start(), "a server that is not armed died while it started")
        self._first_answer()
        self.counts.answer_seconds.append(time.perf_counter() - begin)

    def _first_answer(self) -> None:
        def answered() -> bool:
            try:
                self.tables["t.kv_os"].get(1)
                return True
            except lh.UnavailableError:
                return False

        require(wait_until(answered, 60), f"the server does not answer: {self.server.errors[-3000:]}")

    def rounds(self) -> Rounds:
        """A process for rounds that is ready; another one is started for the time when it has been killed."""
        while len(self._rounds) < 2:
            self._rounds_started += 1
            made = Rounds(self.work, self._rounds_started)
            made.start(self.server.uri)
            self._rounds.append(made)
        while not self._rounds[0].wait_ready():
            raise WrongDataError(f"a process for rounds does not start: {self._rounds[0].errors[-3000:]}")
        return self._rounds.pop(0)

    def ask(self, rounds: Rounds, table: str, task: Task = "tier") -> dict[str, Any] | None:
        """One round, or maintenance; None when the process died in it."""
        rounds.send(table, task)
        answer = rounds.answer()
        self.note(answer, task)
        return answer

    def note(self, answer: Mapping[str, Any] | None, task: Task = "tier") -> None:
        """Count how it ended."""
        if answer is None:
            return
        if task == "tier":
            moved = "moved rows" if answer.get("rows") or answer.get("deletes") else "nothing to move"
            self.counts.rounds[answer.get("error", moved)] += 1
        elif "error" in answer:
            self.counts.maintenance[f"{task}: {answer['error']}"] += 1
        else:
            self.counts.maintenance.update(answer)
            self.counts.maintenance[f"{task}: done"] += 1

    # ---- checks -------------------------------------------------------------------------------------------------

    def raise_problems(self) -> None:
        """Raise what a thread of the load has found."""
        for actor in self.actors:
            if actor.problem is not None:
                raise WrongDataError(f"{actor.name}: {actor.problem!r}") from actor.problem
        for follower in self.followers.values():
            follower.reached({})

    def check(self) -> None:
        """Pause the load and compare everything with what was acknowledged; the load goes on by `gate.open`."""
        self.gate.shut()
        self.raise_problems()
        for name, history in self.logs.items():
            self._check_log(name, self.tables[name], history)
        for name, keyed in self.keyed.items():
            self._check_keyed(name, self.tables[name], keyed)
        if self._changing is not None:
            self.counts.rows_checked += self._changing.check()
        self._check_folder()
        self.counts.checks += 1

    def _check_log(self, name: str, table: lh.Table, history: LogHistory) -> None:
        ends = self._follow(name, table)
        scan = table.scan(system_columns=True)
        rows = scan.to_arrow()
        self.counts.rows_checked += rows.num_rows
        if name in self._incomplete:
            # It forgets rows all the time: what it has is what it had when the scan was pinned.
            ends = {handle_of(table).desc.tablet_id(k): r for k, r in scan._read.pinned.ranges.items()}
        history.check(name, rows, ends, trimmed=name in self._incomplete)
        follower = self.followers.get(name)
        if follower is not None and name not in self._incomplete:
            total = sum(follower.sums.values())
            require(total == (_sum(rows["n"])), f"{name}: a follower saw other rows than a scan shows")
        if name in LAKE_TABLES:
            self._check_tiers(name, table, rows)

    def _check_tiers(self, name: str, table: lh.Table, rows: pa.Table) -> None:
        """The lake is what lies below the tiered offsets, the hot tier the rest, and together they are the scan."""
        tiered, lake, hot = _between_rounds(table, "lake", "hot")
        for tier, part in (("lake", lake), ("hot", hot)):
            for p, bucket, offset in zip(*(part[c].to_pylist() for c in ("p", "__bucket", "__offset")), strict=True):
                below = offset < tiered.get(lh.TabletId((p,), bucket), 0)
                require(below == (tier == "lake"), f"{name}: offset {offset} of {p}/{bucket} is in the {tier} tier")
        order = [(c, "ascending") for c in ("p", "__bucket", "__offset")]
        both = pa.concat_tables([lake, hot]).sort_by(order)
        require(both.equals(rows.sort_by(order)), f"{name}: lake and hot rows are not the rows of the union scan")

    def _check_keyed(self, name: str, table: lh.Table, history: KeyedHistory) -> None:
        ends = self._follow(name, table)
        rows = table.scan(system_columns=True).to_arrow()
        self.counts.rows_checked += rows.num_rows
        history.check(name, handle_of(table).desc, rows)
        follower = self.followers[name]
        require(not (follower.restarted and table.properties["lake_changelog"]), f"{name}: changes were forgotten")
        wrong = differences(follower.live(), history.live)
        require(not wrong, f"{name}: the replayed changelog differs (key: found, expected): {wrong}")
        if not follower.restarted:
            wrong = differences(follower.writes, history.writes)
            require(not wrong, f"{name}: changes of a key in the changelog and acknowledged: {wrong}")
        keys = [dict(zip("pk", key, strict=True)) for key in {*history.live, *history.writes}]
        if keys:
            asked = [{c: key[c] for c in table.primary_key} for key in keys]
            wrong = differences(keyed_rows(table.lookup(asked)), history.live)
            require(not wrong, f"{name}: lookups differ (key: found, expected): {wrong}")
        with table.subscribe("full", stop="now") as feed:
            full = [b.rows for b in feed if b.rows.num_rows]
        live = {k: v for part in full for k, v in keyed_rows(pa.table(part)).items()}
        require(not differences(live, history.live), f"{name}: a full subscription differs")
        if name in LAKE_TABLES:
            self._check_lake_prefix(name, table, ends)

    def _check_lake_prefix(self, name: str, table: lh.Table, ends: Mapping[lh.TabletId, tuple[int, int]]) -> None:
        tiered, lake = _between_rounds(table, "lake")
        for tablet in ends:
            mask = pa.compute.equal(lake["p"], tablet.partition[0])
            seen = self.followers[name].check_lake(tablet, tiered.get(tablet, 0), lake.filter(mask))
            self.counts.prefixes_checked += seen
            self.counts.prefixes_unseen += not seen

    def _follow(self, name: str, table: lh.Table) -> dict[lh.TabletId, tuple[int, int]]:
        """Watermarks, once the follower has seen everything below them."""
        ends = watermarks(table)
        follower = self.followers.get(name)
        if follower is not None:
            met = wait_until(lambda: follower.reached(ends), FOLLOW_SECONDS)
            require(met, f"{name}: a follower is at {follower.positions}, the table at {ends}")
        self.counts.deepest_trim = max([self.counts.deepest_trim, *(start for start, _ in ends.values())])
        return ends

    def _check_folder(self) -> None:
        left = [str(p.relative_to(self.server.folder)) for p in (self.server.folder / "tables").rglob("*.tmp")]
        # A checkpoint that is being written right now has such a name, too.
        left = [p for p in left if not wait_until(lambda p=p: not (self.server.folder / p).exists(), 5)]
        require(not left, f"temporary files were left behind by a kill: {left}")

    def check_lake_folders(self) -> None:
        """After clean-up a lake's folder holds exactly what the lake names; run while no round is under way, and the
        load is paused."""
        for name, table in self.lakes().items():
            # What scans have read that are over may go now, not some moments later.
            gc.collect()
            leases, table_id = handle_of(table).leases, handle_of(table).desc.table_id
            leases.renew()
            in_use = leases.lake_uses(table_id)
            require(not in_use, f"{name}: scans that are over still hold {in_use}")
            self._check_lake_folder(name, table.lake)
            if table.properties["lake_changelog"]:
                self._check_lake_folder(f"{name}$changelog", table.lake.changelog)

    def _check_lake_folder(self, name: str, lake: TableLake) -> None:
        self.counts.orphans += lake.remove_orphans(older_than="0s").num_rows
        iceberg = lake.iceberg()
        root = iceberg.location().removeprefix("file://")
        there = {os.path.join(folder, f) for folder, _, files in os.walk(root) for f in files}
        named = {p.removeprefix("file://") for p in _named_files(iceberg)}
        require(named <= there, f"{name}: files that the lake names are missing: {sorted(named - there)[:5]}")
        require(there <= named, f"{name}: orphans outlive clean-up: {sorted(there - named)[:5]}")

    # ---- end ----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Stop everything and add up what was done."""
        self.gate.end()
        for follower in self.followers.values():
            follower.stop()
        if self._changing is not None:
            self._changing.stop()
        if hasattr(self, "con"):
            self.con.close()
        for rounds in self._rounds:
            rounds.kill()
        if self.server.alive:
            self.server.kill()
        counts = self.counts
        counts.acknowledged += self.acknowledged
        counts.unanswered += sum(a.unanswered for a in self.actors)
        counts.scans += sum(a.scans for a in self.actors if isinstance(a, Scanner))
        counts.lookups += sum(a.lookups for a in self.actors if isinstance(a, KeyedWriter))
        counts.writers_resumed += sum(a.resumed for a in self.actors if isinstance(a, NamedAppender))
        counts.feeds_resumed += sum(f.resumed for f in self.followers.values())
        counts.feeds_restarted += sum(f.restarted for f in self.followers.values())


class HeldScan:
    """A scan of a lake table that was pinned, read once and begun again; `finish` reads it to its end, and again."""

    def __init__(self, table: lh.Table) -> None:
        self._name = table.name
        self._scan = table.scan(system_columns=True)
        self._rows = self._scan.to_arrow()
        self._begun = self._scan.to_batches()
        self._first = list(itertools.islice(self._begun, 1))

    def finish(self) -> None:
        """Whatever was compacted, expired and killed meanwhile, the rows are those of the first time."""
        order = [(c, "ascending") for c in ("p", "__bucket", "__offset")]
        expected = self._rows.sort_by(order)
        for again in ([*self._first, *self._begun], self._scan.to_batches()):
            found = pa.Table.from_batches(again, self._rows.schema).sort_by(order)
            require(found.equals(expected), f"{self._name}: a scan that was pinned reads other rows than at first")


def _between_rounds(table: lh.Table, *tiers: Any) -> list[Any]:
    """Tiered offsets and the rows of tiers at exactly these: read again when a round committed in between."""
    for _ in range(100):
        before = table.lake.offsets()
        parts = [table.scan(tier=tier, system_columns=True).to_arrow() for tier in tiers]
        if table.lake.offsets() == before:
            return [before, *parts]
    raise WrongDataError(f"{table.name}: rounds never pause, though nothing is written")


def _sum(column: pa.ChunkedArray) -> int:
    return int(pa.compute.sum(column).as_py() or 0)


def _named_files(iceberg: Any) -> set[str]:
    """Every file that the metadata, old versions of it and all snapshots of an Iceberg table lead to."""
    named = {iceberg.metadata_location, *(entry.metadata_file for entry in iceberg.metadata.metadata_log)}
    for snapshot in iceberg.metadata.snapshots:
        named.add(snapshot.manifest_list)
        for manifest in snapshot.manifests(iceberg.io):
            named.add(manifest.manifest_path)
            named |= {e.data_file.file_path for e in manifest.fetch_manifest_entry(iceberg.io)}
    return named
