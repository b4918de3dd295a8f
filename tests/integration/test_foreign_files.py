"""Files and settings that other engines leave in a lake table: each answer is right, or one typed error says what to
do; and what is not the table's own is never removed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import Transaction
from pyiceberg.table.update import SetLocationUpdate
from pyiceberg.typedef import Record
from pyiceberg.types import DoubleType

import lakehead as lh
from lakehead.iceberg.rowdelta import RowDelta

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.string())])
DELETES = DataFileContent.POSITION_DELETES


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as con:
        yield con


def made(con: lh.Connection, rows: int = 3, name: str = "t") -> lh.Table:
    table = con.create_table(name, SCHEMA, lake="iceberg")
    write(table, range(rows))
    con.tier(name)
    return table


def write(table: lh.Table, numbers: Iterable[int]) -> None:
    table.append([{"n": n, "s": "own"} for n in numbers])


def add(
    table: lh.Table,
    path: Path,
    rows: int,
    *,
    content: DataFileContent = DataFileContent.DATA,
    form: FileFormat = FileFormat.PARQUET,
) -> None:
    """Commit a file as another engine does."""
    ice = table.lake.iceberg()
    transaction = Transaction(ice)
    delta = RowDelta(transaction, {})
    file = DataFile.from_args(
        content=content,
        file_path=f"file://{path}",
        file_format=form,
        partition=Record(None),
        file_size_in_bytes=os.path.getsize(path),
        record_count=rows,
    )
    file.spec_id = ice.metadata.default_spec_id
    (delta.append_data_file if content is DataFileContent.DATA else delta.add_deletes)(file)
    delta.commit()
    transaction.commit_transaction()


def stranger(table: lh.Table, path: Path, rows: int = 4) -> None:
    pq.write_table(pa.table({"n": range(100, 100 + rows), "s": ["theirs"] * rows}), path)
    add(table, path, rows)


def answers(con: lh.Connection, table: lh.Table) -> dict[str, int]:
    name = table.name
    return {
        "scan": table.scan().to_arrow().num_rows,
        "count": table.scan().count(),
        "where": table.scan(where="n >= 0").to_arrow().num_rows,
        "sql": con.sql(f"select count(*) from {name}").fetchall()[0][0],
        "sql where": con.sql(f"select count(s) from {name} where n >= 0").fetchall()[0][0],
        "lake": table.scan(tier="lake").to_arrow().num_rows,
        "status": table.status().num_rows and table.scan().count(),
    }


def test_a_delete_file_that_names_what_is_nowhere_deletes_what_is_there(con: lh.Connection, tmp_path: Path) -> None:
    """Addresses of unknown storages, nulls, and positions that no file has."""
    table = made(con)
    theirs = tmp_path / "theirs.parquet"
    stranger(table, theirs)
    at = f"file:{theirs}"
    named = [at, "abfss://c@a.dfs.core.windows.net/x", "weird://c/x", None, at, at, at]
    positions = [0, 0, 0, 1, None, 99, -1]
    pq.write_table(
        pa.table({"file_path": pa.array(named, pa.string()), "pos": pa.array(positions, pa.int64())}),
        tmp_path / "deletes.parquet",
    )
    add(table, tmp_path / "deletes.parquet", len(named), content=DELETES)
    assert set(answers(con, table).values()) == {6}
    write(table, [50])
    con.tier("t")
    assert set(answers(con, table).values()) == {7}


@pytest.mark.parametrize("positions", [pa.array([0.5]), pa.array(["x"]), pa.array([[0]])], ids=str)
def test_a_delete_file_without_positions_is_named(con: lh.Connection, tmp_path: Path, positions: pa.Array) -> None:
    table = made(con)
    stranger(table, tmp_path / "theirs.parquet")
    named = [f"file://{tmp_path}/theirs.parquet"]
    pq.write_table(pa.table({"file_path": named, "pos": positions}), tmp_path / "deletes.parquet")
    add(table, tmp_path / "deletes.parquet", 1, content=DELETES)
    for read in (lambda: table.scan().to_arrow(), lambda: table.scan().count()):
        with pytest.raises(lh.CorruptionError, match=r"deletes\.parquet"):
            read()


def test_orc_is_a_typed_stop_for_all_that_reads(con: lh.Connection, tmp_path: Path) -> None:
    table = made(con)
    orc.write_table(pa.table({"n": [7], "s": ["theirs"]}), tmp_path / "x.orc")
    add(table, tmp_path / "x.orc", 1, form=FileFormat.ORC)
    reads: list[Callable[[], object]] = [
        lambda: table.scan().to_arrow(),
        lambda: table.scan().count(),
        lambda: con.sql("select * from t").fetchall(),
        table.lake.files,
    ]
    for read in reads:
        with pytest.raises(lh.LakeStateError, match=r"x\.orc.*Parquet"):
            read()


def test_a_name_that_is_used_again_is_another_file(con: lh.Connection, tmp_path: Path) -> None:
    table = made(con)
    path = tmp_path / "batch.parquet"
    for count in (1, 2, 5):
        pq.write_table(pa.table({"n": [500] * count, "s": ["q"] * count}), path)
        table.lake.iceberg().add_files([f"file://{path}"])
        assert set(answers(con, table).values()) == {3 + count}
        table.lake.iceberg().delete("n == 500")
        assert set(answers(con, table).values()) == {3}


def test_a_delete_file_of_the_same_name_and_size_is_another_one(con: lh.Connection, tmp_path: Path) -> None:
    theirs, deletes = tmp_path / "theirs.parquet", tmp_path / "deletes.parquet"
    for name, position in (("a", 0), ("b", 2)):
        table = made(con, name=name)
        stranger(table, theirs)
        pq.write_table(pa.table({"file_path": [f"file://{theirs}"], "pos": [position]}), deletes)
        add(table, deletes, 1, content=DELETES)
        left = table.scan(where="n >= 100").to_arrow()["n"].to_pylist()
        assert left == [n for n in range(100, 104) if n != 100 + position]


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        (pa.array(["7", "8"]), 1),
        (pa.array(["7", "x"]), None),
        (pa.array([{"a": 1}]), None),
        (pa.array([[1]]), None),
        (pa.array([7.0, 8.0]), 1),
    ],
    ids=str,
)
def test_values_of_another_type_are_read_or_one_error(
    con: lh.Connection, tmp_path: Path, values: pa.Array, kept: int | None
) -> None:
    """With a condition as without: a file without field ids may call a column as the table does."""
    table = made(con, 1)
    pq.write_table(pa.table({"n": values, "s": ["theirs"] * len(values)}), tmp_path / "theirs.parquet")
    add(table, tmp_path / "theirs.parquet", len(values))
    if kept is None:
        for how in ({}, {"where": "n = 7"}):
            with pytest.raises(lh.LakeStateError, match="do not fit"):
                table.scan(**how).to_arrow()
        with pytest.raises(lh.LakeStateError, match="do not fit"):
            con.sql("select * from t where n = 7").fetchall()
        return
    assert table.scan().to_arrow().num_rows == 1 + len(values)
    assert table.scan(where="n = 7").to_arrow().num_rows == kept
    assert len(con.sql("select * from t where n = 7").fetchall()) == kept


NESTED = {
    "list": (pa.list_(pa.int64()), [[1], None]),
    "struct": (pa.struct([("a", pa.int64())]), [{"a": 1}, None]),
    "map": (pa.map_(pa.string(), pa.int64()), [[("k", 1)], None]),
}


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.parametrize(
    "theirs", [pa.nulls(2), pa.array([7, None]), pa.array(["x", None])], ids=["null", "int", "text"]
)
def test_nested_columns_of_another_type_are_null_or_one_error(
    con: lh.Connection, tmp_path: Path, kind: str, theirs: pa.Array
) -> None:
    """Writers write a column without values as one of nulls."""
    t, values = NESTED[kind]
    table = con.create_table("t", pa.schema([("c", t)]), lake="iceberg")
    table.append(pa.table({"c": pa.array(values, t)}))
    con.tier("t")
    pq.write_table(pa.table({"c": theirs}), tmp_path / "theirs.parquet")
    add(table, tmp_path / "theirs.parquet", 2)
    if theirs.null_count == 2:
        assert table.scan().to_arrow()["c"].null_count == 3
        assert con.sql("select count(*), count(c) from t").fetchall() == [(4, 1)]
    else:
        with pytest.raises(lh.LakeStateError, match="do not fit"):
            table.scan().to_arrow()


def test_text_in_views_is_read_with_a_condition(con: lh.Connection, tmp_path: Path) -> None:
    table = made(con, 1)
    rows = pa.table({"n": [7], "s": pa.array(["theirs"], pa.string_view())})
    pq.write_table(rows, tmp_path / "theirs.parquet")
    add(table, tmp_path / "theirs.parquet", 1)
    assert table.scan(where="s = 'theirs'").to_arrow()["n"].to_pylist() == [7]


@pytest.mark.parametrize("value", [1e300, -1e300, float("inf"), float("nan"), 0.5])
def test_a_number_too_large_for_a_float_is_no_infinity(con: lh.Connection, tmp_path: Path, value: float) -> None:
    table = con.create_table("f", [("f", "float32")], lake="iceberg")
    table.append([{"f": 1.5}])
    con.tier("f")
    with table.lake.iceberg().update_schema() as update:
        update.update_column("f", DoubleType())
    pq.write_table(pa.table({"f": [value]}), tmp_path / "theirs.parquet")
    add(table, tmp_path / "theirs.parquet", 1)
    if abs(value) == 1e300:
        for how in ({}, {"where": "f > 1e38"}):
            with pytest.raises(lh.LakeStateError, match="do not fit"):
                table.scan(**how).to_arrow()
    else:
        assert str(value) in map(str, table.scan().to_arrow()["f"].to_pylist())


def test_snapshots_are_listed_whatever_others_wrote_into_their_summaries(con: lh.Connection, tmp_path: Path) -> None:
    table = made(con)
    pq.write_table(pa.table({"n": [1], "s": ["theirs"]}), tmp_path / "theirs.parquet")
    table.lake.iceberg().add_files([f"file://{tmp_path}/theirs.parquet"], {"lakehead.epoch": "x"})
    assert table.lake.snapshots()["epoch"].to_pylist()[-1] is None


# ---- what is not the table's own is never removed -----------------------------------------------------------------


def upserted(con: lh.Connection, rounds: int = 6) -> lh.Table:
    table = con.create_table("t", SCHEMA, primary_key="n", lake="iceberg")
    for i in range(rounds):
        table.upsert([{"n": 1, "s": str(i)}])
        con.tier("t")
    return table


def files_in(folder: Path) -> set[str]:
    return {str(p) for p in folder.rglob("*") if p.is_file()}


def test_no_file_goes_while_others_may_share_it(con: lh.Connection, tmp_path: Path) -> None:
    table = upserted(con)
    with table.lake.iceberg().transaction() as change:
        change.set_properties({"gc.enabled": "false"})
    table.lake.compact()
    there = files_in(tmp_path / "data" / "lake")
    removes: list[Callable[[], object]] = [
        lambda: table.lake.expire("0s", keep=1),
        lambda: table.lake.remove_orphans("0s"),
        lambda: con.drop_table("t", purge=True),
    ]
    for remove in removes:
        with pytest.raises(lh.LakeStateError, match=r"gc\.enabled"):
            remove()
    assert files_in(tmp_path / "data" / "lake") == there
    assert table.get({"n": 1}) == {"n": 1, "s": "5"}
    with table.lake.iceberg().transaction() as change:
        change.set_properties({"gc.enabled": "true"})
    assert table.lake.expire("0s", keep=1).files


def test_a_lake_beside_its_data_stays_there(con: lh.Connection, tmp_path: Path) -> None:
    """Else a copy of the folder has files in common with it."""
    table = upserted(con)
    outside = f"file://{tmp_path}/out"
    with table.lake.iceberg().transaction() as change:
        change.set_properties({"write.data.path": outside})
    table.upsert([{"n": 2, "s": "x"}])
    stops: list[Callable[[], object]] = [lambda: con.tier("t"), lambda: table.lake.expire("0s", keep=1)]
    for stop in stops:
        with pytest.raises(lh.LakeStateError, match=r"write\.data\.path"):
            stop()
    assert table.scan().count() == 2
    with table.lake.iceberg().transaction() as change:
        change.remove_properties("write.data.path")
    con.tier("t")
    assert table.scan(tier="lake").count() == 2


def test_a_copy_removes_no_file_of_the_original(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.parquet"
    with lh.connect(tmp_path / "a") as con:
        table = made(con)
        pq.write_table(pa.table({"n": [700], "s": ["theirs"]}), theirs)
        table.lake.iceberg().add_files([f"file://{theirs}"])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with lh.connect(tmp_path / "b") as con:
        copied = con.table("t")
        copied.lake.iceberg().delete("n == 700")
        copied.lake.compact()
        copied.lake.expire("0s", keep=1)
        con.drop_table("t", purge=True)
    with lh.connect(tmp_path / "a") as con:
        assert con.table("t").scan().to_arrow().num_rows == 4


@pytest.mark.parametrize(
    "spelled", [lambda at: at + "/", lambda at: at.replace("file://", "file:")], ids=["/", "file:"]
)
def test_a_location_that_is_spelled_otherwise_is_the_tables_own(
    con: lh.Connection, tmp_path: Path, spelled: Callable[[str], str]
) -> None:
    table = made(con)
    ice = table.lake.iceberg()
    ice.catalog.commit_table(ice, (), (SetLocationUpdate(location=spelled(ice.location())),))
    write(table, [10])
    con.tier("t")
    con.drop_table("t", purge=True)
    assert not [p for p in files_in(tmp_path / "data" / "lake") if "catalog.db" not in p]


@pytest.mark.parametrize("how", ["property", "location"])
def test_a_lake_whose_metadata_others_moved_goes_on_after_a_restart(tmp_path: Path, how: str) -> None:
    with lh.connect(tmp_path / "a") as con:
        table = made(con)
        ice = table.lake.iceberg()
        if how == "property":
            with ice.transaction() as change:
                change.set_properties({"write.metadata.path": f"file://{tmp_path}/out"})
            stranger(table, tmp_path / "theirs.parquet")
        else:
            ice.catalog.commit_table(ice, (), (SetLocationUpdate(location=f"file://{tmp_path}/out"),))
        rows = table.scan().count()
    with lh.connect(tmp_path / "a") as con:
        table = con.table("t")
        assert table.scan().count() == rows
        table.append([{"n": 10, "s": "own"}])
        with pytest.raises(lh.LakeStateError, match=r"write\.metadata\.path|its location"):
            con.tier("t")
        assert table.scan().count() == rows + 1


def test_orphans_are_looked_for_in_the_tables_own_folder_only(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    others = tmp_path / "shared" / "others.parquet"
    others.write_bytes(b"x")
    os.utime(others, (1, 1))
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/c.db", "warehouse": f"file://{tmp_path}/w"}
    with lh.connect(tmp_path / "d", lake=lh.LakeConfig(name="w", catalog=catalog)) as con:
        table = made(con)
        ice = table.lake.iceberg()
        ice.catalog.commit_table(ice, (), (SetLocationUpdate(location=f"file://{tmp_path}/shared"),))
        table.append([{"n": 10, "s": "own"}])
        con.tier("t")
        with pytest.raises(lh.LakeStateError, match="another engine has put it"):
            table.lake.remove_orphans("1d")
        con.drop_table("t", purge=True)
    assert others.exists()


@pytest.mark.parametrize("odd", ["a#b", "a?b", "a%20b", "a\tb"])
def test_a_warehouse_that_addresses_cannot_hold_is_refused_before_anything_is_made(tmp_path: Path, odd: str) -> None:
    precious = tmp_path / "a" / "precious"
    precious.mkdir(parents=True)
    (precious / "doc").write_text("x")
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/c.db", "warehouse": f"file://{tmp_path}/{odd}"}
    with lh.connect(tmp_path / "d", lake=lh.LakeConfig(name="w", catalog=catalog)) as con:
        with pytest.raises(lh.InvalidPropertyError, match="warehouse"):
            con.create_table("t", SCHEMA, lake="iceberg")
        assert con.tables() == []
    assert (precious / "doc").read_text() == "x"


@pytest.mark.parametrize("warehouse", ["weird://x/y", "wh", "~/wh", "./wh"])
def test_a_warehouse_that_leads_nowhere_is_refused(tmp_path: Path, warehouse: str) -> None:
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/c.db", "warehouse": warehouse}
    with lh.connect(tmp_path / "d", lake=lh.LakeConfig(name="w", catalog=catalog)) as con:
        with pytest.raises(lh.InvalidPropertyError, match="warehouse"):
            con.create_table("t", SCHEMA, lake="iceberg")
        assert con.tables() == []


def test_bounds_tell_of_no_column_with_nan(con: lh.Connection) -> None:
    """Engines to which NaN is greater than all numbers would pass over files by them."""
    table = con.create_table("g", [("g", "float64"), ("h", "float64")], lake="iceberg")
    table.append([{"g": float("nan"), "h": 1.0}, {"g": -1.5, "h": 2.0}])
    con.tier("g")
    bounds = table.lake.iceberg().inspect.files()["readable_metrics"].to_pylist()[0]
    assert (bounds["g"]["upper_bound"], bounds["h"]["upper_bound"]) == (None, 2.0)
    assert table.scan(where="g > 0", tier="lake").count() == 1
