"""Connections and what is opened through them: not copied, not sent elsewhere, and gone with their last user."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import lakehead as lh

if TYPE_CHECKING:
    from tests.integration.conftest import ServerProcess

SCHEMA = pa.schema([("a", pa.int64()), ("b", pa.string())])
HANDLES: dict[str, Callable[[lh.Connection], Any]] = {
    "connection": lambda con: con,
    "table": lambda con: con.table("a.t"),
    "lake": lambda con: con.table("a.t").lake,
    "scan": lambda con: con.table("a.t").scan(),
    "subscription": lambda con: con.table("a.t").subscribe(start="earliest", stop="now"),
    "writer": lambda con: con.table("a.t").writer(),
    "relation": lambda con: con.sql("select * from a.t"),
}


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as con:
        con.create_table("a.t", SCHEMA, lake="iceberg").append([{"a": 1, "b": "x"}])
        yield con


@pytest.mark.parametrize("kind", HANDLES)
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_handles_are_not_copied(con: lh.Connection, kind: str, how: Callable[[object], object]) -> None:
    handle = HANDLES[kind](con)
    with pytest.raises(lh.InvalidRequestError, match=r"lh\.connect"):
        how(handle)
    if kind == "subscription":
        assert sum(batch.rows.num_rows for batch in handle) == 1


@pytest.mark.parametrize("name", ["create", "to_table", "create_view", "to_view", "insert_into"])
def test_a_relation_makes_no_tables(con: lh.Connection, name: str) -> None:
    relation = con.sql("select a from a.t")
    for target in ("mine", "a.t"):
        with pytest.raises(lh.SqlError, match=r"table\.append\(relation\)"):
            getattr(relation, name)(target)
    con.table("a.t").append(relation)
    assert con.table("a.t").scan().count() == 2


def test_a_relation_of_an_unrestricted_statement_makes_tables_elsewhere(con: lh.Connection, tmp_path: Path) -> None:
    con.sql(f"attach '{tmp_path}/other.db' as other", unrestricted=True)
    con.sql("select a from a.t", unrestricted=True).create("other.mine")
    assert con.sql("select * from other.mine", unrestricted=True).fetchall() == [(1,)]


@pytest.mark.parametrize("rows", [[{}], [{}, {}], {}, [{}, {"a": 5}], iter([{}])])
def test_a_row_of_which_nothing_is_given_is_a_row(con: lh.Connection, rows: Any) -> None:
    table, count = con.table("a.t"), 1 if isinstance(rows, dict) or not isinstance(rows, list) else len(rows)
    assert table.append(rows).rows == count
    with table.alter() as a:
        a.add_column("n", pa.int64(), default=7)
    with table.writer() as writer:
        writer.append([{}] * count)
    assert table.scan().count() == 1 + 2 * count
    assert table.scan(where="n = 7").count() == 1 + 2 * count, "the default of rows before, too"


def test_rows_without_a_column_are_refused(con: lh.Connection) -> None:
    pandas = pytest.importorskip("pandas")
    for rows in (pandas.DataFrame(index=[1, 2, 3]), pa.table({"z": [1, 2]}).select([])):
        with pytest.raises(lh.SchemaMismatchError, match="no column"):
            con.table("a.t").append(rows)


def test_connections_that_are_let_go_of_leave_no_thread(
    con: lh.Connection, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    for _ in range(20):
        assert lh.connect(tmp_path / "data").table("a.t").scan().count() == 1
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "lakehead-leases"])


def test_connections_to_another_process_leave_no_descriptor(
    server: ServerProcess, wait_until: Callable[..., None]
) -> None:
    """Without a collector, which a process that is idle never runs."""
    with server.connect() as con:
        con.create_table("a.t", SCHEMA).append([{"a": 1, "b": "x"}])
        gc.collect()
        gc.disable()
        try:
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(40):
                assert server.connect().table("a.t").scan().count() == 1
            wait_until(lambda: len(os.listdir("/proc/self/fd")) < before + 15)
        finally:
            gc.enable()
