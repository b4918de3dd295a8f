"""A lake is emptied: one commit that takes every file out and moves the mark to where the log was cut.

From then on the rows are in no read but those that pinned an older snapshot, whether the log has forgotten them yet or
not: reads begin there at the mark.
"""

from __future__ import annotations

from collections.abc import Mapping

from lakehead.env import Env
from lakehead.errors import CommitConflictError, TieringFencedError
from lakehead.lake.lake_table import LakeTable
from lakehead.lake.marks import CLEANUP, mark_of
from lakehead.tiering.commit import CommitResult, commit_round
from lakehead.tiering.round_plan import RoundPlan
from lakehead.types import Offset, TableDescriptor, TabletKey


def empty_lake(lake: LakeTable, desc: TableDescriptor, ends: Mapping[TabletKey, Offset], env: Env) -> CommitResult:
    """Take all rows below these offsets, at which the log can be cut, out of the lake of a log table.

    Raises:
        CommitConflictError: a round or another engine changed the lake first: begin again, with later offsets.
        CommitUnknownError: whether it landed cannot be known; beginning again is safe.
        LakeStateError: the lake was changed as only tiering may.
        UnavailableError: the catalog cannot be reached; nothing landed.
    """
    version = lake.load()
    mark = mark_of(version)
    base = dict(mark.offsets) if mark else {}
    if later := [tablet for tablet, at in base.items() if at > ends.get(tablet, 0)]:
        raise CommitConflictError(
            f"a round has moved rows of tablet {later[0]} to the lake of {desc.path} since its log was cut: try again",
            table=str(desc.path),
        )
    ranges = {tablet: (base.get(tablet, 0), end) for tablet, end in ends.items() if base.get(tablet, 0) < end}
    if not ranges and not lake.plan(version):
        return CommitResult(None, 0, 0, 0, base)
    plan = RoundPlan(
        desc.table_id,
        mark.epoch if mark else 1,
        env.randomness.uuid_hex(),
        desc.keyed,
        base=base,
        ranges=ranges,
        tasks=(),
        deletes={},
        cleanup=version.properties.get(CLEANUP),
        empties=True,
        overwritten=dict(ends) if desc.partition_by else {},
    )
    try:
        return commit_round(lake, plan, (), clock=env.clock)
    except TieringFencedError as e:
        raise CommitConflictError(
            f"a tiering service took over table {desc.path} while it was emptied: try again", table=str(desc.path)
        ) from e
