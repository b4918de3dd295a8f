"""What other users of a machine see and reach of a Spark session that we make, and what the user's own settings say."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest
from tests.attack.test_sockets import ports_of
from tests.integration.conftest import ServerProcess
from tests.waiting import WAIT_SECONDS, wait_until

SCRIPT = Path(__file__).with_name("spark_session.py")
LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F")
CLUSTER = "local-cluster[1,1,1024]"
SECRET, OF_WORKERS = "swordfish", "of workers alone"
GIVEN = {"spark.hadoop.fs.s3a.secret.key": SECRET, "spark.executorEnv.LIKE": OF_WORKERS}
HOME = Path(pyspark.__file__).parent

pytestmark = pytest.mark.spark(apart=True)


class Session:
    """A session in a process of its own, with a folder for temporary files, in which umask 0 hides nothing."""

    def __init__(self, above: Path, settings: dict[str, str], **environ: str) -> None:
        self.temporary = above / "t"
        self.temporary.mkdir(mode=0o755)
        command = [sys.executable, str(SCRIPT), str(above / "data"), json.dumps(settings)]
        unset = {k: v for k, v in os.environ.items() if not k.startswith(("SPARK_", "PYSPARK_", "MASTER"))}
        environment = {**unset, "TMPDIR": str(self.temporary), **environ}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "umask": 0}
        self.process = subprocess.Popen(command, cwd=above, env=environment, **pipes)
        self._told = self._line()
        self.conf: dict[str, str] = self._told["conf"]
        self.app: str = self._told["app"]

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the session did not start"
        told: dict[str, Any] = json.loads(line)
        return told

    def executors(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self._line()["executors"])

    def processes(self) -> dict[int, str]:
        """Ids and arguments, as every user sees them."""
        found = {}
        for pid in _tree(self.process.pid):
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        return found

    def ports(self) -> list[str]:
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):  # it has ended
                found += ports_of(pid)
        return found

    def close(self) -> None:
        self.process.communicate(timeout=WAIT_SECONDS)


def _tree(pid: int) -> list[int]:
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _tree(int(child))
    return found


@pytest.fixture
def opened() -> Iterator[Callable[..., Session]]:
    """Makes a session; paths of sockets below ``tmp_path`` are too long."""
    with contextlib.ExitStack() as stack:

        def make(settings: dict[str, str], **environ: str) -> Session:
            above = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            above.chmod(0o755)
            session = Session(above, settings, **environ)
            stack.callback(session.close)
            return session

        yield make


def open_to_others(folder: Path) -> list[str]:
    """What other users can read, or connect to, in a folder that they can enter."""
    found = []
    for path in folder.iterdir():
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode) and mode & 0o077:
            found += [str(path), *open_to_others(path)]
        elif not stat.S_ISDIR(mode) and mode & 0o077:
            found.append(str(path))
    return found


def said_in(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.rglob("*") if path.is_file())


def test_nobody_else_reaches_a_local_session(opened: Callable[..., Session], tmp_path: Path) -> None:
    events = tmp_path / "events"
    events.mkdir()
    log = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": events.as_uri(), "spark.eventLog.compress": "false"}
    session = opened({**GIVEN, **log})
    conf = session.conf
    assert conf["spark.master"] == "local[2]" and conf["spark.hadoop.fs.s3a.secret.key"] == SECRET
    assert conf["spark.authenticate"] == conf["spark.network.crypto.enabled"] == "true"
    shown = session.processes().values()
    assert any("SparkSubmit" in text for text in shown) and any("lakehead.spark.daemon" in text for text in shown)
    # The first of them are the arguments of the test.
    assert not [text for text in list(shown)[1:] if SECRET in text or OF_WORKERS in text]
    ports = session.ports()
    assert ports and all(port.partition(":")[0] in LOOPBACK for port in ports)
    (scratch,) = session.temporary.glob("lakehead-spark-*")
    assert stat.S_IMODE(scratch.stat().st_mode) == 0o700
    assert open_to_others(session.temporary) == []
    kinds = ("blockmgr-*", "artifacts-*", ".*.sock")
    assert all(list(scratch.glob(kind)) for kind in kinds), "what Spark leaves open is behind that door"
    assert b"AuthRpcHandler" in (answer := _answer(int(conf["spark.driver.port"]))), "who asks comes no further"
    assert b"NettyRpcHandler" not in answer
    session.close()
    assert not scratch.exists()
    written = said_in(events)
    assert session.app in written and SECRET not in written


def _answer(port: int) -> bytes:
    """What a driver answers to a request of one who does not speak the secret."""
    frame = (21 + 4).to_bytes(8, "big") + bytes([3]) + (1).to_bytes(8, "big") + (4).to_bytes(4, "big") + b"rows"
    with socket.create_connection(("127.0.0.1", port), 30) as stranger:
        stranger.sendall(frame)
        return stranger.recv(4096)


def test_nobody_else_reaches_a_cluster_of_ours(opened: Callable[..., Session], tmp_path: Path) -> None:
    events = tmp_path / "events"
    events.mkdir()
    log = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": events.as_uri(), "spark.eventLog.compress": "false"}
    session = opened({"master": CLUSTER, **GIVEN, **log})
    secrets = [value for name, value in session.conf.items() if "ecret" in name]
    assert len(secrets) == 3 and min(map(len, secrets[:1])) > 8
    shown = session.processes().values()
    assert any("CoarseGrainedExecutorBackend" in text for text in shown)
    assert not [text for text in list(shown)[1:] if any(secret in text for secret in (*secrets, OF_WORKERS))]
    ports = session.ports()
    assert len(ports) > 5 and all(port.partition(":")[0] in LOOPBACK for port in ports)
    assert open_to_others(session.temporary) == []
    assert stat.S_IMODE((HOME / "work" / session.app).stat().st_mode) == 0o700
    answers = {_page(int(port.rpartition(":")[2], 16)) for port in ports}
    assert 403 in answers or 401 in answers, "its master and workers have pages"
    assert 200 not in answers

    assert session.executors() == 1
    for wrong in ({"_SPARK_AUTH_SECRET": "guess"}, {}):
        with _executor(session, wrong, 5) as stranger:
            assert stranger.wait(180) != 0
        assert session.executors() == 1
    with _executor(session, {"_SPARK_AUTH_SECRET": session.conf["spark.authenticate.secret"]}, 20):
        wait_until(lambda: session.executors() == 2, 180)
    session.close()
    written = said_in(events)
    assert session.app in written and not [secret for secret in secrets if secret in written]


def _page(port: int) -> int | None:
    """What a web server at a port answers to who asks for its first page; None from who is none."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)) as asking:
        try:
            asking.request("GET", "/")
            return asking.getresponse().status
        except (OSError, http.client.HTTPException):
            return None


