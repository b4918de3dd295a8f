"""Rows by the leading columns of their keys, against a plain model: rows come, go and come again, in batches of any
size, as a log that is read again has them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lakehead.kv import prefixes
from lakehead.kv.tablet import KvTablet
from lakehead.types import ChangeType, Schemas

KEYS = {
    "an integer": [("a", pa.int64())],
    "a text": [("a", pa.string())],
    "two columns": [("a", pa.int32()), ("b", pa.string())],
}


def prefix_of(kind: str, number: int) -> dict[str, Any]:
    if kind == "an integer":
        return {"a": number - 2}
    if kind == "a text":
        return {"a": "x" * number}
    return {"a": number % 2, "b": f"{number // 2}"}


class Rows:
    """A tablet, and what it should hold: each key's latest offset."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.rng = kind, random.Random(seed)
        self.key = KEYS[kind]
        names = [name for name, _ in self.key]
        fields = [pa.field(name, t, nullable=False) for name, t in self.key]
        self.schema = pa.schema([*fields, pa.field("n", pa.int64(), nullable=False), pa.field("v", pa.int64())])
        self.kv = KvTablet(Schemas.only(self.schema), (*names, "n"), tuple(names), seed=seed)
        self.live: dict[tuple[int, int], int] = {}
        self.end = 0

    def change(self, count: int, prefix_max: int, number_max: int) -> None:
        """So many records, of few keys, as one piece: as a write of one caller alone never has them."""
        kinds: list[int] = []
        rows: list[dict[str, Any]] = []
        for _ in range(count):
            key = self.rng.randrange(prefix_max), self.rng.randrange(number_max)
            if key in self.live and self.rng.random() < 0.6:
                kinds.append(ChangeType.DELETE)
                del self.live[key]
            else:
                kinds.append(ChangeType.UPDATE_AFTER if key in self.live else ChangeType.INSERT)
                self.live[key] = self.end + len(rows)
            rows.append({**prefix_of(self.kind, key[0]), "n": key[1], "v": self.rng.randrange(99)})
        batch = pa.RecordBatch.from_pylist(rows, schema=self.schema)
        self.kv.apply(self.end, np.array(kinds, np.int8), batch)
        self.end += count

    def write(self, count: int, prefix_max: int) -> None:
        """New keys and others, as a write that was planned."""
        keys = {(self.rng.randrange(prefix_max), self.rng.randrange(1000)) for _ in range(count)}
        rows = [{**prefix_of(self.kind, p), "n": n, "v": 1} for p, n in keys]
        change = self.kv.plan_upsert(pa.RecordBatch.from_pylist(rows, schema=self.schema), self.end)
        self.kv.apply(self.end, change.change_types, change.rows)
        for key, end in zip(keys, change.ends.tolist(), strict=True):
            self.live[key] = self.end + end - 1
        self.end += change.rows.num_rows

    def found(self, numbers: list[int]) -> list[dict[str, Any]]:
        asked = [prefix_of(self.kind, number) for number in numbers]
        schema = pa.schema([self.schema.field(name) for name, _ in self.key])
        rows = self.kv.gather(self.kv.prefix_find(pa.RecordBatch.from_pylist(asked, schema=schema)))
        return rows.drop_columns(["v"]).to_pylist()

    def check(self, prefix_max: int) -> None:
        for asked in ([number] for number in range(prefix_max + 1)):
            assert self.found(asked) == self.expected(asked)
        several = [self.rng.randrange(prefix_max) for _ in range(4)]
        assert self.found(several) == self.expected(several)
        assert self.found([]) == []
        # Those that are gone are kept nowhere.
        assert len(self.kv._prefixes) == len({p for p, _ in self.live})

    def expected(self, numbers: list[int]) -> list[dict[str, Any]]:
        by_offset = sorted((offset, key) for key, offset in self.live.items() if key[0] in numbers)
        return [{**prefix_of(self.kind, p), "n": n} for _, (p, n) in by_offset]


@pytest.mark.parametrize("followed", [0, 8, 1 << 40], ids=["lists alone", "either", "all slots"])
@pytest.mark.parametrize("kind", KEYS)
def test_each_prefix_has_the_rows_that_are_live(kind: str, followed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "_FOLLOWED", followed)
    t = Rows(kind, seed=followed % 7)
    for _ in range(40):
        t.change(t.rng.choice([1, 3, 20]), prefix_max=4, number_max=3)
        t.check(4)
    for size in (2, 700, 40, 900):  # more slots, and more prefixes, than there is room for at first
        t.write(size, 1500)
        t.change(30, prefix_max=6, number_max=3)
        t.check(6)
    for number in range(0, 1500, 100):
        assert t.found([number]) == t.expected([number])


def test_rows_of_a_checkpoint_are_found() -> None:
    t = Rows("two columns", seed=3)
    t.write(300, 20)
    again = Rows("two columns", seed=4)
    again.kv.reserve(300)
    for offsets, rows in t.kv.live_rows():
        again.kv.load(offsets, rows)
    again.live, again.end = dict(t.live), t.end
    again.check(20)
    again.kv.clear()
    again.live = {}
    again.check(20)
