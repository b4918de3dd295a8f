"""What a filter takes is bounded before it is computed, and cutting rows changes no answer."""

from __future__ import annotations

import random

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from lakehead.errors import InvalidPredicateError
from lakehead.predicate import parse_predicate
from lakehead.predicate.work import SLICE_BYTES, SLICE_NS

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.string()), ("l", pa.list_(pa.int64()))])
WILD = "%a" + "_" * 20 + "z%"
"""Each byte of a text may begin it: what is known of it grows with each."""
FILTERS = [
    "n = 3",
    "n in (1, 2, 3) and s like 'a%'",
    f"s like '{WILD}'",
    "upper(s) = 'AB' or lower(s) = 'b' or length(s) > 3",
    " or ".join(f"s like '%{i}{WILD}'" for i in range(50)),
    " or ".join(f"n = {i}" for i in range(3000)),
    "cast(n as varchar) = '7'",
]


def rows(count: int, size: int, seed: int = 1) -> pa.RecordBatch:
    r = random.Random(seed)
    texts = ["".join(r.choices("ab", k=r.randint(0, size))) for _ in range(count)]
    return pa.record_batch([list(range(count)), texts, [[1, 2]] * count], schema=SCHEMA)


@pytest.mark.parametrize("where", FILTERS, ids=range(len(FILTERS)))
def test_slices_are_bounded_and_are_all_rows(where: str) -> None:
    predicate = parse_predicate(where, SCHEMA)
    batch = rows(3000, 200)
    work, parts = predicate.work, list(predicate.work.slices(batch))
    assert pa.Table.from_batches([p for p, _ in parts]).combine_chunks().to_batches()[0].equals(batch)
    for part, told in parts:
        size = sum(part.column(c).nbytes for c in work.columns)
        ns = part.num_rows * work.row_ns + size * work.byte_ns
        assert part.num_rows == 1 or ns <= max(SLICE_NS, work.batch_ns)
        assert part.num_rows == 1 or part.num_rows * work.row_bytes + size * work.byte_bytes <= SLICE_BYTES
        assert told == ns + work.batch_ns
    kept = pa.Table.from_batches([predicate.filter(p) for p, _ in parts])
    assert kept.to_pylist() == predicate.filter(pa.Table.from_batches([batch])).to_pylist()


def test_usual_filters_are_not_cut() -> None:
    batch = rows(1 << 16, 20)
    for where in ("n = 3", "n > 5 and s = 'a'", "s like '%ab%'", "n in (1, 2, 3)", "l is null"):
        assert len(list(parse_predicate(where, SCHEMA).work.slices(batch))) == 1
    assert len(list(parse_predicate("n = 3", SCHEMA).work.slices(batch.slice(0, 0)))) == 1


def test_a_row_that_would_take_minutes_is_refused() -> None:
    batch = pa.record_batch([[1], ["ab" * (1 << 20)], [None]], schema=SCHEMA)
    costly = parse_predicate(" or ".join(f"s like '%{i}{WILD * 10}'" for i in range(50)), SCHEMA)
    with pytest.raises(InvalidPredicateError, match="shorter patterns"):
        list(costly.work.slices(batch))
    wide = parse_predicate(pc.coalesce(*[pc.utf8_upper(pc.field("s"))] * 100).is_valid(), SCHEMA)
    wide = parse_predicate(wide.arrow & wide.arrow & wide.arrow & wide.arrow & wide.arrow & wide.arrow, SCHEMA)
    with pytest.raises(InvalidPredicateError, match="fewer conditions"):
        list(wide.work.slices(batch))
    assert [part for part, _ in parse_predicate("s like '%abab%'", SCHEMA).work.slices(batch)] == [batch]


def test_what_is_made_is_no_more_than_what_is_foreseen() -> None:
    batch = rows(2000, 50)
    for kind in (pa.string(), pa.large_string()):
        texts = pa.array(["ŉ" * 20, "ΐ" * 9, "İ"], kind)
        for made in (pc.utf8_upper(texts), pc.utf8_lower(texts)):
            assert made.nbytes <= 64 * len(texts) + 2 * texts.nbytes
    for column in (batch["n"], pc.cast(batch["n"], pa.timestamp("us"))):
        assert pc.cast(column, pa.string()).nbytes <= (64 + 2 * 16) * len(column)
