"""A data folder that is moved, copied or run twice: the original stays as it is, and every row is read once."""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.table import StaticTable
from pyiceberg.table.update.schema import UpdateSchema
from pyiceberg.types import LongType
from tests.golden.make_golden import in_order
from tests.golden.test_golden import ARCHIVES, rows_of
from tests.integration.conftest import ServerProcess
from tests.integration.put_back import put_back

import lakehead as lh
from lakehead.env.storage import LocalStorage
from lakehead.errors import FolderCopiedError, LakeStateError, UnavailableError
from lakehead.iceberg import catalog_state, relocation
from lakehead.server.endpoint import LocalEndpoint

SCHEMA = pa.schema([("k", pa.int64()), ("p", pa.string()), ("v", pa.string())])
EVERY_KIND = pytest.mark.parametrize("kind", ["log", "partitioned", "trimmed", "trimmed_log"])
SOME_KINDS = pytest.mark.parametrize("kind", ["log", "trimmed"])


class Model:
    """What the tables of one folder must hold."""

    def __init__(self, kind: str) -> None:
        self.keyed = kind not in ("log", "trimmed_log")
        self.kind = kind
        self.rows: dict[int, dict[str, Any]] = {}

    def create(self, con: lh.Connection) -> None:
        con.create_table(
            "shop.t",
            SCHEMA,
            primary_key=["k", "p"] if self.keyed else None,
            partition_by=["p"] if self.kind == "partitioned" else None,
            buckets=2,
            lake="iceberg",
            hot_retention="0s" if "trimmed" in self.kind else "1h",
        )

    def put(self, con: lh.Connection, numbers: range, value: str) -> None:
        rows = [{"k": k, "p": f"p{k % 3}", "v": value} for k in numbers if self.keyed or k not in self.rows]
        table = con.table("shop.t")
        table.upsert(rows) if self.keyed else table.append(rows)
        self.rows |= {r["k"]: r for r in rows}

    def tier(self, con: lh.Connection) -> None:
        con.tier("shop.t")
        if "trimmed" in self.kind:
            server = con._server
            assert isinstance(server, LocalEndpoint)
            for _ in range(2):
                server.service.maintain()

    def fill(self, con: lh.Connection) -> None:
        """Two rounds, of which the second deletes rows of the first, and rows that are in the log only."""
        self.create(con)
        self.put(con, range(100), "a")
        self.tier(con)
        self.put(con, range(50, 120), "b")
        self.tier(con)
        self.put(con, range(90, 130), "c")

    def fork(self) -> Model:
        other = Model(self.kind)
        other.rows = dict(self.rows)
        return other

    def check(self, con: lh.Connection) -> None:
        table = con.table("shop.t")
        expected = [self.rows[k] for k in sorted(self.rows)]
        assert sorted(table.scan().to_arrow().to_pylist(), key=lambda r: r["k"]) == expected
        assert table.scan().count() == len(expected)
        assert con.sql("select count(*), count(distinct k) from shop.t").fetchone() == (len(expected),) * 2
        if self.keyed:
            keys = [{"k": r["k"], "p": r["p"]} for r in expected]
            assert table.lookup(keys).to_pylist() == expected

    def go_on(self, folder: Path, value: str) -> None:
        """Read, write, tier, read; from a second start, too."""
        with lh.connect(folder) as con:
            self.check(con)
            self.put(con, range(30), value)
            self.put(con, range(1000 + len(self.rows), 1030 + len(self.rows)), value)
            self.tier(con)
            self.check(con)
            self.check_lake(con, folder)
        with lh.connect(folder) as con:
            self.check(con)

    def check_around_a_round(self, con: lh.Connection) -> None:
        self.check(con)
        self.tier(con)
        self.check(con)

    def check_lake(self, con: lh.Connection, folder: Path) -> None:
        """What other engines see, and that nothing in it leads elsewhere."""
        lake = con.table("shop.t").lake
        assert lake.metadata_location.startswith(f"file://{folder}/lake/")
        iceberg = StaticTable.from_metadata(lake.metadata_location)
        rows = iceberg.scan(selected_fields=("k", "p", "v")).to_arrow().to_pylist()
        assert sorted(rows, key=lambda r: r["k"]) == [self.rows[k] for k in sorted(self.rows)]
        for snapshot in iceberg.metadata.snapshots:
            for manifest in snapshot.manifests(iceberg.io):
                assert (folder / manifest.manifest_path.removeprefix(f"file://{folder}/")).stat().st_size == (
                    manifest.manifest_length
                )
                for entry in manifest.fetch_manifest_entry(iceberg.io):
                    file = entry.data_file
                    path = folder / file.file_path.removeprefix(f"file://{folder}/")
                    assert path.stat().st_size == file.file_size_in_bytes
                    if file.content.value == 1:
                        names = set(pq.read_table(path)["file_path"].to_pylist())
                        assert {min(names), max(names)} == {
                            b[2147483546].decode() for b in (file.lower_bounds, file.upper_bounds)
                        }
                        assert all(n.startswith(f"file://{folder}/") for n in names)
        assert lake.remove_orphans(older_than=0).num_rows == 0, "nothing is left over"


