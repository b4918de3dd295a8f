"""Primary-key tables against a dict and its list of changes: lookups, scans and the changelog agree at every moment."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import lakehead as lh

SCHEMA = pa.schema([("k", pa.int32()), ("s", pa.string()), ("p", pa.bool_()), ("a", pa.int64()), ("b", pa.string())])
KEYS = [(k, s) for k in range(6) for s in ("x", "", "é")]
keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8)
numbers = st.none() | st.integers(-9, 9)
texts = st.none() | st.sampled_from(["", "text", "a longer text, past what fits inline"])


def key_row(key: tuple[int, str]) -> dict[str, Any]:
    return {"k": key[0], "s": key[1], "p": key[0] % 2 == 0}


class KeyedTable(RuleBasedStateMachine):
    """The model: key -> row. Rules of the lake are added by subclasses with ``lake`` set."""

    lake: str | None = None

    @initialize(partitioned=st.booleans(), buckets=st.integers(1, 3), compressed=st.booleans())
    def create(self, partitioned: bool, buckets: int, compressed: bool) -> None:
        self.folder = tempfile.mkdtemp()
        self.con = lh.connect(self.folder)
        self.table = self.con.create_table(
            "t",
            SCHEMA,
            primary_key=["k", "s", "p"] if partitioned else ["k", "s"],
            partition_by=["p"] if partitioned else None,
            bucket_key=["k"],
            buckets=buckets,
            lake=self.lake,
            durability="os",
            compression="lz4" if compressed else "none",
            segment_bytes=4000,
        )
        self.key_columns = self.table.primary_key
        self.model: dict[tuple[int, str], dict[str, Any]] = {}

    def keys_only(self, some: list[tuple[int, str]]) -> list[dict[str, Any]]:
        return [{c: key_row(key)[c] for c in self.key_columns} for key in some]

    @rule(rows=st.lists(st.tuples(st.sampled_from(KEYS), numbers, texts), min_size=1, max_size=10))
    def upsert(self, rows: list[tuple[tuple[int, str], int | None, str | None]]) -> None:
        self.table.upsert([{**key_row(key), "a": a, "b": b} for key, a, b in rows])
        for key, a, b in rows:
            self.model[key] = {**key_row(key), "a": a, "b": b}

    @rule(rows=st.lists(st.tuples(st.sampled_from(KEYS), numbers), min_size=1, max_size=10))
    def upsert_some_columns(self, rows: list[tuple[tuple[int, str], int | None]]) -> None:
        self.table.upsert(
            [{**dict(zip(("k", "s", "p"), key_row(key).values(), strict=True)), "a": a} for key, a in rows]
        )
        for key, a in rows:
            self.model[key] = {**self.model.get(key, {**key_row(key), "b": None}), "a": a}

    @rule(some=keys)
    def delete(self, some: list[tuple[int, str]]) -> None:
        self.table.delete(self.keys_only(some))
        for key in some:
            self.model.pop(key, None)

    @rule(many=st.integers(100, 1500))
    def fill_and_empty(self, many: int) -> None:
        rows = [{"k": 1000 + i, "s": "", "p": True, "a": i, "b": str(i)} for i in range(many)]
        self.table.upsert(rows)
        assert self.table.scan().count() == len(self.model) + many
        self.table.delete([{c: r[c] for c in self.key_columns} for r in rows])

    @rule()
    def restart(self) -> None:
        self.con.close()
        self.con = lh.connect(self.folder)
        self.table = self.con.table("t")

    @rule(some=keys)
    def lookup(self, some: list[tuple[int, str]]) -> None:
        found = self.table.lookup(self.keys_only(some)).to_pylist()
        assert found == [self.model[key] for key in some if key in self.model]

    @rule(k=st.integers(0, 6))
    def prefix_lookup(self, k: int) -> None:
        asked = {c: v for c, v in {"k": k, "p": k % 2 == 0}.items() if c == "k" or c in self.key_columns}
        found = self.table.prefix_lookup([asked]).to_pylist()
        wanted = [row for (number, _), row in self.model.items() if number == k]
        assert sorted(found, key=str) == sorted(wanted, key=str)

    @rule(low=st.integers(-9, 9))
    def scan_where(self, low: int) -> None:
        scan = self.table.scan(where=f"a > {low} or b is null")
        wanted = [r for r in self.model.values() if (r["a"] is not None and r["a"] > low) or r["b"] is None]
        assert sorted(scan.to_arrow().to_pylist(), key=str) == sorted(wanted, key=str)
        assert scan.count() == len(wanted)

    @rule(start=st.sampled_from(["earliest", "full"]))
    def replay_the_changelog(self, start: Any) -> None:
        state: dict[tuple[int, str], dict[str, Any]] = {}
        for batch in self.table.subscribe(start, stop="now"):
            for r in batch.rows.to_pylist():
                key, image = (r["k"], r["s"]), {c: r[c] for c in SCHEMA.names}
                if r["__change_type"] in ("-U", "-D"):
                    assert state.pop(key) == image
                else:
                    assert key not in state
                    state[key] = image
        assert state == self.model

    @invariant()
    def scan_is_the_model(self) -> None:
        found = {(r["k"], r["s"]): r for r in self.table.scan().to_arrow().to_pylist()}
        assert found == self.model

    def teardown(self) -> None:
        if hasattr(self, "con"):
            self.con.close()
            shutil.rmtree(self.folder)


TestKeyedTable = KeyedTable.TestCase
TestKeyedTable.settings = settings(max_examples=25, stateful_step_count=15)
