"""What a server remembers of a table that was dropped: nothing that grows with each."""

from __future__ import annotations

import gc
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType

import pyarrow as pa

import lakehead as lh
from lakehead.api.table import handle_of

SCHEMA = pa.schema([pa.field("k", pa.int64(), False), ("v", pa.string())])
_MEANT = {"MetadataStore._read", "LiveTables._dropped"}
"""Definitions as they were last read, a few thousand at most; ids that are not to be opened again."""


def remembered(root: object, text: str) -> list[str]:
    """Where a text that an object refers to, however far away, stands."""
    places: list[str] = []
    seen: set[int] = set()
    left: list[tuple[object, str]] = [(root, type(root).__name__)]
    while left:
        at, place = left.pop()
        if isinstance(at, str):
            places += [place] if text in at else []
        if id(at) in seen or isinstance(at, ModuleType | type | FunctionType | BuiltinFunctionType | str | bytes):
            continue
        seen.add(id(at))
        names = getattr(at, "__dict__", None)
        if isinstance(names, dict) and type(at).__module__.startswith("lakehead"):
            found = ((value, f"{type(at).__name__}.{name}") for name, value in names.items())
            left += [(value, where) for value, where in found if where not in _MEANT]
        elif type(at).__module__.partition(".")[0] in ("lakehead", "builtins", "collections"):
            left += [(value, place) for value in gc.get_referents(at)]
    return places


def test_nothing_grows_with_each_table_that_is_dropped(tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con:
        service = con._server.service  # type: ignore[attr-defined]
        for name, key in (("a.log", None), ("a.keyed", "k")):
            table = con.create_table(name, SCHEMA, primary_key=key, lake="iceberg", hot_retention="0s")
            with table.writer(writer_id="etl") as writer:
                (writer.upsert if key else writer.append)([{"k": 1, "v": "a"}])
            con.tier(name)
            service.maintain()
            assert table.scan().count() == 1 and con.sql(f"select count(*) from {name}").fetchone() == (1,)
            assert table.lake.offsets()
            next(table.subscribe("earliest")), handle_of(table).staging.turn()
            id = table.describe()["table_id"]
            assert remembered(service, id)
            con.drop_table(name, purge=True)
            service.maintain()
            assert remembered(service, id) == []
