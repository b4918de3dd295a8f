"""The tiering service on Spark: tasks of its rounds run on executors, the commit in the driver."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lakehead.api.connection import Connection, connect, presented, reopened
from lakehead.api.tiering import ConnectionTables, cores_for_turns
from lakehead.client.table import TableHandle
from lakehead.env import Env
from lakehead.errors import InvalidRequestError, LakeheadError
from lakehead.spark.connections import bind_session, worker_address
from lakehead.spark.executor import SharedJobs, SparkExecutor
from lakehead.spark.launch import attach_session, open_session
from lakehead.spark.worker import WorkerLake, WorkerLog
from lakehead.tiering.executor import Executor, SmallRounds, here
from lakehead.tiering.queue import TieringQueue
from lakehead.tiering.service import RoundReport, TieringService

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


SMALL_ROUND_RECORDS = 50_000
_TURNS_AT_ONCE = 32


class SparkTables(ConnectionTables[Connection]):
    """Tables of one server whose rounds run on Spark.

    Args:
        spark: None makes a session with the first connection, which `close` ends.
        small_rounds: where those of fewer than `SMALL_ROUND_RECORDS` run.
    """

    def __init__(
        self,
        spark: SparkSession | None,
        con_or_uri: Connection | str | Callable[[], Connection],
        chosen: Sequence[str] | None = None,
        *,
        small_rounds: SmallRounds = "spark",
    ) -> None:
        self._spark = spark
        self._small_rounds = small_rounds
        self._jobs: SharedJobs | None = None
        self._own_session = spark is None
        self._bound = False
        con = functools.partial(connect, con_or_uri) if isinstance(con_or_uri, str) else con_or_uri
        super().__init__(con, chosen, again=reopened)

    def executor_of(self, records: int) -> Executor:
        """See `ConnectionTables.executor_of`: large rounds are jobs of their own, beside one that small ones share."""
        assert self._spark is not None
        assert self._jobs is not None
        if records >= SMALL_ROUND_RECORDS:
            return SparkExecutor(self._spark)
        return self._jobs if self._small_rounds == "spark" else here(records)

    def log(self, con: Connection, handle: TableHandle) -> WorkerLog:
        """See `ConnectionTables.log`."""
        return WorkerLog(worker_address(con), handle)

    def lake(self, con: Connection, handle: TableHandle, *, changelog: bool) -> WorkerLake:
        """See `ConnectionTables.lake`."""
        return WorkerLake(worker_address(con), handle, changelog=changelog)

    def attach(self, con: Connection) -> None:
        """Let the session and its workers know a connection."""
        if self._spark is None:
            self._spark = open_session(con, {"app_name": "lakehead tiering"}, plans=False)
        elif self._bound:
            bind_session(self._spark, con)
        else:
            attach_session(self._spark, con, plans=False)
        self._bound = True
        if self._jobs is None:
            self._jobs = SharedJobs(self._spark, Env.system().threads)

    def close(self) -> None:
        """See `TieredTables.close`."""
        if self._own_session and self._spark is not None:
            self._spark.stop()
            self._spark, self._jobs, self._bound = None, None, False
        super().close()


def open_service(
    spark: SparkSession | None,
    con_or_uri: Connection | str | Callable[[], Connection],
    tables: Sequence[str] | None = None,
    *,
    on_round: Callable[[RoundReport], None] | None = None,
    small_rounds: SmallRounds = "spark",
) -> TieringService:
    """See `lakehead.spark.tiering_service`."""
    if small_rounds not in ("spark", "driver"):
        raise InvalidRequestError(f"small_rounds={small_rounds!r}: use 'spark' or 'driver'")
    reached = SparkTables(spark, con_or_uri, tables, small_rounds=small_rounds)
    return TieringService(reached, Env.system(), on_round=on_round, make_queue=_queue)


def _queue() -> TieringQueue:
    """Many tables at once, as their tasks run elsewhere; what maintains them runs here."""
    return TieringQueue(turns_at_once=_TURNS_AT_ONCE, maintenance_at_once=cores_for_turns())


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m lakehead.spark.tiering --uri ...``: what is submitted to a Spark cluster."""
    parser = argparse.ArgumentParser(prog="lakehead.spark.tiering", description="Keep lake tables fresh.")
    parser.add_argument("--uri", required=True, help="lakehead://host:port, or a data folder")
    parser.add_argument("--table", action="append", help="only this, a name or a pattern; may be repeated")
    parser.add_argument("--small-rounds", choices=["spark", "driver"], default="spark", help="where small rounds run")
    parser.add_argument("--seconds", type=float, help="stop after so many seconds")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("lakehead.tiering").setLevel(logging.INFO)
    try:
        to = functools.partial(connect, given.uri, **presented(given.uri, {**os.environ, "LAKEHEAD_URI": given.uri}))
        open_service(None, to, given.table, small_rounds=given.small_rounds).run(given.seconds)
    except LakeheadError as e:
        print(f"error {e.code}: {e}", file=sys.stderr)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
