"""A table that is altered in the middle of a call: each call is of one definition, whatever other threads find out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import lakehead as lh
from lakehead.api import table as api_table
from lakehead.api.table import handle_of
from lakehead.api.tiering import ConnectionTables
from lakehead.client.remote_log import RemoteLog
from lakehead.client.table import TableHandle
from lakehead.errors import ColumnNotFoundError, SchemaChangedError
from lakehead.tiering import round as tiering_round

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


NAMED: dict[str, dict[str, Any]] = {
    "columns": {"columns": ["x"]},
    "where": {"columns": ["id"], "where": "X < 50"},
    "an expression": {"columns": ["id"], "where": pc.field("x") < 50},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize("keyed", [False, True], ids=["log", "keyed"])
def test_a_subscription_never_goes_on_with_another_column(
    con: lh.Connection, name: str, keyed: bool, named: str, change: str
) -> None:
    table = con.create_table(name, SCHEMA, primary_key="id" if keyed else None)
    put = table.upsert if keyed else table.append
    put([{"id": 1, "x": 5, "w": 6}])
    with table.subscribe("earliest", **NAMED[named]) as subscription:
        assert next(subscription).rows.num_rows == 1
        with con.table(name).alter() as altering:
            CHANGES[change](altering)
        put([{c: 2 for c in table.schema.names}])
        if change in ("add", "widen"):
            assert next(subscription).rows.num_rows == 1
        else:
            with pytest.raises(ColumnNotFoundError, match="'x'"):
                next(subscription)


@pytest.mark.parametrize("where", ["place.x < 50", pc.field("place", "x") < 50], ids=["text", "expression"])
def test_a_subscription_never_goes_on_with_another_field(con: lh.Connection, name: str, where: Any) -> None:
    place = pa.struct([("x", pa.int32()), ("w", pa.int32())])
    table = con.create_table(name, pa.schema([("id", pa.int64()), ("place", place)]))
    table.append([{"id": 1, "place": {"x": 5, "w": 6}}])
    with table.subscribe("earliest", columns=["id"], where=where) as subscription:
        assert next(subscription).rows.num_rows == 1
        with con.table(name).alter() as a:
            a.rename_column("place.x", "z").rename_column("place.w", "x")
        con.table(name).append([{"id": 2, "place": {"z": 5, "x": 6}}])
        with pytest.raises(ColumnNotFoundError, match=r"'place\.x'"):
            next(subscription)


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


MOMENTS: dict[str, tuple[object, str]] = {
    "before the lake is opened": (TableHandle, "lake"),
    "before it is planned": (RemoteLog, "watermarks"),
    "before the log is read": (RemoteLog, "read"),
    "before the commit": (tiering_round, "commit_round"),
}


def altered_at(
    monkeypatch: pytest.MonkeyPatch, moment: tuple[object, str], table: lh.Table, con: lh.Connection, *, times: int = 1
) -> list[str]:
    """Have a table altered whenever that moment comes, so often at most; returns the columns that it got."""
    whose, what = moment
    call, added = getattr(whose, what), list[str]()

    def then(*given: Any, **more: Any) -> Any:
        if len(added) < times:
            added.append(f"n{len(added)}")
            with con.table(table.name).alter() as altering:
                altering.add_column(added[-1], pa.int64())
        return call(*given, **more)

    monkeypatch.setattr(whose, what, then)
    return added


def lake_table(con: lh.Connection, name: str) -> lh.Table:
    return con.create_table(
        name, SCHEMA, primary_key="id", lake="iceberg", lake_changelog=True, freshness="1h", auto_maintenance=False
    )


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_round_of_the_service_goes_on(
    con: lh.Connection, name: str, moment: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lh.connect(con.uri) as other:
        table = lake_table(con, name)
        tables = ConnectionTables(con, [name])
        tables.look(frozenset(), frozenset())
        table.upsert([{"id": 1, "x": 5, "w": 6}])
        added = altered_at(monkeypatch, MOMENTS[moment], table, other, times=times)
        result = tables.run_round(handle_of(table).desc.table_id, 1000)
        assert len(added) == times and (result.rows, list(result.offsets.values())) == (1, [1])
        assert con.table(name).scan(tier="lake").to_arrow().to_pylist() == [
            {"id": 1, "x": 5, "w": 6, **dict.fromkeys(added)}
        ]


def test_maintenance_by_the_service_goes_on(con: lh.Connection, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with lh.connect(con.uri) as other:
        table = lake_table(con, name)
        tables = ConnectionTables(con, [name])
        tables.look(frozenset(), frozenset())
        added = altered_at(monkeypatch, (TableHandle, "lake"), table, other, times=3)
        assert tables.maintain(handle_of(table).desc.table_id) is False
        assert len(added) == 3


def test_a_round_that_is_always_altered_ends(con: lh.Connection, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with lh.connect(con.uri) as other:
        table = lake_table(con, name)
        tables = ConnectionTables(con, [name])
        tables.look(frozenset(), frozenset())
        altered_at(monkeypatch, (TableHandle, "lake"), table, other, times=1000)
        with pytest.raises(SchemaChangedError):
            tables.run_round(handle_of(table).desc.table_id, 1000)


LAKE_CALLS: dict[str, Callable[[Any], object]] = {
    "metadata_location": lambda lake: lake.metadata_location,
    "iceberg": lambda lake: lake.iceberg(),
    "offsets": lambda lake: lake.offsets(),
    "snapshots": lambda lake: lake.snapshots(),
    "files": lambda lake: lake.files(),
    "tier": lambda lake: lake.tier(),
    "compact": lambda lake: lake.compact(),
    "expire": lambda lake: lake.expire(),
    "remove_orphans": lambda lake: lake.remove_orphans(),
}


@pytest.mark.parametrize("changelog", [False, True], ids=["table", "changelog"])
@pytest.mark.parametrize("call", LAKE_CALLS)
def test_calls_of_the_lake_go_on(
    con: lh.Connection, name: str, call: str, changelog: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lh.connect(con.uri) as other:
        table = lake_table(con, name)
        table.upsert([{"id": 1, "x": 5, "w": 6}])
        con.tier(name)
        lake = table.lake.changelog if changelog else table.lake
        added = altered_at(monkeypatch, (TableHandle, "lake"), table, other, times=2)
        LAKE_CALLS[call](lake)
        assert len(added) == 2
