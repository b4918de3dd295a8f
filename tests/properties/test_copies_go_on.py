"""What `con.sql` reads of copies that go on with their tables is what the tables have, whatever comes between two
statements; and each relation reads its own moment, however far the copy has gone on since.

``python -m tests.properties.test_copies_go_on 1000 50`` tries fifty other seeds.
"""

from __future__ import annotations

import gc
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.sql_copies import copying_at_once

import lakehead as lh
from lakehead.api import copied_table
from lakehead.api.copied_table import CopiedTable
from lakehead.api.table import handle_of
from lakehead.client.staging import JobBatch

SCHEMA = pa.schema(
    [
        pa.field("part", pa.date32(), False),
        pa.field("k", pa.int64(), False),
        ("x", pa.float64()),
        ("at", pa.timestamp("us", "UTC")),
        ("tags", pa.list_(pa.string())),
    ]
)
KINDS = [
    (keyed, lake, partitioned) for keyed in (False, True) for lake in (False, True) for partitioned in (False, True)
]
STEPS = 30
FLOATS = (0.0, -0.0, float("nan"), float("inf"), 1.5, None)
Row = tuple[Any, ...]


class Counted:
    """How statements were answered from copies: ``went_on``, ``given_up``, ``older`` than what is known."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.found: Counter[str] = Counter()
        at = CopiedTable.at

        def counted(copy: CopiedTable, *args: Any) -> Any:
            known = len(copy._versions)
            rows = at(copy, *args)
            went_on = "went_on" if len(copy._versions) > known else "same"
            self.found["given_up" if copy.outdated else "older" if rows is None else went_on] += 1
            return rows

        patch.setattr(CopiedTable, "at", counted)


class World:
    """One table, and what happens to it."""

    def __init__(self, con: lh.Connection, rng: random.Random, *, keyed: bool, lake: bool, partitioned: bool) -> None:
        self.con, self.rng = con, rng
        self.keyed, self.lake, self.partitioned = keyed, lake, partitioned
        options: dict[str, Any] = {"lake": "iceberg", "hot_retention": rng.choice(["0s", "1h"])} if lake else {}
        if partitioned:
            options["partition_by"] = "part"
        if keyed:
            options["primary_key"] = ["part", "k"]
        self.table = con.create_table("s.t", SCHEMA, buckets=rng.choice([1, 3]), **options)
        self.jobs = 0

    def rows(self) -> pa.Table:
        rng, count = self.rng, self.rng.choice([1, 2, 9, 40])
        columns = [
            [rng.choice([0, 1, 20_000]) for _ in range(count)],
            [rng.randrange(60) for _ in range(count)],
            [rng.choice(FLOATS) for _ in range(count)],
            [rng.choice([None, rng.randrange(10**15)]) for _ in range(count)],
            [rng.choice([None, [], ["a", None], ["b" * 30]]) for _ in range(count)],
        ]
        schema = SCHEMA if len(self.table.schema) == len(SCHEMA) else self.table.schema
        made = pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)
        for field in [*schema][len(SCHEMA) :]:
            made = made.append_column(field, pa.array([rng.randrange(5) for _ in range(count)], field.type))
        return made

    def write(self) -> None:
        (self.table.upsert if self.keyed else self.table.append)(self.rows())

    def delete(self) -> None:
        if self.keyed:
            self.table.delete(self.rows().select(["part", "k"]))

    def patch(self) -> None:
        if self.keyed:
            self.table.upsert(self.rows().select(["part", "k", "x"]), columns=["part", "k", "x"])

    def tier(self) -> None:
        if self.lake:
            self.con.tier("s.t")

    def compact(self) -> None:
        if self.lake:
            self.con.tier("s.t")
            self.table.lake.compact()

    def trim(self) -> None:
        self.con._server.service.maintain()  # type: ignore[attr-defined]

    def truncate(self) -> None:
        if self.rng.random() < 0.3:
            self.table.truncate()

    def overwrite(self) -> None:
        if not self.partitioned:
            return
        self.jobs += 1
        staging = handle_of(self.table).staging
        held = staging.held()
        held.add("upsert" if self.keyed else "append", self.rows())
        staging.publish(JobBatch(f"job {self.jobs}"), [held.done()], lasting=False, overwrite=[])

    def alter(self) -> None:
        if self.rng.random() < 0.2:
            with self.table.alter() as altered:
                altered.add_column(f"more{len(self.table.schema)}", pa.int32())
            self.table = self.con.table("s.t")

    def step(self) -> None:
        acts = (self.write, self.delete, self.patch, self.tier, self.compact, self.trim, self.truncate, self.overwrite)
        self.rng.choices((*acts, self.alter), (8, 3, 2, 2, 1, 2, 1, 1, 1))[0]()


def shown(rows: list[Row]) -> list[str]:
    """In an order of their own; NaN equals NaN, and zeros differ."""
    return sorted(map(repr, rows))


def asked(con: lh.Connection, text: str) -> list[Row]:
    return con.sql(text).fetchall()


def run(seed: int, folder: Path) -> Counter[str]:
    """What statements found, by how they were answered."""
    rng = random.Random(seed)
    keyed, lake, partitioned = KINDS[seed % len(KINDS)]
    with lh.connect(folder / f"d{seed}") as con, pytest.MonkeyPatch.context() as patch, copying_at_once():
        counted = Counted(patch)
        if rng.random() < 0.3:  # much comes at once
            patch.setattr(copied_table, "LATER_LEAST", 5)
        if rng.random() < 0.3:
            patch.setattr(copied_table, "VERSIONS_MAX", 2)
        world = World(con, rng, keyed=keyed, lake=lake, partitioned=partitioned)
        held: list[tuple[Any, list[str]]] = []
        for _ in range(STEPS):
            for _ in range(rng.choice([0, 1, 1, 3])):
                world.step()
            now = {"now": world.table.scan().to_arrow()}
            plain = shown(con.sql("from now", frames=now).fetchall())
            assert shown(asked(con, "from s.t")) == plain
            counts = "select count(*), count(x), count(distinct k) from"
            assert asked(con, f"{counts} s.t") == con.sql(f"{counts} now", frames=now).fetchall()
            if rng.random() < 0.4:
                held.append((con.sql("from s.t"), plain))
            if held and rng.random() < 0.3:
                held.pop(rng.randrange(len(held)))
            for relation, was in held if rng.random() < 0.2 else ():
                assert shown(relation.fetchall()) == was
        for relation, was in held:
            assert shown(relation.fetchall()) == was
        return counted.found


@pytest.mark.parametrize("seed", range(16))
def test_copies_have_what_their_tables_have(seed: int, tmp_path: Path) -> None:
    found = run(seed, tmp_path)
    assert found["went_on"] > 0, found


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    yield
    gc.collect()


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:3])
    total: Counter[str] = Counter()
    for number in range(first, first + count):
        with tempfile.TemporaryDirectory() as name:
            print(number, found := run(number, Path(name)), flush=True)
            total += found
    print(total)
