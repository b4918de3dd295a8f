"""What an exception of Spark's is to its caller: Spark hands on what happened in Python as the text of a Java one.

All of it is found by what Python, and Java where it starts one, have written there; the last that is told counts, as it
is what the others led to.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from lakehead.errors import ERRORS_BY_CODE, LakeheadError, MissingDependencyError, UnavailableError
from lakehead.lake.lake_table import missing_file

_ERRORS = {cls.__name__: cls for cls in ERRORS_BY_CODE.values()}
_OURS = re.compile(r"\blakehead\.errors\.(\w+): (.+)")
_MODULE = re.compile(r"No module named '([\w.]+)'")
_PROGRAM = re.compile(r'Cannot run program "([^"]+)"[^\n]*(?:No such file|Permission denied)')
_VERSIONS = re.compile(r"Python in worker has different version: (\S+) than that in driver: (\d[\d.]*)")
# A data file of a lake table, by the names that we give: others' files may be gone, too.
_LAKE_FILE = r"\w+:/[^\s'\"]+-[0-9a-f]{32}/data/[^\s'\"]+\.parquet"
_GONE = re.compile(rf"(?:FileNotFoundException: (?:File )?|FILE_NOT_EXIST[^\n]*?)\b({_LAKE_FILE})")
_WAYS = "install lakehead[spark] there, or hand it over: --py-files has its own code, a packed environment all of it"
_OF_LAKEHEAD = re.compile(
    r"(lakehead|pyspark_lakehead|pyspark|py4j|pandas|pyarrow|numpy|numba|llvmlite|pyiceberg|sqlalchemy|duckdb|sqlglot"
    r"|msgspec|typer|rich|crc32c)(\.|$)"
)
"""Modules that Lakehead needs, or is; others are what someone's own functions import."""


def error_of(text: str) -> LakeheadError | None:
    """The Lakehead error that the text of an exception tells of, or what the Python lacked that was to run it; None
    where it is about something else."""
    found = [*_told(text)]
    return max(found, key=lambda at: at[0])[1] if found else None


def _told(text: str) -> Iterator[tuple[int, LakeheadError]]:
    for m in _OURS.finditer(text):
        if (cls := _ERRORS.get(m[1])) is not None:
            yield m.start(), cls(m[2].strip())
    for m in _MODULE.finditer(text):
        ways = _WAYS if _OF_LAKEHEAD.match(m[1]) else "install it there, or hand it over"
        why = f"the Python of Spark's executors has no module {m[1]!r}: {ways}; then begin again"
        yield m.start(), MissingDependencyError(why, module=m[1])
    for m in _GONE.finditer(text):
        yield m.start(), missing_file(m[1])
    for m in _PROGRAM.finditer(text):
        why = (
            f"Spark's executors have no Python at {m[1]!r}: set PYSPARK_PYTHON to one that is there, such as python3,"
            " or bin/python3 of a packed environment; then begin again"
        )
        yield m.start(), MissingDependencyError(why, python=m[1])
    for m in _VERSIONS.finditer(text):
        why = (
            f"Spark's executors run Python {m[1]} and this driver runs {m[2]}, whose functions they cannot load: set"
            " PYSPARK_PYTHON to a Python of the driver's version there; then begin again"
        )
        yield m.start(), MissingDependencyError(why, version=m[1])


def raised(error: BaseException | None) -> LakeheadError | None:
    """The Lakehead error that made Spark fail, which Spark tells of in the text of an exception of its own: what tasks
    raised, or `MissingDependencyError` where their Python lacks something.

    Args:
        error: what a DataFrame's action raised, or a query's ``exception()`` or ``awaitTermination()``; one of
            Lakehead's is returned as it is.

    Returns:
        None where it is about something else.
    """
    if error is None or isinstance(error, LakeheadError):
        return error
    found = error_of(str(error))
    if found is None:
        return raised(error.__cause__)
    found.__cause__ = error
    return found


@contextlib.contextmanager
def as_lakeheads() -> Iterator[None]:
    """Have what Spark raises within be the Lakehead error that it tells of, as of `raised`; other errors stay."""
    try:
        yield
    except Exception as e:
        found = raised(e)
        if found is None or found is e:
            raise
        raise found from e


def job_error(text: str) -> LakeheadError:
    """What a Spark job that failed is to its caller, by the text of its exception."""
    found = error_of(text)
    if found is not None:
        return found
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("at ")]
    named = [line for line in lines if "Error" in line or "Exception" in line]
    return UnavailableError(f"a Spark job of Lakehead's failed: {(named or lines or [text])[-1][:500]}")
