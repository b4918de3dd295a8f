"""Who is let in, and as whom."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lakehead.env import Env
from lakehead.env.randomness import SeededRandomness
from lakehead.env.storage import LocalStorage
from lakehead.env.threads import SystemThreads
from lakehead.errors import AuthenticationError
from lakehead.protocol.privileges import EVERYTHING, Privilege
from lakehead.server.access import TOKEN_HOLDER, may
from lakehead.server.catalog import GrantPrivileges
from lakehead.server.door import Door
from lakehead.server.metadata import MetadataStore
from lakehead.server.principals import Principals

NAME = "spiffe://lake.test/etl"


class Time:
    """Stands still, but for who sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def now_us(self) -> int:
        return int(self.now * 1_000_000)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def metadata(time: Time, tmp_path: Path) -> Iterator[MetadataStore]:
    env = Env(time, LocalStorage(), SeededRandomness(1), SystemThreads())
    store = MetadataStore(str(tmp_path / "metadata.db"), env)
    yield store
    store.close()


@pytest.fixture
def door(time: Time, metadata: MetadataStore) -> Door:
    env = Env(time, LocalStorage(), SeededRandomness(1), SystemThreads())
    return Door("the server's", Principals(metadata, time), env)


def test_a_token_decides_and_else_a_certificate(door: Door) -> None:
    owner = door.let_in("the server's", NAME, "ipv4:1.2.3.4:5")
    assert owner.privileges == TOKEN_HOLDER.privileges and owner.peer == "ipv4:1.2.3.4:5"
    assert door.let_in(None, NAME, "p").principal == NAME
    with pytest.raises(AuthenticationError):
        door.let_in("wrong", NAME, "p")


def test_not_every_name_of_a_certificate_is_a_principals(door: Door) -> None:
    for name in ("", "etl", "lake.test", "role:all://x", "spiffe://a b", "x://" + "y" * 300, "://x", "\n://"):
        with pytest.raises(AuthenticationError):
            door.let_in(None, name, "p")


def test_what_is_granted_to_a_certificates_name_is_its_holders(door: Door, metadata: MetadataStore) -> None:
    caller = door.let_in(None, NAME, "p")
    assert not may(caller, Privilege.READ, EVERYTHING)
    metadata.submit(GrantPrivileges(NAME, "*", "", ["tier"], 10))
    assert may(caller, Privilege.READ, EVERYTHING) and not may(caller, Privilege.WRITE, EVERYTHING)


def test_failures_of_one_host_do_not_slow_another_and_are_forgotten(door: Door, time: Time) -> None:
    def waited(peer: str) -> float:
        before = time.now
        with pytest.raises(AuthenticationError):
            door.let_in("guess", "", peer)
        return time.now - before

    assert [round(waited("ipv4:1.1.1.1:1"), 3) for _ in range(4)] == [0.01, 0.02, 0.04, 0.08]
    assert round(waited("ipv4:1.1.1.1:2"), 3) == 0.16, "another connection of the same host"
    assert round(waited("ipv4:2.2.2.2:1"), 3) == 0.01
    for n in range(2000):
        waited(f"ipv4:3.{n // 256}.{n % 256}.1:1")
    assert len(door._failed) <= 1024
    time.now += 61
    assert round(waited("ipv4:2.2.2.2:1"), 3) == 0.01


def test_no_certificate_has_the_name_of_an_account(door: Door) -> None:
    with pytest.raises(AuthenticationError):
        door.let_in(None, "oidc://lake.test/etl", "ipv4:127.0.0.1:1")
