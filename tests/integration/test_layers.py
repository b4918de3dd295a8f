"""What a micro-batch writes to several tables, from Arrow: all that needs no Spark job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.waiting import WAIT_SECONDS

import lakehead as lh
from lakehead.api.copying import unfinished_like
from lakehead.api.table import handle_of
from lakehead.client.staging import JobBatch
from lakehead.errors import UnavailableError
from lakehead.spark.change_feed import ChangeFeed
from lakehead.spark.connections import in_worker
from lakehead.spark.layers import Layers, OpenTables
from lakehead.spark.sink import Overwriter, Staged, WriteOptions
from lakehead.spark.staged_rows import Target

SALES = pa.schema([("shop", pa.string()), ("n", pa.int64()), ("last", pa.int64())])


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as made:
        yield made


def sales(*rows: tuple[str, int, int]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(SALES.names, row, strict=True)) for row in rows], SALES)


def layers(con: lh.Connection, number: int = 0) -> Layers:
    return Layers(con, JobBatch("query 1", number))


def rows_of(con: lh.Connection, table: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(r.values()) for r in con.table(table).scan().to_arrow().to_pylist())


def staged(folder: Path) -> list[Path]:
    return [f for f in folder.rglob("staged/*/*") if f.is_file()]


def test_what_is_repeated_counts_once(con: lh.Connection) -> None:
    for number in (0, 0, 1, 1, 0):
        out = layers(con, number)
        out.append("a.log", sales(("x", number, 0)))
        out.accumulate("a.sums", sales(("x", 2, number), ("x", 3, number), ("y", 1, 0)), sum=["n"], max=["last"],
                       primary_key=["shop"])  # fmt: skip
        out.write()
    assert rows_of(con, "a.log") == [("x", 0, 0), ("x", 1, 0)]
    assert rows_of(con, "a.sums") == [("x", 10, 1), ("y", 2, 0)]


def by_what_is_known(con: lh.Connection, number: int, rows: pa.Table) -> int:
    """A step that writes new rows to one table, and those that it knows to another: the second time it knows all."""
    known = con.table("a.silver").lookup(rows.select(["shop"]))["shop"].to_pylist()
    is_known = pa.array([shop in known for shop in rows["shop"].to_pylist()], pa.bool_())
    again, new = rows.filter(is_known), rows.filter(pc.invert(is_known))
    out = layers(con, number)
    if len(new):
        out.upsert("a.silver", new)
    if len(again):
        out.append("a.again", again)
    return out.write()


def test_a_repeat_that_comes_to_rows_of_other_tables_writes_none(con: lh.Connection, tmp_path: Path) -> None:
    con.create_table("a.silver", SALES, primary_key=["shop"])
    con.create_table("a.again", SALES)
    assert [by_what_is_known(con, 0, sales(("x", 1, 0), ("y", 1, 0))) for _ in range(3)] == [2, 0, 0]
    assert [by_what_is_known(con, 1, sales(("x", 2, 0))) for _ in range(2)] == [1, 0]
    con.close()
    with lh.connect(tmp_path / "data") as restarted:
        assert by_what_is_known(restarted, 0, sales(("x", 1, 0), ("y", 1, 0))) == 0
        assert by_what_is_known(restarted, 1, sales(("z", 1, 0))) == 0
        assert rows_of(restarted, "a.again") == [("x", 2, 0)]
        assert rows_of(restarted, "a.silver") == [("x", 1, 0), ("y", 1, 0)]
        restarted.drop_table("a.silver")
        out = layers(restarted, 1)
        out.append("a.log", sales(("x", 1, 1)))
        assert out.write() == 0, "what is left of it knows it"


def test_one_of_several_that_repeat_a_batch_for_other_tables_at_once_writes_it(con: lh.Connection) -> None:
    start = threading.Barrier(4)

    def write(number: int) -> int:
        out = layers(con, 7)
        out.append(f"a.of_{number}", sales(("x", number, 0)))
        start.wait(WAIT_SECONDS)
        return out.write()

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(write, range(4))) == [0, 0, 0, 1]


def test_nulls_count_for_nothing_and_each_way_is_its_own(con: lh.Connection) -> None:
    con.create_table("a.t", pa.schema([("k", pa.int32()), ("s", pa.int32()), ("a", pa.float64()), ("b", pa.string())]),
                     primary_key="k")  # fmt: skip
    given = [{"k": 1, "s": None, "a": 2.0, "b": "x"}, {"k": 1, "s": 4, "a": None, "b": "y"}, {"k": 2, "s": None}]
    for number in range(2):
        out = layers(con, number)
        rows = pa.Table.from_pylist(given, con.table("a.t").schema)
        out.accumulate("a.t", rows, sum=["s"], min=["a"], max=["b"])
        out.write()
    assert rows_of(con, "a.t") == [(1, 8, 2.0, "y"), (2, None, None, None)]


def test_columns_may_have_the_names_that_arrow_gives_to_sums(con: lh.Connection) -> None:
    schema = pa.schema([("n_sum", pa.string()), ("n", pa.int64()), ("0", pa.int64())])
    con.create_table("a.t", schema, primary_key="n_sum")
    for number in range(2):
        out = layers(con, number)
        out.accumulate("a.t", pa.table([["x", "x"], [1, 2], [5, 4]], schema), sum=["n"], max=["0"])
        out.write()
    assert rows_of(con, "a.t") == [("x", 6, 5)]


def test_columns_that_are_accumulated_apart(con: lh.Connection) -> None:
    out = layers(con)
    con.create_table("a.t", SALES, primary_key="shop")
    con.table("a.t").upsert([{"shop": "x", "n": 5, "last": 1}])
    out.accumulate("a.t", sales(("x", 2, 0), ("y", 1, 0)).drop(["last"]), sum=["n"])
    out.accumulate("a.t", sales(("x", 0, 7), ("z", 0, 2)).drop(["n"]), max=["last"])
    out.write()
    assert rows_of(con, "a.t") == [("x", 7, 7), ("y", 1, None), ("z", None, 2)]


@pytest.mark.parametrize("first", ["accumulate", "upsert", "delete"])
@pytest.mark.parametrize("second", ["accumulate", "upsert", "delete"])
def test_what_is_added_to_is_known(con: lh.Connection, first: str, second: str) -> None:
    """Else the second one would add to what was there before the first."""
    con.create_table("a.t", SALES, primary_key="shop")
    con.create_table("a.other", SALES, primary_key="shop")
    out = layers(con)
    given = sales(("x", 1, 1))

    def write(how: str, table: str) -> None:
        match how:
            case "accumulate":
                out.accumulate(table, given, sum=["n"], max=["last"])
            case "upsert":
                out.upsert(table, given)
            case "delete":
                out.delete(table, given)

    write(first, "a.t")
    write(second, "a.other")
    if "accumulate" in (first, second):
        with pytest.raises(lh.InvalidRequestError, match="into one call"):
            write(second, "a.t")
    else:
        write(second, "a.t")
    out.write()
    assert rows_of(con, "a.other") == ([] if second == "delete" else [("x", 1, 1)])


def test_what_cannot_be_accumulated_leaves_nothing(con: lh.Connection, tmp_path: Path) -> None:
    for name in ("a.first", "a.log"):
        con.create_table(name, SALES)
    con.create_table("a.keyed", pa.schema([("shop", pa.string()), ("n", pa.int8())]), primary_key="shop")
    given = sales(("x", 1, 1))
    with pytest.raises(lh.InvalidRequestError, match="each named once"):
        layers(con).accumulate("a.keyed", given, sum=["n"], max=["n"])
    for table, rows, error in (
        ("a.log", given, lh.WrongTableKindError),
        ("a.keyed", given, lh.InvalidRequestError),  # "last" is no column
        ("a.keyed", given.select(["n"]), lh.InvalidRequestError),  # no key
        ("a.keyed", sales(("x", 200, 0)).drop(["last"]), lh.SchemaMismatchError),  # too large for the column
    ):
        out = layers(con)
        out.append("a.first", sales(("y", 0, 0)))
        out.accumulate(table, rows, sum=["n"])
        with pytest.raises(error):
            out.write()
    assert rows_of(con, "a.first") == rows_of(con, "a.keyed") == [] == staged(tmp_path)


def add(con: lh.Connection) -> None:
    with con.table("a.sums").alter() as change:
        change.add_column("more", pa.int64(), default=7)


def add_what_comes(con: lh.Connection) -> None:
    with con.table("a.log").alter() as change:
        change.add_column("more", pa.int64())


def drop_what_is_given(con: lh.Connection) -> None:
    with con.table("a.log").alter() as change:
        change.drop_column("last")


def rename_away(con: lh.Connection) -> None:
    con.rename_table("a.sums", "a.old_sums")


def swap(con: lh.Connection) -> None:
    con.create_table("a.other", SALES, primary_key="shop")
    con.rename_table("a.sums", "a.other", swap=True)


def make_anew(con: lh.Connection) -> None:
    con.drop_table("a.sums")
    con.create_table("a.sums", SALES, primary_key="shop")


def make_of_another_kind(con: lh.Connection) -> None:
    con.drop_table("a.sums")
    con.create_table("a.sums", SALES)


def drop(con: lh.Connection) -> None:
    con.drop_table("a.log")


def leave(con: lh.Connection) -> None:
    pass


@pytest.mark.parametrize(
    "happens",
    [add, add_what_comes, drop_what_is_given, rename_away, swap, make_anew, make_of_another_kind, drop, leave],
)
@pytest.mark.parametrize("given_more", [False, True])
def test_tables_that_stay_open_are_as_if_opened_by_each_micro_batch(
    con: lh.Connection, happens: Callable[[lh.Connection], None], given_more: bool
) -> None:
    def write(number: int, tables: OpenTables, *, anew: bool) -> tuple[object, dict[str, list[tuple[Any, ...]]]]:
        if anew:
            tables.forget()
        out = Layers(con, JobBatch("query 1", number), tables=tables)
        rows = sales(("x", number, 0), ("y", 1, number))
        more = {"more": pa.array([number, None], pa.int64())} if given_more and number else {}
        out.append("a.log", pa.table({**dict(zip(SALES.names, rows.columns, strict=True)), **more}))
        out.accumulate("a.sums", rows, sum=["n"], max=["last"], primary_key=["shop"])
        try:
            found: object = out.write()
        except lh.LakeheadError as e:
            found = type(e)
        return found, {name: rows_of(con, name) for name in con.tables("a")}

    answers = []
    for anew in (False, True):
        tables = OpenTables(con)
        answers.append([write(0, tables, anew=anew)])
        happens(con)
        answers[-1] += [write(number, tables, anew=anew) for number in (1, 1, 2)]
        for name in con.tables("a"):
            con.drop_table(name)
    kept, opened = answers
    assert kept == opened
    assert happens is not leave or given_more or [rows for rows, _ in kept] == [4, 4, 0, 4]
    if happens in (drop, rename_away) and not given_more:
        assert [found for found, _ in kept] == [4, *[lh.TableNotFoundError] * 3]


def test_tables_that_stay_open_are_asked_for_once(con: lh.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    tables, opened, opens = OpenTables(con), list[str](), lh.Connection.table

    def opens_counted(self: lh.Connection, name: str) -> lh.Table:
        opened.append(name)
        return opens(self, name)

    con.create_table("a.log", SALES)
    monkeypatch.setattr(lh.Connection, "table", opens_counted)
    for number in range(3):
        out = Layers(con, JobBatch("query 1", number), tables=tables)
        out.append("a.log", sales(("x", number, 0)))
        assert out.write() == 1
    assert opened == ["a.log"]


# ---- overwriting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["rename_table", "drop_table"])
def test_a_table_is_overwritten_though_the_answer_is_lost(
    con: lh.Connection, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """The step that gives the name is done again, on another connection: names that are swapped twice are as before."""
    old = con.create_table("a.t", SALES, lake="iceberg")
    old.append(sales(("old", 1, 1)))
    new = unfinished_like(con, handle_of(old).desc, handle_of(old).desc.path, "overwrite")
    options = WriteOptions(Target(con.uri, new.name), None, 0)
    writer = Overwriter("a.t", handle_of(new).desc.table_id, options)
    part = options.target.stage(writer._batch, sales(("new", 2, 2)).to_batches())
    in_worker(con.uri, lambda _: None)  # there is a connection, which breaks
    does, answers = getattr(lh.Connection, lost), []

    def loses_its_answer(self: lh.Connection, *args: Any, **kwargs: Any) -> Any:
        answers.append(does(self, *args, **kwargs))
        if len(answers) == 1:
            raise UnavailableError("the connection broke")
        return answers[-1]

    monkeypatch.setattr(lh.Connection, lost, loses_its_answer)
    writer.commit([Staged(writer._batch, part)])
    assert rows_of(con, "a.t") == [("new", 2, 2)] and con.tables("a") == ["a.t"]


# ---- changes ---------------------------------------------------------------------------------------------------------

CHANGES = pa.schema([("k", pa.int64()), ("v", pa.string()), ("__lakehead_sequence", pa.int64())])


def feed(scd_type: Any, *columns: str) -> ChangeFeed:
    return ChangeFeed("", "a.target", "a.beside", ("k",), ("k", *columns), scd_type)


@pytest.mark.parametrize("scd_type", [1, 2])
def test_a_target_that_lacks_columns_is_refused_before_anything_is_read(con: lh.Connection, scd_type: int) -> None:
    kept = [("start_at", pa.int64()), ("end_at", pa.int64())] if scd_type == 2 else []
    key = ["k", "start_at"] if scd_type == 2 else ["k"]
    con.create_table("a.target", pa.schema([("k", pa.int64()), *kept]), primary_key=key, bucket_key=["k"])
    feed(scd_type).require_tables(con, CHANGES)
    with pytest.raises(lh.InvalidRequestError, match="v"):
        feed(scd_type, "v").require_tables(con, CHANGES)


def test_a_target_whose_versions_cannot_be_found_is_refused(con: lh.Connection) -> None:
    schema = pa.schema([("k", pa.int64()), ("v", pa.string()), ("start_at", pa.int64()), ("end_at", pa.int64())])
    con.create_table("a.target", schema, primary_key=["k", "start_at"], bucket_key=["start_at"])
    with pytest.raises(lh.InvalidRequestError):
        feed(2, "v").require_tables(con, CHANGES)
