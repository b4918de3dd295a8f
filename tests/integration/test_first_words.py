"""What people type first: inputs of every shape, keys of every shape, what things say they are."""

from __future__ import annotations

import datetime as dt
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

import lakehead as lh

SCHEMA = pa.schema([pa.field("id", pa.int64(), False), ("v", pa.float64()), ("w", pa.string())])


@pytest.fixture(scope="module")
def con(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path_factory.mktemp("first") / "data") as connection:
        connection.create_table("s.one", SCHEMA, primary_key=["id"], lake="iceberg")
        connection.create_table("s.two", SCHEMA.append(pa.field("r", pa.string())), primary_key=["id", "r"])
        yield connection


WHOLE = pa.table({"id": [1, 2], "v": [0.5, 1.5], "w": ["a", "b"]}, SCHEMA)
INPUTS: dict[str, tuple[Callable[[], Any], list[tuple[Any, ...]]]] = {
    "a row that lacks columns": (lambda: [{"id": 1}], [(1, None, None)]),
    "rows of different keys": (lambda: [{"id": 1}, {"w": "x", "id": 2}], [(1, None, None), (2, None, "x")]),
    "one dict": (lambda: {"id": 1, "v": 2}, [(1, 2.0, None)]),
    "a generator of rows": (lambda: ({"id": i} for i in range(2)), [(0, None, None), (1, None, None)]),
    "a generator of batches": (lambda: iter(WHOLE.to_batches() * 2), [(1, 0.5, "a"), (2, 1.5, "b")] * 2),
    "a list of batches": (lambda: WHOLE.to_batches(max_chunksize=1), [(1, 0.5, "a"), (2, 1.5, "b")]),
    "batches that lack columns": (
        lambda: [pa.table({"id": [1]}), WHOLE],
        [(1, None, None), (1, 0.5, "a"), (2, 1.5, "b")],
    ),
    "a dataset": (lambda: ds.dataset(WHOLE), [(1, 0.5, "a"), (2, 1.5, "b")]),
    "a frame": (lambda: pd.DataFrame({"w": ["z"], "id": [7]}), [(7, None, "z")]),
    "a reader": (lambda: WHOLE.to_reader(), [(1, 0.5, "a"), (2, 1.5, "b")]),
    "no row": (lambda: iter([]), []),
    "no row of some columns": (lambda: WHOLE.select(["id"]).slice(0, 0), []),
    "an empty frame": (lambda: pd.DataFrame({"id": [1]}).query("id > 5"), []),
}


@pytest.mark.parametrize("data", INPUTS)
def test_append_takes(con: lh.Connection, data: str) -> None:
    given, want = INPUTS[data]
    table = con.create_table(f"s.log_{list(INPUTS).index(data)}", SCHEMA)
    assert table.append(given()).rows == len(want)
    assert [tuple(r.values()) for r in table.scan().to_arrow().to_pylist()] == want
    with table.writer() as writer:
        writer.append(given())
    assert table.scan().count() == 2 * len(want)


@pytest.mark.parametrize(
    "data",
    [[{"v": 1.0}], [{"id": None}], [{"id": 1}, {"v": 1.0}], "text", 7, [{"id": 1}, WHOLE], [1, 2], iter([WHOLE, 3]),
     [WHOLE, pa.table({"id": ["x"]})], {"id": 1, "x": 2}],
)  # fmt: skip
def test_append_refuses_whole(con: lh.Connection, data: object) -> None:
    table = con.create_table("s.refuses", SCHEMA, if_not_exists=True)
    with pytest.raises(lh.InvalidRequestError) as refused:
        table.append(data)
    assert "rows for s.refuses" in str(refused.value)
    assert table.scan().count() == 0


def test_an_upsert_still_tells_not_given_from_null(con: lh.Connection) -> None:
    with pytest.raises(lh.SchemaMismatchError, match="same keys"):
        con.table("s.one").upsert([{"id": 1, "v": 1.0}, {"id": 2}])


