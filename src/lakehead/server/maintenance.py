"""Background work on open tables: checkpoints, so that restarts are short, trimming, so that logs do not grow, and a
look for damage.

`Maintenance.run` does all that is due, once; `start` has a thread do it now and then. What fails is logged and tried
again at the next turn: nothing waits for it, and nothing is lost by it.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from lakehead.env import Env
from lakehead.env.threads import Started
from lakehead.errors import ClosedError, CorruptionError, LakeheadError
from lakehead.server.lake_state import LakeState
from lakehead.server.leases import Leases
from lakehead.server.scrub import Scrub
from lakehead.server.staging import Staging
from lakehead.server.tables import LiveTable, LiveTables
from lakehead.server.tablet import Tablet
from lakehead.types import TabletKey

_log = logging.getLogger("lakehead.server.maintenance")
LAKE_READ_SECONDS = 30.0
"""How often the lake is asked what it holds when no round reports."""


@dataclass(frozen=True)
class _Tiered:
    """What the lake held when it was asked at ``at``, after so many reports of rounds."""

    offsets: Mapping[TabletKey, int]
    reports: int
    at: float


_NEVER = _Tiered({}, 0, float("-inf"))


class Maintenance:
    """The maintenance of one server's tables."""

    def __init__(self, tables: LiveTables, leases: Leases, staging: Staging, lake: LakeState | None, env: Env) -> None:
        self._tables = tables
        self._leases = leases
        self._staging = staging
        self._lake = lake
        self._clock = env.clock
        self._threads = env.threads
        self._scrub = Scrub(tables, lake, env.clock)
        self._tiered: dict[str, _Tiered] = {}
        self._reports: Counter[str] = Counter()
        self._one_run = env.threads.lock()
        self._wake = env.threads.event()
        self._stopped = False
        self._thread: Started | None = None

    def start(self, seconds: float) -> None:
        """Have a thread `run` every so many seconds, and when a round is reported."""
        self._thread = self._threads.start(lambda: self._loop(seconds), "lakehead-maintenance")

    def _loop(self, seconds: float) -> None:
        while not self._stopped:
            self._wake.wait(seconds)
            self._wake.clear()
            if not self._stopped:
                try:
                    self.run()
                except Exception:
                    _log.exception("maintenance failed and is tried again")

    def stop(self) -> None:
        """Begin nothing more; `join` waits for what is under way, which closing the tables cuts short."""
        self._stopped = True
        self._wake.set()

    def join(self) -> None:
        """Return once the thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def round_reported(self, table_id: str) -> None:
        """A client reports a committed round of this table: begin a turn now, and ask the lake in it."""
        self._reports[table_id] += 1
        self._wake.set()

    def forget(self, table_id: str) -> None:
        """Forget a table that is dropped."""
        self._tiered.pop(table_id, None)
        self._reports.pop(table_id, None)

    def run(self) -> None:
        """Do what is due of all open tables."""
        self._leases.end_unused()
        with self._one_run:
            for table in self._tables.open_tables():
                try:
                    self._maintain(table)
                except ClosedError:
                    continue
                except LakeheadError as e:
                    if not self._tables.is_kept(table.desc.table_id):
                        continue
                    _log.warning("maintenance of table %s failed and is tried again: %s", table.desc.path, e)
                except Exception:
                    _log.exception("maintenance of table %s failed and is tried again", table.desc.path)
            try:
                self._scrub.turn()
            except Exception:
                _log.exception("looking for damage failed and is tried again")

    def _maintain(self, table: LiveTable) -> None:
        properties = table.desc.properties
        has_lake = table.desc.lake is not None
        retention_ms = properties.hot_retention_ms if has_lake else properties.log_ttl_ms
        retention_us = None if retention_ms is None else retention_ms * 1000
        now = self._clock.now_us()
        with contextlib.ExitStack() as every:
            # Every tablet has its turn, whatever happens to others or to the lake.
            tiered: Mapping[TabletKey, int] = {}
            if has_lake:
                try:
                    tiered = self._tiered_offsets(table, now - (retention_us or 0))
                except LakeheadError as e:
                    every.callback(_raise, e)
            every.callback(self._staging.maintain, table)
            if table.truncating and tiered and not table.desc.log_decides:  # whose client has not come back
                every.callback(table.forget, table.truncating, tiered)
            for key, tablet in table.tablets.items():
                until = tiered.get(key, 0) if has_lake else None
                every.callback(tablet.maintain, now, retention_us, until)

    def _tiered_offsets(self, table: LiveTable, cutoff_us: int) -> Mapping[TabletKey, int]:
        """What the lake is known to hold; the lake is asked again when a newer answer could allow more trimming."""
        table_id = table.desc.table_id
        last = self._tiered.get(table_id, _NEVER)
        more = bool(table.truncating) or any(
            _old_until(t, cutoff_us) > max(last.offsets.get(k, 0), t.log_start_offset) for k, t in table.tablets.items()
        )
        now, reports = self._clock.monotonic(), self._reports[table_id]
        if more and self._lake is not None and (reports != last.reports or now - last.at >= LAKE_READ_SECONDS):
            keep = table.to_keep()
            found = self._lake.proven_offsets(table.desc, keep)
            if table.to_keep() == keep:
                last = self._tiered[table_id] = _Tiered(found, reports, now)
        return last.offsets


def _old_until(tablet: Tablet, cutoff_us: int) -> int:
    try:
        return tablet.old_until(cutoff_us)
    except CorruptionError:  # which the tablet's own turn tells of
        return tablet.log_start_offset


def _raise(error: LakeheadError) -> None:
    raise error
