"""What is known is what was noted or asked for last, and never more than there is room for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lakehead.env.recently_used import RecentlyUsed

SIZE_MAX = 10
STEPS = st.lists(st.tuples(st.sampled_from("abcde"), st.none() | st.integers(0, SIZE_MAX + 2)), max_size=60)


@given(STEPS)
def test_what_was_used_last_is_known(steps: list[tuple[str, int | None]]) -> None:
    known: RecentlyUsed[str, int] = RecentlyUsed(SIZE_MAX, lambda value: value)
    model: list[tuple[str, int]] = []  # the last used last
    for key, value in steps:
        before = dict(model).get(key)
        if value is None:
            assert known.get(key) == before
        else:
            known.note(key, value)
        now = before if value is None else value
        if now is not None:
            model = [(k, v) for k, v in model if k != key] + [(key, now)] * (now <= SIZE_MAX)
        while sum(v for _, v in model) > SIZE_MAX:
            model.pop(0)
        assert known.size == sum(v for _, v in model)
    assert known.known("abcde") == dict(model)


def test_without_sizes_their_number_is_bounded() -> None:
    known: RecentlyUsed[int, frozenset[int] | None] = RecentlyUsed(3)
    known.note_all({n: None for n in range(5)})
    assert known.known(range(5)) == {2: None, 3: None, 4: None}
