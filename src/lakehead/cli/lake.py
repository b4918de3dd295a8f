"""`lakehead lake ...`: what the tiering service does for a lake table by itself, by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lakehead.cli.output import count_text, write_json, write_line, write_table
from lakehead.cli.session import Session, command

if TYPE_CHECKING:
    from lakehead.api.connection import Connection
    from lakehead.api.lake import TableLake


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    nouns = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Compact, expire and clean lake tables.")
    command(nouns, "compact")(compact)
    command(nouns, "expire")(expire)
    command(nouns, "orphans")(orphans)
    app.add_typer(nouns, name="lake")


LakeArgument = Annotated[str, typer.Argument(metavar="TABLE", help="database.table, or database.table$changelog")]


def _lake(con: Connection, name: str) -> TableLake:
    table, _, suffix = name.partition("$")
    lake = con.table(table if suffix == "changelog" else name).lake
    return lake.changelog if suffix == "changelog" else lake


def compact(session: Session, table: LakeArgument) -> None:
    """Write small files, and files with many deleted rows, anew."""
    with session.connect() as con:
        done = _lake(con, table).compact()
    if session.json:
        fields = {"rows": done.rows, "files_before": done.files_before, "files_after": done.files_after}
        write_json({"table": table, "snapshot_id": done.snapshot_id, **fields})
    elif done.snapshot_id is None:
        write_line(f"{table}: nothing to compact")
    else:
        write_line(
            f"{table}: {count_text(done.rows, 'row')} of {count_text(done.files_before, 'file')} are in"
            f" {count_text(done.files_after, 'file')} now, lake snapshot {done.snapshot_id}"
        )


def expire(
    session: Session,
    table: LakeArgument,
    older_than: Annotated[str, typer.Option(help="Age from which on a snapshot goes, such as 7d.")] = "7d",
    keep: Annotated[int, typer.Option(help="So many of the newest stay, whatever their age.")] = 20,
) -> None:
    """Take lake snapshots out of the list, and remove the files that only they named.

    Time travel ends where the list does. What a running read, a branch or a tag needs stays.
    """
    with session.connect() as con:
        found = _lake(con, table).expire(older_than, keep=keep)
    if session.json:
        write_json({"table": table, "snapshots": found.snapshots, "files": found.files})
    else:
        write_line(
            f"{table}: {count_text(found.snapshots, 'snapshot')} expired, {count_text(found.files, 'file')} removed"
        )


def orphans(
    session: Session,
    table: LakeArgument,
    older_than: Annotated[str, typer.Option(help="Age from which on a file may go, such as 1d.")] = "1d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list them.")] = False,
) -> None:
    """Remove files in the table's lake folder that no lake snapshot names."""
    with session.connect() as con:
        found = _lake(con, table).remove_orphans(older_than, dry_run=dry_run).to_pylist()
    if session.json:
        files = [{**f, "modified": f["modified"].isoformat()} for f in found]
        write_json({"table": table, "removed": not dry_run, "files": files})
        return
    write_line(f"{table}: {count_text(len(found), 'orphan')}{' to remove' if dry_run else ' removed'}")
    if found:
        write_table(["path", "bytes", "modified"], [(f["path"], f["size"], f["modified"]) for f in found])
