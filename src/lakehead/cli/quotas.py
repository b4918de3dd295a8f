"""`lakehead quota ...`: how much of a server principals may take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lakehead.cli.output import write_json, write_line, write_table
from lakehead.cli.session import Session, command
from lakehead.errors import InvalidRequestError

if TYPE_CHECKING:
    from lakehead.protocol.quotas import QuotaInfo

Principal = Annotated[str, typer.Argument(help="A principal, or '*': each that has no quota of its own.")]
_BOUNDS = ("bytes_in", "bytes_out", "streams", "leases", "tables", "stored_bytes")


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    nouns = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Bound what principals take of a server.")
    command(nouns, "set")(set_quota)
    command(nouns, "list")(list_quotas)
    command(nouns, "remove")(remove_quota)
    app.add_typer(nouns, name="quota")


def set_quota(
    session: Session,
    principal: Principal,
    bytes_in: Annotated[str | None, typer.Option(help="Bytes that it sends a second: 10MiB.")] = None,
    bytes_out: Annotated[str | None, typer.Option(help="Bytes that it is sent a second.")] = None,
    streams: Annotated[int | None, typer.Option(help="Reads and subscriptions that it has open.")] = None,
    leases: Annotated[int | None, typer.Option(help="Pinned reads that it holds.")] = None,
    tables: Annotated[int | None, typer.Option(help="Tables that it has made.")] = None,
    stored_bytes: Annotated[str | None, typer.Option(help="What they take in the server's folder.")] = None,
) -> None:
    """Bound a principal by what is given, and by nothing else from now on."""
    if all(bound is None for bound in (bytes_in, bytes_out, streams, leases, tables, stored_bytes)):
        options = ", ".join("--" + name.replace("_", "-") for name in _BOUNDS)
        raise InvalidRequestError(f"say what bounds {principal}: {options}; or take its quota away by 'quota remove'")
    with session.connect() as con:
        con.set_quota(
            principal,
            bytes_in=bytes_in,
            bytes_out=bytes_out,
            streams=streams,
            leases=leases,
            tables=tables,
            stored_bytes=stored_bytes,
        )
    _done(session, f"bounded {principal}", {"principal": principal})


def remove_quota(session: Session, principal: Principal) -> None:
    """Bound a principal by nothing of its own any more."""
    with session.connect() as con:
        known = [info.principal for info in con.quotas()]
        con.set_quota(principal)
        if principal not in known:
            raise InvalidRequestError(f"{principal} has no quota of its own: `lakehead quota list` shows who has")
    _done(session, f"removed the quota of {principal}", {"principal": principal})


def list_quotas(session: Session) -> None:
    """Show what bounds this caller, all quotas to an admin; and what is taken of them, behind a slash."""
    with session.connect() as con:
        show_quotas(session, con.quotas())


def show_quotas(session: Session, quotas: list[QuotaInfo]) -> None:
    """Print quotas, a row each."""
    if session.json:
        for info in quotas:
            write_json(plain_quota(info))
    else:
        write_table(("principal", *_BOUNDS), [(q.principal, *(_cell(q, name) for name in _BOUNDS)) for q in quotas])


def plain_quota(info: QuotaInfo) -> dict[str, Any]:
    """A quota for JSON; what is not bounded is null."""
    quota = {name: getattr(info.quota, name) for name in _BOUNDS}
    used = None if info.used is None else {name: getattr(info.used, name) for name in _BOUNDS}
    return {"principal": info.principal, "quota": quota, "used": used}


def _cell(info: QuotaInfo, name: str) -> str:
    limit = getattr(info.quota, name)
    if limit is None:
        return ""
    return f"{limit:,}" if info.used is None else f"{limit:,} / {getattr(info.used, name):,}"


def _done(session: Session, text: str, told: dict[str, Any]) -> None:
    if session.json:
        write_json(told)
    else:
        write_line(text)
