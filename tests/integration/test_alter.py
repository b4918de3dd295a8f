"""Tables that change: columns and properties, while rows are written, read, tiered and followed."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.types import LongType, StringType

import lakehead as lh
from lakehead.api import backup
from lakehead.api.lake import TableLake, tier_table
from lakehead.api.table import handle_of
from lakehead.errors import (
    ColumnNotFoundError,
    InvalidPropertyError,
    InvalidSchemaError,
    LakeheadError,
    LakeStateError,
    SchemaChangedError,
    UnavailableError,
)
from lakehead.iceberg import catalog_state
from lakehead.iceberg.evolution import evolve
from lakehead.lake.formats import format_of
from lakehead.log.hot_range import HotRange
from lakehead.server.tablet import Tablet
from lakehead.spark.worker import WorkerLog
from lakehead.types import TableDescriptor

SCHEMA = pa.schema([pa.field("k", pa.int64(), False), ("a", pa.int32()), ("b", pa.string())])


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as con:
        yield con


@pytest.fixture(params=[None, "iceberg"])
def table(request: pytest.FixtureRequest, con: lh.Connection, keyed: bool) -> lh.Table:
    return con.create_table("t", SCHEMA, primary_key=["k"] if keyed else None, lake=request.param, buckets=2)


def put(table: lh.Table, rows: Any) -> None:
    (table.upsert if table.primary_key else table.append)(rows)


def rows_of(table: lh.Table, **scan: Any) -> list[dict[str, Any]]:
    return sorted(table.scan(**scan).to_arrow().to_pylist(), key=lambda r: r["k"])


def old(k: int) -> dict[str, Any]:
    return {"k": k, "a": k, "b": f"b{k}"}


def new(k: int, note: str | None = None) -> dict[str, Any]:
    return {"k": k, "note": note, "a": k, "bee": f"b{k}"}


def change(table: lh.Table) -> None:
    with table.alter() as a:
        a.add_column("note", pa.string(), after="k").rename_column("b", "bee").widen_column("a", pa.int64())


def tier(con: lh.Connection, table: lh.Table) -> None:
    if table.describe()["lake"] is not None:
        con.tier("t")


def taken(subscription: lh.Subscription, rows: int) -> pa.Table:
    found: list[pa.RecordBatch] = []
    while sum(b.num_rows for b in found) < rows:
        found.append(next(subscription).rows)
    return pa.Table.from_batches(found)


def test_rows_before_and_after_are_one_table(con: lh.Connection, table: lh.Table) -> None:
    put(table, [old(k) for k in range(5)])
    tier(con, table)
    put(table, [old(k) for k in range(5, 10)])
    change(table)
    assert table.schema.names == ["k", "note", "a", "bee"] and table.schema.field("a").type == pa.int64()
    wanted = [new(k) for k in range(10)]
    assert rows_of(table) == wanted
    put(table, [{**new(10, "x"), "a": 1 << 40}])
    wanted.append({**new(10, "x"), "a": 1 << 40})
    assert rows_of(table) == wanted and rows_of(table, where="a > 8 and bee >= 'b'") == wanted[9:]
    tier(con, table)
    assert rows_of(table) == wanted and table.scan(where="note is null").count() == 10
    assert con.sql("select count(*), count(note), max(a) from t").fetchall() == [(11, 1, 1 << 40)]
    if table.primary_key:
        assert table.lookup([3, 10]).to_pylist() == [wanted[3], wanted[10]]


def test_it_holds_after_a_restart(tmp_path: Path, keyed: bool) -> None:
    with lh.connect(tmp_path / "data") as con:
        t = con.create_table("t", SCHEMA, primary_key=["k"] if keyed else None)
        put(t, [old(1)])
        change(t)
        put(t, [new(2, "x")])
    with lh.connect(tmp_path / "data") as con:
        assert rows_of(con.table("t")) == [new(1), new(2, "x")]
        assert not keyed or con.table("t").get(1) == new(1)


def test_whoever_has_the_old_columns_goes_on(con: lh.Connection, table: lh.Table) -> None:
    other = con.table("t")
    put(table, [old(1)])
    writer, pinned = other.writer(), other.scan()
    change(table)
    (writer.upsert if table.primary_key else writer.append)([old(2)])
    writer.flush()
    assert pinned.to_arrow().to_pylist() == [old(1)], "a scan has one schema"
    assert rows_of(table) == [new(1), new(2)] == rows_of(other) and other.schema == table.schema
    put(con.table("t"), [new(3, "x")])
    if table.primary_key:
        writer.upsert([{**old(3), "b": "again"}])
        writer.flush()
        assert table.get(3) == {**new(3, "x"), "bee": "again"}, "who does not know a column does not change it"


def test_calls_of_a_table_that_others_altered(con: lh.Connection, table: lh.Table, keyed: bool) -> None:
    def opened() -> lh.Table:
        return con.table("t")

    others = [opened() for _ in range(6)]
    change(table)
    put(others[0], [new(1, "x")])
    assert rows_of(others[1], where="note = 'x'") == [new(1, "x")]
    with others[2].subscribe("earliest", columns=["k", "note"], stop="now") as subscription:
        assert [r for b in subscription for r in b.rows.to_pylist() if r["note"] == "x"]
    tier(con, others[3])
    if keyed:
        assert others[4].get(1) == new(1, "x")
    with pytest.raises(SchemaChangedError), others[5].alter() as a:
        a.drop_column("a")


CALLS: dict[str, Callable[[lh.Table], object]] = {
    "upsert": lambda t: t.upsert([new(1)]),
    "delete": lambda t: t.delete([7]),
    "get": lambda t: t.get(1),
    "lookup": lambda t: t.lookup([1]),
    "prefix_lookup": lambda t: t.prefix_lookup([1]),
    "scan": lambda t: t.scan().count(),
    "scan of the lake": lambda t: t.scan(tier="lake").count(),
    "subscribe": lambda t: list(t.subscribe("full", stop="now")),
    "writer": lambda t: t.writer().close(),
    "status": lambda t: t.status(),
    "describe": lambda t: t.describe(),
    "offsets": lambda t: t.lake.offsets(),
    "snapshots": lambda t: t.lake.snapshots(),
    "files": lambda t: t.lake.files(),
    "changelog": lambda t: t.lake.changelog.files(),
    "iceberg": lambda t: t.lake.iceberg(),
    "metadata": lambda t: t.lake.metadata_location,
    "tier": lambda t: t.lake.tier(),
    "compact": lambda t: t.lake.compact(),
    "expire": lambda t: t.lake.expire(),
    "orphans": lambda t: t.lake.remove_orphans(),
    "adopt": lambda t: t.lake.adopt(),
    "truncate": lambda t: t.truncate(),
}


def test_every_call_is_among_them() -> None:
    public = {n for kind in (lh.Table, TableLake) for n in vars(kind) if not n.startswith("_")}
    plain = {"name", "schema", "primary_key", "partition_by", "buckets", "properties", "lake", "alter", "append"}
    spelled = {"metadata_location": "metadata", "remove_orphans": "orphans"}
    assert {spelled.get(n, n) for n in public - plain} == set(CALLS) - {"scan of the lake"}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_table_that_others_altered_is_used_as_before(con: lh.Connection, call: Callable[[lh.Table], object]) -> None:
    key = ["k", "line"]
    schema = pa.schema([("k", pa.int64()), ("line", pa.int64()), *list(SCHEMA)[1:]])
    if call is not CALLS["prefix_lookup"]:
        key, schema = ["k"], SCHEMA
    kept = call is CALLS["changelog"]
    table = con.create_table("t", schema, primary_key=key, bucket_key=["k"], lake="iceberg", lake_changelog=kept)
    table.upsert([{**old(1), **({"line": 1} if "line" in key else {})}])
    con.tier("t")
    stale, lake = con.table("t"), con.table("t").lake
    change(table)
    call(stale)
    lake.offsets()
    change_again = con.table("t")
    with change_again.alter() as a:
        a.drop_column("note")
    lake.offsets()


def test_a_subscription_goes_on_with_the_new_columns(con: lh.Connection, table: lh.Table) -> None:
    put(table, [old(k) for k in range(4)])
    named = table.subscribe("earliest", columns=["k", "a"])
    gone = table.subscribe("earliest", columns=["b"])
    with table.subscribe("earliest") as subscription:
        before = taken(subscription, 4)
        change(table)
        put(table, [new(k, "x") for k in range(4, 8)])
        after = taken(subscription, 4)
    assert {"b"} < set(before.schema.names) and {"note", "bee"} < set(after.schema.names)
    assert sorted(before["k"].to_pylist()) == [0, 1, 2, 3] and sorted(after["k"].to_pylist()) == [4, 5, 6, 7]
    assert sorted(taken(named, 8)["k"].to_pylist()) == list(range(8))
    named.close()
    with pytest.raises(ColumnNotFoundError, match="'b'"):
        for _ in range(9):
            next(gone)


def test_a_name_that_comes_again_is_another_column(con: lh.Connection, table: lh.Table) -> None:
    put(table, [old(1)])
    tier(con, table)
    put(table, [old(2)])
    with table.alter() as a:
        a.drop_column("b").add_column("b", "int64").rename_column("a", "c").add_column("a", pa.bool_())
    assert rows_of(table) == [{"k": 1, "c": 1, "b": None, "a": None}, {"k": 2, "c": 2, "b": None, "a": None}]
    put(table, [{"k": 3, "b": 7}])
    tier(con, table)
    assert rows_of(table, where="b = 7") == [{"k": 3, "c": None, "b": 7, "a": None}]
    assert rows_of(table, where="b is null", columns=["k"]) == [{"k": 1}, {"k": 2}]


def test_names_are_swapped_by_way_of_a_third(con: lh.Connection, table: lh.Table) -> None:
    put(table, [old(1)])
    with table.alter() as a:
        a.rename_column("a", "c").rename_column("b", "a").rename_column("c", "b").rename_column("b", "b")
    assert rows_of(table) == [{"k": 1, "b": 1, "a": "b1"}]


def test_other_engines_find_the_columns(con: lh.Connection) -> None:
    table = con.create_table("t", SCHEMA, lake="iceberg")
    put(table, [old(1)])
    con.tier("t")
    change(table)
    put(table, [new(2, "x")])
    con.tier("t")
    lake = table.lake.iceberg().scan().to_arrow().select(table.schema.names).sort_by("k")
    assert lake.to_pylist() == [new(1), new(2, "x")]
    for first in (
        table.lake.snapshots()["snapshot_id"][0].as_py(),
        table.lake.snapshots()["snapshot_id"].to_numpy()[0],
    ):
        assert table.scan(snapshot=first).to_arrow().to_pylist() == [new(1)]


@pytest.mark.parametrize("keyed", [False, True])
def test_a_round_that_began_before_takes_no_row_of_after(con: lh.Connection, keyed: bool) -> None:
    """Its files would lack the new columns. The lake has not followed, so that nothing else tells."""
    table = con.create_table("t", SCHEMA, primary_key=["k"] if keyed else None, lake="iceberg")
    put(table, [old(1)])
    con.tier("t")
    put(table, [old(2)])
    handle = handle_of(con.table("t"))
    lake = format_of(handle.desc).open(handle.desc, handle.lake())
    with pytest.MonkeyPatch.context() as away:
        away.setattr(catalog_state, "evolve", refuse)
        change(table)
        put(table, [new(3, "x")])
        with pytest.raises(SchemaChangedError):
            tier_table(handle, lake, handle.log)
    with pytest.raises(SchemaChangedError):
        handle.lake()
    con.tier("t")
    assert rows_of(table, tier="lake") == [new(1), new(2), new(3, "x")]
    assert table.scan(tier="hot").count() == 0


def refuse(*_: object) -> None:
    raise UnavailableError("the catalog does not answer")


def test_a_lake_that_has_followed_already(con: lh.Connection) -> None:
    """Who asked before the table was altered is answered after."""
    table = con.create_table("t", SCHEMA, lake="iceberg")
    before = handle_of(table).desc
    change(table)
    with pytest.raises(SchemaChangedError):
        evolve(table.lake.iceberg(), before)


def test_a_column_of_another_engine_is_adopted_or_in_the_way(con: lh.Connection) -> None:
    table = con.create_table("t", SCHEMA, lake="iceberg")
    put(table, [old(1)])
    con.tier("t")
    with table.lake.iceberg().update_schema() as theirs:
        theirs.add_column("note", StringType())
        theirs.add_column("Size", LongType())
    lake = table.lake.iceberg()
    rows = lake.scan().to_arrow()
    at = rows.schema.get_field_index("note")
    lake.overwrite(rows.set_column(at, "note", pa.array(["theirs"])))
    for name, kind in {"note": pa.int64(), "size": pa.int64()}.items():
        with pytest.raises(LakeStateError, match="another engine has added column"), table.alter() as a:
            a.add_column(name, kind)
    assert table.schema == SCHEMA
    with table.alter() as a:
        a.add_column("note", pa.string())
    assert rows_of(table) == [{**old(1), "note": "theirs"}]
    assert table.lake.compact().snapshot_id is None, "a column of another engine is left"


def test_a_lake_that_someone_broke_is_not_changed_further(con: lh.Connection) -> None:
    table = con.create_table("t", SCHEMA, lake="iceberg")
    put(table, [old(1)])
    con.tier("t")
    with table.lake.iceberg().update_schema() as theirs:
        theirs.delete_column("b")
    with pytest.raises(LakeStateError, match="column 'b'"), table.alter() as a:
        a.add_column("note", pa.string())
    assert con.table("t").schema == SCHEMA


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        (lambda a: a.drop_column("x"), ColumnNotFoundError, "no column 'x'"),
        (lambda a: a.drop_column("k"), InvalidSchemaError, "part of the primary key"),
        (lambda a: a.rename_column("k", "q"), InvalidSchemaError, "part of the primary key"),
        (lambda a: a.widen_column("k", pa.int64()), InvalidSchemaError, "part of the primary key"),
        (lambda a: a.make_nullable("k"), InvalidSchemaError, "part of the primary key"),
        (lambda a: a.rename_column("b", "A"), InvalidSchemaError, "equal but for case"),
        (lambda a: a.add_column("a", pa.int64()), InvalidSchemaError, "two columns named"),
        (lambda a: a.rename_column("b", "a").rename_column("a", "b"), InvalidSchemaError, "two columns named 'a'"),
        (lambda a: a.add_column("b", pa.int64()).drop_column("b"), InvalidSchemaError, "two columns named 'b'"),
        (lambda a: a.add_column("__x", pa.int64()), InvalidSchemaError, "reserved"),
        (lambda a: a.add_column("x", pa.int64(), after="y"), ColumnNotFoundError, "no column 'y'"),
        (lambda a: a.add_column("x", pa.int8(), default=300), InvalidSchemaError, "cannot have default=300"),
        (lambda a: a.add_column("x", pa.list_(pa.int8()), default=[]), InvalidSchemaError, "there are no defaults"),
        (lambda a: a.widen_column("a", pa.int16()), InvalidSchemaError, "cannot become"),
        (lambda a: a.widen_column("b", pa.int64()), InvalidSchemaError, "cannot become"),
        (lambda a: a.add_column("x", "integer number"), InvalidSchemaError, "no Arrow type"),
        (lambda a: a.set_property("freshnes", "1s"), InvalidPropertyError, "freshness"),
        (lambda a: a.set_property("freshness", "soon"), LakeheadError, "soon"),
        (lambda a: a.reset_property("freshnes"), InvalidPropertyError, "did you mean 'freshness'"),
    ],
)
def test_what_is_not_possible_is_refused_whole(con: lh.Connection, bad: Any, error: type, match: str) -> None:
    table = con.create_table("t", SCHEMA, primary_key="k", partition_by=None)
    before = table.describe()
    with pytest.raises(error, match=match), table.alter() as a:
        a.add_column("fine", pa.int64())
        bad(a)
    assert con.table("t").describe() == before


def test_what_raises_inside_the_block_changes_nothing(con: lh.Connection) -> None:
    table = con.create_table("t", SCHEMA)
    with pytest.raises(ZeroDivisionError), table.alter() as a:
        a.drop_column("b")
        raise ZeroDivisionError
    assert con.table("t").schema == SCHEMA


def test_properties(con: lh.Connection, table: lh.Table) -> None:
    with table.alter() as a:
        a.set_property("freshness", "1s").set_property("compression", "zstd").set_property("durability", "os")
    assert table.properties["freshness"] == "1000ms" and con.table("t").properties["durability"] == "os"
    put(table, [old(1)])
    with table.alter() as a:
        a.reset_property("freshness")
    assert con.table("t").properties["freshness"] == "30000ms" and rows_of(table) == [old(1)]


def test_twenty_changes_between_rounds(con: lh.Connection, table: lh.Table) -> None:
    wanted: dict[int, dict[str, Any]] = {}
    for n in range(20):
        row = {"k": n, "a": n, **{c: n for c in table.schema.names if c.startswith("c")}}
        put(table, [row])
        wanted[n] = row
        with table.alter() as a:
            a.add_column(f"c{n}", pa.int64())
            if n > 3:
                a.drop_column(f"c{n - 4}")
        if n % 3 == 0:
            tier(con, table)
    names = table.schema.names
    assert rows_of(table) == [{c: row.get(c) for c in names} for row in wanted.values()]


@pytest.mark.parametrize("step", ["_copy_lake", "_copy_tablet", "_copy_metadata"])
def test_a_backup_of_a_table_that_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keyed: bool, step: str
) -> None:
    """At each step of it: what was copied before and after fits together."""
    folder = tmp_path / "data"
    with lh.connect(folder) as con:
        table = con.create_table("t", SCHEMA, primary_key=["k"] if keyed else None, lake="iceberg")
        put(table, [old(1)])
        con.tier("t")
        put(table, [old(2)])
        do, left = getattr(backup, step), [1]

        def altered_first(*args: Any) -> Any:
            if left:
                left.clear()
                change(table)
                put(table, [new(3, "x")])
            return do(*args)

        monkeypatch.setattr(backup, step, altered_first)
        backup.back_up(con, str(folder), str(tmp_path / "backup"))
    assert not left
    backup.restore(str(tmp_path / "backup"), str(tmp_path / "restored"))
    with lh.connect(tmp_path / "restored") as con:
        table = con.table("t")
        rows = [new(1), new(2), *([new(3, "x")] if step != "_copy_metadata" else [])]
        assert rows_of(table) == rows
        con.tier("t")
        assert rows_of(table, tier="lake") == rows


def test_what_a_worker_reads_was_planned_under_the_same_definition(con: lh.Connection) -> None:
    """A task of a round would else write values of one column into another of its name."""
    table = con.create_table("t", SCHEMA)
    put(table, [old(1)])
    planned = WorkerLog(con.uri, handle_of(table))
    (tablet,) = planned.watermarks()
    assert pickle.loads(pickle.dumps(planned)).watermarks() == {tablet: HotRange(0, 1)}
    with con.table("t").alter() as a:
        a.drop_column("b").add_column("b", pa.string())
    with pytest.raises(SchemaChangedError):
        list(pickle.loads(pickle.dumps(planned)).read(tablet, 0, 1))


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_a_catalog_that_fails_while_the_lake_is_to_follow(
    con: lh.Connection, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """The table is altered; its lake follows when it is asked for next."""
    table = con.create_table("t", SCHEMA, lake="iceberg")
    put(table, [old(1)])
    con.tier("t")
    commit, left = SqlCatalog.commit_table, [1]

    def fails_once(*args: Any) -> Any:
        if not left:
            return commit(*args)
        left.clear()
        if lost == "answer":
            commit(*args)
        raise OSError("away")

    monkeypatch.setattr(SqlCatalog, "commit_table", fails_once)
    change(table)
    assert not left and table.schema.names == ["k", "note", "a", "bee"]
    assert rows_of(table) == [new(1)]
    put(table, [new(2, "x")])
    con.tier("t")
    assert rows_of(table, tier="lake") == [new(1), new(2, "x")]


def docs_of(table: lh.Table) -> dict[str, str | None]:
    found = table.lake.iceberg()
    return {f.name: f.doc for f in found.schema().fields} | {"table": found.properties.get("comment")}


def test_comments_stay_with_their_columns(con: lh.Connection, table: lh.Table) -> None:
    put(table, [old(1)])
    with table.alter() as a:
        a.set_comment("a", "how many").set_comment("b", "gone soon").set_comment(None, "things")
    with table.alter() as a:
        a.rename_column("a", "n").drop_column("b").add_column("b", pa.string()).set_comment("n", "how many there are")
    definition = con.table("t").describe()
    assert {c["name"]: c.get("comment") for c in definition["columns"]} == {
        "k": None,
        "n": "how many there are",
        "b": None,
    }
    assert definition.get("comment") == "things"
    if table.describe()["lake"]:
        said = docs_of(table)
        assert [said[c] for c in ("k", "n", "b", "table")] == [None, "how many there are", None, "things"]
        tier(con, table)
    with table.alter() as a:
        a.set_comment("n", None).set_comment(None, "")
    definition = con.table("t").describe()
    assert (definition.get("comment"), [c.get("comment") for c in definition["columns"]]) == (None, [None] * 3)
    if table.describe()["lake"]:
        assert set(docs_of(table).values()) == {None}
    put(table, [{"k": 2, "n": 3, "b": "x"}])
    tier(con, table)
    assert rows_of(table)[1] == {"k": 2, "n": 3, "b": "x"}


def test_comments_of_other_engines_stay(con: lh.Connection) -> None:
    table = con.create_table("t", SCHEMA, lake="iceberg")
    with table.lake.iceberg().update_schema() as update:
        update.update_column("b", doc="theirs")
    with table.alter() as a:
        a.set_comment("a", "ours")
    tier(con, table)
    assert [docs_of(table)[c] for c in ("a", "b")] == ["ours", "theirs"]


def test_a_comment_that_cannot_be(con: lh.Connection) -> None:
    table = con.create_table("t", SCHEMA)
    for column, text, error in (("x", "y", ColumnNotFoundError), ("a", "y" * 4097, lh.InvalidRequestError)):
        with pytest.raises(error), table.alter() as a:
            a.set_comment("b", "kept out").set_comment(column, text)
    with pytest.raises(lh.InvalidRequestError, match="must be a text"):
        table.alter().set_comment("a", 1)  # type: ignore[arg-type]
    assert [c.get("comment") for c in table.describe()["columns"]] == [None] * 3


def test_who_asks_while_the_tablets_change_gets_what_all_of_them_have(
    con: lh.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = con.create_table("t", SCHEMA, buckets=2)
    put(table, [old(1), old(2)])
    real, asking, answered = Tablet.alter, [], threading.Event()

    def ask() -> None:
        asking.append(con.table("t").schema.names)
        answered.set()

    def alter(self: Tablet, desc: TableDescriptor) -> None:
        real(self, desc)
        if asker.ident is None:
            asker.start()
            assert not answered.wait(0.05), "one tablet has the new columns, and the other has not"

    asker = threading.Thread(target=ask)
    with monkeypatch.context() as patch:
        patch.setattr(Tablet, "alter", alter)
        with table.alter() as a:
            a.add_column("n", pa.int64())
    asker.join()
    assert asking == [["k", "a", "b", "n"]]
