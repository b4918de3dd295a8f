"""Who may write the text of a statement, and nothing else, reaches Lakehead's tables and nothing else."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lakehead as lh
from lakehead.api.sandbox import make_duckdb
from lakehead.cli import main as cli
from lakehead.env.scratch_folders import ScratchFolder

ORDERS = pa.table({"id": range(3), "city": ["Oslo", "Bergen", "Oslo"]})
SECRET = "a secret of the one who runs the statement"


@pytest.fixture(scope="module")
def con(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path_factory.mktemp("sql") / "data") as connection:
        connection.create_table("shop.orders", ORDERS.schema).append(ORDERS)
        yield connection


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, which is the current one, of files that hold the secret."""
    (tmp_path / "x.csv").write_text(f"a\n{SECRET}\n")
    (tmp_path / "x.json").write_text(f'{{"a": "{SECRET}"}}')
    pq.write_table(pa.table({"a": [SECRET]}), tmp_path / "x.parquet")
    with duckdb.connect(str(tmp_path / "x.duckdb")) as other:
        other.execute(f"create table t as select '{SECRET}' as a")
    with closing(sqlite3.connect(tmp_path / "x.sqlite")) as lite, lite:
        lite.execute("create table t (a text)")
    lite.close()
    monkeypatch.chdir(tmp_path)
    return tmp_path


ATTACKS = [
    "from 'x.csv'",
    "from '{folder}/x.parquet'",
    'select * from "x.json"',
    "summarize 'x.csv'",
    "describe from 'x.csv'",
    "from shop.orders where city in (select a from 'x.csv')",
    "with w as (from read_csv('x.csv')) from w",
    "from read_csv('{folder}/x.csv')",
    "from READ_CSV_AUTO(['x.csv'])",
    "from \"read_text\"('x.csv')",
    "from system.main.read_text('x.csv')",
    "from read_blob('x.*')",
    "from read_json('x.json')",
    "from read_parquet('x.parquet')",
    "from parquet_scan('x.parquet')",
    "from parquet_metadata('x.parquet')",
    "from read_duckdb('x.duckdb', table_name='t')",
    "from sqlite_scan('x.sqlite', 't')",
    "from sniff_csv('x.csv')",
    "from glob('*')",
    "from shop.orders, lateral (select * from glob('*'))",
    "select (select count(*) from glob('*'))",
    "select 1 union all select 2 from glob('*')",
    "pivot read_text('x.csv') on size using count(*)",
    "pivot (from shop.orders, \"glob\" /* so */ ('*')) on city using count(*)",
    "explain analyze select * from read_text('x.csv')",
    "from 'https://127.0.0.1:1/x.parquet'",
    "from 's3://bucket/x.parquet'",
    # What writes, as a table function.
    "from enable_profiling(save_location='{folder}/written.txt', format='json')",
    "from enable_logging(storage='file', storage_path='{folder}/written')",
    # Text within the text, which no check of names would see.
    "from query('from ''x.csv''')",
    "from query_table('x.csv')",
    "from query_table('orders')",
    "from json_execute_serialized_sql(json_serialize_sql('from ''x.csv'''))",
    # Addresses in this process's memory.
    "from arrow_scan(1, 1, 1)",
    "from pandas_scan(140000000000000)",
    "from python_map_function(1, 2, 3)",
    # Statements of every other kind.
    "copy (select 1) to '{folder}/written.csv'",
    "copy shop.orders to '{folder}/written.parquet'",
    "export database '{folder}/written'",
    "attach '{folder}/x.duckdb' as other",
    "attach '{folder}/written.duckdb' as other",
    "install httpfs",
    "load '{folder}/x.so'",
    "set enable_external_access = true",
    "set python_enable_replacements = true",
    "reset lock_configuration",
    "pragma enable_profiling='json'",
    "call enable_logging()",
    "create secret s (type s3)",
    "create macro m() as table from 'x.csv'",
    "create view shop.orders as select 1",
    "create or replace view lakehead_statement_1.shop.orders as select 1",
    "select 1; from 'x.csv'",
    # The catalogs of other statements.
    "from lakehead_statement_1.shop.orders",
    "from lakehead_statement_1.orders",
    "pivot lakehead_statement_1.shop.orders on city",
    # Python's variables.
    "from variable_of_the_caller",
    "from ORDERS",
]


