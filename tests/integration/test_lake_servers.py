"""What `LakeTable` promises, on catalogs that are servers, one of them with its files on S3."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.lakes import Lake, any_keyed, any_log, describe
from tests.unit.lake.test_lake_table import (
    test_a_commit_lands_on_its_base_or_not_at_all,
    test_a_delayed_commit_lands_on_its_base_or_not_at_all,
    test_a_dropped_table_takes_no_commit,
    test_a_table_made_anew_is_another_table,
    test_expiry_of_older_snapshots_moves_nothing,
    test_files_that_are_gone_are_missed,
    test_the_first_commit_lands_on_an_empty_table_only,
    test_what_an_attempt_is_told_is_not_what_happened,
    test_what_is_published_twice_lands_once,
)
from tests.unit.tiering.test_commit import test_whatever_befalls_one_commit_the_round_lands_once

from lakehead.config import LakeConfig
from lakehead.env.randomness import SystemRandomness
from lakehead.iceberg.iceberg_table import IcebergLakeTable
from lakehead.types import TablePath

__all__ = [
    "any_keyed",
    "any_log",
    "test_a_commit_lands_on_its_base_or_not_at_all",
    "test_a_delayed_commit_lands_on_its_base_or_not_at_all",
    "test_a_dropped_table_takes_no_commit",
    "test_a_table_made_anew_is_another_table",
    "test_expiry_of_older_snapshots_moves_nothing",
    "test_files_that_are_gone_are_missed",
    "test_the_first_commit_lands_on_an_empty_table_only",
    "test_what_an_attempt_is_told_is_not_what_happened",
    "test_what_is_published_twice_lands_once",
    "test_whatever_befalls_one_commit_the_round_lands_once",
]


@pytest.fixture(params=["postgres", "rest"])
def make_any(
    request: pytest.FixtureRequest, tmp_path: Path, lake_on: Callable[[str], LakeConfig]
) -> Callable[..., Lake]:
    def make(*, keyed: bool = True, buckets: int = 1, lands_late: bool = False) -> Lake:
        # One catalog serves all tests.
        path = TablePath(f"db{SystemRandomness().uuid_hex()}", "t")
        desc = dataclasses.replace(describe(keyed=keyed, buckets=buckets), path=path)
        return Lake(tmp_path, desc, lands_late=lands_late, config=lake_on(request.param))

    return make


def test_a_server_may_still_be_at_work_on_what_it_was_sent(make_any: Callable[..., Lake], tmp_path: Path) -> None:
    for lake, late in ((make_any(), True), (Lake(tmp_path, describe()), False)):
        assert IcebergLakeTable(lake.load, lake.desc).lands_late is late
