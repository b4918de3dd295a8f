"""Lake files are synced when closed, and removed when they are refused, whoever writes them."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lakehead.errors import StorageError, UnavailableError
from lakehead.iceberg import file_io
from lakehead.iceberg.file_io import SyncedFileIO, lake_files, locate_file


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


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """The system refuses what this process writes beyond so many bytes of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("written", [0, 10, 99])
@pytest.mark.filterwarnings("error")
def test_a_file_that_is_refused_is_gone(tmp_path: Path, written: int) -> None:
    file = SyncedFileIO().new_output(f"file://{tmp_path}/a")
    with files_end_at(100), pytest.raises(StorageError) as refused, file.create() as out:
        out.write(b"x" * written)
        out.write(b"x" * 101)
    assert refused.value.context["path"] == f"{tmp_path}/a" and list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_synced_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise StorageError(f"cannot sync {path}", path=path)

    monkeypatch.setattr(file_io, "sync_file", refuse)
    out = SyncedFileIO().new_output(f"file://{tmp_path}/a").create()
    out.write(b"x")
    with pytest.raises(StorageError):
        out.close()
    assert out.closed and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("what", "kinds"),
    [("round", {"", ".avro", ".json"}), ("expire", {".json"}), ("clean up", {".avro", ".json"})],
)
def test_what_a_disk_refuses_of_a_commit_is_an_error_of_the_storage(keyed: Any, what: str, kinds: set[str]) -> None:
    """And leaves nothing. Of data files, the folder is named."""
    for n in range(3):
        keyed.write(1, n)
        keyed.round()
    keyed.write(1, 9)
    version = keyed.table.load()

    def act() -> None:
        if what == "round":
            keyed.round()
        elif what == "expire":
            keyed.table.expire(version, keyed.snapshot_ids()[:1], list)
        else:
            keyed.clean_up()

    def files() -> set[Path]:
        return {p for p in keyed.folder.rglob("*") if p.suffix in (".parquet", ".avro", ".json")}

    if what == "clean up":
        (keyed.folder / "lake/db/t-t1/data/orphan.parquet").touch()
    refused = set()
    for size in range(0, 8000, 500):
        before = files()
        with files_end_at(size):
            try:
                act()
            except StorageError as e:
                assert files() == before, size
                refused.add(Path(str(e.context["path"])).suffix)
            except UnavailableError:  # the catalog's file is refused, once all others are written
                break
    assert refused == kinds
    act()
    keyed.round()
    assert keyed.values() == keyed.model_values()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES, errno.ENOSPC, errno.ESTALE])
@pytest.mark.parametrize("named", ["/lake/a.parquet", None])
def test_what_the_system_refuses_is_an_error_of_storage(number: int, named: str | None) -> None:
    with pytest.raises(StorageError, match=r"a\.parquet") as refused, lake_files(None if named else "/lake/a.parquet"):
        raise OSError(number, os.strerror(number), named)
    assert refused.value.context["errno"] == number
