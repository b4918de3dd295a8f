"""Jobs that publish what their tasks stage, as Spark does, while the server is killed: each batch counts once, and one
that overwrites partitions replaces all of them or none."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Mapping, Sequence

import pyarrow as pa
from tests.crash import points
from tests.crash.deployment import Deployment
from tests.crash.history import require
from tests.crash.tools import Step, Tools
from tests.crash.workload import UNKNOWN

import lakehead as lh
from lakehead.api.table import handle_of
from lakehead.client.staging import JobBatch, Part
from lakehead.types import WriteKind

SCHEMA = pa.schema([pa.field("k", pa.int64(), False), ("batch", pa.int64())])
KEYS = 60
DAYS = pa.schema([pa.field("day", pa.string(), False), pa.field("k", pa.int64(), False), ("batch", pa.int64())])
DAY_COUNT = 4
Row = tuple[str, int, int]


def publish_deck() -> list[Step]:
    """The steps that are played here, each once."""
    return [
        *(Step("publish", p) for p in (*points.STAGE, *points.PUBLISH, "random")),
        *(Step("overwrite", p) for p in (*points.STAGE, *points.OVERWRITE, "random")),
    ]


class Job:
    """Writes one batch after the other to a table; a batch whose publication was not answered is written again."""

    def __init__(self, con: lh.Connection, name: str, draws: random.Random, *, keyed: bool) -> None:
        key = {"primary_key": ["k"]} if keyed else {}
        self.table = con.create_table(name, SCHEMA, buckets=3, segment_bytes=16_000, **key)
        self._kind: WriteKind = "upsert" if keyed else "append"
        self._draws = draws
        self._done = 0
        self._rows: dict[int, list[int]] = {}

    def write(self) -> None:
        """Stage and publish the next batch, or the last again, which was not answered.

        Raises:
            LakeheadError: it is open whether it is there.
        """
        number, draws = self._done, self._draws
        keys = self._rows.setdefault(number, draws.sample(range(KEYS), draws.randint(1, KEYS)))
        keys = draws.sample(keys, len(keys))  # no task of a repeated batch has the rows that one had before
        batch = JobBatch("job of the crash suite", number)
        self._task(batch, keys)  # it fails after it has staged all
        cuts = sorted(draws.choices(range(len(keys) + 1), k=draws.randint(0, 3)))
        along = draws.random() < 0.5
        parts = [self._task(batch, keys[i:j], along) for i, j in itertools.pairwise([0, *cuts, len(keys)])]
        handle_of(self.table).staging.publish(batch, parts, lasting=True)
        self._done += 1

    def _task(self, batch: JobBatch, keys: list[int], along: bool = False) -> Part:
        """Stages rows, or has them go ``along`` with what publishes them."""
        staging = handle_of(self.table).staging
        task = staging.held() if along else staging.rows(batch)
        size = self._draws.randint(1, KEYS)
        for piece in (keys[at : at + size] for at in range(0, len(keys), size)):
            task.add(self._kind, pa.table([piece, [batch.number] * len(piece)], schema=SCHEMA))
        return task.done()

    def check(self) -> None:
        """Every batch that was answered is there once."""
        rows = self.table.scan().to_arrow()
        found = sorted(zip(rows["k"].to_pylist(), rows["batch"].to_pylist(), strict=True))
        answered = {n: keys for n, keys in self._rows.items() if n < self._done}
        if self._kind == "append":
            expected = sorted((k, n) for n, keys in answered.items() for k in keys)
        else:
            expected = sorted({k: n for n, keys in sorted(answered.items()) for k in keys}.items())
        require(found == expected, f"{self.table.name} has {found}, published was {expected}")


class Daily:
    """Overwrites some partitions of a table with each batch, beside plain writes; a batch whose publication was not
    answered is written again."""

    def __init__(self, con: lh.Connection, name: str, draws: random.Random, *, kind: str) -> None:
        more = {"kv": {"primary_key": ["day", "k"]}, "lake": {"lake": "iceberg", "hot_retention": "0s"}}.get(kind, {})
        self.table = con.create_table(name, DAYS, partition_by="day", buckets=2, segment_bytes=16_000, **more)
        self._tiers = kind == "lake"
        self._kind: WriteKind = "upsert" if kind == "kv" else "append"
        self._draws = draws
        self._number = 0
        self._open: dict[str, list[Row]] | None = None
        self._landed = False
        self._rows: dict[str, list[Row]] = {}

    def write(self) -> None:
        """Overwrite partitions by the next batch, or by the last again, which was not answered.

        Raises:
            LakeheadError: it is open whether it is there.
        """
        draws = self._draws
        if self._open is None:
            self._number += 1
            days = draws.sample(range(DAY_COUNT), draws.randint(1, DAY_COUNT))
            self._open = {f"d{day}": self._drawn(f"d{day}", self._number) for day in days}
        rows = [row for of_day in self._open.values() for row in of_day]
        rows = draws.sample(rows, len(rows))
        batch = JobBatch("daily job of the crash suite", self._number)
        self._task(batch, rows)  # it fails after it has staged all
        cuts = sorted(draws.choices(range(len(rows) + 1), k=draws.randint(0, 3)))
        along = draws.random() < 0.5
        parts = [self._task(batch, rows[i:j], along) for i, j in itertools.pairwise([0, *cuts, len(rows)])]
        handle_of(self.table).staging.publish(batch, parts, lasting=True, overwrite=())
        if not self._landed:
            self._rows |= self._open
        self._open, self._landed = None, False

    def write_beside(self) -> None:
        """A write of nobody's job, to whatever partition."""
        day = f"d{self._draws.randrange(DAY_COUNT)}"
        rows = self._drawn(day, -1)
        kept = self._rows.get(day, [])
        if self._kind == "append":
            self.table.append(_days(rows))
        else:
            self.table.upsert(_days(rows))
            keys = {k for _, k, _ in rows}
            kept = [row for row in kept if row[1] not in keys]
        self._rows[day] = [*kept, *rows]
        if self._tiers and self._draws.random() < 0.7:
            with contextlib.suppress(lh.CommitConflictError):  # with the tiering service
                self.table.lake.tier()

    def check(self) -> None:
        """Each partition has what was last written to it, and a batch that was not answered is in all of them or in
        none; from now on, what it is in."""
        found = sorted(zip(*self.table.scan().to_arrow().to_pydict().values(), strict=True))
        if self._open is not None and not self._landed and found == _sorted(self._rows | self._open):
            self._rows, self._landed = self._rows | self._open, True
        expected = _sorted(self._rows)
        require(found == expected, f"{self.table.name} has {found}, not {expected}; open is {self._open}")

    def _drawn(self, day: str, number: int) -> list[Row]:
        draws = self._draws
        return [(day, k, number) for k in draws.sample(range(KEYS), draws.randint(1, KEYS))]

    def _task(self, batch: JobBatch, rows: list[Row], along: bool = False) -> Part:
        staging = handle_of(self.table).staging
        task = staging.held() if along else staging.rows(batch)
        size = self._draws.randint(1, KEYS)
        for at in range(0, len(rows), size):
            task.add(self._kind, _days(rows[at : at + size]))
        return task.done()


