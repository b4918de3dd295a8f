"""Lake files are synced when closed, whoever writes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lakehead.iceberg import file_io
from lakehead.iceberg.file_io import SyncedFileIO, locate_file


def test_every_lake_file_is_synced_before_the_catalog_names_it(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def sync_file(path: str) -> None:
        assert os.path.getsize(path) > 0
        synced.append(path)

    monkeypatch.setattr(file_io, "sync_file", sync_file)
    keyed.write(1, 2)
    keyed.round()
    keyed.write(1)
    before = {str(p) for p in keyed.folder.rglob("*") if p.is_file()}
    synced.clear()
    keyed.round()
    new = {str(p) for p in keyed.folder.rglob("*") if p.is_file()} - before
    assert new and set(synced) == new


def test_files_are_not_overwritten_by_chance(tmp_path: Path) -> None:
    io = SyncedFileIO()
    location = f"file://{tmp_path}/new/folder/a"
    with io.new_output(location).create() as out:
        out.write(b"one")
    with pytest.raises(FileExistsError):
        io.new_output(location).create()
    with io.new_output(location).create(overwrite=True) as out:
        out.write(b"two")
    assert (tmp_path / "new/folder/a").read_bytes() == b"two"


@pytest.mark.parametrize("prefix", ["file://", "file:", ""])
def test_any_spelling_of_a_local_address_leads_to_the_file(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "a").write_bytes(b"x")
    fs, path = locate_file(SyncedFileIO(), f"{prefix}{tmp_path}/a")
    assert fs.get_file_info(path).size == 1
