"""Spark streams that copy tables while servers, drivers and workers are killed: the copies have each row once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.crash import points
from tests.crash.deployment import Deployment
from tests.crash.history import require
from tests.crash.processes import SparkChild, wait_until
from tests.crash.tools import Step, Tools

STREAM_SECONDS = 400.0
COPIED = {"t.log_sync": "s.log_sync", "t.log_lake": "s.log_lake"}


def stream_deck() -> list[Step]:
    """The steps that are played here, each once."""
    server = [p for p in (*points.STAGE, *points.PUBLISH) if p.startswith(("staged.", "command.", "answer."))]
    return [Step("stream", p) for p in (*server, "server", "driver", "worker", "driver", "worker")]


class Streams(SparkChild):
    """Streaming queries in a driver with its JVM and its Python workers; they go on from their checkpoints."""

    def __init__(self, work: Path) -> None:
        super().__init__(work, "streams")
        self._checkpoints = work / "checkpoints"

    def start(self, uri: str) -> None:
        """Begin to start."""
        self.spawn_spark("streams", uri, str(self._checkpoints), json.dumps(COPIED))


class StreamSteps(Tools):
    """Played by name, as those of `Player`."""

    _streams: Streams | None = None

    def _stream(self, deployment: Deployment, step: Step) -> None:
        """Something of a copying stream dies: the copies get each row once."""
        if self._streams is None:
            self._streams = Streams(deployment.work)
            self._streams.start(deployment.server.uri)
        streams = self._streams
        deployment.gate.open()
        self._wait(0.3, 1.0)
        match step.point:
            case "driver":
                self._wait(0.0, 2.0)
                streams.kill()
                streams.start(deployment.server.uri)
                self._count(str(step), True)
            case "worker":
                hit = wait_until(lambda: bool(streams.workers()), STREAM_SECONDS)
                self._wait(0.0, 1.0)
                for worker in streams.workers()[:1]:
                    worker.kill()
                self._count(str(step), hit)
            case "server":
                self._wait(0.0, 2.0)
                deployment.server.kill()
                deployment.restart()
                self._count(str(step), True)
            case point:
                deployment.server.arm(point, nth=self._nth(point))
                wait_until(lambda: not deployment.server.alive, STREAM_SECONDS)
                self._count(str(step), deployment.server.reached)
                deployment.server.kill()
                deployment.restart()
        self._wait(0.3, 1.0)
        deployment.gate.shut()
        self._caught_up(deployment, streams)
        deployment.check()

    def _caught_up(self, deployment: Deployment, streams: Streams) -> None:
        """Return once the copies have what the tables have."""

        def lacking() -> dict[str, Any]:
            tables = deployment.con.tables()
            return {
                name: (rows, copied)
                for name, copy in COPIED.items()
                if (rows := deployment.con.table(name).scan().count())
                != (copied := deployment.con.table(copy).scan().count() if copy in tables else 0)
            }

        if not wait_until(lambda: not lacking() or not streams.alive, STREAM_SECONDS) or not streams.alive:
            require(False, f"copies have other rows than tables: {lacking()}: {streams.errors[-3000:]}")
        for name, copy in COPIED.items():
            original, copied = (_sorted(deployment.con.table(t).scan().to_arrow()) for t in (name, copy))
            require(original == copied, f"{copy} does not have the rows of {name}")

    def end_streams(self) -> None:
        """Kill what runs."""
        if self._streams is not None:
            self._streams.kill()
            self._streams = None


def _sorted(rows: pa.Table) -> Sequence[tuple[Any, ...]]:
    return sorted((tuple(row.values()) for row in rows.to_pylist()), key=repr)
