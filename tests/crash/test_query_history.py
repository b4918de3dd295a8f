"""What streaming queries write is checked by this: rows that are lost, doubled or in one table alone are seen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.crash.history import LOG_SCHEMA, log_rows
from tests.crash.query_history import (
    LAYERS,
    READ,
    SOURCE,
    TOGETHER,
    Tables,
    change_of,
    key_of,
    layers_of,
    newest_of,
    rows_of,
    versions_of,
    wrong_tables,
)

import lakehead as lh

DIMENSIONS: dict[str, tuple[pa.Schema, list[str]]] = {
    "l.scd1": (pa.schema([("k", pa.int64()), ("s", pa.string())]), ["k"]),
    "l.scd1__sequences": (pa.schema([("k", pa.int64()), ("sequence", pa.int64())]), ["k"]),
    "l.scd2": (
        pa.schema([("k", pa.int64()), ("s", pa.string()), ("start_at", pa.int64()), ("end_at", pa.int64())]),
        ["k", "start_at"],
    ),
    "l.scd2__deletes": (pa.schema([("k", pa.int64()), ("sequence", pa.int64())]), ["k", "sequence"]),
}


def source_rows(numbers: range) -> list[tuple[Any, ...]]:
    return [(1, n, f"row {n} of 1") for n in numbers]


def written(con: lh.Connection, tables: Tables) -> None:
    for name, rows in tables.items():
        table = con.table(name)
        given = pa.Table.from_pylist([dict(zip(table.schema.names, row, strict=True)) for row in rows], table.schema)
        (table.upsert if table.primary_key else table.append)(given)


def dimensions(numbers: range) -> Tables:
    """All four tables, as after these rows of writer 1."""
    changes = [change_of(row) for row in source_rows(numbers)]
    last = {key: sequence for key, sequence, _ in sorted(changes, key=lambda c: c[:2])}
    return {
        "l.scd1": newest_of(changes),
        "l.scd1__sequences": sorted(last.items()),
        "l.scd2": versions_of(changes),
        "l.scd2__deletes": [(key, sequence) for key, sequence, text in changes if text is None],
    }


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path) as con:
        con.create_table(SOURCE, LOG_SCHEMA).append(log_rows(1, range(900)))
        for name, (schema, key) in (*LAYERS.items(), *DIMENSIONS.items()):
            con.create_table(name, schema, primary_key=key)
        yield con


def test_layers_and_dimensions_by_hand() -> None:
    rows = [(1, n, f"row {n} of 1") for n in (0, 1, 2, 400)]
    assert key_of(1, 396) == key_of(1, 3) == 999_997
    assert key_of(1, 1) == key_of(1, 2) == key_of(1, 0) == 1_000_000 and key_of(1, 400) == 1_000_080
    assert layers_of(reversed(rows)) == {
        "l.bronze": rows,
        "l.silver": [(1_000_000, 1, 2), (1_000_080, 1, 400)],
        "l.gold": [(1, 4, 403, 2)],
    }
    changes = [(7, 5, "c"), (7, 1, "a"), (7, 3, None), (8, 2, "x"), (8, 4, None), (9, 1, None)]
    assert newest_of(changes) == [(7, "c")]
    assert versions_of(changes) == [(7, "a", 1, 3), (7, "c", 5, None), (8, "x", 2, 4)]
    assert versions_of([(7, 1, "b"), (7, 2, "a")]) == [(7, "a", 2, None), (7, "b", 1, 2)]


@pytest.mark.parametrize("kind", ["pipeline", "changes"])
def test_tables_that_are_behind_fit_together_but_not_what_was_read(con: lh.Connection, kind: str) -> None:
    part = layers_of(source_rows(range(600))) if kind == "pipeline" else dimensions(range(600))
    written(con, part)
    assert wrong_tables(con, TOGETHER[kind](con)) == {}
    assert wrong_tables(con, READ[kind](con)).keys() == {name for name in part if "__" not in name}


def test_layers_that_have_everything_fit(con: lh.Connection) -> None:
    written(con, layers_of(source_rows(range(900))))
    assert wrong_tables(con, READ["pipeline"](con)) == wrong_tables(con, TOGETHER["pipeline"](con)) == {}


def test_dimensions_that_have_everything_fit(con: lh.Connection) -> None:
    written(con, dimensions(range(900)))
    assert wrong_tables(con, READ["changes"](con)) == wrong_tables(con, TOGETHER["changes"](con)) == {}


def test_rows_that_are_there_twice_are_seen(con: lh.Connection) -> None:
    written(con, layers_of(source_rows(range(900))))
    written(con, {"l.bronze": source_rows(range(5))})
    assert wrong_tables(con, READ["pipeline"](con)).keys() == {"l.bronze"}


@pytest.mark.parametrize("alone", [*LAYERS, *DIMENSIONS])
def test_a_micro_batch_that_is_in_one_table_alone_is_seen(con: lh.Connection, alone: str) -> None:
    kind, of = ("pipeline", lambda n: layers_of(source_rows(n))) if alone in LAYERS else ("changes", dimensions)
    written(con, of(range(600)))
    before = set(rows_of(con, alone))
    written(con, {alone: [row for row in of(range(900))[alone] if row not in before]})
    assert wrong_tables(con, TOGETHER[kind](con))
