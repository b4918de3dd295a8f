"""Changes that come in any order, some again, leave what they leave in the order of their sequence."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.format import joins
from lakehead.spark import change_feed
from lakehead.spark.change_feed import ChangeFeed, ScdType

CHANGES = pa.schema(
    [("k", pa.int64()), ("v", pa.string()), (change_feed._SEQUENCE, pa.int32()), (change_feed._DELETED, pa.bool_())]
)


def model(changes: list[tuple[int, int, str | None]], scd_type: int) -> list[tuple[Any, ...]]:
    """What (key, sequence, value; None deletes) leave, in whatever order they come."""
    out: list[tuple[Any, ...]] = []
    for key, of_key in itertools.groupby(sorted(set(changes), key=lambda c: c[:2]), key=lambda c: c[0]):
        history = list(of_key)
        ends = [*(s for _, s, _ in history[1:]), None]
        versions = [(key, v, s, e) for (_, s, v), e in zip(history, ends, strict=True) if v is not None]
        if scd_type == 2:
            out += versions
        elif history[-1][2] is not None:
            out.append((key, history[-1][2]))
    return out


@pytest.mark.parametrize("scd_type", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_any_order_and_any_batches(tmp_path: Path, scd_type: ScdType, seed: int) -> None:
    rng = random.Random(seed)
    feed = ChangeFeed("", "a.target", "a.beside", ("k",), ("k", "v"), scd_type)
    changes = [
        (key, sequence, rng.choice([None, "a", "b", f"v{sequence}"]))
        for key in range(6)
        for sequence in rng.sample(range(20), rng.randrange(1, 9))
    ]
    rng.shuffle(changes)
    cuts = sorted(rng.sample(range(len(changes)), 3))
    with lh.connect(tmp_path) as con:
        feed.require_tables(con, CHANGES)
        target, beside = con.table(feed.table), con.table(feed.beside)
        for part in (changes[: cuts[0]], changes[: cuts[1]], changes[cuts[0] : cuts[2]], changes[cuts[1] :]):
            ordered = sorted(part * rng.choice([1, 2]), key=lambda c: c[:2])
            rows = pa.Table.from_pylist(
                [dict(zip(CHANGES.names, (k, v, s, v is None), strict=True)) for k, s, v in ordered], CHANGES
            )
            batches = rows.to_batches(max_chunksize=rng.randrange(1, 6))
            for chunk in change_feed.whole_keys(batches, ["k"]):
                made = (change_feed._newest if scd_type == 1 else change_feed._versions)(feed, target, beside, chunk)
                if len(made.removed):
                    target.delete(made.removed)
                if len(made.rows):
                    target.upsert(made.rows)
                if len(made.beside):
                    beside.upsert(made.beside)
        columns = ["k", "v", "start_at", "end_at"] if scd_type == 2 else ["k", "v"]
        found = [tuple(r.values()) for r in target.scan(columns=columns).to_arrow().to_pylist()]
    assert sorted(found, key=str) == sorted(model(changes, scd_type), key=str)


def test_histories_that_are_more_than_an_answer_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = ChangeFeed("", "a.target", "a.beside", ("k",), ("k", "v"), 2)
    keys, sequences = range(40), range(5)
    changes = [(key, sequence, f"{key} {sequence}") for key in keys for sequence in sequences]
    with lh.connect(tmp_path) as con:
        feed.require_tables(con, CHANGES)
        target, beside = con.table(feed.table), con.table(feed.beside)
        for sequence in sequences:
            rows = [{"k": k, "v": v, change_feed._SEQUENCE: s, change_feed._DELETED: False} for k, s, v in changes]
            chunk = pa.Table.from_pylist([r for r in rows if r[change_feed._SEQUENCE] == sequence], CHANGES)
            with monkeypatch.context() as small:
                small.setattr(joins, "BYTES_MAX", 2000)
                made = change_feed._versions(feed, target, beside, chunk)
            assert not len(made.removed) and not len(made.beside)
            target.upsert(made.rows)
        assert target.scan(columns=["v"]).to_arrow().nbytes > 1000
        found = [
            tuple(r.values()) for r in target.scan(columns=["k", "v", "start_at", "end_at"]).to_arrow().to_pylist()
        ]
    assert sorted(found, key=str) == sorted(model([(k, s, v) for k, s, v in changes], 2), key=str)