def test_keys_in_every_shape(con: lh.Connection) -> None:
    one, two = con.table("s.one"), con.table("s.two")
    one.upsert(pa.table({"id": range(100, 110)}))
    two.upsert([{"id": i, "r": "a", "v": float(i)} for i in range(5)])
    assert one.lookup([100, 101]).num_rows == one.lookup([(100,), (101,)]).num_rows == 2
    assert two.lookup([(1, "a"), (9, "a"), (2, "a")])["v"].to_pylist() == [1.0, 2.0]
    assert two.get((3, "a")) == two.get({"id": 3, "r": "a"}) == {"id": 3, "v": 3.0, "w": None, "r": "a"}
    assert two.delete([(3, "a"), (4, "a"), (99, "a")]).rows == 2 and two.delete([(3, "a")]).rows == 0
    assert one.delete(range(100, 103)).rows == 3 and one.delete({"id": 103}).rows == 1


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda one, two: one.get([100, 101]), "one key"),
        (lambda one, two: two.get(1), "2 columns"),
        (lambda one, two: two.get((1,)), "tuple of 1"),
        (lambda one, two: two.lookup([(1, "a", 2)]), "tuple of 3"),
        (lambda one, two: two.lookup([{"id": 1}]), "lacks 'r'"),
        (lambda one, two: one.lookup([{"idd": 1}]), "did you mean 'id'"),
        (lambda one, two: one.delete("id = 3"), "not a condition"),
        (lambda one, two: one.delete([{"v": 3.0}]), "lacks 'id'"),
        (lambda one, two: one.get(None), "null"),
    ],
)
def test_a_wrong_key_is_told_from_another(con: lh.Connection, call: Callable[..., object], says: str) -> None:
    with pytest.raises(lh.InvalidRequestError, match=says):
        call(con.table("s.one"), con.table("s.two"))


def test_a_table_of_pandas_datetimes(con: lh.Connection) -> None:
    frame = pd.DataFrame(
        {"at": pd.to_datetime(["2026-01-01 10:00"]), "zoned": pd.to_datetime(["2026-01-01"], utc=True)}
    )
    frame = frame.astype({"at": "datetime64[ns]", "zoned": "datetime64[ns, UTC]"})
    table = con.create_table("s.frames", frame)
    assert [str(f.type) for f in table.schema] == ["timestamp[us]", "timestamp[us, tz=UTC]"]
    assert table.append(frame).rows == 1
    assert table.scan().to_arrow()["at"].to_pylist() == [dt.datetime(2026, 1, 1, 10)]
    with pytest.raises(lh.SchemaMismatchError, match="at"):
        table.append(
            pd.DataFrame({"at": [pd.Timestamp("2026-01-01") + pd.Timedelta(1, "ns")], "zoned": frame["zoned"]})
        )


def test_a_table_that_exists_is_given_back_whatever_else_is_asked_of_it(con: lh.Connection) -> None:
    asked = {"primary_key": ["id"], "if_not_exists": True}
    for more in ({}, {"freshness": "7s"}, {"buckets": 4}, {"lake": "iceberg", "durability": "os"}):
        table = con.create_table("s.one", SCHEMA, **asked, **more)
        assert table.buckets == 1 and table.properties["durability"] == "sync"
    with pytest.raises(lh.TableExistsError, match="columns or keys"):
        con.create_table("s.one", SCHEMA, if_not_exists=True)


def test_a_scan_of_a_time(tmp_path: Path) -> None:
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table("t", SCHEMA, lake="iceberg")
        before = dt.datetime.now(dt.UTC)
        for n in (1, 2):
            table.append([{"id": n}])
            con.tier("t")
        times = table.lake.snapshots().sort_by("committed_at")["committed_at"].to_pylist()
        assert [table.scan(snapshot=t).count() for t in (times[-1], dt.datetime.now(dt.UTC))] == [2, 2]
        if times[0] < times[1]:
            assert table.scan(snapshot=times[0]).count() == 1
        with pytest.raises(lh.SnapshotNotFoundError):
            table.scan(snapshot=before - dt.timedelta(days=1))
        for wrong in (dt.datetime.now(), "x", True):
            with pytest.raises(lh.InvalidRequestError):
                table.scan(snapshot=wrong)  # type: ignore[arg-type]


def test_things_say_what_they_are(tmp_path: Path) -> None:
    con = lh.connect(tmp_path / "data")
    table = con.create_table("shop.t", SCHEMA, lake="iceberg")
    result = table.append([{"id": 1}])
    subscription = table.subscribe("earliest", stop="now")
    things = {
        "Connection": con, "Table": table, "Scan": table.scan(where="w = '<b>'"), "Subscription": subscription,
        "TableLake": table.lake, "WriteResult": result, "TieringResult": con.tier("shop.t"),
        "Batch": next(subscription), "Writer": table.writer(),
    }  # fmt: skip
    for name, thing in things.items():
        assert repr(thing).startswith(f"{name}(") and "object at" not in repr(thing)
        shown = thing._repr_html_()
        assert shown.startswith("<table>") and name in shown and "<b>" not in shown
    things["Writer"].close()
    assert "shop.t" in repr(table) and "['id', 'v', 'w']" in repr(table) and "'shop.t'" in repr(things["Scan"])
    con.close()
    for name in ("Connection", "Table", "Scan"):
        assert "closed" in repr(things[name])


def test_a_forked_child_is_told_of_the_fork(tmp_path: Path) -> None:
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table("t", SCHEMA)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                table.append([{"id": 1}])
                said = "written"
            except lh.ClosedError as e:
                said = f"{e} {con!r}"
            os.write(writing, said.encode())
            os._exit(0)
        os.waitpid(child, 0)
        said = os.read(reading, 1000).decode()
        os.close(reading), os.close(writing)
        assert "forked" in said and "closed by a fork" in said
        assert table.scan().count() == 0


