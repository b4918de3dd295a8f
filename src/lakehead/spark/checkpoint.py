"""What a query's checkpoint says of a micro-batch: where it ends.

Its number alone does not tell which rows it has. A query that goes on from an older copy of its checkpoint gives the
numbers that follow to whatever has come since: a micro-batch is one that was written before if its number and its end
are the same (`lakehead.protocol.staging.Publish`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from py4j.protocol import Py4JError

from lakehead.protocol.staging import PLANNED_BYTES_MAX

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql.streaming.query import StreamingQuery

ReadText: TypeAlias = "Callable[[str], str | None]"
"""The text of a file of the checkpoint, by its path in there; None for one that is not there, or cannot be read."""
_FILE = "file:/"
_FILES = "logOffset"
"""Spark counts the micro-batches that a folder of files gave; which files those were stands in a log of the source."""


def planned_as(read: ReadText, number: int) -> str:
    """What a micro-batch was planned as: where each source was to end; empty if it cannot be found out."""
    text = read(f"offsets/{number}")
    if text is None:
        return ""
    # A version, what Spark knew then (times, settings), and lines of sources.
    version, *lines = text.split("\n")
    ends = []
    for folders, name, end in (_by_name if version == "v2" else _by_use)(lines[1:]):
        said = end if name is None else f"{{{json.dumps(name)}: {end}}}"
        files = _log_of_files(end)
        if files is not None:
            listed = [found for folder in folders if (found := _files(read, folder, files)) is not None]
            if not listed:
                return ""
            said = " ".join((said, *listed))
        ends.append(said)
    whole = "\n".join(ends)
    short = len(whole.encode()) <= PLANNED_BYTES_MAX
    return whole if short else f"sha256 {hashlib.sha256(whole.encode()).hexdigest()}"


def _by_use(lines: Sequence[str]) -> Iterator[tuple[Sequence[str], None, str]]:
    """Folders that may be those of a line's source, and where it ends: Spark writes a line for each use of a source,
    and numbers the sources. Those of equal lines may be one."""
    least: dict[str, int] = {}
    for at, end in enumerate(lines):
        first = least.setdefault(end, len(least))
        yield [str(number) for number in range(first, at + 1)], None, end


def _by_name(lines: Sequence[str]) -> Iterator[tuple[Sequence[str], str, str]]:
    """As `_by_use`, with the name of the source, which its folder has, too; in no order that Spark would promise."""
    for line in sorted(lines):
        name, _, end = line.partition(":")
        yield [name], name, end


def _log_of_files(end: str) -> int | None:
    try:
        found = json.loads(end)
    except ValueError:
        return None
    log = found.get(_FILES) if isinstance(found, dict) else None
    return log if isinstance(log, int) and log >= 0 else None


def _files(read: ReadText, source: str, log: int) -> str | None:
    """What tells the files of a micro-batch from others, though they may have been listed in another order."""
    for name in (f"{log}", f"{log}.compact"):
        if (text := read(f"sources/{source}/{name}")) is not None:
            own = sorted(line for line in text.split("\n")[1:] if line.endswith(f'"batchId":{log}}}'))
            return f"sha256 {hashlib.sha256(chr(10).join(own).encode()).hexdigest()}"
    return None


def root_of(query: StreamingQuery) -> str:
    """Where the checkpoint of a query is, by its path; empty if Spark does not tell."""
    try:
        return str(query._jsq.streamingQuery().resolvedCheckpointRoot())
    except (Py4JError, TypeError):
        return ""


def local_folder(place: str) -> str | None:
    """The folder that Spark means by a path, if that is one here. What it has of percent signs are no escapes; one
    without a scheme may be of Spark's default storage, where nothing is found here then."""
    if place.startswith(_FILE):
        place = f"/{place[len(_FILE) :].lstrip('/')}"
    place = os.path.abspath(place) if place and ":" not in place else place
    return place if place.startswith("/") and os.path.isdir(place) else None


def in_folder(folder: str) -> ReadText:
    """Reads a checkpoint on a disk of this machine."""

    def read(path: str) -> str | None:
        try:
            with open(f"{folder}/{path}", encoding="utf-8") as file:
                return file.read()
        except (OSError, ValueError):
            return None

    return read


def by_spark(context: SparkContext, place: str) -> ReadText:
    """Reads a checkpoint wherever it is, by Spark's own drivers, which takes some questions to the JVM a file."""

    def read(path: str) -> str | None:
        try:
            jvm = context._gateway.jvm
            file = jvm.org.apache.hadoop.fs.Path(f"{place}/{path}")
            stream = file.getFileSystem(context._jsc.hadoopConfiguration()).open(file)
            try:
                return str(jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
            finally:
                stream.close()
        except (Py4JError, TypeError):
            return None

    return read


def checkpoint_of(query: StreamingQuery, context: SparkContext) -> ReadText:
    """Reads the checkpoint of a query."""
    place = root_of(query)
    folder = local_folder(place)
    return by_spark(context, place) if folder is None else in_folder(folder)
