"""Who may only read a table gets credentials of its storage that open that table, read, and end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as pf
import pytest
from tests.lake_servers import (
    KEY_ID,
    PLAIN_BUCKET,
    READER_ROLE,
    SECRET,
    STORE_SECRET,
    LakeServer,
    rest_properties,
    seaweed,
    warehouse,
)

import lakehead as lh
from lakehead.api.table import handle_of
from lakehead.client.table import RenewableLake
from lakehead.config import STORAGE_EXPIRES
from lakehead.errors import LakeheadError
from lakehead.iceberg import file_io, reader_sessions
from lakehead.iceberg.file_io import RenewedFileIO
from lakehead.protocol.messages import LakeReply

ROWS = 1000


@pytest.fixture(scope="module")
def guarded() -> Iterator[LakeServer]:
    """A store with an STS."""
    with seaweed(roles=True) as server:
        yield server


@pytest.fixture(params=["sql", "rest"])
def lake(request: pytest.FixtureRequest, guarded: LakeServer, tmp_path: Path) -> lh.LakeConfig:
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", **warehouse(guarded)}
    if request.param == "rest":
        catalog = rest_properties(guarded)
    return lh.LakeConfig(
        catalog=catalog, reading={"role": READER_ROLE, "sts": catalog["s3.endpoint"], "seconds": "900"}
    )


@pytest.fixture
def owner(lake: lh.LakeConfig, tmp_path: Path) -> Iterator[lh.Connection]:
    """With two tables, of which ``reader`` may read one."""
    with lh.connect(tmp_path / "data", lake=lake) as con:
        for name in ("shop.own", "shop.other"):
            table = con.create_table(name, [("k", "int64"), ("v", "string")], primary_key=["k"], lake="iceberg")
            table.upsert(pa.table({"k": range(ROWS), "v": [name] * ROWS}))
            con.tier(name)
            table.upsert([{"k": 0, "v": "again"}])
        con.grant("read", "shop.own", to="reader")
        con.grant("tier", "shop.own", to="tiers")
        yield con
        for name in con.tables():  # the catalog outlives the test
            con.drop_table(name, purge=True)


@pytest.fixture
def reader(owner: lh.Connection) -> Iterator[lh.Connection]:
    with lh.connect(owner.uri, token=owner.create_token("reader").token) as con:
        yield con


def told(con: lh.Connection, name: str = "shop.own") -> LakeReply:
    return handle_of(con.table(name)).lake()


def store_of(properties: Mapping[str, str]) -> pf.S3FileSystem:
    return pf.S3FileSystem(
        access_key=properties["s3.access-key-id"],
        secret_key=properties["s3.secret-access-key"],
        session_token=properties.get("s3.session-token"),
        endpoint_override=properties["s3.endpoint"],
        region=properties["s3.region"],
    )


def files_of(con: lh.Connection, name: str) -> list[str]:
    return [urlsplit(p).netloc + urlsplit(p).path for p in con.table(name).lake.files()["path"].to_pylist()]


def test_a_reader_is_told_no_more_than_it_may_have(owner: lh.Connection, reader: lh.Connection) -> None:
    got = told(reader)
    everything = repr({name: getattr(got, name) for name in got.__struct_fields__})
    for secret in (KEY_ID, STORE_SECRET, SECRET, READER_ROLE, "catalog.db"):
        assert secret not in everything
    assert STORAGE_EXPIRES in got.storage_properties
    left = float(got.storage_properties[STORAGE_EXPIRES]) / 1000 - time.time()
    assert 0 < left <= 901
    assert told(reader).storage_properties == got.storage_properties, "made once for all who read it"
    with lh.connect(owner.uri, token=owner.create_token("tiers").token) as con:
        assert told(con).storage_properties["s3.access-key-id"] == KEY_ID, "who may commit writes, too"


def test_it_reads_its_table_and_nothing_else(owner: lh.Connection, reader: lh.Connection) -> None:
    store = store_of(told(reader).storage_properties)
    own, other = files_of(owner, "shop.own"), files_of(owner, "shop.other")
    for path in own:
        assert store.open_input_file(path).size() > 0
    bucket = own[0].partition("/")[0]
    if bucket == PLAIN_BUCKET:  # in buckets of its catalog, this store denies it
        assert store.get_file_info(f"{own[0]}.gone").type is pf.FileType.NotFound
    denied: list[Callable[[], Any]] = [
        *(lambda path=path: store.open_input_file(path) for path in other),
        lambda: store.get_file_info(pf.FileSelector(other[0].rpartition("/")[0])),
        lambda: store.get_file_info(pf.FileSelector(bucket)),
        lambda: store.delete_file(own[0]),
        lambda: store.open_output_stream(own[0]).close(),
        lambda: store.open_output_stream(f"{own[0]}.new").close(),
        lambda: store.copy_file(own[0], f"{own[0]}.copy"),
    ]
    for call in denied:
        with pytest.raises(OSError, match=r"ACCESS_DENIED|AWS Error"):
            call()
    full = store_of(told(owner).storage_properties)
    assert full.open_input_file(own[0]).size() > 0, "it is as it was"
    for made in (f"{own[0]}.new", f"{own[0]}.copy"):
        with pytest.raises(OSError):
            full.open_input_file(made)


def test_all_ways_to_read_work_with_them(owner: lh.Connection, reader: lh.Connection) -> None:
    table = reader.table("shop.own")
    assert table.scan().count() == table.scan(tier="lake").count() == ROWS
    assert table.scan(where="k = 0").to_arrow()["v"].to_pylist() == ["again"]
    assert table.scan(tier="lake", where="k < 10").to_arrow().num_rows == 10
    assert reader.sql("select count(*) from shop.own where v = 'again'").fetchone() == (1,)
    assert reader.sql("select count(*) from shop.own$lake").fetchone() == (ROWS,)
    assert len(table.lake.snapshots()) == 1 and table.lake.files().num_rows == 1
    with pytest.raises(lh.PermissionDeniedError):
        table.lake.iceberg()
    with owner.table("shop.own").alter() as change:
        change.rename_column("v", "w")
    assert reader.table("shop.own").scan().to_arrow().column_names == ["k", "w"]


def test_credentials_that_a_catalog_hands_out_end_too(tmp_path: Path) -> None:
    with seaweed(roles=True, vends=True) as store:
        catalog = rest_properties(store)
        for own in ("s3.access-key-id", "s3.secret-access-key"):
            del catalog[own]
        with lh.connect(tmp_path / "data", lake=lh.LakeConfig(catalog=catalog)) as con:
            table = con.create_table("shop.own", [("k", "int64")], lake="iceberg")
            table.append([{"k": 1}])
            con.tier("shop.own")
            con.grant("read", "shop.own", to="reader")
            with lh.connect(con.uri, token=con.create_token("reader").token) as reader:
                got = told(reader)
                assert STORAGE_EXPIRES in got.storage_properties and isinstance(got, RenewableLake)
                assert STORAGE_EXPIRES in got.renew() and "credential" not in repr(dict(got.renew()))
                assert reader.table("shop.own").scan(tier="lake").count() == 1


@pytest.mark.spark
def test_executors_read_with_them(reader: lh.Connection) -> None:
    import lakehead.spark as lhs

    spark = lhs.session(reader)
    frame = lhs.table(spark, "shop.own")
    assert frame.count() == ROWS and frame.where("v = 'again'").count() == 1
    read = spark.read.format("lakehead").options(uri=reader.uri, table="shop.own", tier="lake").load()
    assert read.count() == ROWS
    properties = told(reader).storage_properties
    said = str(spark.sparkContext.getConf().getAll()) + str(read._jdf.queryExecution().toString())
    assert not [v for k, v in properties.items() if k.endswith(("key", "token", "key-id")) and v in said]


def test_without_a_role_readers_have_what_the_server_has(
    guarded: LakeServer, lake: lh.LakeConfig, tmp_path: Path
) -> None:
    with lh.connect(tmp_path / "data", lake=lh.LakeConfig(catalog=lake.catalog)) as con:
        con.create_table("shop.own", [("k", "int64")], lake="iceberg").append([{"k": 1}])
        con.tier("shop.own")
        con.grant("read", "shop.own", to="reader")
        with lh.connect(con.uri, token=con.create_token("reader").token) as reader:
            assert told(reader).storage_properties["s3.access-key-id"] == KEY_ID
        con.drop_table("shop.own", purge=True)


def test_an_sts_that_refuses_is_a_typed_error(lake: lh.LakeConfig, tmp_path: Path) -> None:
    for wrong in ({"role": f"{READER_ROLE}s"}, {"sts": "http://127.0.0.1:1"}):
        config = lh.LakeConfig(catalog=lake.catalog, reading={**lake.reading, **wrong})
        with lh.connect(tmp_path / f"data-{next(iter(wrong))}", lake=config) as con:
            name = f"shop.{next(iter(wrong))}"
            con.create_table(name, [("k", "int64")], lake="iceberg").append([{"k": 1}])
            con.tier(name)
            assert con.table(name).scan().count() == 1, "who may tier needs none"
            con.grant("read", name, to="reader")
            with lh.connect(con.uri, token=con.create_token("reader").token) as reader:
                with pytest.raises(lh.UnavailableError) as refused:
                    told(reader, name)
                assert STORE_SECRET not in str(refused.value)
            con.drop_table(name, purge=True)


# ---- they end -------------------------------------------------------------------------------------------------------


class Hands:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def now_us(self) -> int:
        return time.time_ns() // 1000 + int(self.ahead * 1_000_000)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody sleeps")


def test_a_server_makes_new_ones_in_time(lake: lh.LakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Hands()
    sessions = reader_sessions.ReaderSessions(lake, clock)
    location = f"{lake.catalog['warehouse']}/shop/t-1"
    first = sessions.storage(location, lake.catalog)
    clock.ahead = 400
    assert sessions.storage(location, lake.catalog) == first
    clock.ahead = 500

    def away(*_: Any, **__: Any) -> None:
        raise lh.UnavailableError("away")

    with monkeypatch.context() as patch:
        patch.setattr(reader_sessions, "assume_role", away)
        assert sessions.storage(location, lake.catalog) == first, "they are good for a while"
        clock.ahead = 850
        with pytest.raises(lh.UnavailableError):
            sessions.storage(location, lake.catalog)
    clock.ahead = 0  # the store's clock does not follow
    sessions = reader_sessions.ReaderSessions(lake, clock)
    assert sessions.storage(location, lake.catalog) != first
    for nowhere in ("s3://bucket", "s3://bucket/", "s3://bucket/a*/b"):
        with pytest.raises(lh.InvalidPropertyError):
            sessions.storage(nowhere, lake.catalog)
    assert sessions.storage("file:///x", {"s3.access-key-id": "theirs"}) == {"s3.access-key-id": "theirs"}


def _nothing(*_: Any) -> Any:
    raise NotImplementedError


_UNUSED = {name: _nothing for name in pf.FileSystemHandler.__abstractmethods__}


class Ending(type("Unused", (pf.FileSystemHandler,), _UNUSED)):  # type: ignore[misc]
    """Local files whose store stops to believe in credentials while one is read."""

    def __init__(self, believed: Callable[[], bool]) -> None:
        self.believed = believed
        self.files = pf.LocalFileSystem()

    def __eq__(self, other: object) -> bool:
        return self is other

    def get_type_name(self) -> str:
        return "ending"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> Any:
        self._look()
        return self.files.get_file_info(paths)

    def open_input_file(self, path: str) -> pa.PythonFile:
        self._look()
        return pa.PythonFile(_Read(self.files.open_input_file(path), self._look), mode="r")

    open_input_stream = open_input_file

    def _look(self) -> None:
        if not self.believed():
            raise OSError("When reading information for key: AWS Error ACCESS_DENIED during HeadObject operation")


class _Read:
    def __init__(self, file: pa.NativeFile, look: Callable[[], None]) -> None:
        self._file, self._look = file, look

    def read(self, size: int = -1) -> bytes:
        self._look()
        data: bytes = self._file.read(None if size < 0 else size)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize("renews", [True, False])
@pytest.mark.parametrize("without", ["none", "deleted", "superseded"])
def test_a_scan_goes_on_with_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renews: bool, without: str
) -> None:
    clock = Hands()
    current, ended = ["first"], threading.Event()
    # A large file that is being read when they end, or many, of which most are not open by then.
    rows, buckets = (500, 32) if without == "superseded" else (400_000, 1)
    gone = {"none": [], "deleted": [5, rows + 5], "superseded": list(range(0, 2 * rows, 3))}[without]
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table(
            "a.t", [("k", "int64"), ("v", "int64")], primary_key=["k"], buckets=buckets, lake="iceberg"
        )
        for part in range(2):
            ks = range(part * rows, (part + 1) * rows)
            table.upsert(pa.table({"k": ks, "v": ks}))
            con.tier("a.t")
        table.delete([{"k": k} for k in gone])
        if without == "deleted":
            con.tier("a.t")

        def file_system(properties: tuple[tuple[str, str], ...], *_: Any) -> pf.PyFileSystem:
            mine = dict(properties)["s3.session-token"]
            return pf.PyFileSystem(Ending(lambda: mine == current[0]))

        def properties() -> dict[str, str]:
            end = str(clock.now_us() // 1000 + 900_000)
            return {"s3.session-token": current[0], STORAGE_EXPIRES: end}

        def renew() -> dict[str, str]:
            if not renews:
                raise lh.PermissionDeniedError("it was revoked")
            return properties()

        monkeypatch.setattr(file_io, "_file_system", file_system)
        native = table.lake.iceberg()
        native.io = RenewedFileIO(properties(), renew, clock)
        monkeypatch.setattr("lakehead.iceberg.lake_format._static_table", lambda *_: native)
        found: list[int] = []
        error: list[LakeheadError] = []
        try:
            for batch in table.scan(tier="union").to_batches():
                found += batch["v"].to_pylist()
                if not ended.is_set():
                    ended.set()
                    current[0] = "second"
                    clock.ahead += 901
        except LakeheadError as e:
            error.append(e)
    if renews:
        assert sorted(found) == sorted(set(range(2 * rows)).difference(gone)) and not error
    else:
        assert len(found) < 2 * rows and isinstance(error[0], lh.PermissionDeniedError)


def test_credentials_are_renewed_before_they_end_and_no_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = Hands(), [0]

    def properties() -> dict[str, str]:
        asked[0] += 1
        return {"s3.session-token": str(asked[0]), STORAGE_EXPIRES: str(clock.now_us() // 1000 + 900_000)}

    monkeypatch.setattr(file_io, "_file_system", lambda found, *_: dict(found)["s3.session-token"])
    io = RenewedFileIO(properties(), properties, clock)
    assert io.fs_by_scheme("s3", "b") == io.fs_by_scheme("s3", "b") == "1"
    clock.ahead = 440
    assert io.fs_by_scheme("s3", "b") == "1"
    clock.ahead = 460
    assert io.fs_by_scheme("s3", "b") == io.fs_by_scheme("s3", "b") == "2"
    for other in ("No such file", "AWS Error ACCESS_DENIED during HeadObject operation"):
        assert not io.renewed_after(OSError(other))
    assert io.renewed_after(OSError("AWS Error UNKNOWN (HTTP status 400) during HeadObject operation"))
    assert io.fs_by_scheme("s3", "b") == "3"
