"""How frames become durable and ordered, which a tablet leaves to its `Committer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from lakehead.format.frame import Frame
from lakehead.log import LogTablet
from lakehead.types import TableDescriptor, TabletKey


class Committer(Protocol):
    """What a tablet commits through."""

    @property
    def waits(self) -> bool:
        """Whether a commit waits for something other than this process, as a disk or a follower: of several that do,
        each had better have a thread."""
        ...

    def commit(self, log: LogTablet, frames: Sequence[Frame]) -> None:
        """Return once these frames are in the log, and as durable as the table promises; then they are applied.

        Raises:
            FencedError: someone else may write this log.
            StorageError: they are not in it, or not known to be.
        """
        ...


class LocalCommitter:
    """The log's own disk decides: append, then one fdatasync.

    Args:
        sync: whether to wait for the disk.
        fence: raises `FencedError` once the folder may have another owner.
    """

    def __init__(self, *, sync: bool, fence: Callable[[], None]) -> None:
        self.waits = sync
        self._fence = fence

    def commit(self, log: LogTablet, frames: Sequence[Frame]) -> None:
        self._fence()
        log.append_frames(frames)
        if self.waits:
            log.sync()
        # Once more: what another owner may have written over is not acknowledged.
        self._fence()


Committers = Callable[[TableDescriptor, TabletKey, Callable[[], None]], Committer]
"""Makes the committer of a tablet, whose fence is given."""


def local_committer(desc: TableDescriptor, key: TabletKey, fence: Callable[[], None]) -> Committer:
    """Each tablet commits to its own log."""
    return LocalCommitter(sync=desc.properties.durability == "sync", fence=fence)
