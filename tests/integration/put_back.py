"""A folder that is put back to what it was, under the eyes of those who read it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.integration.conftest import ServerProcess

import lakehead as lh

SCHEMA = pa.schema([pa.field("k", pa.int64(), False), ("v", pa.string())])
WIDE = pa.schema([*SCHEMA, ("w", pa.string())])


def require_no_lost_rows(server: ServerProcess, before: Path, con: lh.Connection, values: Callable[[str], Any]) -> None:
    """Other rows get the offsets of those that went with it, and other columns the ids of definitions: who reads a
    table then finds those.

    Args:
        server: with an empty folder.
        before: where the folder is kept meanwhile.
        values: of column ``v`` of a table of this name, in their order.
    """
    table = con.create_table("k.back", SCHEMA)
    table.append([{"k": 0, "v": "a"}])
    altered = [con.create_table(f"k.{lake}", WIDE, lake=lake) for lake in (None, "iceberg")]
    for other in altered:
        other.append([{"k": 0, "v": "v", "w": "w"}])
    con.tier("k.iceberg")
    names = [str(other.name) for other in altered]
    server.stop()
    shutil.copytree(server.folder, before)
    server.start()
    table.append([{"k": 1, "v": "lost"}])
    assert values("k.back") == ["a", "lost"]
    for name in names:
        with con.table(name).alter() as change:
            change.add_column("x", pa.string())
        for _ in range(3):
            assert values(name) == ["v"]
    server.stop()
    shutil.rmtree(server.folder)
    shutil.copytree(before, server.folder)
    server.start()
    con.table("k.back").append([{"k": 1, "v": "other"}])
    assert values("k.back") == ["a", "other"]
    for name in names:
        with con.table(name).alter() as change:
            change.drop_column("v")
            change.rename_column("w", "v")
        assert [values(name) for _ in range(2)] == [["w"], ["w"]]
        assert con.table(name).scan().to_arrow().to_pylist() == [{"k": 0, "v": "w"}]


def put_back(server: ServerProcess, before: Path, *, into_it: bool) -> None:
    """Have a server that has ended serve a folder as it was before, ``into_it``: by other files in the same folder."""
    if into_it:
        for entry in server.folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    else:
        shutil.rmtree(server.folder)
    shutil.copytree(before, server.folder, dirs_exist_ok=into_it)
    server.start()
