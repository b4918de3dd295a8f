"""Copies that `con.sql` does not make, gives up, or begins and does not end."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb
import pytest
from tests.sql_copies import SCHEMA, catalogs, copying_at_once, engine_of, put, rows_of

import lakehead as lh
from lakehead.api import copied_table, copied_tables
from lakehead.api.copied_table import CopiedTable


@pytest.mark.usefixtures("at_once")
def test_a_read_that_fails_leaves_no_copy(alone: lh.Connection) -> None:
    table = alone.create_table("s.fails", SCHEMA, primary_key=["k"], lake="iceberg")
    put(table, range(20), "a")
    alone.tier("s.fails")
    put(table, range(10), "b")
    (file,) = [Path(p.removeprefix("file://")) for p in table.lake.files()["path"].to_pylist()]
    file.rename(file.with_suffix(".away"))
    for _ in range(2):
        with pytest.raises(lh.LakeFileMissingError, match=file.name):
            rows_of(alone, "s.fails")
    file.with_suffix(".away").rename(file)
    assert len(rows_of(alone, "s.fails")) == 20
    assert len(catalogs(alone)) <= 3


@pytest.mark.usefixtures("at_once")
def test_who_needs_less_than_all_gets_it(alone: lh.Connection) -> None:
    """Where all of a table cannot be read, as a file of one partition is gone, the others can."""
    table = alone.create_table("s.part", SCHEMA, partition_by="p", lake="iceberg")
    put(table, range(20), "a")
    alone.tier("s.part")
    (file,) = [f["path"] for f in table.lake.files().to_pylist() if "p1" in str(f["partition"])]
    path = Path(file.removeprefix("file://"))
    path.rename(path.with_suffix(".away"))
    for _ in range(3):
        assert alone.sql("select count(v) from s.part where p = 'p0'").fetchone() == (10,)
        assert alone.sql("describe s.part").fetchall() and alone.sql("from s.part limit 0").fetchall() == []
        with pytest.raises(lh.LakeFileMissingError, match=path.name):
            rows_of(alone, "s.part")
    path.with_suffix(".away").rename(path)
    assert len(rows_of(alone, "s.part")) == 20


def test_copying_is_given_up_when_it_takes_long(alone: lh.Connection) -> None:
    put(alone.create_table("s.slow", SCHEMA), range(3), "a")
    with copying_at_once(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(copied_tables, "COPY_LEAST", 0.0)
        patch.setattr(copied_tables, "COPY_TIMES_MAX", 0.0)
        for _ in range(2):
            assert len(rows_of(alone, "s.slow")) == 3
        (seen,) = engine_of(alone).copies._seen.values()
        assert seen.copy is None and seen.again <= 2 * seen.seconds
        patch.setattr(copied_tables, "COPY_TIMES_MAX", float("inf"))
        patch.setattr(seen, "again", 0.0)
        rows_of(alone, "s.slow")
        assert seen.copy is not None


def test_what_took_long_to_copy_is_copied_later(alone: lh.Connection) -> None:
    """Wide values take longer than as many small ones: known from the last time, when the table changes."""
    table = alone.create_table("s.wide", SCHEMA)
    put(table, range(3), "a" * 100)
    with copying_at_once(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(copied_tables, "_per_cell", lambda seconds, cells: 1e9)
        rows_of(alone, "s.wide")
        (seen,) = engine_of(alone).copies._seen.values()
        assert seen.copy is not None
        table.truncate()
        put(table, range(6), "b")
        for _ in range(5):
            assert len(rows_of(alone, "s.wide")) == 6
        (seen,) = engine_of(alone).copies._seen.values()
        assert seen.copy is None


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("step", ["_take_away", "_add", "_change"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, duckdb.OutOfMemoryException, ValueError])
def test_what_ends_half_way_is_not_read(
    alone: lh.Connection, monkeypatch: pytest.MonkeyPatch, keyed: bool, step: str, error: type[BaseException]
) -> None:
    """Neither by statements of later moments nor by those of earlier ones."""
    table = alone.create_table("s.half", SCHEMA, primary_key=["k"] if keyed else None)
    put(table, range(5), "a")
    assert len(rows_of(alone, "s.half")) == 5
    put(table, range(3), "b")
    found = getattr(CopiedTable, step)

    def fails(self: CopiedTable, *args: Any) -> None:
        found(self, *args)
        raise error

    with monkeypatch.context() as patch, suppress(error, lh.LakeheadError):
        patch.setattr(CopiedTable, step, fails)
        alone.sql("from s.half").fetchall()
    for n in range(3):
        expected = sorted(table.scan().to_arrow().to_pylist(), key=lambda r: (r["k"], r["v"]))
        assert rows_of(alone, "s.half") == [tuple(r.values()) for r in expected]
        put(table, range(n, n + 2), "c")


@pytest.mark.usefixtures("at_once")
def test_an_interrupt_is_one(alone: lh.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where DuckDB meets it while it reads rows from Python; the copy may be made later."""
    table = alone.create_table("s.stop", SCHEMA, primary_key=["k"])
    put(table, range(5), "a")
    place = copied_table._place

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    for _ in range(2):
        monkeypatch.setattr(copied_table, "_place", interrupted)
        with pytest.raises(KeyboardInterrupt):
            alone.sql("from s.stop").fetchall()
        monkeypatch.setattr(copied_table, "_place", place)
        for _ in range(2):
            assert len(rows_of(alone, "s.stop")) == 5
        (seen,) = engine_of(alone).copies._seen.values()
        assert seen.copy is not None
        put(table, range(2), "b")


