"""One table on two servers: requests are split by tablet, and answers joined to what one server would have said."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.api.table import Table
from lakehead.client.routes import OneServer
from lakehead.client.table import TableHandle
from lakehead.config import Limits
from lakehead.env import Env
from lakehead.env.randomness import SeededRandomness
from lakehead.errors import NotLeaderError
from lakehead.protocol import messages as m
from lakehead.server.endpoint import LocalEndpoint
from lakehead.server.service import Service
from lakehead.types import Schemas, TableDescriptor, TablePath, TabletKey

SCHEMA = pa.schema([pa.field("p", pa.string(), False), pa.field("k", pa.int64(), False), ("v", pa.string())])
ROWS = [{"p": "ab"[k % 2], "k": k, "v": f"v{k}"} for k in range(200)]


class Split:
    """Even buckets live on the first server, odd ones on the second, or all on one when it is told so."""

    def __init__(self) -> None:
        self.endpoints: list[LocalEndpoint] = []
        self.swapped = self.astray = False
        self.told: list[NotLeaderError] = []

    def number(self, tablet: TabletKey) -> int:
        return tablet.bucket % 2

    def servers(self, table_id: str | None = None) -> Sequence[m.Endpoint]:
        return self.endpoints

    def leader(self, table_id: str, tablet: TabletKey) -> m.Endpoint:
        return self.endpoints[self.number(tablet) ^ self.astray]

    def moved(self, error: NotLeaderError) -> bool:
        """What was believed wrongly is learnt from the first refusal."""
        self.told.append(error)
        learnt, self.astray = self.astray, False
        return learnt


@pytest.fixture
def split(tmp_path: Path) -> Iterator[Split]:
    routes = Split()

    def home(number: int) -> Any:
        return lambda table_id, tablet: None if routes.number(tablet) == number else f"server {1 - number}"

    # From one seed, so that both call the table by the same id.
    services = [
        Service(
            str(tmp_path / str(n)),
            env=dataclasses.replace(Env.system(), randomness=SeededRandomness(7)),
            limits=Limits(),
            lake=None,
            home=home(n),
        )
        for n in range(2)
    ]
    routes.endpoints = [LocalEndpoint(s) for s in services]
    yield routes
    for service in services:
        service.close()


def table(split: Split, *, keyed: bool, partitioned: bool = False, buckets: int = 4) -> Table:
    by = ("p",) if partitioned else ()
    key = ("p", "k") if keyed else ()
    asked = TableDescriptor("", TablePath("d", "t"), Schemas.only(SCHEMA), key, by, ("k",), buckets, None)
    request = m.CreateTable(info=m.TableInfo.of(asked), if_not_exists=False)
    first, second = (e.call(request)[0].info.descriptor() for e in split.endpoints)
    assert first == second
    return Table(TableHandle(first, split, Env.system()))


KINDS = pytest.mark.parametrize("partitioned", [False, True], ids=["plain", "partitioned"])


def by_key(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda r: r["k"])


def held(split: Split, desc: TableDescriptor) -> list[set[int]]:
    """The buckets of which each server has rows."""
    request = m.Watermarks(table_id=desc.table_id, sync=False)
    return [{t.bucket for t in e.call(request)[0].tablets if t.rows} for e in split.endpoints]


@KINDS
def test_a_log_table(split: Split, partitioned: bool) -> None:
    t = table(split, keyed=False, partitioned=partitioned)
    assert t.scan().to_arrow().num_rows == 0 and t.status().num_rows == (0 if partitioned else 4)
    result = t.append(ROWS)
    assert {tablet.bucket for tablet in result.offsets} == {0, 1, 2, 3}
    assert sum(end - start for start, end in result.offsets.values()) == len(ROWS)
    assert held(split, t._desc) == [{0, 2}, {1, 3}]
    assert by_key(t.scan().to_arrow().to_pylist()) == ROWS
    assert t.scan(where="k >= 150").count() == 50 and t.scan(limit=7).to_arrow().num_rows == 7
    states = t.status()
    assert states.num_rows == (8 if partitioned else 4)
    assert states["bucket"].to_pylist() == ([0, 1, 2, 3] * 2 if partitioned else [0, 1, 2, 3])
    assert sum(states["rows"].to_pylist()) == len(ROWS)


@KINDS
def test_a_keyed_table(split: Split, partitioned: bool) -> None:
    t = table(split, keyed=True, partitioned=partitioned)
    assert t.lookup([("a", 1)]).num_rows == 0
    t.upsert(ROWS)
    keys = [("ab"[k % 2], k) for k in range(260, -1, -1)]
    assert t.lookup(keys).to_pylist() == ROWS[::-1], "in the order asked, whoever has them"
    assert t.get(("a", 2)) == ROWS[2] and t.get(("a", 1000)) is None
    t.upsert([{"p": "a", "k": 2, "v": "new"}, {"p": "b", "k": 3, "v": "new"}])
    assert t.delete([("a", 4), ("b", 5)]).rows == 2
    want = [{**r, "v": "new"} if r["k"] in (2, 3) else r for r in ROWS if r["k"] not in (4, 5)]
    assert by_key(t.scan().to_arrow().to_pylist()) == want
    assert t.scan().count() == len(want)


def test_a_pinned_scan_is_of_both(split: Split) -> None:
    t = table(split, keyed=False)
    t.append(ROWS[:100])
    scan = t.scan()
    t.append(ROWS[100:])
    assert by_key(scan.to_arrow().to_pylist()) == ROWS[:100]
    for endpoint in split.endpoints:
        assert len(endpoint.service._leases._open) == 1
    del scan
    t.scan().to_arrow()
    t.scan().to_arrow()
    for endpoint in split.endpoints:
        assert len(endpoint.service._leases._open) <= 2, "they go with the next ones, on each server"


@pytest.mark.parametrize("keyed", [False, True], ids=["log", "keyed"])
def test_a_subscription_is_of_both(split: Split, keyed: bool) -> None:
    t = table(split, keyed=keyed)
    write = t.upsert if keyed else t.append
    write(ROWS[:100])
    with t.subscribe("full" if keyed else "earliest") as feed:
        write(ROWS[100:])
        found: list[dict[str, Any]] = []
        ends: dict[int, int] = {}
        while len(found) < len(ROWS):
            batch = next(feed)
            found += batch.rows.select(SCHEMA.names).to_pylist()
            if batch.end_offset is not None:
                assert batch.end_offset > ends.get(batch.tablet.bucket, 0), "in order by tablet"
                ends[batch.tablet.bucket] = batch.end_offset
    assert by_key(found) == ROWS and set(ends) == {0, 1, 2, 3}
    upto = [b.rows for b in t.subscribe("earliest", stop="now")]
    assert sum(r.num_rows for r in upto) == len(ROWS), "and it ends when both have"


def test_an_error_of_one_ends_a_subscription(split: Split) -> None:
    t = table(split, keyed=False)
    feed = t.subscribe("earliest")
    split.endpoints[1].service.close()
    with pytest.raises(lh.ClosedError):
        next(feed)
    feed.close()


def test_what_lives_elsewhere_is_asked_there(split: Split) -> None:
    t = table(split, keyed=True)
    t.upsert(ROWS)
    for ask in (
        lambda: t.get(("b", 7)) == ROWS[7],
        lambda: t.upsert([ROWS[7]]).rows == 1,
        lambda: t.lookup([(r["p"], r["k"]) for r in ROWS]).num_rows == len(ROWS),
    ):
        split.astray = True
        assert ask()
    assert len(split.told) == 3


def test_whom_no_route_is_known_to_is_an_error_and_no_empty_answer(split: Split) -> None:
    t = table(split, keyed=True)
    t.upsert(ROWS)
    first = TableHandle(t._desc, OneServer(split.endpoints[0]), Env.system())
    alone = Table(first)
    with pytest.raises(lh.NotLeaderError, match="server 1"):
        alone.lookup([(r["p"], r["k"]) for r in ROWS])
    with pytest.raises(lh.NotLeaderError, match="server 1"):
        alone.upsert(ROWS)
    assert by_key(t.scan().to_arrow().to_pylist()) == ROWS


def test_named_writers_need_one_server(split: Split) -> None:
    t = table(split, keyed=False)
    with pytest.raises(lh.InvalidRequestError, match="several servers"):
        t.writer("etl")
    with t.writer() as writer:
        writer.append(pa.Table.from_pylist(ROWS, SCHEMA))
    assert t.scan().count() == len(ROWS)
