"""The demo's checker: what must hold at every moment, asked again and again while data flows, and once more at the end.

A check reads how far the writers are acknowledged, asks, and then reads how far they have sent: the answer must lie
between, and everything below what was acknowledged must be there exactly once, with the sums of the source.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from lakehead.api.connection import Connection
from lakehead.demo.data import STATUS, WEATHER, DemoData
from lakehead.demo.feed import TABLES, Feed

if TYPE_CHECKING:
    import pandas

STREAMS = ("nyc.flights", "nyc.flight_status")

_PAUSE_SECONDS = 0.7
_LOOKUPS = 64


@dataclass(frozen=True)
class Seen:
    """What one check saw of `nyc.flights`: rows in both tiers and in the lake alone, age of the oldest untiered row."""

    union: int
    lake: int
    lag_seconds: float


class Checker:
    """Checks until it is stopped, and collects what is wrong instead of raising, so that everything wrong is reported.

    Attributes:
        passed: checks that held.
        rounds: lake commits of each table that data flows into, at the last check.
        seen: what each check saw, oldest first.
        violations: what did not hold, in words.
    """

    def __init__(self, con: Connection, data: DemoData, feed: Feed) -> None:
        self._con, self._data, self._feed = con, data, feed
        self.passed = 0
        self.rounds = dict.fromkeys(STREAMS, 0)
        self.seen: list[Seen] = []
        self.violations: list[str] = []
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="demo-checker", daemon=True)
        flights = data.flights
        flown = pc.is_valid(flights["dep_at"])
        self._miles_before = _sums_before(flights["distance"])
        self._flown_before = _sums_before(flown)
        self._dep_delay_before = _sums_before(flights["dep_delay"])
        self._arr_delay_before = _sums_before(flights["arr_delay"])
        self._flown = flown.to_numpy()
        self._arr_delay = flights["arr_delay"].to_pylist()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Let the check under way finish, then end."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def raise_error(self) -> None:
        """Raise what kept a check from being made, if anything did."""
        if self._error is not None:
            raise self._error

    def check(self) -> None:
        """All checks that can be made while data flows, once."""
        before = len(self.violations)
        self.rounds = {name: self._con.table(name).lake.snapshots().num_rows for name in STREAMS}
        self._check_flights()
        self._check_status()
        self._check_lookups()
        self.passed += len(self.violations) == before

    def _run(self) -> None:
        try:
            while not self._stop.is_set() and not self.violations:
                self.check()
                self._stop.wait(_PAUSE_SECONDS)
        except BaseException as e:
            self._error = e

    def expect(self, holds: bool, what: str) -> None:
        """Note a violation unless it holds."""
        if not holds:
            self.violations.append(what)

    # ---- while data flows -------------------------------------------------------------------------------------

    def _check_flights(self) -> None:
        lake, lake_ids = self._ask("select count(*), count(distinct flight_id) from nyc.flights$lake")
        status = self._con.table("nyc.flights").status()
        acked = self._feed.flights.acked
        count, ids, miles, below, below_ids, below_miles = self._ask(
            f"""
            select count(*), count(distinct flight_id), coalesce(sum(distance), 0),
                   count(*) filter (where flight_id < {acked}),
                   count(distinct flight_id) filter (where flight_id < {acked}),
                   coalesce(sum(distance) filter (where flight_id < {acked}), 0)
            from nyc.flights"""
        )
        sent = self._feed.flights.sent
        name = "nyc.flights"
        self.expect(acked <= count <= sent, f"{name}: {count:,} rows read; {acked:,} were acknowledged, {sent:,} sent")
        self.expect(ids == count, f"{name}: {count - ids:,} rows were read twice")
        self.expect(
            below == below_ids == acked,
            f"{name}: of the {acked:,} flights acknowledged, {below_ids:,} were read, in {below:,} rows",
        )
        expected = int(self._miles_before[acked])
        self.expect(below_miles == expected, f"{name}: sum(distance) of them is {below_miles:,}, not {expected:,}")
        low, high = int(self._miles_before[acked]), int(self._miles_before[sent])
        self.expect(low <= miles <= high, f"{name}: sum(distance) is {miles:,}, not between {low:,} and {high:,}")
        self.expect(lake_ids == lake, f"{name}$lake: {lake - lake_ids:,} rows were read twice")
        self.expect(lake <= count, f"{name}$lake holds {lake:,} rows, the union read {count:,}")
        if self.seen:
            former = self.seen[-1].lake
            self.expect(lake >= former, f"{name}$lake went back from {former:,} to {lake:,} rows")
        self.seen.append(Seen(count, lake, float(pc.max(status["lag_seconds"]).as_py() or 0.0)))

    def _check_status(self) -> None:
        feed = self._feed
        deleted = feed.cancellations.acked
        written = max(feed.departures.acked, feed.arrivals.acked)
        exact = min(feed.departures.acked, feed.arrivals.acked, deleted)
        count, ids, below, dep_delay, arr_delay = self._ask(
            f"""
            select count(*), count(distinct flight_id), count(*) filter (where flight_id < {exact}),
                   coalesce(sum(dep_delay) filter (where flight_id < {exact}), 0),
                   coalesce(sum(arr_delay) filter (where flight_id < {exact}), 0)
            from nyc.flight_status"""
        )
        sent = max(feed.departures.sent, feed.arrivals.sent)
        least = int(self._flown_before[written])
        most = int(self._flown_before[deleted]) + sent - deleted
        name = "nyc.flight_status"
        self.expect(least <= count <= most, f"{name}: {count:,} rows read, not between {least:,} and {most:,}")
        self.expect(ids == count, f"{name}: {count - ids:,} keys were read twice")
        expected = tuple(int(s[exact]) for s in (self._flown_before, self._dep_delay_before, self._arr_delay_before))
        self.expect(
            (below, dep_delay, arr_delay) == expected,
            f"{name}: flights below {exact:,} give count, sum(dep_delay), sum(arr_delay) ="
            f" {(below, dep_delay, arr_delay)}, not {expected}",
        )

    def _check_lookups(self) -> None:
        """Keys spread over what is settled: cancelled ones are gone, the others carry both writers' values."""
        feed = self._feed
        settled = min(feed.departures.acked, feed.arrivals.acked, feed.cancellations.acked)
        keys = list(range(self.passed % 7, settled, max(settled // _LOOKUPS, 1)))
        found = self._con.table("nyc.flight_status").lookup(keys) if keys else STATUS.empty_table()
        expected = [(key, self._arr_delay[key]) for key in keys if self._flown[key]]
        got = list(zip(found["flight_id"].to_pylist(), found["arr_delay"].to_pylist(), strict=True))
        self.expect(got == expected, f"nyc.flight_status: a lookup of {len(keys)} keys gave {got}, not {expected}")

    def _ask(self, query: str) -> tuple[int, ...]:
        row = self._con.sql(query).fetchone()
        assert row is not None
        return tuple(int(value) for value in row)

    # ---- at the end -------------------------------------------------------------------------------------------

    def check_union(self) -> None:
        """Everything was written: union reads and lookups give exactly the source, hot reads nothing else."""
        before = len(self.violations)
        status = self._con.table("nyc.flight_status")
        model = self._expected()
        for name, rows in model.items():
            self._compare(f"{name} (union read)", self._con.table(name).scan().to_arrow(), rows)
        every = self._data.flights["flight_id"]
        found = status.lookup(pa.table({"flight_id": every}))
        self._compare("nyc.flight_status (lookup of every key)", found, model["nyc.flight_status"])
        hot = status.scan(tier="hot").to_arrow()
        there = model["nyc.flight_status"].filter(
            pc.is_in(model["nyc.flight_status"]["flight_id"], value_set=hot["flight_id"].combine_chunks())
        )
        self._compare("nyc.flight_status (hot read)", hot, there)
        lagged = [s for s in self.seen if s.lake < s.union]
        self.expect(bool(lagged), "nyc.flights$lake never lagged behind the union read: nothing was shown")
        self.passed += len(self.violations) == before

    def check_lake(self) -> None:
        """Everything was tiered: the lake alone gives exactly the source."""
        before = len(self.violations)
        for name, rows in self._expected().items():
            self._compare(f"{name} (lake)", self._con.table(name).scan(tier="lake").to_arrow(), rows)
        self.passed += len(self.violations) == before

    def lag_rows(self) -> int:
        """Rows, of all tables, that are not in the lake yet."""
        return sum(int(pc.sum(self._con.table(name).status()["lag_rows"]).as_py() or 0) for name in TABLES)

    def _expected(self) -> dict[str, pa.Table]:
        data = self._data
        status = pa.Table.from_pandas(status_model(data), schema=STATUS, preserve_index=False)
        return {
            "nyc.flights": data.flights.drop_columns("sent_at"),
            "nyc.flight_status": status,
            "nyc.weather": data.weather,
            "nyc.planes": data.planes,
            "nyc.airports": data.airports,
            "nyc.airlines": data.airlines,
        }

    def _compare(self, what: str, got: pa.Table, expected: pa.Table) -> None:
        """Same rows and values, whatever their order."""
        keys = [(key, "ascending") for key in _ORDER.get(what.split()[0], expected.column_names[:1])]
        if got.num_rows != expected.num_rows:
            self.expect(False, f"{what}: {got.num_rows:,} rows, not {expected.num_rows:,}")
            return
        got, expected = got.sort_by(keys), expected.sort_by(keys)
        for column in expected.column_names:
            if not got[column].equals(expected[column]):
                at, (one, other) = next(
                    (i, pair)
                    for i, pair in enumerate(zip(got[column].to_pylist(), expected[column].to_pylist(), strict=True))
                    if pair[0] != pair[1]
                )
                key = {name: expected[name][at].as_py() for name, _ in keys}
                self.expect(False, f"{what}: {column} of {key} is {one!r}, not {other!r}")


_ORDER = {"nyc.weather": WEATHER.names}  # one hour of the year came twice: no column or pair of them is a key


def status_model(data: DemoData) -> pandas.DataFrame:
    """`nyc.flight_status` as it must end, made by pandas: departures joined with arrivals, without the cancelled."""
    flights = data.flights.to_pandas(types_mapper=pd.ArrowDtype).set_index("flight_id")
    cancelled = flights.index[flights["dep_at"].isna()]
    departures = flights[[n for n in STATUS.names if n in ("carrier", "origin", "sched_dep", "dep_at", "dep_delay")]]
    arrivals = flights[["dest", "sched_arr", "arr_at", "arr_delay"]]
    model: pandas.DataFrame = departures.join(arrivals).drop(index=cancelled).reset_index()[STATUS.names]
    return model


def _sums_before(values: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """At i: the sum of the first i values; nulls count 0."""
    plain = pc.fill_null(values.cast(pa.int64()), 0).to_numpy()
    return np.concatenate([[0], np.cumsum(plain)]).astype(np.int64)
