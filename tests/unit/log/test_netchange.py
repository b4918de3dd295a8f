"""Net change by example; tests/properties has the rules."""

from __future__ import annotations

import numpy as np
import pytest

from lakehead.errors import CorruptionError
from lakehead.log.netchange import NO_OFFSETS, contains, net_change, superseded_offsets, union


def test_an_example() -> None:
    #        offset  5: +I a   6: -U x   7: +U x   8: -D a   9: +I b   10: -D y
    types = np.array([1, 2, 3, 4, 1, 4], np.int8)
    prev = np.array([-1, 2, 2, 5, -1, 0], np.int64)
    for cut in range(7):
        change = net_change([(types[:cut], prev[:cut]), (types[cut:], prev[cut:])], 5)
        assert change.keep.tolist() == [False, False, True, False, True, False]
        assert change.superseded.tolist() == [0, 2]


def test_nothing_is_shared_and_writable() -> None:
    assert not NO_OFFSETS.flags.writeable and len(union()) == 0


def test_a_record_that_does_not_say_what_it_replaces_is_damage() -> None:
    for replaces in (3, 4):
        with pytest.raises(CorruptionError, match="does not say which"):
            superseded_offsets(np.array([1, replaces], np.int8), np.array([-1, -1], np.int64))
        with pytest.raises(CorruptionError, match="does not say which"):
            net_change([(np.array([1, replaces], np.int8), np.array([-1, 7], np.int64))], 5)
    assert superseded_offsets(np.array([3, 4], np.int8), np.array([0, 0], np.int64)).tolist() == [0]


def test_nothing_contains_nothing_and_is_contained_in_nothing() -> None:
    some = np.array([3, 5], np.int64)
    assert contains(NO_OFFSETS, some).tolist() == [False, False]
    assert contains(some, NO_OFFSETS).tolist() == contains(NO_OFFSETS, NO_OFFSETS).tolist() == []
    assert contains(some, np.array([2, 3, 4, 5, 6])).tolist() == [False, True, False, True, False]
