"""Other engines change a lake table in every way they can: each read and round is then exactly right, or one typed stop
that says what to undo; once it is undone, all is right again."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.table import Table as IcebergTable
from pyiceberg.table import Transaction
from pyiceberg.transforms import BucketTransform, IdentityTransform
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DoubleType,
    FixedType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

import lakehead as lh
from lakehead.iceberg.data_files import IcebergFile, LakeWriteSpec, write_data_files, write_position_deletes
from lakehead.iceberg.rowdelta import RowDelta, to_data_file

TABLE = pa.schema(
    [
        pa.field("region", pa.string(), False),
        pa.field("k", pa.int64(), False),
        pa.field("k2", pa.int64(), False),
        pa.field("n", pa.int32()),
        pa.field("a b", pa.string()),
        pa.field("s", pa.struct([("x y", pa.int64()), ("z", pa.string())])),
    ]
)


ADDED = (
    UUIDType(),
    FixedType(3),
    BinaryType(),
    TimeType(),
    TimestamptzType(),
    BooleanType(),
    ListType(1, UUIDType(), False),
    MapType(1, StringType(), 2, UUIDType(), False),
    StructType(NestedField(1, "z", UUIDType(), required=False)),
)
"""Types that tables here do not have, among others."""


def row(k: int, n: int) -> dict[str, Any]:
    return {"region": "ns"[k % 2], "k": k, "k2": k, "n": n, "a b": f"t{n}", "s": {"x y": n, "z": str(k)}}


def plain(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(repr(r) for r in rows)


class Deployed:
    """One table with two rounds in its lake and some rows in its log."""

    def __init__(self, folder: Path, *, keyed: bool, partitioned: bool, trimmed: bool) -> None:
        self.folder, self.keyed = folder, keyed
        self.con = lh.connect(folder)
        options: dict[str, Any] = {"primary_key": ["region", "k", "k2"]} if keyed else {}
        if partitioned:
            options["partition_by"] = ["region"]
        self.table = self.con.create_table(
            "t", TABLE, buckets=2, lake="iceberg", hot_retention="0s" if trimmed else "1h", **options
        )
        self.rows: dict[int, dict[str, Any]] = {}
        self.strangers: list[dict[str, Any]] = []
        self.write(*((k, k) for k in range(8)))
        self.con.tier("t")
        self.write(*((k, k + 100) for k in (range(4, 10) if keyed else range(8, 14))))
        self.con.tier("t")
        self.write((20, 20))
        if trimmed:
            self.con._server.service.maintain()  # type: ignore[attr-defined]

    def write(self, *pairs: tuple[int, int]) -> None:
        rows = [row(k, n) for k, n in pairs]
        (self.table.upsert if self.keyed else self.table.append)(rows)
        self.rows.update((r["k"], r) for r in rows)

    def ice(self) -> IcebergTable:
        return self.table.lake.iceberg()

    def reopen(self) -> None:
        self.con.close()
        self.con = lh.connect(self.folder)
        self.table = self.con.table("t")

    def reads(self) -> dict[str, tuple[Callable[[], Any], Any]]:
        """Every way to read, and what must come."""
        t, own = self.table, list(self.rows.values())
        everything = [*own, *self.strangers]
        reads: dict[str, tuple[Callable[[], Any], Any]] = {
            "scan": (lambda: plain(t.scan().to_arrow().to_pylist()), plain(everything)),
            "count": (lambda: t.scan().count(), len(everything)),
            "sql count": (lambda: self.con.sql("select count(*) from t").fetchall(), [(len(everything),)]),
            "where": (
                lambda: plain(t.scan(where="n >= 5 and k < 12").to_arrow().to_pylist()),
                plain([r for r in everything if r["n"] >= 5 and r["k"] < 12]),
            ),
            "column": (
                lambda: sorted(r["a b"] for r in t.scan(["a b"], where="region = 'n'").to_arrow().to_pylist()),
                sorted(r["a b"] for r in everything if r["region"] == "n"),
            ),
            "sql": (
                lambda: self.con.sql('select count(*), sum(n), max("a b"), sum(s."x y") from t').fetchall(),
                [(len(everything), *(f(r["n"] for r in everything) for f in (sum,)), *self._rest(everything))],
            ),
        }
        if not self.keyed:
            reads["history"] = (
                lambda: plain(
                    [
                        {c: r[c] for c in TABLE.names}
                        for b in t.subscribe("earliest", stop="now")
                        for r in b.rows.to_pylist()
                    ]
                ),
                plain(own),
            )
        return reads

    @staticmethod
    def _rest(rows: list[dict[str, Any]]) -> tuple[Any, ...]:
        return max(r["a b"] for r in rows), sum(r["s"]["x y"] for r in rows)

    def outcomes(self) -> dict[str, str]:
        """``right`` or ``stopped`` per read, then of a round and the reads after it."""
        found = {}
        for again in ("", " after a round"):
            for name, (call, expected) in self.reads().items():
                found[name + again] = outcome(call, expected)
            if not again:
                self.write((30 + len(self.rows), 30))
                found["tier"] = outcome(lambda: self.con.tier("t").snapshot_id is not None, True)
        return found


def outcome(call: Callable[[], Any], expected: Any) -> str:
    try:
        got = call()
    except lh.LakeStateError as e:
        assert any(w in str(e) for w in ("back", "again", "drop", "undo", "restore")), f"no remedy in: {e}"
        return "stopped"
    return "right" if got == expected else f"WRONG: {got}, and must be {expected}"


# ---- what others do -------------------------------------------------------------------------------------------------

Edit = Callable[[Deployed], None]


def schema(*steps: Callable[[Any], object], loose: bool = False) -> Edit:
    def edit(d: Deployed) -> None:
        for step in steps:
            with d.ice().update_schema(allow_incompatible_changes=loose) as update:
                step(update)

    return edit


def spec(*steps: Callable[[Any], object]) -> Edit:
    def edit(d: Deployed) -> None:
        for step in steps:
            with d.ice().update_spec() as update:
                step(update)

    return edit


def both(*edits: Edit) -> Edit:
    def edit(d: Deployed) -> None:
        for e in edits:
            e(d)

    return edit


def rewrite(
    change: Callable[[pa.Table], pa.Table] = lambda rows: rows.sort_by("k"), *, bare: bool = False, odd: bool = False
) -> Edit:
    """All files of a partition become one; ``bare`` without any statistics, ``odd`` with other names of columns."""

    def edit(d: Deployed) -> None:
        ice = d.ice()
        transaction = Transaction(ice)
        delta = RowDelta(transaction, {})
        tasks = list(ice.scan().plan_files())
        rows = ice.scan().to_arrow()
        written_by = LakeWriteSpec.of(ice, target_file_bytes=1 << 30)
        groups = {tuple(t.file.partition[i] for i in range(len(t.file.partition))): t.file for t in tasks}
        for t in tasks:
            delta.delete_data_file(t.file)
        for f in {f for t in tasks for f in t.delete_files}:
            delta.remove_deletes(f)
        for partition in groups:
            mine = rows.filter(pc.equal(rows["__bucket"], partition[-1]))
            if len(partition) > 1:
                mine = mine.filter(pc.equal(mine[rows.schema.names[rows.schema.names.index("region")]], partition[0]))
            part = change(mine)
            if part.num_rows:
                for f in write_data_files(written_by, part.combine_chunks().to_batches(), partition):
                    if odd:
                        f = spelled_oddly(f)
                    delta.append_data_file(to_data_file(dataclasses.replace(f, statistics={}) if bare else f))
        delta.commit()
        transaction.commit_transaction()

    return edit


def spelled_oddly(f: IcebergFile) -> IcebergFile:
    """What writers do that allow only some characters in names, and statistics of which nobody may need."""

    def spelled(f: pa.Field) -> pa.Field:
        t = f.type
        if pa.types.is_struct(t):
            t = pa.struct([spelled(t.field(i)) for i in range(t.num_fields)])
        return pa.field(f"_{f.name.replace(' ', '_x20')}", t, f.nullable, f.metadata)

    path = Path(f.path.removeprefix("file://"))
    rows = pq.read_table(path, partitioning=None)
    odd = pa.schema([spelled(f) for f in rows.schema])
    columns = [rename(rows.column(i).combine_chunks(), f.type) for i, f in enumerate(odd)]
    pq.write_table(pa.Table.from_arrays(columns, schema=odd), path, write_statistics=False)
    return dataclasses.replace(f, size=path.stat().st_size)


def rename(array: pa.Array, t: pa.DataType) -> pa.Array:
    if not pa.types.is_struct(t):
        return array
    return pa.StructArray.from_arrays(
        [array.field(i) for i in range(t.num_fields)],
        fields=[t.field(i) for i in range(t.num_fields)],
        mask=array.is_null(),
    )


def delete_by_position(d: Deployed) -> None:
    ice = d.ice()
    transaction = Transaction(ice)
    delta = RowDelta(transaction, {})
    f = next(iter(ice.scan().plan_files())).file
    partition = tuple(f.partition[i] for i in range(len(f.partition)))
    spec_of_files = LakeWriteSpec.of(ice, target_file_bytes=0)
    gone = write_position_deletes(spec_of_files, {f.file_path: np.array([0])}, spec_id=f.spec_id, partition=partition)
    delta.add_deletes(to_data_file(gone))
    delta.commit()
    transaction.commit_transaction()


def append_strangers(d: Deployed) -> None:
    lake = d.ice().schema().as_arrow()
    given = row(50, 50)
    d.ice().append(pa.Table.from_pylist([given], pa.schema([f.remove_metadata() for f in lake])))
    if not d.keyed:
        d.strangers.append(given)


def append_a_copy(d: Deployed) -> None:
    d.ice().append(d.ice().scan(row_filter="k == 1").to_arrow())


def expire(d: Deployed) -> None:
    ice = d.ice()
    old = [s.snapshot_id for s in ice.metadata.snapshots if s.snapshot_id != ice.metadata.current_snapshot_id]
    ice.maintenance.expire_snapshots().by_ids(old).commit()


def to_first(d: Deployed) -> None:
    d.ice().manage_snapshots().set_current_snapshot(d.ice().metadata.snapshots[0].snapshot_id).commit()


def to_marked(d: Deployed) -> None:
    """The undo that messages name: back to the snapshot that tiering wrote last."""
    marked = [
        s for s in d.ice().metadata.snapshots if s.summary and "lakehead.offsets" in s.summary.additional_properties
    ]
    d.ice().manage_snapshots().set_current_snapshot(marked[-1].snapshot_id).commit()


def properties(**values: str | None) -> Edit:
    def edit(d: Deployed) -> None:
        with d.ice().transaction() as tx:
            for name, value in values.items():
                key = name.replace("__offset", "%").replace("_", ".").replace("%", "__offset")
                tx.remove_properties(key) if value is None else tx.set_properties({key: value})

    return edit


def branch(d: Deployed) -> None:
    ice = d.ice()
    ice.manage_snapshots().create_branch(ice.metadata.current_snapshot_id, "b").commit()
    d.ice().append(d.ice().scan().to_arrow().slice(0, 1), branch="b")


def round_without_metrics(d: Deployed) -> None:
    d.write((40, 40))
    d.con.tier("t")


NO_METRICS = properties(write_metadata_metrics_default="none", **{"write_metadata_metrics_column___offset": "none"})
RIGHT: dict[str, Edit] = {
    "nothing": lambda d: None,
    "rename and back": schema(lambda u: u.rename_column("n", "m"), lambda u: u.rename_column("m", "n")),
    "add": schema(lambda u: u.add_column("extra", LongType())),
    "add each type": schema(*(lambda u, t=t: u.add_column(f"of {t}", t) for t in ADDED)),
    "add, then compact": both(schema(lambda u: u.add_column("extra", LongType())), rewrite()),
    "move": schema(lambda u: u.move_first("n")),
    "move, then compact": both(schema(lambda u: u.move_first("n")), rewrite()),
    "widen, then compact": both(schema(lambda u: u.update_column("n", LongType())), rewrite()),
    "rename, compact, back": both(
        schema(lambda u: u.rename_column("n", "m")), rewrite(), schema(lambda u: u.rename_column("m", "n"))
    ),
    "spec and back": spec(
        lambda u: u.add_field("n", IdentityTransform(), "n_part"), lambda u: u.remove_field("n_part")
    ),
    "compact": rewrite(),
    "compact backwards": rewrite(lambda rows: rows.sort_by([("k", "descending")])),
    "compact without metrics": rewrite(bare=True),
    "compact with odd names": rewrite(odd=True, bare=True),
    "compact, expire": both(rewrite(), expire),
    "no metrics": both(NO_METRICS, round_without_metrics, rewrite(bare=True)),
    "strangers": append_strangers,
    "expire": expire,
    "roll back and forth": both(to_first, to_marked),
    "no mark": properties(lakehead_mark=None),
    "no contract": properties(lakehead_contract=None),
    "branch": branch,
}
STOP: dict[str, tuple[Edit, Edit | None]] = {
    "rename": (schema(lambda u: u.rename_column("n", "m")), schema(lambda u: u.rename_column("m", "n"))),
    "rename partition": (
        schema(lambda u: u.rename_column("region", "r")),
        schema(lambda u: u.rename_column("r", "region")),
    ),
    "rename inside": (schema(lambda u: u.rename_column("s.z", "zz")), schema(lambda u: u.rename_column("s.zz", "z"))),
    "rename offset": (
        schema(lambda u: u.rename_column("__offset", "o")),
        schema(lambda u: u.rename_column("o", "__offset")),
    ),
    "drop": (schema(lambda u: u.delete_column("n")), None),
    "drop and add": (schema(lambda u: u.delete_column("n"), lambda u: u.add_column("n", LongType())), None),
    "swap": (
        schema(*(lambda u, a=a, b=b: u.rename_column(a, b) for a, b in [("k", "x"), ("k2", "k"), ("x", "k2")])),
        schema(*(lambda u, a=a, b=b: u.rename_column(a, b) for a, b in [("k", "x"), ("k2", "k"), ("x", "k2")])),
    ),
    "add required": (
        schema(lambda u: u.add_column("must", LongType(), required=True), loose=True),
        schema(lambda u: u.make_column_optional("must")),
    ),
    "partition more": (
        spec(lambda u: u.add_field("n", IdentityTransform(), "n_part")),
        spec(lambda u: u.remove_field("n_part")),
    ),
    "unpartition": (
        spec(lambda u: u.remove_field("__bucket")),
        spec(lambda u: u.add_field("__bucket", IdentityTransform(), "__bucket")),
    ),
    "rebucket": (
        spec(lambda u: (u.remove_field("__bucket"), u.add_field("k", BucketTransform(8), "k8"))),
        spec(lambda u: (u.remove_field("k8"), u.add_field("__bucket", IdentityTransform(), "__bucket"))),
    ),
    "delete": (lambda d: d.ice().delete("k == 1"), to_marked),
    "delete by position": (delete_by_position, to_marked),
    "delete all": (lambda d: d.ice().delete(AlwaysTrue()), to_marked),
    "delete, then compact": (both(delete_by_position, rewrite()), to_marked),
    "delete, then expire": (both(delete_by_position, expire), None),
    "copy": (append_a_copy, to_marked),
    "strangers in a keyed table": (append_strangers, to_marked),
    "roll back": (to_first, to_marked),
}


def deployed(tmp_path: Path, number: int, keyed: bool) -> Deployed:
    """Partitioned or not, the log trimmed or not, in turn."""
    partitioned, trimmed = (number + keyed) % 2 == 0, (number // 2 + keyed) % 2 == 0
    return Deployed(tmp_path / "data", keyed=keyed, partitioned=partitioned, trimmed=trimmed)


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "log"])
@pytest.mark.parametrize("name", RIGHT)
def test_what_leaves_every_row_in_place_is_taken_as_it_is(tmp_path: Path, name: str, keyed: bool) -> None:
    if name == "strangers" and keyed:
        name = "nothing"
    d = deployed(tmp_path, list(RIGHT).index(name), keyed)
    with d.con:
        RIGHT[name](d)
        assert {k: o for k, o in d.outcomes().items() if o != "right"} == {}
        d.reopen()
        assert {k: o for k, o in d.outcomes().items() if o != "right"} == {}
        d.con.close()


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "log"])
@pytest.mark.parametrize("name", STOP)
def test_all_else_is_a_stop_until_it_is_undone(tmp_path: Path, name: str, keyed: bool) -> None:
    if name == "strangers in a keyed table" and not keyed:
        name = "copy"
    edit, undo = STOP[name]
    d = deployed(tmp_path, list(STOP).index(name), keyed)
    with d.con:
        edit(d)
        for _ in range(2):
            found = d.outcomes()
            assert {o for o in found.values()} <= {"right", "stopped"}, found
            assert found["scan"] == found["tier"] == found["scan after a round"] == "stopped", found
            if name == "roll back":  # such a table does not open
                break
            d.reopen()
        if undo is not None:
            undo(d)
            assert {k: o for k, o in d.outcomes().items() if o != "right"} == {}
        d.con.close()


def test_floats_that_another_engine_widened_are_found_as_they_are_read(tmp_path: Path) -> None:
    """It writes doubles that no float is: their rows match by what a read makes of them, not by what the files say."""
    inner = pa.struct([("g", pa.float32())])
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table("t", pa.schema([("k", pa.int32()), ("f", pa.float32()), ("s", inner)]), lake="iceberg")
        table.append([{"k": 0, "f": 0.5, "s": {"g": 0.5}}])
        con.tier("t")
        with table.lake.iceberg().update_schema() as update:
            update.update_column("f", DoubleType())
            update.update_column("s.g", DoubleType())
        wide = pa.schema([f.remove_metadata() for f in table.lake.iceberg().schema().as_arrow()])
        for k, value in enumerate([0.1, 0.7, 16777217.0, 1e-50], start=1):
            theirs = pa.Table.from_pylist([{"k": k, "f": value, "s": {"g": value}}], wide)
            table.lake.iceberg().append(theirs)
        rows = table.scan().to_arrow().to_pylist()
        for row in rows:
            value = row["f"]
            assert row["s"]["g"] == value
            for op, meets in (("=", operator.eq), ("<=", operator.le), (">=", operator.ge), ("<>", operator.ne)):
                want = sorted(r["k"] for r in rows if meets(r["f"], value))
                for column in ("f", "s.g"):
                    for tier in ("union", "lake"):
                        found = table.scan(["k"], where=f"{column} {op} {value!r}", tier=tier).to_arrow()
                        assert sorted(found["k"].to_pylist()) == want, (column, op, value, tier)


def test_values_that_another_engine_has_written_and_no_type_here_holds(tmp_path: Path) -> None:
    """Until they are gone there, what does not need them is read."""
    schema = pa.schema([("n", pa.int64()), ("v", pa.int8())])
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table("shop.small", schema, lake="iceberg")
        table.append([{"n": 1, "v": 1}])
        con.tier("shop.small")
        theirs = {"n": [2, 3], "v": pa.array([300, 5], pa.int32()), "__bucket": pa.array([0, 0], pa.int32())}
        table.lake.iceberg().append(pa.table(theirs))
        told = r"^lake table shop\.small holds values .* \(Integer value 300 .*\): another engine has written them"
        for read in (table.scan().to_arrow, con.sql("from shop.small").fetchall):
            with pytest.raises(lh.LakeStateError, match=told):
                read()
        assert sorted(table.scan(columns=["n"]).to_arrow()["n"].to_pylist()) == [1, 2, 3]
        table.append([{"n": 4, "v": 4}])
        con.tier("shop.small")
        table.lake.iceberg().delete("n = 2")
        assert sorted(con.sql("from shop.small").fetchall()) == [(1, 1), (3, 5), (4, 4)]


def test_no_change_here_is_taken_while_the_lake_is_to_be_changed_back(tmp_path: Path) -> None:
    """It would be in the way of changing it back."""
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table("t", [("k", "int64"), ("s", "string")], lake="iceberg")
        table.append([{"k": 1}])
        con.tier("t")
        with table.lake.iceberg().update_schema() as update:
            update.rename_column("s", "z")
        changes: list[Callable[[Any], object]] = [
            lambda a: a.set_comment("k", "about it"),
            lambda a: a.add_column("n", pa.int64()),
            lambda a: a.rename_column("s", "t"),
        ]
        for change in changes:
            with pytest.raises(lh.LakeStateError, match="rename it back"), table.alter() as alteration:
                change(alteration)
        with table.lake.iceberg().update_schema() as update:
            update.rename_column("z", "s")
        assert table.scan().to_arrow().to_pylist() == [{"k": 1, "s": None}]


def test_names_of_columns_that_cannot_be_read_are_told_before_a_table_is_altered(tmp_path: Path) -> None:
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table("shop.named", pa.schema([("n", pa.int64())]), lake="iceberg")
        table.append([{"n": 1}])
        con.tier("shop.named")
        with table.lake.iceberg().transaction() as change:
            change.set_properties({"schema.name-mapping.default": "[{"})
        with pytest.raises(lh.LakeStateError) as caught, table.alter() as alteration:
            alteration.add_column("x", pa.string())
        assert "schema.name-mapping.default" in str(caught.value) and "\n" not in str(caught.value)
        assert "https" not in str(caught.value)
        assert con.table("shop.named").schema.names == ["n"] and table.scan().count() == 1
