"""The tiering service: keeps lake tables as fresh as they promise, with rounds that run as Spark jobs.

One queue of tables by deadline. A table is due so long before its freshness runs out as its rounds have lately taken;
a table without news costs one request at that time. Tasks run on executors, the commit in the driver. An error of one
table delays that table alone; a table that a newer service has taken over is let go. A server that is away, or has come
back with another token, ends nothing: the service asks for it every `RELIST_SECONDS`, and goes on at once with all
tables when it answers.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lakehead.api.connection import Connection, open_server
from lakehead.api.lake import tier_table
from lakehead.api.table import Table
from lakehead.env.clock import Clock, SystemClock
from lakehead.errors import (
    AuthenticationError,
    ClosedError,
    CommitConflictError,
    FencedError,
    LakeheadError,
    NoLakeError,
    TableNotFoundError,
    UnavailableError,
)
from lakehead.spark.connections import bind_session, opened
from lakehead.spark.launch import attach_session, open_session
from lakehead.spark.worker import RemoteLog, guarded
from lakehead.types import TabletKey

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Until = Callable[[], bool] | float | None

_log = logging.getLogger("lakehead.spark.tiering")
RELIST_SECONDS = 2.0
"""How soon a table that is created while the service runs joins the queue."""
ASK_SECONDS = 0.05
"""How often an ``until`` that is a function is asked."""
RETRY_SECONDS = (0.5, 60.0)
"""Delay after the first failure of a table, doubled with each until the greatest."""
IDLE_SHARE = 0.2
"""Least part of a table's freshness between the starts of two rounds, however long they take."""


@dataclass(frozen=True)
class RoundReport:
    """A round that moved rows.

    Attributes:
        table: its name.
        rows, deletes, files: rows added to the lake, older ones deleted, data files added.
        snapshot_id: the lake snapshot.
        seconds: how long the round took.
    """

    table: str
    rows: int
    deletes: int
    files: int
    snapshot_id: int
    seconds: float


@dataclass(eq=False)
class _Entry:
    """A table in the queue."""

    table: Table
    freshness: float
    epoch: int | None = None
    offsets: dict[TabletKey, int] | None = None
    expected: float = 0.0
    failures: int = 0
    gone: bool = field(default=False)

    @property
    def name(self) -> str:
        return self.table.name


