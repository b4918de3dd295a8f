"""What tells a folder that was renamed from one that was copied."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from lakehead.env.place import Place, born_ns
from lakehead.errors import StorageError


def test_a_renamed_folder_is_no_copy_and_a_copied_one_is(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    here = Place.of(str(tmp_path / "a"))
    assert not Place.of(str(tmp_path / "a")).is_copy_of(here)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    assert Place.of(str(tmp_path / "copy")).is_copy_of(here)
    (tmp_path / "a").rename(tmp_path / "b")
    assert not Place.of(str(tmp_path / "b")).is_copy_of(here)
    (tmp_path / "link").symlink_to("b")
    assert Place.of(str(tmp_path / "link")) == Place.of(str(tmp_path / "b"))


def test_files_that_were_put_into_a_folder_are_a_copy(tmp_path: Path) -> None:
    """Its number stays, and theirs do not; of a place that was noted without one nothing is known."""
    (tmp_path / "file").write_text("a")
    alone, here = Place.of(str(tmp_path)), Place.of(str(tmp_path), "file")
    (tmp_path / "new").write_text("a")
    (tmp_path / "new").replace(tmp_path / "file")
    later = Place.of(str(tmp_path), "file")
    assert later.is_copy_of(here) and not later.is_copy_of(later)
    assert dataclasses.replace(later, born=0).is_copy_of(here), "where no time is kept"
    assert not later.is_copy_of(alone) and not alone.is_copy_of(later)
    assert Place.from_json(here.to_json()) == here


def test_a_file_that_took_the_number_of_the_one_before_is_a_copy(tmp_path: Path) -> None:
    """As many file systems give it at once; and one that another program writes on stays what it is."""
    (tmp_path / "file").write_text("a")
    here = Place.of(str(tmp_path), "file")
    (tmp_path / "file").write_text("b")
    os.utime(tmp_path / "file", (1, 1))
    assert not Place.of(str(tmp_path), "file").is_copy_of(here)
    (tmp_path / "file").unlink()
    (tmp_path / "file").write_text("a")
    later = Place.of(str(tmp_path), "file")
    assert later.is_copy_of(here) and here.born and born_ns(str(tmp_path / "none")) == 0
    same = dataclasses.replace(later, file=here.file)
    assert same.is_copy_of(here) and not same.is_copy_of(dataclasses.replace(here, born=0))


def test_disks_may_be_numbered_anew_where_the_path_stays() -> None:
    here = Place("/srv/data", inode=7, device=1, machine="m")
    assert not dataclasses.replace(here, device=2, machine="other").is_copy_of(here)
    assert dataclasses.replace(here, inode=8).is_copy_of(here), "restored over"
    elsewhere = dataclasses.replace(here, path="/srv/new")
    assert not elsewhere.is_copy_of(here)
    assert dataclasses.replace(elsewhere, device=2).is_copy_of(here)
    assert dataclasses.replace(elsewhere, machine="other").is_copy_of(here)


def test_places_survive_as_text(tmp_path: Path) -> None:
    here = Place.of(str(tmp_path))
    assert Place.from_json(here.to_json()) == here
    assert [Place.from_json(t) for t in ("", "[]", "{}", '{"path": "/x", "inode": "?"}', "backup")] == [None] * 5


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="missing"):
        Place.of(str(tmp_path / "missing"))
