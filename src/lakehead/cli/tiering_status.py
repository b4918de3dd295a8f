"""How tiering stands: what lake tables lack, what their last rounds did, which jobs there are; once, or as it moves."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lakehead.cli.output import count_text, seconds_text, write_json, write_line, write_table
from lakehead.cli.session import Session
from lakehead.cli.tables import raise_first, table_states
from lakehead.config import parse_duration_ms
from lakehead.errors import LakeheadError

if TYPE_CHECKING:
    from lakehead.api.connection import Connection
    from lakehead.protocol.tiering import RoundInfo, TieringStatus

_COLUMNS = ("table", "lag rows", "lag", "freshness", "state", "last round", "job")
_JOB_COLUMNS = ("job", "tables", "asked", "memory")
_FILE_COLUMNS = ("table", "partition", "bucket", "files", "delete files", "bytes")


def status(
    session: Session,
    files: Annotated[bool, typer.Option("--files", help="Also the lake's files of each bucket.")] = False,
) -> None:
    """Show the lake tables, the one nearest to missing its freshness first, and the jobs that tier them."""
    with session.connect() as con:
        told, untold = con.tiering_status(), dict[str, LakeheadError]()
        states = _states(told, table_states(con, untold.__setitem__))
        held = {s["table"]: _files(con, s["table"]) for s in states} if files else {}
    if session.json:
        tables = [_plain(s) | ({"files": held[s["table"]]} if files else {}) for s in states]
        write_json({"tables": tables, "jobs": [_job(j) for j in told.jobs]})
        raise_first(untold)
        return
    write_table(_COLUMNS, [_cells(s) for s in states])
    if files:
        write_table(_FILE_COLUMNS, [(name, *bucket.values()) for name, found in held.items() for bucket in found])
    if told.jobs:
        write_table(_JOB_COLUMNS, _job_cells(told))
    else:
        typer.echo("no tiering job asks this server: see `lakehead tier run`, `lakehead server --tier`")
    raise_first(untold)


def top(
    session: Session,
    seconds: Annotated[float, typer.Option("--every", min=0.1, help="Seconds from one look to the next.")] = 1.0,
    times: Annotated[int | None, typer.Option(min=1, help="Look so often, then end; default: until Ctrl-C.")] = None,
) -> None:
    """Show tables and tiering jobs as they move: rows written a second, what the lake lacks, rounds.

    In a terminal the screen is drawn anew with each look; elsewhere each look is printed, as a line of JSON with -o
    json.
    """
    import sys

    from lakehead.env.clock import SystemClock

    clock, before, at = SystemClock(), dict[str, int](), 0.0
    with session.connect() as con:
        for n in itertools.count():
            if n:
                clock.sleep(seconds)
            untold: dict[str, LakeheadError] = {}
            told, states = con.tiering_status(), table_states(con, untold.__setitem__)
            now = clock.monotonic()
            ends = {s["table"]: s["end"] for s in states}
            rates = {t: max(end - before[t], 0) / (now - at) for t, end in ends.items() if t in before}
            lakes = {s["table"]: s for s in _states(told, states)}
            before, at = ends, now
            if session.json:
                tables = [
                    {**_plain(lakes.get(s["table"], s)), "rows_per_second": rates.get(s["table"])} for s in states
                ]
                failed = [
                    {"table": name, "code": e.code, "kind": type(e).__name__, "message": e.message}
                    for name, e in untold.items()
                ]
                write_json({"tables": tables, "jobs": [_job(j) for j in told.jobs], "errors": failed})
            else:
                if sys.stdout.isatty():
                    sys.stdout.write("\x1b[H\x1b[2J")
                _show_top(con.uri, states, lakes, rates, told)
                for e in untold.values():
                    write_line(e.message)
            sys.stdout.flush()
            if n + 1 == times:
                raise_first(untold)
                return


def _show_top(
    uri: str,
    states: Sequence[Mapping[str, Any]],
    lakes: Mapping[str, dict[str, Any]],
    rates: Mapping[str, float],
    told: TieringStatus,
) -> None:
    rows = []
    for s in states:
        lake = _cells(lakes[s["table"]])[1:] if s["table"] in lakes else ("–",) * (len(_COLUMNS) - 1)
        rate = rates.get(s["table"])
        rows.append((s["table"], s["rows"], "–" if rate is None else f"{rate:,.0f}", *lake))
    write_table(("table", "rows", "rows/s", *_COLUMNS[1:]), rows, title=uri)
    if told.jobs:
        write_table(_JOB_COLUMNS, _job_cells(told))


def _files(con: Connection, name: str) -> list[dict[str, Any]]:
    """Of each bucket that the lake holds, the files of its newest snapshot and the bytes of the data."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    deletes: dict[tuple[str, int], set[str]] = {}
    for f in con.table(name).lake.files().to_pylist():
        key = f["partition"] or "", -1 if f["bucket"] is None else f["bucket"]
        of = found.setdefault(key, {"partition": key[0], "bucket": key[1], "files": 0, "delete_files": 0, "bytes": 0})
        deletes.setdefault(key, set()).update(f["delete_files"])
        of.update(files=of["files"] + 1, delete_files=len(deletes[key]), bytes=of["bytes"] + f["bytes"])
    return [found[key] for key in sorted(found)]


