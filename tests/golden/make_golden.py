"""Writes the golden folders of this version: ``python -m tests.golden.make_golden``. See README.md before running it.

Each folder becomes ``tests/golden/<format>/<name>.tar.gz`` and beside it ``<name>.json``, what it holds: rows as the
script wrote them (not as the program read them), and the log with the offsets that the program gave out.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.golden.relocation import PLACEHOLDER, padded, relocate

import lakehead as lh
from lakehead.api.table import handle_of
from lakehead.client.staging import JobBatch
from lakehead.server.endpoint import LocalEndpoint
from lakehead.server.metadata import FORMAT_VERSION

HERE = Path(__file__).parent
EVERY_TYPE = pa.schema(
    [
        ("n", pa.int64()),
        ("flag", pa.bool_()),
        ("i8", pa.int8()),
        ("i16", pa.int16()),
        ("i32", pa.int32()),
        ("f32", pa.float32()),
        ("f64", pa.float64()),
        ("small", pa.decimal128(9, 2)),
        ("large", pa.decimal128(38, 10)),
        ("day", pa.date32()),
        ("t32", pa.time32("ms")),
        ("t64", pa.time64("us")),
        ("at_s", pa.timestamp("s")),
        ("at", pa.timestamp("us")),
        ("at_utc", pa.timestamp("us", "UTC")),
        ("at_oslo", pa.timestamp("ms", "Europe/Oslo")),
        ("text", pa.string()),
        ("long_text", pa.large_string()),
        ("raw", pa.binary()),
        ("long_raw", pa.large_binary()),
        ("fixed", pa.binary(4)),
        ("tags", pa.list_(pa.string())),
        ("point", pa.struct([("x", pa.int32()), ("y", pa.list_(pa.float64()))])),
        ("counts", pa.map_(pa.string(), pa.int64())),
    ]
)
ORDERS = pa.schema(
    [
        ("region", pa.string()),
        ("id", pa.int64()),
        ("status", pa.string()),
        ("amount", pa.decimal128(12, 2)),
        ("tags", pa.list_(pa.string())),
    ]
)
USERS = pa.schema([("name", pa.string()), ("number", pa.int32()), ("mail", pa.string()), ("visits", pa.int64())])
CLICKS = pa.schema([("day", pa.date32()), ("user", pa.string()), ("page", pa.int32()), ("seconds", pa.float64())])
DAYS = [dt.date(2026, 2, 27) + dt.timedelta(days=d) for d in range(3)]
REGIONS = ("north", "süd")
FOR_EVER = "36500d"

Rows = list[dict[str, Any]]


def every_type(n: int) -> dict[str, Any]:
    """A row of `EVERY_TYPE`; every fifth is null but for its number."""
    if n % 5 == 4:
        return {**dict.fromkeys(EVERY_TYPE.names), "n": n}
    at = dt.datetime(1969, 12, 31, 23, 0, 0) + dt.timedelta(days=400 * n, microseconds=7 * n)
    return {
        "n": n,
        "flag": n % 3 == 0,
        "i8": n % 256 - 128,
        "i16": 37 * n % 65536 - 32768,
        "i32": -n,
        "f32": n / 4,
        "f64": float("inf") if n % 17 == 0 else n / 3,
        "small": Decimal(n - 40) / 4,
        "large": Decimal(10) ** 27 + n if n % 2 else Decimal(-n),
        "day": at.date(),
        "t32": dt.time(n % 24, n % 60, 1, 2000),
        "t64": dt.time(n % 24, 59, n % 60, n),
        "at_s": at.replace(microsecond=0),
        "at": at,
        "at_utc": at.replace(tzinfo=dt.UTC),
        "at_oslo": at.replace(microsecond=1000 * n, tzinfo=dt.UTC),
        "text": "å" * (n % 40),
        "long_text": f"text {n}",
        "raw": bytes(range(n % 20)),
        "long_raw": b"\xff" * (n % 3),
        "fixed": n.to_bytes(4, "little"),
        "tags": None if n % 4 == 0 else ["a", None, "æ" * (n % 3)][: n % 4],
        "point": {"x": n, "y": [float(n), None]} if n % 3 else {"x": None, "y": None},
        "counts": [("k", n), ("l", None)][: n % 3],
    }


def clicks(first: int, count: int) -> Rows:
    return [
        {"day": DAYS[n % 3], "user": f"user {n % 7}", "page": n, "seconds": None if n % 6 == 0 else n / 2}
        for n in range(first, first + count)
    ]


def plain(value: object) -> object:
    """A value as JSON holds it, the same for every version."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dt.datetime):
        return (value.astimezone(dt.UTC) if value.tzinfo else value).isoformat()
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return format(value.normalize(), "f")
    return str(value) if value == float("inf") else value


