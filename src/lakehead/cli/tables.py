"""`lakehead table ...` and `lakehead status`: what tables there are, what defines them and how they stand."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lakehead.cli.output import count_text, seconds_text, write_json, write_line, write_table
from lakehead.cli.session import Session, TableArgument, command
from lakehead.errors import InvalidPropertyError, InvalidRequestError

if TYPE_CHECKING:
    from lakehead.api.connection import Connection
    from lakehead.api.table import Table


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    nouns = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Create, list, describe and drop tables.")
    command(nouns, "create")(create)
    command(nouns, "list")(list_tables)
    command(nouns, "describe")(describe)
    command(nouns, "drop")(drop)
    app.add_typer(nouns, name="table")
    command(app, "status")(status)


def create(
    session: Session,
    table: TableArgument,
    schema: Annotated[str, typer.Option(help="Columns: 'id bigint not null, name string, price decimal(12,2)'.")],
    primary_key: Annotated[str | None, typer.Option(metavar="A,B", help="Makes a keyed table.")] = None,
    partition_by: Annotated[str | None, typer.Option(metavar="A,B", help="Identity partitions.")] = None,
    buckets: Annotated[int, typer.Option(help="Per partition.")] = 1,
    bucket_key: Annotated[str | None, typer.Option(metavar="A,B", help="Default: the primary key; log: none.")] = None,
    lake: Annotated[str | None, typer.Option(help="iceberg: rows can be tiered to an Iceberg table.")] = None,
    freshness: Annotated[str | None, typer.Option(help="How old a row may get before it is in the lake: 30s.")] = None,
    property: Annotated[list[str] | None, typer.Option(metavar="K=V", help="durability=os, ...")] = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="Keep an existing table of the same columns and keys, as it is.")
    ] = False,
) -> None:
    """Create a table; types: bigint, int, string, double, boolean, date, timestamp, list<T>, ..."""
    from lakehead.format.schema import parse_schema_text

    properties = dict(_property(text) for text in property or [])
    if freshness is not None:
        properties["freshness"] = freshness
    columns = parse_schema_text(schema)
    with session.connect(create=True) as con:
        made = con.create_table(
            table,
            columns,
            primary_key=_names(primary_key),
            partition_by=_names(partition_by),
            buckets=buckets,
            bucket_key=_names(bucket_key),
            lake=lake,
            if_not_exists=if_not_exists,
            **properties,
        )
        definition = made.describe()
    if session.json:
        write_json(definition)
    else:
        found = definition["lake"]
        more = count_text(definition["buckets"], "bucket") + (f", lake {found}" if found else "")
        write_line(f"created {definition['name']}: {definition['kind']} table, {more}")


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in text.split(",")] if text else []


def _property(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidPropertyError(f"--property {text!r}: write name=value, for example durability=os")
    return name, value


def list_tables(session: Session, database: Annotated[str | None, typer.Argument(metavar="[DATABASE]")] = None) -> None:
    """List the tables of one database or of all."""
    with session.connect() as con:
        names = con.tables(database)
    if session.json:
        write_json(names)
    else:
        for name in names:
            write_line(name)


def describe(session: Session, table: TableArgument) -> None:
    """Print everything that defines a table."""
    with session.connect() as con:
        definition = con.table(table).describe()
    if session.json:
        write_json(definition)
        return
    facts = {k: v for k, v in definition.items() if k not in ("columns", "properties", "name")}
    facts |= definition["properties"]
    rows = [(k, ", ".join(v) if isinstance(v, list) else v) for k, v in facts.items() if v not in (None, [])]
    write_table(["property", "value"], rows, title=definition["name"])
    columns = definition["columns"]
    write_table(["column", "type", "null"], [(c["name"], c["type"], "yes" if c["nullable"] else "no") for c in columns])


def drop(
    session: Session,
    table: TableArgument,
    purge: Annotated[bool, typer.Option("--purge", help="Delete the lake table's files too.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Drop a table: its log, and its lake table from the catalog. Asks first."""
    with session.connect() as con:
        name = con.table(table).name
        if not yes:
            if not sys.stdin.isatty():
                raise InvalidRequestError(f"dropping {name} needs a confirmation, and nobody can be asked: pass --yes")
            what = "its log, its lake table and the lake's files" if purge else "its log and its lake table's entry"
            if not typer.confirm(f"Drop {name}: {what}?", err=True):
                raise typer.Exit(1)
        con.drop_table(name, purge=purge)
    if session.json:
        write_json({"dropped": name, "purged": purge})
    else:
        write_line(f"dropped {name}")


def status(session: Session, table: Annotated[str | None, typer.Argument(metavar="[TABLE]")] = None) -> None:
    """Show how tables stand, or the tablets of one.

    Rows, watermarks, what the lake lacks and for how long.
    """
    with session.connect() as con:
        if table is not None:
            _tablets(session, con.table(table))
            return
        rows = table_states(con)
        if session.json:
            write_json({"uri": con.uri, "tables": rows})
            return
        columns = ["table", "kind", "tablets", "rows", "lake", "lag rows", "lag"]
        cells = [
            (r["table"], r["kind"], r["tablets"], r["rows"], r["lake"], r["lag_rows"], seconds_text(r["lag_seconds"]))
            for r in rows
        ]
        write_table(columns, cells, title=con.uri)


def _tablets(session: Session, table: Table) -> None:
    tablets: list[dict[str, Any]] = table.status().to_pylist()
    if session.json:
        write_json({"table": table.name, "tablets": tablets})
        return
    damaged = any(t["damage"] for t in tablets)
    left_out = {*(() if table.partition_by else ("partition",)), *(() if damaged else ("damage",))}
    names = [n for n in tablets[0] if n not in left_out] if tablets else ["bucket"]
    shown = [[seconds_text(t[n]) if n == "lag_seconds" else t[n] for n in names] for t in tablets]
    write_table([n.replace("_", " ").removesuffix(" seconds") for n in names], shown, title=table.name)


def table_states(con: Connection) -> list[dict[str, Any]]:
    """One plain dict a table, by name: the sums of its tablets' rows and lag, the age of its oldest untiered row."""
    states = []
    for name in con.tables():
        table = con.table(name)
        definition = table.describe()
        tablets = table.status().to_pylist()
        lake = definition["lake"]
        states.append(
            {
                "table": name,
                "kind": definition["kind"],
                "tablets": len(tablets),
                "rows": sum(t["rows"] for t in tablets),
                "lake": lake,
                "freshness": definition["properties"]["freshness"] if lake else None,
                "lag_rows": sum(t["lag_rows"] for t in tablets) if lake else None,
                "lag_seconds": max((t["lag_seconds"] for t in tablets), default=0.0) if lake else None,
            }
        )
    return states
