"""Lake tables in their catalog: created once, owned by one table id, gone when dropped."""

from __future__ import annotations

import dataclasses
import errno
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from requests import ReadTimeout
from sqlalchemy.exc import OperationalError
from tests.waiting import WAIT_SECONDS

import lakehead as lh
from lakehead.config import LakeConfig
from lakehead.errors import InvalidPropertyError, InvalidUriError, LakeStateError, StorageError, UnavailableError
from lakehead.iceberg import lake_catalog
from lakehead.iceberg.data_files import lake_arrow_schema
from lakehead.iceberg.lake_catalog import LakeCatalog, catalog_errors, open_metadata
from lakehead.types import SYSTEM_FIELDS, Schemas, TableDescriptor, TablePath, children, field_id


def test_a_new_table_is_what_other_engines_need(keyed: Any) -> None:
    table = keyed.load()
    assert table.metadata.format_version == 2
    assert [f.name for f in table.spec().fields] == ["__bucket"]
    (order,) = table.sort_order().fields
    assert table.schema().find_column_name(order.source_id) == "__offset"
    required = {f.name: f.required for f in table.schema().fields}
    assert required == {
        "id": True,
        "code": True,
        "v": False,
        "__bucket": False,
        "__offset": False,
        "__timestamp": False,
    }
    assert table.location().startswith("file:///")


def test_what_rewrites_files_in_another_order_finds_the_unsorted_one(keyed: Any) -> None:
    """Iceberg's own procedures note it for their files, and stop where a table does not list it."""
    for n in range(2):
        keyed.write(n, v=1)
        keyed.round()
        table = keyed.load()
        assert [o.order_id for o in table.metadata.sort_orders] == [1, 0]
        assert [len(o.fields) for o in table.metadata.sort_orders] == [1, 0] and table.sort_order().order_id == 1


def test_what_is_no_table_has_the_name(tmp_path: Path) -> None:
    """As a view that another engine made, which the catalog lists beside its tables."""
    desc = TableDescriptor(
        "t1", TablePath("db", "t"), Schemas.only(pa.schema([("n", pa.int64())])), (), (), (), 1, "iceberg"
    )
    catalog = LakeCatalog(LakeConfig(), str(tmp_path))
    made = catalog.create_table(desc)
    with closing(sqlite3.connect(tmp_path / "lake" / "catalog.db")) as db, db:
        db.execute("update iceberg_tables set iceberg_type = 'VIEW', metadata_location = 'file:///elsewhere'")
    with pytest.raises(LakeStateError, match=r"something called db\.t that is no table.*choose another name"):
        catalog.create_table(desc)
    assert made.name() == ("db", "t")


def test_a_lake_table_has_the_field_ids_of_its_table(tmp_path: Path) -> None:
    point = pa.struct([pa.field("x", pa.float64(), False), ("tags", pa.large_list(pa.struct([("tag", pa.string())])))])
    nested = pa.schema(
        [pa.field("id", pa.int8(), False), ("s", point), ("m", pa.map_(pa.string(), point)), ("z", point)]
    )
    desc = TableDescriptor("t1", TablePath("db", "t"), Schemas.only(nested), (), (), (), 1, "iceberg")
    table = LakeCatalog(LakeConfig(), str(tmp_path)).create_table(desc)
    lake = {f.name: f for f in lake_arrow_schema(table.schema())}
    assert ids_of(desc.schemas.current.fields) == ids_of(lake[f.name] for f in desc.schema)
    assert [field_id(lake[f.name]) for f in SYSTEM_FIELDS] == [5, 6, 7]


def ids_of(fields: Any) -> list[Any]:
    return [(field_id(f), ids_of(children(f.type))) for f in fields]


def test_another_process_opens_the_same_catalog(keyed: Any) -> None:
    code = (
        "import sys, json; from lakehead.iceberg.lake_catalog import LakeCatalog;"
        "print(LakeCatalog.open(sys.argv[1], json.loads(sys.argv[2])).iceberg.list_tables('db'))"
    )
    import json

    arguments = [keyed.catalog.name, json.dumps(keyed.catalog.properties)]
    out = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[('db', 't')]"
    reader = open_metadata(keyed.load().metadata_location, keyed.catalog.storage_properties(keyed.load()))
    assert reader.schema() == keyed.load().schema()


