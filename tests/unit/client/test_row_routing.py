"""Routing: each row to the tablet of its partition and hash, each exactly once."""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lakehead.client import row_routing
from lakehead.client.row_routing import SHARE_ROWS, clustered, partition_codes, parts_of, route, slices
from lakehead.format.bucketing import bucket_ids
from lakehead.types import Schemas, TableDescriptor, TablePath, TabletKey, partition_name

SCHEMA = pa.schema([("k", pa.int64()), ("s", pa.string()), ("p", pa.date32()), ("q", pa.bool_())])
ROWS = 500
BATCH = pa.RecordBatch.from_pydict(
    {
        "k": [i * 7919 for i in range(ROWS)],
        "s": [f"s{i % 9}" for i in range(ROWS)],
        "p": [dt.date(2024, 1, 1 + i % 3) for i in range(ROWS)],
        "q": [i % 5 == 0 for i in range(ROWS)],
    },
    schema=SCHEMA,
)


def table(bucket_key: tuple[str, ...] = (), partition_by: tuple[str, ...] = (), buckets: int = 1) -> TableDescriptor:
    return TableDescriptor("t", TablePath("a", "t"), Schemas.only(SCHEMA), (), partition_by, bucket_key, buckets, None)


def placed(desc: TableDescriptor, batch: pa.RecordBatch, **how: Any) -> list[TabletKey]:
    """The tablet of each row; every row is in exactly one."""
    out: list[TabletKey | None] = [None] * batch.num_rows
    seen = set()
    for key, rows in route(desc, batch, **how):
        assert key not in seen
        seen.add(key)
        at = range(batch.num_rows) if rows is None else rows.tolist()
        assert list(at) == sorted(at) and len(at)
        for row in at:
            assert out[row] is None
            out[row] = key
    assert None not in out
    return [key for key in out if key is not None]


@pytest.mark.parametrize("bucket_key", [(), ("k",), ("s",), ("k", "s")])
@pytest.mark.parametrize("partition_by", [(), ("p",), ("q",), ("p", "q")])
@pytest.mark.parametrize("buckets", [1, 4])
def test_rows_go_where_partition_and_hash_say(
    bucket_key: tuple[str, ...], partition_by: tuple[str, ...], buckets: int
) -> None:
    desc = table(bucket_key, partition_by, buckets)
    expected = np.zeros(ROWS, np.int32)
    if bucket_key:
        expected = bucket_ids([BATCH.column(c) for c in bucket_key], buckets)
    elif buckets > 1:
        expected += 3
    names = [partition_name(partition_by, tuple(r[c] for c in partition_by)) for r in BATCH.to_pylist()]
    found = placed(desc, BATCH, unkeyed_bucket=3 if buckets > 1 else 0)
    assert found == [TabletKey(n, b) for n, b in zip(names, expected.tolist(), strict=True)]
    part = BATCH.slice(17, 100)
    assert placed(desc, part, unkeyed_bucket=3 if buckets > 1 else 0) == found[17:117]


def test_a_large_batch_without_a_bucket_key_is_shared_by_buckets() -> None:
    rows = 3 * SHARE_ROWS + 5
    batch = pa.RecordBatch.from_pydict({"n": np.arange(rows)})
    desc = dataclasses.replace(table(buckets=4), schemas=Schemas.only(batch.schema))
    found = placed(desc, batch, unkeyed_bucket=3)
    sizes = {key.bucket: found.count(key) for key in sorted(set(found))}
    assert set(sizes) == {3, 0, 1} and max(sizes.values()) - min(sizes.values()) <= 1 and sum(sizes.values()) == rows
    assert [k.bucket for k in found] == sorted((k.bucket for k in found), key=[3, 0, 1].index), (
        "neighbours stay together"
    )
    assert len(set(placed(desc, batch.slice(0, 2 * SHARE_ROWS - 1), unkeyed_bucket=3))) == 1
    assert [len(set(placed(desc, batch.slice(0, n)))) for n in (10_000, 20_000)] == [1, 2]


@pytest.mark.parametrize("buckets", [7, 8, 9, 1000, 70_000])
def test_rows_are_cut_alike_by_few_and_many_buckets(buckets: int) -> None:
    desc = table(("k",), (), buckets)
    expected = bucket_ids([BATCH.column("k")], buckets).tolist()
    assert placed(desc, BATCH) == [TabletKey("", b) for b in expected]
    for _, rows in route(desc, BATCH):
        assert rows is None or (np.diff(rows) > 0).all()


