"""Streaming queries that are killed, and their servers: what they write has each row of what they read once."""

from __future__ import annotations

from pathlib import Path

from tests.crash import points
from tests.crash.deployment import Deployment
from tests.crash.history import require
from tests.crash.processes import SparkChild, wait_until
from tests.crash.query_history import LAYERS, READ, TOGETHER, wrong_tables
from tests.crash.tools import Step, Tools

STREAM_SECONDS = 400.0
SETTLE_SECONDS = 60.0
"""For a server to end a publication that nobody asks for any more."""
REACH_SECONDS = 20.0
_SERVER = ("staged.", "command.", "answer.")
"""Points of the server that only publications come to; other writes come to the rest, too."""
_OF_STAGED = ("staged.", "stage.", "answer.Stage", "folder.remove.")
"""Points that rows which come along with their publication do not come to."""
_DECIDED = ("command.BeginPublication.after", "segment.append.torn", "command.EndPublication.after")
"""Points after which the server alone must end a publication; the driver dies with it there."""


def stream_deck() -> list[Step]:
    """The steps with queries that copy tables, each once."""
    server = [p for p in (*points.STAGE, *points.PUBLISH) if p.startswith(_SERVER)]
    return [Step("stream", p) for p in (*server, "server", "driver", "worker", "driver", "worker")]


def layers_deck() -> list[Step]:
    """The steps with queries that write several tables from a micro-batch, each once."""
    driver = [f"driver: {p}" for p in points.PUBLISHER]
    server = (*points.STAGE, *points.PUBLISH, "server", "server")
    steps = (*server, *driver, "worker: stage.before", "worker: stage.after", "driver", "driver", "worker", "worker")
    return [Step(kind, p) for kind in ("pipeline", "changes") for p in steps if _comes_to(kind, p)]


def _comes_to(kind: str, point: str) -> bool:
    """Changes are staged by tasks alone."""
    return kind == "pipeline" or not point.startswith("driver: stage.")


class Streams(SparkChild):
    """Queries of one kind in a driver with its JVM and its Python workers; they go on from their checkpoints."""

    def __init__(self, work: Path, kind: str, *, staged: bool) -> None:
        super().__init__(work, f"{kind}-queries")
        self.kind = kind
        self.staged = staged
        self.by_tasks = False
        self._checkpoints = work / "checkpoints"

    def start(self, uri: str) -> None:
        """Begin to start."""
        how = ["staged"] * self.staged + ["tasks"] * self.by_tasks
        self.spawn_spark("streams", uri, str(self._checkpoints), self.kind, *how)


