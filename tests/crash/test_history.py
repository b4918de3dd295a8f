"""The checker of the crash suite finds what it is there to find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from tests.crash.follower import Follower
from tests.crash.history import KEYED_SCHEMA, Change, KeyedHistory, LogHistory, WrongDataError, log_rows

import lakehead as lh
from lakehead.api.table import handle_of
from lakehead.types import TabletId

ONLY = TabletId((), 0)


def stored(rows: pa.Table, first: int = 0) -> pa.Table:
    """Rows as a scan shows them when they stand in one tablet from this offset on."""
    n = len(rows)
    return (
        rows.append_column("__bucket", pa.array([0] * n, pa.int32()))
        .append_column("__offset", pa.array(range(first, first + n), pa.int64()))
        .append_column("__timestamp", pa.array(range(n), pa.timestamp("us", "UTC")))
    )


@pytest.fixture
def log() -> LogHistory:
    """Writer 1 has rows 0 to 5 acknowledged at these offsets, then 6 to 9 unanswered."""
    history = LogHistory(partitioned=False)
    history.begin(1, 6)
    history.answered(1, {ONLY: (0, 6)})
    history.begin(1, 4)
    return history


@pytest.mark.parametrize("count", [6, 10])
def test_an_unanswered_batch_is_there_or_not(log: LogHistory, count: int) -> None:
    rows = stored(log_rows(1, range(count)))
    log.check("t", rows, {ONLY: (0, count)}, trimmed=False)
    log.check("t", rows, {ONLY: (0, count)}, trimmed=False)
    assert log.begin(1, 1) == range(10, 11)
    log.answered(1, {ONLY: (count, count + 1)})
    more = stored(pa.concat_tables([log_rows(1, range(count)), log_rows(1, range(10, 11))]))
    log.check("t", more, {ONLY: (0, count + 1)}, trimmed=False)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (log_rows(1, range(5)), "lost"),
        (log_rows(1, range(8)), "half of an unanswered batch"),
        (pa.concat_tables([log_rows(1, range(6)), log_rows(1, range(5, 6))]), "out of order|twice"),
        (pa.concat_tables([log_rows(1, range(6)), log_rows(1, range(10, 11))]), "never were"),
        (pa.concat_tables([log_rows(1, range(6)), log_rows(2, range(1))]), "unknown writers"),
        (pa.concat_tables([log_rows(1, range(1, 6)), log_rows(1, range(1))]), "out of order"),
        (log_rows(1, range(6)).set_column(3, "s", pa.array(["other"] * 6)), "not as it was written"),
    ],
)
def test_wrong_log_rows_are_found(log: LogHistory, rows: pa.Table, message: str) -> None:
    with pytest.raises(WrongDataError, match=message):
        log.check("t", stored(rows), {ONLY: (0, len(rows))}, trimmed=False)


def test_offsets_must_be_dense_and_as_answered(log: LogHistory) -> None:
    rows = log_rows(1, range(6))
    with pytest.raises(WrongDataError, match="are not"):
        log.check("t", stored(rows, first=1), {ONLY: (0, 7)}, trimmed=False)
    log.answered(1, {ONLY: (7, 11)})
    with pytest.raises(WrongDataError, match="were answered"):
        log.check("t", stored(log_rows(1, range(10))), {ONLY: (0, 10)}, trimmed=False)


def row(k: int, v: int) -> dict[str, Any]:
    return {"p": "p0", "k": k, "v": v, "a": None, "b": "x"}


def keyed_table(versions: Mapping[int, int]) -> pa.Table:
    return pa.Table.from_pylist([row(k, v) for k, v in versions.items()], KEYED_SCHEMA)


@pytest.fixture
def keyed(tmp_path: Any) -> Callable[[Mapping[int, int]], None]:
    """Checks a table of key -> version, in one bucket, after keys 1 to 3 were acknowledged at version 1 and an upsert
    of version 2 to the first two was not."""
    with lh.connect(tmp_path) as con:
        desc = handle_of(con.create_table("t", KEYED_SCHEMA, primary_key="k")).desc
    history = KeyedHistory()
    history.begin(1, Change("upsert", tuple(row(k, 1) for k in (1, 2, 3))))
    history.answered(1)
    history.begin(1, Change("upsert", tuple(row(k, 2) for k in (1, 2))))
    return lambda versions: history.check("t", desc, keyed_table(versions))


@pytest.mark.parametrize("versions", [{1: 1, 2: 1, 3: 1}, {1: 2, 2: 2, 3: 1}])
def test_an_unanswered_upsert_is_there_or_not(
    keyed: Callable[[Mapping[int, int]], None], versions: dict[int, int]
) -> None:
    keyed(versions)
    keyed(versions)
    with pytest.raises(WrongDataError, match="differ"):
        keyed({k: 3 - v if k < 3 else v for k, v in versions.items()})


@pytest.mark.parametrize(
    "versions",
    [{1: 2, 2: 1, 3: 1}, {1: 1, 2: 1}, {1: 1, 2: 1, 3: 2}, {1: 1, 2: 1, 3: 1, 4: 1}],
    ids=["half", "lost", "newer", "strange"],
)
def test_wrong_keyed_rows_are_found(keyed: Callable[[Mapping[int, int]], None], versions: dict[int, int]) -> None:
    with pytest.raises(WrongDataError):
        keyed(versions)


class _NoTable:
    name = "t"
    primary_key = ("k",)
    properties: ClassVar[dict[str, bool]] = {"lake_changelog": False}


def changes(first: int, *records: tuple[str, int, int]) -> lh.Batch:
    """A batch of (change type, key, version)."""
    rows = pa.Table.from_pylist([row(k, v) for _, k, v in records], KEYED_SCHEMA)
    rows = rows.append_column("__change_type", pa.array([c for c, _, _ in records], pa.string()))
    batch = stored(rows, first).combine_chunks().to_batches()[0]
    return lh.Batch(batch, ONLY, first + len(records))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (changes(1, ("+I", 2, 1)), "the next offset is 2"),
        (changes(3, ("+I", 2, 1)), "the next offset is 2"),
        (changes(2, ("+I", 1, 3)), "it is there"),
        (changes(2, ("-D", 2, 1)), "was None"),
        (changes(2, ("-U", 1, 3), ("+U", 1, 4)), "was"),
        (changes(2, ("-U", 1, 2), ("+U", 1, 2)), "got version 2 after 2"),
    ],
)
def test_a_follower_finds_what_does_not_follow(batch: lh.Batch, message: str) -> None:
    follower = Follower(_NoTable(), keep_changes=True)  # type: ignore[arg-type]
    follower._take(changes(0, ("+I", 3, 1), ("+I", 1, 2)))
    with pytest.raises(WrongDataError, match=message):
        follower._take(batch)


def test_a_lake_that_is_no_prefix_is_found() -> None:
    follower = Follower(_NoTable(), keep_changes=True)  # type: ignore[arg-type]
    follower._take(changes(0, ("+I", 1, 1), ("+I", 2, 2), ("-U", 1, 1), ("+U", 1, 3), ("-D", 2, 2)))
    assert follower.check_lake(ONLY, 2, stored(keyed_table({1: 1, 2: 2})))
    with pytest.raises(WrongDataError, match="no prefix"):
        follower.check_lake(ONLY, 4, stored(keyed_table({1: 3, 2: 2})))
    assert follower.live() == {("p0", 1): (3, None, "x")}
