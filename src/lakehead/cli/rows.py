"""`lakehead append|upsert|delete|get`: rows in from files, one row out by key."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lakehead.cli.output import cell_text, count_text, write_json, write_line, write_table
from lakehead.cli.session import EXIT_NOT_FOUND, Session, command
from lakehead.errors import LakeheadError, WrongTableKindError

if TYPE_CHECKING:
    import pyarrow as pa

    from lakehead.api.table import Table
    from lakehead.cli.files import Source

_PROGRESS_BYTES_MIN = 16 << 20


class FileFormat(StrEnum):
    """Formats of input files."""

    parquet = "parquet"
    csv = "csv"
    jsonl = "jsonl"
    arrow = "arrow"


TableArgument = Annotated[str, typer.Argument(metavar="TABLE", help="database.table")]
FilesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[FILE]...", help="Files, folders or patterns; standard input when missing or -."),
]
FormatOption = Annotated[FileFormat | None, typer.Option("--format", "-f", help="Default: by extension or content.")]
NullOption = Annotated[str | None, typer.Option("--null", help="A text that means null in CSV, such as NA.")]
ColumnsOption = Annotated[str | None, typer.Option("--columns", help="Take only these columns, comma-separated.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    command(app, "append")(append)
    command(app, "upsert")(upsert)
    command(app, "delete")(delete)
    command(app, "get")(get)


def append(
    session: Session,
    table: TableArgument,
    files: FilesArgument = None,
    format: FormatOption = None,
    null: NullOption = None,
) -> None:
    """Append the rows of files to a log table.

    Parquet, CSV, JSON lines or Arrow. Rows are written batch by batch: an error names how many were written before it.
    """
    _write(session, table, "append", files, format, null)


def upsert(
    session: Session,
    table: TableArgument,
    files: FilesArgument = None,
    columns: ColumnsOption = None,
    format: FormatOption = None,
    null: NullOption = None,
) -> None:
    """Insert or update the rows of files in a primary-key table.

    Columns that a file lacks, or that --columns leaves out, keep their values.
    """
    _write(session, table, "upsert", files, format, null, columns)


def delete(
    session: Session,
    table: TableArgument,
    files: FilesArgument = None,
    format: FormatOption = None,
    null: NullOption = None,
) -> None:
    """Delete rows of a primary-key table by the keys in files.

    Other columns do not matter, and keys that do not exist are ignored.
    """
    _write(session, table, "delete", files, format, null)


def _write(
    session: Session,
    name: str,
    verb: str,
    paths: list[str] | None,
    file_format: FileFormat | None,
    null: str | None,
    columns: str | None = None,
) -> None:
    from lakehead.cli.files import input_files

    with session.connect() as con:
        table = con.table(name)
        keyed = bool(table.primary_key)
        if keyed != (verb != "append"):
            use = "upsert or delete" if keyed else "append"
            raise WrongTableKindError(
                f"cannot {verb} on {table.name}, a {'primary-key' if keyed else 'log'} table: use {use}",
                table=table.name,
            )
        batches = _batches(table, verb, input_files(paths or []), file_format, null)
        rows = _send(table, verb, batches, columns)
    done = {"append": "appended to", "upsert": "upserted in", "delete": "deleted by key from"}[verb]
    if session.json:
        write_json({"table": table.name, "rows": rows})
    else:
        write_line(f"{count_text(rows, 'row')} {done} {table.name}")


def _batches(
    table: Table, verb: str, files: list[str | None], file_format: FileFormat | None, null: str | None
) -> Iterator[Any]:
    from lakehead.cli.files import open_source

    kind = file_format.value if file_format else None
    for path in files:
        opened = open_source(path, table.schema, file_format=kind, null=null, same_keys=verb != "append")
        with opened as source, _progress(source, path or table.name) as shown:
            yield from shown


def _send(table: Table, verb: str, batches: Iterator[Any], columns: str | None) -> int:
    """Write all batches; the rows written. An error says how many rows of the batches before it are acknowledged."""
    sizes: list[int] = []
    writer = table.writer()
    put: Callable[..., None] = getattr(writer, verb)
    options = {"columns": [c.strip() for c in columns.split(",")]} if columns else {}
    try:
        with writer:
            for batch in batches:
                rows = len(batch)
                if rows:
                    put(batch, **options)
                    sizes.append(rows)
    except LakeheadError as e:
        written = sum(sizes[: writer.last_sequence + 1])
        if written:
            message = f"{e.message} ({written} rows before it were written)"
            raise type(e)(message, **{**e.context, "rows_written": written}) from e
        raise
    return sum(sizes)


@contextmanager
def _progress(source: Source, name: str) -> Iterator[Iterator[Any]]:
    """The source's batches, with a bar on standard error for large files when a person looks on."""
    if not sys.stderr.isatty() or (source.size_bytes or 0) < _PROGRESS_BYTES_MIN:
        yield source.batches
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=source.size_bytes)

        def batches() -> Iterator[Any]:
            for batch in source.batches:
                yield batch
                progress.update(task, completed=source.position())

        yield batches()


def get(session: Session, table: TableArgument, key: Annotated[list[str], typer.Argument(metavar="KEY...")]) -> None:
    """Print the row of a key.

    One KEY for each key column, in order. Exit code 8 when there is no such row. Put -- before a key that
    starts with a minus sign.
    """
    from lakehead.cli.values import parse_text
    from lakehead.errors import SchemaMismatchError

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
        row = opened.get({f.name: parse_text(text, f) for f, text in zip(fields, key, strict=True)})
    if row is None:
        if session.json:
            write_json(None)
        else:
            print(f"no row of {opened.name} has the key {', '.join(key)}", file=sys.stderr)
        raise typer.Exit(EXIT_NOT_FOUND)
    if session.json:
        write_json(row)
    else:
        write_table(["column", "value"], [(k, cell_text(v)) for k, v in row.items()])
