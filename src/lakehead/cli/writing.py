"""`lakehead append|upsert|delete`: rows from files into a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lakehead.cli.output import count_text, write_json, write_line
from lakehead.cli.session import Session, TableArgument, command
from lakehead.errors import LakeheadError, WrongTableKindError

if TYPE_CHECKING:
    from lakehead.api.table import Table
    from lakehead.cli.input_files import Source

_PROGRESS_BYTES_MIN = 16 << 20


class FileFormat(StrEnum):
    """Formats of input files."""

    parquet = "parquet"
    csv = "csv"
    jsonl = "jsonl"
    arrow = "arrow"


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
    from lakehead.cli.input_files import input_files

    with session.connect() as con:
        table = con.table(name)
        keyed = bool(table.primary_key)
        if keyed != (verb != "append"):
            stay = "its rows expire by log_ttl, and `lakehead table truncate` takes all of them away"
            use = "use upsert or delete" if keyed else stay if verb == "delete" else "use append"
            raise WrongTableKindError(
                f"cannot {verb} on {table.name}, a {'primary-key' if keyed else 'log'} table: {use}",
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
    from lakehead.cli.input_files import open_source

    kind = file_format.value if file_format else None
    for path in files:
        opened = open_source(path, table.schema, file_format=kind, null=null, same_keys=verb != "append")
        with opened as source, _progress(source, path or table.name) as shown:
            yield from shown


def _send(table: Table, verb: str, batches: Iterator[Any], columns: str | None) -> int:
    """Write all batches; the rows written, of keys to delete those that there were. An error says how many rows of the
    batches before it are acknowledged."""
    if verb == "delete":
        return _delete(table, batches)
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
                else:  # writes nothing, but columns that the table does not have are refused
                    getattr(table, verb)(batch, **options)
    except LakeheadError as e:
        if written := sum(sizes[: writer.last_sequence + 1]):
            raise _after(written, "written", e) from e
        raise
    return sum(sizes)


def _delete(table: Table, batches: Iterator[Any]) -> int:
    deleted = 0
    try:
        for batch in batches:
            deleted += table.delete(batch).rows
    except LakeheadError as e:
        if deleted:
            raise _after(deleted, "deleted", e) from e
        raise
    return deleted


def _after(rows: int, done: str, e: LakeheadError) -> LakeheadError:
    """The error with what was done before it."""
    return type(e)(f"{e.message} ({rows} rows before it were {done})", **{**e.context, "rows_written": rows})


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
