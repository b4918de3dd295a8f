"""The real processes under test: a server, in-process rounds, a Spark tiering service. Each can be armed and killed."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal

import psutil
from tests.crash.points import PLAN_VARIABLE, REACHED
from tests.ports import lasting_port

import lakehead as lh

LAUNCH = Path(__file__).with_name("launch.py")
TOKEN = "a token of the crash suite"
START_SECONDS = 60.0
Action = Literal["kill", "stop", "lose", "report"]
Task = Literal["tier", "maintain", "clean", "truncate"]


class Child:
    """A process started through the launcher, with a plan file of its own."""

    def __init__(self, work: Path, role: str, *, points: bool = True) -> None:
        self.role = role
        self.plan = work / f"{role}.plan"
        self._errors = work / f"{role}.stderr"
        self._points = points
        self._armed = 0
        self.process: subprocess.Popen[str] | None = None

    def _spawn(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        env = {**os.environ, "LAKEHEAD_TOKEN": TOKEN, **environment}
        if self._points:
            env[PLAN_VARIABLE] = str(self.plan)
        with open(self._errors, "a") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(LAUNCH), *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=env,
            )  # fmt: skip
        return self.process

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def errors(self) -> str:
        """What it wrote to standard error, in all its lives."""
        return self._errors.read_text() if self._errors.exists() else ""

    def arm(self, point: str, *, nth: int = 1, action: Action = "kill") -> None:
        """Have something happen when a named point is reached for the n-th time from now on."""
        self.disarm()
        self._armed += 1
        text = json.dumps({"point": point, "nth": nth, "action": action, "number": self._armed})
        beside = self.plan.with_suffix(".new")
        beside.write_text(text)
        beside.rename(self.plan)

    def disarm(self) -> None:
        """Forget the plan, and that it was carried out."""
        self.plan.unlink(missing_ok=True)
        Path(f"{self.plan}{REACHED}").unlink(missing_ok=True)

    @property
    def reached(self) -> bool:
        """Whether the armed point was reached and the plan carried out."""
        return Path(f"{self.plan}{REACHED}").exists()

    def wait_reached(self, seconds: float) -> bool:
        """Wait until the armed point was reached."""
        return wait_until(lambda: self.reached or not self.alive, seconds) and self.reached

    def wait_dead(self, seconds: float) -> bool:
        """Wait for the process to end; True when it did."""
        try:
            assert self.process is not None
            self.process.wait(seconds)
            return True
        except subprocess.TimeoutExpired:
            return False

    def kill(self) -> None:
        """SIGKILL, whatever it is doing."""
        if self.process is not None:
            self.process.kill()
            self.release()

    def release(self) -> None:
        """Reap a process that has ended or is about to."""
        assert self.process is not None
        self.process.wait(START_SECONDS)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what was written last, it never read
                    pipe.close()


class Server(Child):
    """``lakehead server`` on one folder and port in all its lives."""

    def __init__(self, work: Path, *, points: bool = True) -> None:
        super().__init__(work, "server", points=points)
        self.folder = work / "data"
        self.port = lasting_port()

    def start(self) -> float | None:
        """Start; seconds until it says that it serves, None when it ended before."""
        begin = time.perf_counter()
        process = self._spawn("server", "--data", str(self.folder), "--listen", f"127.0.0.1:{self.port}")
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("serving "):
            self.release()
            return None
        self.port = int(line.strip().rpartition(":")[2])
        return time.perf_counter() - begin

    @property
    def uri(self) -> str:
        return f"lakehead://127.0.0.1:{self.port}"

    def connect(self) -> lh.Connection:
        return lh.connect(self.uri, token=TOKEN)

    def terminate(self) -> None:
        """SIGTERM: a clean stop begins."""
        assert self.process is not None
        self.process.terminate()


class Rounds(Child):
    """A process that runs tiering rounds and maintenance on demand, without Spark."""

    def __init__(self, work: Path, number: int) -> None:
        super().__init__(work, f"rounds-{number}")

    def start(self, uri: str) -> None:
        """Begin to start; `tier` waits until it is ready."""
        process = self._spawn("rounds", uri)
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)

    def wait_ready(self) -> bool:
        """Wait until it is connected; False when it ended before."""
        return self._answers.get(timeout=START_SECONDS) is not None

    def send(self, table: str, task: Task = "tier") -> None:
        """Ask for a round of a table, its maintenance, or the removal of its orphans."""
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(f"{task} {table}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return

    @property
    def idle(self) -> bool:
        """Whether no answer is waiting to be taken."""
        return self._answers.empty()

    def answer(self, seconds: float = 60.0) -> dict[str, Any] | None:
        """What it came to; None when the process died in it."""
        return self._answers.get(timeout=seconds)


class TieringJob(Child):
    """``lakehead tier run --local``, one of several that share the tables of a server."""

    def __init__(self, work: Path, number: int) -> None:
        super().__init__(work, f"job-{number}")
        self._rounds: list[str] = []

    def start(self, uri: str) -> None:
        """Begin to start; `rounds` fills as they are done."""
        process = self._spawn("tier", "run", "--local", "--uri", uri, "--output", "json")
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._rounds.append(json.loads(line)["table"])

    @property
    def rounds(self) -> list[str]:
        """The table of each round that moved rows."""
        return list(self._rounds)

    def terminate(self) -> None:
        """SIGTERM: it finishes rounds under way, then ends."""
        assert self.process is not None
        self.process.terminate()


class SparkChild(Child):
    """A Spark driver with its JVM and its Python workers."""

    def __init__(self, work: Path, role: str, *, points: bool = True) -> None:
        super().__init__(work, role, points=points)
        self.worker_plan = work / f"{role}-worker.plan"
        self._work = work
        self._family: list[psutil.Process] = []

    def spawn_spark(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a driver whose workers have the points in them, too."""
        python = self._work / f"{self.role}-python"
        plan = f'{PLAN_VARIABLE}="{self.worker_plan}" ' if self._points else ""
        launch = f'[ "$1" = -m ] && {plan}exec "{sys.executable}" "{LAUNCH}" "$@"'
        python.write_text(f'#!/bin/sh\n{launch}\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        return self._spawn(
            *arguments, PYSPARK_PYTHON=str(python), SPARK_LOCAL_DIRS=str(self._work / f"{self.role}-scratch")
        )

    def family(self) -> list[psutil.Process]:
        """The driver's JVM, Python daemons and workers, as they are now."""
        try:
            return list(psutil.Process(self.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return []

    def workers(self) -> list[psutil.Process]:
        """Python processes below the JVM that run tasks: children of daemons."""
        found = []
        for process in self.family():
            try:
                parent = process.parent()
                if parent is not None and _is_daemon(process) and _is_daemon(parent):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def arm_worker(self, point: str) -> None:
        """Have the first worker that reaches the point die."""
        Path(f"{self.worker_plan}{REACHED}").unlink(missing_ok=True)
        self.worker_plan.write_text(json.dumps({"point": point, "nth": 1, "action": "kill"}))

    @property
    def worker_reached(self) -> bool:
        return Path(f"{self.worker_plan}{REACHED}").exists()

    def remember_family(self) -> None:
        """Note the processes below, so that none outlives `kill`."""
        self._family = self.family()

    def kill(self) -> None:
        """SIGKILL the driver; the JVM and the workers end by themselves, or are ended."""
        self._family = self.family() or self._family
        super().kill()
        _, alive = psutil.wait_procs(self._family, timeout=10)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=10)
        shutil.rmtree(self._work / f"{self.role}-scratch", ignore_errors=True)


def _is_daemon(process: psutil.Process) -> bool:
    """Of Lakehead, or of Spark where Python is not the driver's own: here it is a script that puts points in."""
    return any(argument in ("lakehead.spark.daemon", "pyspark.daemon") for argument in process.cmdline())


class SparkTiering(SparkChild):
    """``lakehead tier run``."""

    def __init__(self, work: Path, *, points: bool = True) -> None:
        super().__init__(work, "spark", points=points)
        self._rounds: list[dict[str, Any]] = []

    def start(self, uri: str, tables: list[str]) -> None:
        """Begin to start; `rounds` fills as they are done."""
        chosen = [argument for table in tables for argument in ("--table", table)]
        process = self.spawn_spark("tier", "run", "--uri", uri, "--output", "json", *chosen)
        self._rounds = []
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._rounds.append(json.loads(line))

    @property
    def rounds(self) -> int:
        """Rounds that this life has reported."""
        return len(self._rounds)


def wait_until(condition: Any, seconds: float) -> bool:
    """Poll until a condition holds that another process brings about; False when time is up."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.003)
    return True
