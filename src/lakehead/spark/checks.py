"""What the executors of a session need, looked at before anything relies on it: Lakehead, a way to its server, a token.

On a cluster, and wherever executors run another Python than the driver. One small job does it, which a session's first
job would have to wait for as well: Pythons are started, and what every task needs is imported.
"""

from __future__ import annotations

import functools
import glob
import importlib
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pyspark

from lakehead.api.connection import Connection
from lakehead.env.tls import Tls
from lakehead.errors import AuthenticationError, InvalidRequestError, MissingDependencyError, UnavailableError
from lakehead.spark.connections import in_worker, worker_address
from lakehead.spark.daemon import PLANNING, WORKING
from lakehead.spark.executor import run_job
from lakehead.spark.failures import error_of
from lakehead.spark.own_python import is_own_python
from lakehead.spark.privacy import is_private
from lakehead.spark.worker import guarded

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASKS_MAX = 16
_NAME = "check of the executors"
_ANSWER_SECONDS = 120
_checked: set[tuple[str, str, str | None, Tls | None]] = set()
"""Applications, the addresses that their executors have reached, and with what."""


def require_executors(spark: SparkSession, con: Connection) -> None:
    """Return if tasks of a session find Lakehead and what it needs, and its server lets them in.

    Raises:
        MissingDependencyError: their Python is not there, of another version, or lacks a module, which it names.
        AuthenticationError: the server does not know them.
        InvalidRequestError: they do not reach it.
    """
    context = spark.sparkContext
    checked = (context.applicationId, con.uri, *con._given)
    if (is_private(context.master) and is_own_python(context.pythonExec)) or checked in _checked:
        return
    known = context._jsc.sc().getExecutorMemoryStatus().size() - 1
    tasks = [worker_address(con)] * min(max(known, 1), TASKS_MAX)
    told = run_job(spark, _NAME, functools.partial(guarded, look_around), tasks, len(tasks))
    error = next((e for _, e in told if e is not None), None)
    if isinstance(error, AuthenticationError):
        raise AuthenticationError(
            f"Spark's executors are not let in by {con.uri}: they have the token and the certificates that connect()"
            f" was given, and nothing of this machine's files; give it token= ({error})",
            uri=con.uri,
        ) from error
    if isinstance(error, UnavailableError):
        con.tables()  # whose server is away altogether is told so
        raise InvalidRequestError(
            f"Spark's executors do not reach {con.uri}, which this process does: connect to an address of the server"
            f" that their machines reach, as in 'lakehead server --listen HOST:PORT' ({error})",
            uri=con.uri,
        ) from error
    if error is not None:
        raise error
    _checked.add(checked)


def look_around(uri: str) -> None:
    """Import what tasks need, and greet the server, in a task."""
    for module in WORKING:
        importlib.import_module(module)
    in_worker(uri, lambda con: con._endpoint and None)


def require_planner(spark: SparkSession) -> None:
    """Return if ``format("lakehead")`` can be planned: Spark does so on the driver, by the Python of its executors.

    Raises:
        MissingDependencyError: it is not there, or lacks a module.
    """
    python = spark.sparkContext.pythonExec
    if is_own_python(python):
        return
    why = (
        f"Spark plans what format('lakehead') reads and writes on the driver, by the Python of its executors,"
        f" PYSPARK_PYTHON={python!r}, which "
    )
    if shutil.which(python) is None:
        raise MissingDependencyError(
            f"{why}is not there on this machine: name one that is on both, such as python3, or unpack the environment"
            " here, too",
            python=python,
        )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_paths(spark))}
    code = "; ".join(f"import {module}" for module in PLANNING)
    try:
        told = subprocess.run(
            [python, "-c", code], env=environment, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise MissingDependencyError(f"{why}cannot be run: {e}", python=python) from e
    if told.returncode:
        missing = error_of(told.stderr)
        last = (told.stderr.strip().splitlines() or [f"exit code {told.returncode}"])[-1]
        lacks = f"has no module {missing.context['module']!r}" if missing and "module" in missing.context else last
        raise MissingDependencyError(f"{why}{lacks}: install lakehead[spark] there", python=python)


def _paths(spark: SparkSession) -> list[str]:
    """Where Python finds modules that Spark starts on the driver: its own, `--py-files`, and what it is told."""
    context = spark.sparkContext
    home = os.environ.get("SPARK_HOME") or os.path.dirname(pyspark.__file__)
    sparks = sorted(glob.glob(os.path.join(glob.escape(home), "python", "lib", "*.zip")))
    shipped = [path for path in sys.path if os.path.basename(path) in context._python_includes]
    given = [context.environment.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    return [*sparks, *shipped, *(path for text in given for path in text.split(os.pathsep) if path)]
