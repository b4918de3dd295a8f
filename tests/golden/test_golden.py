"""Data folders of earlier versions are read exactly, written on and tiered; those of later ones are refused."""

from __future__ import annotations

import json
import sqlite3
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.golden.make_golden import clicks, defaulted, every_type, in_order, log_of, note, order, user
from tests.golden.relocation import PLACEHOLDER, padded, relocate

import lakehead as lh
from lakehead.config import LakeConfig
from lakehead.env import Env
from lakehead.errors import UnsupportedFormatError
from lakehead.iceberg.data_files import lake_arrow_schema
from lakehead.iceberg.lake_catalog import LakeCatalog
from lakehead.server.endpoint import LocalEndpoint
from lakehead.server.metadata import FORMAT_VERSION, MetadataStore
from lakehead.types import children, field_id

HERE = Path(__file__).parent

ARCHIVES = sorted(HERE.glob("*/*.tar.gz"))
MORE: dict[str, list[dict[str, Any]]] = {
    "types.plain": [every_type(n) for n in range(68, 72)],
    "types.packed": [every_type(n) for n in range(11, 14)],
    "shop.visits": clicks(45, 6),
    "shop.beats": clicks(14, 2),
    "shop.clicks": clicks(50, 9),
    "shop.users": [user(n, visits=7) for n in range(55, 75)],
    "shop.notes": [note(n, "late") for n in range(35, 40)],
    "shop.people": [note(n, "late") for n in range(33, 40)],
    "shop.goods": [defaulted(n) for n in range(152, 156)],
    "shop.stock": [defaulted(n) for n in range(145, 156)],
    "shop.days": [{"day": day, "id": n} for day in ("tue", "thu") for n in range(200, 203)],
    "shop.orders": [order(n, "late") for n in range(20, 60, 3)],
}

WRITERS = {"shop.visits": ("etl-7", 2), "shop.beats": ("etl-8", 3)}


def unpack(archive: Path, parent: Path) -> Path:
    """A copy of a golden folder."""
    folder = padded(parent.resolve())
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    relocate(folder, PLACEHOLDER, str(folder))
    return folder