def in_order(table: lh.Table, rows: Rows) -> list[Any]:
    """Rows as lists in JSON, sorted by their text, as scans give them in any order."""
    return sorted((plain([r[c] for c in table.schema.names]) for r in rows), key=json.dumps)


def log_of(table: lh.Table) -> list[Any]:
    """Every record of a table's log: partition, bucket, offset, change, time and row, in order."""
    found = []
    for batch in table.subscribe("earliest", stop="now"):
        for row in batch.rows.to_pylist():
            change = [row.get("__change_type", "+A"), row["__timestamp"], [row[c] for c in table.schema.names]]
            found.append(plain([batch.tablet.partition, batch.tablet.bucket, row["__offset"], *change]))
    return sorted(found, key=lambda record: json.dumps(record[:2]) + f"{record[2]:9}")


class Keyed:
    """A keyed table and what it holds."""

    def __init__(self, table: lh.Table) -> None:
        self.table = table
        self.rows: dict[tuple[Any, ...], dict[str, Any]] = {}

    def key(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[c] for c in self.table.primary_key)

    def upsert(self, rows: Rows) -> None:
        self.table.upsert(rows)
        for row in rows:
            old = self.rows.get(self.key(row), dict.fromkeys(self.table.schema.names))
            self.rows[self.key(row)] = {**old, **row}

    def delete(self, rows: Rows) -> None:
        self.table.delete([dict(zip(self.table.primary_key, self.key(r), strict=True)) for r in rows])
        for row in rows:
            self.rows.pop(self.key(row), None)


def order(n: int, status: str = "new") -> dict[str, Any]:
    tags = [status, "x"][: n % 3] if n % 4 else None
    return {"region": REGIONS[n % 2], "id": n, "status": status, "amount": Decimal(n) / 4, "tags": tags}


def user(n: int, visits: int = 0) -> dict[str, Any]:
    return {"name": f"name {n}", "number": n % 9, "mail": f"{n}@example.org" * (n % 4), "visits": visits}


def trim(con: lh.Connection, table: lh.Table) -> None:
    """Checkpoint every tablet and trim its log, whatever its age; the properties keep servers from doing more."""
    assert isinstance(con._server, LocalEndpoint)
    offsets = table.lake.offsets() if table.describe()["lake"] else None
    for key, tablet in con._server.service._tables.get(table.describe()["table_id"]).tablets.items():
        tablet.maintain(2**60, 0, None if offsets is None else offsets[table._desc.tablet_id(key)])
        assert tablet.log_start_offset > 0


def fill_types(con: lh.Connection, name: str, counts: list[int], compression: str) -> Rows:
    """Every type in several segments; batches from 256 rows have statistics (from 64, in older formats)."""
    table = con.create_table(name, EVERY_TYPE, compression=compression, segment_bytes=3000)
    rows = [every_type(n) for n in range(sum(counts))]
    for i, count in enumerate(counts):
        start = sum(counts[:i])
        table.append(rows[start : start + count])
    return rows


