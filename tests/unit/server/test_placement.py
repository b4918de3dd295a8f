"""A server says of tablets that live elsewhere that they do: to every request, and never that they are empty."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lakehead.config import Limits
from lakehead.env import Env, SystemClock, SystemThreads
from lakehead.env.randomness import SeededRandomness
from lakehead.errors import InvalidRequestError, LakeheadError, NotLeaderError
from lakehead.format.frame import WriterStamp, encode_body
from lakehead.protocol import messages as m
from lakehead.server.endpoint import LocalEndpoint
from lakehead.server.service import Service
from lakehead.testing.storage import MemoryStorage
from lakehead.types import Schemas, TableDescriptor, TablePath, TabletKey

SCHEMA = pa.schema([pa.field("p", pa.string(), False), pa.field("k", pa.int64(), False)])
KEYS = SCHEMA.empty_table().to_batches() or [pa.RecordBatch.from_pylist([], schema=SCHEMA)]
COLUMNS = ["k", "__offset"]


def home(table_id: str, tablet: TabletKey) -> str | None:
    """Bucket 0 lives here, the others elsewhere, in partitions that were never written, too."""
    return None if tablet.bucket == 0 else "there:1"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalEndpoint]:
    env = Env(SystemClock(), MemoryStorage(), SeededRandomness(1), SystemThreads())
    made = Service(str(tmp_path), env=env, limits=Limits(), lake=None, home=home)
    yield LocalEndpoint(made)
    made.close()


def created(server: LocalEndpoint, *, partitioned: bool) -> str:
    by = ("p",) if partitioned else ()
    desc = TableDescriptor("", TablePath("d", "t"), Schemas.only(SCHEMA), ("p", "k"), by, ("k",), 2, None)
    return server.call(m.CreateTable(info=m.TableInfo.of(desc), if_not_exists=False))[0].info.table_id


def write(server: LocalEndpoint, table_id: str, *refs: m.TabletRef) -> m.WriteReply:
    rows = pa.RecordBatch.from_pydict({"p": ["a"], "k": [1]}, schema=SCHEMA)
    made = encode_body(rows, schema_id=0, stamp=WriterStamp(b"w" * 16, 0))
    request = m.Write(
        table_id=table_id, kind="upsert", tablets=list(refs), checksums=[made.crc] * len(refs), columns=SCHEMA.names
    )
    return server.call(request, [made.buffer] * len(refs))[0]


Ask = Callable[[LocalEndpoint, str, m.TabletRef, m.TabletRange], Any]
ASKS: dict[str, Ask] = {
    "write": lambda s, t, ref, r: write(s, t, ref),
    "lookup": lambda s, t, ref, r: s.call(
        m.Lookup(table_id=t, tablets=[ref], counts=[KEYS[0].num_rows], prefix=[]), [KEYS[0].serialize()]
    ),
    "get": lambda s, t, ref, r: s.call(m.Get(table_id=t, tablet=ref, key=["a", 1])),
    "timestamps": lambda s, t, ref, r: s.call(m.TimestampsAt(table_id=t, ranges=[r])),
    "read": lambda s, t, ref, r: s.stream(m.Read(table_id=t, ranges=[r], columns=COLUMNS, predicate=None)),
    "read live": lambda s, t, ref, r: s.stream(m.ReadLive(table_id=t, ranges=[r], columns=COLUMNS, predicate=None)),
    "subscribe": lambda s, t, ref, r: s.stream(
        m.Subscribe(table_id=t, starts=[r], default="latest", stops=None, columns=COLUMNS, predicate=None)
    ),
    "subscribe up to": lambda s, t, ref, r: s.stream(
        m.Subscribe(table_id=t, starts=[], default="latest", stops=[r], columns=COLUMNS, predicate=None)
    ),
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=list(ASKS))
@pytest.mark.parametrize("partition", ["p=a", "p=never"])
def test_a_tablet_that_lives_elsewhere(server: LocalEndpoint, ask: Ask, partition: str) -> None:
    table_id = created(server, partitioned=True)
    write(server, table_id, m.TabletRef(partition="p=a", bucket=0))
    ref, empty = (
        m.TabletRef(partition=partition, bucket=1),
        m.TabletRange(partition=partition, bucket=1, start=0, end=0),
    )
    with pytest.raises(NotLeaderError, match="there:1") as raised:
        ask(server, table_id, ref, empty)
    assert raised.value.context["server"] == "there:1" and raised.value.context["tablet"] == f"{partition}/1"


def test_a_partition_that_was_never_written_is_empty(server: LocalEndpoint) -> None:
    table_id = created(server, partitioned=True)
    assert server.call(m.Watermarks(table_id=table_id, sync=False))[0].tablets == []
    ref, empty = m.TabletRef(partition="p=x", bucket=0), m.TabletRange(partition="p=x", bucket=0, start=0, end=0)
    for name, ask in ASKS.items():
        if name not in ("write", "subscribe up to"):
            ask(server, table_id, ref, empty)
    _, found = ASKS["lookup"](server, table_id, ref, empty)
    assert [f.size for f in found] == [0, 0]


@pytest.mark.parametrize("ask", ASKS.values(), ids=list(ASKS))
@pytest.mark.parametrize("key", [("p=a", 2), ("p=a", -1), ("q=a", 0), ("", 0), ("p=%61", 0)], ids=str)
def test_what_is_no_tablet_lives_nowhere(server: LocalEndpoint, ask: Ask, key: tuple[str, int]) -> None:
    table_id, (partition, bucket) = created(server, partitioned=True), key
    with pytest.raises(InvalidRequestError, match="no tablet"):
        ask(
            server,
            table_id,
            m.TabletRef(partition=partition, bucket=bucket),
            m.TabletRange(partition=partition, bucket=bucket, start=0, end=0),
        )


def test_a_write_with_one_part_elsewhere_writes_nothing(server: LocalEndpoint) -> None:
    table_id = created(server, partitioned=True)
    with pytest.raises(NotLeaderError):
        write(server, table_id, m.TabletRef(partition="p=a", bucket=0), m.TabletRef(partition="p=a", bucket=1))
    assert server.call(m.Watermarks(table_id=table_id, sync=False))[0].tablets == []


def test_watermarks_and_leases_are_of_what_lives_here(server: LocalEndpoint) -> None:
    table_id = created(server, partitioned=False)
    write(server, table_id, m.TabletRef(partition="", bucket=0))
    leased = m.OpenLeases(tables=[m.LeasedTable(table_id=table_id, lake=None)], release=[])
    for states in (
        server.call(m.Watermarks(table_id=table_id, sync=True))[0].tablets,
        server.call(leased)[0].leases[0].tablets,
    ):
        assert [(t.bucket, t.high_watermark) for t in states] == [(0, 1)]


def test_of_a_table_that_lives_elsewhere_altogether_nothing_is_said(tmp_path: Path) -> None:
    env = Env(SystemClock(), MemoryStorage(), SeededRandomness(1), SystemThreads())
    made = Service(str(tmp_path), env=env, limits=Limits(), lake=None, home=lambda *_: "there:1")
    server = LocalEndpoint(made)
    table_id = created(server, partitioned=False)
    subscribe = m.Subscribe(table_id=table_id, starts=[], default="latest", stops=None, columns=["k"], predicate=None)
    leased = m.OpenLeases(tables=[m.LeasedTable(table_id=table_id, lake=None)], release=[])
    asks: list[Callable[[], object]] = [
        lambda: server.call(m.Watermarks(table_id=table_id, sync=False)),
        lambda: server.call(leased),
        lambda: server.stream(subscribe),
    ]
    for ask in asks:
        with pytest.raises(NotLeaderError) as raised:
            ask()
        assert isinstance(raised.value, LakeheadError) and raised.value.retryable
    made.close()
