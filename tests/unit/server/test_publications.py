"""What the catalog keeps of publications, and when the disk has it."""

from __future__ import annotations

import pytest
from tests.unit.server.test_staging import Deployment, deployment, held, staged, table_of

from lakehead.client.staging import JobBatch
from lakehead.types import WriteKind

__all__ = ["deployment", "held"]


@pytest.mark.parametrize("keyed", [False, True])
def test_the_catalog_waits_for_the_disk_once_for_rows_that_come_along(
    deployment: Deployment, keyed: bool, held: bool
) -> None:
    """A power cut takes the note that they were written; whoever opens the folder then writes none twice."""
    kind: WriteKind = "upsert" if keyed else "append"
    table = deployment.table(keyed=keyed)
    waits: list[str] = []

    def note(action: str, path: str) -> None:
        if action == "write_atomic" and path.endswith("metadata.db"):
            waits.append(path)

    for number in range(3):
        batch = JobBatch("query", number)
        parts = staged(table, batch, [table_of(number, 10 + number)], kind=kind)
        deployment.storage.before = note
        assert table.staging.publish(batch, parts, lasting=True).rows == 2
        assert len(waits) == (number + 1) * (1 if held else 2)
    unfinished = deployment.service._metadata.unfinished_publications
    assert not unfinished(table.desc.table_id)
    rows = [(k, "x") for k in (0, 1, 2, 10, 11, 12)]
    for number in (2, 3):
        deployment.restart(power_cut=True)
        table, batch = deployment.handle(table.desc), JobBatch("query", number)
        assert deployment.rows(table) == rows
        again = table.staging.publish(batch, staged(table, batch, [table_of(20)], kind=kind), lasting=True)
        assert again.before == (number == 2)
        rows = sorted([*rows, (20, "x")]) if number == 3 else rows
        assert deployment.rows(table) == rows
