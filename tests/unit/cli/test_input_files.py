"""Input files: the same rows from every format, types of the table, and errors that name file and line."""

from __future__ import annotations

import datetime as dt
import gzip
import io
import math
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from lakehead.cli.csv_quotes import Quotes
from lakehead.cli.input_files import open_source
from lakehead.cli.output import json_text, rows_of
from lakehead.errors import InvalidFileError, SchemaMismatchError
from lakehead.format.rows import conform, to_arrow_table

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("price", pa.decimal128(8, 2)),
        ("ratio", pa.float64()),
        ("raw", pa.binary()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("ok", pa.bool_()),
    ]
)
ROWS = [
    {
        "id": 1,
        "name": 'a "b", c\nd',
        "price": Decimal("0.10"),
        "ratio": 0.1,
        "raw": b"\x00\xff",
        "day": dt.date(2026, 1, 31),
        "at": dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC),
        "ok": True,
    },
    {"id": 2, "name": "", "price": Decimal("-1.00"), "ratio": None, "raw": b"", "day": None, "at": None, "ok": None},
    {"id": 3, "name": None, "price": None, "ratio": 2.0, "raw": None, "day": None, "at": None, "ok": False},
]
TABLE = pa.Table.from_pylist(ROWS, SCHEMA)
CSV = (
    b"id,name,price,ratio,raw,day,at,ok\n"
    b'1,"a ""b"", c\nd",0.1,0.1,00ff,2026-01-31,2026-01-31T12:00:00Z,true\n'
    b'2,"",-1,,"",,,\n3,,,2,,,,false\n'
)
JSONL = (
    b'{"id":1,"name":"a \\"b\\", c\\nd","price":0.10,"ratio":0.1,"raw":"00ff","day":"2026-01-31",'
    b'"at":"2026-01-31T12:00:00Z","ok":true}\n\n'
    b'{"id":2,"name":"","price":"-1","ratio":null,"raw":"","day":null,"at":null,"ok":null}\n'
    b'{"id":3,"name":null,"price":null,"ratio":2,"raw":null,"day":null,"at":null,"ok":false}'
)


def write(path: Path) -> None:
    """The rows in the format of the extension."""
    if path.suffix in (".parquet", ".pq"):
        pq.write_table(TABLE, path)
    elif path.suffix == ".arrows":
        with pa.ipc.new_stream(path, SCHEMA) as w:
            w.write_table(TABLE, max_chunksize=2)
    elif path.suffix in (".arrow", ".feather"):
        with pa.ipc.new_file(path, SCHEMA) as w:
            w.write_table(TABLE, max_chunksize=2)
    else:
        data = CSV if ".csv" in path.name else JSONL
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def read(path: str | None, schema: pa.Schema = SCHEMA, **options: Any) -> pa.Table:
    """All rows as writing would make them."""
    with open_source(path, schema, **options) as source:
        parts = [conform(to_arrow_table(b, schema, what="t"), schema, columns_required=[]) for b in source.batches]
    return pa.concat_tables(parts)


NAMES = ["t.parquet", "t.pq", "t.csv", "T.CSV", "t.csv.gz", "t.jsonl", "t.ndjson", "t.json", "t.jsonl.gz", "t.arrow"]


@pytest.mark.parametrize("name", [*NAMES, "t.arrows", "t.feather"])
def test_every_format_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    write(tmp_path / name.lower())
    (tmp_path / name.lower()).rename(tmp_path / name)
    assert read(str(tmp_path / name)).equals(TABLE)


@pytest.mark.parametrize("name", ["t.parquet", "t.csv", "t.jsonl", "t.arrow", "t.arrows"])
@pytest.mark.parametrize("path", [None, "-"])
def test_standard_input_is_told_by_its_first_bytes(
    name: str, path: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / name)
    raw = io.BufferedReader(io.BytesIO((tmp_path / name).read_bytes()))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw))
    assert read(path).equals(TABLE)


@pytest.mark.parametrize("data", [CSV, JSONL], ids=["csv", "jsonl"])
def test_the_mark_of_utf_8_is_no_text(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ("t.csv" if data is CSV else "t.jsonl")
    path.write_bytes(b"\xef\xbb\xbf" + data)
    assert read(str(path)).equals(TABLE)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(path.read_bytes()))))  # type: ignore[arg-type]
    assert read(None).equals(TABLE)


def test_only_the_mark_of_utf_8_is_no_row(tmp_path: Path) -> None:
    for data in (b"\xef\xbb\xbf", b"\xef\xbb\xbf\n", b"\xef\xbb\xbf\n\n"):
        (tmp_path / "t.jsonl").write_bytes(data)
        with open_source(str(tmp_path / "t.jsonl"), SCHEMA) as source:
            assert list(source.batches) == []


def test_format_without_extension(tmp_path: Path) -> None:
    write(tmp_path / "t.csv")
    path = (tmp_path / "t.csv").rename(tmp_path / "export")
    with pytest.raises(InvalidFileError, match="pass --format"):
        read(str(path))
    assert read(str(path), file_format="csv").equals(TABLE)
    write(tmp_path / "t.parquet")
    assert read(str((tmp_path / "t.parquet").rename(tmp_path / "told"))).equals(TABLE)


