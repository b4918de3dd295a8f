"""A file of lines that is put aside when it is large."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from lakehead.env.rotated_file import RotatedFile
from lakehead.errors import InvalidPropertyError, StorageError


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_the_newest_lines_are_kept_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    file = RotatedFile(str(path), bytes_max=30, kept=2)
    for n in range(10):
        file.write(f"line {n:04}".encode())  # ten bytes, with its end
    file.close()
    assert lines(path) == ["line 0009"]
    assert lines(tmp_path / "a.jsonl.1") == ["line 0006", "line 0007", "line 0008"]
    assert lines(tmp_path / "a.jsonl.2") == ["line 0003", "line 0004", "line 0005"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.1", "a.jsonl.2"]
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in tmp_path.iterdir())
    again = RotatedFile(str(path), bytes_max=30, kept=2)
    again.write(b"x" * 100)
    again.write(b"y")
    again.close()
    again.close()
    again.write(b"nowhere")
    assert lines(path) == ["y"] and lines(tmp_path / "a.jsonl.1") == ["x" * 100]


def test_it_has_one_writer_and_follows_no_link(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("before\n")
    path.chmod(0o644)
    first = RotatedFile(str(path), bytes_max=10, kept=2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(InvalidPropertyError, match="another process"):
        RotatedFile(str(path), bytes_max=10, kept=2)
    first.write(b"after that")
    with pytest.raises(InvalidPropertyError, match="another process"):  # the new one, too
        RotatedFile(str(path), bytes_max=10, kept=2)
    first.close()
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(StorageError):
        RotatedFile(str(tmp_path / "link"), bytes_max=10, kept=2)
    with pytest.raises(StorageError):
        RotatedFile(str(tmp_path / "none" / "a"), bytes_max=10, kept=2)


def test_a_line_that_does_not_fit_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    file = RotatedFile(str(path), bytes_max=1000, kept=2)
    file.write(b"before")
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
    for _ in range(3):
        with pytest.raises(StorageError):
            file.write(b"lost")
    monkeypatch.setattr(os, "write", write)
    file.write(b"after")
    file.close()
    assert lines(path) == ["before", "after"]


def test_a_disk_that_is_full_takes_nothing_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    file = RotatedFile(str(path), bytes_max=10, kept=2)
    for n in range(3):
        file.write(f"line {n:04}".encode())
    opened = os.open

    def full(name: str, *how: int) -> int:
        raise OSError(errno.ENOSPC, "full", name)

    monkeypatch.setattr(os, "open", full)
    for _ in range(5):
        with pytest.raises(StorageError):
            file.write(b"lost")
    monkeypatch.setattr(os, "open", opened)
    file.write(b"line 0003")
    file.close()
    assert [lines(tmp_path / f"a.jsonl{n}") for n in ("", ".1", ".2")] == [["line 0003"], ["line 0002"], ["line 0001"]]
