"""Manifests are read as PyIceberg reads them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table

from lakehead.errors import CorruptionError
from lakehead.iceberg.manifests import manifests_of, scan_of


def _same(table: Table) -> int:
    """Compare all that both read of all snapshots; returns how many entries there are."""
    entries = 0
    for snapshot in table.metadata.snapshots:
        ours, theirs = manifests_of(snapshot, table.io), snapshot.manifests(table.io)
        assert [list(m._data) for m in ours] == [list(m._data) for m in theirs]
        for mine, other in zip(ours, theirs, strict=True):
            for discard in (True, False):
                found = mine.fetch_manifest_entry(table.io, discard)
                assert found == other.fetch_manifest_entry(table.io, discard)
                entries += len(found)
        files = {t.file.file_path: t for t in table.scan(snapshot_id=snapshot.snapshot_id).plan_files()}
        planned = {t.file.file_path: t for t in scan_of(table, snapshot_id=snapshot.snapshot_id).plan_files()}
        assert {p: (t.file, t.delete_files) for p, t in planned.items()} == {
            p: (t.file, t.delete_files) for p, t in files.items()
        }
    return entries


def test_of_rounds_with_deletes(keyed: Any) -> None:
    for keys in ((1, 2, 3), (2, 3), (3, 4)):
        keyed.write(*keys)
        keyed.round()
    keyed.delete(1)
    keyed.round()
    assert _same(keyed.load()) >= 10


@pytest.mark.parametrize("version", ["1", "2"])
def test_of_others_whose_columns_and_partitions_change(tmp_path: Path, version: str) -> None:
    catalog = SqlCatalog("c", uri=f"sqlite:///{tmp_path}/c.db", warehouse=f"file://{tmp_path}")
    with closing(catalog):
        _changed_by_others(catalog, version)


def _changed_by_others(catalog: SqlCatalog, version: str) -> None:
    catalog.create_namespace("n")
    rows = pa.table({"a": pa.array([1, 2], pa.int32()), "b": ["x", "y"]})
    table = catalog.create_table("n.t", rows.schema, properties={"format-version": version})
    table.append(rows)
    with table.update_spec() as spec:
        spec.add_identity("b")
    table.append(rows)
    with table.update_schema() as schema:
        schema.update_column("a", table.schema().find_type("a").__class__())
        schema.add_column("c", table.schema().find_type("b"))
    table.append(pa.table({"a": pa.array([3], pa.int32()), "b": ["z"], "c": [None]}, schema=table.schema().as_arrow()))
    table.delete("b = 'x'")
    assert len(table.specs()) == 2
    assert _same(table) > 10


def test_a_list_that_names_no_schema_or_is_none(keyed: Any) -> None:
    keyed.write(1)
    keyed.round()
    table = keyed.load()
    io, snapshot = table.io, table.current_snapshot()
    path = f"{table.location()}/metadata/broken.avro"
    broken = snapshot.model_copy(update={"manifest_list": path})
    whole = io.new_input(snapshot.manifest_list).open().read()
    for text in (whole.replace(b"avro.schema", b"avro.sxhema"), whole[:9], b"", b"text", whole[:-1], whole + b"."):
        with io.new_output(path).create() as stream:
            stream.write(text)
        with pytest.raises(CorruptionError, match=r"broken\.avro is damaged"):
            manifests_of(broken, io)
        io.delete(path)
    with pytest.raises(FileNotFoundError):
        manifests_of(broken, io)


def test_a_manifest_that_ends_with_a_block_before_its_last(keyed: Any) -> None:
    """Nothing in it tells that: its list does."""
    keyed.write(1)
    keyed.round()
    table = keyed.load()
    (manifest,) = manifests_of(table.current_snapshot(), table.io)
    file = table.io.new_input(manifest.manifest_path)
    whole = file.open().read()
    header = whole.index(whole[-16:]) + 16
    table.io.delete(manifest.manifest_path)
    with table.io.new_output(manifest.manifest_path).create() as stream:
        stream.write(whole[:header])
    with pytest.raises(CorruptionError, match="it has 0 entries, and its list says 1"):
        manifest.fetch_manifest_entry(table.io)
