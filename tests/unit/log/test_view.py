"""What a reader holds of a log."""

from __future__ import annotations

from typing import Any

from lakehead.log import LogView


class Counted:
    """A segment that counts how often its memory was given back."""

    released = 0

    def release(self) -> None:
        self.released += 1


def test_what_is_read_once_gives_its_memory_back_now_and_then_and_in_the_end() -> None:
    segments: Any = (Counted(), Counted())
    read = []
    for item in LogView(segments, None).released(range(70)):
        read.append((item, segments[0].released))
    assert [item for item, _ in read] == list(range(70))
    assert [read[at][1] for at in (0, 31, 32, 63, 64, 69)] == [1, 1, 2, 2, 3, 3]
    assert [s.released for s in segments] == [4, 4]
