"""What a server asks of the lake, as a protocol: whoever composes server and lake injects the implementation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from lakehead.protocol.messages import LakeReply
from lakehead.types import TableDescriptor, TabletKey


class LakeState(Protocol):
    """The lake tables of one server. Thread-safe."""

    def create(self, desc: TableDescriptor) -> None:
        """Create the lake table; nothing happens when it exists with this table id.

        Raises:
            LakeStateError: another table has that name in the lake.
            UnavailableError: the catalog cannot be reached.
        """
        ...

    def drop(self, desc: TableDescriptor, *, purge: bool) -> None:
        """Remove the lake table from its catalog; with ``purge`` its files too."""
        ...

    def info(self, desc: TableDescriptor) -> LakeReply:
        """Where the lake table stands now, read from its catalog."""
        ...

    def tiered_offsets(self, desc: TableDescriptor) -> Mapping[TabletKey, int]:
        """Exclusive end of what the lake holds, per tablet, read from the lake."""
        ...

    def proven_offsets(self, desc: TableDescriptor) -> Mapping[TabletKey, int]:
        """`tiered_offsets`, once every file that holds these rows was found with its size: a log may forget them.

        Raises:
            LakeFileMissingError: a file is not there.
            LakeStateError: the lake table is not as tiering left it.
        """
        ...
