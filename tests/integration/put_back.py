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


def require_no_lost_rows(server: ServerProcess, before: Path, con: lh.Connection, values: Callable[[str], Any]) -> None:
    """Other rows get the offsets of those that went with it: who reads a table then finds those.

    Args:
        server: with an empty folder.
        before: where the folder is kept meanwhile.
        values: of column ``v`` of a table of this name, in their order.
    """
    table = con.create_table("k.back", SCHEMA)
    table.append([{"k": 0, "v": "a"}])
    server.stop()
    shutil.copytree(server.folder, before)
    server.start()
    table.append([{"k": 1, "v": "lost"}])
    assert values("k.back") == ["a", "lost"]
    server.stop()
    shutil.rmtree(server.folder)
    shutil.copytree(before, server.folder)
    server.start()
    con.table("k.back").append([{"k": 1, "v": "other"}])
    assert values("k.back") == ["a", "other"]
