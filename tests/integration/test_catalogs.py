"""Lakes on PostgreSQL, on a REST catalog and on S3, from servers, clients and Spark: real servers of each."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psycopg
import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.io import load_file_io
from tests.cut_wire import CutWire
from tests.integration.conftest import ServerProcess
from tests.lake_servers import KEY_ID, SECRET, STORE_SECRET, LakeServer, rest_properties
from tests.waiting import WAIT_SECONDS

import lakehead as lh
from lakehead.api.backup import back_up, restore
from lakehead.api.table import handle_of
from lakehead.iceberg import open_catalog
from lakehead.iceberg.file_io import locate_file
from lakehead.iceberg.lake_catalog import LakeCatalog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = pa.schema([("k", pa.int64()), ("city", pa.string()), ("v", pa.string())])
LakeOn = Callable[[str], lh.LakeConfig]


def row(k: int, v: str) -> dict[str, Any]:
    return {"k": k, "city": "ON"[k % 2], "v": v}


class Model:
    """One keyed table, and what it must hold."""

    def __init__(self, con: lh.Connection, name: str) -> None:
        self.con, self.name = con, name
        self.rows: dict[int, dict[str, Any]] = {}
        how: dict[str, Any] = {"partition_by": ["city"], "buckets": 2, "lake": "iceberg", "lake_changelog": True}
        self.table = con.create_table(name, SCHEMA, primary_key=["city", "k"], **how)

    def put(self, numbers: range, v: str) -> None:
        rows = [row(k, v) for k in numbers]
        self.table.upsert(rows)
        self.rows |= {r["k"]: r for r in rows}

    def delete(self, *numbers: int) -> None:
        self.table.delete([row(k, "") for k in numbers])
        for k in numbers:
            del self.rows[k]

    def rounds(self, count: int) -> None:
        for n in range(count):
            self.put(range(10 * n, 10 * n + 15), f"v{n}")
            self.con.tier(self.name)

    def check(self) -> None:
        rows = self.table.scan().to_arrow().to_pylist()
        assert sorted(rows, key=lambda r: r["k"]) == [self.rows[k] for k in sorted(self.rows)]
        left: dict[int, dict[str, Any]] = {}
        tiered = self.table.lake.changelog.iceberg().scan().to_arrow().sort_by("__offset").to_pylist()
        for r in tiered:
            if r["__change_type"] in ("+I", "+U"):
                left[r["k"]] = {c: r[c] for c in self.table.schema.names}
            elif r["__change_type"] == "-D":
                del left[r["k"]]
        lake = self.table.scan(tier="lake").to_arrow().to_pylist()
        assert sorted(lake, key=lambda r: r["k"]) == [left[k] for k in sorted(left)]


@pytest.fixture
def database_name(request: pytest.FixtureRequest) -> str:
    return f"db{abs(hash(request.node.nodeid)):x}"


@pytest.fixture(params=["postgres-s3", "rest"])
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def served(kind: str, lake_on: LakeOn, tmp_path: Path) -> Iterator[tuple[lh.Connection, lh.LakeConfig]]:
    """A connection to a server in another process, whose lake is of the kind."""
    config = lake_on(kind)
    server = ServerProcess(tmp_path / "data", lake=config)
    with server.connect() as con:
        yield con, config
    server.kill()


def test_a_table_has_its_whole_life_there(
    served: tuple[lh.Connection, lh.LakeConfig], database_name: str, kind: str
) -> None:
    con, config = served
    t = Model(con, f"{database_name}.t")
    t.rounds(5)
    t.delete(3, 4)
    con.tier(t.name)
    t.put(range(50, 70), "hot")
    t.check()
    first = t.table.lake.snapshots()["snapshot_id"][0].as_py()
    assert t.table.scan(snapshot=first).count() == 15
    assert t.table.lake.compact().files_after == 4
    assert t.table.lake.expire(older_than="0s", keep=1).snapshots == 6
    t.check()
    table = load_catalog(config.name, **config.catalog).load_table((database_name, "t"))
    io = table.io
    assert table.scan().count() == 53
    with io.new_output(f"{table.location()}/data/left.parquet").create() as out:
        out.write(b"")
    assert t.table.lake.remove_orphans(older_than="1h").num_rows == 0
    (orphan,) = t.table.lake.remove_orphans(older_than="0s", dry_run=True).to_pylist()
    assert orphan["path"].endswith("left.parquet")
    assert t.table.lake.remove_orphans(older_than="0s").num_rows == 1
    with t.table.alter() as a:
        a.add_column("n", pa.int32())
        a.rename_column("v", "value")
    t.table = con.table(t.name)
    t.rows = {k: {"k": k, "city": r["city"], "value": r["v"], "n": None} for k, r in t.rows.items()}
    t.table.upsert([{"k": 1, "city": "N", "value": "new", "n": 7}])
    t.rows[1] |= {"value": "new", "n": 7}
    con.tier(t.name)
    t.check()
    assert con.sql(f"select sum(n), count(*) from {t.name} where value = 'new'").fetchall() == [(7, 1)]
    t.table, t.name = con.rename_table(t.name, f"{database_name}.moved"), f"{database_name}.moved"
    t.table.upsert([{"k": 2, "city": "O", "value": "newer"}])
    t.rows[2] |= {"value": "newer"}
    con.tier(t.name)
    t.check()
    catalog = load_catalog(config.name, **config.catalog)
    kept = "moved__changelog" if kind == "rest" else "moved$changelog"
    assert sorted(catalog.list_tables(database_name)) == [(database_name, name) for name in sorted(["moved", kept])]
    t.table.truncate()
    assert t.table.scan().count() == 0
    con.tier(t.name)
    assert t.table.scan(tier="lake").count() == 0
    con.drop_table(t.name, purge=True)
    assert catalog.list_tables(database_name) == []
    if kind == "postgres-s3":  # the REST catalog lets nobody look
        fs, folder = locate_file(io, table.location())
        assert not [i.path for i in fs.get_file_info(pa.fs.FileSelector(folder, recursive=True, allow_not_found=True))]


def test_no_secret_is_where_it_need_not_be(
    served: tuple[lh.Connection, lh.LakeConfig], database_name: str, kind: str, tmp_path: Path
) -> None:
    con, config = served
    t = Model(con, f"{database_name}.t")
    t.rounds(1)
    reply = handle_of(t.table).lake()
    assert reply.catalog_properties.items() >= config.catalog.items()
    reader = msgspec.json.encode(reply.for_reading()).decode()
    assert SECRET not in reader and "credential" not in reader and config.name not in reader
    # Whoever reads opens files; the storage's own keys are all that it takes.
    stored = set(reply.storage_properties)
    assert stored == {"py-io-impl"} | {name for name in config.catalog if name.startswith("s3.")}
    shown = f"{con}{t.table}{t.table.lake}{t.table.scan()}{reply}{con.tables()}{t.table.properties}{config}"
    assert SECRET not in shown and STORE_SECRET not in shown
    held = [p for p in tmp_path.rglob("*") if p.is_file()]
    io = load_file_io(reply.storage_properties, reply.metadata_location)
    with io.new_input(reply.metadata_location).open() as f:
        texts = [f.read(), *(p.read_bytes() for p in held)]
    assert len(held) > 3 and not any(s.encode() in text for s in (SECRET, STORE_SECRET) for text in texts)


@pytest.mark.parametrize("kind", ["postgres", "rest"], indirect=True)
def test_a_copy_adopts_the_lake(kind: str, lake_on: LakeOn, tmp_path: Path, database_name: str) -> None:
    lake = lake_on(kind)
    with lh.connect(tmp_path / "a", lake=lake) as con:
        t = Model(con, f"{database_name}.t")
        t.rounds(2)
        t.put(range(5), "hot")
        back_up(con, str(tmp_path / "a"), str(tmp_path / "backup"))
    restore(str(tmp_path / "backup"), str(tmp_path / "b"))
    with lh.connect(tmp_path / "b", lake=lake) as con:
        t.con, t.table = con, con.table(t.name)
        with pytest.raises(lh.FolderCopiedError):
            t.table.scan().count()
        assert t.table.lake.adopt()
        t.check()
        t.put(range(3, 8), "mine")
        con.tier(t.name)
        t.check()
    with lh.connect(tmp_path / "a", lake=lake) as con, pytest.raises(lh.FolderCopiedError):
        con.table(t.name).scan().count()


# ---- the wire to the catalog ----------------------------------------------------------------------------------------


@pytest.fixture(params=["postgres", "rest"])
def cut(request: pytest.FixtureRequest, lake_on: LakeOn) -> Iterator[tuple[CutWire, lh.LakeConfig, bytes]]:
    """A wire to the catalog, a lake that goes by it, and what only a commit sends."""
    lake = lake_on(request.param)
    sql = request.param == "postgres"
    server: LakeServer = request.getfixturevalue("database" if sql else "store")
    with CutWire(int(server.uri.rpartition(":")[2])) as wire:
        if sql:
            lake.catalog["uri"] = lake.catalog["uri"].replace(server.uri, f"127.0.0.1:{wire.port}")
        else:
            lake.catalog.update(rest_properties(server, f"http://127.0.0.1:{wire.port}"))
        yield wire, lake, b"COMMIT" if sql else b"assert-ref-snapshot-id"


@pytest.mark.parametrize("what", ["swallow", "lose"])
def test_a_round_whose_commit_is_cut_off_lands_once(
    cut: tuple[CutWire, lh.LakeConfig, bytes], what: str, tmp_path: Path, database_name: str
) -> None:
    wire, lake, commit = cut
    with lh.connect(tmp_path / "data", lake=lake) as con:
        t = Model(con, f"{database_name}.t")
        t.rounds(1)
        t.put(range(10, 30), "b")
        setattr(wire, what, commit)
        try:
            con.tier(t.name)
        except (lh.CommitUnknownError, lh.UnavailableError) as e:
            assert e.retryable
        assert wire.cuts == 1
        con.tier(t.name)
        assert t.table.lake.snapshots()["added_rows"].to_pylist() == [15, 20]
        assert t.table.scan(tier="lake").count() == 30
        t.check()
        assert t.table.lake.expire(older_than="0s", keep=1).snapshots == 1
        t.check()


def test_writes_go_on_without_the_catalog(
    cut: tuple[CutWire, lh.LakeConfig, bytes], tmp_path: Path, database_name: str
) -> None:
    wire, lake, _ = cut
    with lh.connect(tmp_path / "data", lake=lake) as con:
        t = Model(con, f"{database_name}.t")
        t.rounds(1)
        wire.closed = True
        t.put(range(10, 20), "dark")
        assert t.table.lookup([{"city": "O", "k": 12}]).to_pylist() == [row(12, "dark")]
        for call in (lambda: t.table.scan().count(), lambda: con.tier(t.name)):
            with pytest.raises(lh.UnavailableError) as e:
                call()
            assert SECRET not in str(e.value) and STORE_SECRET not in str(e.value)
        wire.closed = False
        t.check()
        con.tier(t.name)
        t.check()


def test_what_needs_the_storage_waits_for_it(lake_on: LakeOn, tmp_path: Path) -> None:
    lake = lake_on("postgres-s3")
    endpoint = lake.catalog["s3.endpoint"]
    with CutWire(int(endpoint.rpartition(":")[2])) as wire:
        lake.catalog["s3.endpoint"] = f"http://127.0.0.1:{wire.port}"
        with lh.connect(tmp_path / "data", lake=lake) as con:
            t = Model(con, "db.t")
            t.rounds(2)
            t.put(range(12, 30), "hot")
            held = t.table.scan()
            wire.closed = True
            t.put(range(20, 25), "dark")
            for call in (held.to_arrow, lambda: con.tier(t.name)):
                with pytest.raises(lh.UnavailableError) as e:
                    call()
                assert STORE_SECRET not in str(e.value)
            wire.closed = False
            t.check()
            # In the middle of a round, after its files were written.
            wire.lose = b"snap-"
            con.tier(t.name)
            assert wire.cuts == 1
            t.check()


def test_a_catalog_that_never_answers_holds_nobody_for_ever(
    cut: tuple[CutWire, lh.LakeConfig, bytes], tmp_path: Path, database_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire, lake, _ = cut
    for name in ("CONNECT_S", "ANSWER_S"):
        monkeypatch.setattr(open_catalog, name, 1)
    with lh.connect(tmp_path / "data", lake=lake) as con:
        t = Model(con, f"{database_name}.t")
        t.rounds(1)
        wire.stuck = True
        with pytest.raises(lh.UnavailableError):
            t.table.scan()
        wire.stuck = False
        t.check()


@pytest.mark.parametrize("cut", ["postgres"], indirect=True)
def test_a_commit_that_is_never_answered_is_made_again(
    cut: tuple[CutWire, lh.LakeConfig, bytes], tmp_path: Path, database_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a server, or a proxy before it, that takes bytes and stands still: to TCP that is a living connection."""
    wire, lake, commit = cut
    monkeypatch.setattr(open_catalog, "ANSWER_S", 1)
    with lh.connect(tmp_path / "data", lake=lake) as con:
        t = Model(con, f"{database_name}.t")
        t.rounds(1)
        t.put(range(10, 30), "b")
        wire.mute = commit
        con.tier(t.name)
        assert wire.cuts == 1
        assert t.table.lake.snapshots()["added_rows"].to_pylist() == [15, 20]
        t.check()


