"""What a server asks of the lake, as a protocol: whoever composes server and lake injects the implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from lakehead.protocol.messages import LakeReply
from lakehead.types import Incarnation, TableDescriptor, TabletKey


class LakeOwner(Protocol):
    """Who a server is to its lake tables."""

    @property
    def incarnation(self) -> Incarnation:
        """This start."""
        ...

    @property
    def is_copy(self) -> bool:
        """Whether the folder is a copy of another."""
        ...

    def is_own(self, incarnation: str) -> bool:
        """Whether the text names a start of this very folder."""
        ...

    def is_ancestor(self, incarnation: str) -> bool:
        """Whether it names one of this folder, or of the one it is a copy of, before it was copied."""
        ...

    def has_lake_table(self, table_id: str) -> bool:
        """Whether one of its tables has a lake table of this id."""
        ...


class LakeState(Protocol):
    """The lakes of the tables of one server. Thread-safe.

    A lake is one lake table, or two (`TableDescriptor.lake_tables`): what is asked of a table is asked of both, but for
    `info`, which is of the one that is named.
    """

    @property
    def kinds(self) -> frozenset[str]:
        """The formats that lake tables may have."""
        ...

    def serve(self, owner: LakeOwner) -> None:
        """Told once, before all else: whose lake tables are asked for."""
        ...

    def create(self, desc: TableDescriptor) -> None:
        """Create the lake table; nothing happens when it exists with this table id. What has its name, and was left by
        a creation whose answer was lost, makes room.

        Raises:
            LakeStateError: another table has that name in the lake.
            UnavailableError: the catalog cannot be reached.
        """
        ...

    def require_alterable(self, desc: TableDescriptor) -> None:
        """That the lake table can follow its table to this definition.

        Raises:
            LakeStateError: another engine has added a column of a name that the definition has, of another type.
            FolderCopiedError: it belongs to another copy of the folder.
            UnavailableError: the catalog cannot be reached.
        """
        ...

    def require_free(self, desc: TableDescriptor, *, besides: Sequence[str]) -> None:
        """That no lake table has this table's name, but perhaps one of the tables of these ids.

        Raises:
            LakeStateError: one has.
            UnavailableError: the catalog cannot be reached.
        """
        ...

    def drop(self, desc: TableDescriptor, *, purge: bool) -> None:
        """Remove the lake table from its catalog; with ``purge`` its files too. One that belongs to another copy of the
        folder stays as it is.

        Raises:
            FolderCopiedError: the files of such a one were to be purged.
        """
        ...

    def info(self, desc: TableDescriptor, *, reading: bool = False) -> LakeReply:
        """Where the lake table stands now, read from its catalog, once it has the table's definition; its name too, if
        the catalog can rename, and no table of someone else's has it.

        Raises:
            FolderCopiedError: it belongs to another copy of the folder.
        """
        ...

    def tiered_offsets(self, desc: TableDescriptor) -> Mapping[TabletKey, int]:
        """Exclusive end of what the lake holds any of, per tablet, read from it; nothing where it is another's."""
        ...

    def adopt(self, desc: TableDescriptor, ends: Mapping[TabletKey, int]) -> bool:
        """Take a lake table over from the folder that this one is a copy of, whose logs end there; False when it is
        this folder's already.

        Raises:
            FolderCopiedError: another copy has committed since; its rows are not of this log.
            LakeStateError: the lake holds more than the log.
        """
        ...

    def proven_offsets(
        self, desc: TableDescriptor, overwritten: Mapping[TabletKey, int] = {}
    ) -> Mapping[TabletKey, int]:
        """Exclusive end of what the lake holds all of, per tablet, once every file that holds these rows was found with
        its size: a log may forget them.

        Args:
            overwritten: offsets below which tablets have no rows any more: a lake that has not followed yet will take
                rows above them anew.

        Raises:
            LakeFileMissingError: a file is not there.
            LakeStateError: the lake table is not as tiering left it.
        """
        ...

    def folders(self, desc: TableDescriptor) -> Sequence[str]:
        """Where its files are, as far as that is in the data folder."""
        ...