def filled(folder: Path, kind: str, lake: lh.LakeConfig | None = None) -> Model:
    """Make a folder with a filled table, which nobody serves any more; what the table must hold."""
    model = Model(kind)
    with lh.connect(folder, lake=lake) as con:
        model.fill(con)
    return model


def state(folder: Path) -> dict[str, str]:
    """Every file of a folder that nobody serves, and what is in it."""
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in folder.rglob("*")
        if p.is_file()
    }


@EVERY_KIND
def test_a_moved_folder_goes_on(tmp_path: Path, kind: str) -> None:
    model = filled(tmp_path / "a", kind)
    (tmp_path / "deeper" / "down").mkdir(parents=True)
    at = tmp_path / "a"
    for place in ("deeper/down/here", "a"):
        at = at.rename(tmp_path / place)
        model.go_on(at, place)


@EVERY_KIND
def test_a_copy_leaves_the_original_alone(tmp_path: Path, kind: str) -> None:
    model = filled(tmp_path / "a", kind)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    before = state(tmp_path / "a")
    copied = model.fork()
    copied.go_on(tmp_path / "copy", "copy")
    with lh.connect(tmp_path / "copy") as con:
        con.table("shop.t").lake.remove_orphans(older_than=0)
        con.drop_table("shop.t", purge=True)
    assert not list((tmp_path / "copy" / "lake").rglob("*.parquet"))
    assert state(tmp_path / "a") == before
    model.go_on(tmp_path / "a", "original")


@EVERY_KIND
def test_a_copy_and_its_original_run_side_by_side(tmp_path: Path, kind: str) -> None:
    model = filled(tmp_path / "a", kind)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copied = model.fork()
    with lh.connect(tmp_path / "a") as one, lh.connect(tmp_path / "b") as two:
        for n in range(2):
            for con, own, name in ((one, model, "a"), (two, copied, "b")):
                own.put(con, range(20 * n, 20 * n + 40), f"{name}{n}")
                own.check_around_a_round(con)
        model.check_lake(one, tmp_path / "a")
        copied.check_lake(two, tmp_path / "b")
    model.go_on(tmp_path / "a", "x")
    copied.go_on(tmp_path / "b", "y")


@SOME_KINDS
def test_a_folder_restored_over_itself_goes_on(tmp_path: Path, kind: str) -> None:
    model = filled(tmp_path / "a", kind)
    shutil.copytree(tmp_path / "a", tmp_path / "kept")
    model.fork().go_on(tmp_path / "a", "lost")
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "kept").rename(tmp_path / "a")
    model.go_on(tmp_path / "a", "found")


def test_a_lake_that_is_put_back_and_changed_otherwise_is_read_as_it_is_then(tmp_path: Path) -> None:
    """Its files have the names that they had, its schemas the ids: neither tells what columns are."""
    schema = pa.schema([pa.field("k", pa.int64(), False), ("a", pa.string()), ("b", pa.string())])
    with lh.connect(tmp_path / "a") as con:
        table = con.create_table("shop.t", schema, lake="iceberg")
        table.append([{"k": 1, "a": "a", "b": "b"}])
        con.tier("shop.t")
    shutil.copytree(tmp_path / "a", tmp_path / "kept")

    def altered(*renamed: tuple[str, str], **defaults: str | None) -> list[dict[str, Any]]:
        shutil.rmtree(tmp_path / "a")
        shutil.copytree(tmp_path / "kept", tmp_path / "a")
        with lh.connect(tmp_path / "a") as con:
            table = con.table("shop.t")
            with table.alter() as change:
                for name, default in defaults.items():
                    change.add_column(name, pa.string(), default=default)
                for name, new in renamed:
                    change.rename_column(name, new)
            found: list[dict[str, Any]] = table.scan().to_arrow().to_pylist()
            assert con.sql("from shop.t").to_arrow_table().to_pylist() == found
            assert found == table.scan(where="k = 1").to_arrow().to_pylist()
            for k in range(2, 6):
                table.append([{"k": k}])
                con.tier("shop.t")
            table.lake.compact()
            for read in (table.scan().to_arrow(), table.lake.iceberg().scan().to_arrow().select(list(found[0]))):
                assert [row for row in read.to_pylist() if row["k"] == 1] == found
            return found

    assert altered(x=None) == [{"k": 1, "a": "a", "b": "b", "x": None}]
    assert altered(("a", "c"), ("b", "a"), ("c", "b")) == [{"k": 1, "b": "a", "a": "b"}]
    assert altered(x="one") == [{"k": 1, "a": "a", "b": "b", "x": "one"}]
    assert altered(y="two") == [{"k": 1, "a": "a", "b": "b", "y": "two"}]
    assert altered(("b", "right")) == [{"k": 1, "a": "a", "right": "b"}]


