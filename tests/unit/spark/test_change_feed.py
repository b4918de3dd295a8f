"""What orders changes, and what is refused before a table is made."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.api.table import handle_of
from lakehead.client.staging import JobBatch, publish_together
from lakehead.errors import InvalidRequestError, NullKeyError, SchemaMismatchError
from lakehead.spark.change_feed import _DELETED, _SEQUENCE, ChangeFeed, ScdType, _Apply

NAN = float("nan")


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as made:
        yield made


def schema(sequence: pa.DataType, key: str = "k", value: str = "v") -> pa.Schema:
    return pa.schema([(key, pa.int64()), (value, pa.int64()), (_SEQUENCE, sequence), (_DELETED, pa.bool_())])


def feed(scd_type: ScdType, table: str = "a.t", key: str = "k", value: str = "v") -> ChangeFeed:
    beside = f"{table}__sequences" if scd_type == 1 else f"{table}__deletes"
    return ChangeFeed("", table, beside, (key,), (key, value), scd_type)


def apply(con: lh.Connection, changes: ChangeFeed, number: int, rows: pa.Table) -> None:
    """As of a small micro-batch."""
    tables, batch = [con.table(name) for name in (changes.table, changes.beside)], JobBatch("query 1", number)
    held = [handle_of(table).staging.held() for table in tables]
    _Apply(changes, batch).add(tables, held, rows.sort_by([("k", "ascending"), (_SEQUENCE, "ascending")]).to_batches())
    together = [(handle_of(table).staging, [part]) for table, part in zip(tables, held, strict=True)]
    publish_together(batch, together, lasting=True)


@pytest.mark.parametrize("scd_type", [1, 2])
def test_tables_are_made_as_other_writes_make_them(con: lh.Connection, scd_type: ScdType) -> None:
    """What Spark says is never null is so of these rows, not of those to come; its times come as nanoseconds."""
    time = pa.time64("ns")
    fields = [pa.field(c, time, False) for c in ("k", "v", _SEQUENCE)]
    given = pa.schema([*fields, pa.field(_DELETED, pa.bool_())])
    changes = feed(scd_type)
    for number, v in enumerate((5_000, None)):
        given = given.set(1, pa.field("v", time, v is not None))
        changes.require_tables(con, given)
        row = {"k": [1_000], "v": [v], _SEQUENCE: [2_000 + 1_000 * number], _DELETED: [False]}
        apply(con, changes, number, pa.table(row, given.set(1, pa.field("v", time))))
    found = con.table("a.t").scan(columns=["k", "v"]).to_arrow()
    assert found.schema.types == [pa.time64("us")] * 2
    assert sorted(map(str, found["v"].to_pylist())) == ["00:00:00.000005", "None"][2 - scd_type :]


@pytest.mark.parametrize("t", [pa.float32(), pa.float64()])
@pytest.mark.parametrize("nothing", [NAN, None])
def test_a_change_without_a_sequence_is_applied_by_no_split_into_micro_batches(
    con: lh.Connection, t: pa.DataType, nothing: float | None
) -> None:
    changes = feed(1)
    for order in itertools.permutations([1.0, 2.0, nothing]):
        for cuts in itertools.product([False, True], repeat=2):
            parts: list[list[float | None]] = [[]]
            for value, cut in zip(order, (False, *cuts), strict=True):
                parts = [*parts, [value]] if cut else [*parts[:-1], [*parts[-1], value]]
            changes.require_tables(con, schema(t))
            applied, refused = list[float](), 0
            for number, part in enumerate(parts):
                rows = [{"k": 1, "v": int(s) if s in (1.0, 2.0) else -1, _SEQUENCE: s, _DELETED: False} for s in part]
                try:
                    apply(con, changes, number, pa.Table.from_pylist(rows, schema(t)))
                    applied += [s for s in part if s is not None]
                except InvalidRequestError as e:
                    assert "sequence_by is " + ("null" if nothing is None else "NaN") in str(e)
                    refused += 1
            assert refused == 1
            expected = [{"k": 1, "v": int(max(applied))}] if applied else []
            assert con.table("a.t").scan().to_arrow().to_pylist() == expected
            con.drop_table("a.t")
            con.drop_table("a.t__sequences")


@pytest.mark.parametrize("scd_type", [1, 2])
@pytest.mark.parametrize(
    "t",
    [
        pa.null(),
        pa.duration("us"),
        pa.list_(pa.int64()),
        pa.struct([("a", pa.int64())]),
        pa.month_day_nano_interval(),
    ],
)
def test_what_orders_nothing_leaves_no_table(con: lh.Connection, scd_type: ScdType, t: pa.DataType) -> None:
    with pytest.raises(InvalidRequestError, match="sequence_by is of type"):
        feed(scd_type).require_tables(con, schema(t))
    assert con.tables() == []


@pytest.mark.parametrize("t", [pa.float32(), pa.float64(), pa.bool_()])
def test_versions_are_not_known_by_floats_and_booleans(con: lh.Connection, t: pa.DataType) -> None:
    with pytest.raises(InvalidRequestError, match="sequence_by is of type"):
        feed(2).require_tables(con, schema(t))
    assert con.tables() == []
    feed(1).require_tables(con, schema(t))
    assert con.tables() == ["a.t", "a.t__sequences"]


@pytest.mark.parametrize("scd_type", [1, 2])
@pytest.mark.parametrize("key", ["sequence", "SEQUENCE", "Sequence"])
def test_a_key_with_the_name_of_a_column_beside_leaves_no_table(
    con: lh.Connection, scd_type: ScdType, key: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"a key cannot be called '{key}'.*rename it"):
        feed(scd_type, key=key).require_tables(con, schema(pa.int64(), key=key))
    assert con.tables() == []
    feed(scd_type, value=key).require_tables(con, schema(pa.int64(), value=key))


@pytest.mark.parametrize("scd_type", [1, 2])
@pytest.mark.parametrize("there", ["log", "other key", "other type"])
def test_a_table_beside_that_does_not_fit_leaves_no_table(con: lh.Connection, scd_type: ScdType, there: str) -> None:
    sequence = pa.string() if there == "other type" else pa.int64()
    how: dict[str, Any] = {"primary_key": ["k", "sequence"] if scd_type == 2 else ["k"], "bucket_key": ["k"]}
    how = {"log": {}, "other key": {"primary_key": ["sequence"]}, "other type": how}[there]
    beside = feed(scd_type).beside
    con.create_table(beside, pa.schema([("k", pa.int64()), ("sequence", sequence)]), **how)
    with pytest.raises(InvalidRequestError, match=beside):
        feed(scd_type).require_tables(con, schema(pa.int64()))
    assert con.tables() == [beside]


@pytest.mark.parametrize(
    ("how", "fits"),
    [
        ({"bucket_key": ["k"]}, False),
        ({"bucket_key": ["k", "v"]}, True),
        ({"partition_by": ["k"], "bucket_key": ["v"]}, True),
        ({"partition_by": ["k"]}, False),
    ],
    ids=str,
)
def test_versions_are_looked_up_by_all_keys(con: lh.Connection, how: dict[str, Any], fits: bool) -> None:
    columns = pa.schema([("k", pa.int64()), ("v", pa.int64()), ("start_at", pa.int64()), ("end_at", pa.int64())])
    con.create_table("a.t", columns, primary_key=["k", "v", "start_at"], **how)
    changes = ChangeFeed("", "a.t", "a.t__deletes", ("k", "v"), ("k", "v"), 2)
    if fits:
        changes.require_tables(con, schema(pa.int64()))
        return
    with pytest.raises(SchemaMismatchError, match=r"make the table with bucket_key=\[.*'v'\]"):
        changes.require_tables(con, schema(pa.int64()))
    assert con.tables() == ["a.t"]


@pytest.mark.parametrize("scd_type", [1, 2])
def test_a_table_beside_goes_on_with_a_wider_sequence(con: lh.Connection, scd_type: ScdType) -> None:
    changes = feed(scd_type)
    changes.require_tables(con, schema(pa.int32()))
    with con.table(changes.beside).alter() as alteration:
        alteration.add_column("note", pa.string())
    changes.require_tables(con, schema(pa.int32()))
    changes.require_tables(con, schema(pa.int16()))
    remedy = "widen it" if scd_type == 1 else "cast"  # keys cannot be widened
    with pytest.raises(SchemaMismatchError, match=f"is int32, and sequence_by int64: {remedy}"):
        changes.require_tables(con, schema(pa.int64()))
    if scd_type == 1:
        with con.table(changes.beside).alter() as alteration:
            alteration.widen_column("sequence", pa.int64())
        changes.require_tables(con, schema(pa.int64()))


def test_a_sequence_that_a_table_does_not_hold_is_refused(con: lh.Connection) -> None:
    changes = feed(1)
    changes.require_tables(con, schema(pa.int8()))
    rows = {"k": pa.array([1]), "v": pa.array([1]), _SEQUENCE: pa.array([300]), _DELETED: pa.array([False])}
    with pytest.raises(SchemaMismatchError, match=r"sequence_by does not fit into int8, as a\.t__sequences has it"):
        apply(con, changes, 0, pa.table(rows))


@pytest.mark.parametrize(
    ("key", "start", "end", "sequence"),
    [
        (pa.int64(), pa.int64(), pa.int64(), pa.int32()),
        (pa.int64(), pa.int32(), pa.int64(), pa.int32()),
        (pa.int32(), pa.int64(), pa.int64(), pa.int64()),
        (pa.int16(), pa.timestamp("us"), pa.timestamp("us"), pa.timestamp("ms")),
        (pa.int64(), pa.decimal128(20, 0), pa.decimal128(20, 0), pa.decimal128(10, 0)),
        (pa.int64(), pa.large_string(), pa.large_string(), pa.string()),
    ],
)
def test_versions_go_into_a_table_of_other_types(
    con: lh.Connection, key: pa.DataType, start: pa.DataType, end: pa.DataType, sequence: pa.DataType
) -> None:
    """One that was made before, as the database has it or other readers want it."""
    fields = [pa.field("k", key, False), ("v", pa.int32()), pa.field("start_at", start, False), ("end_at", end)]
    con.create_table("a.t", pa.schema(fields), primary_key=["k", "start_at"], bucket_key=["k"])
    changes, of_changes = feed(2), schema(sequence)
    changes.require_tables(con, of_changes)

    def at(numbers: list[int | None], t: pa.DataType) -> list[Any]:
        return pa.array(numbers, pa.int32()).cast(pa.int64() if pa.types.is_temporal(sequence) else sequence).cast(
            sequence
        ).cast(t).to_pylist()  # fmt: skip

    for number, given in enumerate(([(1, 1), (3, 3), (4, None)], [(2, 2)], [(5, 5), (3, 3)])):
        sequences = at([s for s, _ in given], sequence)
        rows = [{"k": 1, "v": v, _SEQUENCE: s, _DELETED: v is None} for s, (_, v) in zip(sequences, given, strict=True)]
        apply(con, changes, number, pa.Table.from_pylist(rows, of_changes))
    found = con.table("a.t").scan().to_arrow().sort_by("start_at")
    assert found["v"].to_pylist() == [1, 2, 3, 5]
    assert found["start_at"].to_pylist() == at([1, 2, 3, 5], start)
    assert found["end_at"].to_pylist() == at([2, 3, 4, None], end)


@pytest.mark.parametrize("scd_type", [1, 2])
def test_a_value_that_a_table_does_not_hold_is_told_by_its_column(con: lh.Connection, scd_type: ScdType) -> None:
    fields = [pa.field("k", pa.int64(), False), ("v", pa.int32())]
    versions = [pa.field("start_at", pa.int64(), False), ("end_at", pa.int64())]
    key = ["k", "start_at"] if scd_type == 2 else ["k"]
    con.create_table(
        "a.t", pa.schema([*fields, *(versions if scd_type == 2 else [])]), primary_key=key, bucket_key=["k"]
    )
    changes = feed(scd_type)
    changes.require_tables(con, schema(pa.int64()))
    rows = pa.Table.from_pylist([{"k": 1, "v": 2**40, _SEQUENCE: 1, _DELETED: False}], schema(pa.int64()))
    with pytest.raises(SchemaMismatchError, match=r"rows for a\.t: column 'v' is int32"):
        apply(con, changes, 0, rows)
    assert con.table("a.t").scan().count() == con.table(changes.beside).scan().count() == 0


def test_a_row_that_comes_again_has_nothing_of_the_one_that_was_deleted_however_micro_batches_are_cut(
    con: lh.Connection,
) -> None:
    """Also where the target has columns that the changes do not have."""
    rng, changes = random.Random(3), feed(1, "a.part")
    for _ in range(25):
        table = con.create_table("a.part", {"k": "int64", "v": "int64", "note": "string"}, primary_key="k")
        changes.require_tables(con, schema(pa.int64()))
        rows = [{"k": k, "v": rng.randrange(9), "s": s} for s, k in enumerate(rng.choices(range(3), k=12))]
        rows = [{"k": r["k"], "v": r["v"], _SEQUENCE: r["s"], _DELETED: rng.random() < 0.4} for r in rows]
        live: dict[int, tuple[int, str | None]] = {}
        for r in rows:
            known = live.pop(r["k"], (0, None))
            if not r[_DELETED]:
                live[r["k"]] = r["v"], known[1]
            if rows.index(r) == 5:
                live = {k: (v, f"note {k}") for k, (v, _) in live.items()}
        number = 0
        for part in (rows[:6], rows[6:]):
            cuts = sorted(rng.sample(range(1, 6), rng.randrange(3)))
            for start, end in itertools.pairwise([0, *cuts, 6]):
                apply(con, changes, number, pa.Table.from_pylist(part[start:end], schema(pa.int64())))
                number += 1
            if part[-1] is rows[5]:
                there = table.scan(columns=["k"]).to_arrow()["k"].to_pylist()
                if there:
                    table.upsert([{"k": k, "note": f"note {k}"} for k in there], columns=["k", "note"])
        found = {r["k"]: (r["v"], r["note"]) for r in table.scan().to_arrow().to_pylist()}
        assert found == live
        con.drop_table("a.part")
        con.drop_table("a.part__sequences")


@pytest.mark.parametrize("scd_type", [1, 2])
@pytest.mark.parametrize("deleted", [False, True])
def test_a_change_of_no_row_is_refused_with_all_of_its_batch(
    con: lh.Connection, scd_type: ScdType, deleted: bool
) -> None:
    changes = feed(scd_type)
    changes.require_tables(con, schema(pa.int64()))
    rows = [{"k": k, "v": 1, _SEQUENCE: n, _DELETED: deleted} for n, k in enumerate((1, 2, None))]
    with pytest.raises(NullKeyError, match=r"changes for a\.t have 1 nulls in the key column 'k': leave them out.*`k`"):
        apply(con, changes, 0, pa.Table.from_pylist(rows, schema(pa.int64())))
    assert all(len(con.table(name).scan().to_arrow()) == 0 for name in con.tables())
