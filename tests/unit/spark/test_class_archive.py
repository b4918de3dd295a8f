"""Classes that were kept for Spark's JVM are taken if they are whole, of this Java and Spark, and this user's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lakehead.errors import MissingDependencyError, StorageError
from lakehead.spark import class_archive
from lakehead.spark.java import Java, find_java

JAVA = Java("java", "/no/home", 17)


def kept(folder: Path, *, java: Java = JAVA, size: int = 7, told: int = 7) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{class_archive._of_spark()}-{class_archive._of(java)}-{told}.jsa"
    path.write_bytes(bytes(size))
    path.chmod(0o600)
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder, and in it the one for classes."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".lakehead").mkdir(mode=0o700)
    return tmp_path / ".lakehead" / "classes"


def test_what_was_kept_is_taken(home: Path) -> None:
    assert class_archive.options(JAVA) == ()
    path = kept(home)
    assert class_archive.options(JAVA)[0] == f'"-XX:SharedArchiveFile={path}"'
    assert class_archive.options(Java("java", "/another/home", 17)) == ()


@pytest.mark.parametrize("size", [0, 6, 8])
def test_an_archive_that_is_cut_short_is_not_taken(home: Path, size: int) -> None:
    """The JVM would end."""
    kept(home, size=size)
    assert class_archive.options(JAVA) == ()


@pytest.mark.parametrize("open_to_others", ["the file", "its folder", "the folder above"])
def test_what_others_may_have_written_is_not_taken(home: Path, open_to_others: str) -> None:
    path = kept(home)
    {"the file": path, "its folder": home, "the folder above": home.parent}[open_to_others].chmod(0o777)
    assert class_archive.options(JAVA) == ()


def test_a_link_is_not_taken(home: Path, tmp_path: Path) -> None:
    path = kept(home)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert class_archive.options(JAVA) == ()


def test_there_is_a_folder_before_anything_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_archive, "find_java", lambda: JAVA)
    monkeypatch.setattr(class_archive, "_made", lambda java, work: pytest.fail("it was begun"))
    with pytest.raises(StorageError, match="No such file"):
        class_archive.keep(str(tmp_path / "none"))


def test_a_java_that_keeps_none_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_archive, "find_java", lambda: JAVA)
    monkeypatch.setattr(class_archive, "_TRAINING", "raise SystemExit('no base archive is loaded')")
    with pytest.raises(MissingDependencyError, match=r"\(Java 17\) keeps no classes.*: no base archive is loaded"):
        class_archive.keep(str(tmp_path))
    assert not list(tmp_path.iterdir())


_TOLD = """
import sys
import lakehead as lh, lakehead.spark as lhs
with lh.connect(sys.argv[1]) as con:
    spark = lhs.session(con)
    java = spark._jvm.java.lang.ProcessHandle.current().pid()
    print(open(f"/proc/{java}/maps").read())
"""


@pytest.mark.spark(apart=True)
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_session_has_the_classes_that_were_kept(home: Path, tmp_path: Path) -> None:
    java = find_java()
    made = class_archive.keep(str(Path(__file__).parents[3] / ".venv"))
    assert made == class_archive.find(os.path.dirname(made), java)
    home.mkdir(mode=0o700)
    os.link(made, home / os.path.basename(made))
    env = {k: v for k, v in os.environ.items() if k != "SPARK_SUBMIT_OPTS"}
    command = [sys.executable, "-c", _TOLD, str(tmp_path / "data")]
    told = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert str(home) in told, "no part of the archive is mapped"
