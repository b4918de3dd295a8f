"""A whole deployment against a model: writes, rounds, restarts and every kind of read, in any order."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import lakehead as lh
from lakehead.lake import known_changes

REGIONS = ("north", "süd", "a/b=c&d")
KEYED = pa.schema(
    [
        ("region", pa.string()),
        ("id", pa.int64()),
        ("name", pa.string()),
        ("small", pa.int16()),
        ("tags", pa.list_(pa.string())),
        ("amount", pa.decimal128(12, 2)),
    ]
)
LOG = pa.schema([("x", pa.int32()), ("note", pa.string())])

keys = st.tuples(st.sampled_from(REGIONS), st.integers(0, 11))
names = st.none() | st.text(max_size=20)
smalls = st.none() | st.integers(-(2**15), 2**15 - 1)
tags = st.none() | st.lists(st.none() | st.text(max_size=3), max_size=3)
amounts = st.none() | st.decimals("-9999999.99", "9999999.99", places=2)


def by_key(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda r: (r["region"], r["id"]))


class Deployment(RuleBasedStateMachine):
    """One keyed, partitioned, bucketed table and one log table, both with a lake."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="lakehead-model-")
        self.patched = pytest.MonkeyPatch()
        self.rows: dict[tuple[str, int], dict[str, Any]] = {}
        self.log: list[dict[str, Any]] = []
        self.tiered_rows: list[dict[str, Any]] = []
        self.tiered_log = 0
        self.history: list[tuple[int, list[dict[str, Any]]]] = []

    @initialize(
        durability=st.sampled_from(["sync", "os"]),
        compression=st.sampled_from(["none", "lz4", "zstd"]),
        forgets=st.booleans(),
        remembers=st.booleans(),
    )
    def create(self, durability: str, compression: str, forgets: bool, remembers: bool) -> None:
        # What the log does to the lake is remembered where it is much; here however little it is, or never.
        self.patched.setattr(known_changes, "MANY_ROWS", 1 if remembers else 1 << 30)
        self.con = lh.connect(self.folder)
        # The lake keeps the changelog of the one whose log forgets it.
        log: dict[str, Any] = {"hot_retention": "0s", "segment_bytes": 512, "lake_changelog": True} if forgets else {}
        self.keyed_table = self.con.create_table(
            "m.keyed",
            KEYED,
            primary_key=["region", "id"],
            partition_by=["region"],
            buckets=2,
            lake="iceberg",
            durability=durability,
            compression=compression,
            **log,
        )
        self.log_table = self.con.create_table(
            "m.log", LOG, buckets=2, lake="iceberg", durability=durability, compression=compression
        )

    @rule(given=st.lists(st.tuples(keys, names, smalls, tags, amounts), min_size=1, max_size=12))
    def upsert(self, given: list[Any]) -> None:
        rows = [dict(region=k[0], id=k[1], name=n, small=s, tags=t, amount=a) for k, n, s, t, a in given]
        self.keyed_table.upsert(rows)
        for row in rows:
            self.rows[row["region"], row["id"]] = row

    @rule(given=st.lists(st.tuples(keys, names), min_size=1, max_size=12))
    def update_names(self, given: list[Any]) -> None:
        rows = [dict(region=k[0], id=k[1], name=n) for k, n in given]
        self.keyed_table.upsert(rows)
        for row in rows:
            old = self.rows.get((row["region"], row["id"])) or dict.fromkeys(KEYED.names)
            self.rows[row["region"], row["id"]] = {**old, **row}

    @rule(given=st.lists(keys, min_size=1, max_size=12))
    def delete(self, given: list[tuple[str, int]]) -> None:
        self.keyed_table.delete([dict(region=r, id=i) for r, i in given])
        for key in given:
            self.rows.pop(key, None)

    @rule(given=st.lists(st.tuples(st.integers(-5, 5), names), min_size=1, max_size=12))
    def append(self, given: list[Any]) -> None:
        rows = [dict(x=x, note=n) for x, n in given]
        self.log_table.append(rows)
        self.log += rows

    @rule()
    def tier(self) -> None:
        result = self.con.tier("m.keyed")
        self.con.tier("m.log")
        self.tiered_rows = by_key(list(self.rows.values()))
        self.tiered_log = len(self.log)
        if result.snapshot_id is not None:
            self.history.append((result.snapshot_id, self.tiered_rows))

    @rule()
    def trim(self) -> None:
        self.con._server.service.maintain()  # type: ignore[attr-defined]

    @rule()
    def compact(self) -> None:
        self.keyed_table.lake.compact()
        if self.keyed_table.properties["lake_changelog"]:
            self.keyed_table.lake.changelog.compact()

    @rule()
    def restart(self) -> None:
        self.con.close()
        self.con = lh.connect(self.folder)
        self.keyed_table, self.log_table = self.con.table("m.keyed"), self.con.table("m.log")

    @rule(bound=st.integers(-100, 100))
    def filtered_union(self, bound: int) -> None:
        want = [r for r in self.rows.values() if r["small"] is not None and r["small"] > bound]
        scan = self.keyed_table.scan(["region", "id", "name"], where=f"small > {bound}")
        got = scan.to_arrow().to_pylist()
        assert by_key(got) == by_key([{c: r[c] for c in ("region", "id", "name")} for r in want])
        assert scan.count() == len(want)

    @rule()
    def sql_union(self) -> None:
        (count, total) = self.con.sql("select count(*), count(distinct (region, id)) from m.keyed").fetchall()[0]
        assert count == total == len(self.rows)

    @precondition(lambda self: self.history)
    @rule(at=st.integers(0, 99))
    def time_travel(self, at: int) -> None:
        snapshot, want = self.history[at % len(self.history)]
        assert by_key(self.keyed_table.scan(snapshot=snapshot).to_arrow().to_pylist()) == want

    @rule(asked=st.lists(keys, min_size=1, max_size=12, unique=True))
    def lookup(self, asked: list[tuple[str, int]]) -> None:
        got = self.keyed_table.lookup([dict(region=r, id=i) for r, i in asked]).to_pylist()
        assert got == [self.rows[k] for k in asked if k in self.rows]

    @rule()
    def replay_changelog(self) -> None:
        state: dict[tuple[str, int], dict[str, Any]] = {}
        for batch in self.keyed_table.subscribe("earliest", stop="now"):
            for row in batch.rows.to_pylist():
                key = (row["region"], row["id"])
                image = {c: row[c] for c in KEYED.names}
                if row["__change_type"] in ("-U", "-D"):
                    assert state.pop(key) == image
                else:
                    assert key not in state
                    state[key] = image
        assert state == self.rows

    @invariant()
    def union_is_the_model(self) -> None:
        if not hasattr(self, "con"):
            return
        assert by_key(self.keyed_table.scan().to_arrow().to_pylist()) == by_key(list(self.rows.values()))
        assert self.keyed_table.scan().count() == len(self.rows)
        order = lambda rows: sorted(rows, key=lambda r: (r["x"], r["note"] or "", r["note"] is None))  # noqa: E731
        assert order(self.log_table.scan().to_arrow().to_pylist()) == order(self.log)
        assert by_key(self.keyed_table.scan(tier="lake").to_arrow().to_pylist()) == self.tiered_rows
        assert self.log_table.scan(tier="lake").count() == self.tiered_log
        assert self.log_table.scan(tier="hot").count() == len(self.log) - self.tiered_log

    def teardown(self) -> None:
        if hasattr(self, "con"):
            self.con.close()
        self.patched.undo()
        shutil.rmtree(self.folder, ignore_errors=True)


TestDeployment = Deployment.TestCase
TestDeployment.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
