"""Lake files that survive a power cut once their writer has closed them.

A commit may name a file only when its bytes are safe: otherwise a power cut right after it leaves a table that points
at nothing. Object stores promise that by themselves; on local file systems this FileIO syncs the file and its folder.
The catalog hands it to PyIceberg (``py-io-impl``), so manifests and metadata go through it too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
from pyarrow.fs import FileSystem, LocalFileSystem
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

from lakehead.env.storage import LocalStorage, open_private, sync_file
from lakehead.errors import UnavailableError
from lakehead.lake.lake_table import missing_file

PY_IO_IMPL = "py-io-impl"
FILES_AT_ONCE = 4
"""Files whose rows are read or written side by side; rows of that many are in memory."""
LOOKS_AT_ONCE = 8
"""Files of which only a footer, a manifest or their being there is looked at side by side."""
STORAGE_PREFIXES = ("s3.", "gcs.", "adls.", "hdfs.", "hf.", "client.")
"""How properties begin that say how files are reached."""
_OF_OBJECT_STORES = re.compile(r"AWS Error|google::cloud|Azure")
"""What Arrow's errors say that come from a store; others tell of a file, which is damaged, or of this machine."""
_STORAGE = LocalStorage()


class SyncedFileIO(PyArrowFileIO):
    """PyIceberg's Arrow FileIO, with every local file synced when it is closed."""

    def new_output(self, location: str) -> PyArrowFile:
        """A file to write; it is durable once its stream was closed without an error."""
        file = super().new_output(location)
        if not isinstance(file._filesystem, LocalFileSystem):
            return file
        return _SyncedFile(location=location, path=file._path, fs=file._filesystem)


class _SyncedFile(PyArrowFile):
    def create(self, overwrite: bool = False) -> pa.NativeFile:
        if not overwrite and os.path.exists(self._path):
            raise FileExistsError(f"Cannot create file, already exists: {self.location}")
        _STORAGE.make_folder(os.path.dirname(self._path))
        open_private(self._path).close()
        return _SyncedStream(self._path, mode="w")


class _SyncedStream(pa.OSFile):  # type: ignore[misc, name-defined, unused-ignore]
    """An Arrow output stream over a local file that syncs on close."""

    def __init__(self, path: str, mode: str) -> None:
        self._synced_path = path

    def close(self) -> None:
        """Close and sync; a second call does nothing."""
        if not self.closed:
            super().close()
            sync_file(self._synced_path)


SYNCED_FILE_IO = f"{SyncedFileIO.__module__}.{SyncedFileIO.__name__}"


def storage_properties(io: FileIO) -> dict[str, str]:
    """What opens a table's storage again in another process.

    A FileIO is given all that its catalog and its table have: the catalog's password is not for those who read.
    """
    return {str(k): str(v) for k, v in io.properties.items() if str(k).startswith((PY_IO_IMPL, *STORAGE_PREFIXES))}


def locate_file(io: FileIO, location: str) -> tuple[FileSystem, str]:
    """The Arrow file system and the path in it of a lake file, through the credentials of the table's FileIO.

    Any spelling of a local address will do: Java writes ``file:/x`` where PyIceberg writes ``file:///x``.
    """
    arrow_io = io if isinstance(io, PyArrowFileIO) else PyArrowFileIO(io.properties)
    scheme, netloc, path = arrow_io.parse_location(location, arrow_io.properties)
    return arrow_io.fs_by_scheme(scheme, netloc), path


@contextmanager
def lake_files(path: str | None = None) -> Iterator[None]:
    """Have a lake file that is gone be an error that names it; ``path`` where the one at stake is known.

    Raises:
        LakeFileMissingError: what is done inside did not find a file.
        UnavailableError: an object store did not answer, or refused.
    """
    try:
        yield
    except FileNotFoundError as e:
        raise missing_file(path or _named_file(e)) from e
    except OSError as e:
        if isinstance(e, ConnectionError | TimeoutError) or _OF_OBJECT_STORES.search(str(e)):
            raise UnavailableError(f"the lake's storage cannot be reached: {e}") from e
        raise


def _named_file(e: FileNotFoundError) -> str:
    if e.filename:
        return str(e.filename)
    named = re.search(r"'([^']+)'|not found: (.+)", str(e))  # Arrow's words, and PyIceberg's
    return next(filter(None, named.groups())).removeprefix("file://") if named else str(e)
