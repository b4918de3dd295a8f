"""Settings of a session: the user's win, local ones only where executors are local."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lakehead.spark.launch import is_local, session_settings


def test_user_wins() -> None:
    got = session_settings({"master": "local[4]", "app_name": "x", "spark.ui.enabled": True, "spark.a": 3})
    assert got["spark.master"] == "local[4]"
    assert got["spark.app.name"] == "x"
    assert got["spark.ui.enabled"] == "true"
    assert got["spark.a"] == "3"
    assert got["spark.sql.session.timeZone"] == "UTC"


def test_cluster_keeps_its_addresses() -> None:
    assert "spark.driver.host" in session_settings({})
    assert "spark.driver.host" not in session_settings({"spark.master": "spark://box:7077"})


@pytest.mark.parametrize(
    ("master", "local"),
    [("local", True), ("local[2]", True), ("local[*]", True), ("local-cluster[1,1,1024]", False), ("yarn", False)],
)
def test_is_local(master: str, local: bool) -> None:
    assert is_local(master) is local


NO_PYSPARK = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "pyspark":
            raise ImportError(name)
sys.meta_path.insert(0, Hidden())
import lakehead as lh, lakehead.spark as lhs
for call in (lambda: lhs.session("x"), lambda: lhs.attach(None, "x"), lambda: lhs.table(None, "t"),
             lambda: lhs.sql(None, "select 1"), lambda: lhs.tiering_service(None, "x")):
    try:
        call()
    except lh.MissingDependencyError as e:
        assert "pip install 'lakehead[spark]'" in str(e)
    else:
        raise SystemExit("no error")
"""
NO_JAVA = """
import lakehead as lh, lakehead.spark as lhs
con = lh.connect("data")
for call in (lambda: lhs.session(con), lambda: lhs.tiering_service(None, con).run(1)):
    try:
        call()
    except lh.MissingDependencyError as e:
        assert "openjdk-17-jre-headless" in str(e), e
    else:
        raise SystemExit("no error")
con.close()
"""


def test_without_pyspark(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", NO_PYSPARK], check=True, cwd=tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_java(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", NO_JAVA], check=True, cwd=tmp_path, env=environment)
