"""The checker of tables that change finds what it is there to find."""

from __future__ import annotations

import pyarrow as pa
import pytest
from tests.crash.changing_history import ChangingHistory, Column, schema_of, tablet_of
from tests.crash.history import WrongDataError, partition_of

P0, P1 = tablet_of(0), tablet_of(1)
X = Column(1, "x")


def scan(columns: tuple[Column, ...], *rows: tuple[int, dict[str, int], int]) -> pa.Table:
    """Rows of key, values and offset as a scan shows them."""
    plain = [{"p": partition_of(k), "k": k, **values, "__offset": offset} for k, values, offset in rows]
    return pa.Table.from_pylist(plain, schema_of(columns).append(pa.field("__offset", pa.int64())))


def written(*, keyed: bool) -> ChangingHistory:
    """Rows 0 and 3 in one partition, row 1 in another, all with a column ``x``."""
    history = ChangingHistory(keyed=keyed)
    history.begin_alter((X,))
    history.altered("t", 1, schema_of((X,)))
    history.begin([(k, {"v": 10 + k, "x": k}) for k in (0, 1, 3)])
    history.answered({P0: (0, 2), P1: (0, 1)}, 1)
    return history


ROWS = tuple((k, {"v": 10 + k, "x": k}, k // 3) for k in (0, 1, 3))
ENDS = {P0: 2, P1: 1}


@pytest.mark.parametrize("keyed", [False, True])
def test_a_column_is_known_by_its_number_not_by_its_name(keyed: bool) -> None:
    history = written(keyed=keyed)
    history.check("t", scan((X,), *ROWS), ENDS)
    with pytest.raises(WrongDataError, match="rows differ"):
        history.check("t", scan((X,), *ROWS[:2], (3, {"v": 13}, 1)), ENDS)
    again = Column(2, "x")
    history.begin_alter((again,))
    history.altered("t", 2, schema_of((again,)))
    with pytest.raises(WrongDataError, match="rows differ"):
        history.check("t", scan((again,), *ROWS), ENDS)
    history.check("t", scan((again,), *((k, {"v": row["v"]}, offset) for k, row, offset in ROWS)), ENDS)


def test_a_definition_is_the_one_before_or_the_one_that_was_asked_for() -> None:
    history = written(keyed=True)
    with pytest.raises(WrongDataError, match="not one of"):
        history.altered("t", 2, schema_of(()))
    renamed = Column(1, "y", wide=True)
    history.begin_alter((renamed,))
    with pytest.raises(WrongDataError, match="not"):
        history.altered("t", 2, schema_of((Column(1, "y"),)))
    history.altered("t", 2, schema_of((renamed,)))
    rows = [(k, {"v": row["v"], "y": row["x"]}, offset) for k, row, offset in ROWS]
    history.check("t", scan((renamed,), *rows), ENDS)


def test_what_an_old_writer_gives_is_taken_as_what_its_definition_says() -> None:
    history = written(keyed=True)
    history.begin_alter((Column(2, "x"), Column(1, "y")))
    history.altered("t", 2, schema_of((Column(2, "x"), Column(1, "y"))))
    history.begin([(0, {"v": 20, "x": 7})])
    history.answered({P0: (2, 4)}, 1)
    rest = [(1, {"v": 11, "y": 1}, 0), (3, {"v": 13, "y": 3}, 1)]
    history.check("t", scan(history.now, (0, {"v": 20, "y": 7}, 3), *rest), {P0: 4, P1: 1})


@pytest.mark.parametrize("keyed", [False, True])
def test_truncation_takes_what_is_below_its_offset_and_nothing_else(keyed: bool) -> None:
    history = written(keyed=keyed)
    history.begin_truncate()
    history.begin([(6 if not keyed else 3, {"v": 20})])
    history.answered({P0: (2, 4 if keyed else 3)}, 1)
    history.truncated({P0: 2, P1: 1})
    ends = {P0: 4 if keyed else 3, P1: 1}
    left = (3, {"v": 20}, 3) if keyed else (6, {"v": 20}, 2)
    for wrong in ([left, ROWS[1]], [], [(left[0], {"v": 20, "x": 3}, left[2])]):
        with pytest.raises(WrongDataError):
            history.check("t", scan((X,), *wrong), ends)
    history.check("t", scan((X,), left), ends)
    with pytest.raises(WrongDataError, match="spares"):
        history.begin_truncate()
        history.truncated({P0: 1, P1: 1})


@pytest.mark.parametrize("keyed", [False, True])
def test_a_truncation_without_an_answer_took_all_tablets_or_none(keyed: bool) -> None:
    ends = {P0: 4, P1: 2} if keyed else ENDS
    for rows in ([], list(ROWS)):
        history = written(keyed=keyed)
        history.begin_truncate()
        history.check("t", scan((X,), *rows), ends)
        history.check("t", scan((X,), *rows), ends)
        with pytest.raises(WrongDataError):
            history.check("t", scan((X,), *([] if rows else ROWS)), ends)
    for half in (ROWS[:2], ROWS[1:2], [ROWS[0], ROWS[2]]):
        history = written(keyed=keyed)
        history.begin_truncate()
        with pytest.raises(WrongDataError):
            history.check("t", scan((X,), *half), ends)


def test_a_row_that_is_there_twice_or_elsewhere_is_found() -> None:
    for wrong in ((ROWS[0], ROWS[0]), (*ROWS[:2], (3, {"v": 13, "x": 3}, 2))):
        with pytest.raises(WrongDataError):
            written(keyed=False).check("t", scan((X,), *wrong), ENDS)
    history = written(keyed=False)
    with pytest.raises(WrongDataError, match="answered"):
        history.check("t", scan((X,), *((k, row, 1 - offset if k != 1 else 0) for k, row, offset in ROWS)), ENDS)
