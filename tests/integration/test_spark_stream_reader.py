"""The stream reader as Spark drives it, without Spark: micro-batches are the history, once, whatever happens."""

from __future__ import annotations

import datetime as dt
import json
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead import TabletId
from lakehead.api.copying import unfinished_like
from lakehead.api.table import handle_of
from lakehead.env import credentials
from lakehead.env.address import TcpAddress
from lakehead.errors import SchemaChangedError
from lakehead.spark import stream
from lakehead.spark.source import LakeheadDataSource
from lakehead.spark.stream import LIMITED, LakeheadStreamReader

if TYPE_CHECKING:
    from tests.integration.conftest import ServerProcess

pytestmark = pytest.mark.spark

LOG = pa.schema([("day", pa.string()), ("n", pa.int64()), ("text", pa.string())])
KEYED = pa.schema([("id", pa.int64()), ("text", pa.string())])

since_spark_42 = pytest.mark.skipif(not LIMITED, reason="this PySpark has no limits per trigger")
TELLS = [pytest.param(True, marks=since_spark_42, id=pytest.HIDDEN_PARAM), pytest.param(False, id="before Spark 4.2")]


@pytest.fixture(scope="module")
def con(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path_factory.mktemp("stream") / "data") as made:
        yield made


def trim(con: lh.Connection) -> None:
    con._server.service.maintain()  # type: ignore[attr-defined]


class Query:
    """What Spark does with a stream reader, and what it keeps: offsets, of which the last may not be delivered.

    Before Spark 4.2 it does not tell (``tells``) where the query is, nor has it limits: it asks for the end first, and
    plans nothing at the last offset when it goes on from a checkpoint.
    """

    def __init__(self, con: lh.Connection, table: str, *, tells: bool = LIMITED, **options: object) -> None:
        self.tells = tells
        texts = {k: str(v) for k, v in options.items()}
        self.source = LakeheadDataSource({"uri": con.uri, "table": table, **texts})
        self.schema = self.source.schema()
        self.offsets: list[str] = []
        self.batches: list[list[dict[str, Any]]] = []
        self.restart()

    def restart(self) -> None:
        """The query's process begins anew; what was planned and not delivered comes again."""
        if self.offsets:
            self.reader.stop()
        self.reader: LakeheadStreamReader = self.source.streamReader(self.schema)
        if self.offsets and not self.tells:
            last = json.loads(self.offsets[-1])
            assert self.reader.partitions(last, last) == []

    def rerun(self) -> list[dict[str, Any]]:
        """Read the last micro-batch, again perhaps."""
        end = json.loads(self.offsets[-1])
        # Spark keeps where micro-batches end: where the first one began it asks again.
        start = json.loads(self.offsets[-2]) if len(self.offsets) > 2 else self.reader.initialOffset()
        sent = pickle.loads(pickle.dumps(self.reader))
        parts = [pickle.loads(pickle.dumps(p)) for p in self.reader.partitions(start, end)]
        return [row for p in parts for batch in sent.read(p) for row in batch.to_pylist()]

    def plan(self) -> bool:
        """Find the next micro-batch's end; whether there is anything new."""
        if not self.tells:
            end = json.dumps(self.reader.latestOffset())
        if not self.offsets:
            self.offsets.append(json.dumps(self.reader.initialOffset()))
        if self.tells:
            limit = self.reader.getDefaultReadLimit()
            end = json.dumps(self.reader.latestOffset(json.loads(self.offsets[-1]), limit))
        if end == self.offsets[-1]:
            return False
        self.offsets.append(end)
        return True

    def step(self) -> bool:
        """One micro-batch, if there is anything new."""
        if not self.plan():
            return False
        self.batches.append(self.rerun())
        self.reader.commit(json.loads(self.offsets[-1]))
        return True

    def drain(self) -> list[dict[str, Any]]:
        """All that there is now."""
        before = len(self.batches)
        while self.step():
            pass
        return [row for batch in self.batches[before:] for row in batch]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for batch in self.batches for row in batch]


def pushed(table: lh.Table, **how: Any) -> list[dict[str, Any]]:
    return [r for b in table.subscribe(stop="now", **how) for r in b.rows.to_pylist()]


def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda r: json.dumps(r, default=str))


