"""Records of a range of offsets are found in the log, or in the lake where the log has trimmed them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from lakehead.errors import LakeFileMissingError, LakeStateError, OffsetOutOfRangeError
from lakehead.lake import records
from lakehead.predicate.read_spec import ReadSpec
from lakehead.types import Schemas, TableDescriptor, TablePath, TabletKey

TABLET = TabletKey("", 0)
SPEC = ReadSpec(("__offset",))
OFFSETS = pa.schema([("__offset", pa.int64())])
DESC = TableDescriptor(
    "id", TablePath("d", "t"), Schemas.only(pa.schema([("a", pa.int64())])), (), (), (), 1, "iceberg"
)


def rows(start: int, end: int) -> Iterator[pa.RecordBatch]:
    """In batches of two."""
    for at in range(start, end, 2):
        yield pa.RecordBatch.from_pydict({"__offset": list(range(at, min(at + 2, end)))}, OFFSETS)


class Log:
    """A log that ends at 20, and begins at one of ``starts`` after the other, each time that it is read."""

    def __init__(self, starts: Sequence[int]) -> None:
        self.starts = list(starts)
        self.asked: list[int] = []

    def read_ranges(
        self, ranges: Mapping[TabletKey, tuple[int, int]], spec: ReadSpec
    ) -> Iterator[tuple[TabletKey, pa.RecordBatch]]:
        (start, end) = ranges[TABLET]
        self.asked.append(start)
        begins = self.starts.pop(0) if len(self.starts) > 1 else self.starts[0]
        if not begins <= start < end <= 20:
            raise OffsetOutOfRangeError(f"the log begins at {begins}")
        for batch in rows(start, end):
            yield TABLET, batch


def read(log: Log, lakes: Sequence[int], monkeypatch: pytest.MonkeyPatch, desc: TableDescriptor = DESC) -> list[int]:
    """Offsets 3 to 17; the lake ends at one of ``lakes`` after the other."""
    ends = list(lakes)

    def history(lake: Any, tablet: TabletKey, start: int, end: int, spec: ReadSpec) -> Iterator[pa.RecordBatch]:
        assert end <= lake.offsets[TABLET]
        yield from rows(start, end)

    def open_lake(*_: object) -> Any:
        return SimpleNamespace(offsets={TABLET: ends.pop(0) if len(ends) > 1 else ends[0]})

    monkeypatch.setattr(records, "read_history", history)
    handle: Any = SimpleNamespace(
        desc=desc, log=log, lake=lambda changelog=False: SimpleNamespace(metadata_location="")
    )
    found = records.read_records(handle, TABLET, 3, 17, SPEC, open_lake=open_lake)
    return [o for batch in found for o in batch.column(0).to_pylist()]


@pytest.mark.parametrize(
    ("starts", "lakes"),
    [
        ([0], [0]),
        ([3], [0]),
        ([4], [9]),
        ([9], [9]),
        ([20], [20]),
        ([5, 9, 12], [5, 9, 12]),
        ([9, 9, 17], [9, 20]),
    ],
    ids=str,
)
def test_every_record_once_and_in_order(starts: list[int], lakes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(Log(starts), lakes, monkeypatch) == list(range(3, 17))


def test_the_lake_is_asked_only_for_what_the_log_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log([5])
    assert read(log, [9], monkeypatch) == list(range(3, 17))
    assert log.asked == [3, 9], "the lake's part is read to its end at once"


def test_what_neither_holds_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for lakes in ([0], [3], [5]):
        with pytest.raises(LakeStateError, match="neither in the log nor in the lake"):
            read(Log([9]), lakes, monkeypatch)


@pytest.mark.parametrize("change", [{"lake": None}, {"primary_key": ("a",)}], ids=["no lake", "keyed"])
def test_lakes_that_do_not_hold_every_record_are_not_asked(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    desc = dataclasses.replace(DESC, **change)
    with pytest.raises(OffsetOutOfRangeError, match="begins at 9"):
        read(Log([9]), [20], monkeypatch, desc)
    assert read(Log([3]), [20], monkeypatch, desc) == list(range(3, 17))


@pytest.mark.parametrize("fails_at", [3, 7])
@pytest.mark.parametrize("newer", [True, False])
def test_a_reader_outlasts_a_version_whose_files_go(
    fails_at: int, newer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = iter(range(100) if newer else [0] * 100)
    failures = [1] if newer else [1] * 100

    def history(lake: Any, tablet: TabletKey, start: int, end: int, spec: ReadSpec) -> Iterator[pa.RecordBatch]:
        for batch in rows(start, end):
            if batch.column(0)[0].as_py() == fails_at and failures:
                failures.pop()
                raise LakeFileMissingError("gone")
            yield batch

    monkeypatch.setattr(records, "read_history", history)
    handle: Any = SimpleNamespace(
        desc=DESC, log=Log([20]), lake=lambda changelog=False: SimpleNamespace(metadata_location=str(next(versions)))
    )
    found: list[int] = []

    def read_all() -> None:
        for batch in records.read_records(
            handle,
            TABLET,
            3,
            17,
            SPEC,
            open_lake=lambda *_: SimpleNamespace(offsets={TABLET: 20}),  # type: ignore
        ):
            found.extend(batch.column(0).to_pylist())

    if newer:
        read_all()
        assert found == list(range(3, 17))
    else:
        with pytest.raises(LakeFileMissingError):
            read_all()
        assert found == list(range(3, fails_at))
