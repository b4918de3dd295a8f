"""Data files as `lakehead inspect` reads them: mapped, never locked or changed."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lakehead.errors import CorruptionError, InvalidFileError

if TYPE_CHECKING:
    import pyarrow as pa


def mapped(path: str, kind: str) -> pa.Buffer:
    """All bytes of a file; ``kind`` is what files to inspect are called by, such as ``.log``.

    Raises:
        InvalidFileError: it cannot be read.
    """
    import pyarrow as pa

    try:
        if os.path.isfile(path) and os.path.getsize(path) == 0:
            return pa.py_buffer(b"")
        with pa.memory_map(path) as file:
            return file.read_buffer()
    except (OSError, pa.ArrowException) as e:
        number = getattr(e, "errno", None)
        reason = os.strerror(number) if number else str(e).splitlines()[0]
        reason = f"it is a folder: name a {kind} file in it" if os.path.isdir(path) else reason
        raise InvalidFileError(f"cannot read {path}: {reason}", path=path) from e


def require_whole(path: str, problems: Sequence[str], **context: Any) -> None:
    """Return if nothing was found to be wrong with what lies at a path.

    Raises:
        CorruptionError: something is; the message tells the first of the problems.
    """
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CorruptionError(f"{path} is damaged: {problems[0]}{more}", path=path, problems=len(problems), **context)


def time_text(microseconds: int) -> str:
    """A commit timestamp as ISO 8601; as it is where it lies beyond the calendar."""
    try:
        time = dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=microseconds)
    except OverflowError:
        return f"{microseconds} µs"
    return time.isoformat(timespec="milliseconds")
