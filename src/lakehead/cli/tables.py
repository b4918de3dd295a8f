"""`lakehead table ...` and `lakehead status`: what tables there are, what defines them and how they stand."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lakehead.cli.output import count_text, seconds_text, write_json, write_line, write_table
from lakehead.cli.session import Session, TableArgument, command
from lakehead.errors import (
    InvalidPropertyError,
    InvalidRequestError,
    InvalidSchemaError,
    LakeheadError,
    TableExistsError,
    TableNotFoundError,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from lakehead.api.connection import Connection
    from lakehead.api.table import Table

_log = logging.getLogger(__name__)


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    nouns = typer.Typer(
        no_args_is_help=True, rich_markup_mode=None, help="Create, list, describe, alter, rename, copy, truncate, drop."
    )
    command(nouns, "create")(create)
    command(nouns, "list")(list_tables)
    command(nouns, "describe")(describe)
    command(nouns, "alter")(alter)
    command(nouns, "rename")(rename)
    command(nouns, "copy")(copy)
    command(nouns, "truncate")(truncate)
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

    properties = dict(_property("--property", text) for text in property or [])
    if freshness is not None:
        properties["freshness"] = freshness
    columns = parse_schema_text(schema)
    done = "created"
    with session.connect(create=True) as con:
        make = functools.partial(
            con.create_table,
            table,
            columns,
            primary_key=_names(primary_key, "--primary-key"),
            partition_by=_names(partition_by, "--partition-by"),
            buckets=buckets,
            bucket_key=_names(bucket_key, "--bucket-key"),
            lake=lake,
            **properties,
        )
        try:
            definition = make().describe()
        except TableExistsError as e:
            if not if_not_exists:
                raise TableExistsError(
                    f"table {table} exists already: pass --if-not-exists or drop it first", **e.context
                ) from e
            try:
                definition, done = make(if_not_exists=True).describe(), "kept"
            except TableExistsError as other:
                raise TableExistsError(
                    f"table {table} exists already with other columns or keys: see `lakehead table describe {table}`",
                    **other.context,
                ) from other
    if session.json:
        write_json(definition)
    else:
        found = definition["lake"]
        more = count_text(definition["buckets"], "bucket") + (f", lake {found}" if found else "")
        write_line(f"{done} {definition['name']}: {definition['kind']} table, {more}")


def _names(text: str | None, option: str = "") -> list[str]:
    if option and text is not None and not text.strip():
        raise InvalidRequestError(f"{option} is empty: name columns, or leave it out")
    return [name.strip() for name in text.split(",")] if text else []


def _property(option: str, text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidPropertyError(f"{option} {text!r}: write name=value, for example durability=os")
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
    more = [name for name in ("default", "comment") if any(name in c for c in columns)]
    cells = [
        [c["name"], c["type"], "yes" if c["nullable"] else "no", *(c.get(name, "") for name in more)] for c in columns
    ]
    write_table(["column", "type", "null", *more], cells)


def alter(
    session: Session,
    table: TableArgument,
    rename: Annotated[list[str] | None, typer.Option(metavar="OLD:NEW", help="A column's name.")] = None,
    drop: Annotated[list[str] | None, typer.Option(metavar="A,B", help="Columns that go.")] = None,
    widen: Annotated[list[str] | None, typer.Option(metavar="COLUMNS", help="Wider types: 'units bigint'.")] = None,
    nullable: Annotated[list[str] | None, typer.Option(metavar="A,B", help="Columns that may be null.")] = None,
    add: Annotated[list[str] | None, typer.Option(metavar="COLUMNS", help="New ones: 'note string, n int'.")] = None,
    after: Annotated[
        str | None, typer.Option(metavar="A", help="Behind which --add puts them; else: the last.")
    ] = None,
    default: Annotated[
        list[str] | None, typer.Option(metavar="A=VALUE", help="What an added column is in rows without it: n=0.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="K=V", help="A property: freshness=1s.")] = None,
    reset: Annotated[list[str] | None, typer.Option(metavar="K,L", help="Properties that get their defaults.")] = None,
) -> None:
    """Change a table's columns and properties: all of it, or nothing.

    First renames, then drops, wider types, nullable, added columns, set and reset properties, whatever the order of the
    options. Each but --after may be given several times.
    """
    renames = [_renamed(text) for text in rename or []]
    wider, added = _columns("--widen", widen), _columns("--add", add)
    properties = [_property("--set", text) for text in set_ or []]
    defaults = _defaults(default or [], added)
    if after is not None and not added:
        raise InvalidRequestError("--after says where --add puts columns: give --add, too")
    if not any((renames, drop, wider, nullable, added, properties, reset)):
        raise InvalidRequestError("say what to change: --rename, --drop, --widen, --nullable, --add, --set or --reset")
    with session.connect() as con:
        opened = con.table(table)
        before = opened.describe()
        with opened.alter() as alteration:
            for old, new in renames:
                alteration.rename_column(old, new)
            for name in _each_name(drop):
                alteration.drop_column(name)
            for f in wider:
                alteration.widen_column(f.name, f.type)
            for name in _each_name(nullable):
                alteration.make_nullable(name)
            for f in added:
                alteration.add_column(f.name, f.type, default=defaults.get(f.name), after=after)
                after = f.name if after is not None else None
            for name, value in properties:
                alteration.set_property(name, value)
            for name in _each_name(reset):
                alteration.reset_property(name)
        definition = opened.describe()
    if session.json:
        write_json(definition)
    else:
        count = count_text(len(definition["columns"]), "column")
        write_line(f"{'kept' if definition == before else 'altered'} {definition['name']}: {count}")


def _each_name(texts: list[str] | None) -> list[str]:
    return [name for text in texts or [] for name in _names(text)]


def _renamed(text: str) -> tuple[str, str]:
    old, _, new = text.partition(":")
    if not old or not new or ":" in new:
        raise InvalidRequestError(f"--rename {text!r}: write old:new; names with a colon are renamed by ALTER TABLE")
    return old, new


def _columns(option: str, texts: list[str] | None) -> list[pa.Field]:
    from lakehead.format.schema import parse_schema_text

    fields: list[pa.Field] = [f for text in texts or [] for f in parse_schema_text(text)]
    for f in fields:
        if not f.nullable:
            raise InvalidSchemaError(f"{option} {f.name!r}: leave NOT NULL away; it cannot be added", column=f.name)
    return fields


def _defaults(texts: list[str], added: list[pa.Field]) -> dict[str, Any]:
    from lakehead.cli.literals import parse_text

    fields, found = {f.name: f for f in added}, {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in fields:
            raise InvalidRequestError(f"--default {text!r}: write column=value, with a column of --add")
        found[name] = parse_text(value, fields[name])
    return found


def rename(
    session: Session,
    old: Annotated[str, typer.Argument(metavar="OLD")],
    new: Annotated[str, typer.Argument(metavar="NEW")],
    swap: Annotated[bool, typer.Option("--swap", help="The table that is called NEW gets the name OLD.")] = False,
) -> None:
    """Call a table something else, and its lake table too."""
    with session.connect() as con:
        name = con.rename_table(old, new, swap=swap).name
    if session.json:
        write_json({"renamed": old, "name": name})
    else:
        write_line(f"renamed {old} to {name}")


def copy(
    session: Session,
    source: Annotated[str, typer.Argument(metavar="SOURCE")],
    target: Annotated[str, typer.Argument(metavar="TARGET")],
    buckets: Annotated[int | None, typer.Option(help="Of the copy, per partition; else as many.")] = None,
) -> None:
    """Make a table of another one's definition and rows, as of one moment."""
    with session.connect() as con:
        done = con.copy_table(source, target, buckets=buckets)
    if session.json:
        write_json({"name": done.table.name, "rows": done.rows})
    else:
        write_line(f"copied {source} to {done.table.name}: {count_text(done.rows, 'row')}")