def test_a_lake_that_is_put_back_and_changed_otherwise_by_another_engine(tmp_path: Path) -> None:
    schema = pa.schema([("k", pa.int64()), ("s", pa.struct([("x", pa.int32())]))])
    with lh.connect(tmp_path / "a") as con:
        con.create_table("shop.t", schema, lake="iceberg").append([{"k": 1, "s": {"x": 5}}])
        con.tier("shop.t")
    shutil.copytree(tmp_path / "a", tmp_path / "kept")

    def read(change: Callable[[UpdateSchema], object]) -> None:
        shutil.rmtree(tmp_path / "a")
        shutil.copytree(tmp_path / "kept", tmp_path / "a")
        with lh.connect(tmp_path / "a") as con:
            with con.table("shop.t").lake.iceberg().update_schema() as update:
                change(update)
            for where in (None, "s.x = 5"):
                assert con.table("shop.t").scan(where=where).to_arrow().to_pylist() == [{"k": 1, "s": {"x": 5}}]

    read(lambda update: update.add_column("theirs", LongType()))
    read(lambda update: update.update_column("s.x", LongType()))
    read(lambda update: update.add_column("theirs", LongType()))


@pytest.mark.parametrize("into_it", [False, True])
def test_what_was_opened_before_a_folder_was_put_back_ends(tmp_path: Path, into_it: bool) -> None:
    """It would take offsets, ids of schemas and numbers of writers for those that have them now. Also where the folder
    stays, and what is in it goes."""
    schema = pa.schema([pa.field("k", pa.int64(), False), ("a", pa.string()), ("b", pa.string())])
    server = ServerProcess(tmp_path / "data")
    try:
        con, other = server.connect(), server.connect()
        table = con.create_table("shop.t", schema, primary_key="k", lake="iceberg")
        table.upsert([{"k": 1, "a": "a", "b": "b"}])
        con.tier("shop.t")
        server.stop()
        shutil.copytree(server.folder, tmp_path / "before")
        server.start()
        with table.alter() as change:
            change.add_column("c", pa.string(), default="x")
        writer = table.writer(writer_id="named")
        table.upsert([{"k": 2}])
        pinned, relation = table.scan(), con.sql("from shop.t")
        assert pinned.count() == 2
        server.stop()
        put_back(server, tmp_path / "before", into_it=into_it)
        with other.table("shop.t").alter() as change:
            change.rename_column("a", "z")
            change.rename_column("b", "a")
            change.rename_column("z", "b")

        def alter() -> None:
            with table.alter() as change:
                change.drop_column("b")

        calls: list[Callable[[], Any]] = [
            lambda: table.get(1),
            lambda: table.lookup([1]),
            lambda: table.scan().to_arrow(),
            lambda: table.scan(where="k = 1").to_arrow(),
            lambda: table.scan(tier="lake").to_arrow(),
            lambda: table.scan(tier="hot").to_arrow(),
            lambda: table.scan(where="a = 'a'").count(),
            lambda: table.upsert([{"k": 1}]),
            lambda: (writer.upsert([{"k": 3}]), writer.flush()),
            lambda: pinned.to_arrow(),
            lambda: relation.fetchall(),
            lambda: next(iter(table.subscribe())),
            lambda: table.truncate(),
            lambda: table.lake.compact(),
            lambda: table.lake.snapshots(),
            lambda: table.lake.iceberg(),
            lambda: table.lake.tier(),
            lambda: table.status(),
            alter,
        ]
        for at, call in enumerate(calls):
            with pytest.raises(lh.LakeheadError) as caught:
                call()
            assert isinstance(caught.value, lh.FolderCopiedError), (at, caught.value)
        for known in (con, other):
            assert known.table("shop.t").scan().to_arrow().to_pylist() == [{"k": 1, "b": "a", "a": "b"}]
    finally:
        server.kill()


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda p: p.relative_to(p.parents[1]).as_posix())
def test_folders_of_every_format_can_be_moved(tmp_path: Path, archive: Path) -> None:
    import json

    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "here", filter="data")
    tables = json.loads(archive.with_suffix("").with_suffix(".json").read_text())["tables"]
    with lh.connect(tmp_path / "here") as con:
        for name, held in tables.items():
            table = con.table(name)
            assert in_order(table, table.scan().to_arrow().to_pylist()) == rows_of(held), name
            if table.describe()["lake"]:
                con.tier(name)
                assert in_order(table, table.scan().to_arrow().to_pylist()) == rows_of(held), name