def test_a_commit_that_stands_still_delays_others_and_no_more(
    database: LakeServer, lake_on: LakeOn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = lake_on("postgres")
    monkeypatch.setattr(open_catalog, "LOCK_S", 0.1)
    with lh.connect(tmp_path / "data", lake=lake) as con:
        t = Model(con, "db.t")
        t.rounds(1)
        t.put(range(30, 40), "b")
        with psycopg.connect(database.properties["uri"].replace("+psycopg", "")) as other:
            other.execute("update iceberg_tables set table_name = table_name where catalog_name = %s", [lake.name])
            with pytest.raises(lh.CommitUnknownError):
                con.tier(t.name)
            t.check()
        con.tier(t.name)
        t.check()
        assert t.table.lake.snapshots().num_rows == 2


def test_the_first_to_open_a_database_may_be_many(database: LakeServer, tmp_path: Path) -> None:
    name = "opened_by_many"
    address = database.properties["uri"].replace("+psycopg", "")
    with psycopg.connect(address, autocommit=True) as db:
        db.execute(f"create database {name}")
    uri = database.properties["uri"].removesuffix("/postgres") + f"/{name}"
    config = lh.LakeConfig(catalog={"type": "sql", "uri": uri, "warehouse": f"file://{tmp_path}"})
    start, found = threading.Barrier(8), []

    def open_one() -> None:
        start.wait(WAIT_SECONDS)
        found.append(LakeCatalog(config, "").iceberg.list_namespaces())

    threads = [threading.Thread(target=open_one) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(WAIT_SECONDS)
    assert found == [[]] * 8


def test_a_name_that_the_catalog_does_not_take_is_to_be_changed(lake_on: LakeOn, tmp_path: Path) -> None:
    with lh.connect(tmp_path / "data", lake=lake_on("rest")) as con:
        for name in ("names._t", "Names.t"):
            with pytest.raises(lh.InvalidRequestError, match="choose another name"):
                con.create_table(name, SCHEMA, lake="iceberg")
        con.create_table("names.t", SCHEMA, lake="iceberg")
        with pytest.raises(lh.InvalidRequestError, match="choose another name"):
            con.rename_table("names.t", "names._t")
        assert con.tables() == ["names.t"]
        con.drop_table("names.t", purge=True)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("mysql+pymysql", "package 'pymysql' is not installed$"),
        ("postgresql+psycopg", r"package 'psycopg' is not installed: pip install 'lakehead\[postgres\]'$"),
    ],
)
def test_a_driver_that_is_not_installed_is_named(
    url: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    lake = lh.LakeConfig(catalog={"type": "sql", "uri": f"{url}://u:{SECRET}@h/d", "warehouse": "s3://b"})
    missing = pytest.raises(lh.MissingDependencyError, match=says)
    with lh.connect(tmp_path / "data", lake=lake) as con, missing as e:
        con.create_table("t", SCHEMA, lake="iceberg")
    assert SECRET not in str(e.value)


def test_storage_may_take_its_keys_from_the_process(
    lake_on: LakeOn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = lake_on("postgres-s3")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", lake.catalog.pop("s3.access-key-id"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", lake.catalog.pop("s3.secret-access-key"))
    with lh.connect(tmp_path / "data", lake=lake) as con:
        t = Model(con, "db.t")
        t.rounds(1)
        t.check()
        assert not [v for v in handle_of(t.table).lake().storage_properties.values() if STORE_SECRET in v]


# ---- Spark ----------------------------------------------------------------------------------------------------------


@pytest.mark.spark
@pytest.mark.parametrize("kind", ["rest"], indirect=True)
def test_executors_read_and_write_it(
    served: tuple[lh.Connection, lh.LakeConfig], spark_on: SparkSession, database_name: str
) -> None:
    import lakehead.spark as lhs

    con, _ = served
    t = Model(con, f"{database_name}.t")
    t.put(range(100), "a")
    reports: list[Any] = []
    service = lhs.tiering_service(spark_on, con, [t.name], on_round=reports.append)
    service.run(lambda: bool(reports))
    assert reports[0].rows == 100
    t.put(range(50, 60), "b")
    t.delete(1, 2)
    con.tier(t.name)
    t.put(range(58, 70), "hot")
    t.delete(3)
    frame = lhs.table(spark_on, t.name)
    pinned = frame.where("v = 'hot'")
    want = [t.rows[k] for k in sorted(t.rows)]
    t.put(range(90, 95), "later")
    con.tier(t.name)
    assert [r.asDict() for r in frame.orderBy("k").collect()] == want
    assert pinned.count() == 12 and frame.count() == 97
    t.check()
    assert lhs.sql(spark_on, f"select count(*) n from {t.name}$lake where v = 'later'").collect()[0].n == 5
    own = spark_on.read.format("lakehead").option("uri", con.uri).option("table", t.name).load()
    assert own.where("v = 'later'").count() == 5
    settings = str(spark_on.sparkContext.getConf().getAll()) + str(spark_on._jvm.System.getProperties())
    plans = str(frame._jdf.queryExecution().toString()) + str(own._jdf.queryExecution().toString())
    assert "lakehead" in plans and not any(s in settings + plans for s in (SECRET, STORE_SECRET, KEY_ID))


@pytest.fixture
def spark_on(served: tuple[lh.Connection, lh.LakeConfig]) -> SparkSession:
    from lakehead.spark import session

    return session(served[0])
