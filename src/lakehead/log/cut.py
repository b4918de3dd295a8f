"""Cutting a copy of a log to what the log was at an earlier moment."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from lakehead.env.storage import Storage
from lakehead.errors import CorruptionError
from lakehead.format.frame import Frame
from lakehead.log import checkpoint
from lakehead.log.segment import Segment, SegmentId
from lakehead.types import Offset


def cut_log(storage: Storage, folder: str, end: Offset, later: Callable[[Frame], bool]) -> bool:
    """Make of a log that nobody has open, and that was appended to since it ended at ``end``, what it was then.

    Args:
        later: whether a frame without rows, at that offset, came after that moment; the first such is cut with all that
            follows it, unless a checkpoint at that offset has it.

    Returns:
        Whether it could be done: not where a checkpoint took the place of what lay below the end. What is cut away is
        found torn or whole alike; a torn tail below the end is left to whoever opens the log.
    """
    names = storage.list_files(folder)
    covered = [int(n.removesuffix(checkpoint.SUFFIX)) for n in names if n.endswith(checkpoint.SUFFIX)]
    if max(covered, default=0) > end:
        return False
    covers = max(covered, default=-1) == end
    ids = sorted(filter(None, map(SegmentId.of_name, names)))
    if ids and ids[0].base_offset > end:
        return False
    cut = False
    for id, following in itertools.zip_longest(ids, ids[1:]):
        if cut or id.base_offset > end:
            storage.remove(f"{folder}/{id.name}")
        elif following is None or following.base_offset >= end:
            cut = _cut_segment(Segment(storage, folder, id), end, (lambda _: False) if covers else later)
    return True


def _cut_segment(segment: Segment, end: Offset, later: Callable[[Frame], bool]) -> bool:
    """Whether anything was."""
    at = 0
    try:
        for at, frame in segment.scan():
            if frame.base_offset > end or (frame.base_offset == end and (frame.body.row_count or later(frame))):
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
