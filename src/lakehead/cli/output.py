"""Results on standard output: JSON documents and lines for programs, tables for people."""

from __future__ import annotations

import io
import itertools
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

TEXT_ROWS_MAX = 200
_PIPE_WIDTH = 100_000
_CELL_WIDTH_MIN = 12
# What moves a terminal's cursor, colours it, renames it or types into it, and what shows text in another order.
_ACTING = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# DuckDB's infinite times and days, which are numbers in Arrow.
_INFINITE = {s * (2**bits - 1): text for bits in (31, 63) for s, text in ((1, "infinity"), (-1, "-infinity"))}
_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def printable(text: str) -> str:
    """The text, with characters that a terminal would act on written as escapes: whoever wrote a row decides what it
    says, not what the screen of its reader does."""
    return _ACTING.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    c = match[0]
    return _ESCAPES.get(c) or (f"\\x{ord(c):02x}" if c < "\x80" else _unicode(match))


def _unicode(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def write_line(text: str) -> None:
    """One line, flushed, so that a reader sees it at once."""
    sys.stdout.write(printable(text) + "\n")
    sys.stdout.flush()


def write_json(value: object) -> None:
    """One JSON document on one line: times are ISO 8601, decimals texts, binary values hexadecimal, and what JSON's
    numbers lack is "NaN", "Infinity" or "-Infinity"."""
    sys.stdout.write(json_text(value) + "\n")


def json_text(value: object) -> str:
    """The document `write_json` writes."""
    import msgspec

    return _ACTING.sub(_unicode, msgspec.json.encode(_plain(value)).decode())


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {k if isinstance(k, str) else str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value


def write_rows_json(table: pa.Table | pa.RecordBatch) -> None:
    """One JSON line a row."""
    sys.stdout.writelines(json_text(row) + "\n" for row in rows_of(table))


def rows_of(table: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows as dicts; moments that Python's times lack become texts, at any depth; a repeated name gets a number."""
    names, columns = _different(table.schema.names), [_values(column) for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _different(names: Sequence[str]) -> list[str]:
    """The names, those that were there before with a number that makes them none of the others."""
    found: list[str] = []
    for name in names:
        numbered = (f"{name}_{i}" for i in itertools.count(len(found)))
        found.append(name if name not in found else next(n for n in numbered if n not in names and n not in found))
    return found


def _values(column: Any) -> list[Any]:
    import pyarrow as pa

    values: list[Any]
    if _finer(column.type):
        return [None if text is None else _iso(text) for text in column.cast(pa.string()).to_pylist()]
    if "[ns" not in str(column.type):
        try:
            values = column.to_pylist()
            return values
        except (OverflowError, ValueError):
            pass
    return [_value(v) for v in column]


def _finer(t: pa.DataType) -> bool:
    """Whether it is of times that Python's own would cut short."""
    import pyarrow as pa

    return (pa.types.is_timestamp(t) or pa.types.is_time64(t)) and t.unit == "ns"


def _value(scalar: Any) -> Any:
    import pyarrow as pa

    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.StructScalar):
        names = _different([f.name for f in scalar.type])
        return {name: _value(scalar[i]) for i, name in enumerate(names)}
    if isinstance(scalar, pa.MapScalar):
        return [(_value(entry[0]), _value(entry[1])) for entry in scalar.values]
    if isinstance(scalar, pa.ListScalar | pa.LargeListScalar | pa.ListViewScalar | pa.LargeListViewScalar):
        return [_value(v) for v in scalar.values]
    if isinstance(scalar, pa.UnionScalar | pa.DictionaryScalar | pa.ExtensionScalar | pa.RunEndEncodedScalar):
        return _value(scalar.value)
    try:
        return _iso_text(scalar) if _finer(scalar.type) else scalar.as_py()
    except (OverflowError, ValueError):
        return _INFINITE.get(getattr(scalar, "value", None)) or _iso_text(scalar)


def _iso_text(scalar: Any) -> str:
    """What Python's own times do not hold, as they would write it."""
    import pyarrow as pa

    text: str = scalar.cast(pa.string()).as_py()
    return _iso(text) if pa.types.is_timestamp(scalar.type) else text


def _iso(text: str) -> str:
    """A time as Arrow writes it, in the form of Python's."""
    return text.replace(" ", "T", 1).removesuffix(".000000")


def write_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """A table for a person: as wide as the terminal; when piped, as wide as its contents."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns = [printable(name) for name in columns]
    rows = [list(row) for row in rows]
    terminal = sys.stdout.isatty()
    widths = _widths(columns, rows, Console(file=sys.stdout).width) if terminal else [None] * len(columns)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(columns):
        values = [row[i] for row in rows if row[i] is not None]
        numeric = bool(values) and all(isinstance(v, int | float) for v in values)
        if i < len(widths):
            table.add_column(Text(name), justify="right" if numeric else "left", no_wrap=True, width=widths[i])
    for row in rows:
        table.add_row(*(Text(cell_text(v), style="dim" if v is None else "") for v in row[: len(widths)]))
    if title is not None and terminal:  # a line of its own, which a narrow table does not break
        Console(file=sys.stdout).print(Text(printable(title), style="bold"), soft_wrap=True)
    elif title is not None:
        write_line(printable(title))
    if terminal:
        Console(file=sys.stdout).print(table)
        if left := columns[len(widths) :]:
            write_line(f"{count_text(len(left), 'more column')}: {', '.join(left)}; -o json prints all")
        return
    console = Console(file=io.StringIO(), width=_PIPE_WIDTH)
    with console.capture() as captured:
        console.print(table)
    text = captured.get()
    if not (sys.stdout.encoding or "utf-8").lower().startswith("utf"):
        text = text.replace("\u2500", "-")
    # Without the blanks that a terminal does not show.
    sys.stdout.writelines(line.rstrip() + "\n" for line in text.splitlines() if line.strip())


def _widths(columns: Sequence[str], rows: Sequence[Sequence[object]], terminal: int) -> list[int | None]:
    """Widths of the columns that fit into a terminal of this width; longer texts are cut off."""
    natural = [
        max([len(name), *(len(cell_text(row[i])) for row in rows[:TEXT_ROWS_MAX])]) for i, name in enumerate(columns)
    ]
    for cell in (*range(60, _CELL_WIDTH_MIN, -4), _CELL_WIDTH_MIN):
        widths = [min(n, cell) for n in natural]
        if sum(widths) + 3 * len(widths) <= terminal:
            break
    while len(widths) > 1 and sum(widths) + 3 * len(widths) > terminal:
        widths.pop()
    return [*widths]


def write_arrow_table(table: pa.Table) -> None:
    """An Arrow table for a person: its first `TEXT_ROWS_MAX` rows, and how many there are."""
    shown = rows_of(table.slice(0, TEXT_ROWS_MAX))
    names = _different(table.column_names)
    write_table(names, (list(row.values()) for row in shown))
    more = f"; the first {TEXT_ROWS_MAX} are shown, -o json prints all" if table.num_rows > TEXT_ROWS_MAX else ""
    write_line(count_text(table.num_rows, "row") + more)


def cell_text(value: object) -> str:
    """A value as one line of text."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict | list):
        return json_text(value)
    return printable(str(value))


def count_text(n: int, noun: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def seconds_text(seconds: float | None) -> str | None:
    """An age for a person: ``0.4 s``, ``3 min``, ``5.2 h``."""
    if seconds is None:
        return None
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