def test_a_table_belongs_to_one_table_id(keyed: Any, make_lake: Any) -> None:
    keyed.catalog.create_table(keyed.desc)
    with pytest.raises(LakeStateError, match="is not this table's"):
        make_lake(table_id="t2")
    other = dataclasses.replace(keyed.desc, table_id="t2")
    with pytest.raises(LakeStateError):
        keyed.catalog.load(other)
    with pytest.raises(LakeStateError):
        keyed.catalog.drop_table(other, purge=True)
    keyed.load()
    renamed = other.renamed(TablePath("db", "new"))
    with pytest.raises(LakeStateError, match=r"lake table db\.t is not this table's"):  # which is what is in the way
        keyed.catalog.load(renamed)


@pytest.mark.parametrize("purge", [True, False])
def test_what_a_drop_leaves_the_next_one_removes(keyed: Any, monkeypatch: pytest.MonkeyPatch, purge: bool) -> None:
    """Its catalog has let the table go, and its folder cannot be removed; or it was not to be."""
    keyed.write(1)
    keyed.round()
    if purge:
        with monkeypatch.context() as patched:
            patched.setattr(lake_catalog, "_REMOVAL_PAUSES_S", ())
            patched.setattr(lake_catalog, "locate_file", lambda io, location: (_Full(), location))
            with pytest.raises(StorageError, match="not empty"):
                keyed.catalog.drop_table(keyed.desc, purge=True)
    else:
        keyed.catalog.drop_table(keyed.desc, purge=False)
    assert keyed.data_files()
    keyed.catalog.drop_table(keyed.desc, purge=True)
    assert not keyed.data_files()
    keyed.catalog.drop_table(keyed.desc, purge=True)


class _Full:
    """A folder in which others write: so often it is not empty once all that was there is gone."""

    def __init__(self, times: int = 1000) -> None:
        self.times = times

    def delete_dir(self, path: str) -> None:
        self.times -= 1
        if self.times >= 0:
            raise OSError(errno.ENOTEMPTY, "directory not empty")


@pytest.mark.parametrize("times", range(5))
def test_files_that_a_round_writes_meanwhile_go_too(keyed: Any, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    folder = _Full(times)
    monkeypatch.setattr(lake_catalog, "_REMOVAL_PAUSES_S", (0.0,) * 4)
    monkeypatch.setattr(lake_catalog, "locate_file", lambda io, location: (folder, location))
    keyed.catalog.drop_table(keyed.desc, purge=True)
    assert folder.times == -1


@pytest.mark.parametrize("purge", [True, False])
def test_dropping_removes_the_table_and_with_purge_its_files(keyed: Any, purge: bool) -> None:
    keyed.write(1)
    keyed.round()
    leftover = next(Path(p) for p in keyed.data_files()).parent / "left-by-a-failed-commit.parquet"
    leftover.write_bytes(b"")
    keyed.catalog.drop_table(keyed.desc, purge=purge)
    keyed.catalog.drop_table(keyed.desc, purge=purge)
    assert bool(keyed.data_files()) is not purge
    with pytest.raises(LakeStateError, match="dropped"):
        keyed.load()
    again = dataclasses.replace(keyed.desc, table_id="t2")
    assert keyed.catalog.create_table(again).scan().to_arrow().num_rows == 0


def test_paths_that_addresses_cannot_hold_are_refused(tmp_path: Path) -> None:
    LakeCatalog(LakeConfig(), str(tmp_path / "with space")).iceberg.list_namespaces()
    with pytest.raises(InvalidUriError, match="'#'"):
        LakeCatalog(LakeConfig(), str(tmp_path / "a#b"))


def test_a_catalog_out_of_reach_is_said_to_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"no database")
    config = LakeConfig(catalog={"type": "sql", "uri": f"sqlite:///{file}", "warehouse": f"file://{tmp_path}"})
    with pytest.raises(StorageError) as e:
        LakeCatalog(config, "").iceberg.list_namespaces()
    assert e.value.message == (
        "the file of lake catalog 'lakehead' cannot be used (file is not a database): restore it, from a backup of the"
        " folder"
    )