def fill_visits(con: lh.Connection) -> Rows:
    """A partitioned log table and a named writer."""
    table = con.create_table("shop.visits", CLICKS, partition_by=["day"], buckets=2, bucket_key=["user"])
    with table.writer("etl-7") as writer:
        for first in range(0, 45, 15):
            writer.append(clicks(first, 15))
    return clicks(0, 45)


def fill_beats(con: lh.Connection) -> Rows:
    """A log table whose writer wrote most before a checkpoint, below which the log is trimmed."""
    table = con.create_table("shop.beats", CLICKS, log_ttl=FOR_EVER)
    with table.writer("etl-8") as writer:
        for first in range(0, 9, 3):
            writer.append(clicks(first, 3))
        writer.flush()
        trim(con, table)
        writer.append(clicks(9, 5))
    return clicks(9, 5)


def fill_users(con: lh.Connection) -> Rows:
    """A keyed table with a key of two columns, in several segments, with every kind of change, some below a checkpoint
    and trimmed."""
    keys = ["name", "number"]
    table = con.create_table("shop.users", USERS, primary_key=keys, buckets=2, segment_bytes=4000, log_ttl=FOR_EVER)
    users = Keyed(table)
    users.upsert([user(n) for n in range(60)])
    users.upsert([user(n, visits=n) for n in range(0, 60, 4)])
    users.upsert([{k: v for k, v in user(n, visits=-n).items() if k != "mail"} for n in range(50, 66)])
    trim(con, table)
    users.delete([user(n) for n in range(30, 40)])
    users.upsert([user(n) for n in range(35, 37)])
    users.delete([user(n) for n in range(1000, 1003)])
    return list(users.rows.values())


def fill_orders(con: lh.Connection) -> Rows:
    """A keyed, partitioned table with a lake of two rounds and hot rows on top."""
    orders = Keyed(
        con.create_table(
            "shop.orders",
            ORDERS,
            primary_key=["region", "id"],
            partition_by=["region"],
            buckets=2,
            lake="iceberg",
            compression="lz4",
            hot_retention=FOR_EVER,
        )
    )
    orders.upsert([order(n) for n in range(30)])
    con.tier("shop.orders")
    orders.upsert([order(n, "paid") for n in range(0, 30, 3)])
    orders.delete([order(n) for n in range(5, 9)])
    con.tier("shop.orders")
    trim(con, orders.table)
    orders.upsert([{"region": REGIONS[n % 2], "id": n, "status": "sent"} for n in range(0, 40, 6)])
    orders.delete([order(12)])
    return list(orders.rows.values())


def fill_clicks(con: lh.Connection) -> Rows:
    """A log table with a lake of one round and hot rows on top."""
    table = con.create_table(
        "shop.clicks",
        CLICKS,
        buckets=2,
        bucket_key=["user", "page"],
        lake="iceberg",
        durability="os",
        hot_retention=FOR_EVER,
    )
    table.append(clicks(0, 30))
    con.tier("shop.clicks")
    trim(con, table)
    table.append(clicks(30, 20))
    return clicks(0, 50)


def fill_days(con: lh.Connection) -> Rows:
    """A log table with a lake that has yet to follow a partition which was overwritten, and has followed one."""
    schema = pa.schema([pa.field("day", pa.string(), False), pa.field("id", pa.int64(), False)])
    table = con.create_table(
        "shop.days", schema, partition_by=["day"], buckets=1, lake="iceberg", hot_retention=FOR_EVER
    )
    staging = handle_of(table).staging
    rows = {day: [{"day": day, "id": n} for n in range(12)] for day in ("mon", "tue", "wed")}
    table.append([row for of_day in rows.values() for row in of_day])
    for number, day in enumerate(("mon", "tue")):
        con.tier("shop.days")
        trim(con, table)
        rows[day] = [{"day": day, "id": n} for n in range(100, 105)]
        held, batch = staging.held(), JobBatch("a daily job", number)
        held.add("append", pa.Table.from_pylist(rows[day], schema))
        staging.publish(batch, [held], lasting=True, overwrite=[f"day={day}"])
    return [row for of_day in rows.values() for row in of_day]


