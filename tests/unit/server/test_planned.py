"""Whether where a micro-batch ends lies within where a later one does."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.api.table import handle_of
from lakehead.client.staging import JobBatch
from lakehead.errors import SequenceConflictError
from lakehead.protocol.staging import PLANNED_KEPT
from lakehead.server import catalog
from lakehead.server.endpoint import LocalEndpoint
from lakehead.server.planned import ends_within

OLD = '{"table": "a.t", "table_id": "x", "schema_id": 0, "offsets": {"/0": 7, "p=1/0": 3}}'


@pytest.mark.parametrize(
    ("one", "other", "within"),
    [
        (OLD, OLD, True),
        (OLD, OLD.replace("7", "8"), True),
        (OLD, OLD.replace('"schema_id": 0', '"schema_id": 1'), True),
        (OLD, OLD.replace("}}", ', "p=2/0": 1}}'), True),
        (OLD, OLD.replace("7", "6"), False),
        (OLD, OLD.replace(', "p=1/0": 3', ""), False),
        (OLD, OLD.replace('"x"', '"y"'), False),
        (OLD.replace("}}", '}, "live": {"lease": "l", "ranges": {"/0": [0, 9]}}}'), OLD, False),
        ('{"clicks": {"0": 5, "1": 9}}', '{"clicks": {"0": 5, "1": 10}, "carts": {"0": 1}}', True),
        ('{"clicks": {"0": 6, "1": 9}}', '{"clicks": {"0": 5, "1": 10}}', False),
        ("17", "17", True),
        ("16", "17", True),
        ("17.5", "17", False),
        ('{"logOffset":5} sha256 ab', '{"logOffset":9} sha256 cd', False),
        ("sha256 ab", "sha256 cd", False),
        ("sha256 ab", "sha256 ab", True),
        ("[1, 2]", "[1, 3]", True),
        ("[1, 2]", "[1]", False),
        ("true", "1", False),
        ('{"isStartingVersion": true}', '{"isStartingVersion": false}', False),
        ("null", "null ", True),
        ("NaN", "NaN ", False),
        ('"a"', '"b"', False),
        ("-", "-", True),
        ("-", "5", False),
        (f"{OLD}\n5", f"{OLD}\n6", True),
        (f"{OLD}\n7", f"{OLD}\n6", False),
        (OLD, f"{OLD}\n6", False),
        ("[" * 100_000, "[" * 99_999, False),
        ("1" * 5000, "2", False),
    ],
)
def test_what_lies_within(one: str, other: str, within: bool) -> None:
    assert ends_within(one, other) is within


@pytest.mark.parametrize("seed", range(20))
def test_it_is_so_of_what_a_query_has_passed_and_of_nothing_else(seed: int) -> None:
    random_ = random.Random(seed)
    at: dict[str, int] = {}
    ends = []
    for _ in range(30):
        for _ in range(random_.randrange(1, 4)):
            tablet = f"p={random_.randrange(3)}/{random_.randrange(2)}"
            at[tablet] = at.get(tablet, 0) + random_.randrange(1, 5)
        ends.append(dict(at))
    for i, one in enumerate(ends):
        for j, other in enumerate(ends):
            assert ends_within(json.dumps({"offsets": one}), json.dumps({"offsets": other})) == (i <= j)


class Job:
    """A job that publishes a row a batch, made of what it says."""

    def __init__(self, con: lh.Connection) -> None:
        self._con = con
        con.create_table("t", pa.schema([("n", pa.int64())]))

    def publish(self, number: int, planned: str) -> bool:
        """Whether the batch was there."""
        staging = handle_of(self._con.table("t")).staging
        batch = JobBatch("query", number, planned)
        rows = staging.held()
        rows.add("append", pa.table({"n": [number]}))
        return staging.publish(batch, [rows.done()], lasting=True).before

    def kept(self) -> list[tuple[int, bool]]:
        """Which batches are known, and whether in full."""
        endpoint = self._con._server
        assert isinstance(endpoint, LocalEndpoint)
        rows = endpoint.service._staging._metadata._rows("select batch, planned from planned order by batch")
        return [(int(n), not str(planned).startswith(catalog.DIGEST)) for n, planned in rows]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(catalog, "PLANNED_KNOWN", 2 * PLANNED_KEPT)
    with lh.connect(tmp_path) as con:
        yield Job(con)


@pytest.mark.parametrize("step", [1, 3])
def test_older_batches_are_known_again_and_those_long_before_by_where_they_end(job: Job, step: int) -> None:
    numbers = range(0, 3 * PLANNED_KEPT, step)
    for n in numbers:
        assert not job.publish(n, f'{{"/0": {n}}}')
    last = numbers[-1]
    assert job.kept() == [(n, n > last - PLANNED_KEPT) for n in numbers if n > last - 2 * PLANNED_KEPT]
    forgotten = [n for n in numbers if n <= last - 2 * PLANNED_KEPT]
    for n in numbers:
        assert job.publish(n, f'{{"/0": {n}}}') and job.publish(n, "")
        if n not in forgotten:
            with pytest.raises(SequenceConflictError, match=f"behind batch {last}"):
                job.publish(n, f'{{"/0": {n + 1}}}')
    full = next(n for n, known in job.kept() if known)
    for n in forgotten:
        assert job.publish(n, f'{{"/0": {full}}}'), "nothing of that is not there"
        for beyond in (f'{{"/0": {full + 1}}}', "sha256 of files"):
            with pytest.raises(SequenceConflictError, match=f"before batch {full}, which is up to"):
                job.publish(n, beyond)


def test_what_is_long_is_kept_short_and_known_all_the_same(job: Job) -> None:
    for n in range(3 * PLANNED_KEPT):
        assert not job.publish(n, f"sha256 {n}")
    assert job.kept() == [(n, False) for n in range(PLANNED_KEPT, 3 * PLANNED_KEPT)]
    for n in range(3 * PLANNED_KEPT):
        if n < PLANNED_KEPT:
            with pytest.raises(SequenceConflictError):
                job.publish(n, f"sha256 {n}")
        else:
            assert job.publish(n, f"sha256 {n}")
            with pytest.raises(SequenceConflictError):
                job.publish(n, f"sha256 {n + 1}")


def test_what_was_not_known_of_a_batch_hides_nothing_of_those_behind_it(job: Job) -> None:
    assert not job.publish(0, "")
    for n in range(1, 3 * PLANNED_KEPT):
        assert not job.publish(n, "" if n < 2 * PLANNED_KEPT else f'{{"/0": {n}}}')
    first = 2 * PLANNED_KEPT
    for n in (0, 1, first - 1):
        assert job.publish(n, f'{{"/0": {first}}}') and job.publish(n, "")
        with pytest.raises(SequenceConflictError, match=f"before batch {first}"):
            job.publish(n, f'{{"/0": {first + 1}}}')