@pytest.mark.parametrize("tells", TELLS)
@pytest.mark.parametrize("seed", range(4))
def test_micro_batches_are_the_history_of_a_log_table(con: lh.Connection, seed: int, tells: bool) -> None:
    """Partitions appear, rounds tier, logs are trimmed, readers die before and after they delivered."""
    dice = random.Random(seed)
    name = f"model.log{seed}{tells}"
    table = con.create_table(name, LOG, partition_by=["day"], buckets=2, lake="iceberg", hot_retention="0s")
    limits = [{}, {"max_rows_per_trigger": 7}, {"max_bytes_per_trigger": 400}][seed % 3 if tells else 0]
    query = Query(con, name, tells=tells, start="earliest", changelog="true", **limits)
    written = 0
    for _ in range(30):
        what = dice.choice(["append", "append", "tier", "trim", "step", "step", "crash", "restart"])
        if what == "append":
            count = dice.randrange(1, 30)
            days = [f"d{dice.randrange(4)}" for _ in range(count)]
            table.append([{"day": d, "n": written + i, "text": "x" * (i % 5)} for i, d in enumerate(days)])
            written += count
        elif what == "tier":
            con.tier(name)
        elif what == "trim":
            trim(con)
        elif what == "step":
            query.step()
        elif what == "restart":
            query.restart()
        elif query.plan():
            lost = query.rerun()
            query.restart()
            con.tier(name)
            trim(con)
            query.batches.append(query.rerun())
            assert ordered(query.batches[-1]) == ordered(lost), "a micro-batch is the same whenever it is read"
    query.drain()
    assert Counter(r["n"] for r in query.rows) == Counter(range(written))
    assert {r["__change_type"] for r in query.rows} <= {"+A"}
    assert ordered([{k: v for k, v in r.items() if k != "__change_type"} for r in query.rows]) == ordered(
        pushed(table, start="earliest")
    )
    assert "max_rows_per_trigger" not in limits or max(map(len, query.batches)) <= 7


@pytest.mark.parametrize("tells", TELLS)
@pytest.mark.parametrize("lake", ["iceberg", None])
@pytest.mark.parametrize("seed", range(3))
def test_changes_of_a_keyed_table_make_the_table(con: lh.Connection, seed: int, lake: str | None, tells: bool) -> None:
    dice = random.Random(seed)
    name = f"model.keyed{seed}{lake}{tells}"
    table = con.create_table(name, KEYED, primary_key=["id"], buckets=3, lake=lake)

    def change() -> None:
        table.upsert([{"id": dice.randrange(40), "text": str(dice.random())} for _ in range(dice.randrange(1, 20))])
        table.delete([{"id": dice.randrange(40)} for _ in range(3)])

    for _ in range(3):
        change()
        if lake:
            con.tier(name)
    change()
    limits = {"max_rows_per_trigger": 10} if seed and tells else {}
    query = Query(con, name, tells=tells, start="full", changelog="true", **limits)
    expected = ordered(table.scan().to_arrow().to_pylist())
    query.plan()
    change()
    first = query.rerun()
    query.restart()
    query.batches.append(query.rerun())
    assert ordered(query.batches[0]) == ordered(first)
    while "live" in json.loads(query.offsets[-1]):
        query.step()
    assert {r["__change_type"] for r in query.rows} == {"+I"}
    assert ordered([{"id": r["id"], "text": r["text"]} for r in query.rows]) == expected
    for _ in range(4):
        change()
        query.step()
    query.drain()
    made: dict[int, str] = {}
    for row in query.rows:
        if row["__change_type"] in ("+I", "+U"):
            made[row["id"]] = row["text"]
        elif row["__change_type"] == "-D":
            del made[row["id"]]
    assert ordered([{"id": k, "text": v} for k, v in made.items()]) == ordered(table.scan().to_arrow().to_pylist())


@pytest.mark.parametrize("tells", TELLS)
@pytest.mark.parametrize("start", ["full", "latest", "earliest"])
def test_the_first_end_is_found_before_or_after_the_start(con: lh.Connection, start: str, tells: bool) -> None:
    table = con.create_table(f"old.{start}{tells}", KEYED, primary_key=["id"])
    table.upsert([{"id": 1, "text": "a"}, {"id": 2, "text": "a"}])
    query = Query(con, table.name, tells=tells, start=start, changelog="true")

    def changes() -> list[tuple[int, str]]:
        return sorted((r["id"], r["__change_type"]) for r in query.drain())

    assert changes() == ([] if start == "latest" else [(1, "+I"), (2, "+I")])
    table.upsert([{"id": 1, "text": "between"}])
    assert changes() == [(1, "+U"), (1, "-U")]
    query.restart()
    table.delete([{"id": 2}])
    assert changes() == [(2, "-D")]


