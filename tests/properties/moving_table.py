"""A table to which all things happen that tables may, at random."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

import lakehead as lh
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
FLOATS = (0.0, -0.0, float("nan"), float("inf"), 1.5, None)


class MovingTable:
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


def shown(rows: Iterable[Any]) -> list[str]:
    """In an order of their own; NaN equals NaN, and zeros differ."""
    return sorted(map(repr, rows))
