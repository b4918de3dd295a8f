"""A table whose lake has another format than Iceberg: the model's, registered under a name of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.config import LakeConfig
from lakehead.env.clock import Clock
from lakehead.env.randomness import SeededRandomness
from lakehead.lake import formats
from lakehead.lake.marks import LakeVersion, mark_of
from lakehead.protocol.messages import LakeReply
from lakehead.server.lake_state import LakeOwner
from lakehead.testing.lake import MemoryLake
from lakehead.types import TableDescriptor, TabletKey

SCHEMA = pa.schema([pa.field("id", pa.int64(), False), ("v", pa.string())])


class ModelFormat:
    """Lakes in memory, as a `LakeFormat` and as its tables."""

    kinds = frozenset({"model"})

    def __init__(self) -> None:
        self.lakes: dict[str, MemoryLake] = {}
        self.versions: list[LakeVersion] = []

    def tables(self, config: LakeConfig, folder: str, clock: Clock) -> ModelFormat:
        return self

    def open(self, desc: TableDescriptor, info: LakeReply) -> MemoryLake:
        return self.lakes[desc.table_id].under(desc)

    def at(self, desc: TableDescriptor, info: LakeReply) -> MemoryLake:
        version = self.versions[int(info.metadata_location)]
        fixed = self.lakes[desc.table_id].under(desc)
        fixed.load = lambda: version  # type: ignore[method-assign]
        return fixed

    def serve(self, owner: LakeOwner) -> None:
        return

    def create(self, desc: TableDescriptor) -> None:
        self.lakes.setdefault(desc.table_id, MemoryLake(desc, SeededRandomness(len(self.lakes))))

    def require_alterable(self, desc: TableDescriptor) -> None:
        return

    def require_free(self, desc: TableDescriptor, *, besides: Sequence[str]) -> None:
        return

    def drop(self, desc: TableDescriptor, *, purge: bool) -> None:
        self.lakes.pop(desc.table_id)

    def info(self, desc: TableDescriptor, *, reading: bool = False) -> LakeReply:
        table = self.lakes[desc.table_id].under(desc)
        table.follow()
        self.versions.append(table.load())
        where = str(len(self.versions) - 1)
        return LakeReply(metadata_location=where, catalog_name="", catalog_properties={}, storage_properties={})

    def tiered_offsets(self, desc: TableDescriptor) -> Mapping[TabletKey, int]:
        mark = mark_of(self.lakes[desc.table_id].now().load())
        return mark.offsets if mark else {}

    def proven_offsets(
        self, desc: TableDescriptor, overwritten: Mapping[TabletKey, int] = {}
    ) -> Mapping[TabletKey, int]:
        mark = mark_of(self.lakes[desc.table_id].now().load())
        return mark.held(overwritten) if mark else {}

    def adopt(self, desc: TableDescriptor, ends: Mapping[TabletKey, int]) -> bool:
        return False


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelFormat]:
    module, found = ModuleType("tests_model_format"), ModelFormat()
    module.FORMAT = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tests_model_format", module)
    monkeypatch.setitem(formats._FORMATS, "model", "tests_model_format")
    formats.lake_format.cache_clear()
    yield found
    formats.lake_format.cache_clear()


def test_a_table_of_another_format_is_written_tiered_and_read(tmp_path: Path, model: ModelFormat) -> None:
    with lh.connect(tmp_path / "data") as con:
        keyed = con.create_table("t.keyed", SCHEMA, primary_key=["id"], lake="model")
        log = con.create_table("t.log", SCHEMA, lake="model")
        for table in (keyed, log):
            (table.upsert if table is keyed else table.append)([{"id": i, "v": "a"} for i in range(5)])
            assert con.tier(table.name).rows == 5
        keyed.upsert([{"id": 1, "v": "b"}])
        keyed.delete([{"id": 2}])
        assert con.tier("t.keyed").deletes == 2
        keyed.upsert([{"id": 3, "v": "c"}])
        log.append([{"id": 9, "v": "c"}])
        rows = [(0, "a"), (1, "b"), (3, "c"), (4, "a")]
        assert sorted((r["id"], r["v"]) for r in keyed.scan().to_arrow().to_pylist()) == rows
        assert keyed.scan().count() == 4 and keyed.scan(where="id > 0").count() == 3
        assert sorted(r["id"] for r in keyed.scan(tier="lake").to_arrow().to_pylist()) == [0, 1, 3, 4]
        assert con.sql("select count(*), max(v) from t.keyed where id > 0").fetchall() == [(3, "c")]
        assert sorted(r["id"] for r in log.scan().to_arrow().to_pylist()) == [0, 1, 2, 3, 4, 9]
        assert keyed.lake.snapshots()["is_current"].to_pylist() == [False, True]
        assert log.lake.files()["rows"].to_pylist() == [5]
        con.drop_table("t.log")
        assert len(model.lakes) == 1


@pytest.mark.parametrize("keyed", [False, True])
def test_a_table_of_another_format_is_altered(tmp_path: Path, model: ModelFormat, keyed: bool) -> None:
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table("t", SCHEMA, primary_key=["id"] if keyed else None, lake="model")
        put = table.upsert if keyed else table.append
        put([{"id": i, "v": "a"} for i in range(3)])
        con.tier("t")
        put([{"id": 3, "v": "b"}])
        with table.alter() as a:
            a.rename_column("v", "w").add_column("v", "int32", after="id")
        assert model.lakes[table.describe()["table_id"]].now().desc.schema == table.schema
        put([{"id": 4, "v": 7, "w": "c"}])
        wanted = [{"id": i, "v": None, "w": "a"} for i in range(3)]
        wanted += [{"id": 3, "v": None, "w": "b"}, {"id": 4, "v": 7, "w": "c"}]
        for _ in range(2):
            assert sorted(table.scan().to_arrow().to_pylist(), key=lambda r: r["id"]) == wanted
            con.tier("t")
        assert table.scan(tier="lake", where="v = 7").to_arrow().to_pylist() == wanted[4:]


def test_a_kind_that_nobody_knows_is_refused(tmp_path: Path, model: ModelFormat) -> None:
    with (
        lh.connect(tmp_path / "data") as con,
        pytest.raises(lh.InvalidPropertyError, match="'delta' is not supported: use 'iceberg' or 'model', or None"),
    ):
        con.create_table("t.a", SCHEMA, lake="delta")
