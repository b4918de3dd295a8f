"""Subscriptions to log tables with a lake: no offset is left out or repeated, whenever the log is trimmed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from lakehead.api import feed
from lakehead.env import Env
from lakehead.errors import OffsetOutOfRangeError, SchemaChangedError, UnavailableError
from lakehead.lake import records
from lakehead.predicate.read_spec import ReadSpec
from lakehead.protocol.messages import StreamHeader, TabletState
from lakehead.types import Schemas, TableDescriptor, TablePath, TabletKey

TABLET = TabletKey("", 0)
DESC = TableDescriptor(
    "id", TablePath("d", "t"), Schemas.only(pa.schema([("a", pa.int64())])), (), (), (), 1, "iceberg"
)
OFFSETS = pa.schema([("__offset", pa.int64())])


def rows(start: int, end: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"__offset": o} for o in range(start, end)], OFFSETS)


class Pushed(list[tuple[StreamHeader, pa.RecordBatch]]):
    """A stream."""

    def close(self) -> None:
        self.clear()


@dataclass
class Client:
    """A table of one tablet with offsets [0, 12): its log begins at one of ``log_starts`` after the other."""

    log_starts: list[int]
    desc: TableDescriptor = DESC
    env: Env = field(default_factory=Env.system)
    asked: int = 0
    opened: list[Mapping[TabletKey, int]] = field(default_factory=list)

    @property
    def log(self) -> Client:
        return self

    def _log_start(self) -> int:
        return self.log_starts[min(self.asked, len(self.log_starts) - 1)]

    def tablets(self, **_: object) -> list[TabletState]:
        start = self._log_start()
        self.asked += 1
        return [TabletState(partition="", bucket=0, log_start=start, high_watermark=12, rows=0)]

    def lake(self, *, changelog: bool = False) -> Any:
        return SimpleNamespace(metadata_location="")

    def read_ranges(
        self, ranges: Mapping[TabletKey, tuple[int, int]], spec: ReadSpec
    ) -> Iterator[tuple[TabletKey, pa.RecordBatch]]:
        start, end = ranges[TABLET]
        trimmed = start < self._log_start()
        self.asked += 1
        if trimmed:
            raise OffsetOutOfRangeError("trimmed")
        yield TABLET, rows(start, end)

    def subscribe(self, *, starts: Mapping[TabletKey, int], **_: object) -> Any:
        self.opened.append(starts)
        if starts[TABLET] < self._log_start():
            raise OffsetOutOfRangeError("trimmed")
        return Pushed([(StreamHeader(partition="", bucket=0, end_offset=12), rows(starts[TABLET], 12))])


@pytest.mark.parametrize("between", range(6))
@pytest.mark.parametrize("before", range(4))
def test_trims_at_any_moment_leave_no_gap(before: int, between: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def history(view: object, tablet: TabletKey, start: int, end: int, spec: ReadSpec) -> Iterator[pa.RecordBatch]:
        yield rows(start, end)

    lake: Any = SimpleNamespace(offsets={TABLET: 9})

    class OverLake(feed.Feed):
        def _records(self, key: TabletKey, start: int, end: int) -> Iterator[pa.RecordBatch]:
            return records.read_records(self._handle, key, start, end, self._spec, open_lake=lambda *_: lake)

    monkeypatch.setattr(records, "read_history", history)
    client: Any = Client([0] * before + [5] * between + [9])
    stream = OverLake(client, "earliest", {TABLET: 12}, lambda _: ReadSpec(("__offset",)))
    seen = [o for _, batch in stream for o in batch.column(0).to_pylist()]
    assert seen == list(range(12)), client.opened


class Altered(Pushed):
    """A stream that ends because the table was altered."""

    def __iter__(self) -> Iterator[tuple[StreamHeader, pa.RecordBatch]]:
        raise SchemaChangedError("altered")


class Away(Client):
    """A table that was altered, and whose server is away when it is asked how it is defined now."""

    unanswered = 2

    def subscribe(self, *, starts: Mapping[TabletKey, int], **how: object) -> Any:
        found = super().subscribe(starts=starts, **how)
        return Altered() if len(self.opened) == 1 else found

    def now(self) -> Away:
        self.unanswered -= 1
        if self.unanswered >= 0:
            raise UnavailableError("away", gone=True)
        return self


def test_a_server_that_goes_when_the_table_was_altered_is_waited_for() -> None:
    client: Any = Away([0])
    stream = feed.Feed(client, "earliest", {TABLET: 12}, lambda _: ReadSpec(("__offset",)))
    assert [o for _, batch in stream for o in batch.column(0).to_pylist()] == list(range(12))
    assert client.unanswered == -1 and len(client.opened) == 2