@contextlib.contextmanager
def _executor(session: Session, environ: dict[str, str], seconds: int) -> Iterator[subprocess.Popen[bytes]]:
    """One more executor, as anybody can start it who knows the driver's port, and waits so long for an answer."""
    options = session.conf["spark.executor.extraJavaOptions"].split()
    if environ:
        settings = ("authenticate", "network.crypto.enabled", "network.crypto.cipher", "network.crypto.saslFallback")
        options += [f"-Dspark.{name}={session.conf[f'spark.{name}']}" for name in settings]
    options += [f"-Dspark.network.timeout={seconds}s", f"-Dspark.rpc.askTimeout={seconds}s"]
    driver = f"spark://CoarseGrainedScheduler@127.0.0.1:{session.conf['spark.driver.port']}"
    words = {"driver-url": driver, "executor-id": "7", "hostname": "127.0.0.1", "cores": "1", "app-id": session.app}
    backend = ["org.apache.spark.executor.CoarseGrainedExecutorBackend"]
    backend += [word for name, value in words.items() for word in (f"--{name}", value)]
    command = ["java", "-cp", f"{HOME}/jars/*", "-Xmx600m", *options, *backend, "--resourceProfileId", "0"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env={**os.environ, **environ}, **quiet) as process:
        try:
            yield process
        finally:
            process.kill()


