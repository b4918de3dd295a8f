"""What an exception of Spark's is to who met it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import lakehead as lh
import lakehead.spark as lhs
from lakehead.spark import failures
from lakehead.spark.failures import job_error

BARE = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 2.0 failed 2 times
Error from python worker:
  /usr/bin/python: Error while finding module specification for 'lakehead.spark.daemon' (ModuleNotFoundError: No module named 'lakehead')
PYTHONPATH was:
  /opt/spark/python/lib/pyspark.zip
org.apache.spark.SparkException: EOFException occurred while reading the port number from the daemon's stdout.
\tat org.apache.spark.errors.SparkCoreErrors$.eofExceptionWhileReadPortNumberError(SparkCoreErrors.scala:54)
\tat org.apache.spark.util.SparkErrorUtils.tryWithSafeFinally$(SparkErrorUtils.scala:83)"""  # noqa: E501


@pytest.mark.parametrize(
    ("text", "module"), [(BARE, "lakehead"), (BARE.replace("'lakehead')", "'pyarrow')"), "pyarrow")]
)
def test_a_module_that_executors_lack_is_named(text: str, module: str) -> None:
    error = job_error(text)
    assert isinstance(error, lh.MissingDependencyError) and error.context["module"] == module
    assert f"has no module '{module}'" in str(error) and "--py-files" in str(error)


def test_a_module_of_someones_own_functions_is_not_told_to_be_lakeheads() -> None:
    error = job_error(BARE.replace("named 'lakehead')", "named 'our.prices')"))
    assert isinstance(error, lh.MissingDependencyError) and error.context["module"] == "our.prices"
    assert "lakehead[spark]" not in str(error) and "has no module 'our.prices'" in str(error)


def test_all_that_lakehead_depends_on_is_known_as_its_own() -> None:
    root = Path(__file__).parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *project["optional-dependencies"]["spark"]]
    assert all(failures._OF_LAKEHEAD.match(re.split(r"[^\w-]", name)[0]) for name in named)


def test_the_cause_is_no_line_of_a_stack_trace() -> None:
    error = job_error(BARE.replace("No module named", "of"))
    assert isinstance(error, lh.UnavailableError)
    assert "EOFException occurred" in str(error) and "SparkErrorUtils" not in str(error)


TASK = """Job aborted due to stage failure: Task 0 in stage 3.0 failed 4 times, most recent failure:
Traceback (most recent call last):
  File "/opt/py/lakehead/client/call.py", line 10, in ask
lakehead.errors.UnavailableError: nobody answers

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/opt/py/lakehead/spark/stream.py", line 10, in read
lakehead.errors.OffsetOutOfRangeError: the rows of shop.clicks are gone: start it anew

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:1)
\tat java.base/java.lang.Thread.run(Thread.java:840)"""


def test_what_a_task_raised_is_found_in_the_text_that_spark_made_of_it() -> None:
    spark = RuntimeError(TASK)
    error = lhs.raised(spark)
    assert isinstance(error, lh.OffsetOutOfRangeError) and error.__cause__ is spark
    assert str(error) == "the rows of shop.clicks are gone: start it anew"
    assert lhs.raised(error) is error
    assert isinstance(job_error(TASK), lh.OffsetOutOfRangeError)


@pytest.mark.parametrize(
    "text", ["", "a user's own ValueError: x", "lakehead.errors.NoSuchError: x", "lakehead.errors"]
)
def test_what_is_about_something_else_is_nobodys(text: str) -> None:
    assert lhs.raised(RuntimeError(text)) is None and lhs.raised(None) is None


def test_what_led_to_an_exception_counts() -> None:
    outer = RuntimeError("of a callback")
    outer.__cause__ = RuntimeError(TASK)
    assert isinstance(lhs.raised(outer), lh.OffsetOutOfRangeError)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('Cannot run program "./environment/bin/python3": error=2, No such file or directory', "no Python at './env"),
        ('Cannot run program "/opt/python" (in directory "."): error=13, Permission denied', "no Python at '/opt/py"),
        (
            "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9 than that in driver: 3.11, PySpark",
            "run Python 3.9 and this driver runs 3.11",
        ),
    ],
)
def test_a_python_that_is_not_there_is_named(text: str, says: str) -> None:
    error = job_error(f"Job aborted\n{text}\n\tat a.b.C(D.java:1)")
    assert isinstance(error, lh.MissingDependencyError) and says in str(error) and "PYSPARK_PYTHON" in str(error)


def test_a_lake_file_that_is_gone_is_named() -> None:
    path = (
        "file:///lake/shop/clicks-0cb141fe8372448f816bff5f9be98c79/data/day=1/95fc07cf279b4d7c9e676c42e37f21be.parquet"
    )
    text = f"[FAILED_READ_FILE.FILE_NOT_EXIST] Encountered error while reading file {path}. File does not exist."
    error = lhs.raised(RuntimeError(text))
    assert isinstance(error, lh.LakeFileMissingError) and error.context["path"] == path
    theirs = text.replace(path, "file:///home/me/data/mine.parquet")
    assert lhs.raised(RuntimeError(theirs)) is None, "a file of the user's own is no lake's"