def everything(folder: Path) -> dict[str, bytes]:
    """All files below, with their contents."""
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_statement_reads_tables_alone_and_writes_nothing(con: lh.Connection, files: Path, attack: str) -> None:
    variable_of_the_caller = ORDERS
    before = everything(files)
    with pytest.raises(lh.InvalidRequestError) as refused:
        con.sql(attack.format(folder=files)).fetchall()
    assert SECRET not in str(refused.value)
    assert everything(files) == before and variable_of_the_caller is ORDERS
    assert con.sql("select count(*) from shop.orders").fetchone() == (3,)


def test_a_relation_made_from_a_relation_is_as_closed(con: lh.Connection, files: Path) -> None:
    relation = con.sql("from shop.orders")
    with pytest.raises(lh.SqlError, match="frames="):
        relation.filter("city in (select a from read_csv('x.csv'))").fetchall()
    with pytest.raises(lh.SqlError):
        relation.query("r", "copy r to 'written.csv'")
    assert not (files / "written.csv").exists()


def test_the_duckdb_behind_it_opens_nothing_whatever_it_is_asked(files: Path) -> None:
    """What a check of the text misses stays without an effect."""
    before = everything(files)
    closed = make_duckdb(ScratchFolder("lakehead-test-"), unrestricted=False)
    for attack in [
        *(a for a in ATTACKS[: ATTACKS.index("from query('from ''x.csv''')")] if "glob" not in a),
        "set enable_external_access = true",
        "set allowed_directories = ['/']",
        "set allowed_configs = ['threads']",
        "set temp_directory = '.'",
        "reset lock_configuration",
        "install httpfs",
        "load 'x.so'",
        "attach 'x.duckdb'",
        "copy (select 1) to 'written.csv'",
    ]:
        if "enable_" not in attack or attack.startswith("set"):
            with pytest.raises(duckdb.Error):
                closed.execute(attack.format(folder=files)).fetchall()
    assert everything(files) == before


def test_text_that_is_trusted_as_code_does_all_that_duckdb_can(con: lh.Connection, files: Path) -> None:
    assert con.sql("from 'x.csv'", unrestricted=True).fetchall() == [(SECRET,)]
    assert con.sql("select count(*) from shop.orders, 'x.csv'", unrestricted=True).fetchone() == (3,)
    assert not con.sql("copy (select id from shop.orders) to 'ids.csv'", unrestricted=True).fetchall()
    assert (files / "ids.csv").read_text().split() == ["id", "0", "1", "2"]
    con.sql("attach 'x.duckdb' as other", unrestricted=True)
    assert con.sql("select count(*) from other.t, shop.orders", unrestricted=True).fetchone() == (3,)
    with pytest.raises(lh.TableNotFoundError):
        con.sql("from other.t")
    with pytest.raises(lh.SqlError, match="append"):
        con.sql("insert into shop.orders values (1, 'x')", unrestricted=True)


def test_files_are_still_written_by_the_methods_of_a_relation(con: lh.Connection, files: Path) -> None:
    relation = con.sql("select sum(id) as total, city from shop.orders group by city order by city")
    relation.write_csv("out.csv", header=True)
    relation.filter("city = 'Oslo'").to_parquet("out.parquet", compression="zstd")
    assert (files / "out.csv").read_text().split() == ["total,city", "1,Bergen", "2,Oslo"]
    assert pq.read_table(files / "out.parquet").column("city").to_pylist() == ["Oslo"]
    with pytest.raises(lh.SqlError, match="no Oslo"):
        con.sql("select error('no ' || city) from shop.orders where city = 'Oslo'").write_csv("failed.csv")


def test_what_spills_lies_in_a_folder_of_this_user_alone(con: lh.Connection) -> None:
    folder = con.sql("select current_setting('temp_directory')").fetchone()
    assert folder is not None and os.stat(folder[0]).st_mode & 0o777 == 0o700
    assert not os.path.exists(".tmp")


def test_the_command_line_is_as_closed(con: lh.Connection, files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    call = ["--uri", con.uri, "sql", "select a from 'x.csv'"]
    assert cli.main(call) == 2
    refused = capfd.readouterr()
    assert SECRET not in refused.out + refused.err and "unrestricted" in refused.err
    assert cli.main([*call, "--unrestricted"]) == 0
    assert SECRET in capfd.readouterr().out
