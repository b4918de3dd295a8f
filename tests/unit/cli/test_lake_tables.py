"""`inspect lake`: a whole lake table, one with files gone, and that nothing is touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import lakehead as lh
from lakehead.cli import main as cli
from lakehead.iceberg.table_report import metadata_file, read_lake_table


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A lake table of two rounds, in the second of which a row went."""
    with lh.connect(tmp_path / "odd é [x] +") as con:
        table = con.create_table("a.t", [("k", "int64"), ("day", "string")], primary_key="k", lake="iceberg")
        table.upsert([{"k": k, "day": "mon"} for k in range(3)])
        con.tier("a.t")
        table.delete([1])
        con.tier("a.t")
        return Path(table.lake.metadata_location.removeprefix("file://")).parents[1]


def seen(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(p), p.stat().st_mtime_ns) for p in folder.rglob("*"))


def test_a_whole_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = seen(folder)
    assert cli.main(["inspect", "lake", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "2 live rows in 1 data file, 1 delete file" in out and "all its files are there" in out
    assert '{"/0":3}' in out and '{"/0":4}' in out and "k_bucket: bucket[1](k)" in out
    assert cli.main(["inspect", "lake", metadata_file(str(folder)), "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["rows"], report["deleted"], len(report["snapshots"]), report["problems"]) == (3, 1, 2, [])
    assert cli.main(["inspect", "lake", str(folder), "--limit", "1"]) == 0
    assert "1 older snapshots are not shown" in capsys.readouterr().out
    for address in (f"file://{folder}", f"file://{metadata_file(str(folder))}"):  # as `metadata_location` tells it
        assert cli.main(["inspect", "lake", address]) == 0
        assert "all its files are there" in capsys.readouterr().out
    assert seen(folder) == before


def test_files_that_are_gone_or_cut(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = next(p for p in folder.rglob("*.parquet") if "delete" not in p.name)
    data.write_bytes(data.read_bytes()[:-1])
    (problem,) = read_lake_table(metadata_file(str(folder))).problems
    assert data.name in problem and "its manifest says" in problem
    data.unlink()
    assert cli.main(["inspect", "lake", str(folder), "-o", "json"]) == 5
    out, err = capsys.readouterr()
    assert "is gone" in json.loads(out)["problems"][0] and json.loads(err)["error"]["kind"] == "CorruptionError"
    for manifest in folder.rglob("*.avro"):
        manifest.unlink()
    assert cli.main(["inspect", "lake", str(folder)]) == 5
    assert "problem " in capsys.readouterr().out


def test_what_is_no_lake_table(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none").mkdir()
    for path in (tmp_path / "none", tmp_path / "missing", tmp_path / "missing.metadata.json"):
        assert cli.main(["inspect", "lake", str(path)]) == 2
        assert str(path) in capsys.readouterr().err
    Path(metadata_file(str(folder))).write_text("{}")
    assert cli.main(["inspect", "lake", str(folder)]) == 5
    assert "damaged" in capsys.readouterr().err