def test_one_tablet_takes_the_batch_uncopied() -> None:
    assert list(route(table(), BATCH)) == [(TabletKey("", 0), None)]
    same = BATCH.take(pa.array([4] * 10))
    assert [rows for _, rows in route(table(("k",), ("p", "q"), 4), same)] == [None]


@pytest.mark.parametrize("partition_by", [(), ("p", "q")])
def test_no_rows(partition_by: tuple[str, ...]) -> None:
    assert placed(table(("k",), partition_by, 4), BATCH.slice(0, 0)) == []
    assert partition_codes(table((), partition_by), BATCH.slice(0, 0))[0] == []


@pytest.mark.parametrize(
    ("desc", "gathered"),
    [
        (table(("k",), (), 4), False),
        (table(("k",), (), 64), True),
        (table((), ("p",), 2), True),
        (table(("s",), ("p", "q"), 2), True),
        (table((), (), 64), False),
    ],
)
def test_rows_for_many_tablets_are_gathered(
    desc: TableDescriptor, gathered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 3 << 16
    rng = np.random.default_rng(1)
    day = rng.integers(0, 40, n).astype(np.int32)
    columns = [pa.array(rng.integers(0, 5000, n)), pa.array(np.arange(n).astype(str)), pa.array(day).cast(pa.date32())]
    rows = pa.table([*columns, pa.array(rng.integers(0, 2, n) > 0)], schema=SCHEMA)
    found = clustered(desc, rows)
    assert (found is not rows) == gathered
    with monkeypatch.context() as patch:  # as those that are too many bytes to be combined
        patch.setattr(row_routing, "_COMBINED_BYTES", 0)
        chunks = pa.concat_tables([rows.slice(0, 1000), rows.slice(1000, 90_000), rows.slice(91_000)])
        assert clustered(desc, chunks).equals(found)
    assert clustered(desc, rows.slice(0, 1 << 16)).equals(rows.slice(0, 1 << 16)), "one slice is sent as it is"
    sent: dict[TabletKey, list[str]] = {}
    frames = 0
    for batch in slices(found):
        for key, at in route(desc, batch):
            frames += 1
            sent.setdefault(key, []).extend(batch["s"].to_pylist() if at is None else batch["s"].take(at).to_pylist())
    if gathered:
        as_they_are = sum(len(list(route(desc, batch))) for batch in slices(rows))
        assert frames <= len(sent) + 3 < as_they_are / 2
        assert all(part == sorted(part, key=int) for part in sent.values()), "the rows of a tablet stay in their order"
    assert sorted(s for part in sent.values() for s in part) == sorted(rows["s"].to_pylist())


@pytest.mark.parametrize("codes_max", [1, 4, 1 << 62])
@pytest.mark.parametrize("columns", [1, 3, 70])
def test_partitions_of_more_combinations_than_a_number_counts(
    columns: int, codes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_routing, "_CODES_MAX", codes_max)
    names = tuple(f"p{i}" for i in range(columns))
    batch = pa.RecordBatch.from_pydict(
        {name: [n >> (i if i < 8 else 0) & 1 for n in range(150)] for i, name in enumerate(names)}
    )
    desc = TableDescriptor("t", TablePath("a", "t"), Schemas.only(batch.schema), (), names, (), 1, None)
    found, codes = partition_codes(desc, batch)
    assert codes is not None and len(set(found)) == len(found) == min(150, 1 << columns)
    assert [found[code] for code in codes] == [
        partition_name(names, tuple(row[name] for name in names)) for row in batch.to_pylist()
    ]


def test_parts_hold_the_rows_of_their_groups_and_neighbours_are_not_copied() -> None:
    groups = [np.array([0, 2, 3]), np.array([7]), np.array([498, 499])]
    assert [p.to_pylist() for p in parts_of(BATCH, groups)] == [BATCH.take(pa.array(g)).to_pylist() for g in groups]
    assert parts_of(BATCH, [None]) == [BATCH] and parts_of(BATCH, []) == []
    (alone,) = parts_of(BATCH, [np.array([1, 5])])
    assert alone.to_pylist() == [BATCH.to_pylist()[i] for i in (1, 5)]
    for part, at in zip(parts_of(BATCH, [np.arange(2, 5), np.arange(9, 30)]), (2, 9), strict=True):
        assert (
            part.column(0).buffers()[1].address == BATCH.column(0).buffers()[1].address and part.column(0).offset == at
        )
