"""Tasks that run here."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from lakehead.tiering.executor import LocalExecutor


def test_results_are_in_order() -> None:
    assert LocalExecutor().run(str, [1, 2, 3]) == ["1", "2", "3"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_others_made_is_undone(error: type[BaseException]) -> None:
    undone: list[int] = []

    def task(item: int) -> int:
        if item == 3:
            raise error
        return 10 * item

    def undo(results: Iterable[int]) -> None:
        undone.extend(results)

    with pytest.raises(error):
        LocalExecutor().run(task, [1, 2, 3, 4], undo=undo)
    assert undone == [10, 20]
    with pytest.raises(error):
        LocalExecutor().run(task, [3])
