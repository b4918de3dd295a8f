"""A clock that follows leaps ahead only once they last."""

from __future__ import annotations

from lakehead.env.clock import BELIEVED_AFTER_SECONDS, LEAP_US, SteadyClock

S = 1_000_000
YEAR = 365 * 86_400 * S


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.wall_us, self.seconds = 10**15, 5.0

    def now_us(self) -> int:
        return self.wall_us

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.wall_us += int(seconds * S)
        self.seconds += seconds


def test_time_passes_and_small_corrections_are_followed() -> None:
    hands = Hands()
    steady = SteadyClock(hands)
    for correction in (0, 5 * S, -5 * S, LEAP_US, -LEAP_US):
        steady.sleep(7)
        hands.wall_us += correction
        assert (steady.now_us(), steady.monotonic()) == (hands.wall_us, hands.seconds)


def test_a_leap_ahead_is_believed_once_it_lasts() -> None:
    hands = Hands()
    steady = SteadyClock(hands)
    before = hands.wall_us
    hands.wall_us += YEAR
    assert steady.now_us() == before
    steady.sleep(BELIEVED_AFTER_SECONDS - 1)
    assert steady.now_us() == before + int(BELIEVED_AFTER_SECONDS - 1) * S
    steady.sleep(1)
    assert steady.now_us() == hands.wall_us > before + YEAR
    steady.sleep(1)
    assert steady.now_us() == hands.wall_us


def test_a_leap_that_is_taken_back_never_was() -> None:
    hands = Hands()
    steady = SteadyClock(hands)
    for _ in range(3):
        before = hands.wall_us
        hands.wall_us += YEAR
        assert steady.now_us() == before
        steady.sleep(40)
        hands.wall_us -= YEAR
        assert steady.now_us() == before + 40 * S


def test_another_leap_is_another_doubt() -> None:
    hands = Hands()
    steady = SteadyClock(hands)
    before = hands.wall_us
    for _ in range(5):
        hands.wall_us += YEAR
        steady.now_us()
        steady.sleep(40)
    assert steady.now_us() == before + 200 * S


def test_a_leap_back_is_believed_at_once() -> None:
    hands = Hands()
    steady = SteadyClock(hands)
    hands.wall_us -= YEAR
    assert steady.now_us() == hands.wall_us