@pytest.mark.parametrize("text", ["Query interrupted", "KeyboardInterrupt", "Python exception: KeyboardInterrupt"])
def test_a_value_is_no_interrupt(alone: lh.Connection, text: str) -> None:
    """Errors tell the values that they are about."""
    put(alone.create_table("s.said", SCHEMA), range(3), text)
    with pytest.raises(lh.SqlError, match=text):
        alone.sql("select v::integer from s.said").fetchall()


def test_what_could_not_be_copied_may_be_later(alone: lh.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    table = alone.create_table("s.later", SCHEMA, primary_key=["k"], lake="iceberg")
    put(table, range(100), "a")
    monkeypatch.setattr(copied_tables, "COPY_SECONDS", 1e-9)
    monkeypatch.setattr(copied_tables, "CELLS_PER_SECOND", 1e12)
    monkeypatch.setattr(copied_tables, "COPY_LEAST", 1e-6)
    monkeypatch.setattr(copied_tables, "COPY_TIMES_MAX", 1e9)

    def copied(statements: int) -> bool:
        for n in range(statements):
            put(table, range(n % 5, n % 5 + 1), "b")
            rows_of(alone, "s.later")
            (seen,) = engine_of(alone).copies._seen.values()
            if seen.copy is not None:
                return True
        return False

    monkeypatch.setattr(copied_tables, "CELLS_MAX", 100)
    assert not copied(8)
    table.delete([{"k": n} for n in range(5, 100)])
    assert copied(2000), "there are few now, and it is tried again once what was read took twice as long"
    engine_of(alone).copies.clear()
    monkeypatch.setattr(copied_tables, "CELLS_MAX", 1000)
    fill = CopiedTable.fill

    def fails(*_: Any) -> None:
        raise lh.UnavailableError("not now")

    monkeypatch.setattr(CopiedTable, "fill", fails)
    assert not copied(8)
    monkeypatch.setattr(CopiedTable, "fill", fill)
    assert copied(2000)


@pytest.mark.usefixtures("at_once")
def test_a_copy_that_takes_longer_than_reading_is_given_up(
    alone: lh.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = alone.create_table("s.slower", SCHEMA)
    put(table, range(5), "a")
    rows_of(alone, "s.slower")
    monkeypatch.setattr(copied_tables, "EXCESS_MAX", 1e-9)
    put(table, range(5), "b")
    assert len(rows_of(alone, "s.slower")) == 10
    (seen,) = engine_of(alone).copies._seen.values()
    assert seen.copy is None and seen.again == 2e-9 and not seen.reads