def test_what_the_user_configured_stays(opened: Callable[..., Session], tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text(
        f"spark.master local[1]\nspark.authenticate=false\nspark.local.dir  {tmp_path}/scratch\n"
        "spark.sql.shuffle.partitions 3\nspark.driver.extraJavaOptions -Dtheirs=1\n"
    )
    words = "--conf spark.ui.showConsoleProgress=false --conf spark.driver.bindAddress=127.0.0.2 pyspark-shell"
    environ = {"SPARK_CONF_DIR": str(tmp_path), "PYSPARK_SUBMIT_ARGS": words, "SPARK_LOCAL_IP": "127.0.0.2"}
    session = opened({"spark.sql.shuffle.partitions": "5"}, **environ)
    conf = session.conf
    assert conf["spark.master"] == "local[1]" and conf["spark.authenticate"] == "false"
    assert conf["spark.sql.shuffle.partitions"] == "5", "what the call says counts most"
    assert "-Dtheirs=1" in conf["spark.driver.extraJavaOptions"]
    assert not [name for name in conf if name.startswith("spark.network.crypto")]
    assert conf["spark.driver.bindAddress"] == "127.0.0.2"
    assert conf["spark.local.dir"] == f"{tmp_path}/scratch" and conf["spark.io.encryption.enabled"] == "true"
    assert "0200007F" in {port.partition(":")[0][-8:] for port in session.ports()}


def test_a_session_that_is_running_is_left_as_it_is_and_logs_no_token(tmp_path: Path) -> None:
    code = (
        "import sys, lakehead as lh, lakehead.spark as lhs\n"
        "from pyspark import SparkConf, SparkContext\n"
        "conf = SparkConf().setMaster('local[1]').setAppName('x').set('spark.ui.enabled', 'false')\n"
        "conf.set('spark.eventLog.enabled', 'true').set('spark.eventLog.compress', 'false')\n"
        "conf.set('spark.eventLog.dir', sys.argv[3])\n"
        "theirs = SparkContext(conf=conf)\n"
        "before = {k: v for k, v in theirs.getConf().getAll() if not k.startswith('spark.sql')}\n"
        "with lh.connect(sys.argv[1], token=sys.argv[2]) as con:\n"
        "    spark = lhs.session(con, master='local[2]')\n"
        "    assert spark.sparkContext is theirs, spark.sparkContext\n"
        "    after = {k: v for k, v in theirs.getConf().getAll() if not k.startswith('spark.sql')}\n"
        "    assert after == before, after\n"
        "    to = {'uri': con.uri, 'table': 'q.log', 'checkpointLocation': sys.argv[3] + '-checkpoint'}\n"
        "    spark.range(3).write.format('lakehead').options(**to).mode('append').save()\n"
        "    stream = spark.readStream.format('lakehead').options(uri=con.uri, table='q.log', start='full').load()\n"
        "    to['table'] = 'q.copy'\n"
        "    query = stream.writeStream.format('lakehead').options(**to).trigger(availableNow=True).start()\n"
        "    query.awaitTermination()\n"
        "    assert lhs.sql(spark, 'select count(*) from q.copy join q.log using (id)').first()[0] == 3\n"
        "    assert spark.read.format('lakehead').options(uri=con.uri, table='q.copy').load().count() == 3\n"
        "theirs.stop()\n"
    )
    # Spark plans by the Python that it has for executors, and the one that a shell finds may lack Lakehead.
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    events = tmp_path / "events"
    events.mkdir()
    server = ServerProcess(tmp_path / "data")
    try:
        command = [sys.executable, "-c", code, server.uri, server.token, str(events)]
        subprocess.run(command, check=True, cwd=tmp_path, timeout=300, env=environment)
    finally:
        server.kill()
    logged = "".join(p.read_text() for p in events.rglob("*") if p.is_file())
    assert "SQLExecutionEnd" in logged
    assert server.token not in logged
