"""The two ways in which a staged commit is published: a metadata file that is swapped in, and updates that a catalog is
sent."""

from __future__ import annotations

from typing import Any

import pytest
from pyiceberg.exceptions import CommitFailedException

from lakehead.errors import CommitConflictError
from lakehead.iceberg.staging import MetadataFile, MetadataUpdates
from lakehead.lake.lake_table import LakeChange, Outcome, StagedCommit


@pytest.fixture(params=[MetadataFile, MetadataUpdates])
def kind(request: Any, keyed: Any) -> type:
    if request.param is MetadataUpdates:
        # As of a catalog that is asked to write the metadata itself.
        keyed.catalog.iceberg.engine.dialect.supports_sane_rowcount = False
    kind: type = request.param
    return kind


def stage(lake: Any) -> StagedCommit:
    return lake.table.stage(lake.table.load(), LakeChange("t1", 1, "r", {}))  # type: ignore[no-any-return]


def test_rounds_land(keyed: Any, kind: type) -> None:
    for n in range(3):
        keyed.write(n, n + 1)
        keyed.round()
    assert keyed.values() == keyed.model_values()
    assert isinstance(stage(keyed).own, kind)


def test_it_lands_once(keyed: Any, kind: type) -> None:
    staged = stage(keyed)
    assert keyed.table.publish(staged).outcome is Outcome.LANDED
    again = keyed.table.publish(staged)
    assert again.outcome is Outcome.REFUSED and isinstance(again.cause, CommitFailedException)
    assert keyed.snapshot_ids() == [staged.snapshot_id]


def test_it_lands_on_no_other_version(keyed: Any, kind: type) -> None:
    keyed.write(1)
    keyed.round()
    staged, other = stage(keyed), stage(keyed)
    assert keyed.table.publish(other).outcome is Outcome.LANDED
    assert keyed.table.publish(staged).outcome is Outcome.REFUSED
    ids = keyed.snapshot_ids()
    keyed.table.discard(staged.written)
    assert keyed.snapshot_ids() == ids and keyed.ids() == [1]


def test_old_metadata_goes(keyed: Any, kind: type) -> None:
    with keyed.load().transaction() as change:
        change.set_properties({"write.metadata.previous-versions-max": "2"})
    for _ in range(5):
        assert keyed.table.publish(stage(keyed)).outcome is Outcome.LANDED
    assert len(list(keyed.folder.rglob("*.metadata.json"))) == 3


def test_expiry(keyed: Any, kind: type) -> None:
    for n in range(4):
        keyed.write(n)
        keyed.round()
    version, other = keyed.table.load(), stage(keyed)
    ids = keyed.snapshot_ids()
    assert keyed.table.expire(version, ids[:2], tuple).snapshots == 2 and keyed.snapshot_ids() == ids[2:]
    keyed.table.discard(other.written)
    assert keyed.stray_files() == set() and keyed.ids() == keyed.model_ids()
    assert keyed.table.publish(stage(keyed)).outcome is Outcome.LANDED
    with pytest.raises(CommitConflictError):
        keyed.table.expire(version, ids[2:3], tuple)
    assert ids[2] in keyed.snapshot_ids()
