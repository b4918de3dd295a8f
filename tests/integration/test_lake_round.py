"""Rounds over random histories: every reader of the lake sees exactly the rows of the model."""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table

import lakehead as lh
from lakehead.config import LakeConfig
from lakehead.env import Env
from lakehead.errors import CommitConflictError, LakeStateError, UnavailableError
from lakehead.iceberg.iceberg_table import IcebergLakeTable
from lakehead.iceberg.lake_catalog import LakeCatalog, open_metadata
from lakehead.iceberg.planner import plan_files
from lakehead.iceberg.reader import count_lake, read_lake
from lakehead.iceberg.version import lake_version, read_mark
from lakehead.log.hot_range import HotRange
from lakehead.predicate import parse_predicate
from lakehead.testing.hot import MemoryHotSource
from lakehead.tiering.round import run_round
from lakehead.types import OFFSET_COLUMN, SYSTEM_FIELDS, Schemas, TableDescriptor, TablePath, TabletKey

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), False),
        pa.field("region", pa.string(), False),
        pa.field("small", pa.int8()),
        pa.field("name", pa.large_string()),
        pa.field("price", pa.decimal128(12, 2)),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("seen", pa.timestamp("ms", "Europe/Paris")),
        pa.field("ratio", pa.float64()),
    ]
)


def describe(
    keyed: bool = True, partitioned: bool = False, buckets: int = 3, bucket_key: tuple[str, ...] | None = None
) -> TableDescriptor:
    partition = ("region",) if partitioned else ()
    key = ("id", *partition) if keyed else ()
    own = bucket_key if bucket_key is not None else (("id",) if keyed else ())
    return TableDescriptor(
        "t1", TablePath("shop", "orders"), Schemas.only(SCHEMA, 1), key, partition, own, buckets, "iceberg"
    )


def random_row(rng: random.Random, key: int) -> dict[str, Any]:
    # The partition follows from the key, so that a key is unique in the whole table.
    return {
        "id": key,
        "region": "eu/%é"[: 2 + key % 2] if key % 3 else "us",
        "small": rng.choice([None, -128, 0, 127]),
        "name": rng.choice([None, "", "x" * 40, "ünï"]),
        "price": rng.choice([None, 5, -7]),
        "tags": rng.choice([None, [], ["a", None, "b"]]),
        "seen": rng.choice([None, 1_600_000_000_123]),
        "ratio": rng.choice([None, 0.5, -1e300]),
    }


