"""Leases end soon after nobody renews them; those of plans give way and never keep readers out."""

from __future__ import annotations

import dataclasses

import pytest

from lakehead.config import Limits
from lakehead.env import Env
from lakehead.env.clock import SystemClock
from lakehead.errors import OverloadedError
from lakehead.log import LogView
from lakehead.protocol.messages import LakeUse
from lakehead.server.leases import Leases
from lakehead.types import TabletKey

TABLET = TabletKey("", 0)


class Clock(SystemClock):
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def leases(clock: Clock) -> Leases:
    limits = Limits(leases_max=3, lease_seconds=100, planned_lease_seconds=500)
    return Leases(dataclasses.replace(Env.system(), clock=clock), limits)


def in_use(leases: Leases) -> list[str]:
    return [use.metadata for use in leases.lake_uses("t")]


def test_a_lease_lasts_while_it_is_renewed_or_used(leases: Leases, clock: Clock) -> None:
    renewed, used, left = (leases.open("t", {}, LakeUse(metadata=name)) for name in ("renewed", "used", "left"))
    for clock.now in (60.0, 120.0, 180.0):
        leases.renew([renewed, "unknown"])
        leases.views("t", used)
    assert in_use(leases) == ["renewed", "used"]
    leases.renew([left])
    assert in_use(leases) == ["renewed", "used"], "what is over stays over"
    clock.now = 281.0
    assert in_use(leases) == []


def test_a_plan_lasts_longer(leases: Leases, clock: Clock) -> None:
    leases.open("t", {}, LakeUse(metadata="plan"), planned=True)
    clock.now = 499.0
    assert in_use(leases) == ["plan"]
    clock.now = 501.0
    assert in_use(leases) == []


def test_plans_give_way_and_held_leases_do_not(leases: Leases, clock: Clock) -> None:
    first, second = (leases.open("t", {}, LakeUse(metadata=name), planned=True) for name in ("first", "second"))
    clock.now = 1.0
    leases.views("t", first)
    for i in range(3):
        leases.open("t", {}, LakeUse(metadata=f"held {i}"))
    assert in_use(leases) == ["held 0", "held 1", "held 2"]
    assert leases.views("t", second) == {}
    for planned in (False, True):
        with pytest.raises(OverloadedError, match="pinned reads"):
            leases.open("t", {}, None, planned=planned)


def test_a_lease_holds_the_views_of_its_table_until_it_is_released(leases: Leases) -> None:
    view = LogView((), None)
    held = leases.open("t", {TABLET: view}, None)
    assert leases.views("t", held) == {TABLET: view}
    assert leases.views("other", held) == leases.views("t", None) == {}
    leases.release([held])
    assert leases.views("t", held) == {}
