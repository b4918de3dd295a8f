"""`lakehead.spark.lookup_join` adds what a keyed table has for each row, to batches and streams."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import lakehead as lh
import lakehead.spark as lhs
from lakehead.errors import SchemaChangedError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = pytest.mark.spark
MiB = 1 << 20


@pytest.fixture(scope="module")
def con(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path_factory.mktemp("data")) as con:
        users = con.create_table(
            "j.users",
            pa.schema(
                [("id", pa.int64()), ("name", pa.string()), ("tags", pa.list_(pa.string())), ("age", pa.int16())]
            ),
            primary_key="id",
            buckets=3,
            lake="iceberg",
        )
        users.upsert([{"id": i, "name": f"u{i}", "tags": ["a", None], "age": i} for i in range(100)])
        con.tier("j.users")
        users.upsert([{"id": 7, "name": "new"}])
        users.delete([8])
        con.create_table(
            "j.prices",
            pa.schema([("day", pa.date32()), ("item", pa.string()), ("price", pa.decimal128(9, 2))]),
            primary_key=["day", "item"],
            partition_by="day",
        ).upsert([{"day": dt.date(2026, 1, d), "item": "x", "price": d} for d in (1, 2)])
        yield con


def test_one_large_row_that_many_have_comes_in_batches_that_fit(con: lh.Connection, spark: SparkSession) -> None:
    """Arrow's texts hold 2 GiB a batch."""
    con.create_table("j.docs", {"id": "int64", "doc": "string"}, primary_key="id").upsert([{"id": 1, "doc": "x" * MiB}])
    df = spark.range(2100).selectExpr("1L as id", "id as n").coalesce(1)
    found = lhs.lookup_join(df, "j.docs", "id").selectExpr("sum(length(doc))", "sum(n)").collect()
    assert [tuple(r) for r in found] == [(2100 * MiB, 2099 * 1050)]


def test_left_and_inner(spark: SparkSession) -> None:
    asked = [7, 8, None, 5, 7, 1000]
    df = spark.createDataFrame([(n, i) for n, i in enumerate(asked)], "n int, id int")
    left = lhs.lookup_join(df.coalesce(1), "j.users", on="id")
    assert left.columns == ["n", "id", "name", "tags", "age"]
    names = {7: "new", 5: "u5"}
    assert [(r.n, r.id, r.name) for r in left.collect()] == [(n, i, names.get(i)) for n, i in enumerate(asked)]
    assert [r.tags for r in left.collect()] == [["a", None] if i in names else None for i in asked]
    inner = lhs.lookup_join(df, "j.users", on=["id"], columns=["age"], how="inner", max_staleness="5s")
    assert sorted((r.n, r.id, r.age) for r in inner.collect()) == [(0, 7, 7), (3, 5, 5), (4, 7, 7)]


def test_keys_of_several_columns_and_other_names(spark: SparkSession) -> None:
    rows = [("x", dt.date(2026, 1, 2)), ("x", dt.date(2026, 1, 3)), ("y", dt.date(2026, 1, 1)), (None, None)]
    df = spark.createDataFrame(rows, "what string, when date")
    found = lhs.lookup_join(df, "j.prices", on={"what": "item", "when": "day"}).collect()
    assert sorted(str(r.price) for r in found) == ["2.00", "None", "None", "None"]