def test_position_grows_to_the_size(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"id": 1}\n' * 50_000)
    with open_source(str(path), SCHEMA) as source:
        positions = [source.position() for _ in source.batches]
        assert positions == sorted(positions) and source.size_bytes == 500_000 and positions[-1] == 500_000
        assert len(positions) == 5


def test_a_further_null_in_csv(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b'id,name\nNA,NA\n1,"NA"\n')
    assert read(str(path), null="NA").to_pylist() == [{"id": None, "name": None}, {"id": 1, "name": "NA"}]
    with pytest.raises(InvalidFileError, match="NA"):
        read(str(path))


NESTED = pa.schema([("id", pa.int64()), ("tags", pa.list_(pa.date32())), ("m", pa.map_(pa.string(), pa.int32()))])


def test_nested_columns_come_in_json_but_not_in_csv(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"id": 1, "tags": ["2026-01-31", null], "m": {"k": 1}}\n')
    rows = read(str(path), NESTED).to_pylist()
    assert rows == [{"id": 1, "tags": [dt.date(2026, 1, 31), None], "m": [("k", 1)]}]
    found = read(str(path), NESTED)
    path.write_text("".join(json_text(row) + "\n" for row in rows_of(found)))
    assert read(str(path), NESTED).equals(found), "as the command line writes it"
    for wrong in ('["kl"]', '[["k"]]', '"k"', '[["k", 1, 2]]'):
        path.write_text(f'{{"m": {wrong}}}\n')
        with pytest.raises(SchemaMismatchError, match=r"line 1 holds .* for column 'm'"):
            read(str(path), NESTED)
    (tmp_path / "t.csv").write_bytes(b"id,tags\n1,[]\n")
    with pytest.raises(InvalidFileError, match="nested column 'tags': use JSON lines"):
        read(str(tmp_path / "t.csv"), NESTED)


@pytest.mark.parametrize("decimals", [False, True])
def test_floats_that_json_lacks_come_back(tmp_path: Path, decimals: bool) -> None:
    path, values = tmp_path / "t.jsonl", [1.5, math.nan, math.inf, -math.inf, None, 3.0]
    columns = {"f": pa.array(values), "g": pa.array(values, pa.float32()), "l": pa.array([[v] for v in values])}
    written = pa.table(columns | ({"d": pa.array([Decimal("1.50")] * len(values))} if decimals else {}))
    path.write_text("".join(json_text(row) + "\n" for row in rows_of(written)))
    found = read(str(path), written.schema)
    assert found.schema == written.schema and repr(found.to_pylist()) == repr(written.to_pylist())
    path.write_text('{"f": "nan"}\n')
    with pytest.raises(SchemaMismatchError, match="'nan'"):
        read(str(path), written.schema)


