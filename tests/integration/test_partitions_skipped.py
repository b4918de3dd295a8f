"""A read asks for the partitions alone that may hold rows of its filter, and finds what a read of all finds."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.client.remote_log import RemoteLog

UTC = dt.UTC
DAYS = [dt.date(2026, 1, d) for d in (1, 2, 3)]
TIMES = [dt.datetime(2026, 1, 1, h, tzinfo=UTC) for h in (0, 1, 2)]
LOCAL = [t.replace(tzinfo=None) for t in TIMES]
HOURS = [t.time() for t in LOCAL]
CASES: dict[str, tuple[pa.DataType, list[Any], dict[str, int]]] = {
    # a filter, and how many of the three partitions it leaves to be read
    "integers": (pa.int32(), [-1, 0, 7], {"p = 7": 1, "p < 0": 1, "p >= 0": 2, "p in (0, 7, 9)": 2, "p > 7": 0}),
    "texts": (
        pa.string(),
        ["a&b=/", "é", "\U0001f600"],
        {"p = 'é'": 1, "p > 'é'": 1, "p <= 'é'": 2, "p = 'e'": 0, "p in ('a&b=/')": 1},
    ),
    "days": (pa.date32(), DAYS, {"p = date '2026-01-02'": 1, "p < date '2026-01-02'": 1, "p > date '2026-01-01'": 2}),
    "times": (
        pa.timestamp("us", "UTC"),
        TIMES,
        {"p = timestamptz '2026-01-01 01:00:00+00'": 1, "p > timestamptz '2026-01-01 00:30:00+00'": 2},
    ),
    "times without a zone": (
        pa.timestamp("s"),
        LOCAL,
        {"p = '2026-01-01 01:00:00'": 1, "p < '2026-01-01 00:30:00'": 1},
    ),
    "times in another zone": (
        pa.timestamp("ms", "Europe/Oslo"),
        TIMES,
        {"p = timestamptz '2026-01-01 01:00:00+00'": 1, "p > '2026-01-01 01:30:00+01'": 2},
    ),
    # which become microseconds
    "nanoseconds": (
        pa.timestamp("ns"),
        LOCAL,
        {"p >= '2026-01-01'": 3, "p = timestamp '2026-01-01 01:00:00'": 1, "p > '2026-01-01 00:30:00'": 2},
    ),
    "hours": (pa.time32("s"), HOURS, {"p = time '01:00:00'": 1, "p > time '00:30:00'": 2, "p < '00:00:00'": 0}),
    "microseconds": (
        pa.time64("us"),
        [h.replace(microsecond=5) for h in HOURS],
        {"p = time '01:00:00.000005'": 1, "p = time '01:00:00'": 0, "p in (time '00:00:00.000005')": 1},
    ),
    "truths": (pa.bool_(), [True, False], {"p = true": 1, "p = false": 1, "p": 1, "not p": 1}),
    "decimals": (
        pa.decimal128(9, 2),
        [Decimal("-1.50"), Decimal("0.00"), Decimal("2.25")],
        {"p > 0": 1, "p <= 0": 2, "p = 2.25": 1, "p in (0, 2.25)": 2, "p > 2.2": 1},
    ),
    "large decimals": (
        pa.decimal128(38, 10),
        [Decimal("12345678901234567890.0000000001"), Decimal("12345678901234567890.0000000002"), Decimal("-1")],
        {"p = 12345678901234567890.0000000001": 1, "p > 12345678901234567890.0000000001": 1, "p < 0": 1},
    ),
    "large texts": (pa.large_string(), ["", "é", "z"], {"p = 'é'": 1, "p > 'a'": 2, "p = ''": 1, "p like 'z%'": 1}),
    "bytes": (
        pa.binary(),
        [b"", b"a\x00", b"\xff"],
        {r"p = '\xFF'::blob": 1, "p > 'a'::blob": 2, "p = ''::blob": 1, "p = 'a'::blob": 0, r"p in ('a\x00'::blob)": 1},
    ),
    "large bytes": (pa.large_binary(), [b"a", b"b", b"\x80"], {"p = 'b'::blob": 1, "p > 'a'::blob": 2}),
    "bytes of one length": (
        pa.binary(2),
        [b"aa", b"a\x00", b"\xff\xff"],
        {r"p = '\xFF\xFF'::blob": 1, "p >= 'aa'::blob": 2, "p > 'aa'::blob": 1, r"p < 'a\x01'::blob": 1},
    ),
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The partitions of each read of the log."""
    seen: list[set[str]] = []
    real = RemoteLog.read_ranges

    def read_ranges(self: RemoteLog, ranges: Any, *args: Any, **options: Any) -> Iterator[Any]:
        seen.append({key.partition for key in ranges})
        return real(self, ranges, *args, **options)

    monkeypatch.setattr(RemoteLog, "read_ranges", read_ranges)
    return seen


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("shape", ["log", "keyed", "log with a lake", "keyed with a lake"])
def test_only_partitions_that_may_match_are_read(tmp_path: Path, kind: str, shape: str, asked: list[set[str]]) -> None:
    t, values, filters = CASES[kind]
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("p", t), ("v", pa.int64())])
    keyed, lake = "keyed" in shape, "lake" in shape
    how: dict[str, Any] = {"primary_key": ["id", "p"]} if keyed else {}
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table("t", schema, partition_by=["p"], lake="iceberg" if lake else None, **how)
        rows = pa.table({"id": range(len(values)), "p": pa.array(values, t), "v": [1] * len(values)}, schema=schema)
        (table.upsert if keyed else table.append)(rows)
        if lake:
            con.tier("t")
        again = rows.slice(0, 2).set_column(2, "v", pa.array([2, 2]))
        (table.upsert if keyed else table.append)(again)
        everything = table.scan().to_arrow()
        for where, partitions in filters.items():
            asked.clear()
            found = table.scan(where=where).to_arrow().sort_by([("id", "ascending"), ("v", "ascending")])
            assert all(len(names) == partitions for names in asked) and (asked or not partitions), where
            spec = con.sql(f"select * from rows where {where} order by id, v", frames={"rows": everything})
            assert found.to_pylist() == spec.to_arrow_table().select(["id", "p", "v"]).to_pylist()
            assert con.sql(f"select count(*) from t where {where}").fetchall() == [(found.num_rows,)]
