"""A job that publishes what its tasks stage, as Spark does, while the server is killed: each batch counts once."""

from __future__ import annotations

import contextlib
import itertools
import random

import pyarrow as pa
from tests.crash import points
from tests.crash.deployment import Deployment
from tests.crash.history import require
from tests.crash.tools import Step, Tools
from tests.crash.workload import UNKNOWN

import lakehead as lh
from lakehead.api.table import handle_of
from lakehead.client.staging import JobBatch
from lakehead.protocol.staging import StagedPart
from lakehead.types import WriteKind

SCHEMA = pa.schema([pa.field("k", pa.int64(), False), ("batch", pa.int64())])
KEYS = 60


def publish_deck() -> list[Step]:
    """The steps that are played here, each once."""
    return [Step("publish", p) for p in (*points.STAGE, *points.PUBLISH, "random")]


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
        parts = [self._task(batch, keys[i:j]) for i, j in itertools.pairwise([0, *cuts, len(keys)])]
        handle_of(self.table).staging.publish(batch, parts, lasting=True)
        self._done += 1

    def _task(self, batch: JobBatch, keys: list[int]) -> StagedPart:
        task = handle_of(self.table).staging.rows(batch)
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
            quiet = not step.point.startswith(("command.", "staged.", "answer."))
            for job in jobs:
                job.write()
            if quiet:  # everybody passes there
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
            for job in jobs:
                job.write()
                job.check()
            deployment.gate.open()
        deployment.check()
