"""What principals take of one server, and how much of it they may: see `Quota`.

Bytes are paid for after they went: who is behind by more than a second's worth waits before the next go, each after
those who came before, and is refused when that would take too long. All else is refused when there is too much of it.
Who may do all has no quota.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from lakehead.config import Limits
from lakehead.env import Env
from lakehead.errors import LimitExceededError, QuotaExceededError
from lakehead.protocol.messages import Done, Get, Request
from lakehead.protocol.privileges import EVERYTHING, Privilege, require_principal
from lakehead.protocol.quotas import EVERY_PRINCIPAL, ListQuotas, Quota, QuotaInfo, QuotasReply, SetQuota, Used
from lakehead.server import catalog
from lakehead.server.access import Caller, may
from lakehead.server.lake_state import LakeState
from lakehead.server.metadata import MetadataStore
from lakehead.server.tables import LiveTables

CALL_WAIT_SECONDS = 30.0
STREAM_WAIT_SECONDS = 300.0
_FREE_SECONDS = 1.0
_WAITING_MAX = 16
_STEP_SECONDS = 0.2
_MEASURED_SECONDS = 5.0
_REMEMBERED_MAX = 10_000
_NONE = Quota()
Way = Literal["bytes_in", "bytes_out"]


@dataclass
class _Debt:
    """Bytes that went one way and are not paid for yet, as of a moment; and how many calls wait for that."""

    bytes: float = 0.0
    at: float = 0.0
    waiting: int = 0

    def paid(self, rate: int, now: float) -> None:
        self.bytes = max(0.0, self.bytes - (now - self.at) * rate)
        self.at = now


@dataclass
class _Stored:
    """What the tables of a principal took when they were measured, and what was written to them by then and by now."""

    bytes: int = 0
    at: float = float("-inf")
    written_then: int = 0
    written: int = 0

    @property
    def now(self) -> int:
        return self.bytes + self.written - self.written_then


@dataclass
class _Seen:
    """What was read of one version of the catalog."""

    version: int
    quotas: dict[str, Quota]
    makers: dict[str, str]


class Quotas:
    """Thread-safe."""

    def __init__(
        self,
        metadata: MetadataStore,
        tables: LiveTables,
        env: Env,
        limits: Limits,
        lake: LakeState | None,
        leases_of: Callable[[str], int],
        closing: Callable[[], bool],
    ) -> None:
        """``leases_of`` counts the leases of a principal; ``closing`` tells that nobody should wait any more."""
        self._metadata = metadata
        self._tables = tables
        self._clock = env.clock
        self._storage = env.storage
        self._lake = lake
        self._limits = limits
        self._leases_of = leases_of
        self._closing = closing
        # Reentrant, as the garbage collector may close a forgotten stream at any point of any thread.
        self._lock = env.threads.reentrant_lock()
        self._seen = _Seen(-1, {}, {})
        self._debts: dict[tuple[str, Way], _Debt] = {}
        self._streams: dict[int, str] = {}
        self._next = 0
        self._stored: dict[str, _Stored] = {}

    # ---- what is asked of them --------------------------------------------------------------------------------

    def set_quota(self, request: SetQuota) -> Done:
        """See `SetQuota`."""
        name = request.principal if request.principal == EVERY_PRINCIPAL else require_principal(request.principal)
        bounds = {k: v for k, v in msgspec.structs.asdict(request.quota).items() if v is not None}
        self._metadata.submit(catalog.SetQuota(name, bounds, self._limits.quotas_max))
        return Done()

    def list_quotas(self, _: ListQuotas, caller: Caller) -> QuotasReply:
        """See `ListQuotas`."""
        if may(caller, Privilege.ADMIN, EVERYTHING):
            return QuotasReply(quotas=[self._told(name, quota) for name, quota in self._now().quotas.items()])
        own = self.of(caller.principal)
        return QuotasReply(quotas=[] if own is None else [own])

    def of(self, principal: str) -> QuotaInfo | None:
        """What bounds a principal, if anything does, and what it takes."""
        quota = self._quota(principal)
        return None if quota == _NONE else self._told(principal, quota)

    def _told(self, principal: str, quota: Quota) -> QuotaInfo:
        if principal == EVERY_PRINCIPAL:
            return QuotaInfo(principal=principal, quota=quota, used=None)
        used = Used(
            bytes_in=self._owed(principal, "bytes_in", quota.bytes_in),
            bytes_out=self._owed(principal, "bytes_out", quota.bytes_out),
            streams=self._streams_of(principal),
            leases=self._leases_of(principal),
            tables=len(self._tables_of(principal)),
            stored_bytes=self._measured(principal),
        )
        return QuotaInfo(principal=principal, quota=quota, used=used)

    # ---- bytes ------------------------------------------------------------------------------------------------

    def admit(self, request: Request[Any], size: int, caller: Caller) -> bool:
        """Return when a request with so many bytes of rows or keys may be carried out; nothing of it was yet.

        Returns:
            whether it has waited.

        Raises:
            QuotaExceededError: its sender would wait for too long, or as many of its requests wait already.
            LimitExceededError: it writes to a table whose maker has stored too much.
        """
        if not self._now().quotas:
            return False
        if size and request.privilege is Privilege.WRITE:
            for table in request.about:
                if isinstance(table, str):
                    self._require_room(table, size)
        # What has no rows waits for nobody: leases are renewed, and servers found alive, by who is behind, too.
        waited = False
        if caller.principal and (size or isinstance(request, Get)):
            if request.privilege is Privilege.READ:
                waited = self._pay(caller.principal, "bytes_out", 0)
            waited = self._pay(caller.principal, "bytes_in", size) or waited
        return waited

    def sent(self, size: Callable[[], int], caller: Caller) -> None:
        """So many bytes answer a request; who has asked pays before the next one."""
        rate = self._quota(caller.principal).bytes_out if caller.principal else None
        if rate is not None:
            with self._lock:
                debt = self._debt(caller.principal, "bytes_out", rate)
                debt.bytes += size()

    def pace(self, size: int, caller: Caller, gone: Callable[[], bool]) -> None:
        """Return when a stream may send its next item, or nobody waits for it any more.

        Raises:
            QuotaExceededError: it would wait for too long.
        """
        if caller.principal and size:
            self._pay(caller.principal, "bytes_out", size, gone)

    def _pay(self, principal: str, way: Way, size: int, gone: Callable[[], bool] | None = None) -> bool:
        """Whether it had to wait. ``gone`` is that of a stream; a call is waited for until it is answered."""
        quota = self._quota(principal)
        rate: int | None = getattr(quota, way)
        if rate is None:
            return False
        with self._lock:
            debt = self._debt(principal, way, rate)
            seconds = debt.bytes / rate - _FREE_SECONDS
            calls = 0 if gone is not None else debt.waiting
            seconds_max = CALL_WAIT_SECONDS if gone is None else STREAM_WAIT_SECONDS
            if seconds > 0 and (seconds > seconds_max or calls >= _WAITING_MAX):
                raise QuotaExceededError(
                    f"{principal} is {int(debt.bytes):,} bytes ahead of its quota of {rate:,} bytes a second ({way}):"
                    f" try again in {seconds:.1f} seconds, or ask who runs the server for more",
                    quota=way,
                    used=int(debt.bytes),
                    limit=rate,
                    retry_after_ms=int(seconds * 1000),
                )
            debt.bytes += size
            if seconds <= 0:
                return False
            debt.waiting += gone is None
        try:
            until = self._clock.monotonic() + seconds
            while (left := until - self._clock.monotonic()) > 0 and self._quota(principal) == quota:
                if self._closing() or (gone is not None and gone()):
                    break
                self._clock.sleep(min(left, _STEP_SECONDS))
        finally:
            with self._lock:
                debt.waiting -= gone is None
        return True

    def _debt(self, principal: str, way: Way, rate: int) -> _Debt:
        now = self._clock.monotonic()
        debt = self._debts.get((principal, way))
        if debt is None:
            if len(self._debts) >= _REMEMBERED_MAX:
                self._debts = {k: d for k, d in self._debts.items() if d.waiting or now - d.at < STREAM_WAIT_SECONDS}
            debt = self._debts[principal, way] = _Debt(at=now)
        debt.paid(rate, now)
        return debt

    def _owed(self, principal: str, way: Way, rate: int | None) -> int:
        if rate is None:
            return 0
        with self._lock:
            return int(self._debt(principal, way, rate).bytes)

    # ---- what is held -----------------------------------------------------------------------------------------

    def open_stream(self, caller: Caller) -> int | None:
        """Count a stream more; returns what `close_stream` asks for.

        Raises:
            QuotaExceededError: the principal has too many open.
        """
        if not caller.principal:
            return None
        limit = self._quota(caller.principal).streams
        with self._lock:
            _require_less(caller.principal, "streams", self._streams_of(caller.principal), limit)
            self._next += 1
            self._streams[self._next] = caller.principal
            return self._next

    def close_stream(self, opened: int | None) -> None:
        """It has ended; a second call does nothing."""
        if opened is not None:
            self._streams.pop(opened, None)

    def _streams_of(self, principal: str) -> int:
        return sum(owner == principal for owner in list(self._streams.values()))

    def require_lease(self, principal: str, held: int) -> None:
        """Return if a principal that holds so many pinned reads may have one more; raises as `open_stream`."""
        if principal:
            _require_less(principal, "leases", held, self._quota(principal).leases)

    # ---- tables -----------------------------------------------------------------------------------------------

    def require_table(self, caller: Caller) -> None:
        """Return if a principal may make a table more.

        Raises:
            LimitExceededError: it may not, until it has dropped one.
        """
        limit = self._quota(caller.principal).tables if caller.principal else None
        if limit is not None and (made := len(self._tables_of(caller.principal))) >= limit:
            raise LimitExceededError(
                f"{caller.principal} has made {made:,} tables, its quota (tables={limit:,}): drop some, or ask who runs"
                " the server for more",
                quota="tables",
                used=made,
                limit=limit,
            )

    def _tables_of(self, principal: str) -> list[str]:
        return [table_id for table_id, maker in self._now().makers.items() if maker == principal]

    def _require_room(self, table_id: str, size: int) -> None:
        maker = self._now().makers.get(table_id)
        limit = None if maker is None else self._quota(maker).stored_bytes
        if maker is None or limit is None:
            return
        used = self._measured(maker)
        if used + size > limit:
            raise LimitExceededError(
                f"the tables that {maker} has made take {used:,} bytes of its quota (stored_bytes={limit:,}), and this"
                f" would be {size:,} more: drop or truncate some of them, wait until their logs are trimmed, or ask who"
                " runs the server for more",
                quota="stored_bytes",
                used=used,
                limit=limit,
            )
        with self._lock:
            self._stored.setdefault(maker, _Stored()).written += size

    def _measured(self, principal: str) -> int:
        """What the tables of a principal take: looked at every few seconds, and what was written since."""
        with self._lock:
            if len(self._stored) >= _REMEMBERED_MAX and principal not in self._stored:
                self._stored.clear()
            stored = self._stored.setdefault(principal, _Stored())
            now = self._clock.monotonic()
            if now - stored.at < _MEASURED_SECONDS:
                return stored.now
            # What is written from here on is counted, whether the files have it already or not.
            stored.at, first, written = now, stored.at == float("-inf"), stored.written
            if first:
                stored.bytes, stored.written_then = self._size(principal), written
                return stored.now
        found = self._size(principal)
        with self._lock:
            if written >= stored.written_then:  # else who began later was done sooner
                stored.bytes, stored.written_then = found, written
            return stored.now

    def _size(self, principal: str) -> int:
        made = set(self._tables_of(principal))
        total = 0
        for desc in self._metadata.tables(None):
            if desc.table_id in made:
                lake = [] if desc.lake is None or self._lake is None else self._lake.folders(desc)
                total += self._tables.stored_bytes(desc) + sum(map(self._storage.folder_bytes, lake))
        return total

    # ---- the catalog ------------------------------------------------------------------------------------------

    def _quota(self, principal: str) -> Quota:
        quotas = self._now().quotas
        return quotas.get(principal) or quotas.get(EVERY_PRINCIPAL, _NONE)

    def _now(self) -> _Seen:
        # The version first: what is read after it is of that version or newer, never older.
        version = self._metadata.access_version
        seen = self._seen
        if seen.version != version:
            quotas = {name: Quota(**bounds) for name, bounds in self._metadata.quotas().items()}
            seen = self._seen = _Seen(version, quotas, self._metadata.makers())
        return seen


def _require_less(principal: str, name: str, held: int, limit: int | None) -> None:
    if limit is not None and held >= limit:
        raise QuotaExceededError(
            f"{principal} has {held:,} {name} open, and its quota is {limit:,} ({name}): try again when some have"
            " ended, or ask who runs the server for more",
            quota=name,
            used=held,
            limit=limit,
        )
