"""Tables that are opened: one that takes long keeps no other waiting."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from tests.unit.server.empty_lake import EmptyLake
from tests.waiting import WAIT_SECONDS

import lakehead as lh
from lakehead.api.table import handle_of
from lakehead.config import Limits, TableProperties
from lakehead.env import Env
from lakehead.env.threads import Lock
from lakehead.errors import LakeStateError, StorageError
from lakehead.log import LogView
from lakehead.protocol import messages as m
from lakehead.server.endpoint import LocalEndpoint
from lakehead.server.service import Service
from lakehead.server.tables import LiveTables
from lakehead.server.tablet import Tablet
from lakehead.types import Schemas, TableDescriptor, TablePath, TabletKey


class _SilentLake(EmptyLake):
    """A lake whose catalog does not answer until it is told to."""

    def __init__(self) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()

    def tiered_offsets(self, desc: TableDescriptor) -> Mapping[TabletKey, int]:
        self.asked.set()
        self.answers.wait()
        return {}


def _create(service: Service, name: str, lake: str | None) -> str:
    desc = TableDescriptor(
        table_id="",
        path=TablePath.parse(name),
        schemas=Schemas.only(pa.schema([("k", pa.int64())])),
        primary_key=(),
        partition_by=(),
        bucket_key=(),
        buckets=1,
        lake=lake,
        properties=TableProperties(),
    )
    reply, _ = LocalEndpoint(service).call(m.CreateTable(info=m.TableInfo.of(desc), if_not_exists=False))
    return reply.info.table_id


def test_a_table_whose_lake_does_not_answer_keeps_no_other_waiting(tmp_path: Path) -> None:
    lake = _SilentLake()
    service = Service(
        str(tmp_path),
        env=Env.system(),
        limits=Limits(),
        lake=lake,
    )
    slow, other = _create(service, "slow", "iceberg"), _create(service, "other", None)
    with ThreadPoolExecutor(2) as pool:
        try:
            waiting = pool.submit(LocalEndpoint(service).call, m.Watermarks(table_id=slow, sync=False))
            assert lake.asked.wait(WAIT_SECONDS)
            pool.submit(LocalEndpoint(service).call, m.Watermarks(table_id=other, sync=False)).result(5)
        finally:
            lake.answers.set()
        waiting.result(WAIT_SECONDS)
    service.close()


class _LakeAhead(_SilentLake):
    """A lake that holds rows that the log does not have."""

    def tiered_offsets(self, desc: TableDescriptor) -> Mapping[TabletKey, int]:
        return {TabletKey("", 0): 1}


def test_a_log_that_ends_before_its_lake_is_not_served(tmp_path: Path) -> None:
    service = Service(
        str(tmp_path), env=Env.system(), limits=Limits(),
        lake=_LakeAhead(),
    )  # fmt: skip
    try:
        table, other = _create(service, "a.t", "iceberg"), _create(service, "a.u", None)
        with pytest.raises(LakeStateError, match="restore the log") as refused:
            LocalEndpoint(service).call(m.Watermarks(table_id=table, sync=False))
        assert refused.value.context == {"table": "a.t", "tablet": str(TabletKey("", 0))}
        LocalEndpoint(service).call(m.Watermarks(table_id=other, sync=False))
    finally:
        service.close()


class _ForgetfulLake(EmptyLake):
    """Makes lake tables where it can, and knows none that it did not make."""

    def __init__(self) -> None:
        self.fails: type[BaseException] | None = None
        self.made: list[str] = []

    def create(self, desc: TableDescriptor) -> None:
        if self.fails is not None:
            raise self.fails("no room")
        self.made.append(desc.table_id)

    def drop(self, desc: TableDescriptor, *, purge: bool) -> None:
        self.create(desc)

    def tiered_offsets(self, desc: TableDescriptor) -> Mapping[TabletKey, int]:
        assert desc.table_id in self.made, "someone dropped it"
        return {}


@pytest.mark.parametrize("restarted", [False, True])
def test_a_table_without_its_lake_table_gets_it_when_it_is_used(
    restarted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk let nobody make the one nor take the other back, or the process died between the two."""
    lake = _ForgetfulLake()
    start = lambda: Service(f"{tmp_path}/data", env=Env.system(), limits=Limits(), lake=lake)  # noqa: E731
    service = start()
    lake.fails = StorageError
    with monkeypatch.context() as patched:
        patched.setattr(LiveTables, "drop", lambda tables, desc: lake.create(desc))
        with pytest.raises(StorageError):
            _create(service, "a.t", "iceberg")
    lake.fails = None
    if restarted:
        service.close()
        service = start()
    reply, _ = LocalEndpoint(service).call(m.GetTable(database="a", table="t"))
    for _ in range(2):
        LocalEndpoint(service).call(m.Watermarks(table_id=reply.info.table_id, sync=False))
        service.close()
        service = start()
    service.close()
    assert lake.made == [reply.info.table_id], "and once"


