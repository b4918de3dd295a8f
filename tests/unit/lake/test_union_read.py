from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest

from lakehead.errors import LakeStateError
from lakehead.lake import union_read
from lakehead.protocol.messages import LakeReply, Lease, TabletState
from lakehead.types import Schemas, TableDescriptor, TablePath, TabletKey

TABLET = TabletKey("", 0)
DESC = TableDescriptor(
    "id", TablePath("d", "t"), Schemas.only(pa.schema([("a", pa.int64())])), (), (), (), 1, "iceberg"
)


@dataclass(frozen=True)
class View:
    """A lake snapshot; ``location`` of a `LakeReply` is the place in a test's list of them."""

    snapshot_id: int | None
    offsets: Mapping[TabletKey, int]


@dataclass
class Client:
    """Answers one after the other: what the lake is, then what the log holds."""

    views: list[View]
    logs: list[tuple[int, int]]
    desc: TableDescriptor = DESC
    asked: int = 0
    kept: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    def lake(self) -> LakeReply:
        location = str(min(self.asked, len(self.views) - 1))
        return LakeReply(metadata_location=location, catalog_name="", catalog_properties={}, storage_properties={})

    @property
    def leases(self) -> Client:
        return self

    def open(self, tables: list[tuple[str, str | None]], *, planned: bool) -> list[Lease]:
        start, end = self.logs[min(self.asked, len(self.logs) - 1)]
        self.asked += 1
        state = TabletState(partition="", bucket=0, log_start=start, high_watermark=end, rows=0)
        return [Lease(lease=f"lease {self.asked}", tablets=[state])]

    def keep(self, lease: str) -> None:
        self.kept.append(lease)

    def release(self, lease: str) -> None:
        self.released.append(lease)


def pin(client: Client, monkeypatch: pytest.MonkeyPatch) -> union_read.Pin:
    class Views:
        @staticmethod
        def at(desc: TableDescriptor, info: LakeReply, snapshot_id: int | None) -> View:
            return client.views[int(info.metadata_location)]

    monkeypatch.setattr(union_read, "PinnedLake", Views)
    some: Any = client
    return union_read.pin(some)


@pytest.mark.parametrize("first", [View(None, {}), View(1, {TABLET: 4})], ids=["before the first round", "later"])
def test_a_pin_that_a_round_and_a_trim_overtake_is_made_anew(first: View, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client([first, View(2, {TABLET: 9})], [(9, 12)])
    pinned = pin(client, monkeypatch)
    assert pinned.ranges == {TABLET: (9, 12)} and pinned.lease == "lease 2" and client.kept == ["lease 2"]
    assert client.released == ["lease 1"]


@pytest.mark.parametrize("lake", [View(None, {}), View(1, {TABLET: 4})], ids=["empty", "short"])
def test_a_log_that_does_not_reach_back_to_the_lake_is_named(lake: View, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client([lake], [(9, 12)])
    with pytest.raises(LakeStateError, match="begins at 9"):
        pin(client, monkeypatch)
    assert client.released == ["lease 1", "lease 2"]
