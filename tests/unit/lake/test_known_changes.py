from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.env.recently_used import RecentlyUsed
from lakehead.lake import known_changes
from lakehead.lake.known_changes import KnownOf, note_changes
from lakehead.log.netchange import NetChange
from lakehead.types import CHANGE_TYPE_COLUMN, TabletKey

ONE, TWO = TabletKey("", 0), TabletKey("", 1)


@pytest.fixture(autouse=True)
def _few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_changes, "MANY_ROWS", 1)
    monkeypatch.setattr(known_changes, "_known", RecentlyUsed(1 << 20))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[list[tuple[int, int]], bool]]]:
    """What reads ask of the log: the ranges, and whether with what changed."""
    from lakehead.client.remote_log import RemoteLog

    found: list[tuple[list[tuple[int, int]], bool]] = []
    read = RemoteLog.read_ranges

    def noted(self: RemoteLog, ranges: Any, spec: Any, **how: Any) -> Any:
        wanted = sorted((start, end) for start, end in ranges.values() if start < end)
        if wanted:
            found.append((wanted, CHANGE_TYPE_COLUMN in spec.names))
        return read(self, ranges, spec, **how)

    monkeypatch.setattr(RemoteLog, "read_ranges", noted)
    yield found


def test_a_read_looks_at_the_changes_that_came_since_the_one_before(
    tmp_path: Path, asked: list[tuple[list[tuple[int, int]], bool]]
) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.string())])

    def rows(found: lh.Table) -> list[dict[str, Any]]:
        asked.clear()
        return sorted(found.scan().to_arrow().to_pylist(), key=lambda row: row["id"])

    with lh.connect(tmp_path) as con:
        table = con.create_table("m.t", schema, primary_key=["id"], buckets=1, lake="iceberg")
        table.upsert([{"id": n, "v": "lake"} for n in range(6)])
        con.tier("m.t")
        table.upsert([{"id": 1, "v": "hot"}, {"id": 7, "v": "hot"}])  # -U +U +I
        earlier = table.scan()
        first = rows(table)
        assert asked == [([(6, 9)], True)]
        assert rows(table) == first and asked == [([(6, 9)], False)]
        # One that replaces a row of the part that is known, one that takes a row out of the lake, and one of neither.
        table.upsert([{"id": 7, "v": "later"}])
        table.delete([{"id": 2}])
        table.upsert([{"id": 9, "v": "later"}])
        expected = {r["id"]: r["v"] for r in first} | {7: "later", 9: "later"}
        del expected[2]
        for asks in ([([(9, 13)], True), ([(6, 9)], False)], [([(6, 13)], False)]):
            assert {r["id"]: r["v"] for r in rows(table)} == expected
            assert asked == asks
        asked.clear()
        assert sorted(earlier.to_arrow().to_pylist(), key=lambda row: row["id"]) == first
        assert asked == [([(6, 9)], True)]  # more is known than was there then
        assert rows(table) and asked == [([(6, 13)], False)]
        asked.clear()
        assert table.scan(columns=["v"], where="v = 'later'").count() == 2
        assert table.scan().count() == len(expected)
        con.tier("m.t")
        table.delete([{"id": 9}])
        assert {r["id"] for r in rows(table)} == set(expected) - {9}
        assert asked == [([(13, 14)], True)]
        assert rows(table) and asked == [([(13, 14)], False)]
    with lh.connect(tmp_path) as con:  # a server that was started again may have lost rows, and have others there
        assert {r["id"] for r in rows(con.table("m.t"))} == set(expected) - {9}
        assert asked == [([(13, 14)], True)]


def test_a_read_is_of_one_server_also_where_another_has_other_rows_at_its_offsets(
    tmp_path: Path, asked: list[tuple[list[tuple[int, int]], bool]]
) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.string())])
    with lh.connect(tmp_path) as con:
        table = con.create_table("m.t", schema, primary_key=["id"], lake="iceberg")
        table.upsert([{"id": n, "v": "lake"} for n in range(6)])
        con.tier("m.t")
        table.upsert([{"id": 1, "v": "hot"}, {"id": 7, "v": "hot"}])
        pinned = table.scan()
        first = sorted(pinned.to_arrow().to_pylist(), key=lambda row: row["id"])
        # Started again it may have lost the rows that were read, and have others by now: as if what is known were of
        # such ones.
        metadata = con._server.service._metadata  # type: ignore[union-attr]
        metadata.incarnation = replace(metadata.incarnation, start_id="later")
        (of,) = known_changes._known._values
        known_changes._known.note(of, NetChange(np.array([True, False, False]), np.array([2])))
        for _ in range(2):
            asked.clear()
            assert sorted(pinned.to_arrow().to_pylist(), key=lambda row: row["id"]) == first
            assert asked == [([(6, 9)], False), ([(6, 9)], True)]
        (still,) = known_changes._known._values.values()
        assert still.superseded.tolist() == [2]  # what another has is not noted as if it were this one's
        assert sorted(table.scan().to_arrow().to_pylist(), key=lambda row: row["id"]) == first
        assert len(known_changes._known._values) == 2


def test_what_is_shorter_or_of_nobody_is_not_remembered() -> None:
    def change(rows: int) -> NetChange:
        return NetChange(np.ones(rows, np.bool_), np.zeros(0, np.int64))

    of = KnownOf("i", "t")
    note_changes(of, {ONE: (3, change(5)), TWO: (3, change(2))})
    note_changes(of, {ONE: (3, change(4))})
    note_changes(KnownOf("", "t"), {ONE: (3, change(5))})
    asked = {ONE: (3, 9), TWO: (3, 4)}
    assert {key: len(c.keep) for key, c in known_changes.known_changes(of, asked).items()} == {ONE: 5}
    assert not known_changes.known_changes(KnownOf("", "t"), asked)
    assert not known_changes.known_changes(KnownOf("i", "u"), asked)
    assert not known_changes.known_changes(of, {ONE: (4, 9)})