def test_the_name_of_one_column_is_one_column(con: lh.Connection) -> None:
    schema = pa.schema([("k", pa.int64()), ("a", pa.int64()), ("b", pa.int64()), ("ab", pa.int64())])
    table = con.create_table("s.letters", schema, primary_key="k")
    table.upsert([{"k": 1, "a": 1, "b": 2, "ab": 3}])
    assert table.scan("ab").to_arrow().to_pylist() == table.scan(columns="ab").to_arrow().to_pylist() == [{"ab": 3}]
    (batch,) = table.subscribe("full", columns="ab", stop="now")
    assert batch.rows.column_names[0] == "ab" and "a" not in batch.rows.column_names
    with pytest.raises(lh.SchemaMismatchError, match="non-null"):
        table.upsert([{"k": 1, "a": 7, "b": 7, "ab": 7}], columns="ab")
    with pytest.raises(lh.ColumnNotFoundError, match="'abc'"):
        table.scan("abc")
    assert table.get(1) == {"k": 1, "a": 1, "b": 2, "ab": 3}


@pytest.mark.parametrize(
    "target", ["localhost:9123", "lakehead:/127.0.0.1:9123", "lakehead:127.0.0.1:9123", "box.net:1"]
)
def test_an_address_is_not_taken_for_a_folder(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(lh.InvalidUriError, match="lakehead://host:port"):
        lh.connect(target)
    assert not list(tmp_path.iterdir())


def test_settings_of_the_wrong_kind(con: lh.Connection, tmp_path: Path) -> None:
    with pytest.raises(lh.InvalidRequestError, match="LakeConfig"):
        lh.connect(tmp_path / "x", lake={"type": "sql"})  # type: ignore[arg-type]
    with pytest.raises(lh.InvalidRequestError, match="properties"):
        lh.LakeConfig(catalog="sqlite:///x")  # type: ignore[arg-type]
    with pytest.raises(lh.InvalidRequestError, match="by name"):
        con.sql("select 1", frames=[WHOLE])  # type: ignore[arg-type]


def test_a_table_whose_lake_is_in_another_catalog_says_so(tmp_path: Path) -> None:
    other = lh.LakeConfig(
        catalog={"type": "sql", "uri": f"sqlite:///{tmp_path}/c.db", "warehouse": f"file://{tmp_path}/w"}
    )
    with lh.connect(tmp_path / "data", lake=other) as con:
        con.create_table("t", SCHEMA, lake="iceberg").append([{"id": 1}])
        con.tier("t")
    with lh.connect(tmp_path / "data") as con, pytest.raises(lh.LakeStateError, match="give lake= or --config"):
        con.table("t").scan()
    with lh.connect(tmp_path / "data", lake=other) as con:
        assert con.table("t").scan().count() == 1


def test_a_table_that_is_dropped_is_not_said_to_be_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with lh.connect(tmp_path / "data") as con:
        maintenance = con._server.service._maintenance  # type: ignore[attr-defined]
        tables = con._server.service._tables  # type: ignore[attr-defined]
        lakes = con._server.service._definitions._lake  # type: ignore[attr-defined]
        drop_lake = lakes.drop

        def drop(desc: Any, *, purge: bool) -> None:
            (live,) = tables._live.values()
            drop_lake(desc, purge=purge)
            maintenance.run()
            maintenance._maintain = lambda table: (_ for _ in ()).throw(lh.LakeStateError("gone"))
            monkey = tables.open_tables
            tables.open_tables = lambda: [live]
            maintenance.run()
            tables.open_tables = monkey
            del maintenance._maintain

        lakes.drop = drop
        con.create_table("t", SCHEMA, lake="iceberg").append([{"id": 1}])
        con.tier("t")
        con.drop_table("t", purge=True)
        assert con.tables() == [] and not caplog.records


def test_a_folder_that_would_be_memory_is_refused() -> None:
    with pytest.raises(lh.InvalidUriError, match="mkdtemp"):
        lh.connect(":memory:")


def test_rows_for_other_libraries(con: lh.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    con.create_table("s.three", SCHEMA).append(WHOLE)
    scan, relation = con.table("s.three").scan(), con.sql("from s.three")
    assert scan.to_polars().rows() == relation.pl().rows() == [(1, 0.5, "a"), (2, 1.5, "b")]
    assert scan.to_pandas().equals(relation.df())
    for package, calls in {"pandas": [scan.to_pandas], "polars": [scan.to_polars, relation.pl]}.items():
        monkeypatch.setitem(sys.modules, package, None)
        for call in calls:
            with pytest.raises(
                lh.MissingDependencyError, match=rf"^{package} is not installed: pip install .*{package}"
            ):
                call()
