"""Executors that have neither our package nor our files get both, in each way that there is; or say what they lack."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests import cluster_app
from tests.integration.conftest import ServerProcess
from tests.spark_cluster import (
    Standalone,
    bare_python,
    dependencies,
    install,
    named_pythons,
    own_packages,
    packed,
    packed_environment,
    run_driver,
    standalone,
)

pytestmark = [pytest.mark.spark(apart=True), pytest.mark.timeout(1500)]

APP = (cluster_app.__file__, "URI")
PAGE = Path(__file__).parents[2] / "docs/spark-clusters.md"
SEEN = {"table": 70, "source": 120, "write": 1000, "stream": 170, "code": 0, "tier": 1000}
LEAN = {
    "executor.memory": "600m",
    "sql.codegen.wholeStage": "false",
    **{f"{who}.extraJavaOptions": os.environ["SPARK_SUBMIT_OPTS"] for who in ("driver", "executor")},
}
"""What lives for half a minute compiles little."""
ONE = {"cores.max": "1"}  # executor
SPECULATION = {"speculation": "true", "speculation.interval": "50ms", "speculation.minTaskRuntime": "50ms"}
SPECULATION["speculation.task.duration.threshold"] = "1s"  # of a single task, too
TWICE = {
    "ran": [f"{name}-{attempt}" for name in ("batch", "call", "stream") for attempt in (0, 1)],
    **{name: [400, 400] for name in ("batch", "call", "streamed")},
}
LOCAL_CLUSTER = "local-cluster[2,1,1024]"
EVERY_WAY = bool(os.environ.get("LAKEHEAD_EVERY_WAY"))
"""A long run: each way on each kind of cluster."""
WAYS = [("py-files", "")]
if EVERY_WAY:
    WAYS += [("archive", ""), ("installed", ""), ("environment", ""), ("whole archive", "")]
    WAYS += [(way, LOCAL_CLUSTER) for way in ("installed", "py-files", "environment")]


@dataclass
class Machines:
    """A cluster, and what the machines of the driver and of the executors call their Pythons."""

    cluster: Standalone
    folder: Path
    drivers: Path

    def of(self, way: str) -> Path:
        return self.folder / way / "bin/python3"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    above = tmp_path_factory.mktemp("machines")
    bare, some, whole = (bare_python(above / name) for name in ("bare", "some", "whole"))
    install(some, dependencies())
    install(whole, [*dependencies(), *own_packages()])
    executors = named_pythons(above / "executors", python3=bare, python3_some=some, python3_all=whole)
    here = Path(sys.executable)
    drivers = named_pythons(above / "driver", python3=here, python3_some=here, python3_all=here)
    # Spark runs a slow task again on another host alone.
    with standalone(above / "cluster", executors, ["127.0.0.1", "127.0.0.2"]) as cluster:
        yield Machines(cluster, above, drivers)


def commands(heading: str) -> list[list[str]]:
    """The console blocks of the guide below a heading, line by line."""
    below = PAGE.read_text().partition(f"### {heading}\n")[2].partition("\n## ")[0].partition("\n### ")[0]
    blocks = [block for block in re.findall(r"^```console\n(.*?)^```", below, re.M | re.S)]
    return [block.replace("\\\n", " ").removeprefix("$ ").strip().split("\n$ ") for block in blocks]


def submitted(way: str, machines: Machines, folder: Path) -> tuple[str, str]:
    """A command of the guide that submits a job in this way, and its Python; made ready is what it names."""
    match way:
        case "installed":
            return commands("Installed")[0][-1], "python3-all"
        case "py-files":
            ((*before, command),) = commands("--py-files")
            made = run_driver("\n".join(before), folder, machines.drivers)
            assert made[0] == 0, made
            return command, "python3-some"
        case "archive" | "whole archive":
            packed(folder / "packages.tar.gz", [*dependencies(), *own_packages()], linked=way == "archive")
            return commands("A packed environment")[0][-1], "python3"
        case "environment":
            archive = packed_environment(folder / "environment.tar.gz", machines.of("whole"))
            with tarfile.open(archive) as whole:
                whole.extractall(folder / "environment", filter="fully_trusted")
            return commands("A packed environment")[1][-1], "./environment/bin/python3"
    raise AssertionError(way)


def run(
    machines: Machines,
    server: ServerProcess,
    folder: Path,
    command: str,
    python: str,
    *words: str,
    master: str = "",
    conf: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Submit the application by a command of the guide; what it has seen, and the lines that it printed before."""
    path = machines.drivers if not master else machines.folder / "executors"
    command = re.sub(r"PYSPARK_PYTHON=\S+", f"PYSPARK_PYTHON={python}", command)
    command = command.replace("spark://box:7077", shlex.quote(master or machines.cluster.master))
    settings = {"ui.enabled": "true", "ui.port": "0", "log.level": "ERROR", **LEAN, **(conf or {})}
    given = [word for name, value in settings.items() for word in ("--conf", f"spark.{name}={value}")]
    command = command.replace("spark-submit", shlex.join(["spark-submit", *given]))
    command = command.replace("job.py", shlex.join([*APP, *words]))
    code, out, errors = run_driver(
        command.replace("URI", server.uri), folder, path, apart=not master, LAKEHEAD_TOKEN=server.token
    )
    assert code == 0, errors
    *said, last = out.splitlines()  # what an application prints as errors is there, too
    seen: dict[str, Any] = json.loads(last)
    return seen, said


@pytest.mark.parametrize(("way", "master"), WAYS)
def test_executors_get_what_they_lack(
    way: str, master: str, machines: Machines, server: ServerProcess, tmp_path: Path
) -> None:
    command, python = submitted(way, machines, tmp_path)
    twice, unknown = (way, master) == ("py-files", ""), (way, master) == ("installed", "")
    words, conf = ["unknown"] if unknown else [], SPECULATION if twice else ONE
    if way == "py-files" and master:  # the driver has it from there, too
        conf = {**ONE, "executorEnv.PYTHONPATH": "lakehead.zip"}
    seen, _ = run(machines, server, tmp_path, command, python, *words, master=master, conf=conf)
    shown = seen.pop("shown")
    more = {"twice": TWICE} if twice else {"unknown": "AuthenticationError"} if unknown else {}
    assert seen == SEEN | more
    jobs, settings = shown
    # Where the driver starts executors by its own Python, they are not looked at.
    looked = {"lakehead: check of the executors"} if (way, bool(master)) != ("environment", True) else set()
    assert looked | {"lakehead: round of app.written"} <= set(jobs)
    assert "spark.master" in settings
    # Nothing of what they were given is where others read it: commands of executors are among it.
    assert server.token not in settings + machines.cluster.said() + machines.cluster.errors()


def test_what_executors_lack_is_named_once(machines: Machines, server: ServerProcess, tmp_path: Path) -> None:
    command = commands("Installed")[0][-1]
    once = {"task.maxFailures": "1", **ONE}
    seen, lines = run(machines, server, tmp_path, command, "python3", "fail", conf=once)
    error = seen.pop("attach")
    assert error == ["MissingDependencyError", "lakehead"]
    assert seen.pop("rows") == [0, 0] and seen.pop("code") == 2
    assert {kind for kind, _ in seen.values()} == {"MissingDependencyError"}, seen
    said = [line for line in lines if line.startswith("error: the Python of Spark's executors")]
    assert len(said) == 1 and "'lakehead'" in said[0] and "--py-files" in said[0]