@pytest.fixture(autouse=True)
def no_maintenance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of golden folders are old: a server would soon trim what their lakes hold. Tests say when."""
    monkeypatch.setattr("lakehead.server.host._MAINTENANCE_SECONDS", 1e6)


def archive_id(path: Path) -> str:
    return path.relative_to(HERE).as_posix().removesuffix(".tar.gz")


@pytest.fixture(params=ARCHIVES, ids=archive_id)
def archive(request: pytest.FixtureRequest) -> Path:
    """One golden folder after the other."""
    return request.param


@pytest.fixture
def folder(archive: Path, tmp_path: Path) -> Path:
    """A copy to work on."""
    return unpack(archive, tmp_path)


@pytest.fixture
def tables(archive: Path) -> dict[str, Any]:
    """What the folder holds, by table."""
    held = json.loads(archive.with_suffix("").with_suffix(".json").read_text())
    assert str(held["format"]) == archive.parent.name
    return held["tables"]


def rows_of(held: dict[str, Any]) -> list[Any]:
    return held["rows"] or sorted((record[-1] for record in held["log"]), key=json.dumps)


def key(table: lh.Table, row: dict[str, Any]) -> dict[str, Any]:
    return {c: row[c] for c in table.primary_key}


def test_every_format_has_golden_folders() -> None:
    kept = {archive.parent.name for archive in ARCHIVES}
    assert kept == {str(n + 1) for n in range(FORMAT_VERSION)}, "add folders of this format: tests/golden/README.md"


def test_rows_and_records_are_those_that_were_written(folder: Path, tables: dict[str, Any]) -> None:
    for _ in range(2):
        with lh.connect(folder) as con:
            assert con.tables() == sorted(tables)
            for name, held in tables.items():
                table = con.table(name)
                rows = table.scan().to_arrow().to_pylist()
                assert in_order(table, rows) == rows_of(held), name
                assert log_of(table) == held["log"], name
                if table.primary_key:
                    assert table.lookup([key(table, r) for r in rows]).to_pylist() == rows
                if table.describe()["lake"]:
                    tiers = [table.scan(tier=tier).to_arrow().num_rows for tier in ("lake", "hot")]
                    assert all(tiers)


def test_fields_have_the_ids_that_lakes_gave_them(folder: Path, tables: dict[str, Any]) -> None:
    def ids(fields: Any) -> list[Any]:
        return [(field_id(f), ids(children(f.type))) for f in fields]

    store = MetadataStore(str(folder / "metadata.db"), Env.system())
    lakes = [desc for desc in store.tables(None) if desc.lake is not None]
    store.close()
    assert lakes and {str(desc.path) for desc in lakes} <= set(tables)
    for desc in lakes:
        lake = lake_arrow_schema(LakeCatalog(LakeConfig(), str(folder)).load(desc).schema())
        assert ids(lake.field(n) for n in desc.schema.names) == ids(desc.schemas.current.fields)


def test_old_rows_are_trimmed_and_still_there(folder: Path, tables: dict[str, Any]) -> None:
    for _ in range(2):
        with lh.connect(folder) as con:
            for name in tables:
                con.table(name).scan().count()
            assert isinstance(con._server, LocalEndpoint)
            con._server.service.maintain()
            for name, held in tables.items():
                table = con.table(name)
                assert in_order(table, table.scan().to_arrow().to_pylist()) == rows_of(held), name


def test_statistics_and_columns_of_old_frames_are_read(folder: Path, tables: dict[str, Any]) -> None:
    held = {"types.plain", "types.packed"} & set(tables)
    assert held
    with lh.connect(folder) as con:
        for name in held:
            scan = con.table(name).scan(["text", "n"], where="i32 = -7 and large > 0")
            assert scan.to_arrow().to_pylist() == [{"text": "å" * 7, "n": 7}]


def test_folders_are_written_on_and_tiered(folder: Path, tables: dict[str, Any]) -> None:
    expected = {}
    with lh.connect(folder) as con:
        for name in tables:
            table = con.table(name)
            before = {s["bucket"]: s["high_watermark"] for s in table.status().to_pylist()}
            if table.primary_key:
                rows = {tuple(key(table, r).values()): r for r in table.scan().to_arrow().to_pylist()}
                table.upsert(MORE[name])
                rows |= {tuple(key(table, r).values()): r for r in MORE[name]}
                gone = [rows.pop(k) for k in list(rows)[:5]]
                table.delete([key(table, r) for r in gone])
                expected[name] = list(rows.values())
            else:
                expected[name] = [*table.scan().to_arrow().to_pylist(), *MORE[name]]
                offsets = table.append(MORE[name]).offsets
                assert all(start == before[t.bucket] for t, (start, _) in offsets.items() if not t.partition)
            if table.describe()["lake"]:
                con.tier(name)
    with lh.connect(folder) as con:
        for name in tables:
            table = con.table(name)
            assert in_order(table, table.scan().to_arrow().to_pylist()) == in_order(table, expected[name]), name
            if table.describe()["lake"]:
                assert table.scan(tier="hot").count() == 0
                assert table.scan(tier="lake").count() == len(expected[name])


@pytest.mark.parametrize("archive", [a for a in ARCHIVES if a.name.startswith("clean")], indirect=True, ids=archive_id)
def test_named_writers_are_resumed(folder: Path, tables: dict[str, Any]) -> None:
    held = set(WRITERS) & set(tables)
    assert held
    with lh.connect(folder) as con:
        for name in held:
            table, (writer_id, last) = con.table(name), WRITERS[name]
            rows = table.scan().count()
            with table.writer(writer_id) as writer:
                assert writer.last_sequence == last
                writer.append(MORE[name])
            assert table.scan().count() == rows + len(MORE[name])


def change_metadata(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "metadata.db")) as db, db:
        db.execute("update meta set value = '99' where name = 'format'")
    db.close()


def change_frame(folder: Path) -> None:
    segment = sorted(folder.glob("tables/shop.users-*/partition-0/bucket-0/*.log"))[-1]
    with segment.open("r+b") as file:
        file.write(b"LHF9")


def change_checkpoint(folder: Path) -> None:
    for checkpoint in folder.glob("tables/shop.users-*/partition-0/*/*.checkpoint"):
        with checkpoint.open("r+b") as file:
            file.write(b"LHK9")


@pytest.mark.parametrize("change", [change_metadata, change_frame, change_checkpoint])
def test_newer_formats_are_refused_and_left_alone(archive: Path, folder: Path, change: Callable[[Path], None]) -> None:
    change(folder)
    if change is change_checkpoint and archive.parent.name == "1":
        assert not list(folder.glob("tables/**/*.checkpoint")), "the first format has none"
        return
    logs = {p: p.read_bytes() for p in folder.glob("tables/**/*.log")}
    with pytest.raises(UnsupportedFormatError, match=r"(?s)(99|LHF9|LHK9).*upgrade"), lh.connect(folder) as con:
        con.table("shop.users").scan().count()
    assert {p: p.read_bytes() for p in folder.glob("tables/**/*.log")} == logs
