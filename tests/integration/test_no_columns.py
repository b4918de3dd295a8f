"""Rows of which no column is asked are as many as there are, wherever they lie and whatever the condition."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import lakehead as lh

SCHEMA = pa.schema([pa.field("k", pa.int64(), False), ("v", pa.string())])
CONDITIONS = [None, "true", "1 = 1", "null is null", "k >= 0", "false", "k < 0"]


@pytest.fixture(params=["embedded", "socket", "tcp"])
def con(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[lh.Connection]:
    if request.param == "tcp":
        server = request.getfixturevalue("server")
        with server.connect() as con:
            yield con
        return
    with lh.connect(tmp_path) as serving:
        if request.param == "embedded":
            yield serving
            return
        with lh.connect(serving.uri) as con:
            yield con


@pytest.mark.parametrize("where", CONDITIONS)
@pytest.mark.parametrize("keyed", [False, True], ids=["log", "keyed"])
def test_scans_have_as_many_rows(con: lh.Connection, keyed: bool, where: str | None) -> None:
    table = con.create_table("t", SCHEMA, lake="iceberg", buckets=2, **({"primary_key": "k"} if keyed else {}))
    write = table.upsert if keyed else table.append
    expected = 0 if where in ("false", "k < 0") else 5
    write([{"k": i, "v": "x"} for i in range(5)])
    for step in range(3):
        scan = table.scan(columns=[], where=where)
        assert scan.count() == scan.to_arrow().num_rows == expected
        assert sum(b.num_rows for b in scan.to_batches()) == expected
        assert scan.to_reader().read_all().num_rows == expected
        assert table.scan(columns=[], where=where, limit=3).to_arrow().num_rows == min(expected, 3)
        if step == 0:
            con.tier("t")
        else:
            write([{"k": 10 + step, "v": "y"}])
            expected += where not in ("false", "k < 0")


@pytest.mark.parametrize("where", CONDITIONS)
@pytest.mark.parametrize("start", ["earliest", "full"])
@pytest.mark.parametrize("keyed", [False, True], ids=["log", "keyed"])
def test_subscriptions_have_as_many_rows(con: lh.Connection, keyed: bool, start: str, where: str | None) -> None:
    table = con.create_table("t", SCHEMA, lake="iceberg", **({"primary_key": "k"} if keyed else {}))
    write = table.upsert if keyed else table.append
    write([{"k": i, "v": "x"} for i in range(5)])
    expected = 0 if where in ("false", "k < 0") else 5
    for _ in range(2):
        rows = [b.rows for b in table.subscribe(start, stop="now", columns=[], where=where)]
        whole = [b.rows for b in table.subscribe(start, stop="now", columns=["k"], where=where)]
        assert sum(r.num_rows for r in rows) == sum(r.num_rows for r in whole) == expected
        assert {n for r in rows for n in r.schema.names} == {n for r in whole for n in r.schema.names if n != "k"}
        con.tier("t")