def _days(rows: Sequence[Row]) -> pa.Table:
    return pa.Table.from_arrays(list(map(pa.array, zip(*rows, strict=True))), schema=DAYS)


def _sorted(rows: Mapping[str, Sequence[Row]]) -> list[Row]:
    return sorted(row for of_day in rows.values() for row in of_day)


class PublishSteps(Tools):
    """Played by name, as those of `Player`."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._numbers = itertools.count()

    def _publish(self, deployment: Deployment, step: Step) -> None:
        """The server dies while a job stages or publishes; the job writes the same batch again, from other tasks."""
        name = f"p.n{next(self._numbers)}"
        with deployment.server.connect() as con:
            jobs = [Job(con, f"{name}_{kind}", self.random, keyed=kind == "kv") for kind in ("log", "kv")]
            for job in jobs:
                job.write()
            self._lose_server(deployment, step, jobs)
            for job in jobs:
                job.write()
                job.check()
            deployment.gate.open()
        deployment.check()

    def _overwrite(self, deployment: Deployment, step: Step) -> None:
        """The server dies while a job overwrites partitions: all of them have what it wrote, or none; others write
        there, and the job writes the same batch again, which has it replaced once."""
        name = f"d.n{next(self._numbers)}"
        with deployment.server.connect() as con:
            jobs = [Daily(con, f"{name}_{kind}", self.random, kind=kind) for kind in ("log", "lake", "kv")]
            for job in jobs:
                for write in (job.write_beside, job.write, job.write_beside, job.write_beside, job.check):
                    write()
            self._lose_server(deployment, step, jobs if step.point not in points.OVERWRITE_LOG else jobs[:2])
            for job in jobs:
                for write in (job.check, job.write_beside, job.check, job.write, job.check):
                    write()
            deployment.gate.open()
        deployment.check()

    def _lose_server(self, deployment: Deployment, step: Step, jobs: Sequence[Job | Daily]) -> None:
        """Kill the server at a point while these write, and start it again; the gate may be shut afterwards."""
        if not step.point.startswith(("command.", "staged.", "answer.")):  # everybody passes there
            deployment.gate.shut()

        def once() -> None:
            with contextlib.suppress(*UNKNOWN):
                self.random.choice(jobs).write()

        if step.point == "random":
            self._die_in_a_moment(deployment, str(step), once)
        else:
            deployment.server.arm(step.point, nth=self._nth(step.point))
            self._die(deployment, str(step), once)
        deployment.restart()
