"""What a planned change of a keyed table is in the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lakehead.format.frame import FrameBody, WriterStamp, encode_body
from lakehead.server.group_commit import PendingWrite
from lakehead.types import TableDescriptor

if TYPE_CHECKING:
    from lakehead.kv import Change


def changelog(desc: TableDescriptor, writes: Sequence[PendingWrite], change: Change) -> list[FrameBody]:
    """One frame's body per client batch, with that batch's share of the records.

    Raises:
        LimitExceededError: one would be larger than any reader takes.
    """
    bodies, row, start = [], 0, 0
    for w in writes:
        row += w.body.row_count
        end = int(change.ends[row - 1]) if row else 0
        bodies.append(encoded(desc, change.part(start, end), w.body.stamp))
        start = end
    return bodies


def encoded(desc: TableDescriptor, change: Change, stamp: WriterStamp) -> FrameBody:
    """A change as one body; raises as `changelog`."""
    return encode_body(
        change.rows,
        schema_id=desc.schema_id,
        stamp=stamp,
        compression=desc.properties.compression,
        change_types=change.change_types,
        prev_offsets=change.prev_offsets,
    )
