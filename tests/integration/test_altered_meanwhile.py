"""A table that is altered in the middle of a call: each call is of one definition, whatever other threads find out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.api import table as api_table
from lakehead.api.table import handle_of
from lakehead.client.table import TableHandle

CHANGES: dict[str, Callable[[Any], object]] = {
    "add": lambda a: a.add_column("n", pa.int64(), default=9),
    "widen": lambda a: a.widen_column("x", pa.int64()),
    "rename": lambda a: a.rename_column("x", "y"),
    "drop": lambda a: a.drop_column("x"),
    "drop and add": lambda a: (a.drop_column("x"), a.add_column("x", pa.int32(), default=7)),
    "swap": lambda a: (a.rename_column("x", "z"), a.rename_column("w", "x"), a.rename_column("z", "w")),
}
AFTER = {
    "add": {"id": 1, "x": 5, "w": 6, "n": 9},
    "widen": {"id": 1, "x": 5, "w": 6},
    "rename": {"id": 1, "y": 5, "w": 6},
    "drop": {"id": 1, "w": 6},
    "drop and add": {"id": 1, "w": 6, "x": 7},
    "swap": {"id": 1, "w": 5, "x": 6},
}
SCHEMA = pa.schema([("id", pa.int64()), ("x", pa.int32()), ("w", pa.int32())])


class Meanwhile:
    """Alters a table when it is told to, once, and has another thread use the same `Table` then."""

    def __init__(self, table: lh.Table, change: Callable[[Any], object], other: lh.Connection) -> None:
        self._table, self._change, self._other = table, change, other
        self._done = False

    def __call__(self) -> None:
        if self._done:
            return
        self._done = True
        with self._other.table(self._table.name).alter() as altering:
            self._change(altering)
        beside = threading.Thread(target=lambda: self._table.scan().count())
        beside.start()
        beside.join()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("keyed", [False, True], ids=["log", "keyed"])
def test_rows_are_written_as_they_were_given(
    con: lh.Connection, name: str, keyed: bool, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lh.connect(con.uri) as other:
        table = con.create_table(name, SCHEMA, primary_key="id" if keyed else None)
        meanwhile = Meanwhile(table, CHANGES[change], other)
        verb = "rows_for_upsert" if keyed else "rows_for_append"
        conform = getattr(api_table, verb)

        def conformed(*given: Any) -> pa.Table:
            rows = conform(*given)
            meanwhile()
            return rows

        monkeypatch.setattr(api_table, verb, conformed)
        (table.upsert if keyed else table.append)([{"id": 1, "x": 5, "w": 6}])
        assert con.table(name).scan().to_arrow().to_pylist() == [AFTER[change]]


def test_small_appends_under_two_definitions_go_apart(
    con: lh.Connection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = con.create_table(name, SCHEMA)
    old = handle_of(table)
    conform, both, go = api_table.rows_for_append, threading.Barrier(3), threading.Event()

    def conformed(desc: Any, data: Any) -> pa.Table:
        rows = conform(desc, data)
        if data[0]["id"] < 3:
            both.wait()
            go.wait()
        return rows

    monkeypatch.setattr(api_table, "rows_for_append", conformed)
    failed: list[BaseException] = []

    def append(number: int) -> None:
        try:
            table.append([{"id": number, "x": number, "w": number}])
        except BaseException as e:
            failed.append(e)

    early = [threading.Thread(target=append, args=(n,)) for n in (1, 2)]
    for thread in early:
        thread.start()
    both.wait()
    with lh.connect(con.uri) as other, other.table(name).alter() as altering:
        altering.add_column("n", pa.int64())
    table.scan(columns=["id"], where="n is null").count()  # finds it out for all threads
    assert handle_of(table) is not old
    late = [threading.Thread(target=append, args=(n,)) for n in (10, 11, 12)]
    for thread in late:
        thread.start()
    go.set()
    for thread in [*early, *late]:
        thread.join()
    assert not failed
    assert sorted(table.scan().to_arrow()["id"].to_pylist()) == [1, 2, 10, 11, 12]


def test_who_hears_of_a_definition_late_puts_no_older_one_back(
    con: lh.Connection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lh.connect(con.uri) as other:
        table = con.create_table(name, SCHEMA, primary_key="id")

        def alter(column: str) -> None:
            with other.table(name).alter() as altering:
                altering.add_column(column, pa.int64())

        alter("a")
        told, go, now = threading.Event(), threading.Event(), TableHandle.now

        def told_late(handle: TableHandle) -> TableHandle:
            found = now(handle)
            if threading.current_thread().name == "late" and not told.is_set():
                told.set()
                go.wait()
            return found

        monkeypatch.setattr(TableHandle, "now", told_late)
        late = threading.Thread(target=lambda: table.scan().count(), name="late")
        late.start()
        told.wait()
        alter("b")
        assert table.scan().schema.names[-1] == "b"
        newest = handle_of(table)
        go.set()
        late.join()
        assert handle_of(table) is newest


@pytest.mark.parametrize("keyed", [False, True], ids=["log", "keyed"])
def test_sql_reads_a_table_that_is_altered_as_it_is_pinned(
    con: lh.Connection, name: str, keyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lh.connect(con.uri) as other:
        table = con.create_table(name, SCHEMA, primary_key="id" if keyed else None)
        (table.upsert if keyed else table.append)([{"id": 1, "x": 5, "w": 6}])
        pin, meanwhile = api_table.pin_together, Meanwhile(table, CHANGES["rename"], other)

        def pinned(handles: Any) -> Any:
            meanwhile()
            return pin(handles)

        monkeypatch.setattr(api_table, "pin_together", pinned)
        assert con.sql(f"select * from {name}").fetchall() == [(1, 5, 6)]
        assert con.sql(f"select y from {name}").fetchall() == [(5,)]