@pytest.mark.parametrize(
    ("name", "data", "error", "words"),
    [
        ("t.parquet", b"PAR1 no", InvalidFileError, "as parquet"),
        ("t.parquet", b"", InvalidFileError, "as parquet"),
        ("t.arrow", b"ARROW1 no", InvalidFileError, "as arrow"),
        ("t.arrow", b"\xff\xff\xff\xff no", InvalidFileError, "as arrow"),
        ("t.csv", b"", InvalidFileError, "it is empty"),
        ("t.csv", b"\xef\xbb\xbf", InvalidFileError, "Empty CSV"),
        ("t.csv", b"\n", InvalidFileError, "as csv"),
        ("t.csv", b"id,name\n1\n", InvalidFileError, "Expected 2 columns, got 1"),
        ("t.csv", b"id,day\n1,someday\n", InvalidFileError, "someday"),
        ("t.csv", b"id,raw\n1,xy\n", InvalidFileError, "column 'raw': 'xy' is no binary: write hexadecimal digits"),
        ("t.csv", b'id,"at"\n1,zz\n', InvalidFileError, "column 'at': CSV conversion error to timestamp"),
        ("t.csv", "\ufeffok,id\n?,1\n".encode(), InvalidFileError, "column 'ok': CSV conversion error to bool"),
        ("t.csv", b"price,id\nx,1\n", InvalidFileError, "column 'price': 'x' is no decimal128(8, 2)"),
        ("t.jsonl", b'{"raw": "xy"}\n', SchemaMismatchError, "column 'raw', which has the type binary: write hexadec"),
        ("t.csv", b'id,name\n1,"abc\n', InvalidFileError, "inside a quoted field"),
        ("t.csv", b'id,name\n1,"abc""', InvalidFileError, "inside a quoted field"),
        ("t.csv", b'name\n5"\n"', InvalidFileError, "inside a quoted field"),
        ("t.csv", b"price\n1e-41\n", InvalidFileError, "places behind the point"),
        ("t.csv", b"price\n1e-999999999\n", InvalidFileError, "places behind the point"),
        ("t.csv", b"price\n1.555\n", InvalidFileError, "data loss"),
        ("t.csv", b"price\n1_000\n", InvalidFileError, "'1_000' is no decimal128(8, 2)"),
        ("t.csv", b'price\n""\n', InvalidFileError, "Empty string cannot"),
        ("t.jsonl", b'{"ratio": 1e400}\n', SchemaMismatchError, "line 1 holds Decimal('1E+400') for column 'ratio'"),
        ("t.csv.gz", b"id\n1\n", InvalidFileError, "gzip"),
        ("t.jsonl", b'{"id": 1}\n{"id": 2\n', InvalidFileError, "line 2 is not a JSON object"),
        ("t.jsonl", b"[1]\n", InvalidFileError, "line 1 is not a JSON object"),
        ("t.jsonl", b'{"id": 1}\n{"name": "Troms\xf8"}\n', InvalidFileError, "line 2 is not UTF-8"),
        ("t.jsonl", b'{"Troms\xf8": 1}\n', InvalidFileError, "line 1 is not UTF-8"),
        ("t.jsonl", '{"id": 1}\n'.encode("utf-16"), InvalidFileError, "line 1 is not a JSON object"),
        ("t.jsonl", b'{"id": 1}\n\n{"name": "x"}\n', InvalidFileError, "line 3 and the first line differ in id, name"),
        ("t.jsonl", b'{"day": "someday"}\n', SchemaMismatchError, "line 1 holds 'someday' for column 'day'"),
        ("t.jsonl", b'{"day": 5}\n', SchemaMismatchError, "line 1 holds 5 for column 'day'"),
    ],
)
def test_unreadable_input_names_file_and_place(
    name: str, data: bytes, error: type[Exception], words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(error) as e:
        read(str(tmp_path / name))
    assert name in str(e.value) and words in str(e.value)


@pytest.mark.parametrize(
    "data",
    [b'{"name":' + b"[" * 200_000 + b"]" * 200_000 + b"}\n", b'{"day":' + b'{"a":' * 200_000 + b"}" * 200_001 + b"\n"],
    ids=["lists", "objects"],
)
def test_input_that_is_nested_too_deep_is_named(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(data)
    with pytest.raises(InvalidFileError, match="line 1 is nested too deep"):
        read(str(tmp_path / "t.jsonl"))


@pytest.mark.parametrize("price", [[], [("price", pa.decimal128(8, 2))]])
def test_numbers_beyond_a_double_are_refused_beside_decimals_and_alone(price: list[Any], tmp_path: Path) -> None:
    schema = pa.schema([("f", pa.float64()), ("l", pa.list_(pa.float64())), *price])
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"f": 1.5, "l": [2.5, 3]}\n')
    assert read(str(path), schema).select(["f", "l"]).to_pylist() == [{"f": 1.5, "l": [2.5, 3.0]}]
    for line in (b'{"f": 1e400, "l": []}\n', b'{"f": 0, "l": [-1e400]}\n'):
        path.write_bytes(line)
        with pytest.raises((InvalidFileError, SchemaMismatchError), match="line 1"):
            read(str(path), schema)


def test_quotes_are_followed_as_arrow_reads_them() -> None:
    whole = b'a,b\n1,"x, ""y""\nz"\n2,5" w\n3,"q"r"s\n4,""\n5,""""\n6,a""b"\n'
    for end in range(1, len(whole)):
        for cut in range(end):
            quotes = Quotes(io.BytesIO(whole[:end]))
            quotes.read(cut)
            quotes.read()
            assert quotes.open == is_open(whole[:end]), (whole[:end], cut)


def is_open(text: bytes) -> bool:
    """Whether a text ends inside a quoted field, byte by byte as Arrow's parser goes."""
    state = "start"
    for byte in text:
        if state == "quoted":
            state = "closed" if byte == 34 else "quoted"
        elif byte == 34 and state in ("closed", "start"):
            state = "quoted"
        else:
            state = "start" if byte in b",\r\n" else "plain"
    return state == "quoted"


def test_a_field_of_many_lines_spans_blocks_of_csv(tmp_path: Path) -> None:
    rows = 50_000
    (tmp_path / "t.csv").write_bytes(b"id,name\n" + (b'1,"' + b"x" * 100 + b'\ny"\n') * rows)
    found = read(str(tmp_path / "t.csv"))
    assert found.num_rows == rows and found["name"].unique().to_pylist() == ["x" * 100 + "\ny"]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrows", "csv"])
def test_an_input_without_rows_has_its_columns(kind: str, tmp_path: Path) -> None:
    path, none = tmp_path / f"t.{kind}", pa.table({"id": pa.array([], pa.int64()), "other": pa.array([], pa.string())})
    if kind == "csv":
        path.write_bytes(b"id,other\n")
    elif kind == "parquet":
        pq.write_table(none, path)
    else:
        make = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
        with make(path, none.schema):
            pass
    with open_source(str(path), SCHEMA) as source:
        (batch,) = source.batches
    assert (batch.num_rows, batch.schema.names) == (0, ["id", "other"])


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidFileError, match="No such file"):
        read(str(tmp_path / "none.csv"))
    with pytest.raises(InvalidFileError, match="directory"):
        read(str(tmp_path))