@pytest.mark.parametrize(
    ("failure", "kind", "said"),
    [
        (sqlite3.OperationalError("database or disk is full"), StorageError, "free some room"),
        (sqlite3.OperationalError("attempt to write a readonly database"), StorageError, "let this user write"),
        (sqlite3.DatabaseError("database disk image is malformed"), StorageError, "restore it"),
        (sqlite3.OperationalError("database is locked"), UnavailableError, "cannot be reached"),
        (Exception('FATAL: password authentication failed for user "etl"'), UnavailableError, "does not let us in"),
        (Exception("connection refused"), UnavailableError, "cannot be reached"),
    ],
)
def test_what_is_wrong_with_a_catalog_is_said(failure: Exception, kind: type[lh.LakeheadError], said: str) -> None:
    with pytest.raises(kind, match=said) as e, catalog_errors("c"):
        raise OperationalError("select secret", {}, failure)
    assert type(e.value) is kind and "secret" not in str(e.value)


class Proxy(BaseHTTPRequestHandler):
    """Answers as what stands before a catalog does, once its first answers were the catalog's own."""

    own = 0
    says = 200

    def do_GET(self) -> None:
        """One answer, and the end of the connection."""
        page = b'{"defaults": {}, "overrides": {}}' if Proxy.own > 0 else b"<html>password</html>"
        self.send_response(200 if Proxy.own > 0 else Proxy.says)
        Proxy.own -= 1
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *given: Any) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("own", "says", "act"),
    [
        (0, 200, lambda c, desc: c.load(desc)),
        (1, 200, lambda c, desc: c.load(desc)),
        (1, 404, lambda c, desc: c.load(desc)),
        (1, 404, lambda c, desc: c.drop_table(desc, purge=True)),
        (1, 404, lambda c, desc: c.require_free(desc, besides=[])),
    ],
    ids=["from the start", "later", "has no such page", "drop", "free"],
)
def test_what_answers_as_no_catalog_does_is_out_of_reach(
    own: int, says: int, act: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Proxy, "own", own)
    monkeypatch.setattr(Proxy, "says", says)
    schemas = Schemas.only(pa.schema([("k", pa.int64())]))
    desc = TableDescriptor("t1", TablePath("db", "t"), schemas, (), (), (), 1, "iceberg")
    with HTTPServer(("127.0.0.1", 0), Proxy) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        config = LakeConfig(catalog={"type": "rest", "uri": f"http://127.0.0.1:{server.server_port}"})
        try:
            with pytest.raises(UnavailableError, match="such as a proxy") as e:
                act(LakeCatalog(config, ""), desc)
        finally:
            server.shutdown()
            thread.join()
    assert "password" not in str(e.value) and e.value.__cause__ is None