@pytest.mark.parametrize("tells", TELLS)
def test_where_a_query_began_may_be_gone(con: lh.Connection, tells: bool) -> None:
    """One that goes on from its checkpoint is where that says, whatever its options ask for."""
    table = con.create_table(f"gone.{tells}", KEYED, primary_key=["id"], lake="iceberg", hot_retention="0s")
    table.upsert([{"id": i, "text": "a"} for i in range(10)])
    query = Query(con, table.name, tells=tells, start="1970-01-01T00:00:00Z")
    assert len(query.drain()) == 10
    con.tier(table.name)
    trim(con)
    assert table.status()["start_offset"].to_pylist()[0] > 0
    with pytest.raises(lh.OffsetOutOfRangeError, match="no longer all in the log"):
        Query(con, table.name, start="1970-01-01T00:00:00Z").drain()
    table.upsert([{"id": 1, "text": "b"}])
    query.restart()
    assert query.drain() == [{"id": 1, "text": "b"}]


def test_limits_need_spark_42(con: lh.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that was left aside would not be noticed before a micro-batch is too large."""
    con.create_table("limits.old", KEYED)
    monkeypatch.setattr(stream, "LIMITED", False)
    for name in ("max_rows_per_trigger", "max_bytes_per_trigger"):
        with pytest.raises(lh.InvalidPropertyError, match=rf"option {name} needs PySpark 4\.2 or later"):
            Query(con, "limits.old", tells=False, **{name: 5}).plan()


def test_starts(con: lh.Connection) -> None:
    table = con.create_table("starts.log", LOG, buckets=2, lake="iceberg", hot_retention="0s")
    for i in range(4):
        table.append([{"day": "d", "n": n, "text": "x"} for n in range(10 * i, 10 * i + 10)])
        con.tier("starts.log")
    trim(con)
    assert table.status()["start_offset"].to_pylist() != [0, 0], "the log does not hold it all"
    table.append([{"day": "d", "n": n, "text": "x"} for n in range(40, 50)])
    everything = pushed(table, start="earliest")
    since = sorted(r["__timestamp"] for r in everything)[17]
    at = {"0": 3, "1": 8}

    def numbers(**options: object) -> list[int]:
        return sorted(r["n"] for r in Query(con, "starts.log", **options).drain())

    assert numbers(start="earliest") == numbers(start="full") == list(range(50))
    assert numbers(start="latest") == numbers() == []
    assert numbers(start=since.isoformat()) == sorted(r["n"] for r in everything if r["__timestamp"] >= since)
    ms = int(since.timestamp() * 1000)
    assert numbers(start=ms) == sorted(r["n"] for r in everything if r["__timestamp"].timestamp() * 1000 >= ms)
    tablets = {TabletId((), int(b)): o for b, o in at.items()}
    assert numbers(start=json.dumps(at)) == sorted(r["n"] for r in pushed(table, start=tablets))
    assert numbers(start=dt.datetime(2100, 1, 1, tzinfo=dt.UTC).isoformat()) == []
    late = Query(con, "starts.log")
    assert late.drain() == []
    table.append([{"day": "d", "n": 50, "text": "x"}])
    assert [r["n"] for r in late.drain()] == [50]
    for bad, words in (({"0": 10_000}, "holds"), ({"7": 0}, "does not have")):
        with pytest.raises(lh.OffsetOutOfRangeError, match=words):
            Query(con, "starts.log", start=json.dumps(bad)).drain()


def test_what_a_keyed_table_gives(con: lh.Connection) -> None:
    table = con.create_table("gives.k", KEYED, primary_key=["id"])
    table.upsert([{"id": i, "text": "a"} for i in range(3)])
    table.upsert([{"id": 1, "text": "b"}])
    table.delete([{"id": 2}])
    new = Query(con, "gives.k", start="earliest").drain()
    assert new == [{"id": i, "text": t} for i, t in ((0, "a"), (1, "a"), (2, "a"), (1, "b"))], "new rows, no deletes"
    changes = Query(con, "gives.k$changelog", start="earliest", columns="text").drain()
    assert changes == pushed(table, start="earliest", columns=["text"])
    assert [r["__change_type"] for r in changes] == ["+I", "+I", "+I", "-U", "+U", "-D"]


@pytest.mark.parametrize("kind", ["log", "keyed"])
def test_rows_that_are_wanted(con: lh.Connection, kind: str) -> None:
    """A filter leaves of a stream what it leaves of a subscription: of live rows, of the log and of the lake."""
    where = "id % 3 = 0 and (text <> 'a' or id > 20)"  # asks for a column that is not read, too
    name, key = f"wanted.{kind}", None if kind == "log" else ["id"]
    table = con.create_table(name, KEYED, primary_key=key, buckets=2, lake="iceberg", hot_retention="0s")
    write = table.append if key is None else table.upsert

    def told(rows: list[dict[str, Any]]) -> list[tuple[int, str]]:
        return sorted((r["id"], r.get("__change_type", "+A")) for r in rows)

    write([{"id": i, "text": "a"} for i in range(60)])
    write([{"id": i, "text": "b"} for i in range(40)])
    query = Query(con, name, start="full", where=where, changelog="true", columns="id")
    expected = told(pushed(table, start="full", where=where, columns=["id"]))
    assert told(query.drain()) == expected and (0, expected[0][1]) in expected
    con.tier(name)
    trim(con)
    assert table.status()["start_offset"].to_pylist()[0] > 0
    assert told(Query(con, name, start="full", where=where, changelog="true", columns="id").drain()) == expected
    write([{"id": i, "text": "c"} for i in range(9)])
    if key is not None:
        table.delete([{"id": 30}, {"id": 31}])
    changes = [(0, "+A"), (3, "+A"), (6, "+A")]
    if key is not None:
        changes = [(i, c) for i in (0, 3, 6) for c in ("+U", "-U")] + [(30, "-D")]
    assert told(query.drain()) == sorted(changes)
    with pytest.raises(lh.InvalidPredicateError, match="names 'nope'"):
        Query(con, name, where="nope = 1")


def test_values_of_every_kind_and_the_time_of_commit(con: lh.Connection) -> None:
    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("small", pa.int8()),
            ("price", pa.decimal128(38, 2)),
            ("at", pa.timestamp("us", "UTC")),
            ("local", pa.timestamp("us")),
            ("day", pa.date32()),
            ("raw", pa.binary(3)),
            ("tags", pa.list_(pa.struct([("k", pa.string()), ("v", pa.float32())]))),
        ]
    )
    row = {
        "id": 1,
        "small": -3,
        "price": Decimal("12345678901234567890.25"),
        "at": dt.datetime(2026, 5, 1, 12, tzinfo=dt.UTC),
        "local": dt.datetime(1960, 5, 1),
        "day": dt.date(1, 1, 1),
        "raw": b"abc",
        "tags": [{"k": "a", "v": 0.5}, None],
    }
    for key in ([], ["id"]):
        table = con.create_table(f"kinds.t{len(key)}", schema, primary_key=key, lake="iceberg")
        write = table.upsert if key else table.append
        write([row])
        con.tier(table.name)
        write([{**dict.fromkeys(row), "id": 2}])
        stored = table.scan().to_arrow().to_pylist()
        times = {r["id"]: r["__timestamp"] for r in pushed(table, start="earliest")}
        columns = json.dumps([*schema.names, "__timestamp"])
        got = Query(con, table.name, start="full", columns=columns).drain()
        assert ordered(got) == ordered([{**r, "__timestamp": times[r["id"]]} for r in stored])


@pytest.mark.parametrize("tells", TELLS)
@pytest.mark.parametrize("start", ["latest", "full", "earliest"])
def test_the_first_micro_batch_is_the_same_when_it_is_repeated(con: lh.Connection, start: str, tells: bool) -> None:
    """By another process, which finds another beginning: rows would be lost, or come again as changes."""
    table = con.create_table(f"first.{start}_{tells}", KEYED, primary_key=["id"])
    table.upsert([{"id": i, "text": "a"} for i in range(5)])
    query = Query(con, table.name, start=start, changelog="true", tells=tells)
    query.offsets.append(json.dumps(query.reader.initialOffset()))
    if start == "latest":
        table.upsert([{"id": 9, "text": "a"}])  # between the two questions
    assert query.plan()
    first = query.rerun()
    assert [r["id"] for r in first] == ([9] if start == "latest" else [0, 1, 2, 3, 4])
    table.delete([1])
    table.upsert([{"id": 2, "text": "b"}, {"id": 7, "text": "a"}])
    query.restart()
    assert query.rerun() == first
    query.reader.commit(json.loads(query.offsets[-1]))
    query.restart()
    assert [(r["__change_type"], r["id"]) for r in query.drain()] == [("-D", 1), ("-U", 2), ("+U", 2), ("+I", 7)]
    assert not query.plan() and "began" not in json.loads(query.offsets[-1])


def test_a_trimmed_keyed_log_begins_with_live_rows(con: lh.Connection) -> None:
    table = con.create_table("gives.trimmed", KEYED, primary_key=["id"], lake="iceberg", hot_retention="0s")
    table.upsert([{"id": i, "text": "a"} for i in range(10)])
    table.upsert([{"id": 1, "text": "b"}])
    con.tier("gives.trimmed")
    trim(con)
    assert table.status()["start_offset"].to_pylist()[0] > 0
    query = Query(con, "gives.trimmed", start="earliest", changelog="true")
    assert ordered([{k: r[k] for k in ("id", "text")} for r in query.drain()]) == ordered(
        table.scan().to_arrow().to_pylist()
    )
    behind = Query(con, "gives.trimmed", start="latest")
    behind.drain()
    table.upsert([{"id": 1, "text": "c"}])
    con.tier("gives.trimmed")
    trim(con)
    with pytest.raises(lh.OffsetOutOfRangeError):
        behind.drain()


def test_rows_as_of_the_start_are_held_and_then_refused(con: lh.Connection) -> None:
    """While nobody delivered them, the server holds what a query's first rows need; once it does not, that is said."""
    table = con.create_table("held.k", KEYED, primary_key=["id"], lake="iceberg", hot_retention="0s")
    table.upsert([{"id": i, "text": "a"} for i in range(10)])
    query = Query(con, "held.k", start="full")
    query.plan()
    first = query.rerun()
    table.upsert([{"id": i, "text": "b"} for i in range(10)])
    con.tier("held.k")
    trim(con)
    assert ordered(query.rerun()) == ordered(first)
    lease = json.loads(query.offsets[0])["live"]["lease"]
    kept = query.reader._handle().leases._kept
    assert lease in kept, "while the query lives, it is renewed"
    query.reader.stop()
    assert lease not in kept
    handle = handle_of(table)
    handle.leases.release(lease)
    handle.leases.renew()
    with pytest.raises(lh.OffsetOutOfRangeError, match="another checkpointLocation"):
        query.rerun()


@since_spark_42
def test_limits(con: lh.Connection) -> None:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

    table = con.create_table("limits.log", LOG, buckets=2)
    for i in range(5):
        table.append([{"day": "d", "n": n, "text": "x" * 92} for n in range(20 * i, 20 * i + 20)])
    query = Query(con, "limits.log", start="earliest", max_rows_per_trigger=30)
    assert query.reader.getDefaultReadLimit() == ReadMaxRows(30)
    query.drain()
    assert [len(b) for b in query.batches] == [30, 30, 30, 10]
    size = Query(con, "limits.log", start="earliest", max_bytes_per_trigger=3000)
    assert size.reader.getDefaultReadLimit() == ReadMaxBytes(3000)
    size.drain()
    assert 20 <= max(map(len, size.batches)) <= 30 and len(size.rows) == 100
    keyed = con.create_table("limits.keyed", KEYED, primary_key=["id"], buckets=2)
    keyed.upsert([{"id": i, "text": "a"} for i in range(20)])
    first = Query(con, "limits.keyed", start="full", max_bytes_per_trigger=1)
    assert len(first.drain()) == 20 and len(first.batches) == 2, "live rows come tablet by tablet"
    lease = json.loads(first.offsets[0])["live"]["lease"]
    assert lease not in first.reader._handle().leases._kept, "what was delivered is not held"
    both = Query(con, "limits.log", start="earliest", max_bytes_per_trigger=3000, max_rows_per_trigger=11)
    both.drain()
    assert max(map(len, both.batches)) == 11
    initial = both.reader.initialOffset()
    whole = both.reader.latestOffset(initial, ReadAllAvailable())
    assert whole.pop("began") == initial
    assert whole == both.reader.reportLatestOffset(), "once"


@since_spark_42
def test_available_now_ends_where_it_began(con: lh.Connection) -> None:
    table = con.create_table("now.log", LOG, partition_by=["day"])
    table.append([{"day": "a", "n": n, "text": "x"} for n in range(10)])
    query = Query(con, "now.log", start="earliest", max_rows_per_trigger=4)
    query.reader.prepareForTriggerAvailableNow()
    query.step()
    table.append([{"day": d, "n": 10, "text": "x"} for d in "ab"])
    query.drain()
    assert [len(b) for b in query.batches] == [4, 4, 2]
    report = query.reader.reportLatestOffset()
    assert report is not None and sum(report["offsets"].values()) == 12
    query.restart()
    query.reader.prepareForTriggerAvailableNow()
    assert sorted(r["day"] for r in query.drain()) == ["a", "b"]


@since_spark_42
def test_other_definitions_and_other_tables_stop_it(con: lh.Connection) -> None:
    table = con.create_table("other.t", KEYED)
    table.append([{"id": 1, "text": "a"}])
    query = Query(con, "other.t", start="earliest")
    query.step()
    query.plan()
    table.append([{"id": 2, "text": "b"}])
    query.plan()
    with table.alter() as change:
        change.add_column("extra", pa.int32())
    for call in (query.rerun, query.plan):
        with pytest.raises(SchemaChangedError, match="schema 1, the columns id int64, text string, extra int32"):
            call()
    query.restart()
    with pytest.raises(SchemaChangedError, match="load the stream again"):
        query.plan()
    again = Query(con, "other.t", start="earliest")
    again.offsets = query.offsets
    assert again.rerun() == [{"id": 2, "text": "b", "extra": None}]
    con.rename_table("other.t", "other.called")
    with pytest.raises(lh.TableNotFoundError, match=r"is called other\.called now"):
        again.plan()
    con.create_table("other.t", KEYED)
    with pytest.raises(lh.TableNotFoundError, match=r"is called other\.called now"):
        again.plan()
    recreated = Query(con, "other.t")
    recreated.offsets = again.offsets
    with pytest.raises(lh.TableNotFoundError, match="another checkpointLocation"):
        recreated.plan()
    con.drop_table("other.called")
    with pytest.raises(lh.TableNotFoundError):
        again.plan()
    recreated.offsets = [json.dumps({**recreated.reader.initialOffset(), "offsets": {"/0": 5}})]
    with pytest.raises(lh.OffsetOutOfRangeError, match="restored to an earlier state"):
        recreated.plan()
    recreated.offsets = ['{"topic": 3}']
    with pytest.raises(lh.InvalidRequestError, match="not one of a Lakehead table"):
        recreated.plan()


@since_spark_42
@pytest.mark.parametrize("moment", ["before the old table is dropped", "after", "without another one", "swapped"])
def test_a_table_that_is_overwritten_under_a_query(con: lh.Connection, moment: str) -> None:
    name = f"over.{moment.replace(' ', '_')}"
    con.create_table(name, KEYED).append([{"id": 1, "text": "a"}])
    query = Query(con, name, start="earliest")
    query.step()
    query.plan()
    if moment != "without another one":
        desc = handle_of(con.table(name)).desc
        new = unfinished_like(con, desc, desc.path, "copy" if moment == "swapped" else "overwrite")
        con.rename_table(new.name, name, swap=True)
        if moment == "after":
            con.drop_table(new.name)
        ends = "was dropped or overwritten, .* is another table, whose .* with another checkpointLocation"
        words = (
            rf"is called {new.name} now" if moment == "swapped" else rf"table {name}, which this query reads, {ends}"
        )
    else:
        con.drop_table(name)
        words = rf"table {name}, which this query reads, was dropped: the query ends with it"
    with pytest.raises(lh.TableNotFoundError, match=words) as e:
        query.plan()
    assert "__overwrite_of_" not in str(e.value)
    if moment != "without another one":
        query.restart()
        with pytest.raises(lh.TableNotFoundError, match=r"was dropped, overwritten or renamed, and the .* is another"):
            query.plan()


@pytest.mark.parametrize("token", ["a token of the tests", "another token"], ids=["same token", "another token"])
def test_a_query_outlives_its_server(server: ServerProcess, token: str) -> None:
    with server.connect() as con:
        con.create_table("t.t", KEYED).append([{"id": 1, "text": "a"}])
        query = Query(con, "t.t", start="earliest")
        query.step()
    server.kill()
    server.token = token
    server.start()
    with server.connect() as con:
        con.table("t.t").append([{"id": 2, "text": "b"}])
    assert [r["id"] for r in query.drain()] == [2]


def test_a_token_that_is_missing(server: ServerProcess) -> None:
    with server.connect() as con:
        con.create_table("t.t", KEYED)
    kept = Path(credentials._folder().path, credentials._name(TcpAddress("127.0.0.1", server.port)))
    aside = kept.rename(kept.with_suffix(".aside"))
    try:
        with pytest.raises(lh.AuthenticationError, match="refused the token"):
            LakeheadDataSource({"uri": server.uri, "table": "t.t"}).schema()
    finally:
        aside.rename(kept)
