"""A lake for tests of the server: tests say what theirs does otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lakehead.protocol import messages as m
from lakehead.server.lake_state import LakeOwner
from lakehead.types import TableDescriptor, TabletKey


class EmptyLake:
    """A `LakeState` that holds nothing."""

    kinds = frozenset({"iceberg"})

    def serve(self, owner: LakeOwner) -> None:
        return

    def adopt(self, desc: TableDescriptor, ends: Mapping[TabletKey, int]) -> bool:
        raise NotImplementedError

    def create(self, desc: TableDescriptor) -> None:
        return

    def require_alterable(self, desc: TableDescriptor) -> None:
        return

    def require_free(self, desc: TableDescriptor, *, besides: Sequence[str]) -> None:
        return

    def drop(self, desc: TableDescriptor, *, purge: bool) -> None:
        return

    def info(self, desc: TableDescriptor, *, reading: bool = False) -> m.LakeReply:
        raise NotImplementedError

    def folders(self, desc: TableDescriptor) -> Sequence[str]:
        return []

    def proven_offsets(
        self, desc: TableDescriptor, overwritten: Mapping[TabletKey, int] = {}
    ) -> Mapping[TabletKey, int]:
        return self.tiered_offsets(desc)

    def tiered_offsets(self, desc: TableDescriptor) -> Mapping[TabletKey, int]:
        return {}
