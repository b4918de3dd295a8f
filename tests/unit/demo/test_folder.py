"""The demo's folder: replaced when a demo made it, otherwise left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakehead.demo.folder import prepare_folder, write_marker
from lakehead.env.folder_lock import FolderLock
from lakehead.errors import InvalidRequestError


def test_a_new_folder_is_made(tmp_path: Path) -> None:
    assert not prepare_folder(str(tmp_path / "a" / "b"), fresh=False)
    assert (tmp_path / "a" / "b" / "lakehead-demo.json").exists()


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert not prepare_folder(str(tmp_path), fresh=False)


def test_an_earlier_demo_is_replaced(tmp_path: Path) -> None:
    write_marker(str(tmp_path), {"ok": True})
    (tmp_path / "tables" / "nyc.flights-1a2b").mkdir(parents=True)
    (tmp_path / "elsewhere").symlink_to(tmp_path.parent)
    assert prepare_folder(str(tmp_path), fresh=False)
    assert not (tmp_path / "tables").exists()
    assert tmp_path.parent.exists()


def test_another_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    for fresh in (False, True):
        with pytest.raises(InvalidRequestError, match="no earlier demo made it"):
            prepare_folder(str(tmp_path), fresh=fresh)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_tables_that_a_user_added_go_only_when_asked(tmp_path: Path) -> None:
    write_marker(str(tmp_path), None)
    (tmp_path / "tables" / "shop.orders-1a2b").mkdir(parents=True)
    with pytest.raises(InvalidRequestError, match=r"shop\.orders.*--fresh"):
        prepare_folder(str(tmp_path), fresh=False)
    assert (tmp_path / "tables" / "shop.orders-1a2b").exists()
    assert prepare_folder(str(tmp_path), fresh=True)


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    write_marker(str(tmp_path), None)
    lock = FolderLock.try_acquire(str(tmp_path))
    assert lock is not None
    try:
        with pytest.raises(InvalidRequestError, match="in use"):
            prepare_folder(str(tmp_path), fresh=True)
    finally:
        lock.release()
