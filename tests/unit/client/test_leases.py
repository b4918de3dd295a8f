"""Leases are renewed exactly while somebody holds them, and let go of with the next request."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from tests.waiting import WAIT_SECONDS

from lakehead.client.leases import Leases
from lakehead.client.routes import OneServer
from lakehead.env import Env
from lakehead.errors import ClosedError, OverloadedError, UnavailableError
from lakehead.protocol import messages as m


class Server:
    """Remembers what was asked; fails as often as it is told to."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.errors: list[Exception] = []
        self.renewed = threading.Event()
        self.seconds = 1000.0

    def call(self, request: m.Request[Any], attachments: Sequence[pa.Buffer] = ()) -> tuple[Any, list[pa.Buffer]]:
        if self.errors:
            raise self.errors.pop(0)
        self.asked.append(request)
        if isinstance(request, m.OpenLeases):
            lease = m.Lease(lease=f"lease {len(self.asked)}", tablets=[])
            return m.LeasesReply(leases=[lease] * len(request.tables), seconds=self.seconds), []
        self.renewed.set()
        return m.Done(), []

    def stream(self, request: m.Request[m.Stream]) -> m.Stream:
        raise AssertionError


@pytest.fixture
def server() -> Server:
    return Server()


def opened(keeper: Leases) -> str:
    lease = keeper.open([m.LeasedTable(table_id="t", lake=None)])[0].lease
    keeper.keep(lease)
    return lease


def test_what_is_held_is_renewed_and_what_is_not_is_released(server: Server) -> None:
    keeper = Leases(OneServer(server), Env.system(), renewing=False)
    a, b = opened(keeper), opened(keeper)
    assert keeper.renew()
    keeper.release(a)
    assert keeper.renew()
    keeper.release(b)
    assert not keeper.renew()
    assert not keeper.renew()
    renewals = [(r.leases, r.release) for r in server.asked if isinstance(r, m.RenewLeases)]
    assert renewals == [([a, b], []), ([b], [a]), ([], [b])], "nothing to say is not said"


def test_releases_go_with_the_next_lease(server: Server) -> None:
    keeper = Leases(OneServer(server), Env.system(), renewing=False)
    a = opened(keeper)
    keeper.release(a)
    opened(keeper)
    assert server.asked[-1].release == [a]


def test_several_may_drain_what_was_released(server: Server) -> None:
    """Callers who open leases, and the thread that renews, at the same time."""

    class Drained(deque[str]):
        def __len__(self) -> int:
            n = super().__len__()
            for _ in range(n):  # as another thread does in between
                elsewhere.append(self.popleft())
            return n

    elsewhere: list[str] = []
    keeper = Leases(OneServer(server), Env.system(), renewing=False)
    keeper._released = Drained()
    a = opened(keeper)
    keeper.release(a)
    keeper.renew()
    opened(keeper)
    assert sorted([*elsewhere, *(name for r in server.asked for name in r.release)]) == [a]


def test_leases_are_renewed_on_after_an_error_of_who_holds_one(server: Server) -> None:
    def drop(occasion: str) -> None:
        if occasion == "renew":
            came.release()
            raise ValueError("of a JVM")

    came = threading.Semaphore(0)
    server.seconds = 0.01
    keeper = Leases(OneServer(server), Env.system(), renewing=True)
    lease = opened(keeper)
    keeper.before.append(drop)
    for _ in range(3):
        assert came.acquire(timeout=WAIT_SECONDS)
    keeper.before.clear()
    server.renewed.clear()
    assert server.renewed.wait(WAIT_SECONDS)
    keeper.release(lease)
    keeper.close()


def test_a_lease_that_others_opened_is_renewed_while_it_is_used(server: Server) -> None:
    keeper = Leases(OneServer(server), Env.system(), renewing=False)
    with keeper.used("theirs"), keeper.used("theirs"), keeper.used(None):
        keeper.renew()
    assert not keeper.renew()
    assert [(r.leases, r.release) for r in server.asked] == [(["theirs"], [])], "and is not ours to release"


def test_the_thread_outlives_trouble_and_ends_with_the_last_lease(server: Server) -> None:
    server.seconds = 0.01
    keeper = Leases(OneServer(server), Env.system(), renewing=True)
    assert keeper._thread is None, "a connection without scans has no thread"
    lease = opened(keeper)
    server.errors = [UnavailableError("away"), UnavailableError("still")]
    assert server.renewed.wait(WAIT_SECONDS)
    thread = keeper._thread
    assert thread is not None
    keeper.release(lease)
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive() and server.asked[-1].release == [lease]
    again = opened(keeper)
    thread = keeper._thread
    assert thread is not None, "and begins again with the next one"
    server.errors = [ClosedError("closed")]
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive() and again


def test_what_ends_is_told_soon_and_once(server: Server) -> None:
    keeper = Leases(OneServer(server), Env.system(), renewing=True)
    occasions: list[str] = []
    keeper.before.append(occasions.append)
    leases = [opened(keeper) for _ in range(3)]
    for lease in leases[:2]:
        keeper.release(lease)
    assert server.renewed.wait(WAIT_SECONDS), "long before anything has to be renewed"
    told = [r for r in server.asked if isinstance(r, m.RenewLeases)]
    assert [(r.leases, r.release) for r in told] == [([leases[2]], leases[:2])]
    server.renewed.clear()
    keeper.release(leases[2])
    assert server.renewed.wait(WAIT_SECONDS)
    assert server.asked[-1] == m.RenewLeases(leases=[], release=[leases[2]])
    keeper.close()
    assert occasions == ["open"] * 3, "holders are not asked whenever a read ends"


def test_each_server_is_asked_and_told(server: Server) -> None:
    other = Server()

    class Two(OneServer):
        def servers(self, table_id: str | None = None) -> Sequence[m.Endpoint]:
            return (server, other) if table_id != "one" else (server,)

    keeper = Leases(Two(server), Env.system(), renewing=False)
    both, one = keeper.open(
        [m.LeasedTable(table_id="t", lake=m.LakeUse(metadata="metadata")), m.LeasedTable(table_id="one", lake=None)]
    )
    assert both.lease == "lease 1+lease 1" and one.lease == "lease 1"
    assert [t.table_id for t in server.asked[0].tables] == ["t", "one"]
    assert [t.table_id for t in other.asked[0].tables] == ["t"]
    keeper.keep(both.lease)
    keeper.renew()
    keeper.release(both.lease)
    keeper.renew()
    for asked in (server.asked, other.asked):
        assert [(r.leases, r.release) for r in asked[1:]] == [(["lease 1"] * 2, []), ([], ["lease 1"] * 2)]


def test_holders_are_asked_before_and_again_when_there_is_no_room(server: Server) -> None:
    keeper = Leases(OneServer(server), Env.system(), renewing=False)
    occasions: list[str] = []
    keeper.before.append(occasions.append)
    server.errors = [OverloadedError("full")]
    opened(keeper)
    keeper.renew()
    assert occasions == ["open", "full", "renew"]
    server.errors = [OverloadedError("full"), OverloadedError("full")]
    with pytest.raises(OverloadedError):
        opened(keeper)
