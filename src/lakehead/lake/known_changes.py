"""What the log does to the lake, remembered from one read to the next.

Records below a high watermark stay as they are while their server runs. So the net change of a range of them does, and
a read that begins at the same offset looks only at the changes that came since. A round of tiering moves the beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lakehead.env.recently_used import RecentlyUsed
from lakehead.log.netchange import NetChange
from lakehead.types import TabletKey


class KnownOf(NamedTuple):
    """Whose log: as one incarnation of its servers has it. An empty one is not known, and nothing is remembered."""

    incarnation: str
    table_id: str


MANY_ROWS = 1 << 13
"""The net change of fewer takes less than to ask for what is known and what came since one after the other."""

_known: RecentlyUsed[tuple[KnownOf, TabletKey, int], NetChange] = RecentlyUsed(
    64 << 20, lambda change: change.keep.nbytes + change.superseded.nbytes
)
"""By the offset where the range begins."""


def known_changes(of: KnownOf, ranges: Mapping[TabletKey, tuple[int, int]]) -> dict[TabletKey, NetChange]:
    """The net change of each range, or of its first rows; only of those of which it is known."""
    many = {(of, key, start): end for key, (start, end) in ranges.items() if end - start >= MANY_ROWS}
    found = _known.known(many)
    return {at[1]: change for at, change in found.items() if at[2] + len(change.keep) <= many[at]}


def note_changes(of: KnownOf, changes: Mapping[TabletKey, tuple[int, NetChange]]) -> None:
    """Remember the net change of the rows from these offsets on, where they are many."""
    if not of.incarnation:
        return
    many = {(of, key, start): c for key, (start, c) in changes.items() if len(c.keep) >= MANY_ROWS}
    longest = _known.known(many)
    _known.note_all({at: c for at, c in many.items() if at not in longest or len(longest[at].keep) < len(c.keep)})
