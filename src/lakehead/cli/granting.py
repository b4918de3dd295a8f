"""`lakehead token ...`, `grant`, `revoke` and `whoami`: who may do what."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lakehead.cli.output import write_json, write_line, write_table
from lakehead.cli.quotas import plain_quota, show_quotas
from lakehead.cli.session import Session, command
from lakehead.errors import InvalidRequestError

if TYPE_CHECKING:
    from lakehead.protocol.grants import Granted

On = Annotated[str | None, typer.Argument(metavar="[ON]", help="'*', a database or database.table; none for a role.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    nouns = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Create, list and revoke tokens.")
    command(nouns, "create")(create_token)
    command(nouns, "list")(list_tokens)
    command(nouns, "revoke")(revoke_token)
    app.add_typer(nouns, name="token")
    command(app, "grant")(grant)
    command(app, "revoke")(revoke)
    command(app, "whoami")(whoami)


def create_token(
    session: Session,
    principal: Annotated[str, typer.Argument(help="Whose token it is; any name.")],
    expires: Annotated[str | None, typer.Option(help="After how long it is worth nothing: 90d; else never.")] = None,
) -> None:
    """Make a token, and print it: it is told this once."""
    with session.connect() as con:
        made = con.create_token(principal, expires=expires)
    if session.json:
        write_json({"id": made.id, "principal": principal, "token": made.token})
    else:
        write_line(made.token)


def list_tokens(session: Session) -> None:
    """Show whose tokens there are, and until when; never the tokens."""
    with session.connect() as con:
        rows: list[dict[str, Any]] = [
            {
                "id": t.id,
                "principal": t.principal,
                "created": _time(t.created_us),
                "expires": None if t.expires_us is None else _time(t.expires_us),
                "expired": t.expired,
            }
            for t in con.tokens()
        ]
    if session.json:
        for row in rows:
            write_json(row)
    else:
        columns = ("id", "principal", "created", "expires")
        for row in rows:
            row["expires"] = f"{row['expires']} (expired)" if row["expired"] else row["expires"] or "never"
        write_table(columns, [[row[c] for c in columns] for row in rows])


def _time(us: int) -> str:
    return datetime.fromtimestamp(us / 1e6, UTC).isoformat(timespec="seconds")


def revoke_token(session: Session, id: Annotated[str, typer.Argument(help="As `lakehead token list` has it.")]) -> None:
    """Make a token worthless, at once."""
    with session.connect() as con:
        con.revoke_token(id)
    _done(session, f"revoked token {id}", {"id": id})


def grant(
    session: Session,
    privileges: Annotated[
        str | None, typer.Argument(metavar="[PRIVILEGES]", help="read,write or role:NAME; without, show all grants.")
    ] = None,
    on: On = None,
    to: Annotated[str | None, typer.Option(help="A principal, or role:NAME.")] = None,
) -> None:
    """Let a principal or a role do something on '*', a database or a table, or let a principal have a role.

    Privileges: usage, describe, read, write, create, manage, tier, admin.
    """
    if privileges is None:
        with session.connect() as con:
            _show(session, con.grants())
        return
    if to is None:
        raise InvalidRequestError("say to whom: --to PRINCIPAL, or --to role:NAME")
    with session.connect() as con:
        con.grant(privileges, on, to=to)
    _done(session, f"granted {privileges}{f' on {on}' if on else ''} to {to}", _told(privileges, on, to))


def revoke(
    session: Session,
    privileges: Annotated[str, typer.Argument(metavar="PRIVILEGES", help="read,write or role:NAME.")],
    on: On = None,
    from_: Annotated[str | None, typer.Option("--from", help="A principal, or role:NAME.")] = None,
) -> None:
    """Take back what was granted, in the words of `lakehead grant`."""
    if from_ is None:
        raise InvalidRequestError("say from whom: --from PRINCIPAL, or --from role:NAME")
    with session.connect() as con:
        before = con.grants()
        con.revoke(privileges, on, from_=from_)
        if con.grants() == before:
            what = f"{privileges}{f' on {on}' if on else ''}"
            raise InvalidRequestError(f"{from_} was not granted {what}: `lakehead grant` shows who was granted what")
    _done(session, f"revoked {privileges}{f' on {on}' if on else ''} from {from_}", _told(privileges, on, from_))


def whoami(session: Session) -> None:
    """Show as whom the server knows this caller, what was granted to it, and its quota."""
    with session.connect() as con:
        me = con.whoami()
    if session.json:
        quota = None if me.quota is None else plain_quota(me.quota)
        told = {"name": me.name, "principal": me.principal, "roles": me.roles, "grants": _plain(me.grants)}
        write_json({**told, "quota": quota})
        return
    write_line(me.name if me.principal is not None else f"{me.name}, who may do all")
    if me.grants:
        _show(session, me.grants)
    if me.quota is not None:
        show_quotas(session, [me.quota])


def _show(session: Session, grants: Sequence[Granted]) -> None:
    if session.json:
        for row in _plain(grants):
            write_json(row)
    else:
        write_table(("to", "on", "privileges"), [(g.to, g.on, ", ".join(g.privileges)) for g in grants])


def _plain(grants: Sequence[Granted]) -> list[dict[str, Any]]:
    return [{"to": g.to, "on": g.on, "privileges": g.privileges} for g in grants]


def _told(privileges: str, on: str | None, who: str) -> dict[str, Any]:
    return {"privileges": privileges, "on": on, "to": who}


def _done(session: Session, text: str, told: dict[str, Any]) -> None:
    if session.json:
        write_json(told)
    else:
        write_line(text)
