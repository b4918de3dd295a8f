"""`con.sql` copies a table into DuckDB once reading it has taken as long, and goes on from there to what there is."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.integration.conftest import ServerProcess
from tests.integration.put_back import require_no_lost_rows
from tests.sql_copies import SCHEMA, catalogs, copying_at_once, engine_of, put, rows_of

import lakehead as lh
from lakehead.api import copied_table, copied_tables
from lakehead.api.table import handle_of
from lakehead.client.staging import JobBatch
from lakehead.lake.union_read import UnionRead

KINDS = [(keyed, lake) for keyed in (False, True) for lake in (None, "iceberg")]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[UnionRead]:
    """The reads of lake and log."""
    seen: list[UnionRead] = []
    batches = UnionRead.batches

    def counted(self: UnionRead) -> Iterator[pa.RecordBatch]:
        seen.append(self)
        return batches(self)

    monkeypatch.setattr(UnionRead, "batches", counted)
    return seen


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("keyed", "lake"), KINDS)
def test_it_reads_what_there_is(con: lh.Connection, reads: list[UnionRead], keyed: bool, lake: str | None) -> None:
    """After each change what is new, and between two changes nothing from lake and log."""
    name = f"s.t_{keyed}_{lake}".lower()
    table = con.create_table(
        name, SCHEMA, primary_key=["k", "p"] if keyed else None, partition_by="p", buckets=2, lake=lake
    )
    held: list[tuple[Any, list[tuple[Any, ...]]]] = []

    def check(expected: list[tuple[Any, ...]], columns: int = 3) -> None:
        for _ in range(2):
            assert rows_of(con, name) == sorted(expected)
        count = len(reads)
        assert rows_of(con, name, "v = 'a' and k > 5") == sorted(r for r in expected if r[2] == "a" and r[0] > 5)
        joined = con.sql(f"select count(*) from {name} a join {name} b using (k, p)").fetchone()
        assert joined == (len({r[:2] for r in expected}),) if keyed else True
        assert con.sql(f"select count(*) from {name}").fetchone() == (len(expected),)
        assert len(reads) == count, "all of it from the copy"
        held.append((con.sql(f"from {name}"), expected))

    expected = put(table, range(20), "a")
    check(expected)
    if lake:
        con.tier(name)
        check(expected)
    expected = (expected if not keyed else [r for r in expected if r[0] < 10]) + put(table, range(10, 25), "b")
    check(expected)
    if keyed:
        table.delete([{"k": 3, "p": "p1"}])
        expected = [r for r in expected if r[0] != 3]
        check(expected)
    if lake:
        con.tier(name)
        check(expected)
        count = len(reads)
        assert rows_of(con, f"{name}$lake") == rows_of(con, f"{name}$lake") == sorted(expected)
        assert len(reads) == count + 1, "the lake's copy is another one"
        put(table, range(100, 101), "hot")
        assert rows_of(con, f"{name}$lake") == sorted(expected)
        expected = [*expected, (100, "p0", "hot")]
    for relation, was in held:
        assert sorted(relation.fetchall()) == sorted(was), "as of its moment"
    with table.alter() as altered:
        altered.add_column("w", pa.int64())
    assert rows_of(con, name) == sorted((*r, None) for r in expected)
    with table.alter() as altered:
        altered.rename_column("v", "x")
    assert sorted(con.sql(f"select x from {name} where k = 12").fetchall()) == ([("b",)] if keyed else [("a",), ("b",)])
    table.truncate()
    assert rows_of(con, name) == []
    con.drop_table(name)
    with pytest.raises(lh.TableNotFoundError):
        rows_of(con, name)


@pytest.mark.usefixtures("at_once")
def test_whole_keys_are_asked_of_the_index(alone: lh.Connection, reads: list[UnionRead]) -> None:
    table = alone.create_table("s.keys", SCHEMA, primary_key=["k", "p"], lake="iceberg")
    put(table, range(50), "a")
    alone.tier("s.keys")
    for _ in range(2):
        assert len(rows_of(alone, "s.keys")) == 50
    asked = len(reads)
    for where in ("k = 3 and p = 'p1'", "(p in ('p1', 'x') and 3 = k)", "K = 1 + 2 and s.keys.P = 'p1'"):
        assert rows_of(alone, "s.keys", where) == [(3, "p1", "a")]
    assert alone.sql("select v from s.keys where k = ? and p = ?", [3, "p1"]).fetchall() == [("a",)]
    # The others are no reads: see test_sql_by_key.py.
    assert len(reads) == asked + 1 and reads[asked].rows_by_key() is not None
    for where in ("k = 3", "k = k and p = p", "p = 'p1' and k in (select k + 2 from s.keys where v = 'a' and k < 2)"):
        assert len(rows_of(alone, "s.keys", where)) == (50 if "k = k" in where else 1)
    assert len(reads) == asked + 1


def test_reads_that_no_copy_could_take_do_not_count(alone: lh.Connection, reads: list[UnionRead]) -> None:
    put(alone.create_table("s.counted", SCHEMA, primary_key=["k", "p"]), range(9), "a")
    for _ in range(copied_tables.READS_LEAST + 2):
        assert len(rows_of(alone, "s.counted", "k = 3 and p = 'p1'")) == 1
        assert alone.sql("select count(v) from s.counted", unrestricted=True).fetchone() == (9,)
    assert not [seen for con in alone._sql.values() for seen in con.copies._seen.values() if seen.reads]
    rows_of(alone, "s.counted")
    assert [seen.reads for seen in engine_of(alone).copies._seen.values()] == [1]


def test_a_copy_is_made_once_it_has_paid(alone: lh.Connection, reads: list[UnionRead]) -> None:
    """Counted in seconds that reading has taken and those that copying is taken to take."""
    table = alone.create_table("s.pays", SCHEMA, lake="iceberg")
    put(table, range(1000), "a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copied_tables, "COPY_SECONDS", 1e9)
        patch.setattr(copied_tables, "_per_cell", lambda seconds, cells: 0.0)
        for _ in range(10):
            assert len(rows_of(alone, "s.pays")) == 1000
        assert len(reads) == 10
        patch.setattr(copied_tables, "COPY_SECONDS", 1e-9)
        patch.setattr(copied_tables, "CELLS_PER_SECOND", 1e-9)
        assert len(rows_of(alone, "s.pays")) == 1000 and len(reads) == 11
        patch.setattr(copied_tables, "CELLS_PER_SECOND", 1e12)
        for _ in range(3):
            assert len(rows_of(alone, "s.pays")) == 1000
        assert len(reads) == 12, "one makes the copy"
        put(table, range(1), "b")
        for _ in range(6):
            assert len(rows_of(alone, "s.pays")) == 1001
        assert len(reads) == 12, "it goes on"
        table.truncate()
        put(table, range(2), "c")
        for _ in range(6):
            assert len(rows_of(alone, "s.pays")) == 2
        least = 12 + copied_tables.READS_LEAST
        assert least < len(reads) <= least + 2, "what was read before rows went does not count"


def test_reads_of_a_table_that_grows_are_added_up(alone: lh.Connection, reads: list[UnionRead]) -> None:
    table = alone.create_table("s.grows", SCHEMA, primary_key=["k"], buckets=3, lake="iceberg")
    put(table, range(100), "a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copied_tables, "COPY_SECONDS", 1e-9)
        patch.setattr(copied_tables, "CELLS_PER_SECOND", 1e12)
        for n in range(10):
            put(table, range(n, n + 1), "b")
            if n == 7:
                alone.tier("s.grows")
            assert len(rows_of(alone, "s.grows", "v = 'b'")) == n + 1
        assert len(reads) == copied_tables.READS_LEAST + 1, "one makes the copy, which goes on, also when it is tiered"


@pytest.mark.usefixtures("at_once")
def test_what_is_large_is_read_where_it_is(alone: lh.Connection, reads: list[UnionRead]) -> None:
    table = alone.create_table("s.large", SCHEMA)
    put(table, range(100), "a" * 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copied_tables, "TABLE_BYTES_MAX", 1000)
        for _ in range(3):
            assert len(rows_of(alone, "s.large")) == 100
        assert len(reads) == 4, "it was tried once"
        patch.setattr(copied_tables, "CELLS_MAX", 10)
        put(table, range(1), "b")
        for _ in range(3):
            assert len(rows_of(alone, "s.large")) == 101
        assert len(reads) == 7
    gc.collect()
    assert len(catalogs(alone)) <= 2, "the root and this cursor's, at most"


@pytest.mark.usefixtures("at_once")
def test_what_was_used_longest_ago_makes_room(alone: lh.Connection, reads: list[UnionRead]) -> None:
    names = [f"s.room{n}" for n in range(4)]
    for name in names:
        put(alone.create_table(name, SCHEMA), range(100), "a" * 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copied_table, "_COLUMN_BYTES", 32 << 10)
        patch.setattr(copied_tables, "BYTES_MAX", 150_000)
        for name in names:
            assert len(rows_of(alone, name)) == 100
        before = len(reads)
        assert len(rows_of(alone, names[-1])) == 100 and len(reads) == before
        relation = alone.sql(f"from {names[-1]}")
        assert len(rows_of(alone, names[0])) == 100 and len(reads) == before + 1
        assert len(catalogs(alone)) <= 5
        patch.setattr(copied_tables, "BYTES_MAX", 0)
        put(alone.table(names[1]), range(1), "b")
        assert len(rows_of(alone, names[1])) == 101
        assert len(relation.fetchall()) == 100, "who reads a copy keeps it"
    del relation
    assert len(catalogs(alone)) <= 2


@pytest.mark.usefixtures("at_once")
def test_names_of_users_are_theirs(alone: lh.Connection) -> None:
    """Also in the statement that makes a copy."""
    put(alone.create_table("default.copied", SCHEMA), range(3), "a")
    other = alone.create_table("s.other", SCHEMA)
    for n in range(2):
        put(other, range(n, n + 1), "b")
        assert len(alone.sql("select * from s.other, copied").fetchall()) == 3 * (n + 1)
        assert len(rows_of(alone, "copied")) == 3
    alone.drop_table("default.copied")
    put(other, range(9, 10), "b")
    with pytest.raises(lh.TableNotFoundError):
        alone.sql("select * from s.other, copied").fetchall()
    put(other, range(10, 11), "b")
    assert alone.sql("select count(*) from s.other, copied", frames={"copied": [{"x": 1}]}).fetchone() == (4,)


@pytest.mark.usefixtures("at_once")
def test_what_is_read_later_keeps_the_copy(alone: lh.Connection) -> None:
    table = alone.create_table("s.lazy", SCHEMA)
    put(table, range(5), "a")
    rows_of(alone, "s.lazy")
    lazy = alone.sql("from s.lazy").pl(lazy=True)
    for _ in range(3):
        put(table, range(1), "b")
        rows_of(alone, "s.lazy")
        gc.collect()
        assert len(catalogs(alone)) > 0
    assert lazy.collect().height == 5


def test_who_reads_a_table_as_it_was_keeps_no_copy_of_it(alone: lh.Connection) -> None:
    table = alone.create_table("s.old", SCHEMA)
    held = []
    for n in range(4):
        put(table, range(n, n + 1), "a")
        held.append(alone.sql("from s.old"))
        with copying_at_once():
            assert len(rows_of(alone, "s.old")) == n + 1
    few = len(catalogs(alone))
    assert few <= len(held) + 3, "theirs, the root, this cursor's and the newest copy"
    assert [len(relation.fetchall()) for relation in held] == [1, 2, 3, 4]
    alone.close()
    assert not engine_of(alone).copies._seen


def test_texts_that_may_do_anything_have_no_copies(alone: lh.Connection, reads: list[UnionRead]) -> None:
    put(alone.create_table("s.free", SCHEMA), range(3), "a")
    with copying_at_once():
        for n in range(3):
            assert alone.sql("select count(v) from s.free", unrestricted=True).fetchone() == (3,)
            assert len(reads) == n + 1


@pytest.mark.usefixtures("at_once")
def test_no_statement_names_a_copy(alone: lh.Connection) -> None:
    put(alone.create_table("s.named", SCHEMA), range(3), "a")
    for _ in range(2):
        rows_of(alone, "s.named")
    copy = next(seen.copy for seen in engine_of(alone).copies._seen.values() if seen.copy is not None)
    catalog = copy.catalog.partition(".")[0]
    for text in (
        f"from {copy.catalog}",
        f"select count(*) from {catalog}.main.rows",
        f'from "{catalog}"."main"."rows"',
    ):
        with pytest.raises(lh.SqlError):
            alone.sql(text).fetchall()
    for text in ("show all tables", "from duckdb_tables()", "from duckdb_databases()"):
        assert catalog not in str(alone.sql(text).fetchall())


@contextmanager
def asking(ask: Callable[[], None], count: int) -> Iterator[None]:
    """While so many threads ask, one question after the other, none of which may fail."""
    stop, failed = threading.Event(), []

    def work() -> None:
        try:
            while not stop.is_set():
                ask()
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed, failed


@pytest.mark.usefixtures("at_once")
def test_threads_read_what_there_is(con: lh.Connection) -> None:
    """Each statement of a thread finds at least what was acknowledged when it began, while tables change and rest."""
    table = con.create_table("s.threads", SCHEMA)
    acknowledged = 0

    def ask() -> None:
        least = acknowledged
        (found,) = con.sql("select count(*) from s.threads where v = 'a'").fetchone()  # type: ignore[misc]
        assert least <= found <= 40 * 5

    with asking(ask, 4):
        for n in range(40):
            put(table, range(n * 5, n * 5 + 5), "a")
            acknowledged = n * 5 + 5
            con.sql("select count(*) from s.threads where v = 'a'").fetchall()


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("tiered", [False, True])
def test_what_others_write_to_the_lake_is_read(alone: lh.Connection, tiered: bool) -> None:
    """Also where tiering went on from it."""
    table = alone.create_table("s.others", SCHEMA, lake="iceberg")
    put(table, range(20), "a")
    alone.tier("s.others")
    put(table, range(5), "hot")
    assert len(rows_of(alone, "s.others")) == 25
    ice = table.lake.iceberg()
    schema = pa.schema([f.remove_metadata() for f in ice.schema().as_arrow()])
    ice.append(pa.Table.from_pylist([{"k": 99, "p": "p", "v": "other"}], schema))
    if tiered:
        alone.tier("s.others")
    assert len(rows_of(alone, "s.others", "v = 'other'")) == 1
    put(table, range(1), "b")
    for _ in range(2):
        assert len(rows_of(alone, "s.others")) == 27


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("tiered", [False, True])
@pytest.mark.parametrize(("keyed", "lake"), KINDS)
def test_rows_that_go_at_once_are_gone(alone: lh.Connection, keyed: bool, lake: str | None, tiered: bool) -> None:
    """Also where no record of the log says so."""
    keys = ["k", "p"] if keyed else None
    table = alone.create_table("s.go", SCHEMA, primary_key=keys, partition_by="p", lake=lake)

    def tier() -> None:
        if lake and tiered:
            alone.tier("s.go")

    put(table, range(20), "a")
    tier()
    assert len(rows_of(alone, "s.go")) == 20
    staging = handle_of(table).staging
    held = staging.held()
    held.add("upsert" if keyed else "append", pa.table([[50, 52], ["p0", "p0"], ["b", "b"]], schema=SCHEMA))
    staging.publish(JobBatch("job 1"), [held.done()], lasting=False, overwrite=[])
    for _ in range(2):
        left = [(n, "p1", "a") for n in range(1, 20, 2)] + [(50, "p0", "b"), (52, "p0", "b")]
        assert rows_of(alone, "s.go") == left
        tier()
    assert rows_of(alone, "s.go") == left
    table.truncate()
    for _ in range(2):
        assert rows_of(alone, "s.go") == []
    put(table, range(3), "c")
    assert len(rows_of(alone, "s.go")) == 3


@pytest.mark.usefixtures("at_once")
def test_what_is_gone_takes_no_room_for_ever(alone: lh.Connection, reads: list[UnionRead]) -> None:
    table = alone.create_table("s.churn", SCHEMA, primary_key=["k"])
    put(table, range(50), "a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copied_table, "LATER_LEAST", 10)
        sizes = []
        for n in range(60):
            put(table, range(4), f"b{n}")
            assert len(rows_of(alone, "s.churn", f"v = 'b{n}'")) == 4
            (seen,) = engine_of(alone).copies._seen.values()
            sizes.append(seen.copy._rows if seen.copy else 0)
        assert max(sizes) <= 110 and 2 < len(reads) < 30, "a copy is made anew now and then"


@pytest.mark.usefixtures("at_once")
def test_threads_read_whole_writes(con: lh.Connection, reads: list[UnionRead]) -> None:
    """Statements of many threads find each write whole or not at all, while one copy goes on for all of them."""
    accounts = pa.schema([pa.field("k", pa.int64(), False), ("x", pa.int64())])
    table = con.create_table("s.accounts", accounts, primary_key=["k"], lake="iceberg")
    table.upsert([{"k": n, "x": 100} for n in range(10)])
    answers = [0]

    def ask() -> None:
        lazy = con.sql("select count(*), sum(x), max(x) - 100 from s.accounts")
        other = con.sql("select sum(x) from s.accounts a join s.accounts b using (k, x)").fetchone()
        assert lazy.fetchall()[0][:2] == (10, 1000) and other == (1000,)
        answers[0] += 1

    with asking(ask, 3):
        for n in range(60):
            a, b = n % 10, (n * 3 + 1) % 10
            if a != b:
                table.upsert([{"k": a, "x": 100 - n}, {"k": b, "x": 100 + n}])
                table.upsert([{"k": a, "x": 100}, {"k": b, "x": 100}])
            if n % 20 == 10:
                con.tier("s.accounts")
    assert answers[0] and len(reads) < answers[0], "of copies, mostly"


@pytest.mark.usefixtures("at_once")
def test_other_rows_at_the_same_offsets_are_not_what_was_copied(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data")
    try:
        with server.connect() as con:
            require_no_lost_rows(server, tmp_path / "before", con, lambda name: [r[1] for r in rows_of(con, name)])
    finally:
        server.stop()
