"""What a server, or whoever commits to a lake table, cannot make a client run."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyiceberg.catalog
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table.update import SetPropertiesUpdate

import lakehead as lh
from lakehead.config import LakeConfig
from lakehead.errors import InvalidPropertyError
from lakehead.iceberg.file_io import SyncedFileIO
from lakehead.iceberg.known_metadata import updated, write_metadata
from lakehead.iceberg.lake_catalog import LakeCatalog, open_metadata
from lakehead.iceberg.staging import swap_metadata
from lakehead.iceberg.told_properties import FILE_IOS

PLACES = "write.py-location-provider.impl"
LOCAL = {"type": "sql", "uri": "sqlite:///:memory:", "warehouse": "file:///w"}


class Trap:
    """Notes that it was made."""

    made: ClassVar[list[Any]] = []

    def __init__(self, *given: Any, **named: Any) -> None:
        self.made.append((given, named))


TRAP = f"{__name__}.Trap"


@pytest.fixture(autouse=True)
def nobody_is_trapped(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    Trap.made.clear()
    yield
    assert not Trap.made


@pytest.mark.parametrize(
    "told",
    [
        {"py-io-impl": TRAP},
        {"py-catalog-impl": TRAP},
        {"auth": "{}"},
        {"auth.impl": TRAP},
        {"type": "hive"},
        {"type": "glue"},
        {"ssl": "x"},
    ],
)
def test_what_a_server_may_not_name_of_a_catalog(told: dict[str, str]) -> None:
    with pytest.raises(InvalidPropertyError, match="server"):
        LakeCatalog.open("lakehead", {**LOCAL, **told}).iceberg.list_namespaces()


@pytest.mark.parametrize("told", [{"py-io-impl": TRAP}, {"uri": "x"}, {"token": "x"}])
def test_what_a_server_may_not_name_of_a_storage(told: dict[str, str]) -> None:
    with pytest.raises(InvalidPropertyError, match="server"):
        open_metadata("file:///none.metadata.json", told)


@pytest.mark.parametrize("io", FILE_IOS)
def test_what_it_may_name(io: str, tmp_path: Path) -> None:
    told = {
        **LOCAL,
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "header.x": "y",
        "rest.z": "1",
        "py-io-impl": io,
        "s3.endpoint": "http://127.0.0.1:1",
    }
    assert LakeCatalog.open("lakehead", told).iceberg.list_namespaces() == []


def test_what_this_user_says_of_a_catalog_of_that_name_goes_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine:
        def get_catalog_config(self, name: str) -> dict[str, str]:
            return {"credential": "mine", "uri": "sqlite:///mine"}

    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Mine())
    told = LakeCatalog.open("lakehead", LOCAL).iceberg
    assert "credential" not in told.properties and told.properties["uri"] == LOCAL["uri"]
    own = LakeCatalog(LakeConfig(name="lakehead", catalog=dict(LOCAL)), "").iceberg
    assert own.properties["credential"] == "mine"


def test_a_table_does_not_choose_what_reads_it(tmp_path: Path) -> None:
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table("a.t", pa.schema([("id", pa.int64())]), lake="iceberg")
        table.append([{"id": 1}])
        con.tier("a.t")
        lake = table.lake.iceberg()
        with lake.transaction() as change:
            change.set_properties({"py-io-impl": TRAP, "s3.endpoint": "http://127.0.0.1:1"})
        table.append([{"id": 2}])
        assert con.tier("a.t").rows == 1
        assert table.scan(tier="lake").count() == 2 and con.sql("select count(*) from a.t").fetchall() == [(2,)]
        assert type(table.lake.iceberg().io) is SyncedFileIO


def test_a_table_does_not_choose_what_finds_places_for_its_files(tmp_path: Path) -> None:
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table("a.t", pa.schema([("id", pa.int64())]), lake="iceberg")
        for n in range(3):
            table.append([{"id": n}])
            con.tier("a.t")
        with pytest.raises(lh.LakeStateError, match="does not run"), table.lake.iceberg().transaction() as change:
            change.set_properties({PLACES: TRAP})
        lake = table.lake.iceberg()
        said = updated(lake.metadata, (SetPropertiesUpdate(updates={PLACES: TRAP}),), lake.metadata_location)
        path = f"{lake.location()}/metadata/00099-of-another.metadata.json"
        write_metadata(lake.io, path, said)
        assert isinstance(lake.catalog, SqlCatalog)
        swap_metadata(lake.catalog, lake.name(), lake.metadata_location, path)
        table.append([{"id": 3}])
        writes: list[Callable[[], object]] = [
            lambda: con.tier("a.t"),
            lambda: con.sql("alter table a.t add column v varchar"),
        ]
        for write in writes:
            with pytest.raises(lh.LakeStateError, match="does not run"):
                write()
        assert table.scan().count() == 4


class Config(BaseHTTPRequestHandler):
    """A REST catalog that would choose how its client logs in, and what reads its files."""

    def do_GET(self) -> None:
        auth = {"type": "custom", "impl": TRAP, "custom": {}}
        said = (
            {"auth": auth, "py-io-impl": TRAP, "ssl": {"cabundle": "/none"}}
            if self.path.startswith("/v1/config")
            else {}
        )
        body = json.dumps({"defaults": said, "overrides": said, "namespaces": []}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_nor_does_a_rest_catalog_that_a_server_names(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), Config) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            uri = f"http://127.0.0.1:{server.server_port}"
            catalog = LakeCatalog.open("lakehead", {"type": "rest", "uri": uri, "token": "t"}).iceberg
            assert catalog.list_namespaces() == []
            assert type(catalog._load_file_io({"py-io-impl": TRAP}, "file:///x")) is SyncedFileIO
            assert not {"auth", "ssl"} & set(catalog.properties)
        finally:
            server.shutdown()
            thread.join()
