"""A count without a filter is answered by what the server knows, and is what a read would have found."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.lake.pinned_lake import PinnedLake
from lakehead.lake.union_read import UnionRead

SCHEMA = pa.schema([("k", pa.int64()), ("p", pa.string()), ("a", pa.int64())])


@pytest.mark.parametrize("lake", [None, "iceberg"])
@pytest.mark.parametrize("seed", range(2))
def test_counts_of_keyed_tables_are_what_reads_find(
    tmp_path: Path, lake: str | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = random.Random(seed)
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table(
            "t", SCHEMA, primary_key=["k", "p"], partition_by="p", buckets=2, lake=lake, durability="os"
        )
        scans: list[tuple[lh.Scan, int]] = []
        live: set[tuple[int, str]] = set()
        for step in range(25):
            keys = [(r.randrange(60), f"p{r.randrange(3)}") for _ in range(r.randrange(1, 40))]
            rows = [{"k": k, "p": p, "a": step} for k, p in keys]
            if r.random() < 0.7:
                table.upsert(rows)
                live |= set(keys)
            else:
                table.delete([{"k": k, "p": p} for k, p in keys])
                live -= set(keys)
            if lake and r.random() < 0.2:
                con.tier("t")
            if r.random() < 0.05:
                table.truncate()
                live = set()
            scans.append((table.scan(), len(live)))
        with monkeypatch.context() as patch:
            patch.setattr(UnionRead, "_hot_changes", None)  # nothing is read
            patch.setattr(UnionRead, "_log_rows", None)
            assert [scan.count() for scan, _ in scans] == [count for _, count in scans]
            assert table.scan(limit=3).count() == min(3, len(live))
            patch.setattr(UnionRead, "batches", None)
            assert con.sql("select count(*) from t").fetchall() == [(len(live),)]
        for scan, count in scans[-5:]:
            assert scan.to_arrow().num_rows == count
        parts = [table.scan(tier=tier) for tier in (("hot", "lake") if lake else ("hot",))]
        assert [p.count() for p in parts] == [p.to_arrow().num_rows for p in parts]


@pytest.mark.parametrize("lake", [None, "iceberg"])
def test_counts_of_log_tables_read_nothing(tmp_path: Path, lake: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    r = random.Random(3)
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table("t", SCHEMA, partition_by="p", buckets=2, lake=lake, durability="os")
        rows = in_lake = 0
        for _ in range(20):
            n = r.randrange(1, 40)
            table.append([{"k": k, "p": f"p{k % 3}", "a": k} for k in range(n)])
            rows += n
            if lake and r.random() < 0.3:
                con.tier("t")
                in_lake = rows
            if r.random() < 0.1:
                table.truncate()
                rows = in_lake = 0
            with monkeypatch.context() as patch:
                patch.setattr(UnionRead, "batches", None)
                patch.setattr(PinnedLake, "plan", None)  # not even manifests
                assert con.sql("select count(*) from t").fetchall() == [(rows,)]
                assert table.scan().count() == rows
                if lake:
                    assert con.sql("select count(*) from t$lake").fetchall() == [(in_lake,)]
            assert table.scan().to_arrow().num_rows == rows


def test_rows_that_another_engine_adds_are_counted(tmp_path: Path) -> None:
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table("t", SCHEMA, lake="iceberg")
        for rows in range(2, 10, 2):
            table.append([{"k": 1, "p": "x", "a": 1}])
            con.tier("t")
            ice = table.lake.iceberg()
            schema = pa.schema([f.remove_metadata() for f in ice.schema().as_arrow()])
            ice.append(pa.Table.from_pylist([{"k": 2, "p": "y", "a": 2}], schema))
            for name in ("t", "t$lake"):
                assert con.sql(f"select count(*) from {name}").fetchall() == [(rows,)]
            assert table.scan().count() == table.scan().to_arrow().num_rows == rows


def test_a_count_is_of_one_moment(tmp_path: Path) -> None:
    """Each batch adds a row, and replaces and deletes others: no count lies between two of them."""
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table("t", SCHEMA, primary_key="k", durability="os")
        table.upsert([{"k": k, "p": "", "a": 0} for k in range(100)])
        stop = threading.Event()

        def write() -> None:
            n = 0
            while not stop.is_set():
                n += 1
                table.upsert([{"k": k, "p": "", "a": n} for k in range(1000, 1010)])
                table.delete(list(range(1000, 1010)))

        writing = threading.Thread(target=write)
        writing.start()
        try:
            for _ in range(100):
                scan = table.scan()
                assert scan.count() == scan.to_arrow().num_rows
                assert scan.count() in (100, 110)
        finally:
            stop.set()
            writing.join()
