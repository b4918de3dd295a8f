"""A slow look at every byte that open tables keep, so that damage is found by the server and not by a reader.

Sealed segments and checkpoints are read with all their checksums, and of lakes it is asked whether their files are
there. What is found is logged as an error with its place, stands in `table.status()`, and is what a reader gets;
nothing is repaired.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from lakehead.env.clock import Clock
from lakehead.errors import ClosedError, CorruptionError, LakeheadError
from lakehead.server.lake_state import LakeState
from lakehead.server.tables import LiveTable, LiveTables

_log = logging.getLogger("lakehead.server.scrub")
BYTES_A_TURN = 8 << 20
PAUSE_SECONDS = 3600.0
"""Between the end of one pass over all tables and the next."""


class Scrub:
    """The scrub of one server's tables; one thread at a time."""

    def __init__(self, tables: LiveTables, lake: LakeState | None, clock: Clock) -> None:
        self._tables = tables
        self._lake = lake
        self._clock = clock
        self._pass: Iterator[int] | None = None
        self._next_at = clock.monotonic()
        self._told: set[str] = set()

    def turn(self, bytes_max: int = BYTES_A_TURN) -> None:
        """Go on with the pass under way for about so many bytes, or begin the next one when it is due."""
        if self._pass is None:
            if self._clock.monotonic() < self._next_at:
                return
            self._pass = self._look()
        left = bytes_max
        for looked_at in self._pass:
            left -= looked_at
            if left <= 0:
                break
        else:
            self._pass, self._next_at = None, self._clock.monotonic() + PAUSE_SECONDS
        self._tell()

    def _look(self) -> Iterator[int]:
        for table in self._tables.open_tables():
            self._look_at_lake(table)
            for tablet in table.tablets.values():
                try:
                    yield from tablet.scrub()
                except ClosedError:
                    break
                except LakeheadError as e:
                    _log.warning("tablet %s of %s could not be looked at: %s", tablet.key, table.desc.path, e)

    def _look_at_lake(self, table: LiveTable) -> None:
        if self._lake is None or table.desc.lake is None:
            return
        try:
            self._lake.proven_offsets(table.desc)
        except LakeheadError as e:
            if not self._tables.is_kept(table.desc.table_id):
                return
            if not isinstance(e, CorruptionError):
                _log.warning("the lake of %s could not be looked at: %s", table.desc.path, e)
                return
            _log.error("the lake of %s is damaged: %s", table.desc.path, e)

    def _tell(self) -> None:
        """Log each damage once, also damage that a reader found; once more when it comes back after it was gone."""
        found = {
            str(damage): table.desc.path
            for table in self._tables.open_tables()
            for tablet in table.tablets.values()
            for damage in tablet.damages()
        }
        for damage, path in found.items():
            if damage not in self._told:
                _log.error("table %s is damaged: %s", path, damage)
        self._told = set(found)