def test_no_rows(spark: SparkSession) -> None:
    df = spark.createDataFrame([], "id long")
    assert lhs.lookup_join(df, "j.users", on="id").collect() == []
    df = spark.createDataFrame([(None,)], "id long")
    assert [r.name for r in lhs.lookup_join(df, "j.users", on="id").collect()] == [None]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": "j.user", "on": "id"}, "no table"),
        ({"name": "j.log", "on": "id"}, "log table"),
        ({"name": "j.users", "on": "name"}, "must be the primary key"),
        ({"name": "j.users", "on": {"di": "id"}}, "no column 'di'; columns: id"),
        ({"name": "j.users", "on": "id", "columns": ["nam"]}, "'nam'; did you mean 'name'"),
        ({"name": "j.users", "on": "id", "columns": ["id"]}, "already"),
        ({"name": "j.users", "on": "id", "columns": ["age", "name", "age"]}, "'age' more than once"),
        ({"name": "j.users", "on": ["id", "id"]}, "each column of it once"),
        ({"name": "j.users", "on": {"id": "id", "other": "id"}}, "each column of it once"),
        ({"name": "j.users", "on": "id", "how": "outer"}, "'left' or 'inner'"),
        ({"name": "j.users", "on": "id", "max_staleness": "soon"}, "duration"),
        ({"name": "j.users", "on": None}, "on=None must name columns"),
        ({"name": "j.users", "on": 5}, "on=5 must name columns"),
        ({"name": "j.users", "on": [5]}, "must name columns"),
        ({"name": "j.users", "on": {"id": None}}, "must name columns"),
        ({"name": "j.users", "on": "id", "columns": 5}, "columns=5 must be a list of names"),
        ({"name": "j.users", "on": "id", "columns": [None]}, "must be a list of names"),
    ],
)
def test_what_cannot_be(con: lh.Connection, spark: SparkSession, given: dict[str, Any], words: str) -> None:
    con.create_table("j.log", pa.schema([("id", pa.int64())]), if_not_exists=True)
    with pytest.raises(lh.LakeheadError, match=words):
        lhs.lookup_join(spark.range(3), given.pop("name"), **given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("id", "1 a", "2 a"), r"columns \['a', 'a'\]"),
        (("id", "id"), r"columns \['id', 'id'\]"),
        (("id", "1 a", "2 A"), r"columns \['a', 'A'\]"),
        (("id", "1 NAME"), r"columns \['name'\] already"),
        (("id", "array(named_struct('x', 1, 'x', 2)) s"), r"column 's' .* fields \['x', 'x'\]"),
    ],
)
def test_names_that_are_there_twice(spark: SparkSession, given: tuple[str, ...], words: str) -> None:
    with pytest.raises(lh.InvalidRequestError, match=words):
        lhs.lookup_join(spark.range(7, 8).selectExpr(*given), "j.users", on="id")


def test_names_that_case_tells_apart(spark: SparkSession) -> None:
    inside = spark.range(7, 8).selectExpr("id", "named_struct('x', 1, 'X', 2) s")
    assert [r.name for r in lhs.lookup_join(inside, "j.users", on="id").collect()] == ["new"]
    for on in ("ID", {"Id": "iD"}):  # as Spark takes names
        found = lhs.lookup_join(inside.selectExpr("id"), "j.users", on=on, columns=["NAME"])
        assert found.columns == ["id", "name"] and found.collect() == [(7, "new")]
    try:
        spark.conf.set("spark.sql.caseSensitive", "true")
        df = spark.range(7, 8).selectExpr("id", "1 ID", "2 NAME")
        found = lhs.lookup_join(df, "j.users", on="id", columns=["name"])
        assert found.columns == ["id", "ID", "NAME", "name"] and found.collect() == [(7, 1, 2, "new")]
        with pytest.raises(lh.InvalidRequestError, match="already"):
            lhs.lookup_join(df, "j.users", on={"ID": "id"}, columns=["id"])
        with pytest.raises(lh.ColumnNotFoundError, match="'iD'"):
            lhs.lookup_join(df, "j.users", on={"iD": "id"}, columns=["name"])
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_a_column_of_another_type_than_the_key(spark: SparkSession) -> None:
    for wrong in ("date'2026-01-01'", "array(1)", "'x'", "true"):
        with pytest.raises(lh.SchemaMismatchError, match=r"j\.users"):
            lhs.lookup_join(spark.range(1).selectExpr(f"{wrong} as id"), "j.users", on="id")


def test_values_of_no_type(spark: SparkSession) -> None:
    df = spark.range(1).selectExpr("id", "array() as x")
    with pytest.raises(
        lh.InvalidSchemaError, match=r"column 'x' has the type array<void>.*cast\(`x` as array<string>\)"
    ):
        lhs.lookup_join(df, "j.users", on="id")
    with pytest.raises(lh.InvalidRequestError, match="must name columns"):
        lhs.lookup_join(df.select("id"), "j.users", on=df["id"])  # type: ignore[arg-type]


