"""Lake files that survive a power cut once their writer has closed them, and are gone again when the disk refused them.

A commit may name a file only when its bytes are safe: otherwise a power cut right after it leaves a table that points
at nothing. Object stores promise that by themselves; on local file systems this FileIO syncs the file and its folder.
The catalog hands it to PyIceberg (``py-io-impl``), so manifests and metadata go through it too.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow.fs import FileSystem, FileType, LocalFileSystem
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

from lakehead.config import STORAGE_EXPIRES
from lakehead.env.clock import Clock
from lakehead.env.place import require_working_folder
from lakehead.env.storage import LocalStorage, open_private, storage_errors, sync_file
from lakehead.errors import CorruptionError, StorageError, UnavailableError
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
_ENDED = re.compile(r"expired.?token|token.*expired|HTTP status 400", re.IGNORECASE)
"""What stores say of credentials that ended; an answer to HEAD has no words."""
_RENEWED_AFTER_SECONDS_MIN = 5.0
_STORAGE = LocalStorage()
FileStamp: TypeAlias = tuple[int, int | None]
"""A file's bytes, and when it was written, in nanoseconds; another one at its place has another."""


class SyncedFileIO(PyArrowFileIO):
    """PyIceberg's Arrow FileIO, with every local file synced when it is closed."""

    def new_output(self, location: str) -> PyArrowFile:
        """A file to write; it is durable once its stream was closed without an error. Of what is refused by a local
        disk, the streams of such files raise StorageError, which names them, and nothing is left."""
        file = super().new_output(location)
        if not isinstance(file._filesystem, LocalFileSystem):
            return file
        return _SyncedFile(location=location, path=file._path, fs=file._filesystem)


class _SyncedFile(PyArrowFile):
    def create(self, overwrite: bool = False) -> pa.NativeFile:
        if not overwrite and os.path.exists(self._path):
            raise FileExistsError(f"Cannot create file, already exists: {self.location}")
        _STORAGE.make_folder(os.path.dirname(self._path))
        with storage_errors(self._path, "create"):
            open_private(self._path).close()
            return _SyncedStream(self._path, mode="w")


class _SyncedStream(pa.OSFile):  # type: ignore[misc, name-defined, unused-ignore]
    """An Arrow output stream over a local file that syncs on close. Arrow's own writers go past `write`: what they are
    refused is for their callers to tell."""

    def __init__(self, path: str, mode: str) -> None:
        self._synced_path = path
        self._refused = False

    def write(self, data: Any) -> int:
        """Write all of some bytes, or nothing more: the file is removed when the disk refuses.

        Raises:
            StorageError: it did.
        """
        with self._removed_if_refused():
            written: int = super().write(data)
            return written

    def close(self) -> None:
        """Close and sync; a second call does nothing.

        Raises:
            StorageError: the disk refused, and the file is removed.
        """
        if not self.closed:
            with self._removed_if_refused():
                super().close()
                if not self._refused:
                    sync_file(self._synced_path)

    @contextmanager
    def _removed_if_refused(self) -> Iterator[None]:
        try:
            with storage_errors(self._synced_path, "write"):
                yield
        except StorageError:
            self._refused = True
            with suppress(OSError):
                os.unlink(self._synced_path)
            raise


class RenewedFileIO(SyncedFileIO):
    """Reads with credentials that end (`STORAGE_EXPIRES`), and gets others before they do. Thread-safe.

    Args:
        renew: the storage's properties with others; raises LakeheadError.
    """

    def __init__(self, properties: Mapping[str, str], renew: Callable[[], Mapping[str, str]], clock: Clock) -> None:
        super().__init__(dict(properties))
        self._renew = renew
        self._clock = clock
        self._lock = threading.Lock()
        self._take(properties)
        self.fs_by_scheme = self._file_system

    def _take(self, properties: Mapping[str, str]) -> None:
        self.properties = dict(properties)
        left = float(properties.get(STORAGE_EXPIRES, "inf")) / 1000 - self._clock.now_us() / 1_000_000
        now = self._clock.monotonic()
        self._ends_at = now + left
        # Half of the time that is left is for the files that are being read by then. Where this clock is ahead of the
        # server's, it does not ask each time.
        self._renew_at = now + max(left / 2, _RENEWED_AFTER_SECONDS_MIN)

    def _file_system(self, scheme: str, netloc: str | None = None) -> FileSystem:
        with self._lock:
            if self._clock.monotonic() >= self._renew_at:
                self._renew_if_possible()
            properties = tuple(sorted(self.properties.items()))
        return _file_system(properties, scheme, netloc)

    def _renew_if_possible(self) -> None:
        try:
            self._take(self._renew())
        except UnavailableError:
            if self._clock.monotonic() >= self._ends_at:
                raise
            self._renew_at = self._clock.monotonic() + _RENEWED_AFTER_SECONDS_MIN

    def renewed_after(self, e: OSError) -> bool:
        """Whether what failed may be done again: its credentials had ended, and there are others now.

        Raises:
            LakeheadError: there are none.
        """
        said = str(e)
        with self._lock:
            of_store = _OF_OBJECT_STORES.search(said) is not None
            if not of_store or (_ENDED.search(said) is None and self._clock.monotonic() < self._ends_at):
                return False
            before = self.properties
            self._take(self._renew())
            return self.properties != before


