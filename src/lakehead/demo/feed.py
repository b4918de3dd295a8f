"""The demo's writers: one stream of flights and weather, and two that keep `nyc.flight_status` up to date at once.

Each writer tells through a `Position` how far it has sent and how far the engine has acknowledged, both as flight ids:
that is all a checker needs to know what must be readable, and what may be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakehead.api.connection import Connection
from lakehead.demo.data import (
    AIRLINES,
    AIRPORTS,
    ARRIVAL_COLUMNS,
    DEPARTURE_COLUMNS,
    FLIGHTS,
    PLANES,
    STATUS,
    WEATHER,
    DemoData,
)
from lakehead.env import Clock

FRESHNESS = "5s"
TABLES = ("nyc.flights", "nyc.flight_status", "nyc.weather", "nyc.planes", "nyc.airports", "nyc.airlines")

_STATUS_ROWS = 4_000
_BURST_ROWS = 5_000
_WEATHER_ROWS = 250
_SLOWER = 20


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast the stream flows.

    Attributes:
        seconds: how long the paced part takes.
        batch_rows: flights per append in it.
        paced_rows: flights of it; the rest follows as fast as it goes.
        rounds_min: lake commits to wait for, by slowing down near the end of the paced part.
        arrivals_behind: flights by which arrivals follow the stream, so that they update rows that exist.
        cancellations_behind: the same for deletes.
    """

    seconds: float
    batch_rows: int
    paced_rows: int
    rounds_min: int
    arrivals_behind: int
    cancellations_behind: int

    @classmethod
    def of(cls, rows: int) -> Pace:
        """The demo's pace for so many flights: about 40 s for all, never less than a round or two need."""
        share = min(1.0, rows / 300_000)
        return cls(
            seconds=12 + 28 * share,
            batch_rows=max(50, min(500, rows // 100)),
            paced_rows=rows * 8 // 10,
            rounds_min=4 if share == 1.0 else 2,
            arrivals_behind=rows // 12,
            cancellations_behind=rows // 6,
        )


class Position:
    """How far one writer is, as flight ids: all below are sent, or acknowledged. One thread writes, any may read."""

    def __init__(self) -> None:
        self.sent = 0
        self.acked = 0


class Feed:
    """Creates the tables and writes to them, in three threads.

    Attributes:
        flights, departures, arrivals, cancellations: how far each writer is.
        weather_rows: rows of weather acknowledged.
        rates: rows a second that were acknowledged, by name, once the feed is done.
        at_end: flights in both tiers, and in the lake alone, when the last of them had been acknowledged.
        done: set when all threads have ended, whatever the reason.
    """

    def __init__(self, con: Connection, data: DemoData, pace: Pace, clock: Clock, rounds: Callable[[], int]) -> None:
        """``rounds`` tells how many lake commits of `nyc.flights` there are by now."""
        self._con, self._data, self._pace, self._clock, self._rounds = con, data, pace, clock, rounds
        self._tables = {
            name: con.create_table(name, schema, primary_key=key, buckets=buckets, lake="iceberg", freshness=FRESHNESS)
            for name, schema, key, buckets in (
                ("nyc.flights", FLIGHTS, None, 2),
                ("nyc.flight_status", STATUS, "flight_id", 2),
                ("nyc.weather", WEATHER, None, 1),
                ("nyc.planes", PLANES, "tailnum", 1),
                ("nyc.airports", AIRPORTS, "faa", 1),
                ("nyc.airlines", AIRLINES, "carrier", 1),
            )
        }
        self.flights, self.departures, self.arrivals, self.cancellations = (Position() for _ in range(4))
        self._status = self._tables["nyc.flight_status"]
        self.weather_rows = 0
        self.rates: dict[str, float] = {}
        self.at_end = (0, 0)
        self.done = threading.Event()
        self._stop = threading.Event()
        self._moved = threading.Condition()
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        flown = pc.is_valid(data.flights["dep_at"])
        self._flown = data.flights.select(ARRIVAL_COLUMNS).filter(flown)
        self._flown_ids = self._flown["flight_id"].to_numpy()
        self._cancelled_ids = data.flights["flight_id"].filter(pc.invert(flown)).to_numpy()

    def start(self) -> None:
        """Fill the dimension tables, then let the stream flow."""
        for name, rows in (
            ("nyc.planes", self._data.planes),
            ("nyc.airports", self._data.airports),
            ("nyc.airlines", self._data.airlines),
        ):
            self._tables[name].upsert(rows)
        # The first flight takes each way alone, and a delete meets no row: what is compiled when first needed is
        # compiled before the stream flows.
        self._append(1)
        self._depart(1)
        self._arrive(1)
        self._status.delete([-1])
        for work in (self._stream, self._write_departures, self._write_arrivals):
            thread = threading.Thread(target=self._guard, args=(work,), name=f"demo{work.__name__}", daemon=True)
            self._threads.append(thread)
        for thread in self._threads:
            thread.start()
        threading.Thread(target=self._join, name="demo-feed", daemon=True).start()

    def stop(self) -> None:
        """End early and wait for the writers."""
        self._stop.set()
        with self._moved:
            self._moved.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def raise_error(self) -> None:
        """Raise what ended a writer, if anything did."""
        if self._error is not None:
            raise self._error

    # ---- threads ----------------------------------------------------------------------------------------------

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:
            self._error = self._error or e
            self._stop.set()
            with self._moved:
                self._moved.notify_all()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()
        self.done.set()

    def _stream(self) -> None:
        pace, rows = self._pace, self._data.flights.num_rows
        start = due = self._clock.monotonic()
        while self.flights.sent < pace.paced_rows and not self._stop.is_set():
            left = pace.paced_rows - self.flights.sent
            short_of_rounds = left <= pace.paced_rows // 10 and self._rounds() < pace.rounds_min
            size = min(left, pace.batch_rows // _SLOWER or 1 if short_of_rounds else pace.batch_rows)
            due = max(due, self._clock.monotonic()) + pace.seconds * pace.batch_rows / pace.paced_rows
            self._append(size)
            self._stop.wait(max(0.0, due - self._clock.monotonic()))
        self.rates["paced"] = self.flights.acked / max(self._clock.monotonic() - start, 1e-9)
        start, before = self._clock.monotonic(), self.flights.acked
        while self.flights.sent < rows and not self._stop.is_set():
            self._append(min(rows - self.flights.sent, _BURST_ROWS))
        self.rates["burst"] = (self.flights.acked - before) / max(self._clock.monotonic() - start, 1e-9)
        both = "select (select count(*) from nyc.flights), (select count(*) from nyc.flights$lake)"
        ((union, lake),) = self._con.sql(both).fetchall()
        self.at_end = union, lake

    def _append(self, size: int) -> None:
        batch = self._data.flights.slice(self.flights.sent, size)
        sent_at = FLIGHTS.get_field_index("sent_at")
        self.flights.sent += size
        last = self.flights.sent == self._data.flights.num_rows
        now = pa.scalar(self._clock.now_us(), FLIGHTS.field(sent_at).type)
        self._tables["nyc.flights"].append(batch.set_column(sent_at, FLIGHTS.field(sent_at), pa.repeat(now, size)))
        with self._moved:
            self.flights.acked = self.flights.sent
            self._moved.notify_all()
        self._append_weather(batch["sched_dep"][-1], last=last)

    def _append_weather(self, until: pa.Scalar, *, last: bool) -> None:
        """Hours that have begun by then; few rows wait for more."""
        weather = self._data.weather
        end = int(np.searchsorted(weather["hour_start"].to_numpy(), np.datetime64(until.value, "us"), "right"))
        end = weather.num_rows if last else end
        if end - self.weather_rows >= (1 if last else _WEATHER_ROWS):
            self._tables["nyc.weather"].append(weather.slice(self.weather_rows, end - self.weather_rows))
            self.weather_rows = end

    def _write_departures(self) -> None:
        total, writing = self._data.flights.num_rows, 0.0
        while not self._stop.is_set() and self.cancellations.acked < total:
            end = self._next(self.departures, 0)
            begun = self._clock.monotonic()
            self._depart(end)
            self._cancel(end if end == total else max(end - self._pace.cancellations_behind, self.cancellations.acked))
            writing += self._clock.monotonic() - begun
        self.rates["departures"] = self.departures.acked / max(writing, 1e-9)

    def _write_arrivals(self) -> None:
        total, writing = self._data.flights.num_rows, 0.0
        while not self._stop.is_set() and self.arrivals.acked < total:
            end = self._next(self.arrivals, self._pace.arrivals_behind)
            begun = self._clock.monotonic()
            self._arrive(end)
            writing += self._clock.monotonic() - begun
        self.rates["arrivals"] = len(self._flown_ids) / max(writing, 1e-9)

    def _depart(self, end: int) -> None:
        start = self.departures.acked
        if end > start:
            self.departures.sent = end
            self._status.upsert(self._data.flights.slice(start, end - start), columns=DEPARTURE_COLUMNS)
            self.departures.acked = end

    def _arrive(self, end: int) -> None:
        low, high = np.searchsorted(self._flown_ids, [self.arrivals.acked, end])
        self.arrivals.sent = end
        if high > low:
            self._status.upsert(self._flown.slice(low, high - low))
        self.arrivals.acked = end

    def _cancel(self, end: int) -> None:
        low, high = np.searchsorted(self._cancelled_ids, [self.cancellations.acked, end])
        self.cancellations.sent = end
        if high > low:
            self._status.delete(pa.table({"flight_id": self._cancelled_ids[low:high]}))
        self.cancellations.acked = end

    def _next(self, position: Position, behind: int) -> int:
        """Wait until the stream is that far ahead; the end of the next batch of flight ids."""

        def reach() -> int:
            acked = self.flights.acked
            return acked if acked == self._data.flights.num_rows else acked - behind

        with self._moved:
            self._moved.wait_for(lambda: self._stop.is_set() or reach() > position.acked)
        return max(min(reach(), position.acked + _STATUS_ROWS), position.acked)
