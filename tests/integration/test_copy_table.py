"""Copies of tables: definition and rows as of one moment, there as a whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.api.writer import Writer
from lakehead.errors import InvalidSchemaError, StorageError, TableExistsError, TableNotFoundError

DAY = pa.field("day", pa.string(), False)
SCHEMA = pa.schema([pa.field("k", pa.int64(), False), ("a", pa.string()), DAY, ("t", pa.list_(pa.int8()))])


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as con:
        yield con


def rows(keys: range, text: str = "x") -> list[dict[str, Any]]:
    return [{"k": k, "a": text, "day": "mo" if k % 2 else "tu", "t": [k % 3]} for k in keys]


def of(table: lh.Table, **scan: Any) -> list[dict[str, Any]]:
    return sorted(table.scan(**scan).to_arrow().to_pylist(), key=lambda r: r["k"])


def named(definition: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {k: v for k, v in definition.items() if k not in ("name", "table_id", *other)} | other


@pytest.mark.parametrize("buckets", [None, 1, 5])
@pytest.mark.parametrize("lake", [None, "iceberg"])
@pytest.mark.parametrize("key", [None, ["day", "k"]])
def test_definition_and_rows(con: lh.Connection, key: list[str] | None, lake: str | None, buckets: int | None) -> None:
    table = con.create_table(
        "shop.t", SCHEMA, primary_key=key, partition_by=["day"], buckets=2, lake=lake, hot_retention="2h"
    )
    write = table.upsert if key else table.append
    write(rows(range(50)))
    if lake:
        con.tier("shop.t")
    write(rows(range(50, 60)))
    if key:
        table.upsert(rows(range(3), "new"))
        table.delete([{"day": "mo", "k": 1}])
    with table.alter() as a:
        a.rename_column("a", "text").add_column("more", pa.int32(), after="k")
        a.set_comment("text", "said").set_comment(None, "all")
    write(rows_of := [{"k": 99, "more": 1, "text": "y", "day": "we", "t": None}])
    before = of(table)
    done = con.copy_table(old="shop.t", new="new.copy", buckets=buckets)
    write([{**rows_of[0], "k": 100}])
    assert (of(done.table), done.rows) == (before, len(before))
    assert named(done.table.describe()) == named(table.describe(), buckets=buckets or 2)
    assert sum(done.offsets.values()) + 1 == sum(t["high_watermark"] for t in table.status().to_pylist())
    assert [r["k"] for b in table.subscribe(done.offsets, stop="now") for r in b.rows.to_pylist()] == [100]
    assert con.tables() == ["new.copy", "shop.t"]
    if lake:
        con.tier("new.copy")
        assert of(done.table, tier="lake") == before
        assert {f.name: f.doc for f in done.table.lake.iceberg().schema().fields}["text"] == "said"
    con.rename_table("shop.t", "new.copy", swap=True)
    con.drop_table("new.copy", purge=True)
    assert of(con.table("shop.t")) == before


def test_what_is_refused_changes_nothing(con: lh.Connection) -> None:
    con.create_table("shop.t", SCHEMA)
    con.create_table("shop.u", SCHEMA)
    with pytest.raises(TableExistsError):
        con.copy_table("shop.t", "shop.u")
    with pytest.raises(TableNotFoundError):
        con.copy_table("shop.x", "shop.y")
    for buckets in (0, -1, False, True, 1.5, "2", 1 << 70):
        with pytest.raises(InvalidSchemaError, match="buckets"):
            con.copy_table("shop.t", "shop.y", buckets=buckets)  # type: ignore[arg-type]
    assert con.tables() == ["shop.t", "shop.u"]


@pytest.mark.parametrize("dies", [False, True])
def test_a_copy_that_fails_or_dies_is_not_there(
    con: lh.Connection, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    table = con.create_table("shop.t", SCHEMA, lake="iceberg")
    table.append(rows(range(10)))

    def refuse(*_: object) -> None:
        raise StorageError("full")

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "append", refuse)
        if dies:
            patch.setattr(lh.Connection, "_drop", lambda *_, **__: None)
        with pytest.raises(StorageError, match="full"):
            con.copy_table("shop.t", "shop.u")
    with pytest.raises(TableNotFoundError):
        con.table("shop.u")
    assert len(con.tables()) == 1 + dies
    assert of(con.copy_table("shop.t", "shop.u").table) == rows(range(10))
    assert con.tables() == ["shop.t", "shop.u"]


def test_a_copy_whose_rows_may_have_landed_is_to_be_made_again(
    con: lh.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can look for them in a table that has no name yet."""
    con.create_table("shop.t", SCHEMA).append(rows(range(10)))

    def unknown(*_: object) -> None:
        raise lh.OutcomeUnknownError("it may have landed")

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "append", unknown)
        with pytest.raises(lh.UnavailableError, match=r"shop\.t was not copied to shop\.u: call copy_table again"):
            con.copy_table("shop.t", "shop.u")
    assert con.tables() == ["shop.t"]
    assert of(con.copy_table("shop.t", "shop.u").table) == rows(range(10))


@pytest.mark.parametrize("when", ["it is complete", "the other has begun"])
def test_of_two_that_make_a_copy_at_once_one_does(
    con: lh.Connection, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Neither takes or drops what the other makes, under the same name."""
    con.create_table("shop.t", SCHEMA).append(rows(range(50)))
    with lh.connect(con.uri) as first, lh.connect(con.uri) as second:
        rename, created = first._rename, second._created

        def begun(desc: Any) -> lh.Table:
            made = created(desc)
            if when == "the other has begun":
                for interfere in (
                    lambda: rename(made.name, "shop.copy", only="a"),
                    lambda: first._drop(made.name, only="a"),
                ):
                    with pytest.raises(TableNotFoundError, match=r"another table is called .* now"):
                        interfere()
            return made

        def complete(old: str, new: str, *, only: str) -> lh.Table:
            assert second.copy_table("shop.t", "shop.copy").rows == 50
            return rename(old, new, only=only)

        monkeypatch.setattr(second, "_created", begun)
        monkeypatch.setattr(first, "_rename", complete)
        with pytest.raises(TableExistsError, match=r"another call makes a table like shop\.t .* called shop\.copy"):
            first.copy_table("shop.t", "shop.copy")
    assert con.tables() == ["shop.copy", "shop.t"] and of(con.table("shop.copy")) == rows(range(50))


def test_a_copy_of_the_same_name_begins_while_one_does(con: lh.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    con.create_table("shop.t", SCHEMA).append(rows(range(5)))
    with lh.connect(con.uri) as second:
        created = con._created

        def later(desc: Any) -> lh.Table:
            monkeypatch.undo()
            second._created(desc)
            return created(desc)

        monkeypatch.setattr(con, "_created", later)
        with pytest.raises(TableExistsError, match="another call makes a table like"):
            con.copy_table("shop.t", "shop.copy")
    assert len(con.tables()) == 2, "what the other makes stays"
    assert con.copy_table("shop.t", "shop.copy").rows == 5 and con.tables() == ["shop.copy", "shop.t"]
