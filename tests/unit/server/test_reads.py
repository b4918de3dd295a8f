"""Lookups as a server is asked for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.api.table import handle_of
from lakehead.protocol import messages as m
from lakehead.server.access import TOKEN_HOLDER

SCHEMA = pa.schema([pa.field("p", pa.string(), False), pa.field("k", pa.int64(), False), ("v", pa.string())])
KEYS = pa.RecordBatch.from_pydict({"p": ["b", "a", "c", "b"], "k": [1, 1, 1, 2]}, schema=SCHEMA.remove(2))


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table("a.t", SCHEMA, primary_key=["p", "k"], partition_by="p")
        table.upsert([{"p": p, "k": k, "v": f"{p}{k}"} for p in "ab" for k in range(2)])
        yield con


def ask(con: lh.Connection, counts: list[int], parts: int = 1, **how: object) -> tuple[m.LookupReply, list[pa.Buffer]]:
    request = m.Lookup(
        table_id=handle_of(con.table("a.t")).desc.table_id,
        tablets=[m.TabletRef(partition=f"p={p}", bucket=0) for p in "bac"],
        counts=counts,
        prefix=[],
        **how,  # type: ignore[arg-type]
    )
    order = pa.array([0, 3, 1, 2])
    service = con._server.service  # type: ignore[attr-defined]
    answer: tuple[m.LookupReply, list[pa.Buffer]] = service.call(
        request, [KEYS.take(order).serialize()] * parts, TOKEN_HOLDER
    )
    return answer


def test_rows_of_all_tablets_are_one_answer(con: lh.Connection) -> None:
    reply, (rows, places) = ask(con, [2, 1, 1])
    assert reply.exact and pa.ipc.read_record_batch(rows, SCHEMA)["v"].to_pylist() == ["b1", "a1"]
    assert np.frombuffer(places, np.int64).tolist() == [0, 2]
    assert ask(con, [2, 1, 1], as_of=[2, 2, 0])[0].exact
    con.table("a.t").delete([{"p": "a", "k": 1}])
    assert ask(con, [2, 1, 1], as_of=[2, 2, 0]) == (m.LookupReply(exact=False), [])
    con.table("a.t").delete([{"p": "b", "k": 1}])
    assert [part.size for part in ask(con, [2, 1, 1])[1]] == [0, 0]


@pytest.mark.parametrize("counts", [[], [4], [2, 1], [2, 1, 2], [2, 3, -1], [2, 1, 1, 0]])
def test_each_key_is_one_tablets(con: lh.Connection, counts: list[int]) -> None:
    with pytest.raises(lh.InvalidRequestError, match="keys"):
        ask(con, counts)


@pytest.mark.parametrize("parts", [0, 2])
def test_all_keys_come_as_one(con: lh.Connection, parts: int) -> None:
    with pytest.raises(lh.InvalidRequestError, match="one attachment"):
        ask(con, [2, 1, 1], parts)
