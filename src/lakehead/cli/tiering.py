"""`lakehead tier ...`: move rows into the lake, and see what waits."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from lakehead.cli.metrics import RoundMetrics, new_registry, served
from lakehead.cli.output import count_text, write_json, write_line
from lakehead.cli.session import Session, command
from lakehead.cli.tables import raise_first, table_states
from lakehead.cli.tiering_status import status, top
from lakehead.errors import InvalidRequestError, LakeheadError, TableNotFoundError
from lakehead.tiering.executor import SmallRounds

if TYPE_CHECKING:
    from lakehead.api.connection import Connection
    from lakehead.api.lake import TieringResult
    from lakehead.tiering.service import RoundReport

_LOOK_SECONDS = 1.0


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    nouns = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Move rows to the lake; see what waits.")
    command(nouns, "once")(once)
    command(nouns, "run")(run)
    command(nouns, "status")(status)
    app.add_typer(nouns, name="tier")
    command(app, "top")(top)


def once(
    session: Session,
    table: Annotated[str | None, typer.Argument(metavar="TABLE", help="database.table, or a name in default.")] = None,
    all_tables: Annotated[bool, typer.Option("--all", help="All tables with a lake, one after the other.")] = False,
) -> None:
    """Move to the lake what is not there yet: one round, in this process, without Spark."""
    from lakehead.client.patience import is_gone

    if (table is None) is not all_tables:
        raise InvalidRequestError("name one table, or give --all")
    with session.connect() as con:
        names = [table] if table else _lake_tables(con)
        failed: dict[str, LakeheadError] = {}
        for name in names:
            try:
                _show_round(session, name, con.tier(name))
            except LakeheadError as e:
                if is_gone(e):
                    raise
                failed[name] = e
        raise_first(failed)
    if not names and not session.json:
        write_line("no table has a lake: see `lakehead table create --lake`")


def _lake_tables(con: Connection) -> list[str]:
    """Names of the tables with a lake, which is not asked."""
    found = []
    for name in con.tables():
        with contextlib.suppress(TableNotFoundError):  # dropped meanwhile
            if con.table(name).describe()["lake"]:
                found.append(name)
    return found


def _show_round(session: Session, table: str, result: TieringResult) -> None:
    offsets = [{"partition": t.partition, "bucket": t.bucket, "end": end} for t, end in result.offsets.items()]
    if session.json:
        fields = {"snapshot_id": result.snapshot_id, "rows": result.rows, "deletes": result.deletes}
        write_json({"table": table, **fields, "files": result.files, "offsets": offsets})
    elif result.snapshot_id is None or not (result.rows or result.deletes):
        write_line(f"{table}: nothing to move")
    else:
        write_line(
            f"{table}: {count_text(result.rows, 'row')} and {count_text(result.deletes, 'delete')} in"
            f" {count_text(result.files, 'file')}, lake snapshot {result.snapshot_id}"
        )


def run(
    session: Session,
    master: Annotated[str | None, typer.Option(help="Spark master; default: what Spark is configured for.")] = None,
    table: Annotated[
        list[str] | None,
        typer.Option("--table", "--tables", help="Only these: a name, or a pattern as 'shop.*'; may be repeated."),
    ] = None,
    until_idle: Annotated[bool, typer.Option("--until-idle", help="End when nothing is left to move.")] = False,
    local: Annotated[bool, typer.Option("--local", help="In this process, without Spark.")] = False,
    small_rounds: Annotated[
        SmallRounds,
        typer.Option(help="Where rounds of few rows run: spark, sharing jobs, or driver, this process."),
    ] = "spark",
    metrics: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Answer Prometheus there; port 0 takes a free one.")
    ] = None,
) -> None:
    """Run the tiering service on Spark until Ctrl-C.

    Every lake table stays within its freshness. Prints a line for each round that moved rows.
    """
    if local and master is not None:
        raise InvalidRequestError("--local runs no Spark: leave --master out, or --local")

    counted = None if metrics is None else new_registry()
    rounds = None if counted is None else RoundMetrics(counted)

    def report(round: RoundReport) -> None:
        if rounds is not None:
            rounds.count(round)
        if session.json:
            write_json(asdict(round))
            sys.stdout.flush()
        else:
            moved = f"{count_text(round.rows, 'row')} and {count_text(round.deletes, 'delete')}"
            write_line(f"{round.table}: {moved} in {round.seconds:.1f} s, lake snapshot {round.snapshot_id}")

    with contextlib.ExitStack() as stack:
        if counted is not None:
            url = stack.enter_context(served(metrics or "", counted))
            write_line(f"metrics at {url}") if not session.json else write_json({"metrics": url})
        con = stack.enter_context(_connected(session))
        until = _idle(con, table) if until_idle else None
        if local:
            con.tiering(table, on_round=report).service.run(until)
        else:
            _run_on_spark(con, master, table, report, until, small_rounds)
    if until_idle and not session.json:
        write_line("nothing is left to move")


def _run_on_spark(
    con: Connection,
    master: str | None,
    tables: list[str] | None,
    report: Callable[[RoundReport], None],
    until: Callable[[], bool] | None,
    small_rounds: SmallRounds,
) -> None:
    import lakehead.spark as lhs
    from lakehead.spark.launch import open_session, require_pyspark

    require_pyspark()
    spark = None if master is None else open_session(con, {"master": master}, plans=False)
    try:
        service = lhs.tiering_service(spark, con, tables=tables, on_round=report, small_rounds=small_rounds)
        service.run(until)
    finally:
        if spark is not None:
            spark.stop()


def _connected(session: Session) -> Connection:
    """The connection, once its server is there: a service may begin before it."""
    from lakehead.client.patience import Patience
    from lakehead.env.clock import SystemClock
    from lakehead.errors import UnavailableError

    patience = Patience(SystemClock(), f"connecting to {session.uri}", None)
    while True:
        try:
            return session.connect()
        except UnavailableError as e:
            patience.wait(e)


def _idle(con: Connection, tables: list[str] | None) -> Callable[[], bool]:
    """A function that is true once no table has rows that its lake lacks; looks at most once a second."""
    from lakehead.env.clock import SystemClock
    from lakehead.protocol.table_choice import TableChoice

    chosen = TableChoice.of(tables)
    there = _lake_tables(con)
    if missing := [t for t in tables or () if not any(name in TableChoice.of([t]) for name in there)]:
        raise TableNotFoundError(f"there is no lake table {' and no '.join(missing)}: see `lakehead status`")
    clock = SystemClock()
    next_look = clock.monotonic()

    def idle() -> bool:
        nonlocal next_look
        if clock.monotonic() < next_look:
            return False
        untold: dict[str, LakeheadError] = {}
        states = table_states(con, untold.__setitem__, [name for name in con.tables() if name in chosen])
        next_look = clock.monotonic() + _LOOK_SECONDS
        if any(s["lag_rows"] for s in states):
            return False
        if untold:  # which would never be idle
            raise_first({name: untold[name] for name in _lake_tables(con) if name in untold})
        return True

    return idle