class StreamSteps(Tools):
    """Played by name, as those of `Player`."""

    _streams: Streams | None = None

    def _stream(self, deployment: Deployment, step: Step) -> None:
        """Something of copying queries dies."""
        self._killed_while_queries_run(deployment, step)

    def _pipeline(self, deployment: Deployment, step: Step) -> None:
        """Something of a query that writes bronze, silver and gold dies."""
        for name, (schema, key) in LAYERS.items():
            deployment.con.create_table(name, schema, primary_key=key, buckets=2, if_not_exists=True)
        self._killed_while_queries_run(deployment, step)

    def _changes(self, deployment: Deployment, step: Step) -> None:
        """Something of queries that apply changes, as dimensions of type 1 and 2, dies."""
        self._killed_while_queries_run(deployment, step)

    def _killed_while_queries_run(self, deployment: Deployment, step: Step) -> None:
        streams = self._running(deployment, step)
        deployment.gate.open()
        self._wait(0.3, 1.0)
        match step.point.split(": "):
            case ["driver"]:
                self._wait(0.0, 2.0)
                self._driver_dies(deployment, streams)
                self._count(str(step), True)
            case ["driver", point]:
                streams.arm(point, nth=self._nth_piece(step))
                wait_until(lambda: not streams.alive, STREAM_SECONDS)
                self._count(str(step), streams.reached)
                self._driver_dies(deployment, streams)
            case ["worker"]:
                hit = wait_until(lambda: bool(streams.workers()), STREAM_SECONDS)
                self._wait(0.0, 1.0)
                for worker in streams.workers()[:1]:
                    worker.kill()
                self._count(str(step), hit)
            case ["worker", point]:
                streams.arm_worker(point)
                if step.kind == "pipeline":  # Its small micro-batches pass through the driver.
                    streams.by_tasks = True
                    self._driver_dies(deployment, streams)
                    streams.by_tasks = False
                self._count(str(step), wait_until(lambda: streams.worker_reached, STREAM_SECONDS))
            case ["server"]:
                self._wait(0.0, 2.0)
                self._server_dies(deployment, streams)
                self._count(str(step), True)
            case _:
                self._reach(deployment, step)
                self._count(str(step), deployment.server.reached)
                self._server_dies(deployment, streams, and_driver=step.kind != "stream" and step.point in _DECIDED)
        self._wait(0.3, 1.0)
        deployment.gate.shut()
        self._caught_up(deployment, streams)
        deployment.check()

    def _running(self, deployment: Deployment, step: Step) -> Streams:
        """The queries of a kind, which come to a point; those of other kinds end."""
        staged = step.point.removeprefix("driver: ").startswith(_OF_STAGED)
        if self._streams is None or self._streams.kind != step.kind or (staged and not self._streams.staged):
            self.end_streams()
            self._streams = Streams(deployment.work, step.kind, staged=staged or self.random.random() < 0.3)
            self._streams.start(deployment.server.uri)
        return self._streams

    def _nth_piece(self, step: Step) -> int:
        """Of copies each point is as good as the next; others come to it for one table after the other."""
        point = step.point.removeprefix("driver: ")
        often = point.startswith(("segment.", "command.End", "folder.", "staged.", "stage.", "answer.Stage"))
        return 1 if step.kind == "stream" else self.random.choice((1, 2, 3) if often else (1, 2))

    def _reach(self, deployment: Deployment, step: Step) -> None:
        """Have the server die at a point of a publication."""
        server = deployment.server
        if step.point.startswith(_SERVER):
            server.arm(step.point, nth=self._nth_piece(step))
            wait_until(lambda: not server.alive, STREAM_SECONDS)
            return
        for _ in range(9):  # With nothing else written: there is a micro-batch left, or there is none.
            deployment.gate.shut()
            server.arm(step.point, nth=self._nth_piece(step))
            if wait_until(lambda: not server.alive, REACH_SECONDS):
                return
            server.disarm()
            deployment.gate.open()
            self._wait(1.0, 3.0)

    def _server_dies(self, deployment: Deployment, streams: Streams, *, and_driver: bool = False) -> None:
        deployment.server.kill()
        if and_driver:
            streams.kill()
        deployment.restart()
        if and_driver:
            self._driver_dies(deployment, streams)

    def _driver_dies(self, deployment: Deployment, streams: Streams) -> None:
        """What its queries have published is in all tables, before they go on."""
        streams.kill()
        streams.disarm()
        con, together = deployment.con, TOGETHER[streams.kind]
        whole = wait_until(lambda: not wrong_tables(con, together(con)), SETTLE_SECONDS)
        require(whole, f"a micro-batch is in one table and not in another: {wrong_tables(con, together(con))}")
        streams.start(deployment.server.uri)

    def _caught_up(self, deployment: Deployment, streams: Streams) -> None:
        """Return once the tables that are written have what the tables that are read say."""
        con, expected = deployment.con, READ[streams.kind](deployment.con)

        def caught_up() -> bool:
            self._wait(0.1, 0.2)
            there = con.tables()
            counts = {name: con.table(name).scan().count() if name in there else 0 for name in expected}
            return counts == {name: len(rows) for name, rows in expected.items()} and not wrong_tables(con, expected)

        met = wait_until(lambda: not streams.alive or caught_up(), STREAM_SECONDS)
        require(met and streams.alive, f"{wrong_tables(con, expected)}: {streams.errors[-3000:]}")
        wrong = wrong_tables(con, TOGETHER[streams.kind](con))
        require(not wrong, f"tables that are published together do not fit: {wrong}")

    def end_streams(self) -> None:
        """Kill what runs."""
        if self._streams is not None:
            self._streams.kill()
            self._streams = None
