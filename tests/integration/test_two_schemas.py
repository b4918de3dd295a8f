"""Rows of two schemas of one table are one table: in log, kv, checkpoint, round and union.

What no call offers yet is here, too: fields inside of columns that change. Tables get their second definition in
`metadata.db`, and the same change, with the same field ids, in the lake.
"""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import DoubleType, IntegerType, LongType

import lakehead as lh
from lakehead.config import LakeConfig
from lakehead.env import Env
from lakehead.iceberg.contract import DEFINITION, LakeContract
from lakehead.iceberg.data_files import lake_arrow_schema
from lakehead.iceberg.lake_catalog import LakeCatalog
from lakehead.protocol.messages import TableInfo
from lakehead.protocol.schemas import schema_to_text
from lakehead.server.endpoint import LocalEndpoint
from lakehead.server.metadata import MetadataStore
from lakehead.server.notes import MakeCheckpoint
from lakehead.types import FIELD_ID, Schemas, TableDescriptor, TablePath, TableSchema, field_id

OLD = pa.schema(
    [
        pa.field("k", pa.int64(), False),
        ("n", pa.int32()),
        ("f", pa.float32()),
        ("gone", pa.string()),
        ("spot", pa.struct([("x", pa.int32()), ("y", pa.int32())])),
    ]
)
NEW = pa.schema(
    [
        ("note", pa.int32()),
        ("share", pa.float64()),
        pa.field("k", pa.int64(), False),
        ("n", pa.int64()),
        ("spot", pa.struct([("x_2", pa.int32()), ("y", pa.int64())])),
    ]
)
WIDER = pa.schema([("note", pa.int32()), OLD.field(0), ("n", pa.int64()), ("f", pa.float64()), *list(OLD)[3:]])
NAMES_OF_OLD = {"share": "f", "x_2": "x"}
BIG = 1 << 40


def old(k: int, n: int) -> dict[str, Any]:
    return {"k": k, "n": n, "f": n / 2, "gone": "old", "spot": None if k % 7 == 3 else {"x": k, "y": n}}


def read_as_new(row: dict[str, Any]) -> dict[str, Any]:
    spot = row["spot"] and {"x_2": row["spot"]["x"], "y": row["spot"]["y"]}
    return {"note": None, "share": row["f"], "k": row["k"], "n": row["n"], "spot": spot}


def new(k: int, n: int) -> dict[str, Any]:
    return {"note": 7, "share": n / 2 + 1e-9, "k": k, "n": n, "spot": {"x_2": k, "y": BIG}}


def evolved(schema: TableSchema, columns: pa.Schema, *, note: int) -> TableSchema:
    """The columns with the ids that those of the schema have, and one for ``note``."""

    def fields(wanted: Any, there: dict[str, pa.Field]) -> Iterator[pa.Field]:
        for f in wanted:
            before = there.get(NAMES_OF_OLD.get(f.name, f.name))
            number = note if before is None else field_id(before)
            if before is not None and pa.types.is_struct(f.type):
                inside = {c.name: c for c in before.type.fields}
                f = f.with_type(pa.struct(list(fields(f.type.fields, inside))))
            yield f.with_metadata({FIELD_ID: str(number)})

    return TableSchema.of(schema.id + 1, pa.schema(list(fields(columns, {f.name: f for f in schema.fields}))))


def change_schema(folder: Path, columns: pa.Schema = NEW, *, lake: bool = True) -> None:
    """What changing a table's schema will do, while nobody has the folder open; ``lake`` is False for half of it."""
    path = str(folder / "metadata.db")
    store = MetadataStore(path, Env.system())
    desc = store.table(TablePath.parse("t"))
    store.close()
    note = change_lake(folder, desc, columns) if lake and desc.lake is not None else 100
    after = evolved(desc.schemas.current, columns, note=note)
    changed = dataclasses.replace(desc, schemas=Schemas((*desc.schemas.known, after)))
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("update tables set info = ?", (msgspec.msgpack.encode(TableInfo.of(changed)),))
        db.execute("insert into schemas values (?, ?, ?)", (desc.table_id, after.id, schema_to_text(after)))
    db.close()
    if lake and desc.lake is not None:
        there = {f.name: f for f in lake_arrow_schema(LakeCatalog(LakeConfig(), str(folder)).load(desc).schema())}
        assert [field_id(there[f.name]) for f in after.fields] == [field_id(f) for f in after.fields]


