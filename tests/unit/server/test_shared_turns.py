"""What subscriptions share is what each would read alone, and is read once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.env import SystemThreads
from lakehead.protocol.messages import StreamHeader
from lakehead.server import shared_turns, streams
from lakehead.server.projection import Projection
from lakehead.server.shared_turns import SharedTurns

SCHEMA = pa.schema([("k", pa.int64()), ("a", pa.string())])
HEADER = StreamHeader(partition="", bucket=0, end_offset=3)


def batch(text: str) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"k": [1, 2, 3], "a": [text, None, ""]}, schema=SCHEMA)


def test_a_turn_is_read_once_while_it_is_among_the_newest() -> None:
    turns, read = SharedTurns(SystemThreads()), []

    def reading(n: int) -> Iterator[tuple[StreamHeader, pa.RecordBatch]]:
        read.append(n)
        yield HEADER, batch(f"of {n}").slice(1)

    for n in [*range(20), *range(10, 20), 0]:
        assert [(h, b.to_pylist()) for h, b in turns.of(n, lambda n=n: reading(n))] == [  # type: ignore[misc]
            (HEADER, batch(f"of {n}").slice(1).to_pylist())
        ]
    assert read == [*range(20), 0]


def test_large_turns_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_turns, "_TURN_BYTES_MAX", 10)
    turns = SharedTurns(SystemThreads())
    assert turns.of("a", lambda: iter([(HEADER, batch("x"))]))[0][1].equals(batch("x"))
    assert turns.of("a", lambda: iter([(HEADER, batch("y"))]))[0][1].equals(batch("y"))


@pytest.mark.parametrize("keyed", [False, True])
def test_subscribers_get_what_one_alone_gets(tmp_path: Path, keyed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[Any] = []
    real = Projection.records
    monkeypatch.setattr(Projection, "records", lambda self, *of: (frames.append(of), real(self, *of))[1])
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table("t", SCHEMA, primary_key="k" if keyed else None, compression="lz4")
        asked: list[dict[str, Any]] = [{}, {"columns": ["a"]}, {"where": "k = 2"}]
        feeds = [(how, [table.subscribe(**how) for _ in range(5)]) for how in asked]
        for n in range(30):
            (table.upsert if keyed else table.append)(batch(f"row {n}"))
            for how, some in feeds:
                found = [next(feed) for feed in some]
                assert all(f.rows.equals(found[0].rows) and f.end_offset == found[0].end_offset for f in found)
                positions = {found[0].tablet: found[0].rows.column("__offset")[0].as_py()}
                with monkeypatch.context() as patch:
                    patch.setattr(streams, "ROWS_MAX", -1)
                    assert next(table.subscribe(positions, stop="now", **how)).rows.equals(found[0].rows)
        assert len(frames) == 30 * 2 * len(asked), "once for five, and once for each read alone"


def test_what_was_trimmed_is_not_handed_out(tmp_path: Path) -> None:
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table("t", SCHEMA)
        first, second = table.subscribe(), table.subscribe()
        table.append(batch("x"))
        assert next(first).rows.num_rows == 3
        table.truncate()
        with pytest.raises(lh.OffsetOutOfRangeError):
            next(second)
