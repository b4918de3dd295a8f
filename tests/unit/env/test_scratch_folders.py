"""Folders for temporary files go with their process, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lakehead.env.scratch_folders import ScratchFolder
from lakehead.errors import StorageError

_HOLDS = """
import sys
from lakehead.env.scratch_folders import ScratchFolder
held = ScratchFolder("some-")
open(held.path + "/spilled", "w").close()
print(held.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def _holder(temporary: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDS],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_left_goes_with_the_next(temporary: Path) -> None:
    (temporary / "other-1").mkdir()
    (temporary / "some-file").touch()
    (temporary / "some-open").mkdir(mode=0o755)  # not of this kind
    (temporary / "some-link").symlink_to(temporary / "other-1")
    living, kept = _holder(temporary)
    killed, left = _holder(temporary)
    with living, killed:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert (left / "spilled").exists()
        mine = ScratchFolder("some-")
        assert not left.exists() and (kept / "spilled").exists()
        another = ScratchFolder("some-")
        assert Path(mine.path).stat().st_mode & 0o777 == 0o700
        assert living.stdin is not None
        living.stdin.close()
        living.wait()
    assert not kept.exists(), "it ended by itself"
    mine.remove()
    assert sorted(p.name for p in temporary.iterdir()) == sorted(
        ["other-1", "some-file", "some-open", "some-link", os.path.basename(another.path)]
    )
    del another
    assert len(list(temporary.iterdir())) == 4


def test_a_forked_child_removes_nothing(temporary: Path) -> None:
    held = ScratchFolder("some-")
    if (child := os.fork()) == 0:
        held.remove()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert Path(held.path).exists()


def test_no_place_for_files_is_an_error_that_says_what_to_set(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "gone"))
    with pytest.raises(StorageError, match="set TMPDIR"):
        ScratchFolder("some-")
