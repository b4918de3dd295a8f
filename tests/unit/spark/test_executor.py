"""What a Spark job that failed is to the round that began it."""

from __future__ import annotations

import pytest

import lakehead as lh
from lakehead.spark.executor import job_error

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


def test_the_cause_is_no_line_of_a_stack_trace() -> None:
    error = job_error(BARE.replace("No module named", "of"))
    assert isinstance(error, lh.UnavailableError)
    assert "EOFException occurred" in str(error) and "SparkErrorUtils" not in str(error)
