"""Expiry: lake snapshots that nobody needs any more leave the list, and then the files that only they named."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lakehead.env.clock import Clock
from lakehead.errors import CommitConflictError
from lakehead.lake.lake_table import LakeTable
from lakehead.lake.marks import mark_of
from lakehead.protocol.messages import LakeUse
from lakehead.tiering.expiry_plan import Retention, plan_expiry

_ATTEMPTS = 5


@dataclass(frozen=True)
class ExpiryResult:
    """What an expiry did.

    Attributes:
        snapshots: so many were taken out of the list.
        files: so many were removed: data, deletes, manifests and their lists.
    """

    snapshots: int
    files: int


def expire(
    lake: LakeTable, retention: Retention, *, clock: Clock, in_use: Callable[[], Iterable[LakeUse]]
) -> ExpiryResult:
    """Expire what the retention does not keep.

    Args:
        in_use: what somebody reads: it stays, and goes with a later expiry.

    Raises:
        CommitConflictError: rounds or other engines kept changing the lake; run again.
        LakeStateError: the lake was rolled back, or lacks a file.
        UnavailableError: the catalog does not answer, or what readers need cannot be known; run again.
    """
    for left in reversed(range(_ATTEMPTS)):
        version = lake.load()
        if mark_of(version) is None:
            break
        planned = plan_expiry(version, retention, now_us=clock.now_us())
        if not planned:
            break
        try:
            done = lake.expire(version, planned, in_use)
            return ExpiryResult(done.snapshots, done.files)
        except CommitConflictError:  # rounds go on meanwhile
            if not left:
                raise
    return ExpiryResult(0, 0)
