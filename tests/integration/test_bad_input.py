"""Bad input: each kind has its own typed error that says what to do, and nothing is changed."""

from __future__ import annotations

import os
import socket
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import lakehead as lh

KV = pa.schema([("k", pa.int64()), ("v", pa.string())])
X = pa.schema([("x", pa.int32())])
AB = pa.schema([("a", pa.int32()), ("b", pa.int32())])


class Tables:
    def __init__(self, con: lh.Connection) -> None:
        self.con = con
        self.keyed = con.create_table("b.keyed", KV, primary_key="k")
        self.log = con.create_table("b.log", X)
        self.laked = con.create_table("b.laked", X, lake="iceberg")
        self.parts = con.create_table("b.parts", KV, primary_key=["k", "v"], partition_by="v")
        self.keyed.upsert([{"k": 1, "v": "one"}])
        self.log.append([{"x": 1}])


@pytest.fixture(scope="module")
def tables(con: lh.Connection) -> Iterator[Tables]:
    made = Tables(con)
    yield made
    # Whatever the cases tried: the tables are as they were.
    assert con.tables("b") == ["b.keyed", "b.laked", "b.log", "b.parts"]
    assert made.keyed.scan().to_arrow().to_pylist() == [{"k": 1, "v": "one"}]
    assert made.log.scan().to_arrow().to_pylist() == [{"x": 1}]
    assert [r["high_watermark"] for t in (made.keyed, made.log) for r in t.status().to_pylist()] == [1, 1]
    assert made.parts.status().num_rows == 0, "no partition was made"


def create(schema: object, **how: Any) -> Callable[[Tables], object]:
    return lambda t: t.con.create_table("b.new", schema, **how)


def at(t: Tables, offset: Any, bucket: Any = 0) -> object:
    return t.log.subscribe({lh.TabletId((), bucket): offset})


def until(t: Tables, offset: Any) -> object:
    return t.log.subscribe("earliest", stop={lh.TabletId((), 0): offset})


def add(t: Tables, name: Any) -> None:
    with t.log.alter() as alteration:
        alteration.add_column(name, pa.int64())