def test_what_leases_pin_is_looked_at_in_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(
        str(tmp_path), env=Env.system(), limits=Limits(),
        lake=None,
    )  # fmt: skip
    moment, looked = service._tables.moment, []
    view = Tablet.view

    def seen(tablet: Tablet) -> LogView:
        looked.append(moment.locked())
        return view(tablet)

    monkeypatch.setattr(Tablet, "view", seen)
    try:
        tables = [m.LeasedTable(table_id=_create(service, name, None), lake=None) for name in ("a.t", "a.u")]
        LocalEndpoint(service).call(m.OpenLeases(tables=tables, release=[]))
        assert looked == [True, True], "watermarks move under this lock: they lie within the views"
    finally:
        service.close()


def test_threads_that_come_to_numba_and_to_pandas_at_once_share_no_package_that_is_not_loaded() -> None:
    """Python takes two that import a package from its two ends for a deadlock, and one of the imports fails."""
    shared = """
import sys
import lakehead.server.tablet
before = set(sys.modules)
import pandas
pandas_takes = set(sys.modules) - before
for name in pandas_takes:
    del sys.modules[name]
import lakehead.kv
both = pandas_takes & set(sys.modules)
print(sorted(n for n in both if n.split(".")[0] in ("numpy", "pyarrow", "lakehead")))
"""
    found = subprocess.run(
        [sys.executable, "-c", shared], capture_output=True, text=True, check=True, timeout=WAIT_SECONDS
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("keyed", [False, True])
def test_what_is_written_while_a_tablet_is_synced_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keyed: bool
) -> None:
    """Rows, start and end of one moment: clients refuse an answer that contradicts itself."""
    synced = Tablet.sync
    with lh.connect(tmp_path) as con:
        schema = pa.schema([("k", pa.int64())])
        table = con.create_table("t", schema, primary_key=["k"] if keyed else None, buckets=1)
        write = table.upsert if keyed else table.append
        write([{"k": 0}])
        more = iter(range(1, 100))

        def written_beside(tablet: Tablet) -> int:
            write([{"k": next(more)}])
            end = synced(tablet)
            write([{"k": next(more)}])
            return end

        monkeypatch.setattr(Tablet, "sync", written_beside)
        for at in (1, 3, 5):
            (state,) = handle_of(table).log.tablets(sync=True)
            assert (state.log_start, state.high_watermark, state.rows) == (0, at, at)


class _LockThatWritesBefore:
    """Has something written just before it is taken, once it is armed."""

    def __init__(self, lock: Lock, write: Callable[[], None]) -> None:
        self._lock, self._write, self.armed = lock, write, True

    def __enter__(self) -> bool:
        if self.armed:
            self.armed = False
            self._write()
        return self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)  # type: ignore[arg-type]


@pytest.mark.parametrize("ask", ["scan", "tablets"])
def test_of_rows_that_come_while_tablets_are_looked_at_the_first_are_seen(tmp_path: Path, ask: str) -> None:
    """Also of those that make a partition: what one thread wrote has no gaps, for whoever sees the table."""
    with lh.connect(tmp_path) as con:
        schema = pa.schema([("p", pa.string()), ("n", pa.int64())])
        table = con.create_table("t", schema, partition_by=["p"], buckets=2)
        table.append([{"p": "old", "n": 0}])

        def write() -> None:
            for n, p in enumerate(("new", "old", "newer", "old", "new", "old"), 1):
                table.append([{"p": p, "n": n}])

        endpoint = con._server
        assert isinstance(endpoint, LocalEndpoint)
        tables = endpoint.service._tables
        tables.moment = lock = _LockThatWritesBefore(tables.moment, write)  # type: ignore[assignment]
        if ask == "scan":
            seen = table.scan().to_arrow()["n"].to_pylist()
        else:
            seen = list(range(sum(t.rows for t in handle_of(table).log.tablets())))
            assert {t.key.partition for t in handle_of(table).log.tablets()} == {"p=new", "p=newer", "p=old"}
        assert sorted(seen) == list(range(7)) and not lock.armed
