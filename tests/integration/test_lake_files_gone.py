"""Lake files that others removed: every read and round says which one is gone, and the log forgets nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh

KV = pa.schema([("k", pa.int64()), ("v", pa.int64())])


def rows(start: int, end: int, v: int = 0) -> list[dict[str, int]]:
    return [{"k": i, "v": v} for i in range(start, end)]


def start_offset(table: lh.Table) -> int:
    found: int = table.status()["start_offset"].to_pylist()[0]
    return found


def tiered(con: lh.Connection, keyed: bool) -> lh.Table:
    """A table with rows 0 to 49 in its lake; its log is trimmed as soon as it may be."""
    options: Any = {"primary_key": ["k"]} if keyed else {}
    table = con.create_table("t", KV, lake="iceberg", hot_retention="0s", **options)
    (table.upsert if keyed else table.append)(rows(0, 50))
    con.tier("t")
    return table


KINDS = ["data", "manifests", "lists", "metadata"]


@pytest.mark.parametrize(("kind", "keyed"), [("deletes", True), *((k, e) for k in KINDS for e in (True, False))])
def test_whoever_needs_a_file_that_is_gone_is_told_its_name(tmp_path: Path, kind: str, keyed: bool) -> None:
    with lh.connect(tmp_path / "data") as con:
        table = tiered(con, keyed)
        write = table.upsert if keyed else table.append
        write(rows(0, 10, v=1))
        con.tier("t")
        if not keyed:
            con._server.service.maintain()  # type: ignore[attr-defined]
            assert start_offset(table) == 60
        write(rows(5, 8, v=2))
        table.scan().to_arrow()
        pinned = table.scan()
        lake = tmp_path / "data" / "lake"
        gone = {
            "data": [p for p in lake.rglob("*.parquet") if "deletes" not in p.name],
            "deletes": list(lake.rglob("*deletes.parquet")),
            "manifests": [p for p in lake.rglob("*.avro") if not p.name.startswith("snap")],
            "lists": list(lake.rglob("snap-*.avro")),
            "metadata": list(lake.rglob("*.metadata.json")),
        }[kind]
        names = {p.name for p in gone}
        assert names
        for path in gone:
            path.unlink()
        calls: dict[str, Callable[[], Any]] = {
            "scan": lambda: table.scan().to_arrow(),
            "pinned": lambda: pinned.to_arrow(),
            "where": lambda: table.scan(where="v >= 0").count(),
            "lake": lambda: table.scan(tier="lake").to_arrow(),
            "sql": lambda: con.sql("select sum(v) from t").fetchone(),
        }
        if kind in ("manifests", "lists", "metadata"):
            calls["files"] = table.lake.files
        if kind == "metadata":
            del calls["pinned"]  # it has read it
        if keyed and kind != "deletes":
            calls["tier"] = lambda: con.tier("t")
        if not keyed:
            calls["history"] = lambda: list(table.subscribe("earliest", stop="now"))
        for call in calls.values():
            with pytest.raises(lh.LakeFileMissingError) as e:
                call()
            assert Path(str(e.value.context["path"])).name in names and e.value.code == 4004


@pytest.mark.parametrize("keyed", [True, False])
def test_a_log_is_not_trimmed_while_the_lake_lacks_a_file(tmp_path: Path, keyed: bool) -> None:
    with lh.connect(tmp_path / "data") as con:
        maintenance = con._server.service._maintenance  # type: ignore[attr-defined]
        maintenance.stop()  # which would trim at once when it hears of the round
        maintenance.join()
        table = tiered(con, keyed)
        write = table.upsert if keyed else table.append
        (path,) = (tmp_path / "data" / "lake").rglob("*.parquet")
        kept = path.read_bytes()
        for damaged in (None, kept[:-1]):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            con._server.service.maintain()  # type: ignore[attr-defined]
            assert start_offset(table) == 0
        path.write_bytes(kept)
        write(rows(50, 51))
        con.tier("t")
        con._server.service.maintain()  # type: ignore[attr-defined]
        assert start_offset(table) == 51
        assert table.scan().count() == 51
