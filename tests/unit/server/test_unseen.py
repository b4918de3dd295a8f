"""Partitions that a publication overwrites: all of it at one moment, wherever it fails."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
from tests.unit.server.test_staging import Deployment, Steps, held, staged, table_of  # noqa: F401

from lakehead.client.staging import JobBatch
from lakehead.config import Limits
from lakehead.errors import InvalidRequestError, LakeheadError
from lakehead.server import staging
from lakehead.types import WriteKind


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    made = Deployment(Limits())
    yield made
    made.service.close()


@pytest.mark.parametrize(
    ("power_cut", "named"), [(True, ()), (False, ()), (True, ("v=a", "v=b", "v=c", "v=d"))], ids=str
)
@pytest.mark.parametrize("keyed", [False, True])
def test_partitions_are_overwritten_or_as_they_were_wherever_it_fails(
    keyed: bool, power_cut: bool, named: tuple[str, ...]
) -> None:
    """At each step of the disk; then the job asks again with what it staged, or anew. No rows come for v=a."""
    kind: WriteKind = "upsert" if keyed else "append"
    before = [(k, v) for v in "abc" for k in range(8)]
    stays = [] if named else [(k, "a") for k in range(8)]
    after = sorted(stays + [(k, v) for v in "bd" for k in range(5, 9)] + [(2, "c")])
    ended = False
    for cut in range(300):
        deployment = Deployment(Limits())
        table = deployment.table(keyed=keyed, partitioned=True, buckets=2)
        first = JobBatch("query", 3)
        table.staging.publish(
            first, staged(table, first, *([table_of(*range(8), v=v)] for v in "abc"), kind=kind), lasting=True
        )
        batch = JobBatch("query", 4)
        tasks = [
            [table_of(*range(5, 7), v=v) for v in "bd"],
            [table_of(2, v="c"), *(table_of(7, 8, v=v) for v in "bd")],
        ]
        parts = staged(table, batch, *tasks, kind=kind)
        steps = Steps(cut)
        deployment.storage.before = steps.take
        with contextlib.suppress(LakeheadError):
            table.staging.publish(batch, parts, lasting=True, overwrite=named)
        ended = steps.taken <= cut
        deployment.storage.before = None
        deployment.restart(power_cut=power_cut)
        table = deployment.handle(table.desc)
        assert deployment.live(table) in (sorted(before), after), f"cut at step {cut}"
        if not ended:
            table.staging.publish(batch, staged(table, batch, *tasks, kind=kind), lasting=True, overwrite=named)
        assert deployment.live(table) == after, f"cut at step {cut}"
        late = JobBatch("query", 5)
        table.staging.publish(late, staged(table, late, [table_of(50, v="d")], kind=kind), lasting=True)
        assert deployment.live(table) == sorted([*after, (50, "d")]), "what comes later overwrites nothing"
        deployment.service.close()
        if ended:
            break
    assert ended


@pytest.mark.parametrize("keyed", [False, True])
def test_readers_see_a_partition_before_or_after_it_is_overwritten(
    deployment: Deployment, keyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "ROWS_MAX", 2)  # many batches
    kind: WriteKind = "upsert" if keyed else "append"
    table = deployment.table(keyed=keyed, partitioned=True, buckets=1)
    first = JobBatch("query", 0)
    table.staging.publish(first, staged(table, first, [table_of(*range(20), v="a")], kind=kind), lasting=True)
    over = threading.Event()
    seen = set()

    def read() -> None:
        while True:
            last = over.is_set()
            (tablet,) = table.log.tablets()
            seen.add(tablet.rows if keyed else tablet.high_watermark - tablet.log_start)
            if last:
                return

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(1, 30):
        batch = JobBatch("query", n)
        pieces = [table_of(k, v="a") for k in range(30, 33 + n % 2)]
        table.staging.publish(batch, staged(table, batch, pieces, kind=kind), lasting=True, overwrite=())
    over.set()
    reader.join()
    assert seen <= {20, 3, 4}


@pytest.mark.parametrize("keyed", [False, True])
def test_partitions_that_are_named_lose_their_rows_also_where_none_come(deployment: Deployment, keyed: bool) -> None:
    kind: WriteKind = "upsert" if keyed else "append"
    table = deployment.table(keyed=keyed, partitioned=True, buckets=2)
    first, second, third = (JobBatch("query", n) for n in range(3))
    table.staging.publish(first, staged(table, first, [table_of(1, 2, v=v) for v in "abc"], kind=kind), lasting=True)
    named = ["v=a", "v=b", "v=never"]
    parts = staged(table, second, [table_of(3, v="a")], kind=kind)
    assert table.staging.publish(second, parts, lasting=True, overwrite=named).rows == 1
    assert deployment.live(table) == [(1, "c"), (2, "c"), (3, "a")]
    assert table.staging.publish(third, [], lasting=True, overwrite=["v=c"]).rows == 0
    assert deployment.live(table) == [(3, "a")]
    assert table.staging.publish(third, [], lasting=True, overwrite=["v=a"]).before
    deployment.restart()
    assert deployment.live(deployment.handle(table.desc)) == [(3, "a")]


def test_what_cannot_be_overwritten(deployment: Deployment) -> None:
    table = deployment.table()
    batch = JobBatch("query", 0)
    parts = staged(table, batch, [table_of(1)])
    with pytest.raises(InvalidRequestError, match="no partitions"):
        table.staging.publish(batch, parts, lasting=True, overwrite=())
    table.staging.publish(batch, parts, lasting=True)
    assert deployment.rows(table) == [(1, "x")]
    part = deployment.table(name="p", partitioned=True)
    first, batch = JobBatch("query", 0), JobBatch("query", 1)
    part.staging.publish(first, staged(part, first, [table_of(1, v=v) for v in "abc"]), lasting=True)
    pieces = [table_of(2, v=v) for v in "ab"]
    with pytest.raises(InvalidRequestError, match="are of partition v=b"):
        part.staging.publish(batch, staged(part, batch, pieces), lasting=True, overwrite=["v=a", "v=c"])
    assert deployment.live(part) == [(1, "a"), (1, "b"), (1, "c")]
    assert part.staging.publish(batch, [], lasting=True, overwrite=()).rows == 0
