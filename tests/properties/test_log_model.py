"""Log tables against a list: whatever is appended is there, in order per tablet, across restarts and crashes."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import lakehead as lh
from lakehead import TabletId

SCHEMA = pa.schema([("n", pa.int64()), ("p", pa.string()), ("v", pa.float64())])


class LogTable(RuleBasedStateMachine):
    """The model: rows per tablet, in offset order. Rules of the lake are added by subclasses with ``lake`` set."""

    lake: str | None = None

    @initialize(partitioned=st.booleans(), buckets=st.integers(1, 3), bucketed=st.booleans(), how=st.sampled_from("os"))
    def create(self, partitioned: bool, buckets: int, bucketed: bool, how: str) -> None:
        self.folder = tempfile.mkdtemp()
        self.con = lh.connect(self.folder)
        self.table = self.con.create_table(
            "t",
            SCHEMA,
            partition_by="p" if partitioned else None,
            buckets=buckets,
            bucket_key="n" if bucketed else None,
            lake=self.lake,
            durability="os" if how == "o" else "sync",
            compression="zstd" if bucketed else "none",
            segment_bytes=4000,
        )
        self.next = 0
        self.model: dict[TabletId, list[dict[str, Any]]] = {}

    def rows(self, count: int) -> list[dict[str, Any]]:
        numbers = range(self.next, self.next + count)
        self.next += count
        return [{"n": n, "p": "xyz"[n % 3], "v": None if n % 4 == 0 else n / 2} for n in numbers]

    def remember(self, rows: list[dict[str, Any]], offsets: Any) -> None:
        """Take over where the rows went; which of them went where, the tablet itself must tell."""
        assert sum(end - start for start, end in offsets.values()) == len(rows)
        by_number = {r["n"]: r for r in rows}
        for tablet, (start, end) in offsets.items():
            known = self.model.setdefault(tablet, [])
            assert start == len(known), "offsets are dense"
            found = self.read({tablet: (start, end)})[tablet]
            assert [r["n"] for r in found] == sorted(r["n"] for r in found), "a batch keeps its order"
            known += [by_number.pop(r["n"]) for r in found]
        assert not by_number

    def read(self, ranges: dict[TabletId, tuple[int, int]]) -> dict[TabletId, list[dict[str, Any]]]:
        out: dict[TabletId, list[dict[str, Any]]] = {t: [] for t in ranges}
        starts, stops = {t: s for t, (s, _) in ranges.items()}, {t: e for t, (_, e) in ranges.items()}
        for batch in self.table.subscribe(starts, stop=stops):
            out[batch.tablet] += batch.rows.to_pylist()
        return out

    @rule(count=st.integers(1, 60))
    def append(self, count: int) -> None:
        rows = self.rows(count)
        self.remember(rows, self.table.append(rows).offsets)

    @rule(counts=st.lists(st.integers(0, 5), min_size=1, max_size=5))
    def append_through_a_writer(self, counts: list[int]) -> None:
        before = {t: len(rows) for t, rows in self.model.items()}
        batches = [self.rows(c) for c in counts]
        with self.table.writer() as writer:
            for batch in batches:
                writer.append(batch)
        state = self.table.status().to_pylist()
        tablets = [self.table._desc.tablet_id(t.key) for t in self.table._client.tablets()]
        offsets = {t: (before.get(t, 0), s["high_watermark"]) for t, s in zip(tablets, state, strict=True)}
        self.remember([r for b in batches for r in b], {t: o for t, o in offsets.items() if o[0] < o[1]})

    @rule()
    def restart(self) -> None:
        self.con.close()
        self.con = lh.connect(self.folder)
        self.table = self.con.table("t")

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 99), first=st.integers(0, 999), rows=st.integers(0, 999))
    def read_some_range(self, which: int, first: int, rows: int) -> None:
        # Which tablet holds how much depends on the writer's random id, so nothing is drawn from it.
        tablet = sorted(self.model)[which % len(self.model)]
        start = first % (len(self.model[tablet]) + 1)
        end = start + rows % (len(self.model[tablet]) - start + 1)
        found = self.read({tablet: (start, end)})[tablet]
        assert [r["__offset"] for r in found] == list(range(start, end))
        assert [{c: r[c] for c in SCHEMA.names} for r in found] == self.model[tablet][start:end]
        times = [r["__timestamp"] for r in found]
        assert times == sorted(times)

    @rule(low=st.integers(0, 300), width=st.integers(0, 80), limit=st.none() | st.integers(0, 20))
    def scan_where(self, low: int, width: int, limit: int | None) -> None:
        where = f"n >= {low} and n < {low + width} and v is not null"
        wanted = [r["n"] for rows in self.model.values() for r in rows if low <= r["n"] < low + width and r["v"]]
        found = self.table.scan(columns=["n"], where=where, limit=limit).to_arrow()["n"].to_pylist()
        assert len(found) == (len(wanted) if limit is None else min(limit, len(wanted)))
        assert set(found) <= set(wanted) and len(set(found)) == len(found)

    @invariant()
    def scan_is_the_model(self) -> None:
        found = self.table.scan(system_columns=True).to_arrow()
        known = sorted(r["n"] for rows in self.model.values() for r in rows)
        assert sorted(found["n"].to_pylist()) == known and self.table.scan().count() == len(known)

    def teardown(self) -> None:
        if hasattr(self, "con"):
            self.con.close()
            shutil.rmtree(self.folder)


TestLogTable = LogTable.TestCase
TestLogTable.settings = settings(max_examples=25, stateful_step_count=15)
