"""Net change against a dict: any history, any cut, and what two ranges do one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakehead.log import netchange
from lakehead.log.netchange import between, contains, net_change, union
from lakehead.types import ChangeType

# (key, delete): what a writer asks for; whether it is an insert or an update follows from what came before.
wishes = st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=80)


@pytest.fixture(scope="module", params=[1, 1 << 30], ids=["by flags", "by value"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Offsets that lie close together are found by flags, where they are many; here however few there are, or never."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(netchange, "_MANY", request.param)
        yield


class History:
    """A keyed tablet's log, made from a writer's wishes, and the live offsets after each record."""

    def __init__(self, wanted: list[tuple[int, bool]]) -> None:
        live: dict[int, int] = {}
        records: list[tuple[int, int]] = []
        self.live_after: list[frozenset[int]] = [frozenset()]

        def log(change: ChangeType, prev: int) -> None:
            records.append((change, prev))
            self.live_after.append(frozenset(live.values()))

        for key, delete in wanted:
            offset, prev = len(records), live.get(key)
            if delete and prev is not None:
                del live[key]
                log(ChangeType.DELETE, prev)
            elif not delete and prev is None:
                live[key] = offset
                log(ChangeType.INSERT, -1)
            elif not delete and prev is not None:
                log(ChangeType.UPDATE_BEFORE, prev)
                live[key] = offset + 1
                log(ChangeType.UPDATE_AFTER, prev)
        self.change_types = np.array([c for c, _ in records], np.int8)
        self.prev_offsets = np.array([p for _, p in records], np.int64)

    def __len__(self) -> int:
        return len(self.change_types)

    def apply(self, rows: npt.NDArray[np.int64], start: int, end: int) -> npt.NDArray[np.int64]:
        """Live offsets after ``[start, end)``, given those before it."""
        offsets = np.arange(start, end, dtype=np.int64)
        middle = (start + end) // 2
        parts = [(self.change_types[a:b], self.prev_offsets[a:b]) for a, b in ((start, middle), (middle, end))]
        change = net_change(parts, start)
        later = net_change(parts[1:], start, net_change(parts[:1], start))
        assert later.keep.tolist() == change.keep.tolist()
        assert later.superseded.tolist() == change.superseded.tolist()
        assert list(change.superseded) == sorted(set(change.superseded.tolist()))
        assert all(s < start for s in change.superseded.tolist())
        assert set(change.superseded.tolist()) <= set(rows.tolist())
        return np.concatenate([rows[~contains(change.superseded, rows)], offsets[change.keep]])


@given(wishes, st.data())
def test_any_range_leads_from_one_state_to_the_next(wanted: list[tuple[int, bool]], data: st.DataObject) -> None:
    history = History(wanted)
    start = data.draw(st.integers(0, len(history)))
    end = data.draw(st.integers(start, len(history)))
    before = np.array(sorted(history.live_after[start]), np.int64)
    # A cut between -U and +U leaves the old row live: -U is informational, +U replaces.
    assert set(history.apply(before, start, end).tolist()) == set(history.live_after[end])


@given(wishes, st.data())
def test_split_and_union_equal_the_whole(wanted: list[tuple[int, bool]], data: st.DataObject) -> None:
    history = History(wanted)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(history)), max_size=5)))
    rows = np.zeros(0, np.int64)
    for start, end in zip([0, *cuts], [*cuts, len(history)], strict=True):
        rows = history.apply(rows, start, end)
    whole = history.apply(np.zeros(0, np.int64), 0, len(history))
    assert rows.tolist() == whole.tolist()
    assert set(whole.tolist()) == set(history.live_after[-1])


@given(st.integers(0, 30), st.integers(0, 30))
def test_a_log_table_keeps_every_row(start: int, rows: int) -> None:
    change = net_change([(np.zeros(rows, np.int8), np.full(rows, -1, np.int64))], start)
    assert len(change.keep) == rows and change.keep.all() and not len(change.superseded)


sets = st.lists(st.integers(-5, 40)).map(lambda values: np.unique(np.array(values, np.int64)))


@given(sets, sets, st.lists(st.integers(-6, 41)))
def test_sets_of_offsets(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64], values: list[int]) -> None:
    assert set(union(a, b).tolist()) == set(a.tolist()) | set(b.tolist())
    assert contains(a, np.array(values, np.int64)).tolist() == [v in set(a.tolist()) for v in values]
    assert between(a, 3, 20).tolist() == [v for v in a.tolist() if 3 <= v < 20]