def note(n: int, text: str | None = None) -> dict[str, Any]:
    """A row of ``shop.notes`` and ``shop.people`` after their last change."""
    return {"id": n, "text": text, "size": n, "label": f"label {n}"}


def fill_altered(con: lh.Connection, name: str, *, keyed: bool) -> Rows:
    """A table that was changed twice: rows of its three definitions in log, checkpoint and lake."""
    schema = pa.schema([("id", pa.int64()), ("size", pa.int32()), ("text", pa.bool_()), ("tag", pa.string())])
    lake = None if keyed else "iceberg"
    key = ["id"] if keyed else None
    table = con.create_table(name, schema, primary_key=key, lake=lake, hot_retention=FOR_EVER, log_ttl=FOR_EVER)
    put = table.upsert if keyed else table.append
    put([{"id": n, "size": n, "text": True, "tag": f"label {n}"} for n in range(20)])
    if not keyed:
        con.tier(name)
    with table.alter() as a:
        a.rename_column("tag", "label").widen_column("size", pa.int64()).drop_column("text")
    put([{"id": n, "size": n, "label": f"label {n}"} for n in range(20, 30)])
    if not keyed:
        con.tier(name)
    trim(con, table)
    with table.alter() as a:
        a.add_column("text", pa.string(), after="id")
    put([note(n, "x") for n in range(30, 35)])
    return [note(n, "x" if n >= 30 else None) for n in range(35)]


DEFAULTS: dict[str, tuple[pa.DataType, Any]] = {
    "flag": (pa.bool_(), True),
    "i8": (pa.int8(), -5),
    "f32": (pa.float32(), 0.25),
    "f64": (pa.float64(), float("inf")),
    "price": (pa.decimal128(9, 2), Decimal("-1.50")),
    "day": (pa.date32(), DAYS[0]),
    "t32": (pa.time32("ms"), dt.time(1, 2, 3, 4000)),
    "at_s": (pa.timestamp("s"), dt.datetime(1969, 12, 31)),
    "at_utc": (pa.timestamp("us", "UTC"), dt.datetime(2026, 1, 1, 0, 0, 0, 7, dt.UTC)),
    "text": (pa.string(), "å"),
    "raw": (pa.binary(), b"\xff\x00"),
    "fixed": (pa.binary(2), b"ab"),
}


def defaulted(n: int) -> dict[str, Any]:
    """A row of ``shop.goods`` and ``shop.stock`` that says its number only."""
    return {"id": n, **{column: value for column, (_, value) in DEFAULTS.items()}}


def fill_defaulted(con: lh.Connection, name: str, *, keyed: bool) -> Rows:
    """A table that got columns with defaults, one of which was widened: rows of before in log, checkpoint and lake."""
    key = ["id"] if keyed else None
    schema = pa.schema([("id", pa.int64())])
    table = con.create_table(name, schema, primary_key=key, lake="iceberg", hot_retention=FOR_EVER, log_ttl=FOR_EVER)
    put = table.upsert if keyed else table.append
    put([{"id": n} for n in range(70)])
    con.tier(name)
    trim(con, table)
    put([{"id": n} for n in range(70, 150)])
    with table.alter() as a:
        for column, (t, value) in DEFAULTS.items():
            a.add_column(column, t, default=value)
    with table.alter() as a:
        a.widen_column("i8", pa.int32())
    put([{"id": 150, "i8": 1 << 20, "text": None}])
    put([{"id": 151}])
    rows = [defaulted(n) for n in range(152)]
    return [{**r, "i8": 1 << 20, "text": None} if r["id"] == 150 else r for r in rows]


