"""Leases: what pinned reads hold, so that trimming and clean-up take nothing away under them.

A lease keeps the segments and the checkpoint that each tablet had when it was opened; trimming removes their names, the
bytes stay until the last reader lets go. It ends when its holder releases it, or soon after its holder stops renewing
it. A lease for a plan that others carry out has no holder: it lasts longer after its last use, and when there is no
room, the one that was not used the longest gives way, so that plans never keep readers out; nor does one who holds them
all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

from lakehead.config import Limits
from lakehead.env import Env
from lakehead.errors import OverloadedError
from lakehead.log import LogView
from lakehead.protocol.messages import LEASE_JOINT, LakeUse
from lakehead.server.access import EMBEDDED_OWNER, Caller, Share
from lakehead.types import TabletKey


@dataclass
class _Lease:
    table_id: str
    views: Mapping[TabletKey, LogView]
    lake: LakeUse | None
    planned: bool
    used: float
    holder: Share
    principal: str


class Leases:
    """The leases of one server. Thread-safe."""

    def __init__(self, env: Env, limits: Limits) -> None:
        self._clock = env.clock
        self._randomness = env.randomness
        self._limits = limits
        self._lock = env.threads.lock()
        self._open: dict[str, _Lease] = {}

    def open(
        self,
        table_id: str,
        views: Mapping[TabletKey, LogView],
        lake: LakeUse | None,
        *,
        planned: bool = False,
        caller: Caller = EMBEDDED_OWNER,
        require: Callable[[str, int], None] = lambda principal, held: None,
    ) -> str:
        """A new lease on these views.

        Args:
            planned: nobody renews it.
            caller: whose it is. Where there is no room, who holds most loses the one that was not used the longest to
                whoever holds less than half as many.
            require: is told how many the caller's principal holds, and raises where it may have no more.

        Raises:
            OverloadedError: too many are open that somebody holds.
        """
        with self._lock:
            self._end_unused()
            require(caller.principal, self._held(caller.principal))
            if len(self._open) >= self._limits.leases_max:
                self._make_room(caller.share)
            if len(self._open) >= self._limits.leases_max:
                raise OverloadedError(
                    f"{len(self._open)} pinned reads are open, the limit of this server: let go of scans that are done",
                    leases_max=self._limits.leases_max,
                )
            lease = self._randomness.uuid_hex()
            used = self._clock.monotonic()
            self._open[lease] = _Lease(table_id, views, lake, planned, used, caller.share, caller.principal)
            return lease

    def count(self, principal: str) -> int:
        """How many a principal holds."""
        with self._lock:
            self._end_unused()
            return self._held(principal)

    def _held(self, principal: str) -> int:
        return sum(x.principal == principal for x in self._open.values()) if principal else 0

    def renew(self, leases: Iterable[str], principal: str = "") -> None:
        """Count leases as used now; those that are over, or another principal's, are passed by."""
        with self._lock:
            now = self._clock.monotonic()
            for lease in leases:
                held = self._open.get(lease)
                if held is not None and held.principal == principal:
                    held.used = now

    def views(self, table_id: str, lease: str | None, principal: str = "") -> Mapping[TabletKey, LogView]:
        """What a lease of a principal holds of a table; nothing when it is over, or another's."""
        if lease is None:
            return {}
        with self._lock:
            for part in lease.split(LEASE_JOINT):
                held = self._open.get(part)
                if held is not None and held.table_id == table_id and held.principal == principal:
                    held.used = self._clock.monotonic()
                    return held.views
            return {}

    def release(self, leases: Iterable[str], principal: str = "") -> None:
        """End leases; those that are over already, or another principal's, are passed by."""
        with self._lock:
            for lease in leases:
                held = self._open.get(lease)
                if held is not None and held.principal == principal:
                    del self._open[lease]

    def lake_uses(self, table_id: str) -> list[LakeUse]:
        """What reads of a table use of its lake table, each once."""
        with self._lock:
            self._end_unused()
            return list(dict.fromkeys(x.lake for x in self._open.values() if x.table_id == table_id and x.lake))

    def end_all(self, table_id: str | None = None) -> None:
        """End the leases of a table that is dropped; of all when the server closes."""
        with self._lock:
            self._open = {k: x for k, x in self._open.items() if table_id not in (None, x.table_id)}

    def end_unused(self) -> None:
        """End the leases that were not used for too long, so that what they hold is freed."""
        with self._lock:
            self._end_unused()

    def _end_unused(self) -> None:
        now = self._clock.monotonic()
        held, planned = now - self._limits.lease_seconds, now - self._limits.planned_lease_seconds
        self._open = {k: x for k, x in self._open.items() if x.used >= (planned if x.planned else held)}

    def _make_room(self, holder: Share) -> None:
        giving = [k for k, x in self._open.items() if x.planned]
        if not giving:
            # Of whom there are many processes, which may be made up, they have too much together.
            giving = self._of_most(holder, lambda share: share.of) or self._of_most(holder, lambda share: share)
        if giving:
            del self._open[min(giving, key=lambda k: self._open[k].used)]

    def _of_most(self, holder: Share, whose: Callable[[Share], Hashable]) -> list[str]:
        """The leases of the process that holds most of those who hold most; none where this one holds half as many."""
        held = Counter(whose(x.holder) for x in self._open.values())
        most, count = held.most_common(1)[0]
        if 2 * held[whose(holder)] >= count - 1:
            return []
        theirs = {k: x.holder for k, x in self._open.items() if whose(x.holder) == most}
        each = Counter(theirs.values())
        many = max(each.values())
        return [k for k, share in theirs.items() if each[share] == many]