TWICE = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array(["a"])], names=["k", "k", "v"])
CASES: dict[str, tuple[Callable[[Tables], object], type[lh.LakeheadError], str]] = {
    "unknown table": (lambda t: t.con.table("b.keyd"), lh.TableNotFoundError, "did you mean 'b.keyed'"),
    "unknown database": (lambda t: t.con.table("zzz.qqq"), lh.TableNotFoundError, "no table zzz.qqq"),
    "bad table name": (lambda t: t.con.table("a.b.c"), lh.InvalidRequestError, "database.table"),
    "drop unknown": (lambda t: t.con.drop_table("b.nope"), lh.TableNotFoundError, "b.nope"),
    "exists": (lambda t: t.con.create_table("b.log", X), lh.TableExistsError, "if_not_exists"),
    "reserved column": (create(pa.schema([("__x", pa.int32())])), lh.InvalidSchemaError, "__"),
    "two columns of a name": (create(pa.schema([("x", pa.int32()), ("x", pa.int32())])), lh.InvalidSchemaError, "'x'"),
    "no columns": (create(pa.schema([])), lh.InvalidSchemaError, "at least one"),
    "zero buckets": (create(X, buckets=0), lh.InvalidSchemaError, "from 1 to"),
    "too many buckets": (create(X, buckets=10**6), lh.InvalidSchemaError, "from 1 to"),
    "buckets in words": (create(X, buckets="four"), lh.InvalidSchemaError, "whole number"),
    "unknown key": (create(X, primary_key="y"), lh.InvalidSchemaError, "'y'"),
    "float key": (create(pa.schema([("f", pa.float64())]), primary_key="f"), lh.InvalidSchemaError, "use an integer"),
    "nanoseconds": (create(pa.schema([("t", pa.time64("ns"))])), lh.InvalidSchemaError, "microseconds"),
    "partition outside the key": (create(AB, primary_key="a", partition_by="b"), lh.InvalidSchemaError, "primary_key"),
    "no schema": (create(5), lh.InvalidSchemaError, "pyarrow.Schema"),
    "types of Python": (create({"id": int}), lh.InvalidSchemaError, "pa.schema([('id', pa.int64())"),
    "a schema of names": (create(["id", "city"]), lh.InvalidSchemaError, "pa.schema([('id', pa.int64())"),
    "SQL of a variable": (lambda t: t.con.sql("from X"), lh.TableNotFoundError, "frames={'X': ...}"),
    "unknown property": (create(X, durabilty="os"), lh.InvalidPropertyError, "durability"),
    "bad property": (create(X, durability="maybe"), lh.InvalidPropertyError, "sync, os"),
    "bad duration": (create(X, freshness="soon"), lh.InvalidPropertyError, "30s"),
    "bad size": (create(X, segment_bytes="much"), lh.InvalidPropertyError, "64MiB"),
    "unknown lake": (create(X, lake="delta"), lh.InvalidPropertyError, "iceberg"),
    "unknown column": (lambda t: t.keyed.upsert([{"k": 2, "w": "a"}]), lh.ColumnNotFoundError, "'w'"),
    "missing column": (lambda t: t.keyed.upsert(pa.table({"v": ["b"]})), lh.SchemaMismatchError, "missing"),
    "wrong type": (lambda t: t.keyed.upsert(pa.table({"k": ["a"], "v": ["b"]})), lh.SchemaMismatchError, "'k'"),
    "value too large": (lambda t: t.log.append([{"x": 2**40}]), lh.SchemaMismatchError, "row 0"),
    "good and bad rows": (lambda t: t.log.append([{"x": 2}, {"x": "no"}]), lh.SchemaMismatchError, "row 1"),
    **{
        f"columns in a dict for {call}, as {type(values).__name__}": (
            lambda t, call=call, values=values: getattr(t.log if call == "append" else t.keyed, call)(
                {"x" if call == "append" else "k": values}
            ),
            lh.SchemaMismatchError,
            "A dict is one row: give a list of dicts",
        )
        for call in ("append", "upsert", "delete", "lookup")
        for values in ([1, 2], (1, 2), range(2), np.arange(2))
    },
    "no table at all": (lambda t: t.log.append(7), lh.SchemaMismatchError, "list of dicts"),
    "column given twice": (lambda t: t.keyed.upsert(TWICE), lh.SchemaMismatchError, "twice"),
    "system column": (lambda t: t.log.append([{"x": 1, "__offset": 3}]), lh.SchemaMismatchError, "reserved"),
    "null key": (lambda t: t.keyed.upsert([{"k": 2, "v": "a"}, {"k": None, "v": "b"}]), lh.NullKeyError, "row 1"),
    "null partition": (lambda t: t.parts.upsert([{"k": 1, "v": None}]), lh.NullKeyError, "'v'"),
    "null deleted key": (lambda t: t.keyed.delete([{"k": None}]), lh.NullKeyError, "'k'"),
    "no key": (lambda t: t.keyed.upsert(pa.table({"v": ["b"]})), lh.SchemaMismatchError, "k"),
    "partial without key": (lambda t: t.keyed.upsert([{"k": 1, "v": "a"}], columns=["v"]), lh.SchemaMismatchError, "k"),
    "partial of nothing": (lambda t: t.keyed.upsert([{"k": 1}], columns=["k", "v"]), lh.ColumnNotFoundError, "'v'"),
    "append to keyed": (lambda t: t.keyed.append([{"k": 2, "v": "a"}]), lh.WrongTableKindError, "upsert"),
    "upsert to log": (lambda t: t.log.upsert([{"x": 2}]), lh.WrongTableKindError, "append"),
    "delete from log": (lambda t: t.log.delete([{"x": 1}]), lh.WrongTableKindError, "log_ttl"),
    "lookup in log": (lambda t: t.log.lookup([1]), lh.WrongTableKindError, "scan"),
    "lookup by another column": (lambda t: t.keyed.lookup(pa.table({"v": ["a"]})), lh.ColumnNotFoundError, "'v'"),
    "lookup by part of the key": (lambda t: t.parts.lookup([{"k": 1}]), lh.SchemaMismatchError, "'v'"),
    "lookup of another type": (lambda t: t.keyed.lookup(["one"]), lh.SchemaMismatchError, "'k'"),
    "get with a short key": (lambda t: t.parts.get((1,)), lh.SchemaMismatchError, "tuple of 1"),
    "prefix lookup": (lambda t: t.keyed.prefix_lookup([1]), lh.InvalidRequestError, "bucket_key"),
    "scan of an unknown column": (lambda t: t.keyed.scan(columns=["nope"]), lh.ColumnNotFoundError, "'nope'"),
    "scan of a column twice": (lambda t: t.keyed.scan(columns=["k", "k"]), lh.InvalidRequestError, "twice"),
    "filter on an unknown column": (lambda t: t.keyed.scan(where="nope > 3"), lh.LakeheadError, "nope"),
    "filter that is no SQL": (lambda t: t.keyed.scan(where="k >"), lh.InvalidPredicateError, ""),
    "negative limit": (lambda t: t.keyed.scan(limit=-1), lh.InvalidRequestError, "limit"),
    "limit of a truth": (lambda t: t.keyed.scan(limit=True), lh.InvalidRequestError, "limit=True"),
    "unknown tier": (lambda t: t.keyed.scan(tier="cold"), lh.InvalidRequestError, "'union'"),  # type: ignore[arg-type]
    "lake of a table without": (lambda t: t.keyed.scan(tier="lake"), lh.NoLakeError, "lake='iceberg'"),
    "snapshot of a table without": (lambda t: t.keyed.scan(snapshot=5), lh.NoLakeError, "lake='iceberg'"),
    "tier a table without": (lambda t: t.con.tier("b.log"), lh.NoLakeError, "lake='iceberg'"),
    "subscribe somewhere": (lambda t: t.log.subscribe("midway"), lh.InvalidRequestError, "'latest'"),  # type: ignore[arg-type]
    "subscribe past the end": (lambda t: t.log.subscribe({lh.TabletId((), 0): 9}), lh.OffsetOutOfRangeError, "holds"),
    "subscribe before the start": (lambda t: at(t, -1), lh.OffsetOutOfRangeError, "begin with 0"),
    "subscribe at a fraction": (lambda t: at(t, 0.9), lh.InvalidRequestError, "0.9 is no whole number"),
    "subscribe at a truth": (lambda t: at(t, True), lh.InvalidRequestError, "True is no whole number"),
    "subscribe at a text": (lambda t: at(t, "0"), lh.InvalidRequestError, "'0' is no whole number"),
    "subscribe until a fraction": (lambda t: until(t, 0.9), lh.InvalidRequestError, "0.9 is no whole number"),
    "subscribe to no tablet": (lambda t: t.log.subscribe({"a": 1}), lh.InvalidRequestError, "TabletId"),  # type: ignore[dict-item]
    "subscribe until whenever": (lambda t: t.log.subscribe(stop="then"), lh.InvalidRequestError, "'now'"),  # type: ignore[arg-type]
    "writer of the wrong kind": (lambda t: t.log.writer().delete([1]), lh.WrongTableKindError, "append"),
    "subscribe at infinity": (lambda t: at(t, float("inf")), lh.InvalidRequestError, "TabletId"),
    "subscribe until infinity": (lambda t: until(t, float("inf")), lh.InvalidRequestError, "TabletId"),
    "subscribe far out": (lambda t: at(t, 1 << 70), lh.InvalidRequestError, "bucket 0"),
    "subscribe until far out": (lambda t: until(t, 1 << 63), lh.InvalidRequestError, "bucket 0"),
    "subscribe to a partition that cannot be": (
        lambda t: t.log.subscribe({lh.TabletId(("a",), 0): 0}),
        lh.InvalidRequestError,
        "no partition by nothing",
    ),
    "subscribe to a bucket in words": (lambda t: at(t, 0, bucket="0"), lh.InvalidRequestError, "must map TabletId"),
    "scan of a number": (lambda t: t.log.scan(columns=5), lh.InvalidRequestError, "list of names"),  # type: ignore[arg-type]
    "scan of lists": (lambda t: t.log.scan(columns=[[]]), lh.InvalidRequestError, "no name"),  # type: ignore[list-item]
    "a database that is no text": (lambda t: t.con.tables("\udc80"), lh.InvalidRequestError, "UTF-8"),
    "a number of a database": (lambda t: t.con.tables(10**30), lh.InvalidRequestError, "UTF-8"),  # type: ignore[arg-type]
    "a column that is no text": (lambda t: add(t, "\udc80"), lh.InvalidSchemaError, "UTF-8"),
    "a column that is a number": (lambda t: add(t, 5), lh.InvalidSchemaError, "UTF-8"),
    "expiry that keeps words": (lambda t: t.laked.lake.expire(keep="5"), lh.InvalidRequestError, "keep='5'"),  # type: ignore[arg-type]
    "expiry of what is older": (lambda t: t.laked.lake.expire(10**30), lh.InvalidPropertyError, "1000 years"),
    "orphans that are older": (lambda t: t.laked.lake.remove_orphans(1e306), lh.InvalidPropertyError, "1000 years"),
    "a long time": (create(X, freshness="9" * 400 + "d"), lh.InvalidPropertyError, "1000 years"),
    "lakes": (create(X, lake=["iceberg"]), lh.InvalidPropertyError, "'iceberg', or None"),
    "a key that is a number": (create(X, primary_key=5), lh.InvalidSchemaError, "list of names"),
    "connect to nothing": (lambda t: lh.connect(""), lh.InvalidUriError, "folder"),
    "garbage uri": (lambda t: lh.connect("lakehead://256.0.0.1:x"), lh.InvalidUriError, "lakehead://"),
    "another scheme": (lambda t: lh.connect("http://127.0.0.1:80"), lh.InvalidUriError, "lakehead://"),
    **{
        f"{name} for a folder": (
            lambda t, name=name: lh.connect("./data", **{name: "x"}),
            lh.InvalidRequestError,
            f"{name}= are for the address",
        )
        for name in ("token", "tls_ca", "tls_cert", "tls_key")
    },
    "wrong token": (lambda t: lh.connect(t.con.uri, token="wrong"), lh.AuthenticationError, "token"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_with_its_own_error(tables: Tables, case: str) -> None:
    call, error, says = CASES[case]
    with pytest.raises(error) as raised:
        call(tables)
    assert says in str(raised.value)
    assert isinstance(raised.value.code, int) and not raised.value.retryable
    if error is not lh.LakeheadError:
        assert type(raised.value) is error


def test_refused_alike_by_a_server(tables: Tables) -> None:
    """What is refused here is not left to an encoder of requests."""
    with lh.connect(tables.con.uri) as con:
        log = con.table("b.log")
        for start in ({lh.TabletId((), 0): 1 << 70}, {lh.TabletId((), 0): float("inf")}):
            with pytest.raises(lh.InvalidRequestError):
                log.subscribe(start)  # type: ignore[arg-type]
        with pytest.raises(lh.InvalidRequestError):
            con.tables("\udc80")
        for limit in (1 << 63, 1 << 70):
            assert log.scan(limit=limit).to_arrow().num_rows == 1


def test_a_dead_server(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(lh.UnavailableError, match="is it running") as raised:
            lh.connect(f"lakehead://127.0.0.1:{port}")
    assert raised.value.retryable


def test_a_folder_of_a_newer_format(tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con:
        con.create_table("t", X).append([{"x": 1}])
    with closing(sqlite3.connect(tmp_path / "metadata.db")) as db, db:
        db.execute("update meta set value = '999' where name = 'format'")
    db.close()
    for _ in range(2):
        with pytest.raises(lh.UnsupportedFormatError, match="upgrade Lakehead"):
            lh.connect(tmp_path)
    with closing(sqlite3.connect(tmp_path / "metadata.db")) as db, db:
        db.execute("update meta set value = '1' where name = 'format'")
    db.close()
    with lh.connect(tmp_path) as con:
        assert con.table("t").scan().count() == 1


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    with pytest.raises(lh.StorageError, match="file"):
        lh.connect(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"kept"


_NOT_ALLOWED = """
import os, sys
import lakehead as lh
import lakehead.api.connection, lakehead.api.embedded, lakehead.server.host, lakehead.iceberg.catalog_state
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
try:
    lh.connect(sys.argv[1])
except lh.StorageError as e:
    print(e)
"""


def test_a_folder_without_permission(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir()
    for parent in [tmp_path, *tmp_path.parents]:
        if parent.owner() == folder.owner() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH | stat.S_IXGRP)
    folder.chmod(0o555)
    run = [sys.executable, "-c", _NOT_ALLOWED]
    for target in (folder, folder / "inside"):
        out = subprocess.run([*run, str(target)], capture_output=True, text=True, cwd="/", check=False)
        assert "permission denied: use a folder that this user may write" in out.stdout, out.stderr
    assert os.listdir(folder) == []


def test_a_damaged_table_is_refused_and_can_be_dropped(tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con:
        con.create_table("t", X).append([{"x": 1}])
        con.create_table("other", X).append([{"x": 2}])
    [log] = (tmp_path / "tables").glob("default.t-*/partition-*/bucket-0/*.log")
    data = bytearray(log.read_bytes())
    data[100] ^= 1
    log.write_bytes(bytes(data))
    with lh.connect(tmp_path) as con:
        for _ in range(2):
            with pytest.raises(lh.CorruptionError, match="byte 0") as raised:
                con.table("t").scan()
            assert raised.value.context["path"] == str(log)
        assert con.table("other").scan().count() == 1
        con.drop_table("t")
        assert con.tables() == ["default.other"] and not log.exists()


@pytest.mark.parametrize("name", ["information_schema", "pg_catalog", "PG_Catalog", "memory", "system", "temp"])
def test_databases_of_sql_are_its_own(tmp_path: Path, name: str) -> None:
    with lh.connect(tmp_path) as con:
        con.create_table("a.b", pa.schema([("k", pa.int64())]))
        with pytest.raises(lh.InvalidRequestError, match="call the database of 't' otherwise"):
            con.create_table(f"{name}.t", pa.schema([("k", pa.int64())]))
        with pytest.raises(lh.InvalidRequestError, match="something of its own"):
            con.rename_table("a.b", f"{name}.b")
        assert con.tables() == ["a.b"] and con.sql("select count(*) from a.b").fetchone() == (0,)
        assert con.sql("show all tables").fetchall()


def test_a_database_of_before_that_sql_has_for_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakehead.server.definitions._SQL_DATABASES", frozenset())
    with lh.connect(tmp_path) as con:
        table = con.create_table("pg_catalog.t", pa.schema([("k", pa.int64())]))
        for statement in ("show all tables", "select * from pg_catalog.t"):
            with pytest.raises(lh.SqlError):
                con.sql(statement).fetchall()
        assert table.scan().count() == 0
        con.rename_table("pg_catalog.t", "a.t")
        assert con.sql("select count(*) from a.t").fetchone() == (0,)


def test_a_statement_that_is_no_text(tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con, pytest.raises(lh.SqlError, match="a statement is text"):
        con.sql(123)  # type: ignore[arg-type]


def test_a_misspelt_table_is_told_the_nearest(tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con:
        con.create_table("shop.orders", pa.schema([("id", pa.int64())]))
        for use in (con.table, con.drop_table, lambda name: con.rename_table(name, "shop.other")):
            with pytest.raises(lh.TableNotFoundError, match=r"did you mean 'shop\.orders'"):
                use("shop.order")
        assert con.tables() == ["shop.orders"]


def test_the_package_runs_as_the_command() -> None:
    told = subprocess.run([sys.executable, "-m", "lakehead", "--version"], capture_output=True, text=True, check=True)
    assert told.stdout == f"lakehead {lh.__version__}\n"
