"""Settings of a session: the user's win, local ones only where executors are local."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lakehead.spark.launch import given_settings, session_settings
from lakehead.spark.own_python import is_own_python, quick_python
from lakehead.spark.privacy import Scratch, is_local

SCRATCH = Scratch("/scratch", "/sockets")


def test_user_wins() -> None:
    given = given_settings({"master": "local[4]", "app_name": "x", "spark.ui.enabled": True, "spark.a": 3})
    got = session_settings({}, given, SCRATCH)
    assert got["spark.master"] == "local[4]"
    assert got["spark.app.name"] == "x"
    assert got["spark.ui.enabled"] == "true"
    assert got["spark.a"] == "3"
    assert got["spark.sql.session.timeZone"] == "UTC"


def test_what_spark_is_configured_with_stays() -> None:
    configured = {"spark.master": "local[3]", "spark.ui.enabled": "true", "spark.authenticate": "false"}
    got = session_settings(configured, {"spark.ui.enabled": "false"}, SCRATCH)
    assert "spark.master" not in got and "spark.authenticate" not in got
    assert got["spark.ui.enabled"] == "false"
    assert session_settings({}, {}, SCRATCH)["spark.master"] == "local[2]"


def test_cluster_keeps_its_addresses() -> None:
    assert "spark.driver.host" in session_settings({}, {}, SCRATCH)
    assert "spark.authenticate" in session_settings({}, {}, SCRATCH)
    for configured in ({"spark.master": "spark://box:7077"}, {"spark.master": "yarn"}):
        got = session_settings(configured, {}, SCRATCH)
        assert not {"spark.driver.host", "spark.authenticate", "spark.local.dir"} & got.keys()


def test_executors_of_another_python_are_started_without_ours() -> None:
    """Spark starts the daemon's module before it has what --py-files names."""
    for master in ("local[2]", "local-cluster[1,1,1024]"):
        got = session_settings({}, {"spark.master": master}, SCRATCH)
        assert got["spark.python.daemon.module"] == "lakehead.spark.daemon"
        assert "spark.python.daemon.module" not in session_settings(
            {}, {"spark.master": master}, SCRATCH, own_python=False
        )
    for master in ("spark://127.0.0.1:7077", "yarn"):
        assert "spark.python.daemon.module" not in session_settings({}, {"spark.master": master}, SCRATCH)


def test_a_python_is_ours_by_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_own_python(sys.executable) and not is_own_python("./no/bin/python3")
    (tmp_path / "python-here").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not is_own_python("python-here"), "of another environment, by the same interpreter"
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert is_own_python(Path(sys.executable).name)


def test_workers_begin_with_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the archives that Spark puts first; all else that stands in their path is there."""
    import pyspark

    home, folder = os.path.dirname(pyspark.__file__), tmp_path / "a 'folder'"
    folder.mkdir()
    command = quick_python(str(folder))
    assert is_own_python(command) and command != sys.executable
    code = "import sys, pyspark, py4j; print(sys.executable, pyspark.__file__, *sys.path, *sys.argv[1:], sep='\\n')"

    def told(*path: str) -> list[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        run = [command, "-c", code, "a b", "*"]
        return subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()

    archives = [f"{home}/python/lib/pyspark.zip", f"{home}/python/lib/py4j-0-src.zip", f"{home}/jars/spark-core.jar"]
    others = [str(tmp_path / "b *"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    found = told(*archives, *others)
    assert found[:2] == [sys.executable, pyspark.__file__] and found[-2:] == ["a b", "*"]
    assert not {*archives} & {*found} and {*others} <= {*found}
    of_path = [path for path in others if path == os.path.dirname(home)]  # where it is not installed, as by spark41
    assert told(*archives, *of_path)[:2] == [sys.executable, pyspark.__file__]
    other = tmp_path / "other" / "pyspark"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(other.parent))
    assert quick_python(str(folder)) == sys.executable, "workers would find another one"


def test_executors_elsewhere_listen_on_no_socket_whose_path_may_be_too_long() -> None:
    name = "spark.python.unix.domain.socket.enabled"
    assert session_settings({}, {"spark.master": "local[2]"}, SCRATCH)[name] == "true"
    for master in ("spark://127.0.0.1:7077", "yarn"):
        assert name not in session_settings({}, {"spark.master": master}, SCRATCH)


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


LAUNCH = """
import sys
import lakehead as lh, lakehead.spark as lhs
with lh.connect("data") as con:
    lhs.session(con, **({"spark.driver.memory": "much"} if sys.argv[1] == "never came up" else {}))
    if sys.argv[1] == "killed":
        from pyspark import SparkContext
        SparkContext._gateway.proc.kill()
        SparkContext._gateway.proc.wait()
    elif sys.argv[1] == "interrupted":
        raise KeyboardInterrupt
"""


@pytest.mark.spark(apart=True)
@pytest.mark.parametrize("jvm", ["ends with the process", "interrupted", "never came up", "killed"])
def test_no_temporary_file_is_left(tmp_path: Path, jvm: str) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, jvm], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    _, said = process.communicate()  # to the end of what the JVM says, too, which outlives the process
    assert process.returncode == {"interrupted": -signal.SIGINT, "never came up": 1}.get(jvm, 0), said
    assert not list(temporary.iterdir())


def test_without_java(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", NO_JAVA], check=True, cwd=tmp_path, env=environment)
