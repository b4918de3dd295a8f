"""`lakehead get|tail|sql`: one row by its key, rows as they come, and answers to questions."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lakehead.cli.output import (
    cell_text,
    printable,
    rows_of,
    write_arrow_table,
    write_json,
    write_line,
    write_rows_json,
    write_table,
)
from lakehead.cli.session import EXIT_NOT_FOUND, Session, TableArgument, command
from lakehead.errors import InvalidRequestError, SchemaMismatchError, WrongTableKindError

if TYPE_CHECKING:
    import pyarrow as pa

_LACKING = re.compile(r"""\b(BIT|TIME WITH TIME ZONE|INTERVAL)\b|"(?:[^"]|"")*"|'(?:[^']|'')*'""")
"""Types that Arrow has no like of, in the text of one of DuckDB's, and names and values that may look so."""


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    command(app, "get")(get)
    command(app, "tail")(tail)
    command(app, "sql")(sql)


def get(session: Session, table: TableArgument, key: Annotated[list[str], typer.Argument(metavar="KEY...")]) -> None:
    """Print the row of a key.

    One KEY for each key column, in order. Exit code 8 when there is no such row. Put -- before a key that
    starts with a minus sign.
    """
    from lakehead.cli.literals import parse_text

    with session.connect() as con:
        opened = con.table(table)
        names = opened.primary_key
        if not names:
            raise WrongTableKindError(f"{opened.name} is a log table: ask with lakehead sql", table=table)
        if len(key) != len(names):
            raise SchemaMismatchError(
                f"the key of {opened.name} has {len(names)} column{'s' * (len(names) > 1)} ({', '.join(names)}), got"
                f" {len(key)} value{'s' * (len(key) > 1)}"
            )
        fields: list[pa.Field] = [opened.schema.field(n) for n in names]
        found = opened.lookup([{f.name: parse_text(text, f) for f, text in zip(fields, key, strict=True)}])
    row = next(iter(rows_of(found)), None)
    if row is None:
        if session.json:
            write_json(None)
        else:
            print(printable(f"no row of {opened.name} has the key {', '.join(key)}"), file=sys.stderr)
        raise typer.Exit(EXIT_NOT_FOUND)
    if session.json:
        write_json(row)
    else:
        write_table(["column", "value"], [(k, cell_text(v)) for k, v in row.items()])


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
    from lakehead.cli.literals import parse_start

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
        yield head + "  ".join(f"{printable(k)}={cell_text(v)}" for k, v in row.items()) + "\n"


def _as_shown(relation: Any) -> Any:
    """A relation of DuckDB with values of types that Arrow has no like of, at any depth, as DuckDB writes them."""
    names = relation.columns
    types = [str(t) for t in relation.types]
    shown = [_LACKING.sub(lambda found: "VARCHAR" if found[1] else found[0], t) for t in types]
    if len(set(names)) < len(names) or shown == types:
        return relation
    spelt = ['"' + name.replace('"', '""') + '"' for name in names]
    columns = zip(spelt, types, shown, strict=True)
    return relation.project(", ".join(n if is_ == as_ else f"cast({n} as {as_}) as {n}" for n, is_, as_ in columns))


def sql(
    session: Session,
    query: Annotated[str, typer.Argument(help="One statement; - reads standard input.")],
    unrestricted: Annotated[
        bool, typer.Option("--unrestricted", help="The statement is code: it may read and write files, too.")
    ] = False,
) -> None:
    """Run SQL over the union of log and lake.

    Also t$lake, t$changelog and t$lake$snapshots. JSON: one line a row.
    """
    with session.connect() as con:
        relation = con.sql(sys.stdin.read() if query == "-" else query, unrestricted=unrestricted)
        table = _as_shown(relation).to_arrow_table()
    if session.json:
        write_rows_json(table)
    elif table.num_columns:
        write_arrow_table(table)
    else:
        write_line("0 rows")
