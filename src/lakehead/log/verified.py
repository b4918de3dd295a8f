"""Files whose bytes are checked before they are believed, and again once someone has touched them.

Reads are shared with the file (memory maps), which costs nothing and checks nothing. So each file is read once with all
its checksums, by copying: what a disk cannot give back is then an error, not the end of the process. After that it is
watched: when its size or its time of change is another, it is checked anew before it is read on.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

import pyarrow as pa

from lakehead.env.storage import Storage
from lakehead.errors import CorruptionError, StorageError

CHUNK_BYTES = 1 << 20


class ReadAhead:
    """Reads a file from its start to its end by way of a chunk at a time."""

    def __init__(self, fetch: Callable[[int, int], pa.Buffer]) -> None:
        """
        Args:
            fetch: gives bytes ``[start, start + length)`` of the file, fewer where it ends.
        """
        self._fetch = fetch
        self._start = 0
        self._chunk = pa.py_buffer(b"")

    def read(self, start: int, length: int) -> pa.Buffer:
        """Bytes ``[start, start + length)``; fewer where the file ends."""
        at = start - self._start
        if at < 0 or at + length > self._chunk.size:
            self._start, self._chunk, at = start, self._fetch(start, max(length, CHUNK_BYTES)), 0
        return self._chunk.slice(at, min(length, self._chunk.size - at))


def copied(storage: Storage, path: str) -> ReadAhead:
    """A file's bytes, copied from it; none where it is gone.

    Reading raises:
        CorruptionError: the disk cannot read them.
    """

    def fetch(start: int, length: int) -> pa.Buffer:
        try:
            found = storage.read_range(path, start, length)
        except StorageError as e:
            if e.context.get("errno") != errno.EIO:
                raise
            text = f"{path} at byte {start}: the disk cannot read it: restore the file"
            raise CorruptionError(text, path=path, position=start) from e
        return pa.py_buffer(b"") if found is None else found

    return ReadAhead(fetch)


class Watch:
    """What is known of one file, which nobody should write any more. Any number of threads at once."""

    def __init__(self, storage: Storage, path: str, check: Callable[[], Iterator[int]]) -> None:
        """
        Args:
            check: reads the whole file, yields how many bytes it has looked at since it last did, and raises
                `CorruptionError` at what is not as it was written.
        """
        self._storage = storage
        self._path = path
        self._check = check
        # Version of the file that was looked at last, and what was wrong with it; replaced at once.
        self._seen: tuple[tuple[int, ...] | None, CorruptionError | None] = (None, None)

    @property
    def damage(self) -> CorruptionError | None:
        """What was wrong with the file when it was last looked at."""
        return self._seen[1]

    def trust(self) -> None:
        """Take the file as it is now for what was written: this process wrote or checked it."""
        self._seen = self._storage.version(self._path), None

    def require_whole(self) -> None:
        """Return once the file is known to be as it was written. Two threads may look at once.

        Raises:
            CorruptionError: it is not; ``context`` names file and position.
        """
        version, seen = self._storage.version(self._path), self._seen[0]
        # We may have a file open that was trimmed or replaced since: what we see is the former file.
        if version is not None and version != seen and (seen is None or version[0] == seen[0]):
            for _ in self.check():
                pass
        damage = self.damage
        if damage is not None:
            raise type(damage)(damage.message, **damage.context) from damage

    def check(self) -> Iterator[int]:
        """Look at the whole file, and remember what was found; yields bytes looked at, now and then."""
        version = self._storage.version(self._path)
        if version is None:
            return
        try:
            yield from self._check()
            self._seen = version, None
        except CorruptionError as e:
            if self._storage.version(self._path) is not None:  # else it was removed under our eyes
                self._seen = version, e
