"""Subscriptions that begin in the lake and go on in the log, against the plain history of what was appended.

Each seed is a history of one log table: appends, rounds, trims and rewrites by another engine, in any order. Between
them feeds are read a batch at a time, left alone until retention overtakes them, broken after any batch and begun again
at their last end offsets, or begun anywhere. No feed has a gap or a repeat, and each tablet's rows come in order.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead import TabletId
from lakehead.api.subscription import Batch, Subscription

SCHEMA = pa.schema([pa.field("p", pa.string(), False), pa.field("n", pa.int64(), False)])
SEEDS = 8
STEPS = 30
Positions = dict[TabletId, int]


class Plain:
    """What was appended: the rows of each tablet, by offset, as far as a feed has shown them."""

    def __init__(self) -> None:
        self.appended = 0
        self.tablets: dict[TabletId, list[tuple[int, Any]]] = {}

    def take(self, positions: Positions, batch: Batch) -> None:
        """The next rows of a feed, which must be those at its position, in the order in which they were written."""
        rows = batch.rows.to_pylist()
        at = positions.get(batch.tablet, 0)
        known = self.tablets.setdefault(batch.tablet, [])
        assert [r["__offset"] for r in rows] == list(range(at, at + len(rows))) and rows
        assert batch.end_offset == at + len(rows)
        for r in rows:
            row = (r["n"], r["__timestamp"])
            if r["__offset"] == len(known):
                assert not known or known[-1] < row
                known.append(row)
            assert known[r["__offset"]] == row
        positions[batch.tablet] = at + len(rows)

    def all_seen(self) -> bool:
        """Whether the tablets have each row that was appended, once."""
        return sorted(n for rows in self.tablets.values() for n, _ in rows) == list(range(self.appended))


class Follower:
    """Follows a table batch by batch over breaks; begins at the beginning."""

    def __init__(self, table: lh.Table, plain: Plain) -> None:
        self.table = table
        self.plain = plain
        self.positions: Positions = {}
        self.feed: Subscription | None = None

    @property
    def is_behind(self) -> bool:
        return sum(self.positions.values()) < self.plain.appended

    def take(self, batches: int) -> None:
        for _ in range(batches):
            if self.is_behind:
                if self.feed is None:
                    self.feed = self.table.subscribe(self.positions or "earliest")
                self.plain.take(self.positions, next(self.feed))

    def end(self) -> None:
        if self.feed is not None:
            self.feed.close()
        self.feed = None


class Played:
    """One table, whose history a seed draws."""

    def __init__(self, con: lh.Connection, seed: int) -> None:
        self.draws = random.Random(seed)
        self.con = con
        partitions = ["p"] if self.draws.random() < 0.3 else None
        self.table = con.create_table(
            "a.t",
            SCHEMA,
            partition_by=partitions,
            buckets=self.draws.choice([1, 2]),
            lake="iceberg",
            hot_retention="0s",
            segment_bytes=self.draws.choice([500, 5000]),
        )
        self.plain = Plain()
        self.followers = [Follower(self.table, self.plain) for _ in range(3)]

    def append(self) -> None:
        for _ in range(self.draws.randint(1, 4)):
            first, rows = self.plain.appended, self.draws.randint(1, 12)
            self.table.append([{"p": self.draws.choice("xy"), "n": first + i} for i in range(rows)])
            self.plain.appended += rows

    def tier(self) -> None:
        self.con.tier("a.t")

    def trim(self) -> None:
        self.tier()
        self.con._server.service.maintain()  # type: ignore[attr-defined]

    def rewrite(self) -> None:
        """Another engine writes what the lake has anew, out of order."""
        lake = self.table.lake.iceberg()
        rows = lake.scan().to_arrow()
        if rows.num_rows:
            lake.overwrite(rows.sort_by([("n", "descending")]))

    def follow(self) -> None:
        self.draws.choice(self.followers).take(self.draws.randint(1, 6))

    def leave(self) -> None:
        self.draws.choice(self.followers).end()

    def break_everywhere(self) -> None:
        """From the beginning, with another feed for each batch."""
        follower = Follower(self.table, self.plain)
        while follower.is_behind:
            follower.take(1)
            follower.end()
        assert self.plain.all_seen()

    def begin_anywhere(self) -> None:
        """At any offsets, up to any others; a tablet that is not named begins at its beginning."""
        tablets = self.plain.tablets
        positions = {t: self.draws.randint(0, len(rows)) for t, rows in tablets.items() if self.draws.random() < 0.8}
        stops = {t: self.draws.randint(positions.get(t, 0), len(rows)) for t, rows in tablets.items()}
        if positions:
            for batch in self.table.subscribe(dict(positions), stop=stops):
                self.plain.take(positions, batch)
            assert all(positions.get(t, 0) == end for t, end in stops.items())

    def choose(self) -> None:
        """Some rows only: those of a time on, and those that a predicate picks."""
        known = [row for rows in self.plain.tablets.values() for row in rows]
        if known:
            since = self.draws.choice(known)[1]
            batches = self.table.subscribe(since, stop="now", where="n % 3 = 0", columns=["n"])
            found = [n for b in batches for n in b.rows.column("n").to_pylist()]
            assert len(set(found)) == len(found) and all(n % 3 == 0 for n in found)
            assert {n for n, at in known if at >= since and n % 3 == 0} <= set(found)
            assert not {n for n, at in known if at < since} & set(found)

    def play(self) -> None:
        actions = [self.append] * 4 + [self.follow] * 4 + [self.begin_anywhere] * 2
        actions += [self.tier, self.trim, self.trim, self.leave, self.leave, self.choose, self.break_everywhere]
        actions += [self.rewrite] if self.draws.random() < 0.5 else []
        for _ in range(STEPS):
            self.draws.choice(actions)()
        self.append()
        for last in (self.trim, self.append):
            last()
            for follower in self.followers:
                follower.take(self.plain.appended)
                assert not follower.is_behind
            self.break_everywhere()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_feed_over_lake_and_log_is_the_plain_history(tmp_path: Path, seed: int) -> None:
    with lh.connect(tmp_path / "data") as con:
        played = Played(con, seed)
        try:
            played.play()
        finally:
            for follower in played.followers:
                follower.end()
        start = played.table.status()["start_offset"].to_pylist()
        assert sum(start) > 0, "the log was trimmed"
