"""Input files as batches for a table: Parquet, CSV, JSON lines, Arrow IPC; from a path or standard input.

Files are streamed, except that Parquet and the Arrow *file* format, which are read from their end, are held in memory
when they come from standard input. Columns of self-describing formats keep their types (writing checks and converts
them); CSV and JSON values are read as the table's types:

    CSV         the first line names the columns; an empty unquoted field is null, ``""`` an empty text
    JSON lines  one object a line; keys that a line lacks are null when rows are appended, else all lines have the same,
                so that "not given" and null cannot be confused
    both        times in ISO 8601, binary values in hexadecimal; nested columns in JSON alone
"""

from __future__ import annotations

import codecs
import contextlib
import csv as python_csv
import decimal
import functools
import glob
import gzip
import io
import itertools
import os
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq

from lakehead.cli.csv_quotes import Quotes
from lakehead.cli.literals import example, from_json, passes_through
from lakehead.errors import InvalidFileError, SchemaMismatchError
from lakehead.format.decimals import near

BATCH_ROWS = 65_536
JSON_BATCH_ROWS = 10_000
_CSV_BLOCK_BYTES = 4 << 20
_EXTENSIONS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".ipc": "arrow",
    ".feather": "arrow",
}
FORMATS = ("parquet", "csv", "jsonl", "arrow")
_GZIP = b"\x1f\x8b"
_PLAIN_DECIMAL = r"^[+-]?\d*\.?\d{0,38}$"
_DECIMAL = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,9})?$"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NUMBERED = re.compile(r"(?<=^In CSV column )#(\d+)")
_UNREADABLE = (pa.ArrowException, OSError, EOFError, UnicodeDecodeError, ValueError)


@dataclass(frozen=True)
class Source:
    """Rows of one input.

    Attributes:
        batches: Arrow batches, or lists of dicts; what ``append`` takes.
        size_bytes: of the input; None when it is not known beforehand.
        position: bytes of it read so far.
    """

    batches: Iterator[Any]
    size_bytes: int | None
    position: Callable[[], int]


@contextmanager
def open_source(
    path: str | None,
    schema: pa.Schema,
    *,
    file_format: str | None = None,
    null: str | None = None,
    same_keys: bool = True,
) -> Iterator[Source]:
    """Open an input for the time of a ``with``.

    Args:
        path: of the file, also ``.csv.gz`` and ``.jsonl.gz``; None or "-" reads standard input.
        schema: the table's columns.
        file_format: one of `FORMATS`; by default told by the extension, or by the first bytes.
        null: a further text that stands for null in CSV, such as ``"NA"``.
        same_keys: refuse JSON lines that differ in their keys.

    Raises:
        InvalidFileError: the input cannot be opened or is not in that format; while it is read, too.
    """
    standard = path in (None, "-")
    name = "standard input" if standard else str(path)
    raw: BinaryIO = sys.stdin.buffer if standard else _open(str(path))
    try:
        size = None if standard else os.fstat(raw.fileno()).st_size
        with _readable(name):
            stream = io.BufferedReader(gzip.GzipFile(fileobj=raw)) if name.endswith(".gz") else raw
            kind = file_format or _kind(name, stream)
            reader = functools.partial(_jsonl, same_keys=same_keys) if kind == "jsonl" else _READERS[kind]
            read = functools.partial(reader, stream, schema=schema, null=null, seekable=not standard)
        position = (lambda: 0) if standard else raw.tell
        with contextlib.closing(_naming(read, name, kind)) as rows:
            yield Source(rows, size, position)
    finally:
        if not standard:
            raw.close()


def input_files(paths: Sequence[str]) -> list[str | None]:
    """The files that these paths name, sorted within each: files, folders with all files of a known format below them,
    and patterns such as ``day=*/*.parquet``. None, or no path at all, is standard input.

    Raises:
        InvalidFileError: one names nothing.
    """
    found: list[str | None] = []
    for path in paths:
        if path == "-":
            found.append(None)
        elif os.path.isdir(path):
            below = sorted(os.path.join(at, name) for at, _, names in os.walk(path) for name in names)
            some = [p for p in below if _extension(p) in _EXTENSIONS and not os.path.basename(p).startswith((".", "_"))]
            if not some:
                raise InvalidFileError(f"the folder {path} holds no file of a known format", path=path)
            found += some
        elif not os.path.exists(path) and (some := sorted(glob.glob(path, recursive=True))):
            found += some
        else:
            found.append(path)
    return found or [None]


def _extension(path: str) -> str:
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]


