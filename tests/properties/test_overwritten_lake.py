"""Partitions of a log table with a lake are overwritten, whenever rounds, compactions, truncations, trims and restarts
come: every read finds what a plain model has, and the lake does once it has followed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.api.table import handle_of
from lakehead.api.tiering import ConnectionTables
from lakehead.client.staging import JobBatch
from lakehead.errors import CommitConflictError
from lakehead.lake.formats import format_of
from lakehead.lake.pinned_lake import PinnedLake
from lakehead.lake.union_read import UnionRead, pin
from lakehead.log.hot_range import HotRange
from lakehead.predicate.read_spec import ReadSpec
from lakehead.server.staging import Staging
from lakehead.tiering.round import run_round
from lakehead.types import TabletKey

SCHEMA = pa.schema([pa.field("day", pa.string(), False), pa.field("k", pa.int64(), False)])
DAYS = "abc"
Row = tuple[str, int]


class Table:
    """A table and its model."""

    def __init__(self, folder: Path, *, buckets: int, bucket_key: str | None = None) -> None:
        self.folder = folder
        self.con = lh.connect(folder)
        self.con.create_table(
            "o.t", SCHEMA, partition_by="day", buckets=buckets, bucket_key=bucket_key, lake="iceberg",
            hot_retention="0s", segment_bytes=16_000,
        )  # fmt: skip
        self.rows: dict[str, list[int]] = {day: [] for day in DAYS}
        self.at = self.batch = 0

    @property
    def table(self) -> lh.Table:
        return self.con.table("o.t")

    def new(self, count: int) -> list[int]:
        self.at += count
        return list(range(self.at - count, self.at))

    def append(self, **days: int) -> None:
        new = {day: self.new(count) for day, count in days.items()}
        self.table.append([{"day": day, "k": k} for day, of in new.items() for k in of])
        for day, of in new.items():
            self.rows[day] += of

    def overwrite(self, **days: int) -> None:
        """These days get so many rows in place of those they have."""
        new = {day: self.new(count) for day, count in days.items()}
        staging = handle_of(self.table).staging
        self.batch += 1
        batch = JobBatch("job", self.batch)
        held = staging.held()
        columns = [[day for day, of in new.items() for _ in of], [k for of in new.values() for k in of]]
        held.add("append", pa.table(columns, schema=SCHEMA))
        staging.publish(batch, [held], lasting=True, overwrite=[f"day={day}" for day in new])
        self.rows |= new

    def tier(self) -> None:
        self.con.tier("o.t")

    def trim(self) -> None:
        self.con._server.service.maintain()  # type: ignore[attr-defined]

    def restart(self) -> None:
        self.con.close()
        self.con = lh.connect(self.folder)

    def expected(self) -> list[Row]:
        return sorted((day, k) for day, of in self.rows.items() for k in of)

    def check(self) -> None:
        table, expected = self.table, self.expected()
        assert rows_of(table.scan().to_arrow()) == expected
        assert table.scan().count() == self.con.sql("select count(*) from o.t").fetchall()[0][0] == len(expected)
        assert sorted(self.con.sql("select day, k from o.t where day <> 'b'").fetchall()) == [
            row for row in expected if row[0] != "b"
        ]
        pushed = [r for b in table.subscribe(start="earliest", stop="now") for r in b.rows.to_pylist()]
        assert sorted((r["day"], r["k"]) for r in pushed) == expected

    def check_on(self) -> None:
        """The same after a trim, after a restart, and once the lake has followed."""
        for step in (lambda: None, self.trim, self.restart):
            step()
            self.check()
        self.check_lake()

    def check_lake(self) -> None:
        behind = rows_of(self.table.lake.iceberg().scan().to_arrow()) != self.expected()
        assert not behind or sum(self.table.status()["lag_rows"].to_pylist()), "or who waits for it does not wait"
        self.tier()
        assert not sum(self.table.status()["lag_rows"].to_pylist())
        assert rows_of(self.table.scan(tier="lake").to_arrow()) == self.expected()
        assert rows_of(self.table.lake.iceberg().scan().to_arrow()) == self.expected()
        assert self.table.lake.tier().snapshot_id is None, "there is nothing more to follow"
        service = ConnectionTables(self.con)
        (found,) = service.look(frozenset(), frozenset()).tables
        assert service.run_round(found.table_id, 1 << 20).end == found.end, "or a service never finds later news"


def rows_of(found: pa.Table) -> list[Row]:
    return sorted(zip(found["day"].to_pylist(), found["k"].to_pylist(), strict=True))


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Table]]:
    tables: list[Table] = []

    def make(**given: Any) -> Table:
        tables.append(Table(tmp_path / f"data{len(tables)}", **given))
        return tables[-1]

    yield make
    for table in tables:
        table.con.close()


@pytest.mark.parametrize("seed", range(6))
def test_every_read_finds_the_rows_of_the_model(made: Callable[..., Table], seed: int) -> None:
    draws = random.Random(seed)
    table = made(buckets=draws.choice([1, 2]), bucket_key=draws.choice([None, "k"]))

    def some(least: int) -> dict[str, int]:
        return {day: draws.randint(least, 30) for day in draws.sample(DAYS, draws.randint(1, len(DAYS)))}

    steps: dict[str, Callable[[], object]] = {
        "append": lambda: table.append(**some(1)),
        "overwrite": lambda: table.overwrite(**some(0)),
        "tier": table.tier,
        "trim": table.trim,
        "restart": table.restart,
        "compact": lambda: table.table.lake.compact(),
        "truncate": lambda: (table.table.truncate(), table.rows.update({day: [] for day in DAYS})),
    }
    odds = {"append": 4, "overwrite": 4, "tier": 4, "trim": 3, "restart": 2, "compact": 1, "truncate": 1}
    for name in draws.choices(list(odds), list(odds.values()), k=24):
        pinned, held = table.table.scan(), table.expected()
        steps[name]()
        table.check()
        if name != "restart":
            assert rows_of(pinned.to_arrow()) == held, f"pinned before {name}"
    table.check_lake()
    table.trim()
    table.restart()
    table.check()


def test_the_lake_alone_is_as_it_was_until_it_follows(made: Callable[..., Table]) -> None:
    table = made(buckets=1)
    table.append(a=3, b=3)
    table.tier()
    before = table.expected()
    snapshot = table.table.lake.snapshots()["snapshot_id"].to_pylist()[-1]
    files = table.table.lake.files().num_rows
    table.overwrite(a=2)
    for found in (
        table.table.scan(tier="lake"), table.table.scan(snapshot=snapshot), table.con.sql('select * from o."t$lake"'),
    ):  # fmt: skip
        assert rows_of(found.to_arrow() if isinstance(found, lh.Scan) else found.to_arrow_table()) == before
    assert table.table.lake.files().num_rows == files
    table.check_lake()
    assert rows_of(table.table.scan(snapshot=snapshot).to_arrow()) == before


def test_a_read_that_looks_at_the_lake_before_looks_again(made: Callable[..., Table]) -> None:
    table = made(buckets=1)
    table.append(a=4, b=4)
    table.tier()  # so that the lake ends where the partition is cut
    looks = []

    def at(*given: Any) -> PinnedLake:
        found = PinnedLake.at(*given)
        if not looks:
            table.overwrite(a=2)
        looks.append(found)
        return found

    handle = handle_of(table.table)
    read = UnionRead(handle, pin(handle, open_lake=at), ReadSpec(("day", "k")))
    assert rows_of(pa.Table.from_batches(read.batches(), SCHEMA)) == table.expected() and len(looks) == 2


def test_a_compaction_forgets_nothing(made: Callable[..., Table]) -> None:
    table = made(buckets=1)
    table.append(a=4, b=4)
    table.tier()
    table.overwrite(a=2)
    for _ in range(6):
        table.tier()
        table.append(a=1)
    table.tier()
    table.trim()
    assert table.table.lake.compact().files_before >= 6
    table.check()
    table.check_lake()


class Meanwhile:
    """A log after whose offsets were told something happens, before the round commits."""

    def __init__(self, table: lh.Table, then: Callable[[], object]) -> None:
        self._log, self._then = handle_of(table).log, then

    def watermarks(self) -> Mapping[TabletKey, HotRange]:
        told = self._log.watermarks()
        self._then()
        return told

    def read(self, *given: Any) -> Iterator[pa.RecordBatch]:
        return self._log.read(*given)


@pytest.mark.parametrize("tiered", [True, False])
@pytest.mark.parametrize("rows", [0, 5])
def test_a_round_that_was_planned_before(made: Callable[..., Table], rows: int, tiered: bool) -> None:
    """It lands or not: its mark may be right where the partition was cut."""
    table = made(buckets=1)
    table.append(a=4, b=4)
    if tiered:
        table.tier()
    table.append(a=4, b=4)
    handle = handle_of(table.table)
    lake = format_of(handle.desc).open(handle.desc, handle.lake())
    source = Meanwhile(table.table, lambda: table.overwrite(a=rows))
    with contextlib.suppress(CommitConflictError):
        run_round(lake, handle.desc, source, handle.env)
    table.check_on()


@pytest.mark.parametrize("trims", [True, False])
def test_a_round_between_the_decision_and_the_deed(
    made: Callable[..., Table], monkeypatch: pytest.MonkeyPatch, trims: bool
) -> None:
    """Rows that come after the decision stay, though the lake has them in files that go."""
    table = made(buckets=1)
    table.append(a=4, b=4)
    table.tier()
    replace, late = Staging._replace, table.new(3)

    def replaced(self: Staging, *given: Any) -> None:
        table.table.append([{"day": "a", "k": k} for k in late])
        table.tier()
        if trims:  # as the server's own maintenance, which waits for the job
            service = table.con._server.service  # type: ignore[attr-defined]
            live = service._tables.get(handle_of(table.table).desc.table_id)
            held = service._maintenance._lake.proven_offsets(live.desc, live.to_keep())
            for key, tablet in live.tablets.items():
                tablet.maintain(service._maintenance._clock.now_us(), 0, held.get(key, 0))
        replace(self, *given)

    monkeypatch.setattr(Staging, "_replace", replaced)
    table.overwrite(a=2)
    monkeypatch.undo()
    table.rows["a"] += late
    table.check_on()
    table.trim()
    table.check()


def test_what_other_engines_wrote_to_the_partition_goes_too(made: Callable[..., Table]) -> None:
    table = made(buckets=2)
    table.append(a=3, b=3)
    table.tier()
    lake = table.table.lake.iceberg()
    own = lake.scan().to_arrow().schema
    foreign = pa.Table.from_pylist([{"day": "a", "k": 900}, {"day": "b", "k": 901}], own)
    lake.append(foreign)
    table.rows["a"].append(900)
    table.rows["b"].append(901)
    assert rows_of(table.table.scan().to_arrow()) == table.expected()
    table.overwrite(a=1)
    assert rows_of(table.table.scan().to_arrow()) == table.expected()
    assert table.table.scan().count() == len(table.expected())
    table.check_lake()


def test_backups_have_it(made: Callable[..., Table], tmp_path: Path) -> None:
    from lakehead.api.backup import back_up, restore

    table = made(buckets=2)
    table.append(a=3, b=3)
    table.tier()
    table.overwrite(a=1, b=0)
    back_up(table.con, str(table.folder), str(tmp_path / "backup"))
    restore(str(tmp_path / "backup"), str(tmp_path / "restored"))
    with lh.connect(tmp_path / "restored") as con:
        assert rows_of(con.table("o.t").scan().to_arrow()) == table.expected()
        con.tier("o.t")
        assert rows_of(con.table("o.t").scan(tier="lake").to_arrow()) == table.expected()
