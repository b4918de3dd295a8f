"""Folders that are copied, and folders that two servers have opened."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.deployment import Deployment
from tests.simulation.history import require
from tests.simulation.threads import TaskLock
from tests.simulation.workload import AnonymousWriter, Reader

from lakehead.errors import LakeheadError
from lakehead.protocol import messages as m
from lakehead.server.endpoint import LocalEndpoint
from lakehead.server.service import Service

_BATCHES = 3


def exchange_owners(deployment: Deployment, wait: Callable[[], None]) -> None:
    """Let a second server in while the first lives, and end the first some time later.

    What the first writes between its look at the lock and the second's opening is damage for the second, as the
    guarantees say: so the second comes when nobody is there. A disk that refuses to open a table puts the second off.
    """
    server = deployment.network.server
    assert server is not None
    with deployment.scheduler.inside(server.process):
        for table_id in deployment.history.tables:
            try:
                LocalEndpoint(server.service).call(m.Watermarks(table_id=table_id, sync=False))
            except LakeheadError as e:
                deployment.note("server", "no second owner", type(e).__name__)
                return
    while not _is_between_writes(deployment, server.service):
        deployment.scheduler.sleep(0.0005)
    deployment.let_second_in()
    wait()
    deployment.end_first()


def _is_between_writes(deployment: Deployment, service: Service) -> bool:
    """Whether nobody is in what begins with a look at the lock, or opens tablets."""
    tables = service._tables.open_tables()
    locks = [table._open_lock for table in tables]
    for tablet in (tablet for table in tables for tablet in table.tablets.values()):
        locks += [tablet._log_lock, tablet._maintenance_lock]
    return not deployment.disk.in_transaction and not any(isinstance(lock, TaskLock) and lock.held for lock in locks)


def open_copy(deployment: Deployment) -> None:
    """Open a copy of a folder whose server has ended: it is another folder, holds the same rows, and goes on by itself;
    the original does not change."""
    before, metadata = deployment.contents(), deployment.metadata
    assert metadata is not None
    original = metadata.incarnation
    made = deployment.copied()
    deployment.note("copy", "made")
    made.start()
    store = made.metadata
    assert store is not None
    begun = store.incarnation
    require(begun.folder_id != original.folder_id, "a copy takes itself for the folder that it was copied from")
    require(begun.number > original.number, f"a copy begins as {begun}, after {original}")
    require(store.is_copy and not store.is_own(str(original)), "a copy owns what the original began")
    require(store.is_ancestor(str(original)), "a copy does not know what it was copied from")
    _use(made, write=True)
    made.cut_power()
    made.start()
    _use(made, write=False)
    made.kill()
    require(deployment.contents() == before, "the original has changed while its copy was used")
    deployment.note("copy", "gone")


def _use(copied: Deployment, *, write: bool) -> None:
    for desc in copied.history.tables.values():
        reader = Reader(copied, desc, f"{desc.path.table}-copy")
        reader.whole()
        if write:
            AnonymousWriter(copied, desc, f"{desc.path.table}-copy").run(_BATCHES)
            reader.whole()
