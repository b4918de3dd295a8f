"""Tables that get other names: whoever has one open goes on, and the lake follows, at whatever step it was killed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog

import lakehead as lh
from lakehead.api import backup
from lakehead.api.table import handle_of
from lakehead.errors import LakeStateError, TableExistsError, TableNotFoundError, UnavailableError
from lakehead.iceberg.lake_catalog import LakeCatalog
from lakehead.protocol.privileges import Privilege
from lakehead.server.definitions import Definitions
from lakehead.server.maintenance import Maintenance
from lakehead.server.tables import LiveTables

SCHEMA = pa.schema([pa.field("k", pa.int64(), False), ("a", pa.string())])


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as con:
        yield con


def make(con: lh.Connection, name: str, keyed: bool = True, lake: str | None = "iceberg") -> lh.Table:
    return con.create_table(name, SCHEMA, primary_key=["k"] if keyed else None, lake=lake, buckets=2)


def put(table: lh.Table, *keys: int) -> None:
    (table.upsert if table.primary_key else table.append)([{"k": k, "a": table.name} for k in keys])


def keys_of(table: lh.Table, **scan: Any) -> list[int]:
    return sorted(table.scan(**scan).to_arrow()["k"].to_pylist())


def lake_names(con: lh.Connection) -> set[str]:
    catalog = LakeCatalog.open("lakehead", handle_of(con.table(con.tables()[0])).lake().catalog_properties).iceberg
    return {".".join(i) for n in catalog.list_namespaces() for i in catalog.list_tables(n)}


@pytest.mark.parametrize("lake", [None, "iceberg"])
def test_whoever_has_the_table_open_goes_on(con: lh.Connection, keyed: bool, lake: str | None) -> None:
    table = make(con, "shop.a", keyed, lake)
    put(table, 1)
    if lake:
        con.tier("shop.a")
    put(table, 2)
    pinned, subscription, writer = table.scan(), table.subscribe("latest"), table.writer(writer_id="w")
    renamed = con.rename_table("shop.a", "new.b")
    assert (renamed.name, con.tables(), con.databases()) == ("new.b", ["new.b"], ["default", "new", "shop"])
    put(table, 3)
    (writer.upsert if keyed else writer.append)([{"k": 4, "a": ""}])
    writer.close()
    put(renamed, 5)
    followed: list[int] = []
    while len(followed) < 3:
        followed += next(subscription).rows["k"].to_pylist()
    assert sorted(followed) == [3, 4, 5]
    subscription.close()
    assert keys_of(table) == keys_of(renamed) == [1, 2, 3, 4, 5]
    assert sorted(pinned.to_arrow()["k"].to_pylist()) == [1, 2]
    if lake:
        assert lake_names(con) == {"new.b"}
        assert table.lake.tier().rows == 4
        con.tier("new.b")
        assert keys_of(renamed, tier="lake") == [1, 2, 3, 4, 5]
    with table.alter() as a:
        a.add_column("n", pa.int64())
    assert table.name == "new.b"
    assert con.sql("select count(*) from new.b").fetchall() == [(5,)]


@pytest.mark.parametrize("lake", [None, "iceberg"])
def test_it_holds_after_a_restart(tmp_path: Path, keyed: bool, lake: str | None) -> None:
    with lh.connect(tmp_path / "data") as con:
        put(make(con, "a", keyed, lake), 1)
        con.rename_table("a", "b")
        con.rename_table("b", "c")
    with lh.connect(tmp_path / "data") as con:
        table = con.table("c")
        put(table, 2)
        with table.alter() as a:
            a.rename_column("a", "text")
        put_again = make(con, "a", keyed, lake)
        put(put_again, 7)
        for name in ("a", "c") if lake else ():
            con.tier(name)
    with lh.connect(tmp_path / "data") as con:
        assert (keys_of(con.table("c")), keys_of(con.table("a"))) == ([1, 2], [7])
        con.drop_table("c", purge=True)
        assert con.tables() == ["default.a"]
        assert keys_of(con.table("a")) == [7]
    folders = sorted(p.name.rpartition("-")[0] for p in (tmp_path / "data" / "tables").iterdir())
    assert folders == ["default.a"]


def test_names_that_lead_nowhere_or_elsewhere(con: lh.Connection) -> None:
    make(con, "shop.a")
    make(con, "shop.b", lake=None)
    for name in ("shop.x", "shop.aa"):
        with pytest.raises(TableNotFoundError):
            con.rename_table(name, "shop.c")
    make(con, "shop.c", lake=None)
    make(con, "shop.d")
    for old in "abcd":
        for new in sorted({*"abcd"} - {old}):
            with pytest.raises(TableExistsError, match="swap=True"):
                con.rename_table(f"shop.{old}", f"shop.{new}")
    for name in "cd":
        con.drop_table(f"shop.{name}", purge=True)
    with pytest.raises(TableNotFoundError, match=r"no table shop\.y"):
        con.rename_table("shop.a", "shop.y", swap=True)
    with pytest.raises(lh.InvalidRequestError, match="not a table name"):
        con.rename_table("shop.a", "a b")
    assert con.rename_table("shop.a", "shop.a").name == "shop.a"
    con.rename_table("shop.a", "shop.c")
    with pytest.raises(TableNotFoundError, match=r"it is called shop\.c now"):
        con.table("shop.a")
    with pytest.raises(TableNotFoundError, match=r"it is called shop\.c now"):
        con.drop_table("shop.a")
    assert con.tables() == ["shop.b", "shop.c"]


def test_two_tables_have_each_others_names(con: lh.Connection, keyed: bool) -> None:
    first, second = make(con, "shop.a", keyed), make(con, "shop.b", keyed)
    put(first, 1)
    put(second, 2)
    for name in ("shop.a", "shop.b"):
        con.tier(name)
    for n in range(3):
        con.rename_table("shop.a", "shop.b", swap=True)
        assert lake_names(con) == {"shop.a", "shop.b"}
        a, b = con.table("shop.a"), con.table("shop.b")
        wanted = ([1], [2]) if n % 2 else ([2], [1])
        assert (keys_of(a, tier="lake"), keys_of(b, tier="lake")) == wanted
        assert (a.lake.iceberg().scan().to_arrow()["k"].to_pylist(), keys_of(b)) == wanted
    assert (keys_of(first), keys_of(second)) == ([1], [2])
    con.rename_table("shop.a", "c", swap=False)
    con.rename_table("shop.b", "shop.a")
    assert lake_names(con) == {"default.c", "shop.a"}


class Killed(BaseException):
    """The process ends here."""


STEPS: dict[str, tuple[Any, str]] = {
    "before the catalog": (LiveTables, "rename"),
    "before the lake": (LakeCatalog, "named_as"),
    "in the lake": (SqlCatalog, "rename_table"),
}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("swap", [False, True])
def test_what_a_crash_leaves_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, swap: bool, after: bool
) -> None:
    with monkeypatch.context() as patch, lh.connect(tmp_path / "data") as con:
        # It would complete the rename in another thread, which does not end with this one.
        patch.setattr(Maintenance, "run", lambda _: None)
        put(make(con, "a"), 1)
        con.tier("a")
        if swap:
            put(make(con, "b"), 2)
            con.tier("b")
        of, method = STEPS[step]
        real: Callable[..., Any] = getattr(of, method)
        folder, left = tmp_path / "data", tmp_path / "left"

        def die(*args: Any, **kwargs: Any) -> Any:
            if after:
                real(*args, **kwargs)
            if left.exists():
                raise Killed
            shutil.copytree(folder, left, ignore=shutil.ignore_patterns("LOCK", "endpoint.json"))
            raise Killed

        patch.setattr(of, method, die)
        with pytest.raises(Killed):
            con.rename_table("a", "b", swap=swap)
        patch.undo()
    (left / "lake" / "catalog.db").stat()
    with lh.connect(left) as con:
        if "default.b" not in con.tables() or (swap and keys_of(con.table("b")) == [2]):
            con.rename_table("a", "b", swap=swap)
        # A table under the old name, its lake too, is another one.
        if not swap:
            put(make(con, "a"), 3)
        for name in ("a", "b", "a"):
            put(con.table(name), 4)
            con.tier(name)
        assert (keys_of(con.table("b")), keys_of(con.table("a"))) == ([1, 4], [2, 4] if swap else [3, 4])
        assert lake_names(con) == {"default.a", "default.b"}
        for name in ("a", "b"):
            assert keys_of(con.table(name), tier="lake") == keys_of(con.table(name))
            con.drop_table(name, purge=True)


def test_a_lakes_name_that_someone_else_has(con: lh.Connection) -> None:
    table = make(con, "shop.a")
    catalog = LakeCatalog.open("lakehead", handle_of(table).lake().catalog_properties).iceberg
    catalog.create_table(("shop", "b"), pa.schema([("x", pa.int32())]))
    with pytest.raises(LakeStateError, match=r"shop\.b.*someone else"):
        con.rename_table("shop.a", "shop.b")
    assert con.tables() == ["shop.a"]


def test_a_catalog_that_cannot_rename(con: lh.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    put(make(con, "shop.a"), 1)

    def refuse(*_: object) -> None:
        raise NotImplementedError

    with monkeypatch.context() as patch:
        patch.setattr(SqlCatalog, "rename_table", refuse)
        table = con.rename_table("shop.a", "shop.b")
        con.tier("shop.b")
        assert lake_names(con) == {"shop.a"}
        assert keys_of(table, tier="lake") == [1]
    con.tier("shop.b")
    assert lake_names(con) == {"shop.b"}


def test_a_catalog_out_of_reach(con: lh.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    make(con, "shop.a")

    def refuse(*_: object, **__: object) -> None:
        raise UnavailableError("away")

    with monkeypatch.context() as patch:
        patch.setattr(LakeCatalog, "require_free", refuse)
        with pytest.raises(UnavailableError, match="away"):
            con.rename_table("shop.a", "shop.b")
    assert con.tables() == ["shop.a"]


@pytest.mark.parametrize("swap", [False, True])
def test_a_backup_while_names_change(
    con: lh.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swap: bool
) -> None:
    put(make(con, "shop.a"), 1)
    con.tier("shop.a")
    if swap:
        put(make(con, "shop.b"), 2)
    steps = ("_opened", "_copy_lake", "_copy_metadata", "_keep_tables")
    for step in steps:
        with monkeypatch.context() as patch:
            real = getattr(backup, step)

            def rename(*args: Any, real: Any = real, patch: Any = patch, step: str = step) -> Any:
                patch.setattr(backup, step, real)
                con.rename_table("shop.a", "shop.b", swap=swap)
                return real(*args)

            patch.setattr(backup, step, rename)
            backup.back_up(con, str(tmp_path / "data"), str(tmp_path / step))
        backup.restore(str(tmp_path / step), str(tmp_path / f"{step}-data"))
        con.rename_table("shop.b", "shop.a", swap=swap)
        with lh.connect(tmp_path / f"{step}-data") as restored:
            found = [keys_of(restored.table(name)) for name in restored.tables()]
            assert sorted(found) == ([[1], [2]] if swap else [[1]])
            for name in restored.tables():
                put(restored.table(name), 9)
                restored.tier(name)
                assert keys_of(restored.table(name), tier="lake")[-1] == 9


@pytest.mark.parametrize("moved", ["before the lake", "done"])
def test_a_renamed_table_is_moved_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: str) -> None:
    with lh.connect(tmp_path / "data") as con, monkeypatch.context() as patch:
        put(make(con, "a"), 1)
        con.tier("a")
        if moved != "done":
            patch.setattr(LakeCatalog, "named_as", lambda _, table, desc, leaves: table)
        con.rename_table("a", "b")
    (tmp_path / "data").rename(tmp_path / "moved")
    with lh.connect(tmp_path / "moved") as con:
        put(con.table("b"), 2)
        con.tier("b")
        assert (keys_of(con.table("b"), tier="lake"), lake_names(con)) == ([1, 2], {"default.b"})


def test_in_sql(con: lh.Connection) -> None:
    put(make(con, "shop.a"), 1)
    assert con.sql("ALTER TABLE shop.A RENAME TO b").fetchall() == []
    assert con.sql("select k from shop.b").fetchall() == [(1,)]
    assert con.tables() == ["shop.b"]
    con.sql("alter table if exists shop.a rename to c")
    assert con.tables() == ["shop.b"]


def test_no_table_is_dropped_by_a_name_that_it_has_no_more(con: lh.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose name it is, is found out when nobody can be given another."""
    make(con, "shop.a", lake=None)
    named, renamed = Definitions._named, []

    def found(self: Any, path: Any, caller: Any, privilege: Privilege, *more: Any) -> Any:
        desc = named(self, path, caller, privilege, *more)
        if privilege is Privilege.MANAGE and not self._create_lock.locked():
            monkeypatch.undo()
            renamed.append(con.rename_table("shop.a", "shop.b"))
        return desc

    monkeypatch.setattr(Definitions, "_named", found)
    con.drop_table("shop.a")
    assert con.tables() == [] and not renamed
