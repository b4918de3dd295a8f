"""Another engine appends, overwrites and deletes rows of its own in a lake table, all the while rounds, compaction and
expiry commit to it and scans read it: each row is there as often as it must be, and no scan meets a missing file."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.exceptions import CommitFailedException, ValidationException
from pyiceberg.expressions import And, GreaterThanOrEqual, LessThan
from pyiceberg.table import Table as IcebergTable

import lakehead as lh
from lakehead.api.table import handle_of

SCHEMA = pa.schema([("n", pa.int64()), ("v", pa.int64())])
ROUNDS, ROWS = 15, 5
STRANGERS, BATCH = 1_000_000, 6
"""Numbers of the other engine's rows begin here; so many are changed at once."""
SNAPSHOTS_KEPT = 6
TRIES = 200
ABSENT, NEW, CHANGED, GONE = range(4)
"""The life of a row of the other engine."""


class History:
    """What was begun and what is done, of each row."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.begun: Counter[int] = Counter()
        self.done: Counter[int] = Counter()
        self.counts: Counter[str] = Counter()
        self.working = 2

    def begin(self, numbers: range, state: int = NEW) -> None:
        with self.changed:
            self.begun.update({n: state - self.begun[n] for n in numbers})

    def end(self, numbers: range, state: int = NEW) -> None:
        with self.changed:
            self.done.update({n: state - self.done[n] for n in numbers})

    def count(self, what: str, number: int = 1) -> None:
        with self.changed:
            self.counts[what] += number
            self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self.working -= 1
            self.changed.notify_all()

    def wait_for_commits(self, number: int) -> None:
        """Until so many more have landed, or no more will."""
        with self.changed:
            goal = self.counts["commits"] + number
            assert self.changed.wait_for(lambda: self.counts["commits"] >= goal or not self.working, 60)

    def seen(self) -> tuple[Counter[int], Counter[int]]:
        with self.changed:
            return Counter(self.done), Counter(self.begun)

    def check(self, rows: pa.Table, done: Counter[int], begun: Counter[int]) -> None:
        """That rows are what was done at one moment and no more than was begun at a later one."""
        numbers = rows["n"].to_pylist()
        twice = [n for n, times in Counter(numbers).items() if times > 1]
        assert not twice, f"there twice: {twice}"
        found = dict(zip(numbers, rows["v"].to_pylist(), strict=True))
        assert found.keys() <= begun.keys(), f"never written: {found.keys() - begun.keys()}"
        own = sorted(n for n in found if n < STRANGERS)
        assert own == list(range(len(own))), f"own rows: {own}"
        for n in begun:
            states = range(done[n], begun[n] + 1)
            allowed = {None if s in (ABSENT, GONE) else s for s in states}
            assert found.get(n) in allowed, f"row {n} is {found.get(n)}, and may be {allowed}"


def tried(history: History, what: str, act: Callable[[], Any], *conflicts: type[Exception]) -> Any:
    """Try again whenever another one was first."""
    for _ in range(TRIES):
        try:
            result = act()
        except conflicts:
            history.count(f"{what}: conflicts")
            continue
        history.count(what)
        history.count("commits")
        return result
    raise AssertionError(f"{what}: another one was first {TRIES} times")


def tiering(table: lh.Table, history: History) -> None:
    for n in range(ROUNDS):
        numbers = range(n * ROWS, (n + 1) * ROWS)
        history.begin(numbers)
        table.append([{"n": i, "v": NEW} for i in numbers])
        history.end(numbers)
        tried(history, "round", table.lake.tier, lh.CommitConflictError)
        if n % 2:
            done = tried(history, "compaction", table.lake.compact, lh.CommitConflictError)
            history.count("files compacted", done.files_before)
            gone = tried(
                history, "expiry", lambda: table.lake.expire("0s", keep=SNAPSHOTS_KEPT), lh.CommitConflictError
            )
            history.count("snapshots expired", gone.snapshots)
            history.count("files expired", gone.files)


def foreign_engine(table: lh.Table, history: History) -> None:
    def commit(what: str, numbers: range, state: int, change: Callable[[IcebergTable], None]) -> None:
        history.begin(numbers, state)
        # Who reads without a lease may find that what he reads has expired.
        expired = (FileNotFoundError, ValidationException)
        tried(history, what, lambda: change(table.lake.iceberg()), CommitFailedException, *expired)
        history.end(numbers, state)

    def rows(ice: IcebergTable, numbers: range, state: int) -> pa.Table:
        schema = pa.schema([f.remove_metadata() for f in ice.schema().as_arrow()])
        return pa.Table.from_pylist([{"n": n, "v": state} for n in numbers], schema)

    def within(numbers: range) -> Any:
        return And(GreaterThanOrEqual("n", numbers.start), LessThan("n", numbers.stop))

    batches = [range(n, n + BATCH) for n in range(STRANGERS, STRANGERS + BATCH * ROUNDS // 3, BATCH)]
    for older, old, new in zip([None, None, *batches], [None, *batches], batches, strict=False):
        commit("append", new, NEW, lambda ice, new=new: ice.append(rows(ice, new, NEW)))
        if old is not None:
            commit(
                "overwrite", old, CHANGED,
                lambda ice, old=old: ice.overwrite(rows(ice, old, CHANGED), overwrite_filter=within(old)),
            )  # fmt: skip
        if older is not None:
            half = older[: BATCH // 2]
            commit("delete", half, GONE, lambda ice, half=half: ice.delete(within(half)))


def scans(table: lh.Table, history: History, held: int) -> None:
    """Scans that are read at once, or after so many commits, and then again."""
    for turn in itertools.count():
        last = not history.working
        done, _ = history.seen()
        scan = table.scan(["n", "v"])
        _, begun = history.seen()
        if held:
            history.wait_for_commits(held)
        rows = scan.to_arrow()
        history.check(rows, done, begun)
        assert not held or scan.to_arrow().sort_by("n").equals(rows.sort_by("n"))
        history.count("scans")
        if turn % 4 == 0:
            with table.subscribe("earliest", stop="now") as feed:
                read = sorted(n for b in feed for n in b.rows["n"].to_pylist())
            assert read == list(range(len(read))) and len(read) >= sum(n < STRANGERS for n in done)
        if last:
            return


def files_that_are_there_and_named(ice: IcebergTable) -> tuple[set[str], set[str]]:
    root = ice.location().removeprefix("file://")
    there = {os.path.join(folder, f) for folder, _, names in os.walk(root) for f in names}
    named = {ice.metadata_location, *(entry.metadata_file for entry in ice.metadata.metadata_log)}
    for snapshot in ice.metadata.snapshots:
        named.add(snapshot.manifest_list)
        for manifest in snapshot.manifests(ice.io):
            named |= {manifest.manifest_path, *(e.data_file.file_path for e in manifest.fetch_manifest_entry(ice.io))}
    return there, {path.removeprefix("file://") for path in named}


def test_all_at_once_lose_nothing_and_bring_nothing_back(tmp_path: Path) -> None:
    history = History()
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table("t", SCHEMA, buckets=1, lake="iceberg", hot_retention="0s")

        def work(act: Callable[[lh.Table, History], None]) -> None:
            try:
                act(table, history)
            finally:
                history.stop()

        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(work, act) for act in (tiering, foreign_engine)]
            running += [pool.submit(scans, table, history, held) for held in (0, 4)]
            for thread in running:
                thread.result()
        con.tier("t")
        history.check(table.scan(tier="lake").to_arrow(), *history.seen())
        counts = history.counts
        assert counts["round"] == ROUNDS and counts["append"] == len(range(0, BATCH * ROUNDS // 3, BATCH))
        assert counts["files compacted"] > 4 and counts["files expired"] > 0 and counts["scans"] > 2
        # What scans have read that are over may go now, not some moments later.
        gc.collect()
        handle_of(table).leases.renew()
        table.lake.remove_orphans("0s")
        there, named = files_that_are_there_and_named(table.lake.iceberg())
        assert there == named
