"""Whoever removes `LOCK` under a live owner lets a second one in: the first acknowledges nothing more."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.api.embedded import serve
from lakehead.api.table import handle_of
from lakehead.client.writers import Writers
from lakehead.config import ServerConfig
from lakehead.env.folder_lock import read_announcement
from lakehead.env.storage import LocalStorage
from lakehead.errors import FencedError, LakeheadError
from lakehead.log.segment import Segment, SegmentId
from lakehead.server.endpoint import LocalEndpoint

SCHEMA = pa.schema([("who", pa.string()), ("n", pa.int64())])


def remove_lock(folder: Path) -> None:
    (folder / "LOCK").unlink()


def replace_lock(folder: Path) -> None:
    (folder / "LOCK").rename(folder / "LOCK.old")
    (folder / "LOCK").touch()


def remove_lock_and_word(folder: Path) -> None:
    remove_lock(folder)
    (folder / "endpoint.json").unlink()


def epochs(folder: Path) -> list[int]:
    found = []
    for path in sorted(folder.glob("tables/*/*/*/*.log")):
        name = SegmentId.of_name(path.name)
        assert name is not None
        segment = Segment(LocalStorage(), str(path.parent), name)
        found += [frame.epoch for _, frame in segment.scan()]
        segment.close()
    return found


@pytest.mark.parametrize("durability", ["sync", "os"])
@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("lose", [remove_lock, replace_lock, remove_lock_and_word])
def test_a_second_owner_fences_the_first(
    tmp_path: Path, lose: Callable[[Path], None], keyed: bool, durability: str
) -> None:
    con = lh.connect(tmp_path)
    key = ["who", "n"] if keyed else None
    table = con.create_table("t", SCHEMA, primary_key=key, durability=durability, lake="iceberg")
    acknowledged: list[dict[str, Any]] = []

    def put(t: lh.Table, who: str, n: int) -> None:
        rows = [{"who": who, "n": n}]
        t.upsert(rows) if keyed else t.append(rows)
        acknowledged.extend(rows)

    for n in range(3):
        put(table, "first", n)
    lose(tmp_path)
    second = serve(tmp_path, ServerConfig())
    with lh.connect(second.uri) as other:
        for n in range(3):
            put(other.table("t"), "second", n)
        files = {p: p.read_bytes() for p in tmp_path.glob("tables/**/*") if p.is_file()}
        for call in (
            lambda: put(table, "first", 9),
            lambda: put(table, "first", 10),
            lambda: con.create_table("u", SCHEMA),
            lambda: con.drop_table("t"),
            lambda: con.tier("t"),
            lambda: table.scan().count(),
            lambda: table.writer("named"),
        ):
            with pytest.raises(FencedError):
                call()
        assert isinstance(con._server, LocalEndpoint)
        con._server.service.maintain()
        con.close()
        assert {p: p.read_bytes() for p in tmp_path.glob("tables/**/*") if p.is_file()} == files
        assert (read_announcement(tmp_path.as_posix()) or {})["uri"] == second.uri, "the word of the second stays"
        put(other.table("t"), "second", 3)
        assert other.tier("t").rows == len(acknowledged)
    second.close()
    with lh.connect(tmp_path) as con:
        rows = con.table("t").scan().to_arrow().to_pylist()
        assert sorted(map(str, rows)) == sorted(map(str, acknowledged))
        assert con.table("t").scan(tier="lake").count() == len(rows)
    assert epochs(tmp_path) == [1] * 3 + [2] * 4


def test_an_owner_whose_folder_is_moved_or_removed_stops(tmp_path: Path) -> None:
    con = lh.connect(tmp_path / "a")
    table = con.create_table("t", SCHEMA)
    table.append([{"who": "x", "n": 1}])
    (tmp_path / "a").rename(tmp_path / "b")
    with pytest.raises(FencedError, match="moved"):
        table.append([{"who": "x", "n": 2}])
    con.close()
    with lh.connect(tmp_path / "b") as moved:
        assert moved.table("t").scan().count() == 1
        shutil.rmtree(tmp_path / "b")
        with pytest.raises(LakeheadError):
            moved.table("t").append([{"who": "x", "n": 3}])


def test_an_owner_whose_folder_was_replaced_makes_nothing_in_the_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with lh.connect(folder) as con:
        table = con.create_table("a.t", [("k", "int64")])
        folder.rename(tmp_path / "old")
        folder.mkdir()
        with pytest.raises(lh.FencedError):
            table.append([{"k": 1}])
        assert list(folder.iterdir()) == []


def test_a_lock_that_is_lost_between_append_and_acknowledgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lakehead.log import LogTablet

    con = lh.connect(tmp_path)
    table = con.create_table("t", SCHEMA)
    table.append([{"who": "x", "n": 1}])
    sync = LogTablet.sync

    def lose_and_sync(log: LogTablet) -> None:
        sync(log)
        (tmp_path / "LOCK").unlink(missing_ok=True)

    monkeypatch.setattr(LogTablet, "sync", lose_and_sync)
    with pytest.raises(FencedError):
        table.append([{"who": "x", "n": 2}])
    con.close()


def test_the_first_may_connect_again(tmp_path: Path) -> None:
    con = lh.connect(tmp_path)
    con.create_table("t", SCHEMA).append([{"who": "x", "n": 1}])
    remove_lock(tmp_path)
    with pytest.raises(FencedError, match="connect again"):
        con.table("t").append([{"who": "x", "n": 2}])
    con.close()
    with lh.connect(tmp_path) as con:
        con.table("t").append([{"who": "x", "n": 2}])
        assert con.table("t").scan().count() == 2


def test_columns_that_only_a_second_owner_knows_are_refused_as_the_first_is_fenced(tmp_path: Path) -> None:
    con = lh.connect(tmp_path)
    con.create_table("t", SCHEMA).append([{"who": "x", "n": 1}])
    remove_lock(tmp_path)
    second = serve(tmp_path, ServerConfig())
    with lh.connect(second.uri) as other:
        table = other.table("t")
        with table.alter() as a:
            a.add_column("m", pa.int64())
        altered = handle_of(table)
    first = handle_of(con.table("t"))
    assert isinstance(con._server, LocalEndpoint)
    writers = Writers(altered.desc, first._routes, first.env, first._folder_id)
    with pytest.raises(FencedError):
        writers.write("append", pa.table({"who": ["y"], "n": [2], "m": [3]}))
    second.close()
    con.close()
