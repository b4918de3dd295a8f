"""Tables of a feed of changes that someone dropped while its query was down: one error, and no rows that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from tests.integration.conftest import embedded_only

import lakehead as lh
import lakehead.spark as lhs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, embedded_only]

CHANGES = pa.schema([("k", pa.int64()), ("seq", pa.int64()), ("v", pa.string())])


@pytest.mark.parametrize("gone", ["target", "beside", "both"])
@pytest.mark.parametrize("scd_type", [1, 2])
def test_what_a_feed_of_changes_has_written_must_be_there(
    con: lh.Connection, spark: SparkSession, tmp_path: Path, scd_type: int, gone: str
) -> None:
    """Made again, it would take late changes for new ones, or leave out new ones as late."""
    source, target = f"z.of_{scd_type}_{gone}", f"z.target_{scd_type}_{gone}"
    beside = f"{target}__{'sequences' if scd_type == 1 else 'deletes'}"
    feed = con.create_table(source, CHANGES)
    stream = spark.readStream.format("lakehead").options(uri=con.uri, table=source, start="earliest").load()

    def run(checkpoint: str) -> None:
        query = lhs.apply_changes(
            stream, target, keys="k", sequence_by="seq", apply_as_deletes="v is null", stored_as_scd_type=scd_type,
            checkpoint=str(tmp_path / checkpoint), trigger="available now",
        )  # fmt: skip
        query.awaitTermination()

    feed.append([{"k": 1, "seq": 10, "v": "new"}, {"k": 2, "seq": 20, "v": None}])
    run("first")
    dropped = {"target": [target], "beside": [beside], "both": [target, beside]}[gone]
    for name in dropped:
        con.drop_table(name)
    feed.append([{"k": 1, "seq": 5, "v": "late"}, {"k": 2, "seq": 15, "v": "late"}])
    for _ in range(2):
        with pytest.raises(Exception, match="drop it, too" if gone == "target" else "someone dropped") as told:
            run("first")
        assert isinstance(lhs.raised(told.value), lh.InvalidRequestError | lh.TableNotFoundError)
        assert not set(dropped) & set(con.tables()), "nothing is made again"
    for name in {target, beside} & set(con.tables()):
        con.drop_table(name)
    run("second")
    rows = con.table(target).scan(where="k = 1", columns=["v"]).to_arrow()["v"].to_pylist()
    assert sorted(rows) == (["new"] if scd_type == 1 else ["late", "new"])


def test_a_first_start_may_find_a_table_with_rows(con: lh.Connection, spark: SparkSession, tmp_path: Path) -> None:
    """As of a first load, whose changes come from then on."""
    feed = con.create_table("z.of_loaded", CHANGES)
    loaded = con.create_table("z.loaded", [("k", "int64"), ("v", "string")], primary_key="k")
    loaded.upsert([{"k": 1, "v": "loaded"}, {"k": 2, "v": "loaded"}])
    feed.append([{"k": 1, "seq": 1, "v": "new"}])
    stream = spark.readStream.format("lakehead").options(uri=con.uri, table="z.of_loaded", start="earliest").load()
    query = lhs.apply_changes(
        stream, "z.loaded", keys="k", sequence_by="seq", column_list=["k", "v"], checkpoint=str(tmp_path),
        trigger="available now",
    )  # fmt: skip
    query.awaitTermination()
    assert loaded.get(1) == {"k": 1, "v": "new"} and loaded.get(2) == {"k": 2, "v": "loaded"}
