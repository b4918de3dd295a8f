"""Rows of any size: bytes bound every join, gather and answer, here lowered so that small rows are large ones."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.api import folder
from lakehead.api.embedded import serve
from lakehead.config import ServerConfig
from lakehead.format import joins
from lakehead.format.bucketing import bucket_ids
from lakehead.server.notes import MakeCheckpoint
from lakehead.server.tablet import Tablet

BYTES_MAX = 1 << 14
SCHEMA = pa.schema([("n", pa.int64()), ("doc", pa.string()), ("parts", pa.list_(pa.binary()))])
ROWS = 210


def row(n: int, version: int = 0) -> dict[str, Any]:
    size = random.Random(n * 7 + version).choice([3, 50, 1000, 3000, 20_000 if n % 50 == 0 else 10])
    return {"n": n, "doc": f"{n}:{version}" + "x" * size, "parts": [b"y" * (size // 2)] * (n % 3)}


def rows(numbers: range, version: int = 0) -> pa.Table:
    return pa.Table.from_pylist([row(n, version) for n in numbers], schema=SCHEMA)


def require_bounded(batches: list[pa.RecordBatch], bytes_max: int = BYTES_MAX) -> list[pa.RecordBatch]:
    sizes = [(b.num_rows, b.nbytes) for b in batches]
    # Sizes are estimated, without what alignment takes.
    assert all(count == 1 or size <= 1.1 * bytes_max for count, size in sizes), sizes
    return batches


def sent(batches: Any) -> list[dict[str, Any]]:
    found = [r for b in require_bounded(list(batches)) for r in b.to_pylist()]
    return sorted(({c: r[c] for c in SCHEMA.names} for r in found), key=lambda r: r["n"])


@pytest.fixture(params=["embedded", "server"])
def con(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[lh.Connection]:
    monkeypatch.setattr(joins, "BYTES_MAX", BYTES_MAX)
    monkeypatch.setattr(joins, "CHANGE_BYTES_MAX", 8 * BYTES_MAX)
    if request.param == "embedded":
        with lh.connect(tmp_path / "data") as made:
            yield made
        return
    host = serve(str(tmp_path / "data"), ServerConfig(port=0, token="t"))
    with lh.connect(f"lakehead://127.0.0.1:{host.port}", token="t") as made:
        yield made
    host.close()


def tablets(con: lh.Connection) -> list[Tablet]:
    host, _ = folder._hosts[next(path for path in folder._hosts if path in repr(con))]
    return [t for table in host.service._tables.open_tables() for t in table.tablets.values()]


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_log_table(con: lh.Connection, compression: str) -> None:
    table = con.create_table("t", SCHEMA, lake="iceberg", durability="os", compression=compression)
    for start in range(0, ROWS, 3):
        table.append(rows(range(start, start + 3)))
    table.append(rows(range(ROWS, 2 * ROWS)))
    expected = [row(n) for n in range(2 * ROWS)]
    assert sent(table.scan().to_batches()) == expected
    assert table.scan(where="doc like '%x%'", columns=["n"]).count() == len(expected)
    assert sent(b.rows for b in table.subscribe(start="earliest", stop="now")) == expected
    assert con.tier("t").rows == len(expected)
    assert sorted(table.scan().to_arrow().to_pylist(), key=lambda r: r["n"]) == expected


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_frames_that_are_joined_when_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    """After a restart nothing of them is in memory; what a compressed one takes is not its length."""
    monkeypatch.setattr(joins, "BYTES_MAX", BYTES_MAX)
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table("t", SCHEMA, durability="os", compression=compression)
        for start in range(0, ROWS, 3):
            table.append(rows(range(start, start + 3)))
    with lh.connect(tmp_path / "data") as con:
        for _ in range(2):
            assert sent(con.table("t").scan().to_batches()) == [row(n) for n in range(ROWS)]


@pytest.mark.parametrize("buckets", [1, 12])
def test_a_keyed_table(con: lh.Connection, buckets: int) -> None:
    table = con.create_table("t", SCHEMA, primary_key=["n"], buckets=buckets, lake="iceberg", durability="os")
    for start in range(0, ROWS, 10):
        table.upsert(rows(range(start, start + 10)))
    table.upsert(rows(range(ROWS), version=1))  # all old rows at once
    table.upsert(pa.table({"n": range(ROWS), "parts": [[b"z"]] * ROWS}))  # and what is not given of them
    expected = [{**row(n, 1), "parts": [b"z"]} for n in range(ROWS)]
    for tier in (False, True):
        if tier:
            assert con.tier("t").rows == ROWS
        asked = list(range(ROWS + 5))
        random.Random(1).shuffle(asked)
        found = table.lookup(asked)
        assert found["n"].to_pylist() == [n for n in asked if n < ROWS], "in the order asked"
        assert sorted(found.to_pylist(), key=lambda r: r["n"]) == expected
        assert table.get(50) == expected[50]
        assert sorted(table.scan().to_arrow().to_pylist(), key=lambda r: r["n"]) == expected
        assert sent(b.rows for b in table.subscribe(start="full", stop="now")) == expected
    assert table.delete(list(range(ROWS))).rows == ROWS
    changes = [b.rows for b in table.subscribe(start="earliest", stop="now")]
    assert sum(b.num_rows for b in require_bounded(changes, joins.CHANGE_BYTES_MAX)) == (1 + 2 + 2 + 1) * ROWS
    assert table.scan().count() == 0 and con.tier("t").rows == 0 and table.scan(tier="lake").count() == 0


KEYS: list[tuple[pa.DataType, Callable[[int], Any]]] = [
    (pa.int32(), int),
    (pa.string(), str),
    (pa.large_binary(), lambda n: str(n).encode()),
    (pa.date32(), lambda n: dt.date(2026, 1, 1) + dt.timedelta(n)),
    (pa.timestamp("ns", "UTC"), lambda n: dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(n)),
    (pa.decimal128(20, 2), lambda n: Decimal(n).scaleb(-2)),
]


@pytest.mark.parametrize("keys", KEYS, ids=[str(t) for t, _ in KEYS])
def test_prefixes(con: lh.Connection, keys: tuple[pa.DataType, Callable[[int], Any]]) -> None:
    kind, value = keys
    schema = pa.schema([("of", kind), ("day", pa.string()), ("n", pa.int64()), ("doc", pa.string())])
    how: dict[str, Any] = {"primary_key": ["of", "day", "n"], "bucket_key": ["of"], "partition_by": ["day"]}
    table = con.create_table("t", schema, **how, buckets=3, durability="os")
    made = [
        {"of": value(n % 40), "day": "ab"[n % 2], "n": n, "doc": "x" * random.Random(n).choice([5, 300, 900])}
        for n in range(400)
    ]
    table.upsert(pa.Table.from_pylist(made, schema))
    asked = [(value(n), day) for n in [*range(50), 3, 3, 7] for day in "aba"]
    found = table.prefix_lookup(pa.table({"of": pa.array([a for a, _ in asked], kind), "day": [d for _, d in asked]}))
    assert found.nbytes > 5 * BYTES_MAX and found.schema == table.schema
    assert sorted(found.to_pylist(), key=lambda r: r["n"]) == pa.Table.from_pylist(made, schema).to_pylist()
    alone = [{"of": value(99), "day": "a", "n": n, "doc": "x" * BYTES_MAX} for n in range(3)]
    table.upsert(pa.Table.from_pylist(alone, schema))
    with pytest.raises(lh.LimitExceededError, match="or scan"):
        table.prefix_lookup(pa.table({"of": pa.array([value(99), value(1)], kind), "day": ["a", "b"]}))


def test_more_prefixes_than_a_request_has(con: lh.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakehead.client.lookups._LOOKUP_KEYS", 7)
    schema = pa.schema([("of", pa.int64()), ("n", pa.int64())])
    table = con.create_table("t", schema, primary_key=["of", "n"], bucket_key="of", buckets=3)
    table.upsert(pa.table({"of": [n % 20 for n in range(60)], "n": range(60)}))
    found = table.prefix_lookup([*range(50), *range(10)])
    assert sorted(found["n"].to_pylist()) == list(range(60))
    assert table.prefix_lookup([]).num_rows == table.prefix_lookup([77] * 30).num_rows == 0


def test_checkpoints_and_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joins, "BYTES_MAX", BYTES_MAX)
    expected = [row(n) for n in range(ROWS)]
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table("t", SCHEMA, primary_key=["n"], durability="os")
        for start in range(0, ROWS, 2):
            table.upsert(rows(range(start, start + 2)))
        (tablet,) = tablets(con)
        tablet.apply_note(MakeCheckpoint())
        assert tablet._log.checkpoint is not None
        require_bounded([b.rows for b in tablet._log.checkpoint.batches()])
        assert sent(table.scan().to_batches()) == expected
    with lh.connect(tmp_path / "data") as con:
        assert sorted(con.table("t").lookup(list(range(ROWS))).to_pylist(), key=lambda r: r["n"]) == expected


def test_prefixes_with_too_much_behind_them_say_so(con: lh.Connection) -> None:
    schema = pa.schema([("u", pa.int64()), ("n", pa.int64()), ("doc", pa.string())])
    table = con.create_table("t", schema, primary_key=["u", "n"], bucket_key=["u"], durability="os")
    for u in range(2):
        table.upsert([{"u": u, "n": n, "doc": "x" * 1000} for n in range(5 if u else 60)])
    assert table.prefix_lookup([1]).num_rows == 5
    with pytest.raises(lh.LimitExceededError, match="scan"):
        table.prefix_lookup([0])


class Cut(Exception):
    """A client is about to send less at once."""


def test_a_write_that_one_tablet_would_refuse_has_no_part_in_another(
    con: lh.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = pa.schema([("n", pa.int64()), ("doc", pa.string())])
    table = con.create_table("t", schema, primary_key=["n"], buckets=4, durability="os")
    numbers = list(range(60))
    buckets = bucket_ids([pa.array(numbers)], 4).tolist()
    assert buckets.count(0) > 8
    for n in numbers:
        table.upsert([{"n": n, "doc": "x" * (10 if buckets[n] else joins.CHANGE_BYTES_MAX // 8)}])
    before = table.status()["high_watermark"].to_pylist()

    def refuse(batch: pa.RecordBatch) -> Any:
        raise Cut

    with monkeypatch.context() as cuts:
        cuts.setattr("lakehead.client.writers.halves", refuse)
        with pytest.raises(Cut):
            table.delete(numbers)
    assert table.status()["high_watermark"].to_pylist() == before
    assert table.delete(numbers).rows == 60 and table.scan().count() == 0


def test_one_row_that_is_too_large_is_refused_with_all_that_come_with_it(con: lh.Connection) -> None:
    table = con.create_table("t", pa.schema([("n", pa.int64()), ("doc", pa.large_string())]), durability="os")
    large = pa.array(["x" * (257 << 20)], pa.large_string())
    few = pa.table({"n": range(100), "doc": pa.array(["x" * 1000] * 100, pa.large_string())})
    with pytest.raises(lh.LimitExceededError, match="one row of"):
        table.append(pa.concat_tables([few, pa.table({"n": [100], "doc": large})]))
    assert table.scan().count() == 0
    with pytest.raises(lh.LimitExceededError), table.writer() as writer:
        writer.append(pa.table({"n": [100], "doc": large}))
