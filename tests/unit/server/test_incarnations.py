"""Each start is an incarnation; a copy begins a folder of its own, and a former owner writes nothing more."""

from __future__ import annotations

import dataclasses
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from lakehead.env import Env
from lakehead.env.place import Place
from lakehead.errors import FencedError
from lakehead.server.catalog import CreatePartition, DropTable, RegisterWriter
from lakehead.server.incarnations import disown
from lakehead.server.metadata import MetadataStore
from lakehead.types import Incarnation

HERE = Place("/srv/data", inode=7, device=1, machine="m")
MOVED = dataclasses.replace(HERE, path="/srv/moved")
COPY = dataclasses.replace(HERE, path="/srv/copy", inode=8)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "metadata.db")


def start(path: str, place: Place | None = HERE) -> Incarnation:
    store = MetadataStore(path, Env.system(), place=lambda: place)
    store.close()
    return store.incarnation


def test_numbers_grow_and_starts_differ(path: str) -> None:
    starts = [start(path) for _ in range(3)] + [start(path, None), start(path, MOVED), start(path, HERE)]
    assert [s.number for s in starts] == [1, 2, 3, 4, 5, 6]
    assert len({s.folder_id for s in starts}) == 1
    assert len({s.start_id for s in starts}) == 6


def test_a_copy_is_another_folder_that_knows_its_ancestors(path: str) -> None:
    first = start(path)
    copied = start(path, COPY)
    assert copied.folder_id != first.folder_id
    assert copied.number == 2, "frames of the copy come after those that were copied"
    store = MetadataStore(path, Env.system(), place=lambda: COPY)
    assert store.incarnation.folder_id == copied.folder_id
    assert [store.is_own(str(s)) for s in (first, copied, store.incarnation)] == [False, True, True]
    assert [store.is_ancestor(str(s)) for s in (first, copied, store.incarnation)] == [True, True, True]
    assert not store.is_ancestor(str(dataclasses.replace(first, start_id="0" * 32)))
    store.close()


def test_what_was_disowned_is_a_copy_wherever_it_lies(path: str) -> None:
    first = start(path)
    with closing(sqlite3.connect(path)) as db, db:
        disown(db)
    db.close()
    again = start(path)
    assert again.folder_id != first.folder_id and again.number == first.number + 1


def test_folders_that_say_no_place_are_taken_as_they_are(path: str) -> None:
    first = start(path, None)
    assert start(path).folder_id == first.folder_id
    assert start(path, COPY).folder_id != first.folder_id


def test_a_former_owner_changes_no_metadata(path: str) -> None:
    former = MetadataStore(path, Env.system(), place=lambda: HERE)
    assert former.submit(CreatePartition("t", "p=1")).number == 1
    newer = MetadataStore(path, Env.system(), place=lambda: HERE)
    for change in (
        lambda: former.submit(CreatePartition("t", "p=2")).number,
        lambda: former.submit(RegisterWriter("t", b"w", 9)).epoch,
        lambda: former.submit(DropTable("t", "folder")),
    ):
        with pytest.raises(FencedError, match="another process has become the owner"):
            change()
    assert newer.partitions("t") == former.partitions("t") == {"p=1": 1}
    former.close()
    newer.close()


def test_a_fence_stops_changes_before_they_begin(path: str) -> None:
    fenced = False

    def fence() -> None:
        if fenced:
            raise FencedError("LOCK was removed")

    store = MetadataStore(path, Env.system(), fence=fence)
    fenced = True
    with pytest.raises(FencedError, match="LOCK"):
        store.submit(CreatePartition("t", "p=1"))
    assert store.partitions("t") == {}
    store.close()
