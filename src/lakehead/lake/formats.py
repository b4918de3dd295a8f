"""The kinds of lake tables there are, each a `LakeFormat`: the one place that knows their names.

A format is a folder of its own above this one, and is loaded when the first of its tables is used.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from lakehead.config import LakeConfig
from lakehead.env.clock import Clock
from lakehead.env.late_imports import load
from lakehead.env.place import require_working_folder
from lakehead.lake.lake_table import LakeTable
from lakehead.protocol.messages import LakeReply
from lakehead.server.lake_state import LakeOwner, LakeState
from lakehead.types import TableDescriptor, TabletKey, changelog_id

_FORMATS = {"iceberg": "lakehead.iceberg.lake_format"}
"""Kinds, and the modules whose ``FORMAT`` they are."""


class LakeFormat(Protocol):
    """One kind of lake table."""

    def tables(self, config: LakeConfig, folder: str, clock: Clock) -> LakeState:
        """Its tables in one catalog, as a server creates, drops and describes them.

        Args:
            folder: the server's data folder.
        """
        ...

    def open(self, desc: TableDescriptor, info: LakeReply) -> LakeTable:
        """A table through its catalog, which is opened when it is first loaded, to commit to it.

        Its methods raise `UnavailableError` where the catalog cannot be opened from this process.
        """
        ...

    def at(self, desc: TableDescriptor, info: LakeReply) -> LakeTable:
        """A table fixed at the version that ``info`` names, to read it without a catalog.

        Raises:
            UnavailableError: that version cannot be read.
        """
        ...


@functools.cache
def lake_format(kind: str) -> LakeFormat:
    """The format of a kind of `lake_kinds`.

    Raises:
        StorageError: this process has no working directory, where what it loads looks for its configuration.
    """
    require_working_folder("PyIceberg")
    found: LakeFormat = load(_FORMATS[kind]).FORMAT
    return found


def format_of(desc: TableDescriptor) -> LakeFormat:
    """The format of a table that has a lake."""
    assert desc.lake is not None
    return lake_format(desc.lake)


class LakesByKind:
    """The lake tables of one server, of all kinds; implements `lakehead.server.lake_state.LakeState`."""

    def __init__(self, config: LakeConfig, folder: str, clock: Clock) -> None:
        self._config = config
        self._folder = folder
        self._clock = clock
        self._owner: LakeOwner | None = None
        self._lock = threading.Lock()
        self._states: dict[LakeFormat, LakeState] = {}

    @property
    def kinds(self) -> frozenset[str]:
        """See `LakeState.kinds`."""
        return frozenset(_FORMATS)

    def serve(self, owner: LakeOwner) -> None:
        """See `LakeState.serve`."""
        self._owner = owner

    def _of(self, desc: TableDescriptor) -> LakeState:
        lake = format_of(desc)
        with self._lock:
            if lake not in self._states:
                state = lake.tables(self._config, self._folder, self._clock)
                if self._owner is not None:
                    state.serve(self._owner)
                self._states[lake] = state
            return self._states[lake]

    def create(self, desc: TableDescriptor) -> None:
        """See `LakeState.create`."""
        for table in desc.lake_tables:
            self._of(desc).create(table)

    def require_alterable(self, desc: TableDescriptor) -> None:
        """See `LakeState.require_alterable`."""
        for table in desc.lake_tables:
            self._of(desc).require_alterable(table)

    def require_free(self, desc: TableDescriptor, *, besides: Sequence[str]) -> None:
        """See `LakeState.require_free`."""
        for table in desc.lake_tables:
            self._of(desc).require_free(table, besides=[*besides, *map(changelog_id, besides)])

    def drop(self, desc: TableDescriptor, *, purge: bool) -> None:
        """See `LakeState.drop`."""
        for table in desc.lake_tables:
            self._of(desc).drop(table, purge=purge)

    def info(self, desc: TableDescriptor, *, reading: bool = False) -> LakeReply:
        """See `LakeState.info`."""
        return self._of(desc).info(desc, reading=reading)

    def tiered_offsets(self, desc: TableDescriptor) -> Mapping[TabletKey, int]:
        """See `LakeState.tiered_offsets`."""
        held = [self._of(desc).tiered_offsets(table) for table in desc.lake_tables]
        return {key: max(h.get(key, 0) for h in held) for key in {k for h in held for k in h}}

    def adopt(self, desc: TableDescriptor, ends: Mapping[TabletKey, int]) -> bool:
        """See `LakeState.adopt`."""
        return any([self._of(desc).adopt(table, ends) for table in desc.lake_tables])

    def folders(self, desc: TableDescriptor) -> Sequence[str]:
        """See `LakeState.folders`."""
        return [folder for table in desc.lake_tables for folder in self._of(desc).folders(table)]

    def proven_offsets(
        self, desc: TableDescriptor, overwritten: Mapping[TabletKey, int] = {}
    ) -> Mapping[TabletKey, int]:
        """See `LakeState.proven_offsets`."""
        held = [self._of(desc).proven_offsets(table, overwritten) for table in desc.lake_tables]
        return {key: min(h.get(key, 0) for h in held) for key in held[0]}
