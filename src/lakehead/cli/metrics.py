"""What Prometheus scrapes of a server and of a tiering service, through the official client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from lakehead.cli.tables import table_states
from lakehead.config import parse_duration_ms
from lakehead.errors import InvalidRequestError, LakeheadError, MissingDependencyError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from lakehead.api.connection import Connection
    from lakehead.tiering.service import RoundReport


class ServerMetrics:
    """Tables and tiering jobs of a server, asked for with each scrape; a prometheus_client collector.

    A scrape asks for each table how it stands, and of a lake table its lake. ``lakehead_table_up`` is 0 for one of
    which that cannot be told, as it is damaged. While the server is away it says ``lakehead_up 0``, and nothing else.
    """

    def __init__(self, con: Connection) -> None:
        self._con = con

    def collect(self) -> Iterable[Metric]:
        """All metrics as they are now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        up = GaugeMetricFamily("lakehead_up", "Whether the server answers.")
        broken: dict[str, LakeheadError] = {}
        try:
            states, told = table_states(self._con, broken.__setitem__), self._con.tiering_status()
        except LakeheadError:
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        yield up
        tables = GaugeMetricFamily("lakehead_table_up", "Whether the table can be asked.", labels=["table"])
        for name in broken:
            tables.add_metric([name], 0)
        records = CounterMetricFamily("lakehead_log_records", "Records that were ever appended.", labels=["table"])
        rows = GaugeMetricFamily("lakehead_rows", "Rows of the table.", labels=["table"])
        lag = GaugeMetricFamily("lakehead_lake_lag_records", "Log records that the lake lacks.", labels=["table"])
        age = GaugeMetricFamily("lakehead_lake_lag_seconds", "Age of the oldest of them.", labels=["table"])
        allowed = GaugeMetricFamily("lakehead_lake_freshness_seconds", "The age that is allowed.", labels=["table"])
        for s in states:
            tables.add_metric([s["table"]], 1)
            records.add_metric([s["table"]], s["end"])
            rows.add_metric([s["table"]], s["rows"])
            if s["lake"]:
                lag.add_metric([s["table"]], s["lag_rows"])
                age.add_metric([s["table"]], s["lag_seconds"])
                allowed.add_metric([s["table"]], parse_duration_ms(s["freshness"]) / 1000)
        phases = GaugeMetricFamily("lakehead_last_round_seconds", "What it took.", labels=["table", "phase"])
        size = GaugeMetricFamily("lakehead_last_round_bytes", "Bytes of the files that it added.", labels=["table"])
        cpu = GaugeMetricFamily("lakehead_last_round_cpu_seconds", "CPU that it took.", labels=["table"])
        for t in told.tables:
            cpu.add_metric([t.table], t.rounds[-1].cpu_seconds)
            for phase, seconds in t.rounds[-1].seconds.items():
                phases.add_metric([t.table, phase], seconds)
            size.add_metric([t.table], t.rounds[-1].bytes)
        jobs = GaugeMetricFamily("lakehead_tiering_job_tables", "Tables of a tiering job.", labels=["job"])
        memory = GaugeMetricFamily("lakehead_tiering_job_memory_bytes", "Memory of its process.", labels=["job"])
        for job in told.jobs:
            jobs.add_metric([job.name], job.tables)
            memory.add_metric([job.name], job.memory_bytes)
        yield from (tables, records, rows, lag, age, allowed, phases, size, cpu, jobs, memory)


class RoundMetrics:
    """Rounds of a tiering service, counted as they are reported."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, labelnames=["table"], registry=registry)

        self._rounds = counter("lakehead_rounds", "Rounds that moved rows.")
        self._rows = counter("lakehead_round_rows", "Rows that rounds added to the lake.")
        self._deletes = counter("lakehead_round_deletes", "Rows that rounds deleted from the lake.")
        self._seconds = counter("lakehead_round_seconds", "Seconds that rounds took.")

    def count(self, round: RoundReport) -> None:
        """Take in a round."""
        self._rounds.labels(round.table).inc()
        self._rows.labels(round.table).inc(round.rows)
        self._deletes.labels(round.table).inc(round.deletes)
        self._seconds.labels(round.table).inc(round.seconds)


def new_registry() -> CollectorRegistry:
    """A registry with the metrics of this process: CPU, memory, descriptors.

    Raises:
        MissingDependencyError: prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector
    except ImportError as e:
        raise MissingDependencyError("metrics need prometheus_client: pip install 'lakehead[metrics]'") from e
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


@contextlib.contextmanager
def served(address: str, registry: CollectorRegistry) -> Iterator[str]:
    """Answer scrapes at ``host:port`` while the block lasts; port 0 takes a free one. Yields the URL.

    Raises:
        InvalidRequestError: it is no address, or cannot be listened on.
    """
    from prometheus_client import start_http_server

    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidRequestError(f"--metrics {address!r} is no address: use host:port, as in 127.0.0.1:9464")
    try:
        server, thread = start_http_server(int(port), host, registry)
    except OSError as e:
        raise InvalidRequestError(f"--metrics {address}: cannot listen there: {e}") from e
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