def fill(con: lh.Connection, name: str) -> dict[str, Rows]:
    """Create and fill the tables of a folder; returns what each holds."""
    held = {"shop.users": fill_users(con), "shop.clicks": fill_clicks(con)}
    held["shop.notes"] = fill_altered(con, "shop.notes", keyed=False)
    held["shop.goods"] = fill_defaulted(con, "shop.goods", keyed=False)
    held["types.packed"] = fill_types(con, "types.packed", [1, 5, 5], "zstd")
    if name == "clean":
        held["types.plain"] = fill_types(con, "types.plain", [1, 65, 2], "none")
        held["shop.visits"] = fill_visits(con)
        held["shop.beats"] = fill_beats(con)
        held["shop.orders"] = fill_orders(con)
        held["shop.days"] = fill_days(con)
        held["shop.people"] = fill_altered(con, "shop.people", keyed=True)
        held["shop.stock"] = fill_defaulted(con, "shop.stock", keyed=True)
    return held


def expected(con: lh.Connection, held: dict[str, Rows]) -> dict[str, Any]:
    """What a reader of the folder must find; a log table's rows are those of its log."""
    tables = {}
    for name, rows in held.items():
        table = con.table(name)
        assert in_order(table, table.scan().to_arrow().to_pylist()) == in_order(table, rows), name
        tables[name] = {"rows": in_order(table, rows) if table.primary_key else None, "log": log_of(table)}
    return {"lakehead": lh.__version__, "format": FORMAT_VERSION, "tables": tables}


def _lines(value: object, depth: int = 3) -> str:
    """JSON with a line for each row, so that it can be read."""
    if depth == 0 or not isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if isinstance(value, list):
        return "[\n" + ",\n".join(_lines(v, depth=0) for v in value) + "\n]"
    return "{\n" + ",\n".join(f'"{k}": {_lines(v, depth - 1 if depth > 1 else 1)}' for k, v in value.items()) + "\n}"


def write(folder: Path, name: str) -> None:
    """Make one folder; "killed" ends by SIGKILL, with a frame that was never acknowledged half written."""
    con = lh.connect(folder)
    content = expected(con, fill(con, name))
    (folder.parent / "expected.json").write_text(_lines(content))
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    con.close()


def tear(folder: Path) -> None:
    """Half a frame after the last one of a log: what a power cut leaves of a write that was going on."""
    segment = sorted(folder.glob("tables/shop.clicks-*/partition-0/bucket-0/*.log"))[-1]
    data = segment.read_bytes()
    length = int.from_bytes(data[4:8], "little")
    segment.write_bytes(data + data[: length // 2])


def main() -> None:
    target = HERE / str(FORMAT_VERSION)
    target.mkdir(exist_ok=True)
    for name in ("clean", "killed"):
        if (target / f"{name}.tar.gz").exists():
            raise SystemExit(f"{target / name}.tar.gz exists: golden files are never written again (README.md)")
        with tempfile.TemporaryDirectory() as parent:
            folder = padded(Path(parent).resolve())
            done = subprocess.run(
                [sys.executable, "-m", "tests.golden.make_golden", str(folder), name], check=False
            ).returncode
            assert done == (-signal.SIGKILL if name == "killed" else 0), f"exit code {done}"
            if name == "killed":
                tear(folder)
            relocate(folder, str(folder), PLACEHOLDER)
            _forget_place(folder)
            with tarfile.open(target / f"{name}.tar.gz", "w:gz") as archive:
                archive.add(folder, arcname=".", filter=_anonymous)
            (target / f"{name}.json").write_bytes((folder.parent / "expected.json").read_bytes())


def _forget_place(folder: Path) -> None:
    """Name no path and no machine: wherever the folder is unpacked, it is a copy."""
    place = json.dumps({"path": PLACEHOLDER, "inode": 1, "device": 1, "machine": ""})
    with contextlib.closing(sqlite3.connect(folder / "metadata.db")) as store:
        assert store.execute("update meta set value = ? where name = 'place'", [place]).rowcount == 1
        store.commit()
        store.execute("vacuum")


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    if len(sys.argv) == 3:
        write(Path(sys.argv[1]), sys.argv[2])
    else:
        main()
