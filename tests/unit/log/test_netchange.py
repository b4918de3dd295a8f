"""Net change by example; tests/properties has the rules."""

from __future__ import annotations

import numpy as np

from lakehead.log.netchange import NO_OFFSETS, net_change, union


def test_an_example() -> None:
    #        offset  5: +I a   6: -U x   7: +U x   8: -D a   9: +I b   10: -D y
    types = np.array([1, 2, 3, 4, 1, 4], np.int8)
    prev = np.array([-1, 2, 2, 5, -1, 0], np.int64)
    change = net_change(types, np.arange(5, 11), prev, 5)
    assert change.keep.tolist() == [False, False, True, False, True, False]
    assert change.superseded.tolist() == [0, 2]


def test_nothing_is_shared_and_writable() -> None:
    assert not NO_OFFSETS.flags.writeable and len(union()) == 0