def test_a_drop_whose_answer_is_lost_is_done_all_the_same(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = keyed.catalog
    folder = Path(keyed.load().location().removeprefix("file://"))
    drop = catalog.iceberg.drop_table

    def lost(name: Any) -> None:
        drop(name)
        raise OperationalError("commit", None, ConnectionError("cut off"))

    monkeypatch.setattr(catalog.iceberg, "drop_table", lost)
    assert folder.exists()
    catalog.drop_table(keyed.desc, purge=True)
    assert not folder.exists()


@pytest.mark.parametrize("changelog", [False, True])
def test_what_a_lost_creation_left_in_the_lake_makes_room(
    changelog: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog made it, its answer was lost, and it was away when it was to be taken back."""
    make, away = LakeCatalog.create_table, UnavailableError("away")

    def lost(catalog: LakeCatalog, desc: TableDescriptor, *, owner: str = "") -> None:
        make(catalog, desc, owner=owner)
        if desc.path.table.endswith("$changelog") is changelog:
            raise away

    schema = pa.schema([("k", pa.int64())])
    keyed: Any = {"primary_key": ["k"], "lake": "iceberg", "lake_changelog": True}
    with lh.connect(tmp_path / "data") as con:
        with monkeypatch.context() as patched:
            patched.setattr(LakeCatalog, "create_table", lost)
            patched.setattr(LakeCatalog, "drop_table", lambda *_, **__: (_ for _ in ()).throw(away))
            with pytest.raises(UnavailableError):
                con.create_table("db.t", schema, **keyed)
        assert con.tables() == []
        table = con.create_table("db.t", schema, **keyed)
        table.upsert([{"k": 1}])
        assert con.tier("db.t").rows == 1
        assert len(list((tmp_path / "data/lake/db").iterdir())) == 2


def test_a_lake_table_that_is_anybodys_makes_no_room(tmp_path: Path) -> None:
    schema = pa.schema([("k", pa.int64())])
    with lh.connect(tmp_path / "data") as con:
        catalog = con.create_table("db.living", schema, lake="iceberg").lake.iceberg().catalog
        catalog.rename_table(("db", "living"), ("db", "foreign"))
        catalog.create_table(("db", "other"), schema)
        for name in ("foreign", "other"):
            with pytest.raises(LakeStateError, match="is not this table's"):
                con.create_table(f"db.{name}", schema, lake="iceberg")
        assert catalog.list_tables("db") == [("db", "foreign"), ("db", "other")]


def test_a_catalog_that_is_slow_about_one_table_keeps_no_other_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, asked, answered = LakeCatalog.load, threading.Event(), threading.Event()

    def slow(catalog: LakeCatalog, desc: TableDescriptor, name: str = "") -> Any:
        if desc.path.table == "slow":
            asked.set()
            assert answered.wait(WAIT_SECONDS)
        return load(catalog, desc, name)

    elsewhere = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/warehouse"}
    with lh.connect(tmp_path / "data", lake=LakeConfig(catalog=elsewhere)) as con:
        tables = [
            con.create_table(f"db.{n}", pa.schema([("k", pa.int64())]), lake="iceberg") for n in ("slow", "other")
        ]
        monkeypatch.setattr(LakeCatalog, "load", slow)
        counts: list[int] = []
        threads = [threading.Thread(target=lambda t=t: counts.append(t.scan().count())) for t in tables]
        threads[0].start()
        assert asked.wait(WAIT_SECONDS)
        threads[1].start()
        threads[1].join(5)
        stood_still = threads[1].is_alive()
        answered.set()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        assert counts == [0, 0] and not stood_still


def test_a_drop_that_a_proxy_has_answered_is_none(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = object.__new__(RestCatalog)
    monkeypatch.setattr(served, "load_table", keyed.catalog.iceberg.load_table, raising=False)
    monkeypatch.setattr(served, "purge_table", lambda name: None, raising=False)
    monkeypatch.setitem(vars(keyed.catalog), "iceberg", served)
    with pytest.raises(UnavailableError, match="has it still"):
        keyed.catalog.drop_table(keyed.desc, purge=True)


@pytest.mark.parametrize(
    ("failure", "said"),
    [(NotImplementedError("no"), "does not do what it was asked for"), (ReadTimeout("late"), "'c' cannot be reached")],
)
def test_what_a_catalog_cannot_do_or_answer_is_its_error(failure: Exception, said: str) -> None:
    with pytest.raises(UnavailableError, match=said) as e, catalog_errors("c"):
        raise failure
    assert type(e.value) is UnavailableError


@pytest.mark.parametrize(
    ("catalog", "why"),
    [
        ({"warehouse": "s3://b/w"}, "it has no 'uri'"),
        ({"type": "rest"}, "it has no 'uri'"),
        ({"type": "sql", "warehouse": "s3://b/w"}, "it has no 'uri'"),
        ({"type": "sql", "uri": "sqlite:///{}/c.db"}, "not told where files go: give it 'warehouse'"),
        ({"type": "sql", "uri": "sqlite:///{}/c.db", "warehouse": "ftp://h/w"}, "no such storage"),
    ],
)
def test_a_catalog_that_is_told_too_little_says_what_it_needs(
    catalog: dict[str, str], why: str, tmp_path: Path
) -> None:
    schemas = Schemas.only(pa.schema([("k", pa.int64())]))
    desc = TableDescriptor("t1", TablePath("db", "t"), schemas, (), (), (), 1, "iceberg")
    given = {name: value.format(tmp_path) for name, value in catalog.items()}
    with pytest.raises(InvalidPropertyError, match=why):
        LakeCatalog(LakeConfig(catalog=given), "").create_table(desc)
