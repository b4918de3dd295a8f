"""A standalone Spark cluster on loopback, from PySpark's own jars, and Pythons that lack what executors are to lack.

The driver's machine and those of executors are one here. What makes them two is what they are started with: executors
have another home and another ``PATH``, so that other Pythons go by the same names, and nothing of the driver's.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sysconfig
import tarfile
import threading
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyspark
from tests.waiting import WAIT_SECONDS, wait_until

from lakehead.spark.java import find_java

HOME = Path(pyspark.__file__).parent
SOURCE = Path(__file__).parents[1] / "src"
SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
_OURS = re.compile(r"(?i)lakehead|__editable__|__pycache__|distutils|_distutils_hack|pyspark|py4j|pip\b|setuptools")
LARGE = ("pyarrow", "numpy", "numpy.libs", "numba", "llvmlite", "pandas", "duckdb", "polars", "_polars_runtime_32")
_LOGGING = """
rootLogger.level = info
rootLogger.appenderRef.stdout.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_OUT
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %p %c{1}: %m%n%ex
"""


def dependencies() -> list[Path]:
    """What is installed beside Lakehead and Spark; a cluster has Spark's own Python code from its Spark."""
    return [path for path in sorted(SITE_PACKAGES.iterdir()) if not _OURS.search(path.name)]


def bare_python(folder: Path) -> Path:
    """A Python of this version that has nothing installed."""
    venv.create(folder, symlinks=True)
    return folder / "bin/python3"


def install(python: Path, paths: Sequence[Path]) -> None:
    """Give a Python packages, as links."""
    (site,) = python.parent.parent.glob("lib/python*/site-packages")
    for path in paths:
        (site / path.name).symlink_to(path)


def named_pythons(folder: Path, **pythons: Path) -> Path:
    """A folder for ``PATH`` in which Pythons have these names."""
    folder.mkdir()
    for name, python in pythons.items():
        command = folder / name.replace("_", "-")
        command.write_text(f'#!/bin/sh\nexec "{python}" "$@"\n')
        command.chmod(0o755)
    return folder


def own_packages() -> list[Path]:
    """Lakehead's own."""
    return [SOURCE / "lakehead", SOURCE / "pyspark_lakehead"]


def packed(path: Path, paths: Sequence[Path], *, linked: bool) -> Path:
    """Packages as one archive.

    Args:
        linked: large ones are links in it, which an archive of this machine alone can have: half a gigabyte is copied
            for each executor otherwise.
    """
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for package in paths:
            if linked and package.name in LARGE:
                link = tarfile.TarInfo(package.name)
                link.type, link.linkname = tarfile.SYMTYPE, str(package)
                archive.addfile(link)
            else:
                archive.add(package, package.name)
    return path


def packed_environment(path: Path, python: Path) -> Path:
    """An environment as one archive, with links to what is installed in it."""
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        archive.add(python.parent.parent, ".")
    return path


class Standalone:
    """A master and workers, each worker on a host of its own; ends with `close`.

    Args:
        above: where their files go.
        path: where executors find their Pythons.
        hosts: loopback addresses, a worker of one core each.
    """

    def __init__(self, above: Path, path: Path, hosts: Sequence[str]) -> None:
        self._above = above
        above.mkdir(parents=True, exist_ok=True)
        self._java = find_java()
        self._processes: list[subprocess.Popen[str]] = []
        self._said: list[str] = []
        for name in ("home", "tmp"):
            (above / name).mkdir(mode=0o700)
        (above / "log4j2.properties").write_text(_LOGGING)
        self._environ = {
            "HOME": str(above / "home"),
            "TMPDIR": str(above / "tmp"),
            "PATH": f"{path}:/usr/bin:/bin",
            "JAVA_HOME": self._java.home,
            "SPARK_HOME": str(HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",  # where its pages are
            "SPARK_SCALA_VERSION": "2.13",
        }
        try:
            self._start("master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
            self.master = self._wait(r"Starting Spark master at (spark://\S+)")
            for n, host in enumerate(hosts):
                self._environ["SPARK_LOCAL_IP"] = host
                resources = ["--cores", "1", "--memory", "2g", "--work-dir", str(above / f"work{n}")]
                self._start("worker.Worker", "--host", host, "--webui-port", "0", *resources, self.master)
            wait_until(lambda: sum("Registering worker" in line for line in self._said) == len(hosts), 180)
        except BaseException:
            self.close()
            raise

    def _start(self, name: str, *words: str) -> None:
        lean = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Djava.io.tmpdir={self._above}/tmp"]
        opened = ("java.nio", "java.lang", "java.util", "sun.nio.ch")
        lean += [f"--add-opens=java.base/{m}=ALL-UNNAMED" for m in opened]
        lean += [f"-Dlog4j2.configurationFile={self._above}/log4j2.properties", "-cp", f"{HOME}/jars/*"]
        command = [self._java.executable, *lean, f"org.apache.spark.deploy.{name}", *words]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, env=self._environ, cwd=self._above, text=True, **pipes)
        self._processes.append(process)
        threading.Thread(target=self._listen, args=[process], daemon=True).start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError):
            self._said.extend(process.stdout)

    def _wait(self, wanted: str) -> str:
        def found() -> list[str]:
            return [m[1] for line in list(self._said) if (m := re.search(wanted, line))]

        try:
            wait_until(lambda: bool(found()) or any(p.poll() is not None for p in self._processes), 180)
            return found()[0]
        except (AssertionError, IndexError) as e:
            raise AssertionError("".join(self._said[-30:])) from e

    def said(self) -> str:
        """What its own processes have printed."""
        return "".join(self._said)

    def errors(self) -> str:
        """What executors have printed."""
        return "".join(path.read_text(errors="replace") for path in self._above.glob("work*/app-*/*/stderr"))

    def close(self) -> None:
        """End all of it."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(WAIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(WAIT_SECONDS)
            if process.stdout is not None:
                process.stdout.close()


def run_driver(command: str, cwd: Path, path: Path, *, apart: bool = True, **environ: str) -> tuple[int, str, str]:
    """Run a command of a shell as a driver, with what is checked out here: its exit code, and what it printed.

    Args:
        path: where it finds Pythons by name.
        apart: executors do not get the driver's environment, as those of a `local-cluster` do.
    """
    theirs = ("SPARK_", "PYSPARK_", "MASTER", "LAKEHEAD_", "PYTHONPATH")
    unset = {k: v for k, v in os.environ.items() if not k.startswith(theirs)}
    own = {"PATH": f"{path}:{HOME}/bin:{unset.get('PATH', '')}", "TMPDIR": str(cwd), "SPARK_LOCAL_IP": "127.0.0.1"}
    given = {**unset, **own, **({"PYTHONPATH": str(SOURCE)} if apart else {}), "SPARK_HOME": str(HOME), **environ}
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 1200, "check": False}
    done = subprocess.run(["bash", "-ec", command], cwd=cwd, env=given, **how)
    return done.returncode, done.stdout, done.stderr


@contextlib.contextmanager
def standalone(above: Path, path: Path, hosts: Sequence[str]) -> Iterator[Standalone]:
    """A cluster for a while."""
    made = Standalone(above, path, hosts)
    try:
        yield made
    finally:
        made.close()
