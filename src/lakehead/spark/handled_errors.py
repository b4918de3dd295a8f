"""Errors of Spark's that are answered here, or raised as errors of ours, which say the same: PySpark itself writes each
that it raises to stderr, as kilobytes of JSON."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar

from pyspark.logger import PySparkLogger

_LOGGERS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
_handled: ContextVar[bool] = ContextVar("handled", default=False)


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Have PySpark write none of the errors that it raises within, in this thread."""
    for name in _LOGGERS:
        logger = PySparkLogger.getLogger(name)
        if _is_told not in logger.filters:
            logger.addFilter(_is_told)
    before = _handled.set(True)
    try:
        yield
    finally:
        _handled.reset(before)


def _is_told(record: logging.LogRecord) -> bool:
    return not _handled.get()
