from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.table import DataScan

from lakehead.errors import LakeStateError
from lakehead.lake import union_read
from lakehead.lake.pinned_lake import PinnedLake
from lakehead.predicate import parse_predicate
from lakehead.predicate.read_spec import ReadSpec
from lakehead.protocol.messages import LakeReply, LakeUse, Lease, TabletState
from lakehead.testing.hot import MemoryHotSource
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
    overwritten: Mapping[TabletKey, int] = field(default_factory=dict)


@dataclass
class Client:
    """Answers one after the other: what the lake is, then what the log holds."""

    views: list[View]
    logs: list[tuple[int, int]]
    desc: TableDescriptor = DESC
    asked: int = 0
    uses: list[LakeUse | None] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    def lake(self, *, changelog: bool = False) -> LakeReply:
        location = str(min(self.asked, len(self.views) - 1))
        return LakeReply(metadata_location=location, catalog_name="", catalog_properties={}, storage_properties={})

    def leased(self, lake: LakeUse | None) -> LakeUse | None:
        return lake

    @property
    def leases(self) -> Client:
        return self

    def open(self, tables: list[LakeUse | None], *, planned: bool) -> list[Lease]:
        start, end = self.logs[min(self.asked, len(self.logs) - 1)]
        self.asked += 1
        self.uses += tables
        state = TabletState(partition="", bucket=0, log_start=start, high_watermark=end, rows=0)
        return [Lease(lease=f"lease {self.asked}", tablets=[state])]

    def keep(self, lease: str) -> None:
        self.kept.append(lease)

    def release(self, lease: str) -> None:
        self.released.append(lease)


def pin(client: Client) -> union_read.Pin:
    def at(desc: TableDescriptor, info: LakeReply, moment: object) -> Any:
        return client.views[int(info.metadata_location)]

    some: Any = client
    return union_read.pin(some, open_lake=at)


@pytest.mark.parametrize("first", [View(None, {}), View(1, {TABLET: 4})], ids=["before the first round", "later"])
def test_a_pin_that_a_round_and_a_trim_overtake_is_made_anew(first: View) -> None:
    client = Client([first, View(2, {TABLET: 9})], [(9, 12)])
    pinned = pin(client)
    assert pinned.ranges == {TABLET: (9, 12)} and pinned.lease == "lease 2" and client.kept == ["lease 2"]
    assert client.released == ["lease 1"]


@pytest.mark.parametrize("lake", [View(None, {}), View(1, {TABLET: 4})], ids=["empty", "short"])
def test_a_log_that_does_not_reach_back_to_the_lake_is_named(lake: View) -> None:
    client = Client([lake], [(9, 12)])
    with pytest.raises(LakeStateError, match="begins at 9"):
        pin(client)
    assert client.released == ["lease 1", "lease 2"]


def test_a_read_uses_nothing_of_a_lake_that_is_empty() -> None:
    empty, later = Client([View(None, {})], [(0, 3)]), Client([View(7, {TABLET: 2})], [(0, 3)])
    assert pin(empty).ranges == {TABLET: (0, 3)} and pin(later).ranges == {TABLET: (2, 3)}
    assert empty.uses == [None] and later.uses == [LakeUse(metadata="0", snapshot=7)]


# ---- reads, of any format -------------------------------------------------------------------------------------------


@dataclass
class LogClient:
    """Serves the records of a log in memory."""

    hot: MemoryHotSource

    @property
    def desc(self) -> TableDescriptor:
        return self.hot.desc

    @property
    def log(self) -> LogClient:
        return self

    def read_ranges(
        self, ranges: Mapping[TabletKey, tuple[int, int]], spec: ReadSpec, **_: object
    ) -> Iterator[tuple[TabletKey, pa.RecordBatch]]:
        for key, (start, end) in ranges.items():
            for batch in self.hot.read(key, start, end):
                batch = batch.append_column("__bucket", pa.repeat(pa.scalar(key.bucket, pa.int32()), len(batch)))
                rows = batch if spec.predicate is None else spec.predicate.filter(batch)
                yield key, rows.select(list(spec.columns))


def union_of(lake: Any, *, where: str | None = None) -> union_read.UnionRead:
    pinned = PinnedLake.of(lake.desc, lake.table)
    ranges = {key: (pinned.offsets.get(key, 0), at.high_watermark) for key, at in lake.hot.watermarks().items()}
    predicate = None if where is None else parse_predicate(where, lake.desc.schema)
    client: Any = LogClient(lake.hot)
    return union_read.UnionRead(client, union_read.Pin(pinned, ranges), ReadSpec(("id", "v"), predicate))


def values(read: union_read.UnionRead) -> list[tuple[int, int]]:
    return sorted((r["id"], r["v"]) for b in read.batches() for r in b.to_pylist())


@pytest.mark.parametrize("keyed", [True, False])
def test_a_union_of_any_lake_and_its_log_is_the_table(make_any: Callable[..., Any], keyed: bool) -> None:
    lake = make_any(keyed=keyed, buckets=2)
    for step in range(6):
        assert values(union_of(lake)) == lake.model_values() and union_of(lake).count() == len(lake.model_values())
        lake.write(step, step + 1, 10 + step, v=step)
        if keyed:
            lake.delete(step - 1, 11)
        assert values(union_of(lake)) == lake.model_values() and union_of(lake).count() == len(lake.model_values())
        some = [(i, v) for i, v in lake.model_values() if v >= 2]
        assert values(union_of(lake, where="v >= 2")) == some and union_of(lake, where="v >= 2").count() == len(some)
        if step % 2:
            lake.round()
        if step == 3:
            lake.rewrite_foreign()


def test_a_union_read_plans_the_lake_once(make_any: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    lake = make_any()
    lake.write(1, 2, 3)
    lake.round()
    lake.write(2, v=1)
    read, planned, plan = union_of(lake, where="id > 1"), [], lake.table.plan
    monkeypatch.setattr(lake.table, "plan", lambda *a, **k: planned.append(a) or plan(*a, **k))
    assert "1 data files" in read.explain()
    assert values(read) == values(read) == [(2, 1), (3, 0)]
    assert len(planned) == 1


def test_a_union_of_an_iceberg_lake_reads_its_manifests_once(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keyed.write(1, 2, 3)
    keyed.round()
    keyed.write(2, v=1)
    planned, plan = [], DataScan.plan_files
    monkeypatch.setattr(DataScan, "plan_files", lambda scan: planned.append(scan) or plan(scan))
    assert values(union_of(keyed)) == keyed.model_values()
    assert len(planned) == 1