def change_lake(folder: Path, desc: TableDescriptor, columns: pa.Schema) -> int:
    """The same change in the lake, with what tiering relies on, in one commit; returns the new column's id."""
    table = LakeCatalog(LakeConfig(), str(folder)).load(desc)
    with table.transaction() as transaction:
        with transaction.update_schema(allow_incompatible_changes=True) as update:
            update.add_column("note", IntegerType())
            update.update_column("n", LongType())
            update.update_column("f", DoubleType())
            if columns is NEW:
                update.rename_column("f", "share")
                update.update_column(("spot", "y"), LongType())
                update.rename_column(("spot", "x"), "x_2")
                update.delete_column("gone")
        schema = transaction.table_metadata.schema()
        definition = {DEFINITION: str(desc.schema_id + 1)}
        transaction.set_properties({**LakeContract(Schema(*schema.fields), table.spec()).to_properties(), **definition})
    return int(schema.find_field("note").field_id)


class Model:
    """The table's rows by key; of a log table all of them."""

    def __init__(self, *, keyed: bool) -> None:
        self.keyed = keyed
        self.rows: dict[int, dict[str, Any]] = {}

    def write(self, table: lh.Table, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            self.rows[row["k"]] = row
        (table.upsert if self.keyed else table.append)(rows)

    def change_schema(self) -> None:
        self.rows = {k: read_as_new(row) for k, row in self.rows.items()}


def require_equal(table: lh.Table, model: Model) -> None:
    wanted = sorted(model.rows.values(), key=lambda r: r["k"])

    def rows(found: pa.Table) -> list[dict[str, Any]]:
        return sorted(found.to_pylist(), key=lambda r: r["k"])

    assert table.schema.equals(NEW)
    found = table.scan().to_arrow()
    assert found.schema.equals(NEW)
    assert rows(found) == wanted and table.scan().count() == len(wanted)
    assert rows(table.scan(["k", "note"]).to_arrow()) == [{"k": r["k"], "note": r["note"]} for r in wanted]
    for where, holds in {
        "note is null": lambda r: r["note"] is None,
        "note = 7": lambda r: r["note"] == 7,
        "share > 60": lambda r: r["share"] > 60,
        "n > 1000": lambda r: r["n"] > 1000,
        "n < 20 and share is not null": lambda r: r["n"] < 20,
        "spot.x_2 = 5 or spot is null": lambda r: r["spot"] is None or r["spot"]["x_2"] == 5,
    }.items():
        assert rows(table.scan(where=where).to_arrow()) == [r for r in wanted if holds(r)], where
    if model.keyed:
        assert rows(table.lookup([r["k"] for r in wanted])) == wanted


@pytest.fixture(params=["log", "keyed"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_log_kv_and_checkpoint(kind: str, compression: str, tmp_path: Path) -> None:
    keyed, folder = kind == "keyed", tmp_path / "data"
    model = Model(keyed=keyed)
    how: dict[str, Any] = {"primary_key": ["k"]} if keyed else {}
    with lh.connect(folder) as con:
        table = con.create_table("t", OLD, compression=compression, **how)
        model.write(table, [old(k, k) for k in range(100)])
        checkpoint(con)
        model.write(table, [old(k, -k) for k in (range(50, 150) if keyed else range(100, 200))])
    change_schema(folder)
    model.change_schema()
    with lh.connect(folder) as con:
        table = con.table("t")
        require_equal(table, model)
        records = pa.concat_tables(pa.table(b.rows) for b in table.subscribe(start="earliest", stop="now"))
        assert records.schema.names[: len(NEW)] == NEW.names
        assert len(records) == (100 + 2 * 50 + 50 if keyed else 200)
        assert set(records.column("note").to_pylist()) == {None}
        model.write(table, [new(k, BIG + k) for k in (range(20, 70) if keyed else range(200, 260))])
        if keyed:
            table.upsert([{"k": 3, "note": 9}, {"k": 1000, "note": 1}])
            model.rows[3]["note"] = 9
            model.rows[1000] = {"note": 1, "share": None, "k": 1000, "n": None, "spot": None}
            table.delete([1000, 0, 60])
            for k in (1000, 0, 60):
                del model.rows[k]
        require_equal(table, model)
        checkpoint(con)
        require_equal(table, model)
    for _ in range(2):
        with lh.connect(folder) as con:
            require_equal(con.table("t"), model)


def checkpoint(con: lh.Connection) -> None:
    """Of the only table."""
    assert isinstance(con._server, LocalEndpoint)
    [table] = con._server.service._tables.open_tables()
    for tablet in table.tablets.values():
        tablet.apply_note(MakeCheckpoint())


def test_round_and_union(kind: str, tmp_path: Path) -> None:
    keyed, folder = kind == "keyed", tmp_path / "data"
    model = Model(keyed=keyed)
    how: dict[str, Any] = {"primary_key": ["k"]} if keyed else {}
    with lh.connect(folder) as con:
        table = con.create_table("t", OLD, lake="iceberg", **how)
        model.write(table, [old(k, k) for k in range(100)])
        con.tier("t")
        model.write(table, [old(k, -k) for k in (range(50, 150) if keyed else range(100, 200))])
        assert table.scan().to_arrow().num_rows == len(model.rows)
    change_schema(folder)
    model.change_schema()
    with lh.connect(folder) as con:
        table = con.table("t")
        require_equal(table, model)
        model.write(table, [new(k, BIG + k) for k in (range(20, 70) if keyed else range(200, 260))])
        require_equal(table, model)
        assert con.tier("t").rows
        require_equal(table, model)
        assert table.scan(tier="hot").count() == 0
        model.write(table, [new(k, k) for k in (range(0, 170, 10) if keyed else range(300, 320))])
        require_equal(table, model)
    with lh.connect(folder) as con:
        con.tier("t")
        require_equal(con.table("t"), model)


def test_a_lake_of_an_older_schema_follows(tmp_path: Path) -> None:
    """As a crash leaves it, or a catalog that was away."""
    with lh.connect(tmp_path / "data") as con:
        con.create_table("t", OLD, lake="iceberg").append([old(1, 1)])
        con.tier("t")
    change_schema(tmp_path / "data", WIDER, lake=False)
    with lh.connect(tmp_path / "data") as con:
        assert con.table("t").scan().to_arrow().to_pylist() == [{"note": None, **old(1, 1)}]
        con.table("t").append([{"note": 1, **old(2, 2), "n": BIG}])
        con.tier("t")
        assert con.table("t").scan(where="note = 1", tier="lake").to_arrow()["n"].to_pylist() == [BIG]


def test_a_log_is_trimmed_whose_lake_has_not_followed_yet(tmp_path: Path) -> None:
    with lh.connect(tmp_path / "data") as con:
        con.create_table("t", OLD, lake="iceberg").append([old(1, 1)])
        con.tier("t")
    change_schema(tmp_path / "data", WIDER, lake=False)
    with lh.connect(tmp_path / "data") as con:
        assert isinstance(con._server, LocalEndpoint)
        service = con._server.service
        desc = service._metadata.table(TablePath.parse("t"))
        lake = service._definitions._lake_state()
        assert list(lake.proven_offsets(desc).values()) == [1]


def test_files_of_a_narrower_schema_are_skipped_by_their_bounds(tmp_path: Path) -> None:
    with lh.connect(tmp_path / "data") as con:
        con.create_table("t", OLD, lake="iceberg").append([old(k, k) for k in range(100)])
        con.tier("t")
    change_schema(tmp_path / "data", WIDER)
    wanted = [{**old(k, k), "note": None} for k in range(100)]
    with lh.connect(tmp_path / "data") as con:
        table = con.table("t")
        for where, holds in {
            "n > 90": lambda r: r["n"] > 90,
            f"n in (7, {BIG})": lambda r: r["n"] == 7,
            f"n = {BIG}": lambda r: False,
            "f >= 49.1": lambda r: r["f"] >= 49.1,
            "note is null": lambda r: True,
            "note > 0": lambda r: False,
        }.items():
            found = table.scan(where=where).to_arrow()
            assert found.schema.equals(WIDER)
            assert sorted(found.to_pylist(), key=lambda r: r["k"]) == [r for r in wanted if holds(r)], where
