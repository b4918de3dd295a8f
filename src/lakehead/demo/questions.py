"""Questions that people would ask of the demo's tables, answered by DuckDB and by PySpark from the same text."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from lakehead.api.connection import Connection

_LATE = """
    from nyc.flights f
    where f.sched_dep > (select max(sched_dep) from nyc.flights) - interval 1 day
      and f.dep_delay >= 60 and f.tailnum is not null"""


def _carriers(window: str) -> str:
    return f"""
    select a.name as airline, count(*) as flights, avg(f.dep_delay) as delay_minutes
    from nyc.flights f join nyc.airlines a on f.carrier = a.carrier
    where f.sched_dep > (select max(sched_dep) from nyc.flights) - interval {window} and f.dep_delay is not null
    group by a.name order by delay_minutes desc, airline limit 5"""


_MODELS = f"""
    select p.manufacturer as manufacturer, p.model as model, count(*) as late_flights,
           cast(sum(l.dep_delay) as bigint) as minutes_lost
    from (select f.tailnum, f.dep_delay {_LATE}) l join nyc.planes p on l.tailnum = p.tailnum
    group by p.manufacturer, p.model order by late_flights desc, minutes_lost desc, model, manufacturer limit 5"""
_AIRPORTS = """
    select p.name as airport, count(*) as arrivals, avg(s.arr_delay) as delay_minutes
    from nyc.flight_status s join nyc.airports p on s.dest = p.faa
    where s.arr_delay is not null
    group by p.name having count(*) >= 100 order by delay_minutes desc, airport limit 5"""


@dataclass(frozen=True)
class Answer:
    """One question with its answer, and in whose words it was given."""

    title: str
    rows: pa.Table
    answered_by: tuple[str, ...]


QUESTIONS = (
    ("Most delayed carriers, last hour of the stream", _carriers("1 hour")),
    ("Most delayed carriers, last day of the stream", _carriers("1 day")),
    ("Plane models an hour late or more on the last day (planes looked up by tail number)", _MODELS),
    ("Delays by airport of arrival, the whole stream", _AIRPORTS),
)


def ask_all(con: Connection, ask_spark: Callable[[str], pa.Table], differs: Callable[[str], None]) -> list[Answer]:
    """Answer each question with DuckDB and PySpark, the one about planes also by lookups; tell what differs."""
    answers = []
    for title, query in QUESTIONS:
        results = {"DuckDB": con.sql(query).to_arrow_table(), "PySpark": ask_spark(query)}
        if query == _MODELS:
            results["lookup"] = _models_by_lookup(con)
        first, *others = results.items()
        for name, rows in others:
            if _plain(rows) != _plain(first[1]):
                differs(f"{title}: {first[0]} says {_plain(first[1])}, {name} says {_plain(rows)}")
        answers.append(Answer(title, first[1], tuple(results)))
    return answers


def _models_by_lookup(con: Connection) -> pa.Table:
    """What `_MODELS` asks, with one lookup of the planes instead of a join in SQL."""
    late = con.sql(f"select f.tailnum, f.dep_delay {_LATE}").to_arrow_table()
    planes = con.table("nyc.planes").lookup(late["tailnum"].unique().to_pylist())
    joined = late.join(planes.select(["tailnum", "manufacturer", "model"]), "tailnum", join_type="inner")
    grouped = joined.group_by(["manufacturer", "model"]).aggregate([("tailnum", "count"), ("dep_delay", "sum")])
    order = [("late_flights", "descending"), ("minutes_lost", "descending")]
    order += [("model", "ascending"), ("manufacturer", "ascending")]
    named = grouped.rename_columns(["manufacturer", "model", "late_flights", "minutes_lost"])
    return named.sort_by(order).slice(0, 5)


def _plain(rows: pa.Table) -> list[tuple[object, ...]]:
    """Values without the engines' integer widths. Averages are of integers, summed exactly: equal to the bit."""
    return [tuple(row.values()) for row in rows.to_pylist()]


def decoded(rows: str) -> pa.Table:
    """A table as the Spark process sends it: base64 of an Arrow stream."""
    return pa.ipc.open_stream(base64.b64decode(rows)).read_all()
