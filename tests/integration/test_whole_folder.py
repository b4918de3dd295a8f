"""A data folder that lacks part of itself, before it is served and while it is."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.errors import InvalidUriError

SCHEMA = pa.schema([("a", pa.int64())])


@pytest.mark.parametrize("how", ["missing", "empty"])
def test_tables_without_metadata_are_no_empty_folder(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "data"
    with lh.connect(folder) as con:
        con.create_table("s.t", SCHEMA).append([{"a": 1}])
    kept = (folder / "metadata.db").read_bytes()
    for file in folder.glob("metadata.db*"):
        file.unlink()
    if how == "empty":
        (folder / "metadata.db").touch()
    for _ in range(2):
        with pytest.raises(lh.StorageError, match=r"holds tables, and metadata\.db"):
            lh.connect(folder)
    (folder / "metadata.db").write_bytes(kept)
    with lh.connect(folder) as con:
        assert con.table("s.t").scan().count() == 1


def test_metadata_that_is_removed_under_its_server_ends_writing(tmp_path: Path) -> None:
    con = lh.connect(tmp_path / "data")
    table = con.create_table("s.t", SCHEMA)
    table.append([{"a": 1}])
    for file in (tmp_path / "data").glob("metadata.db*"):
        file.unlink()
    for write in (lambda: table.append([{"a": 2}]), lambda: con.create_table("s.u", SCHEMA)):
        with pytest.raises(lh.FencedError, match=r"metadata\.db was removed"):
            write()
    con.close()
    with pytest.raises(lh.StorageError, match=r"holds tables, and metadata\.db"):
        lh.connect(tmp_path / "data")


@pytest.mark.parametrize("mark", "%?#\t\n\r")
def test_a_path_that_lake_addresses_cannot_hold(tmp_path: Path, mark: str) -> None:
    with lh.connect(tmp_path / f"my{mark}data") as con, pytest.raises(InvalidUriError, match="cannot hold"):
        con.create_table("s.t", SCHEMA, lake="iceberg")