def test_columns_with_dots(spark: SparkSession) -> None:
    df = spark.createDataFrame([(7, "x")], "`the.id` int, `a.b` string")
    found = lhs.lookup_join(df, "j.users", on={"the.id": "id"}, columns=["name"])
    assert found.columns == ["the.id", "a.b", "name"] and found.collect() == [(7, "x", "new")]


def test_a_stream(con: lh.Connection, spark: SparkSession, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "1.json").write_text('{"id": 1}\n{"id": 999}\n')
    frame = lhs.lookup_join(
        spark.readStream.schema("id bigint").json(str(source)), "j.users", on="id", columns=["name"]
    )
    query = (
        frame.writeStream.format("lakehead").option("uri", con.uri).option("table", "j.enriched")
        .option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()
    found = con.table("j.enriched").scan().to_arrow().to_pylist()
    assert sorted(found, key=str) == [{"id": 1, "name": "u1"}, {"id": 999, "name": None}]


Change = Callable[[lh.Connection, str], object]
FIELDS = [("id", pa.int64()), ("url", pa.string()), ("n", pa.int32()), ("s", pa.struct([("x", pa.int32())]))]
ROW = {"id": 1, "url": "u", "n": 5, "s": {"x": 6}}


def _made(con: lh.Connection, name: str, *fields: Any, key: str | list[str] | None = "id") -> lh.Table:
    return con.create_table(name, pa.schema(fields or FIELDS), primary_key=key)


def _anew(*fields: Any, key: str | list[str] | None = "id") -> Change:
    """Dropped, and made with these columns."""

    def change(con: lh.Connection, name: str) -> None:
        con.drop_table(name)
        _made(con, name, *fields, key=key)

    return change


def _altered(*changes: str) -> Change:
    def change(con: lh.Connection, name: str) -> None:
        for words in changes:
            con.sql(f"alter table {name} {words}")

    return change


def _widened(con: lh.Connection, name: str) -> None:
    _altered("alter n type bigint")(con, name)
    con.table(name).upsert([{**ROW, "n": 2**40}])


BREAKING: dict[str, tuple[Change, type[lh.LakeheadError]]] = {
    "dropped column": (_altered("drop column url"), SchemaChangedError),
    "renamed column": (_altered("rename column url to link"), SchemaChangedError),
    "names swapped": (
        _altered("add column other varchar", "rename column url to gone", "rename column other to url"),
        SchemaChangedError,
    ),
    "widened column": (_widened, SchemaChangedError),
    "dropped and added": (_altered("drop column url", "add column url varchar"), SchemaChangedError),
    "field inside": (_altered("add column s.y int"), SchemaChangedError),
    "other key": (_anew(("o", pa.string()), *FIELDS, key=["id", "o"]), SchemaChangedError),
    "other type of key": (_anew(("id", pa.string()), *FIELDS[1:]), SchemaChangedError),
    "other name of key": (_anew(("k", pa.int64()), *FIELDS[1:], key="k"), SchemaChangedError),
    "other type of column": (_anew(FIELDS[0], ("url", pa.int64()), *FIELDS[2:]), SchemaChangedError),
    "log table": (_anew(*FIELDS, key=None), lh.WrongTableKindError),
    "dropped": (lambda con, name: con.drop_table(name), lh.TableNotFoundError),
    "renamed": (lambda con, name: con.rename_table(name, f"{name}_new"), lh.TableNotFoundError),
}


@pytest.mark.parametrize("stale", [None, "1h"])
@pytest.mark.parametrize("what", BREAKING)
def test_a_table_that_is_not_what_was_planned(
    con: lh.Connection, spark: SparkSession, what: str, stale: str | None
) -> None:
    change, error = BREAKING[what]
    name = f"c.{what.replace(' ', '_')}_{stale}"
    _made(con, name).upsert([ROW])
    joined = lhs.lookup_join(spark.range(1, 2), name, on="id", columns=["url", "n", "s"], max_staleness=stale)
    assert joined.collect() == [(1, "u", 5, (6,))]
    change(con, name)
    with pytest.raises(Exception, match=error.__name__) as e:
        joined.collect()
    found = lhs.raised(e.value)
    assert type(found) is error and name in str(found) and "make the join again" in str(found)


@pytest.mark.parametrize("stale", [None, "1h"])
def test_what_else_becomes_of_the_table_does_not_disturb_it(
    con: lh.Connection, spark: SparkSession, stale: str | None
) -> None:
    name = f"c.goes_on_{stale}"
    _made(con, name).upsert([ROW])
    joined = lhs.lookup_join(spark.range(1, 2), name, on="id", columns=["url"], max_staleness=stale)
    assert [r.url for r in joined.collect()] == ["u"]
    _altered("add column z int", "drop column s", "rename column n to m", "alter m type bigint")(con, name)
    con.table(name).upsert([{"id": 1, "url": "new", "m": 2**40}])
    assert [r.url for r in joined.collect()] == ["new"]
    rows = spark.sql("select 1L as id, 'over' as url, 7L as m, 8 as z")
    rows.write.format("lakehead").options(uri=con.uri, table=name).mode("overwrite").save()
    assert [r.url for r in joined.collect()] == ["over"]
    _anew(("url", pa.string()), ("id", pa.int64()))(con, name)
    con.table(name).upsert([{"id": 1, "url": "anew"}])
    assert [r.url for r in joined.collect()] == ["anew"]


def test_a_stream_ends_when_the_table_is_altered_and_goes_on_with_the_join_made_again(
    con: lh.Connection, spark: SparkSession, tmp_path: Path
) -> None:
    _made(con, "c.users").upsert([ROW])
    visits = con.create_table("c.visits", pa.schema([("id", pa.int64())]))
    options = {"uri": con.uri, "table": "c.seen", "checkpointLocation": str(tmp_path / "checkpoint")}

    def begin(columns: list[str]) -> StreamingQuery:
        stream = spark.readStream.format("lakehead").options(uri=con.uri, table="c.visits", start="earliest").load()
        joined = lhs.lookup_join(stream, "c.users", on="id", columns=columns)
        return joined.toDF("id", "url").writeStream.format("lakehead").options(**options).start()

    query = begin(["url"])
    visits.append([{"id": 1}])
    query.processAllAvailable()
    _altered("add column z int")(con, "c.users")
    visits.append([{"id": 2}])
    query.processAllAvailable()
    _altered("rename column url to link")(con, "c.users")
    visits.append([{"id": 1}])
    with pytest.raises(Exception, match="SchemaChangedError"):
        query.awaitTermination(60)
    assert isinstance(lhs.raised(query.exception()), SchemaChangedError)
    query = begin(["link"])
    query.processAllAvailable()
    query.stop()
    found = [(r["id"], r["url"]) for r in con.table("c.seen").scan().to_arrow().to_pylist()]
    assert sorted(found, key=str) == [(1, "u"), (1, "u"), (2, None)]


@pytest.mark.parametrize("collation", ["UTF8_LCASE", "UNICODE_CI"])
def test_keys_that_a_collation_takes_for_one_are_refused(spark: SparkSession, collation: str) -> None:
    days = spark.sql(f"select date'2026-01-01' day, 'X' collate {collation} item, 1 n")
    on = ["day", "item"]
    with pytest.raises(lh.SchemaMismatchError, match=f"column 'item' has the collation {collation}") as e:
        lhs.lookup_join(days, "j.prices", on=on)
    assert e.value.context["column"] == "item"
    plain = days.selectExpr("day", "collate(lower(`item`), 'UTF8_BINARY') item", f"'N' collate {collation} as note")
    (row,) = lhs.lookup_join(plain, "j.prices", on=on).collect()
    assert row.price == 1 and row.note == "N"