def _open(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as e:
        raise InvalidFileError(f"cannot open {path}: {e.strerror}", path=path) from e


@contextmanager
def _readable(name: str, kind: str = "") -> Iterator[None]:
    try:
        yield
    except (InvalidFileError, SchemaMismatchError) as e:
        raise type(e)(f"{name}: {e}", path=name, **{k: v for k, v in e.context.items() if k != "path"}) from e
    except _UNREADABLE as e:
        what = f" as {kind}" if kind else ""
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise InvalidFileError(f"cannot read {name}{what}: {reason}", path=name) from e


def _naming(read: Callable[[], Generator[Any]], name: str, kind: str) -> Generator[Any]:
    batches: Generator[Any] | None = None
    try:
        while True:
            with _readable(name, kind):
                batches = read() if batches is None else batches
                batch = next(batches, None)
            if batch is None:
                return
            yield batch
    finally:
        if batches is not None:
            batches.close()


def _kind(name: str, stream: Any) -> str:
    if (extension := _extension(name)) in _EXTENSIONS:
        return _EXTENSIONS[extension]
    start = bytes(stream.peek(8)[:8]).removeprefix(codecs.BOM_UTF8)
    if start.startswith(b"PAR1"):
        return "parquet"
    if start.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return "arrow"
    if start.lstrip().startswith((b"{", b"[")):  # an array is refused as what it is
        return "jsonl"
    if name == "standard input" and start:
        return "csv"
    raise InvalidFileError(f"its format cannot be told: pass --format {'|'.join(FORMATS)}")


def _parquet(stream: Any, *, schema: pa.Schema, null: str | None, seekable: bool) -> Generator[pa.RecordBatch]:
    file = pq.ParquetFile(stream if seekable else pa.BufferReader(stream.read()))
    yield from _or_none(file.iter_batches(batch_size=BATCH_ROWS), file.schema_arrow)


def _arrow(stream: Any, *, schema: pa.Schema, null: str | None, seekable: bool) -> Generator[pa.RecordBatch]:
    if stream.peek(6)[:6] == b"ARROW1":
        file = pa.ipc.open_file(stream if seekable else pa.BufferReader(stream.read()))
        batches: Iterable[pa.RecordBatch] = (file.get_batch(i) for i in range(file.num_record_batches))
    else:
        file = batches = pa.ipc.open_stream(stream)
    for batch in _or_none(batches, file.schema):
        if not batch.num_rows:
            yield batch
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(start, BATCH_ROWS)


def _csv(stream: Any, *, schema: pa.Schema, null: str | None, seekable: bool) -> Generator[pa.RecordBatch]:
    nested = [f.name for f in schema if pa.types.is_nested(f.type)]
    types = {f.name: pa.string() if _is_text(f.type) else f.type for f in schema if f.name not in nested}
    options = csv.ConvertOptions(
        column_types=types,
        null_values=["", *([null] if null is not None else [])],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )
    if not (begin := stream.peek(1)):
        raise InvalidFileError("it is empty: the first line must name the columns")
    _require_plain(begin)
    try:
        yield from _csv_batches(stream, schema, nested, options)
    except pa.ArrowInvalid as e:
        names = next(python_csv.reader(begin.decode("utf-8-sig", "replace").splitlines()[:1]), [])
        raise ValueError(_NUMBERED.sub(lambda n: dict(enumerate(map(repr, names))).get(int(n[1]), n[0]), str(e))) from e


def _csv_batches(
    stream: Any, schema: pa.Schema, nested: list[str], options: csv.ConvertOptions
) -> Generator[pa.RecordBatch]:
    quotes = Quotes(stream)
    try:
        reader = csv.open_csv(
            quotes, csv.ReadOptions(block_size=_CSV_BLOCK_BYTES), csv.ParseOptions(newlines_in_values=True), options
        )
        with reader:
            found = [name for name in reader.schema.names if name in nested]
            if found:
                raise InvalidFileError(
                    f"CSV cannot hold the nested column {found[0]!r}: use JSON lines, Parquet or Arrow"
                )
            last = None
            for batch in _or_none(reader, reader.schema):
                if last is not None:
                    yield _from_texts(last, schema)
                last = batch
            if quotes.open:  # which Arrow takes for the end of the value
                raise InvalidFileError(
                    "it ends inside a quoted field, as a file does that was cut off: get it again, whole"
                )
            assert last is not None
            yield _from_texts(last, schema)
    finally:
        quotes.settle()


def _or_none(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The batches, or one without rows: an input's columns are checked, whether it has rows or not."""
    several = False
    for batch in batches:
        several = True
        yield batch
    if not several:
        yield pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in schema], schema=schema)


def _is_text(t: pa.DataType) -> bool:
    """Whether a column of this type is read as texts, which are looked at here."""
    types = pa.types
    is_binary = types.is_binary(t) or types.is_large_binary(t) or types.is_fixed_size_binary(t)
    return bool(is_binary or types.is_decimal(t))


