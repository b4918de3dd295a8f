"""Every request passes `authorize`, which names what its caller lacks, and the lake gives no more than may be had."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pytest
from tests.unit.server.empty_lake import EmptyLake

from lakehead.config import Limits
from lakehead.env import Env, SystemClock, SystemThreads
from lakehead.env.randomness import SeededRandomness
from lakehead.errors import PermissionDeniedError
from lakehead.protocol import messages as m
from lakehead.protocol.codec import AnyCall, AnyStream
from lakehead.protocol.privileges import Database, Privilege
from lakehead.protocol.quotas import Quota
from lakehead.protocol.staging import Publish, StagedTable
from lakehead.server.access import EMBEDDED_OWNER, TOKEN_HOLDER, Caller
from lakehead.server.endpoint import LocalEndpoint
from lakehead.server.service import Service
from lakehead.testing.storage import MemoryStorage
from lakehead.types import Schemas, TableDescriptor, TablePath

ALL = frozenset(Privilege)
SCHEMA = Schemas.only(pa.schema([pa.field("k", pa.int64(), False)]))
DESC = TableDescriptor("", TablePath("d", "t"), SCHEMA, ("k",), (), ("k",), 1, "iceberg")


class Lake(EmptyLake):
    """A lake whose catalog has a password."""

    def info(self, desc: TableDescriptor, *, reading: bool = False) -> m.LakeReply:
        return m.LakeReply(
            metadata_location="file:/m.json",
            catalog_name="lake",
            catalog_properties={"password": "p"},
            storage_properties={"s3.region": "r"},
            owner="me",
        )


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(
        str(tmp_path),
        env=Env(SystemClock(), MemoryStorage(), SeededRandomness(1), SystemThreads()),
        limits=Limits(),
        lake=Lake(),
    )
    yield made
    made.close()


def created(service: Service) -> str:
    request = m.CreateTable(info=m.TableInfo.of(DESC), if_not_exists=False)
    return LocalEndpoint(service).call(request)[0].info.table_id


def requests(table_id: str) -> list[m.Request[Any]]:
    plain: dict[str, Any] = {
        "table_id": table_id, "database": "d", "table": "t", "info": m.TableInfo.of(DESC), "if_not_exists": True,
        "purge": False, "kind": "upsert", "tablets": [], "checksums": [], "columns": ["k"], "writer_id": bytes(16),
        "epoch": 1, "acked_through": 0, "counts": [], "prefix": [], "sync": True, "ranges": [], "leases": [],
        "release": [], "job_id": "j", "name": "host:1", "number": 1, "tables": None, "has": [], "without": [],
        "predicate": None, "changes": [], "starts": [], "default": "latest", "stops": None,
        "job": "q", "batch": 0, "attempt": "0" * 32, "parts": [], "lasting": True,
        "write": m.Write(table_id=table_id, kind="upsert", tablets=[], checksums=[], columns=["k"]),
        "to_database": "d", "to_table": "t", "tablet": m.TabletRef(partition="", bucket=0), "key": [1],
        "principal": "p", "id": "i", "to": "p", "on": "d.t", "privileges": [Privilege.READ],
        "quota": Quota(streams=1),
    }  # fmt: skip
    of_tables: dict[Any, list[Any]] = {
        m.OpenLeases: [m.LeasedTable(table_id=table_id, lake=None)],
        Publish: [StagedTable(table_id=table_id, parts=[])],
    }
    found = []
    for kind in get_args(AnyCall | AnyStream):
        given = plain | ({"tables": of_tables[kind]} if kind in of_tables else {})
        found.append(kind(**{f: given[f] for f in kind.__struct_fields__ if f in given}))
    return found


def test_no_request_is_answered_to_whom_it_is_not_allowed(service: Service) -> None:
    for request in requests(created(service)):
        nobody = Caller("nobody", ALL - {request.privilege})
        with pytest.raises(PermissionDeniedError, match="nobody") as raised:
            if isinstance(request, get_args(AnyStream)):
                service.stream(request, nobody)
            else:
                service.call(request, [], nobody)
        assert raised.value.context["privilege"] == request.privilege.value
        first = next(t for p, t in request.needs if p is request.privilege)
        named = None if first is None or isinstance(first, Database) else str(first)
        assert raised.value.context.get("table") == named
    assert LocalEndpoint(service).call(m.ListTables(database=None))[0].names == ["d.t"], "and nothing was done"


def test_owners_and_token_holders_may_do_all() -> None:
    assert EMBEDDED_OWNER.privileges == TOKEN_HOLDER.privileges == ALL


def test_who_may_not_commit_gets_no_catalog(service: Service) -> None:
    request = m.LakeInfo(table_id=created(service))
    whole, _ = service.call(request, [], TOKEN_HOLDER)
    assert whole.catalog_properties == {"password": "p"} and whole.catalog_name == "lake"
    reader = dataclasses.replace(TOKEN_HOLDER, privileges=frozenset({Privilege.READ}))
    part, _ = service.call(request, [], reader)
    assert (part.catalog_name, part.catalog_properties) == ("", {})
    assert (part.metadata_location, part.storage_properties) == (whole.metadata_location, whole.storage_properties)
