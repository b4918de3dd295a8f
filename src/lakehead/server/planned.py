"""Whether a batch that a job publishes again is the one that is there: by what both were made of.

A query that goes on from an older copy of its checkpoint gives the numbers that follow to whatever has come since. What
tells is where each micro-batch ends, of which the catalog knows that of the last ones, and a digest of many before. Of
those that it has forgotten a repeat has no rows that are not there as long as it ends no later than the first of these.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lakehead.errors import SequenceConflictError
from lakehead.protocol.staging import Publish
from lakehead.server.catalog import DIGEST, digest_of
from lakehead.server.metadata import MetadataStore
from lakehead.types import TableDescriptor


def require_planned(known: MetadataStore, request: Publish, tables: Sequence[TableDescriptor]) -> None:
    """Refuse to let a batch go, as one that is there, that was made of something else. Tables that got it know it; a
    step may come to rows for others the second time.

    Raises:
        SequenceConflictError: it has rows, perhaps, that none of the tables has got by this job.
    """
    job, batch, now = request.job, request.batch, request.planned
    last = {desc.table_id: known.publication(desc.table_id, job).batch for desc in tables}
    got = [desc for desc in tables if batch <= last[desc.table_id]]
    if not now or any(_is_there(known, desc.table_id, job, batch, now) for desc in got):
        return
    desc = next((desc for desc in got if known.planned(desc.table_id, job, batch)), got[0])
    was = known.planned(desc.table_id, job, batch)
    oldest = known.oldest_planned(desc.table_id, job)
    if was is None:
        up_to = "without rows"
    elif was:
        up_to = "up to elsewhere" if was.startswith(DIGEST) else f"up to {was}"
    else:
        assert oldest is not None
        up_to = f"before batch {oldest[0]}, which is up to {oldest[1]}"
    newest = known.planned(desc.table_id, job, last[desc.table_id])
    raise SequenceConflictError(
        f"batch {batch} of {job} is part of {desc.path} already, {up_to}, and now up to {now}: it goes on from an older"
        " copy of its checkpoint, and has taken what came since under numbers that were used. Nothing was written. Go"
        f" on from the newest copy, or with a new checkpoint behind batch {last[desc.table_id]}, the last one, which is"
        f" up to {newest}",
        table=str(desc.path),
        job=job,
    )


def _is_there(known: MetadataStore, table_id: str, job: str, batch: int, now: str) -> bool:
    was = known.planned(table_id, job, batch)
    if was != "":
        return was in (now, digest_of(now))
    oldest = known.oldest_planned(table_id, job)
    return oldest is None or batch >= oldest[0] or ends_within(now, oldest[1])


def ends_within(one: str, other: str) -> bool:
    """Whether where one micro-batch ends lies not beyond where another does, for sure.

    Both have a line for each source. A line lies not beyond another of JSON if no number is greater than the one in its
    place there, and all else is the same: such are the offsets of logs. What is no JSON lies beyond all but itself.
    """
    lines, others = one.split("\n"), other.split("\n")
    return len(lines) == len(others) and all(a == b or _line_within(a, b) for a, b in zip(lines, others, strict=True))


def _line_within(one: str, other: str) -> bool:
    try:
        return _within(json.loads(one), json.loads(other))
    except (ValueError, RecursionError):
        return False


def _within(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return all(key in other and _within(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_within, one, other))
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (one, other))
    return bool(one <= other) if numbers else type(one) is type(other) and one == other