def _from_texts(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Hexadecimal texts of binary columns as bytes, and decimals."""
    for i, name in enumerate(batch.schema.names):
        if name in schema.names and _is_text(t := schema.field(name).type):
            texts = batch.column(i)
            read = _decimals if pa.types.is_decimal(t) else _bytes
            try:
                batch = batch.set_column(i, name, read(texts, t))
            except _UNREADABLE as e:
                raise ValueError(f"column {name!r}: {e}") from e
    return batch


def _bytes(texts: pa.Array, t: pa.DataType) -> pa.Array:
    values = texts.to_pylist()
    for at, text in enumerate(values):
        try:
            values[at] = None if text is None else bytes.fromhex(text)
        except ValueError as e:
            raise ValueError(f"{text!r} is no {t}: {example(t)}") from e
    return pa.array(values, t)


def _decimals(texts: pa.Array, t: pa.DataType) -> pa.Array:
    """Arrow reads plain digits, but not exponents: see `lakehead.format.decimals`."""
    texts = pc.utf8_trim_whitespace(texts)
    if pc.all(pc.match_substring_regex(texts, _PLAIN_DECIMAL)).as_py() is not False:
        return texts.cast(t)
    wrong = texts.filter(pc.invert(pc.match_substring_regex(texts, _DECIMAL)))
    if len(wrong):
        raise ValueError(f"{wrong[0].as_py()!r} is no {t}")
    return pa.array([None if v is None else near(decimal.Decimal(v)) for v in texts.to_pylist()], t)


def _jsonl(
    stream: Any, *, schema: pa.Schema, null: str | None, seekable: bool, same_keys: bool = True
) -> Generator[list[dict[str, Any]]]:
    _require_plain(stream.peek(len(_GZIP)))
    read = _line_reader(schema)
    lines = ((number, line) for number, line in enumerate(_unmarked(stream), 1) if line and not line.isspace())
    first: Mapping[str, Any] | None = None
    while chunk := list(itertools.islice(lines, JSON_BATCH_ROWS)):
        rows = [read(number, line) for number, line in chunk]
        first = rows[0] if first is None else first
        for (number, _), row in zip(chunk, rows, strict=True):
            if same_keys and row.keys() != first.keys():
                differing = ", ".join(sorted(row.keys() ^ first.keys()))
                raise InvalidFileError(
                    f"line {number} and the first line differ in {differing}: give every line the same keys, null where"
                    " there is no value",
                    line=number,
                )
        yield rows


def _require_plain(begin: bytes) -> None:
    if begin.startswith(_GZIP):
        raise InvalidFileError("it is compressed by gzip: name it .csv.gz or .jsonl.gz, or pipe it through gunzip")


def _unmarked(lines: Iterator[bytes]) -> Iterator[bytes]:
    """The lines without the mark of UTF-8 before the first one, which some programs write."""
    for line in itertools.islice(lines, 1):
        yield line.removeprefix(codecs.BOM_UTF8)
    yield from lines


def _line_reader(schema: pa.Schema) -> Callable[[int, bytes], dict[str, Any]]:
    """A function from (line number, line) to a row of values that Arrow takes for the schema."""
    # Decimals that are written as numbers keep their digits only when they are never floats.
    exact = any("decimal" in str(f.type) for f in schema)
    decoder = msgspec.json.Decoder(dict[str, Any], float_hook=decimal.Decimal if exact else None)
    changes = {f.name: from_json(f.type) for f in schema if not passes_through(f.type)}

    def read(number: int, line: bytes) -> dict[str, Any]:
        name = ""
        try:
            row = decoder.decode(line)
        except UnicodeDecodeError as e:
            raise InvalidFileError(f"line {number} is not UTF-8: convert it first", line=number) from e
        except RecursionError as e:
            raise InvalidFileError(f"line {number} is nested too deep to be read", line=number) from e
        except msgspec.DecodeError as e:
            hint = ": write an object a line, as `jq -c '.[]'` makes of an array" if line.lstrip()[:1] == b"[" else ""
            cut = r" (half of a character, \uD800 to \uDFFF, is no text)" if _SURROGATE.search(line) else ""
            raise InvalidFileError(f"line {number} is not a JSON object{hint or f': {e}{cut}'}", line=number) from e
        try:
            for name in changes.keys() & row.keys():
                row[name] = changes[name](row[name])
        except (ValueError, TypeError, ArithmeticError, AttributeError) as e:
            field = schema.field(name)
            raise SchemaMismatchError(
                f"line {number} holds {row[name]!r} for column {name!r}, which has the type {field.type}:"
                f" {example(field.type)}",
                line=number,
                column=field.name,
            ) from e
        return row

    return read


_READERS: dict[str, Callable[..., Generator[Any]]] = {
    "parquet": _parquet,
    "csv": _csv,
    "jsonl": _jsonl,
    "arrow": _arrow,
}
