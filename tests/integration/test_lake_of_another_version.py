"""Another engine has upgraded a lake table to a format that is not written here: whoever meets it says so, before
anything is written or removed, and once its metadata of before is there again all goes on."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

import lakehead as lh

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.int64())])
SAID = "it has format version 3 now, not 2: register its metadata of before"


class Upgraded:
    """A table with files that delete rows, and a metadata file that says what a Spark of today makes of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with lh.connect(folder) as con:
            table = con.create_table("u.t", SCHEMA, primary_key=["id"], lake="iceberg")
            for n in range(2):
                table.upsert([{"id": i, "v": n} for i in range(3)])
                con.tier("u.t")
        (self.deletes,) = (p for p in self._lake.rglob("*.parquet") if "deletes" in p.name)
        self.metadata = max(self._lake.rglob("*.metadata.json"), key=lambda p: p.name)
        upgraded = self.metadata.with_name("00099-of-another-engine.metadata.json")
        upgraded.write_text(json.dumps(json.loads(self.metadata.read_text()) | {"format-version": 3, "next-row-id": 0}))
        self._deleted = self.deletes.read_bytes()
        self.deletes.write_bytes(b"PFA1 no Parquet")
        register(folder, upgraded)

    @property
    def _lake(self) -> Path:
        return self.folder / "lake"

    def files(self) -> set[Path]:
        return {p.relative_to(self.folder) for p in self._lake.rglob("*") if p.is_file()}

    def restore(self, folder: Path) -> None:
        """In this folder, which may be a copy."""
        (folder / self.deletes.relative_to(self.folder)).write_bytes(self._deleted)
        register(folder, self.metadata)


def register(folder: Path, metadata: Path) -> None:
    with closing(sqlite3.connect(folder / "lake" / "catalog.db")) as db, db:
        db.execute("update iceberg_tables set metadata_location = ?", (f"file://{metadata}",))


@pytest.fixture
def upgraded(tmp_path: Path) -> Upgraded:
    return Upgraded(tmp_path / "data")


def refused(con: lh.Connection, use: Callable[[lh.Table], object]) -> None:
    with pytest.raises(lh.LakeStateError, match=SAID):
        use(con.table("u.t"))


@pytest.mark.parametrize("stray", [True, False])
def test_nothing_is_written_or_removed(upgraded: Upgraded, stray: bool) -> None:
    if stray:
        (upgraded.metadata.parent.parent / "data" / "stray.parquet").write_bytes(b"x")
    before = upgraded.files()
    with lh.connect(upgraded.folder) as con:
        con.table("u.t").upsert([{"id": 9, "v": 9}])
        uses: list[Callable[[lh.Table], object]] = [
            lambda t: t.scan().count(),
            lambda t: t.lake.tier(),
            lambda t: t.lake.compact(),
            lambda t: t.lake.expire("0s"),
            lambda t: t.lake.remove_orphans("0s"),
            lambda t: t.lake.remove_orphans("0s", dry_run=True),
            lambda t: con.sql("select count(*) from u.t").fetchone(),
        ]
        for use in uses:
            refused(con, use)
        assert upgraded.files() == before
        assert con.table("u.t").get({"id": 9}) == {"id": 9, "v": 9}
    upgraded.restore(upgraded.folder)
    with lh.connect(upgraded.folder) as con:
        assert con.table("u.t").scan().count() == 4
        assert con.table("u.t").lake.remove_orphans("0s").num_rows == stray + 1, "and the other engine's metadata"


def test_a_folder_that_is_moved_is_told_the_same(upgraded: Upgraded, tmp_path: Path) -> None:
    """Not that a manifest is damaged: files that delete rows are of another kind there."""
    moved = tmp_path / "moved"
    shutil.copytree(upgraded.folder, moved)
    with lh.connect(moved) as con:
        refused(con, lambda t: t.scan().count())
        refused(con, lambda t: t.lake.tier())
    upgraded.restore(moved)
    with lh.connect(moved) as con:
        assert con.table("u.t").scan().count() == 3
