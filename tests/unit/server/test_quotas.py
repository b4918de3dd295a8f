"""Bytes are paid for in order: who is behind waits as long as it says, and nobody waits for ever."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lakehead.config import Limits
from lakehead.env import Env
from lakehead.env.clock import SystemClock
from lakehead.errors import QuotaExceededError
from lakehead.protocol import messages as m
from lakehead.protocol.quotas import Quota, SetQuota
from lakehead.server.access import EMBEDDED_OWNER, Caller
from lakehead.server.endpoint import LocalEndpoint
from lakehead.server.quotas import Quotas
from lakehead.server.service import Service

ETL = Caller("etl", EMBEDDED_OWNER.privileges, principal="etl")
WRITE = m.Write(table_id="t", kind="append", tablets=[], checksums=[], columns=[])
GET = m.Get(table_id="t", tablet=m.TabletRef(partition="", bucket=0), key=[1])
RATE = 1000_000


class Clock(SystemClock):
    """Time passes by sleeping alone."""

    now = 1000.0

    def __init__(self) -> None:
        self.slept = 0.0
        self.on_sleep: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def now_us(self) -> int:
        return int(self.now * 1e6)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds
        self.on_sleep()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(tmp_path: Path, clock: Clock) -> Iterator[Service]:
    made = Service(
        str(tmp_path / "data"), env=dataclasses.replace(Env.system(), clock=clock), limits=Limits(), lake=None
    )
    yield made
    made.close()


@pytest.fixture
def quotas(service: Service) -> Quotas:
    bound(service, bytes_in=RATE, bytes_out=RATE)
    return service._quotas


def bound(service: Service, **bounds: int) -> None:
    LocalEndpoint(service).call(SetQuota(principal="etl", quota=Quota(**bounds)))


def test_a_second_is_free_and_the_rest_is_waited_for(quotas: Quotas, clock: Clock) -> None:
    quotas.admit(WRITE, RATE, ETL)
    quotas.admit(WRITE, RATE // 2, ETL)
    assert clock.slept == 0
    quotas.admit(WRITE, RATE, ETL)
    assert clock.slept == pytest.approx(0.5)
    quotas.admit(WRITE, 1, ETL)
    assert clock.slept == pytest.approx(1.5)
    clock.now += 60
    quotas.admit(WRITE, RATE, ETL)
    assert clock.slept == pytest.approx(1.5), "what is paid is paid, and nothing is saved up"


def test_no_more_than_its_rate_goes_in_the_long_run(quotas: Quotas, clock: Clock) -> None:
    began = clock.now
    for _ in range(200):
        quotas.admit(WRITE, RATE // 3, ETL)
    assert (200 * RATE // 3) / (clock.now - began + 2) <= RATE


def test_who_would_wait_too_long_is_told_for_how_long(quotas: Quotas, clock: Clock) -> None:
    quotas.admit(WRITE, 41 * RATE, ETL)
    with pytest.raises(QuotaExceededError) as raised:
        quotas.admit(WRITE, RATE, ETL)
    assert raised.value.context == {
        "quota": "bytes_in", "used": 41 * RATE, "limit": RATE, "retry_after_ms": 40_000,
    }  # fmt: skip
    clock.now += 10.5
    quotas.admit(WRITE, RATE, ETL)  # what was refused is not owed
    assert clock.slept == pytest.approx(29.5)


def test_what_was_sent_is_paid_for_before_the_next_is_asked(quotas: Quotas, clock: Clock) -> None:
    quotas.sent(lambda: 3 * RATE, ETL)
    quotas.admit(WRITE, 1, ETL)
    assert clock.slept == 0, "writing is another way"
    quotas.admit(GET, 0, ETL)
    assert clock.slept == pytest.approx(2)
    quotas.admit(m.Hello(), 0, ETL)
    quotas.sent(lambda: 100 * RATE, ETL)
    quotas.admit(m.RenewLeases(leases=[], release=[]), 0, ETL)
    assert clock.slept == pytest.approx(2), "what has no rows does not wait"
    with pytest.raises(QuotaExceededError):
        quotas.admit(GET, 0, ETL)


def test_another_quota_is_in_force_for_who_waits(quotas: Quotas, clock: Clock, service: Service) -> None:
    quotas.admit(WRITE, 20 * RATE, ETL)
    clock.on_sleep = lambda: bound(service, bytes_in=1000 * RATE)
    quotas.admit(WRITE, 1, ETL)
    assert clock.slept < 1


def test_streams_wait_longer_and_not_for_who_has_gone(quotas: Quotas, clock: Clock) -> None:
    quotas.pace(100 * RATE, ETL, lambda: False)
    quotas.pace(200 * RATE, ETL, lambda: False)
    assert clock.slept == pytest.approx(99)
    quotas.pace(0, ETL, lambda: False)
    assert clock.slept == pytest.approx(99), "that the server lives is said all the same"
    quotas.pace(RATE, ETL, lambda: True)
    assert clock.slept == pytest.approx(99)
    quotas.pace(400 * RATE, ETL, lambda: False)
    with pytest.raises(QuotaExceededError):
        quotas.pace(200 * RATE, ETL, lambda: False)


def test_nobody_waits_in_a_server_that_closes(quotas: Quotas, clock: Clock, service: Service) -> None:
    quotas.admit(WRITE, 20 * RATE, ETL)
    service.closing = True
    quotas.admit(WRITE, 1, ETL)
    assert clock.slept == 0


def test_few_wait_at_a_time(quotas: Quotas, clock: Clock) -> None:
    quotas.admit(WRITE, 2 * RATE, ETL)
    waiting = 0
    refused: list[QuotaExceededError] = []

    def another() -> None:
        nonlocal waiting
        waiting += 1
        try:
            quotas.admit(WRITE, 1, ETL)
        except QuotaExceededError as e:
            refused.append(e)

    clock.on_sleep = another  # each who waits is joined by one more
    quotas.admit(WRITE, 1, ETL)
    assert refused and waiting <= 40 and quotas._debts["etl", "bytes_in"].waiting == 0


def test_who_may_do_all_has_none(quotas: Quotas, clock: Clock, service: Service) -> None:
    LocalEndpoint(service).call(SetQuota(principal="*", quota=Quota(bytes_in=RATE, streams=0)))
    for _ in range(3):
        quotas.admit(WRITE, 100 * RATE, EMBEDDED_OWNER)
    assert quotas.open_stream(EMBEDDED_OWNER) is None and clock.slept == 0


def test_what_was_written_counts_however_long_measuring_takes(
    quotas: Quotas, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others begin to measure before the first is done with it, and are done before it."""
    deep, told = 0, []

    def size(_: str) -> int:
        nonlocal deep
        deep += 1
        quotas._stored["etl"].written += 10  # on disk, maybe, before it is measured, or after
        if deep in (2, 3):
            clock.now += 60
            told.append(quotas._measured("etl"))
        return 1000

    monkeypatch.setattr(quotas, "_size", size)
    told.append(quotas._measured("etl"))
    clock.now += 60
    told.append(quotas._measured("etl"))
    assert deep == 4 and told == [1010] * 4