def _states(told: TieringStatus, states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lake tables, the one nearest to missing its freshness first, with their last rounds."""
    rounds = {t.table: t for t in told.tables}
    out = []
    for state in states:
        if not state["lake"]:
            continue
        allowed = parse_duration_ms(state["freshness"]) / 1000
        seen = rounds.get(state["table"])
        out.append(
            {
                **state,
                "freshness_seconds": allowed,
                "late": state["lag_seconds"] > allowed,
                "rounds": [] if seen is None else list(seen.rounds),
                "round_ages": [] if seen is None else list(seen.ages),
            }
        )
    return sorted(out, key=lambda s: s["freshness_seconds"] - s["lag_seconds"])


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("table", "lag_rows", "lag_seconds", "freshness_seconds", "late")
    rounds = [
        {**{f: getattr(r, f) for f in r.__struct_fields__}, "age_seconds": age}
        for r, age in zip(state.get("rounds", ()), state.get("round_ages", ()), strict=True)
    ]
    return {**{k: state[k] for k in keys if k in state}, "rounds": rounds}


def _job(job: Any) -> dict[str, Any]:
    return {f: getattr(job, f) for f in job.__struct_fields__}


def _cells(state: Mapping[str, Any]) -> tuple[object, ...]:
    last: RoundInfo | None = state["rounds"][-1] if state["rounds"] else None
    return (
        state["table"],
        state["lag_rows"],
        seconds_text(state["lag_seconds"]),
        seconds_text(state["freshness_seconds"]),
        _word(state, last),
        "–" if last is None else _round_text(last),
        "–" if last is None else last.job or "by hand",
    )


def _word(state: Mapping[str, Any], last: RoundInfo | None) -> str:
    if not state["late"]:
        return "in time" if state["lag_rows"] else "all tiered"
    by = f"late by {seconds_text(state['lag_seconds'] - state['freshness_seconds'])}"
    took = sum(last.seconds.values()) if last is not None else 0.0
    return f"{by}: a round takes {seconds_text(took)}" if took > state["freshness_seconds"] else by


def _round_text(last: RoundInfo) -> str:
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in last.seconds.items() if seconds >= 0.005)
    took = f"{sum(last.seconds.values()):.2f} s, {last.cpu_seconds:.2f} s of CPU"
    return f"{count_text(last.rows, 'row')} in {took}" + (f" ({phases})" if phases else "")


def _job_cells(told: TieringStatus) -> list[tuple[object, ...]]:
    return [
        (j.name, j.tables, f"{seconds_text(j.silent_seconds)} ago", f"{j.memory_bytes / (1 << 20):,.0f} MiB")
        for j in told.jobs
    ]
