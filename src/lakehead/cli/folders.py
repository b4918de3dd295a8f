"""`lakehead backup`, `restore` and `adopt`: what becomes of a data folder as a whole."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from lakehead.cli.output import count_text, write_json, write_line
from lakehead.cli.session import Session, command
from lakehead.errors import InvalidUriError

if TYPE_CHECKING:
    from lakehead.api.backup import Backup


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    command(app, "backup")(backup)
    command(app, "restore")(restore)
    command(app, "adopt")(adopt)


def backup(
    session: Session, destination: Annotated[str, typer.Argument(help="A folder that is new or empty.")]
) -> None:
    """Copy the data folder, also while it is served and written to.

    What was acknowledged before is in the copy, and a lake inside the folder is. Run again, a backup that was cut off
    begins anew.
    """
    from lakehead.api.backup import back_up

    if "://" in session.uri:
        raise InvalidUriError("a backup is made where the data folder is: name the folder with --uri")
    with session.connect() as con:
        made = back_up(con, os.path.expanduser(session.uri), os.path.expanduser(destination))
    _print(session, made, destination)


def restore(
    session: Session,
    backup: Annotated[str, typer.Argument(help="A folder that 'lakehead backup' made.")],
    folder: Annotated[str, typer.Argument(help="The data folder to make; new or empty.")],
) -> None:
    """Make a data folder of a backup; every byte is checked.

    It is a folder of its own: the one that was backed up may go on.
    """
    from lakehead.api.backup import restore as restore_backup

    made = restore_backup(os.path.expanduser(backup), os.path.expanduser(folder))
    _print(session, made, folder)


def _print(session: Session, made: Backup, path: str) -> None:
    if session.json:
        tables, outside = list(made.tables), list(made.lakes_outside)
        write_json({"path": path, "tables": tables, "lakes_outside": outside, "bytes": made.size_bytes})
        return
    write_line(f"{path}: {count_text(len(made.tables), 'table')}, {made.size_bytes:,} bytes")
    for name in made.lakes_outside:
        write_line(
            f"{name}: its lake lies outside the folder and is not in the backup; a restored folder must adopt it"
        )


def adopt(
    session: Session,
    table: Annotated[list[str] | None, typer.Argument(help="Tables; all with a lake when none is named.")] = None,
) -> None:
    """Take lake tables outside the folder over from the folder that this one is a copy of.

    That folder must be given up: it is refused from then on. A lake inside a folder was copied with it.
    """
    with session.connect() as con:
        names = [con.table(t).name for t in table] if table else con.tables()
        tables = [con.table(n) for n in names]
        adopted = {t.name: t.lake.adopt() for t in tables if table or t.describe()["lake"]}
    if session.json:
        write_json([{"table": name, "adopted": taken} for name, taken in adopted.items()])
        return
    for name, taken in adopted.items():
        write_line(f"{name}: {'adopted' if taken else 'the lake is of this folder already'}")