@functools.lru_cache(maxsize=16)
def _file_system(properties: tuple[tuple[str, str], ...], scheme: str, netloc: str | None) -> FileSystem:
    """One for all tables and reads with the same credentials, for the sake of its connections."""
    return PyArrowFileIO(dict(properties))._initialize_fs(scheme, netloc)


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


def path_of(io: FileIO, location: str) -> str:
    """The path of `locate_file`, also in storages that are not known here."""
    arrow_io = io if isinstance(io, PyArrowFileIO) else PyArrowFileIO(io.properties)
    path: str = arrow_io.parse_location(location, arrow_io.properties)[2]
    return path


def file_stamps(io: FileIO, locations: Iterable[str]) -> dict[str, FileStamp] | None:
    """The bytes of each file and when it was written, asked for at once; None: one is gone, or its storage does not
    say."""
    located = [(location, *locate_file(io, location)) for location in locations]
    found: dict[str, FileStamp] = {}
    for _, group in itertools.groupby(located, key=lambda at: id(at[1])):
        same = list(group)
        try:
            infos = same[0][1].get_file_info([path for _, _, path in same])
        except OSError:
            return None
        if any(info.type != FileType.File for info in infos):
            return None
        found |= {at[0]: (info.size, info.mtime_ns) for at, info in zip(same, infos, strict=True)}
    return found


@contextmanager
def lake_files(path: str | None = None) -> Iterator[None]:
    """Have a lake file that is gone, or damaged, be an error that names it; ``path`` where the one at stake is known.

    Raises:
        LakeFileMissingError: what is done inside did not find a file.
        CorruptionError: what it read is damaged.
        StorageError: the disk did not do it, or this process may open no more files.
        UnavailableError: an object store did not answer, or refused.
    """
    try:
        yield
    except FileNotFoundError as e:
        require_working_folder("PyIceberg")  # its configuration may be there: it looks for it wherever it reads
        raise missing_file(path or _named_file(e)) from e
    except (pa.ArrowInvalid, UnicodeDecodeError) as e:
        if is_damage(e):
            raise damaged_file(path, e) from e
        raise
    except OSError as e:
        if isinstance(e, ConnectionError | TimeoutError) or _OF_OBJECT_STORES.search(str(e)):
            raise UnavailableError(f"the lake's storage cannot be reached: {e}") from e
        if is_damage(e):
            raise damaged_file(path, e) from e
        with storage_errors(path or _named_file(e), "use"):
            raise


def is_damage(e: BaseException) -> bool:
    """Whether Arrow says that a Parquet file is none, or is not as it was written, or that an address cannot be."""
    if isinstance(e, ValueError):
        return isinstance(e, UnicodeDecodeError) or any(word in str(e) for word in ("Parquet", "Embedded NUL"))
    # Of what the system or an object store refused there is a number, or a word.
    return type(e) is OSError and e.errno is None and not _OF_OBJECT_STORES.search(str(e))


def damaged_file(path: str | None, e: BaseException) -> CorruptionError:
    """The error for a file of the lake whose bytes are not what was written."""
    what = f"{path} is damaged" if path else "a file of the lake is damaged"
    return CorruptionError(
        f"{what} ({e}): restore it from a backup, or have an Iceberg engine roll the table back to a snapshot that does"
        " not name it",
        path=path or "",
    )


PARQUET = ds.ParquetFileFormat(
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True)
)
"""Pages that have a checksum, as all have that tiering writes, are compared with it."""


def open_parquet(path: str, fs: FileSystem, **options: Any) -> pq.ParquetFile:
    """One file, read as `PARQUET`."""
    return pq.ParquetFile(path, filesystem=fs, page_checksum_verification=True, **options)


def _named_file(e: OSError) -> str:
    if e.filename:
        return str(e.filename)
    named = re.search(r"'([^']+)'|not found: (.+)", str(e))  # Arrow's words, and PyIceberg's
    return next(filter(None, named.groups())).removeprefix("file://") if named else str(e)