def truncate(
    session: Session,
    table: TableArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Take all rows of a table away, out of its log and its lake. Asks first."""
    with session.connect() as con:
        opened = con.table(table)
        _confirm(f"Take all rows of {opened.name} away, out of its log and its lake?", opened.name, yes)
        ends = opened.truncate()
    if session.json:
        write_json({"truncated": opened.name, "tablets": len(ends)})
    else:
        write_line(f"truncated {opened.name}")


def _confirm(question: str, name: str, yes: bool) -> None:
    """Return if the answer is yes.

    Raises:
        InvalidRequestError: nobody can be asked.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidRequestError(
            f"{name} would lose rows, which needs a confirmation, and nobody can be asked: pass --yes"
        )
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)


def drop(
    session: Session,
    table: TableArgument,
    purge: Annotated[bool, typer.Option("--purge", help="Delete the lake table's files too.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Drop a table: its log, and its lake table from the catalog. Asks first."""
    with session.connect() as con:
        name = con.table(table).name
        what = "its log, its lake table and the lake's files" if purge else "its log and its lake table's entry"
        _confirm(f"Drop {name}: {what}?", name, yes)
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
        untold: dict[str, LakeheadError] = {}
        rows = table_states(con, untold.__setitem__)
        if session.json:
            write_json({"uri": con.uri, "tables": rows})
            raise_first(untold)
            return
        columns = ["table", "kind", "tablets", "rows", "lake", "lag rows", "lag"]
        cells = [
            (r["table"], r["kind"], r["tablets"], r["rows"], r["lake"], r["lag_rows"], seconds_text(r["lag_seconds"]))
            for r in rows
        ]
        write_table(columns, cells, title=con.uri)
        raise_first(untold)


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


def table_states(
    con: Connection, untold: Callable[[str, LakeheadError], None], names: Iterable[str] | None = None
) -> list[dict[str, Any]]:
    """One plain dict a table, by name: the sums of its tablets' rows and lag, the age of its oldest untiered row.

    Args:
        untold: given tables of which this cannot be told: damaged ones, those whose lake cannot be asked.
        names: the tables; None for all.
    """
    from lakehead.client.patience import is_gone

    states = []
    for name in con.tables() if names is None else names:
        try:
            states.append(_state(con.table(name)))
        except TableNotFoundError:
            continue  # dropped meanwhile
        except LakeheadError as e:
            if is_gone(e):
                raise
            untold(name, e)
    return states


def raise_first(failed: Mapping[str, LakeheadError]) -> None:
    """Once all else is done, raise the error of the first table that has one; those of others are warnings."""
    first, *others = failed.values() or [None]
    for e in others:
        _log.warning("%s", e)
    if first is not None:
        raise first


def _state(table: Table) -> dict[str, Any]:
    definition = table.describe()
    tablets = table.status().to_pylist()
    lake = definition["lake"]
    return {
        "table": table.name,
        "kind": definition["kind"],
        "tablets": len(tablets),
        "rows": sum(t["rows"] for t in tablets),
        "end": sum(t["high_watermark"] for t in tablets),
        "lake": lake,
        "freshness": definition["properties"]["freshness"] if lake else None,
        "lag_rows": sum(t["lag_rows"] for t in tablets) if lake else None,
        "lag_seconds": max((t["lag_seconds"] for t in tablets), default=0.0) if lake else None,
    }
