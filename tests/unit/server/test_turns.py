"""Rows that follow from what a table has are published in the turn in which that was read."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pyarrow as pa
import pytest
from tests.unit.server.faulty_service import SCHEMA, Deployment

from lakehead.client.staging import JobBatch, Part, publish_together
from lakehead.client.table import TableHandle
from lakehead.config import Limits
from lakehead.errors import OutcomeUnknownError, TurnLostError, UnavailableError


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    made = Deployment(Limits())
    yield made
    made.storage.before = None
    made.service.close()


def upserts(table: TableHandle, batch: JobBatch, *keys: int) -> list[Part]:
    """Rows that wait on the server, and as many that come along."""
    parts: list[Part] = []
    for n, rows in enumerate((table.staging.rows(batch), table.staging.held())):
        if mine := keys[n::2]:
            rows.add("upsert", pa.Table.from_pylist([{"k": k, "v": "x"} for k in mine], SCHEMA))
            parts.append(rows.done())
    return parts


def refuse(action: str, path: str, part: str) -> None:
    if action == "append" and part in path:
        raise OSError(errno.ENOSPC, "no room", path)


def publish_in_turn(table: TableHandle, job: str, turn: int, *keys: int) -> None:
    batch = JobBatch(job)
    parts = upserts(table, batch, *keys)
    publish_together(batch, [(table.staging, parts)], lasting=True, turns={table.desc.table_id: turn})


@pytest.mark.parametrize("between", ["nothing", "published", "in turn", "restart", "overwritten", "mine"])
def test_what_follows_from_a_table_is_published_if_nothing_else_has_followed(
    deployment: Deployment, between: str
) -> None:
    table = deployment.table(keyed=True, partitioned=between == "overwritten")
    turn = table.staging.turn()
    match between:
        case "published":
            other = JobBatch("other")
            table.staging.publish(other, upserts(table, other, 5), lasting=True)
        case "in turn":
            publish_in_turn(table, "other", turn, 5)
        case "restart":
            deployment.restart()
            table = deployment.handle(table.desc)
        case "overwritten":
            other = JobBatch("other")
            parts = upserts(table, other, 5)
            table.staging.publish(other, parts, lasting=True, overwrite=())
        case "mine":
            publish_in_turn(table, "job", turn, 5)
    if between in ("in turn", "restart", "overwritten"):
        with pytest.raises(TurnLostError, match="read it again"):
            publish_in_turn(table, "job", turn, 1)
        assert (1, "x") not in deployment.live(table)
        turn = table.staging.turn()
    publish_in_turn(table, "job", turn, 1)
    # What is there is there, whatever the turn is: "mine" is the same batch again.
    assert ((1, "x") in deployment.live(table)) == (between != "mine")
    publish_in_turn(table, "job", turn, 2)
    assert (2, "x") not in deployment.live(table)


def test_a_turn_lasts_until_what_was_published_is_there(deployment: Deployment) -> None:
    """Who asks while it is written, and reads what is not all there yet, is refused."""
    table = deployment.table(keyed=True)
    asked: list[int] = []

    def ask(action: str, path: str) -> None:
        if path.endswith(".log") and not asked:
            asked.append(deployment.service._staging._turns.number(table.desc.table_id))

    turn = table.staging.turn()
    deployment.storage.before = ask
    publish_in_turn(table, "other", turn, 1, 2, 3)
    deployment.storage.before = None
    for number in (turn, *asked):
        with pytest.raises(TurnLostError):
            publish_in_turn(table, "job", number, 4)
    assert asked and asked[0] != turn
    publish_in_turn(table, "job", table.staging.turn(), 4)
    assert len(deployment.live(table)) == 4


@pytest.mark.parametrize("restart", [False, True])
def test_what_is_there_in_part_is_followed_by_nothing(deployment: Deployment, restart: bool) -> None:
    table = deployment.table(keyed=True, buckets=1)
    folder = deployment.service._tables.get(table.desc.table_id).folder
    deployment.storage.before = lambda action, path: refuse(action, path, folder)
    with pytest.raises(OutcomeUnknownError):
        publish_in_turn(table, "other", table.staging.turn(), 1)
    if restart:  # which what refuses it outlasts
        deployment.restart()
        table = deployment.handle(table.desc)
    turn = table.staging.turn()
    with pytest.raises(UnavailableError, match="not all there yet"):
        publish_in_turn(table, "job", turn, 2)
    deployment.storage.before = None
    deployment.service.maintain()
    with pytest.raises(TurnLostError):
        publish_in_turn(table, "job", turn, 2)
    assert deployment.live(table) == [(1, "x")]
    publish_in_turn(table, "job", table.staging.turn(), 2)
    assert deployment.live(table) == [(1, "x"), (2, "x")]
