"""What the tables that streaming queries write must hold: computed in plain Python from what they read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

import lakehead as lh

COPIED = {"t.log_sync": "s.log_sync", "t.log_lake": "s.log_lake"}
SOURCE = "t.log_sync"
_WRITERS_APART = 1_000_000
KEY = f"cast(w * {_WRITERS_APART} + if(n % 3 = 0, -(n % 393), n div 5) as bigint)"
"""Of a row, in SQL: some keys are written again and again, others by rows that are next to each other."""
LAYERS: dict[str, tuple[pa.Schema, str | None]] = {
    "l.bronze": (pa.schema([("w", pa.int32()), ("n", pa.int64()), ("s", pa.string())]), None),
    "l.silver": (pa.schema([("k", pa.int64()), ("w", pa.int32()), ("newest", pa.int64())]), "k"),
    "l.gold": (pa.schema([("w", pa.int32()), ("many", pa.int64()), ("total", pa.int64()), ("keys", pa.int64())]), "w"),
}

Row: TypeAlias = tuple[Any, ...]
Tables: TypeAlias = dict[str, list[Row]]


def key_of(writer: int, number: int) -> int:
    """`KEY`."""
    return writer * _WRITERS_APART + (-(number % 393) if number % 3 == 0 else number // 5)


def layers_of(rows: Iterable[Row]) -> Tables:
    """What bronze, silver and gold have of (writer, number, text)."""
    bronze = sorted(rows)
    silver: dict[int, Row] = {}
    gold: dict[int, Row] = {}
    for writer, number, _ in bronze:
        key = key_of(writer, number)
        many, total, keys = gold.get(writer, (0, 0, 0))
        gold[writer] = (many + 1, total + number, keys + (key not in silver))
        silver[key] = (writer, number)
    return {"l.bronze": bronze, "l.silver": _with_keys(silver), "l.gold": _with_keys(gold)}


def _with_keys(found: Mapping[int, Row]) -> list[Row]:
    return sorted((key, *values) for key, values in found.items())


def change_of(row: Row) -> Row:
    """The change (key, sequence, text; None deletes) that a row (writer, number, text) is."""
    writer, number, text = row
    return key_of(writer, number), number ^ 5, None if number % 7 == 0 else text


def newest_of(changes: Iterable[Row]) -> list[Row]:
    """Keys and texts of type 1."""
    last = {key: text for key, _, text in sorted(changes, key=lambda c: c[:2])}
    return sorted((key, text) for key, text in last.items() if text is not None)


def versions_of(changes: Iterable[Row]) -> list[Row]:
    """Rows of type 2: key, text, and the sequences from which and until which it was in force."""
    ordered = sorted(changes, key=lambda c: c[:2])
    following = itertools.zip_longest(ordered, ordered[1:], fillvalue=(None, None, None))
    return sorted(
        (key, text, sequence, after[1] if after[0] == key else None)
        for (key, sequence, text), after in following
        if text is not None
    )


def rows_of(con: lh.Connection, table: str, columns: Sequence[str] | None = None) -> list[Row]:
    """The rows of a table, sorted; none of one that does not exist yet."""
    if table not in con.tables():
        return []
    rows = con.table(table).scan(columns=columns).to_arrow()
    return sorted(zip(*(column.to_pylist() for column in rows.columns), strict=True))


def _source(con: lh.Connection) -> list[Row]:
    return rows_of(con, SOURCE, ["w", "n", "s"])


def _dimensions(con: lh.Connection) -> Tables:
    changes = [change_of(row) for row in _source(con)]
    return {"l.scd1": newest_of(changes), "l.scd2": versions_of(changes)}


READ: dict[str, Callable[[lh.Connection], Tables]] = {
    "stream": lambda con: {copy: rows_of(con, table) for table, copy in COPIED.items()},
    "pipeline": lambda con: layers_of(_source(con)),
    "changes": _dimensions,
}
"""What the tables have once the queries have read everything; by the kind of a step."""


def _dimensions_by_what_is_beside(con: lh.Connection) -> Tables:
    last = []
    for key, sequence in rows_of(con, "l.scd1__sequences", ["k", "sequence"]):
        writer, number = round(key / _WRITERS_APART), sequence ^ 5
        last.append(change_of((writer, number, f"row {number} of {writer}")))
    versions = [(key, start, text) for key, text, start, _ in rows_of(con, "l.scd2", _TYPE_2)]
    deletes = [(key, sequence, None) for key, sequence in rows_of(con, "l.scd2__deletes", ["k", "sequence"])]
    return {"l.scd1": newest_of(last), "l.scd2": versions_of([*versions, *deletes])}


TOGETHER: dict[str, Callable[[lh.Connection], Tables]] = {
    "stream": lambda con: {},
    "pipeline": lambda con: layers_of(rows_of(con, "l.bronze", ["w", "n", "s"])),
    "changes": _dimensions_by_what_is_beside,
}
"""What tables have by what others have that are published together with them, however far the queries have come."""

_TYPE_2 = ["k", "s", "start_at", "end_at"]
_COLUMNS = {name: schema.names for name, (schema, _) in LAYERS.items()} | {"l.scd1": ["k", "s"], "l.scd2": _TYPE_2}


def wrong_tables(con: lh.Connection, expected: Tables) -> dict[str, str]:
    """What tables have that they should not have, and what they lack."""
    wrong = {}
    for name, rows in expected.items():
        found = rows_of(con, name, _COLUMNS.get(name))
        if found != rows:
            strange, lacking = sorted(set(found) - set(rows), key=repr), sorted(set(rows) - set(found), key=repr)
            wrong[name] = f"{len(found)} rows, not {len(rows)}: strange are {strange[:5]}, lacking {lacking[:5]}"
    return wrong