def sorted_rows(rows: pa.Table | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    listed = rows.to_pylist() if isinstance(rows, pa.Table) else list(rows)
    return sorted(listed, key=lambda r: (r["id"], r["__bucket"], r[OFFSET_COLUMN]))


def model(hot: MemoryHotSource) -> pa.Table:
    return pa.Table.from_pylist(hot.rows(), pa.schema([*hot.desc.schema, *SYSTEM_FIELDS]))


def by_lakehead(table: Table, desc: TableDescriptor, **options: Any) -> pa.Table:
    files = plan_files(table)
    batches = list(read_lake(table, desc, files, system_columns=True, **options))
    return pa.Table.from_batches(batches, pa.schema([*desc.schema, *SYSTEM_FIELDS]))


@pytest.fixture(scope="module")
def duck() -> duckdb.DuckDBPyConnection:
    """DuckDB with its Iceberg extension, without the network."""
    con = duckdb.connect()
    for name in ("avro", "iceberg"):
        spec = importlib.util.find_spec(f"duckdb_extension_{name}")
        assert spec is not None and spec.submodule_search_locations
        folder = Path(spec.submodule_search_locations[0])
        con.install_extension(str(folder / "extensions" / f"v{duckdb.__version__}" / f"{name}.duckdb_extension"))
        con.load_extension(name)
    con.execute("set timezone='UTC'")
    return con


def check_all_readers(table: Table, hot: MemoryHotSource, duck: duckdb.DuckDBPyConnection) -> None:
    desc, expected = hot.desc, sorted_rows(model(hot))
    assert sorted_rows(by_lakehead(table, desc)) == expected
    assert count_lake(table, desc, plan_files(table)) == len(expected)
    names = ["id", "name", "small", "price", OFFSET_COLUMN]
    plain = sorted([tuple(r[n] for n in names) for r in expected], key=repr)
    scanned = table.scan(selected_fields=tuple(names)).to_arrow().select(names).to_pylist()
    assert sorted((tuple(r.values()) for r in scanned), key=repr) == plain
    own_scan = table.scan().to_arrow().select(expected[0]) if expected else None
    assert own_scan is None or sorted_rows(own_scan) == expected
    query = f"select {', '.join(names)} from iceberg_scan('{table.metadata_location}')"
    assert sorted(duck.sql(query).fetchall(), key=repr) == plain
    if table.metadata.current_snapshot() is not None and expected:
        frame = pl.scan_iceberg(table).select(names).collect()
        assert sorted(frame.rows(), key=repr) == plain


KINDS = {
    "keyed": describe(),
    "keyed, partitioned": describe(partitioned=True, buckets=2),
    "log": describe(keyed=False),
    "log, bucketed and partitioned": describe(keyed=False, partitioned=True, bucket_key=("id",)),
}
# Two bucket columns must both be key columns.
KINDS["keyed, two bucket columns"] = TableDescriptor(
    "t1", TablePath("shop", "orders"), Schemas.only(SCHEMA, 1), ("id", "region"), (), ("id", "region"), 3, "iceberg"
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_reader_sees_the_model_after_each_round(
    kind: str, tmp_path: Path, duck: duckdb.DuckDBPyConnection
) -> None:
    desc, rng = KINDS[kind], random.Random(kind)
    catalog = LakeCatalog(LakeConfig(), str(tmp_path))
    catalog.create_table(desc)
    hot = MemoryHotSource(desc)
    for step in range(14):
        for _ in range(rng.randrange(3)):
            hot.write([random_row(rng, rng.randrange(60)) for _ in range(rng.randrange(40))])
            if desc.keyed:
                hot.delete([random_row(rng, rng.randrange(60)) for _ in range(rng.randrange(8))])
        result = run_round(
            IcebergLakeTable(lambda: catalog.load(desc), desc),
            desc,
            hot,
            Env.system(),
            rows_per_task=rng.choice([5, 50, 1000]),
        )
        table = catalog.load(desc)
        assert result.offsets == {k: at.high_watermark for k, at in hot.watermarks().items() if at.high_watermark}
        mark = read_mark(table)
        assert (mark.offsets if mark else {}) == result.offsets
        if step % 4 == 3 or step == 13:
            check_all_readers(table, hot, duck)
    reader = open_metadata(table.metadata_location, catalog.storage_properties(table))
    assert sorted_rows(by_lakehead(reader, desc)) == sorted_rows(model(hot))


def test_many_rounds_keep_few_manifests_and_projection_filter_and_superseded_are_exact(tmp_path: Path) -> None:
    desc, rng = describe(), random.Random(7)
    catalog = LakeCatalog(LakeConfig(), str(tmp_path))
    catalog.create_table(desc)
    hot = MemoryHotSource(desc, batch_rows=1000)
    for _ in range(25):
        hot.write([random_row(rng, rng.randrange(300)) for _ in range(30)])
        run_round(IcebergLakeTable(lambda: catalog.load(desc), desc), desc, hot, Env.system())
    table = catalog.load(desc)
    snapshot = table.current_snapshot()
    assert snapshot is not None and len(snapshot.manifests(table.io)) <= 24
    rows = hot.rows()
    gone = {}
    for tablet in hot.watermarks():
        offsets = sorted(r[OFFSET_COLUMN] for r in rows if r["__bucket"] == tablet.bucket)
        gone[tablet] = np.array(offsets[::3], np.int64)
    dead = {(k.bucket, int(o)) for k, v in gone.items() for o in v}
    for text, keep in {
        "id < 100 and small = 127": lambda r: r["id"] < 100 and r["small"] == 127,
        "id = 42": lambda r: r["id"] == 42,
        "name is null or ratio > 0": lambda r: r["name"] is None or (r["ratio"] or 0) > 0,
        "seen >= timestamptz '2020-01-01 00:00:00+00'": lambda r: r["seen"] is not None,
        "price in (5, 6)": lambda r: r["price"] == 5,
    }.items():
        predicate = parse_predicate(text, desc.schema)
        files = plan_files(table, bounds=predicate.bounds)
        found = read_lake(table, desc, files, columns=["id"], predicate=predicate, superseded=gone)
        wanted = [r for r in rows if keep(r) and (r["__bucket"], r[OFFSET_COLUMN]) not in dead]
        assert sorted(i for b in found for i in b.column(0).to_pylist()) == sorted(r["id"] for r in wanted), text
    one = parse_predicate("id = 42", desc.schema)
    assert {f.tablet for f in plan_files(table, bounds=one.bounds)} < {f.tablet for f in plan_files(table)}
    assert count_lake(table, desc, plan_files(table), superseded=gone) == len(rows) - len(dead)
    empty = list(read_lake(table, desc, plan_files(table), columns=[], superseded=gone))
    assert sum(b.num_rows for b in empty) == len(rows) - len(dead)


def test_rows_that_come_and_go_within_a_round_still_advance_the_mark(
    tmp_path: Path, duck: duckdb.DuckDBPyConnection
) -> None:
    desc = describe(buckets=1)
    catalog = LakeCatalog(LakeConfig(), str(tmp_path))
    catalog.create_table(desc)
    hot = MemoryHotSource(desc)
    row = random_row(random.Random(1), 1)
    hot.write([row])
    hot.delete([row])
    result = run_round(IcebergLakeTable(lambda: catalog.load(desc), desc), desc, hot, Env.system())
    table = catalog.load(desc)
    mark = read_mark(table)
    assert (result.rows, result.files) == (0, 0)
    assert mark is not None and mark.snapshot_id == result.snapshot_id and list(mark.offsets.values()) == [2]
    check_all_readers(table, hot, duck)
    assert run_round(IcebergLakeTable(lambda: catalog.load(desc), desc), desc, hot, Env.system()).snapshot_id is None


def test_jobs_that_race_for_one_table_tier_each_row_once(tmp_path: Path) -> None:
    desc, rng = describe(), random.Random(3)
    catalog = LakeCatalog(LakeConfig(), str(tmp_path))
    catalog.create_table(desc)
    hot = MemoryHotSource(desc, batch_rows=1000)
    hot.write([random_row(rng, rng.randrange(40)) for _ in range(200)])
    ends = {tablet: at.high_watermark for tablet, at in hot.watermarks().items()}
    conflicts: list[CommitConflictError] = []

    class Growing(MemoryHotSource):
        """The same log, of which each look sees a little more."""

        shown = itertools.count(10, 10)

        def watermarks(self) -> dict[TabletKey, HotRange]:
            shown = next(self.shown)
            return {tablet: HotRange(0, min(end, shown)) for tablet, end in ends.items()}

    growing = Growing(desc, batch_rows=1000)
    growing._logs = hot._logs

    def job(number: int) -> None:
        own = LakeCatalog.open(catalog.name, catalog.properties)
        while True:
            try:
                if (
                    run_round(IcebergLakeTable(lambda: own.load(desc), desc), desc, growing, Env.system()).offsets
                    == ends
                ):
                    return
            except CommitConflictError as e:
                conflicts.append(e)
            except LakeStateError as e:
                # Another job saw more of the log than this one, and has tiered it.
                assert "up to" in str(e), e

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(job, range(3)))
    table = catalog.load(desc)
    assert sorted_rows(by_lakehead(table, desc)) == sorted_rows(model(hot))
    marks = [s.mark.offsets for s in lake_version(table).lineage() if s.mark is not None]
    assert len(marks) > 1 and all(a[k] >= b.get(k, 0) for a, b in itertools.pairwise(marks) for k in a)
    files = list(tmp_path.rglob("data/*.parquet"))
    used = {f.path for f in plan_files(table)} | {d for f in plan_files(table) for d in f.delete_files}
    assert {f"file://{f}" for f in files} == used, f"after {len(conflicts)} conflicts"


def test_what_crashes_left_is_removed_through_a_connection(con: lh.Connection, name: str) -> None:
    table = con.create_table(
        name, pa.schema([("id", pa.int64()), ("v", pa.int64())]), primary_key=["id"], lake="iceberg"
    )
    for v in range(3):
        table.upsert([{"id": i, "v": v} for i in range(10)])
        table.lake.tier()
    folder = Path(table.lake.iceberg().location().removeprefix("file://"))
    old, young = folder / "data" / "old.parquet", folder / "metadata" / "young.avro"
    for path in (old, young):
        path.write_bytes(b"left")
    two_days_ago = old.stat().st_mtime - 48 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    assert table.lake.remove_orphans(older_than="3d").num_rows == 0
    would = table.lake.remove_orphans(dry_run=True)
    assert would.select(["path", "size"]).to_pylist() == [{"path": f"file://{old}", "size": 4}] and old.exists()
    assert table.lake.remove_orphans().equals(would) and not old.exists() and young.exists()
    assert table.lake.remove_orphans(0)["path"].to_pylist() == [f"file://{young}"]
    assert table.scan(tier="lake").count() == table.lake.iceberg().scan().count() == 10
    plain = con.create_table(f"{name}_plain", pa.schema([("id", pa.int64())]))
    with pytest.raises(lh.NoLakeError):
        plain.lake.remove_orphans()


@pytest.mark.parametrize("error", [UnavailableError("its answer was lost"), NoSuchTableError("dropped meanwhile")])
def test_a_table_whose_lake_was_made_and_not_heard_of_can_be_made_again(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SqlCatalog.create_table

    def unheard(*args: Any, **given: Any) -> Any:
        made(*args, **given)
        raise error

    how: dict[str, Any] = {"primary_key": ["id", "region"], "lake": "iceberg"}
    with lh.connect(tmp_path / "data") as con:
        with monkeypatch.context() as patch:
            patch.setattr(SqlCatalog, "create_table", unheard)
            with pytest.raises(UnavailableError):
                con.create_table("db.t", SCHEMA, **how)
        assert con.create_table("db.t", SCHEMA, **how).lake.offsets() == {}
        # Nor does the one that was made first keep its name when there is no second.
        properties = LakeCatalog(LakeConfig(), str(tmp_path / "data")).properties
        with closing(load_catalog("lakehead", **properties)) as catalog:
            catalog.create_table(("db", "u$changelog"), pa.schema([("theirs", pa.int64())]))
        with pytest.raises(LakeStateError):
            con.create_table("db.u", SCHEMA, lake_changelog=True, **how)
        assert con.create_table("db.u", SCHEMA, **how).lake.offsets() == {}


def test_texts_at_the_ends_of_the_characters_are_tiered_compacted_and_found(con: lh.Connection, name: str) -> None:
    ends = "x\ud7ff\ue000\uffff\U0010ffff"
    texts = [lead * n + tail for lead in ends for n in (15, 16, 17) for tail in ("", "\ud7ff!")]
    table = con.create_table(name, {"s": "string", "b": "binary", "p": "string"}, primary_key="s", lake="iceberg")
    for n, text in enumerate(texts):
        table.upsert([{"s": text, "b": text.encode(), "p": text}])
        if n % 5 == 4:
            table.lake.tier()
    table.lake.tier()
    table.delete([texts[0]])
    table.lake.tier()
    table.lake.compact()
    for text in texts:
        found = table.scan(tier="lake", where=f"p = '{text}'").to_arrow()["s"].to_pylist()
        assert found == ([text] if text != texts[0] else [])
