"""From frames to what was asked: projection, system columns, ranges and filters, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lakehead.errors import ColumnNotFoundError
from lakehead.format.frame import Frame, WriterStamp, encode_body
from lakehead.log.records import FrameRecords
from lakehead.predicate import Predicate, parse_predicate
from lakehead.server.projection import Projection, coalesce
from lakehead.types import ChangeType, Schemas

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.string()), ("f", pa.float64())])
ROWS = [{"n": i, "s": None if i % 4 == 0 else f"s{i % 3}", "f": i / 2} for i in range(20)]


def frame(*, changelog: bool = False, compression: str = "none") -> Frame:
    """Rows with offsets [100, 120)."""
    how: dict[str, Any] = {}
    if changelog:
        how = {"change_types": np.full(20, 3, np.int8), "prev_offsets": np.arange(20)}
    batch = pa.RecordBatch.from_pylist(ROWS, schema=SCHEMA)
    body = encode_body(batch, schema_id=0, stamp=WriterStamp(bytes(16), 0), compression=compression, **how)
    return Frame(100, 5_000_000, 0, 0, body, 64 + body.buffer.size)


def read(columns: list[str], where: str | None = None, start: int = 0, end: int = 1000, **how: Any) -> Any:
    predicate: Predicate | None = None if where is None else parse_predicate(where, SCHEMA)
    return Projection(Schemas.only(SCHEMA), columns, predicate).records(FrameRecords(frame(**how)), 7, start, end)


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize(("start", "end"), [(0, 1000), (100, 120), (105, 106), (117, 300), (50, 103), (110, 110)])
def test_ranges_and_columns(compression: str, start: int, end: int) -> None:
    found = read(["f", "__offset", "n"], start=start, end=end, compression=compression)
    offsets = [o for o in range(100, 120) if start <= o < end]
    assert found.to_pylist() == [{"f": (o - 100) / 2, "__offset": o, "n": o - 100} for o in offsets]
    assert read([], start=start, end=end, compression=compression).num_rows == len(offsets)


def test_system_columns() -> None:
    columns = ["__bucket", "__offset", "__timestamp", "__change_type", "__prev_offset"]
    for changelog in (False, True):
        found = read(columns, start=103, end=105, changelog=changelog)
        assert found.schema.names == columns
        assert found["__bucket"].to_pylist() == [7, 7] and found["__offset"].to_pylist() == [103, 104]
        assert found["__timestamp"].cast(pa.int64()).to_pylist() == [5_000_000] * 2
        assert found["__change_type"].to_pylist() == ([3, 3] if changelog else [0, 0])
        assert found["__prev_offset"].to_pylist() == ([3, 4] if changelog else [-1, -1])


@pytest.mark.parametrize("columns", [["n"], ["s", "n"], ["f"], [], ["__offset"]])
def test_filters_may_use_other_columns(columns: list[str]) -> None:
    found = read(columns, "s = 's1' and n > 5")
    wanted = [r for r in ROWS if r["s"] == "s1" and r["n"] > 5]
    assert found.num_rows == len(wanted) and found.schema.names == columns
    for c in columns:
        assert found[c].to_pylist() == [r["n"] + 100 if c == "__offset" else r[c] for r in wanted]


def test_statistics_skip_what_cannot_match() -> None:
    rows = pa.RecordBatch.from_pylist(ROWS * 20, schema=SCHEMA)
    body = encode_body(rows, schema_id=0, stamp=WriterStamp(bytes(16), 0))
    large = Frame(0, 0, 0, 0, body, 64 + body.buffer.size)

    def found(where: str) -> pa.RecordBatch | None:
        return Projection(Schemas.only(SCHEMA), ["n"], parse_predicate(where, SCHEMA)).records(
            FrameRecords(large), 0, 0, 1000
        )

    assert found("n > 1000") is None
    kept = found("n = 5")
    assert kept is not None and kept.num_rows == 20


def test_small_batches_have_no_statistics_and_are_read() -> None:
    assert frame().body.statistics_length == 0
    assert read(["n"], "n > 1000").num_rows == 0


def test_unknown_columns() -> None:
    with pytest.raises(ColumnNotFoundError, match="n, s, f"):
        Projection(Schemas.only(SCHEMA), ["nope"], None)


def test_live_rows_look_freshly_written() -> None:
    columns = ["n", "__change_type", "__offset", "__timestamp"]
    projection = Projection(Schemas.only(SCHEMA), columns, parse_predicate("f > 8", SCHEMA))
    rows = pa.RecordBatch.from_pylist(ROWS, schema=SCHEMA).select([SCHEMA.names[i] for i in projection.positions])
    found = projection.live(np.arange(20) * 10, None, rows, 7, ChangeType.INSERT)
    assert found["n"].to_pylist() == [17, 18, 19] and found["__offset"].to_pylist() == [170, 180, 190]
    assert found["__change_type"].to_pylist() == [1, 1, 1] and found["__timestamp"].null_count == 3


def test_small_batches_are_joined_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakehead.server.projection._JOIN_ROWS_MAX", 6)

    def batches() -> Iterator[tuple[int, pa.RecordBatch, int]]:
        end = 0
        for size in [1, 2, 3, 10, 1, 0, 4]:
            end += size
            yield end, pa.record_batch([pa.array(range(end - size, end), pa.int64())], names=["n"]), 8 * size

    found = list(coalesce(batches()))
    assert [(end, b.num_rows) for end, b in found] == [(6, 6), (16, 10), (21, 5)]
    assert [n for _, b in found for n in b["n"].to_pylist()] == list(range(21))
    assert list(coalesce(iter([]))) == []
