"""Which lake snapshots are no longer needed, as plain values. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from lakehead.errors import InvalidRequestError
from lakehead.lake.marks import LakeVersion

HOUR_US = 3_600_000_000


@dataclass(frozen=True)
class Retention:
    """Which snapshots stay.

    Attributes:
        keep: so many of the newest, whatever their age; at least one.
        older_than_us: age from which on others go.
        one_per_us: of those that are younger, one of tiering's in each such span stays; None: all.
        all_for_us: so long all stay.
        all_max: but no more than so many, the newest; None: all.
    """

    keep: int
    older_than_us: int
    one_per_us: int | None = None
    all_for_us: int = 0
    all_max: int | None = None

    def __post_init__(self) -> None:
        """Raises: InvalidRequestError: the current snapshot would go, or it is no number."""
        if not hasattr(self.keep, "__index__"):
            raise InvalidRequestError(f"keep={self.keep!r}: give the number of snapshots to keep, such as 20")
        if self.keep < 1:
            raise InvalidRequestError(f"keep={self.keep}: the current snapshot stays, so keep at least 1")


USUAL = Retention(keep=100, older_than_us=7 * 24 * HOUR_US, one_per_us=HOUR_US, all_for_us=HOUR_US // 6, all_max=1000)
"""What the tiering service keeps. A table of one second's freshness gets 86,400 snapshots a day, and each commit writes
the list of all; an engine that reads without telling anybody has the time in which all stay, or a thousand commits."""


def plan_expiry(version: LakeVersion, retention: Retention, *, now_us: int) -> list[int]:
    """Ids of the snapshots to expire, oldest first: none that the current one's mark is read from, and none newer than
    the current one."""
    lineage = list(version.lineage())
    if not lineage:
        return []
    kept = {s.snapshot_id for s in lineage[: retention.keep]}
    for snapshot in lineage:
        kept.add(snapshot.snapshot_id)
        if snapshot.mark is not None:
            break
    current = lineage[0]
    expired: list[int] = []
    spans: set[int] = set()
    newest_first = sorted(version.snapshots.values(), key=lambda s: -s.sequence_number)
    for place, snapshot in enumerate(newest_first):
        if snapshot.snapshot_id in kept or snapshot.sequence_number >= current.sequence_number:
            continue
        age = now_us - snapshot.committed_us
        stays = age < max(retention.older_than_us, retention.all_for_us)
        all_stay = age < retention.all_for_us and (retention.all_max is None or place < retention.all_max)
        if stays and retention.one_per_us is not None and not all_stay:
            # What a snapshot of others holds is read from those before it, which may go.
            span = snapshot.committed_us // retention.one_per_us
            stays = snapshot.mark is not None and span not in spans
            spans |= {span} if stays else set()
        if not stays:
            expired.append(snapshot.snapshot_id)
    return expired[::-1]
