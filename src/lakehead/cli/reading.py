"""`lakehead tail|sql`: rows as they come, and answers to questions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lakehead.cli.output import cell_text, rows_of, write_arrow_table, write_line, write_rows_json
from lakehead.cli.rows import TableArgument
from lakehead.cli.session import Session, command
from lakehead.errors import InvalidRequestError, SqlError

if TYPE_CHECKING:
    import pyarrow as pa


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    command(app, "tail")(tail)
    command(app, "sql")(sql)


def tail(
    session: Session,
    table: TableArgument,
    start: Annotated[str, typer.Option(help="latest, earliest, full, or a time: 2026-01-31T12:00:00Z.")] = "latest",
    columns: Annotated[str | None, typer.Option(help="Only these columns, comma-separated.")] = None,
    where: Annotated[str | None, typer.Option(help='Only rows for which this holds: "price > 3".')] = None,
    limit: Annotated[int | None, typer.Option(help="End after so many rows.")] = None,
    stop_now: Annotated[bool, typer.Option("--stop-now", help="End at what is there now.")] = False,
) -> None:
    """Follow a table: print rows as soon as they are readable.

    Of a keyed table, its changelog.
    """
    from lakehead.cli.values import parse_start

    if limit is not None and limit < 1:
        raise InvalidRequestError(f"--limit {limit}: must be at least 1")
    names = [c.strip() for c in columns.split(",")] if columns is not None else None
    with session.connect() as con:
        opened = con.table(table)
        origin: Any = parse_start(start)
        with opened.subscribe(origin, columns=names, where=where, stop="now" if stop_now else None) as subscription:
            left = limit
            for batch in subscription:
                rows = batch.rows if left is None else batch.rows.slice(0, left)
                if session.json:
                    write_rows_json(rows)
                else:
                    sys.stdout.writelines(_lines(rows))
                sys.stdout.flush()
                left = None if left is None else left - rows.num_rows
                if left == 0:
                    return


def _lines(rows: pa.RecordBatch) -> Iterator[str]:
    for row in rows_of(rows):
        change = row.pop("__change_type", None)
        bucket, offset, time = row.pop("__bucket"), row.pop("__offset"), row.pop("__timestamp")
        at = f"{time:%Y-%m-%d %H:%M:%S.%f}"[:-3] if time is not None else " " * 23
        head = f"{at}  {bucket}/{offset if offset is not None else '-'}  {change + '  ' if change else ''}"
        yield head + "  ".join(f"{k}={cell_text(v)}" for k, v in row.items()) + "\n"


def sql(session: Session, query: Annotated[str, typer.Argument(help="One statement; - reads standard input.")]) -> None:
    """Run SQL over the union of log and lake.

    Also t$lake, t$changelog and t$lake$snapshots. JSON: one line a row.
    """
    with session.connect() as con:
        relation = con.sql(sys.stdin.read() if query == "-" else query)
        import duckdb

        try:
            table = relation.to_arrow_table()
        except duckdb.Error as e:
            raise SqlError(str(e)) from e
    if session.json:
        write_rows_json(table)
    elif table.num_columns:
        write_arrow_table(table)
    else:
        write_line("0 rows")
