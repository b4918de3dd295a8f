"""Files of a lake that are cut, or have wrong bits: an error that names the file, and never a dead process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lakehead as lh
from lakehead.env.recently_used import RecentlyUsed
from lakehead.iceberg import planner
from lakehead.iceberg.avro_file import edit_avro

KINDS = {"manifests": "*.avro", "metadata": "*.metadata.json", "data": "*.parquet"}
WAYS = ("cut", "a bit", "bytes", "zeros")
CASES = 25


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[lh.Table, Path]]:
    """A table of three rounds, with deletes and superseded rows."""
    folder = tmp_path_factory.mktemp("lake")
    schema = pa.schema([("id", pa.int64()), ("s", pa.string()), ("v", pa.float64())])
    with lh.connect(folder) as con:
        table = con.create_table("t", schema, primary_key=["id"], buckets=2, lake="iceberg")
        values = np.random.default_rng(1)
        for first in (0, 50, 100):
            ids = np.arange(first, first + 100)
            table.upsert(pa.table({"id": ids, "s": [f"row {i}" for i in ids], "v": values.random(100)}))
            con.tier("t")
        table.delete([7, 120])
        yield table, folder


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read reads the manifests, as a process does at first."""
    monkeypatch.setattr(planner, "_known", RecentlyUsed(0))


def damaged(data: bytes, way: str, draw: random.Random) -> bytes:
    at = draw.randrange(len(data))
    if way == "cut":
        return data[:at]
    out = bytearray(data)
    if way == "a bit":
        out[at] ^= 1 << draw.randrange(8)
    elif way == "bytes":
        for _ in range(draw.randrange(2, 20)):
            out[draw.randrange(len(out))] = draw.randrange(256)
    else:
        out[at : at + 32] = bytes(len(out[at : at + 32]))
    return bytes(out)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_an_error_that_names_the_file(lake: tuple[lh.Table, Path], kind: str, way: str) -> None:
    table, folder = lake
    right = table.scan().to_arrow().sort_by("id")
    in_lake = table.scan(tier="lake").to_arrow().sort_by("id")
    files = sorted(folder.rglob(KINDS[kind]))
    refused = 0
    for case in range(CASES):
        draw = random.Random(f"{kind} {way} {case}")
        file = draw.choice(files)
        whole = file.read_bytes()
        file.write_bytes(damaged(whole, way, draw))
        try:
            for tier, rows in (("union", right), ("lake", in_lake)):
                try:
                    found = table.scan(tier=tier).to_arrow().sort_by("id")
                    # Of wrong bits only pages of Parquet have a checksum.
                    assert way != "cut" or found.equals(rows), (case, file)
                except lh.CorruptionError as e:
                    assert isinstance(e, lh.LakeStateError) or file.name in str(e), (case, file)
                    refused += 1
                except lh.LakeheadError:
                    assert way != "cut", (case, file)
        finally:
            file.write_bytes(whole)
    # A bit may be of a text that nobody needs, and what is known of a metadata file is not read again.
    assert refused or way == "a bit" or kind == "metadata"
    assert table.scan().to_arrow().sort_by("id").equals(right)


@pytest.mark.parametrize("named", ["manifest_path", "file_path"])
def test_an_address_that_cannot_be_is_the_fault_of_the_file_that_names_it(
    lake: tuple[lh.Table, Path], named: str
) -> None:
    def spoil(record: dict[str, Any]) -> None:
        of = record.get("data_file", record)
        if named in of:
            of[named] = of[named].replace(".", "\0")

    table, folder = lake
    refused = 0
    for file in sorted(folder.rglob("*.avro")):
        whole = file.read_bytes()
        file.write_bytes(edit_avro(whole, spoil, str(file)))
        try:
            table.scan(tier="lake").to_arrow()
        except lh.CorruptionError as e:
            assert f"{file.name} is damaged" in str(e)
            refused += 1
        finally:
            file.write_bytes(whole)
    assert refused  # of the files of older snapshots none is read
    assert table.scan(tier="lake").to_arrow().num_rows == 200


def test_each_wrong_bit_of_a_page_is_found(lake: tuple[lh.Table, Path]) -> None:
    table, folder = lake
    files = {str(f): f for f in folder.rglob("*.parquet")}
    (file,) = [f for path, f in files.items() if path.endswith(table.lake.files()["path"][0].as_py().split("/")[-1])]
    whole = file.read_bytes()
    (chunk,) = [
        c
        for c in map(pq.read_metadata(file).row_group(0).column, range(pq.read_metadata(file).num_columns))
        if c.path_in_schema == "v"
    ]
    end = chunk.data_page_offset + chunk.total_compressed_size
    for at in range(end - 300, end, 7):
        out = bytearray(whole)
        out[at] ^= 4
        file.write_bytes(out)
        with pytest.raises(lh.CorruptionError, match=file.name):
            table.scan(["v"], tier="lake").to_arrow()
    file.write_bytes(whole)
    assert table.scan(["v"], tier="lake").to_arrow().num_rows == 200
