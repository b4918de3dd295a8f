"""Cutting a copy of a log to what the log was at an earlier moment."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from lakehead.env.storage import Storage
from lakehead.errors import CorruptionError
from lakehead.format.frame import WriterStamp
from lakehead.log.checkpoint import SUFFIX, named_by_offset, open_checkpoint
from lakehead.log.segment import Segment, SegmentId
from lakehead.types import Offset


def cut_log(storage: Storage, folder: str, end: Offset, later: Callable[[WriterStamp], bool]) -> bool:
    """Make of a log that nobody has open, and that was appended to since it ended at ``end``, what it was then.

    Args:
        later: whether who wrote a frame without rows, at that offset, did so after that moment; the first such frame is
            cut with all that follows it, unless a checkpoint covers it.

    Returns:
        Whether it could be done: not where a checkpoint took the place of what lay below the end. What is cut away is
        found torn or whole alike; a torn tail below the end is left to whoever opens the log.
    """
    uncovered = SegmentId(0)
    if checkpoints := named_by_offset(storage, folder, SUFFIX):
        checkpoint = open_checkpoint(storage, f"{folder}/{checkpoints[-1]}")
        if checkpoint.offset > end:
            return False
        uncovered = SegmentId(checkpoint.offset, checkpoint.footer.segment)
    ids = sorted(filter(None, map(SegmentId.of_name, storage.list_files(folder))))
    if ids and ids[0].base_offset > end:
        return False
    cut = False
    for id, following in itertools.zip_longest(ids, ids[1:]):
        if cut or id.base_offset > end:
            storage.remove(f"{folder}/{id.name}")
        elif id >= uncovered and (following is None or following.base_offset >= end):
            cut = _cut_segment(Segment(storage, folder, id), end, later)
    return True


def _cut_segment(segment: Segment, end: Offset, later: Callable[[WriterStamp], bool]) -> bool:
    """Whether anything was."""
    at = 0
    try:
        for at, frame in segment.scan():
            if frame.base_offset > end or (
                frame.base_offset == end and (frame.body.row_count or later(frame.body.stamp))
            ):
                segment.cut(at)
                return True
            at += frame.length
    except CorruptionError:
        if segment.end_offset < end:
            return False
        segment.cut(at)
        return True
    finally:
        segment.close()
    return False
