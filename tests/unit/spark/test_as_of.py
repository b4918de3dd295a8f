"""``as of`` a snapshot or a time, in Spark SQL: where the clause ends, and what it says."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from lakehead.errors import SqlError
from lakehead.spark.as_of import as_of
from lakehead.spark.table_names import alias_for, find_spark_tables

TABLES = ["shop.orders"]
NOON = dt.datetime(2026, 5, 1, 12, tzinfo=dt.UTC)


class Times:
    """Knows some expressions."""

    zone = "Europe/Berlin"
    known = (
        "now()", "now() - interval 1 hour", ":at - interval 1 hour", "'2026-05-01' + interval '1, ) where' hour",
        "date_sub(current_date(), 1)", "'2026-05-01 14:00'", ":here", "'2026-5-1 14:00'",
        "'2026-05-01 13:00 Europe/London'",
    )  # fmt: skip

    def of(self, expression: str) -> dt.datetime | None:
        return NOON if expression in self.known else None


@pytest.mark.parametrize(
    ("clause", "moment", "rest"),
    [
        ("", None, ""),
        (" o where version = 3", None, " o where version = 3"),
        (" version as of 17", 17, ""),
        (" for\n SYSTEM_VERSION as of '17' o", 17, " o"),
        (" timestamp as of '2026-05-01 14:00:00' where x", NOON, " where x"),
        (" timestamp as of timestamp'2026-05-01T12:00:00Z'", NOON, ""),
        (' for system_time as of "2026-05-01 14:00"', NOON, ""),
        (" version as of :id where x = :v", 17, " where x = :v"),
        (" timestamp as of :at", NOON, ""),
        (" timestamp as of :text", NOON, ""),
        (" timestamp as of :here o", NOON, " o"),
        (" timestamp as of '2026-5-1 14:00' o", NOON, " o"),
        (" timestamp as of '2026-05-01 13:00 Europe/London' o", NOON, " o"),
        (" timestamp as of now() where x", NOON, " where x"),
        (" timestamp as of now() - interval 1 hour o where now() > x", NOON, " o where now() > x"),
        (" timestamp as of :at - interval 1 hour as o", NOON, " as o"),
        (" timestamp as of '2026-05-01' + interval '1, ) where' hour, b", NOON, ", b"),
        (" timestamp as of date_sub(current_date(), 1) o(a, b)", NOON, " o(a, b)"),
        (" timestamp as of '2026-05-01 14:00' -- - interval 1 hour\n o", NOON, " -- - interval 1 hour\n o"),
        (" timestamp as of now() --, o\n) where x", NOON, " --, o\n) where x"),
    ],
)
def test_as_of(clause: str, moment: object, rest: str) -> None:
    query = f"select * from shop.orders{clause}"
    ((name, _),) = find_spark_tables(query, TABLES)
    here = NOON.replace(hour=14, tzinfo=None)
    given = {"id": 17, "at": NOON, "text": "2026-05-01 14:00", "here": here, "v": 1}
    whole, found = as_of(query, name, Times(), given)
    assert (found, query[whole.end :]) == (moment, rest)
    assert alias_for(query, whole) == (
        "" if rest.startswith((" o", " as o")) or rest.endswith("\n o") else " as `orders`"
    )


@pytest.mark.parametrize(
    "clause",
    [
        "version as of :other", "version as of ?", "version as of :text", "version as of 1.5", "version as of now()",
        "timestamp as of then()",
        "timestamp as of 'noon'", "timestamp as of :v", "timestamp as of '2026-05-01+09:00'",
        "timestamp as of '20260501'", "timestamp as of '2026-W01-1'",
    ],
)  # fmt: skip
@pytest.mark.parametrize("args", [None, [17], {"v": 17.5, "text": "x"}])
def test_as_of_takes_literals_and_parameters(clause: str, args: Any) -> None:
    query = f"select * from shop.orders {clause}"
    ((name, _),) = find_spark_tables(query, TABLES)
    with pytest.raises(SqlError, match=r"shop\.orders (version|timestamp) as of needs"):
        as_of(query, name, Times(), args)


@pytest.mark.parametrize("zone", ["+05:30", "GMT+8", "PST"])
def test_what_python_does_not_know_of_zones_spark_is_asked(zone: str) -> None:
    class Elsewhere(Times):
        known = ("'2026-05-01 14:00:00'",)

    Elsewhere.zone = zone
    query = "select * from shop.orders timestamp as of '2026-05-01 14:00:00'"
    ((name, _),) = find_spark_tables(query, TABLES)
    assert as_of(query, name, Elsewhere(), None)[1] == NOON