class Stopped(Exception):
    """Plays the end of the process."""


def stop_at(monkeypatch: pytest.MonkeyPatch, n: int) -> list[str]:
    """Have the process end at the n-th step of a relocation, before or after it; the steps so far."""
    steps: list[str] = []

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            steps.append(name)
            if len(steps) == n and n % 2:
                raise Stopped(name)
            result = call(*args, **kwargs)
            if len(steps) == n:
                raise Stopped(name)
            return result

        return wrapped

    monkeypatch.undo()
    monkeypatch.setattr(relocation.LocalStorage, "write_atomic", counted("write", LocalStorage.write_atomic))
    monkeypatch.setattr(relocation, "sync_file", counted("sync", relocation.sync_file))
    monkeypatch.setattr(relocation, "_point", counted("point", relocation._point))
    return steps


def test_a_relocation_that_is_cut_short_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = filled(tmp_path / "a", "partitioned")
    before = state(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    n = 0
    while True:
        n += 1
        stop_at(monkeypatch, n)
        try:
            with lh.connect(tmp_path / "b") as con:
                model.check(con)
        except Stopped:
            continue
        break
    assert n > 10, "each step was the last one once"
    monkeypatch.undo()
    with lh.connect(tmp_path / "b") as con:
        con.table("shop.t").lake.remove_orphans(older_than=0)
    model.go_on(tmp_path / "b", "b")
    assert state(tmp_path / "a") == before


# ---- a lake outside the folder --------------------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path) -> lh.LakeConfig:
    """A catalog that folders share."""
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/shared.db", "warehouse": (tmp_path / "warehouse").as_uri()}
    return lh.LakeConfig(name="w", catalog=catalog)


def refused(con: lh.Connection) -> None:
    """A folder whose lake is another's: nothing of the lake is read or changed from here, all else goes on."""
    table = con.table("shop.t")
    for call in (
        lambda: con.tier("shop.t"),
        lambda: table.scan().count(),
        lambda: table.scan(tier="lake").to_arrow(),
        lambda: table.lake.snapshots(),
        lambda: table.lake.iceberg(),
        lambda: table.lake.remove_orphans(older_than=0),
        lambda: con.drop_table("shop.t", purge=True),
    ):
        with pytest.raises(FolderCopiedError, match="lakehead adopt"):
            call()
    assert con.tables() == ["shop.t"]
    assert isinstance(con._server, LocalEndpoint)
    con._server.service.maintain()


@SOME_KINDS
def test_a_lake_outside_stays_the_originals(tmp_path: Path, outside: lh.LakeConfig, kind: str) -> None:
    model = filled(tmp_path / "a", kind, outside)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    before = state(tmp_path / "warehouse")
    copied = model.fork()
    with lh.connect(tmp_path / "b", lake=outside) as con:
        refused(con)
        copied.put(con, range(300, 310), "hot")
        refused(con)
        assert con.create_table("shop.t", SCHEMA, if_not_exists=True, **_definition(con)).name == "shop.t"
    assert state(tmp_path / "warehouse") == before
    with lh.connect(tmp_path / "a", lake=outside) as one, lh.connect(tmp_path / "b", lake=outside) as two:
        model.put(one, range(400, 410), "a")
        model.tier(one)
        model.check(one)
        refused(two)
        with pytest.raises(FolderCopiedError, match="two histories"):
            two.table("shop.t").lake.adopt()
        two.drop_table("shop.t")
        model.check(one)
    with lh.connect(tmp_path / "a", lake=outside) as con:
        model.check(con)
        model.tier(con)


def _definition(con: lh.Connection) -> dict[str, Any]:
    table = con.table("shop.t")
    described = table.describe()
    return {
        "primary_key": list(table.primary_key) or None,
        "partition_by": list(described["partition_by"]) or None,
        "buckets": described["buckets"],
        "lake": "iceberg",
    }


@SOME_KINDS
def test_adopt_takes_the_lake_over(tmp_path: Path, outside: lh.LakeConfig, kind: str) -> None:
    model = filled(tmp_path / "a", kind, outside)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copied = model.fork()
    with lh.connect(tmp_path / "b", lake=outside) as con:
        copied.put(con, range(300, 310), "hot")
        assert con.table("shop.t").lake.adopt()
        assert not con.table("shop.t").lake.adopt()
        copied.check_around_a_round(con)
    with lh.connect(tmp_path / "a", lake=outside) as con:
        refused(con)
        with pytest.raises(FolderCopiedError, match="two histories"):
            con.table("shop.t").lake.adopt()
    with lh.connect(tmp_path / "b", lake=outside) as con:
        copied.check(con)


def test_adopt_lands_on_the_lake_that_was_looked_at(
    tmp_path: Path, outside: lh.LakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = filled(tmp_path / "a", "log", outside)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copied, looked = model.fork(), catalog_state.checked_mark
    with lh.connect(tmp_path / "a", lake=outside) as first, lh.connect(tmp_path / "b", lake=outside) as con:
        copied.put(con, range(300, 310), "hot")
        model.put(first, range(400, 410), "theirs")

        def overtaken(*args: Any) -> Any:
            monkeypatch.undo()
            mark = looked(*args)
            first.tier("shop.t")
            return mark

        monkeypatch.setattr(catalog_state, "checked_mark", overtaken)
        with pytest.raises(lh.CommitConflictError):
            con.table("shop.t").lake.adopt()
        with pytest.raises(FolderCopiedError, match="two histories"):
            con.table("shop.t").lake.adopt()
        model.check(first)


def test_adopt_may_be_taken_back_while_nothing_was_committed(tmp_path: Path, outside: lh.LakeConfig) -> None:
    model = filled(tmp_path / "a", "keyed", outside)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with lh.connect(tmp_path / "b", lake=outside) as con:
        assert con.table("shop.t").lake.adopt()
    with lh.connect(tmp_path / "a", lake=outside) as con:
        refused(con)
        assert con.table("shop.t").lake.adopt()
        model.check_around_a_round(con)


def test_a_moved_folder_keeps_its_lake_outside(tmp_path: Path, outside: lh.LakeConfig) -> None:
    model = filled(tmp_path / "a", "keyed", outside)
    (tmp_path / "a").rename(tmp_path / "b")
    with lh.connect(tmp_path / "b", lake=outside) as con:
        model.check_around_a_round(con)


def test_a_clone_that_nobody_can_see_to_be_one(
    tmp_path: Path, outside: lh.LakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines from one image: the same path, the same inode. The first to commit has the lake."""
    model = filled(tmp_path / "a", "keyed", outside)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    from lakehead.env.place import Place

    place = Place.of(str(tmp_path / "a"))
    monkeypatch.setattr(Place, "of", lambda *_: place)
    clone = model.fork()
    with lh.connect(tmp_path / "a", lake=outside) as one, lh.connect(tmp_path / "b", lake=outside) as two:
        model.check(one)
        clone.check(two)
        model.put(one, range(300, 310), "a")
        clone.put(two, range(300, 310), "b")
        model.tier(one)
        refused(two)
        model.put(one, range(400, 410), "a")
        model.tier(one)
        model.check(one)


def test_a_link_to_a_lake_elsewhere_is_not_inside(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "big").mkdir()
    (tmp_path / "a" / "lake").symlink_to(tmp_path / "big")
    model = filled(tmp_path / "a", "keyed")
    shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=True)
    before = state(tmp_path / "big")
    with lh.connect(tmp_path / "b") as con:
        refused(con)
    assert state(tmp_path / "big") == before
    (tmp_path / "a").rename(tmp_path / "c")
    with lh.connect(tmp_path / "c") as con:
        model.check_around_a_round(con)


def test_a_lake_of_an_unknown_place_is_left_alone(tmp_path: Path) -> None:
    filled(tmp_path / "a", "keyed")
    with closing(sqlite3.connect(tmp_path / "a" / "lake" / "catalog.db")) as db, db:
        db.execute("update iceberg_tables set metadata_location = 'file:///elsewhere/x.metadata.json'")
    db.close()
    before = state(tmp_path / "a" / "lake")
    with lh.connect(tmp_path / "a") as con, pytest.raises((LakeStateError, UnavailableError), match="elsewhere"):
        con.table("shop.t").scan().count()
    assert state(tmp_path / "a" / "lake") == before