class TieringService:
    """See `lakehead.spark.tiering_service`. Runs once at a time; `stop` may be called from any thread."""

    def __init__(
        self,
        spark: SparkSession | None,
        con_or_uri: Connection | str,
        tables: Sequence[str] | None = None,
        *,
        on_round: Callable[[RoundReport], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``spark=None`` makes a session when `run` is called."""
        self._con = opened(con_or_uri)
        self._own_con = self._con is not con_or_uri
        self._spark = spark if spark is None else attach_session(spark, self._con)
        self._names = [str(self._con.table(t).name) for t in tables] if tables is not None else None
        self._on_round = on_round
        self._clock = clock or SystemClock()
        self._stopped = threading.Event()
        self._queue: list[tuple[float, int, _Entry]] = []
        self._order = itertools.count()
        self._known: dict[str, _Entry] = {}
        self._fenced: set[str] = set()
        self._listed = False
        self._away = False

    def stop(self) -> None:
        """Make `run` return once the round under way is committed."""
        self._stopped.set()

    def run(self, until: Until = None) -> None:
        """Tier until told to stop; a round under way is finished first.

        Args:
            until: None: until `stop`, SIGTERM or SIGINT (signals when called in the main thread); a number: so many
                seconds; a function: until it returns true.

        Raises:
            MissingDependencyError: there is no Java 17+ runtime.
            NoLakeError: a table was named that has no lake.
            ClosedError: the connection was closed.
        """
        own = self._spark is None
        spark = self._spark or open_session(self._con, {"app_name": "lakehead tiering"})
        self._stopped.clear()
        end = self._clock.monotonic() + until if isinstance(until, int | float) else None
        ask = until if callable(until) else None
        try:
            with _stop_on_signals(self.stop):
                self._serve(spark, end, ask)
        finally:
            if own:
                spark.stop()
            if self._own_con:
                self._con.close()

    def _serve(self, spark: SparkSession, end: float | None, ask: Callable[[], bool] | None) -> None:
        relist = self._clock.monotonic()
        while not self._stopped.is_set() and not (ask is not None and self._says_so(ask)):
            now = self._clock.monotonic()
            if end is not None and now >= end:
                return
            if now >= relist:
                self._list_tables(spark, now)
                relist = self._clock.monotonic() + RELIST_SECONDS
            if self._queue and self._queue[0][0] <= now:
                _, _, entry = heapq.heappop(self._queue)
                if not entry.gone:
                    self._attend(spark, entry)
                continue
            times = [relist, *([self._queue[0][0]] if self._queue else []), *([end] if end is not None else [])]
            pause = max(min(times) - now, 0.0)
            self._stopped.wait(min(pause, ASK_SECONDS) if ask is not None else pause)

    @staticmethod
    def _says_so(ask: Callable[[], bool]) -> bool:
        try:
            return ask()
        except (UnavailableError, AuthenticationError):
            return False  # it could not look: asked again

    # ---- the queue ----------------------------------------------------------------------------------------------

    def _list_tables(self, spark: SparkSession, now: float) -> None:
        """Take up tables that are new, let go of those that are gone."""
        try:
            names = set(self._con.tables())
        except ClosedError:
            raise
        except LakeheadError as e:
            if not self._away:
                _log.warning("tables cannot be listed, trying every %g s: %s", RELIST_SECONDS, e)
            self._away = True
            if isinstance(e, AuthenticationError):
                self._connect_again(spark)
            return
        if self._away:
            _log.warning("the server at %s answers again", self._con.uri)
            self._away = False
            self._all_due(now)
        if self._names is not None:
            names &= set(self._names)
        for name in self._known.keys() - names:
            self._known.pop(name).gone = True
            self._fenced.discard(name)
        for name in sorted(names - self._known.keys() - self._fenced):
            try:
                table = self._con.table(name)
            except LakeheadError:
                continue  # dropped since, or not reachable now: the next listing tells
            if table._client.desc.lake is None and self._names is not None and not self._listed:
                raise NoLakeError(f"table {name} has no lake: create it with lake='iceberg'", table=name)
            entry = self._known[name] = _Entry(table, table._client.desc.properties.freshness_ms / 1000)
            entry.gone = table._client.desc.lake is None
            if not entry.gone:
                self._push(entry, now)
        self._listed = True

    def _connect_again(self, spark: SparkSession) -> None:
        """The server has another token than before: on its machine it stands in this user's files."""
        try:
            con = open_server(self._con.uri, token=None, tls_ca=self._con._given[1])
        except LakeheadError:
            return
        if self._own_con:
            self._con.close()
        self._con, self._own_con = con, True
        bind_session(spark, con)
        # What is known of tables goes through the connection that is refused.
        for entry in self._known.values():
            entry.gone = True
        self._known.clear()

    def _all_due(self, now: float) -> None:
        """Nothing waits any longer for a server that is back."""
        waiting, self._queue = self._queue, []
        for due, _, entry in waiting:
            self._push(entry, min(due, now) if entry.failures else due)
            entry.failures = 0

    def _push(self, entry: _Entry, due: float) -> None:
        heapq.heappush(self._queue, (due, next(self._order), entry))

    def _attend(self, spark: SparkSession, entry: _Entry) -> None:
        """One table is due: a round if it has news, and the time of its next one."""
        start = self._clock.monotonic()
        try:
            moved = self._round(spark, entry) if self._has_news(entry) else None
        except FencedError as e:
            _log.error("%s: left to a newer tiering service: %s", entry.name, e)
            self._fenced.add(entry.name)
            del self._known[entry.name]
            return
        except TableNotFoundError:
            entry.gone = True
            self._known.pop(entry.name, None)
            return
        except Exception as e:  # one table's trouble, whatever it is, may not stop the others
            delay = self._failed(entry, e)
            self._push(entry, self._clock.monotonic() + delay)
            return
        entry.failures = 0
        if moved is not None:
            took = self._clock.monotonic() - start
            entry.expected = took if took > entry.expected else (entry.expected + took) / 2
        self._push(entry, start + budget(entry.freshness, entry.expected))

    def _failed(self, entry: _Entry, e: Exception) -> float:
        entry.failures += 1
        entry.offsets = None
        delay: float = min(RETRY_SECONDS[0] * 2 ** (entry.failures - 1), RETRY_SECONDS[1])
        conflict = isinstance(e, CommitConflictError)
        level = logging.INFO if conflict and entry.failures == 1 else logging.WARNING
        known = isinstance(e, LakeheadError)
        text = str(e) if known else f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        _log.log(level, "%s: round failed, again in %.1f s: %s", entry.name, delay, text, exc_info=not known)
        return delay

    # ---- one round ----------------------------------------------------------------------------------------------

    def _has_news(self, entry: _Entry) -> bool:
        if entry.offsets is None:
            return True
        return any(t.high_watermark > entry.offsets.get(t.key, 0) for t in entry.table._client.tablets())

    def _round(self, spark: SparkSession, entry: _Entry) -> RoundReport | None:
        from lakehead.iceberg.iceberg_table import open_lake_table
        from lakehead.lake.marks import next_epoch

        client = entry.table._client
        start = self._clock.monotonic()
        lake = open_lake_table(client.desc, client.lake())
        if entry.epoch is None:
            entry.epoch = next_epoch(lake.load())
        result = tier_table(
            client,
            lake,
            RemoteLog(self._con.uri, entry.name, client),
            map_tasks=functools.partial(spark_map, spark, discard=lake.discard),
            epoch=entry.epoch,
        )
        entry.offsets = dict(result_offsets(entry.table, result))
        if result.snapshot_id is None:
            return None
        seconds = self._clock.monotonic() - start
        report = RoundReport(entry.name, result.rows, result.deletes, result.files, result.snapshot_id, seconds)
        _log.info(
            "%s: %s rows, %s deletes in %d files, %.2f s, lake snapshot %d",
            report.table, f"{report.rows:,}", f"{report.deletes:,}", report.files, report.seconds, report.snapshot_id,
        )  # fmt: skip
        if self._on_round is not None:
            self._on_round(report)
        return report


def budget(freshness: float, expected: float) -> float:
    """Seconds from the start of a round to that of the next, so that a row which the first just missed is in the lake
    before it is ``freshness`` old, if the next takes half as long again as ``expected``."""
    return max(freshness - 1.5 * expected - 0.1 * freshness, IDLE_SHARE * freshness)


def spark_map(
    spark: SparkSession,
    function: Callable[[Any], Any],
    items: Sequence[Any],
    *,
    discard: Callable[[Iterable[str]], None],
) -> list[Any]:
    """Apply a function to items as one Spark job, a task each; results in order.

    Raises:
        LakeheadError: the first that a task raised, once all have ended; files that others wrote are discarded.
        UnavailableError: the job failed otherwise.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    if not items:
        return []
    context = spark.sparkContext
    try:
        done = context.parallelize(items, len(items)).map(functools.partial(guarded, function)).collect()
    except (Py4JError, PySparkException) as e:
        raise UnavailableError(f"the Spark job of a round failed: {_cause(e)}") from e
    errors = [e for _, e in done if e is not None]
    if errors:
        discard(f.path for result, _ in done for f in getattr(result, "files", ()))
        raise errors[0]
    return [result for result, _ in done]


def _cause(e: Exception) -> str:
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or "Exception" in line]
    return (named or lines or [type(e).__name__])[-1][:500]


def result_offsets(table: Table, result: Any) -> Iterator[tuple[TabletKey, int]]:
    """End offsets of a round by tablet key."""
    for tablet, offset in result.offsets.items():
        yield (tablet if isinstance(tablet, TabletKey) else table._client.desc.tablet_key(tablet)), offset


@contextmanager
def _stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Let SIGTERM and SIGINT end the run in good order; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(n, lambda *_: stop()) for n in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m lakehead.spark.tiering --uri ...``: what is submitted to a Spark cluster."""
    import argparse

    parser = argparse.ArgumentParser(prog="lakehead.spark.tiering", description="Keep lake tables fresh.")
    parser.add_argument("--uri", required=True, help="lakehead://host:port, or a data folder")
    parser.add_argument("--table", action="append", help="only this table; may be repeated")
    parser.add_argument("--seconds", type=float, help="stop after so many seconds")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stderr)
    _log.setLevel(logging.INFO)
    try:
        TieringService(None, given.uri, given.table).run(given.seconds)
    except LakeheadError as e:
        print(f"error {e.code}: {e}", file=sys.stderr)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
