"""What it takes to compute a filter, told before it is computed: anyone may have written it.

Bounds from above, in about nanoseconds of one core and in bytes, as measured with Arrow; for what is soon done they are
far too high, which costs a few more slices. Rows are filtered in slices of bounded work, so that whoever computes a
filter can stop in between, and holds no more than a few hundred megabytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from lakehead.errors import InvalidPredicateError
from lakehead.predicate.functions import PATTERNS
from lakehead.predicate.nodes import COMPARISONS, Call, Field, Node, Scalar, walk

SLICE_NS = 5e7
"""Of the rows of one slice, or of one row."""
ROW_NS_MAX = 1e10
SLICE_BYTES = 1 << 28
ROW_BYTES_MAX = 1 << 31

_CALL_NS = 2e4
"""Arrow simplifies the whole filter for each batch."""
_VALUE_BYTES = 16
_MOMENTS = frozenset(
    ("year", "quarter", "month", "day", "day_of_year", "iso_week", "iso_year", "hour", "minute", "second",
     "millisecond", "microsecond", "nanosecond", "assume_timezone")
)  # fmt: skip
_QUICK = frozenset((*COMPARISONS, "and", "and_kleene", "and_not", "and_not_kleene", "or", "or_kleene", "xor", "invert",
                    "true_unless_null", "if_else", "coalesce", "is_valid", "is_nan", "is_finite", "is_inf", "is_null",
                    "binary_length", "list_value_length"))  # fmt: skip
_TEXTS = frozenset(("utf8_lower", "utf8_upper", "utf8_ltrim_whitespace", "utf8_rtrim_whitespace",
                    "utf8_trim_whitespace", "utf8_length"))  # fmt: skip
_CHOOSES = frozenset(("if_else", "coalesce"))
_TEXT_OF = frozenset((*_TEXTS, "cast")) - {"utf8_length"}
_WILD_MAX, _PLAIN_PATTERN_MAX = 8, 200


@dataclass(frozen=True)
class Size:
    """Bytes of what one value takes: so many, and so many times the bytes of the texts in its row."""

    each: float
    times: float


@dataclass(frozen=True)
class Work:
    """Of one filter: nanoseconds, and bytes that it makes.

    Attributes:
        batch_ns: of each batch, however few rows it has.
        row_ns: of each row.
        byte_ns: of each byte of the texts, lists and structs that it reads.
        row_bytes, byte_bytes: the same of what it makes.
        columns: those that have such bytes.
    """

    batch_ns: float
    row_ns: float
    byte_ns: float
    row_bytes: float
    byte_bytes: float
    columns: tuple[str, ...]

    @classmethod
    def of(cls, tree: Node, schema: pa.Schema) -> Work:
        """That of a tree whose columns the schema has."""
        wide: set[str] = set()
        total = _Total()
        sizes: dict[int, Size] = {}
        for node in reversed(list(walk(tree))):  # arguments before their calls; hundreds deep
            sizes[id(node)] = _size(node, sizes, schema, wide, total)
        return cls(total.batch_ns, total.row_ns, total.byte_ns, total.row_bytes, total.byte_bytes, tuple(sorted(wide)))

    def slices(self, rows: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, float]]:
        """The rows, in slices of bounded work, uncopied; and the nanoseconds of each, which may be more than `SLICE_NS`
        for one row, and for thousands of conditions.

        Raises:
            InvalidPredicateError: one row would take too long, or too much memory.
        """
        size = sum(rows.column(c).nbytes for c in self.columns)
        n = rows.num_rows
        ns, made = n * self.row_ns + size * self.byte_ns, n * self.row_bytes + size * self.byte_bytes
        if n <= 1 or (ns <= max(SLICE_NS, self.batch_ns) and made <= SLICE_BYTES):
            if ns > ROW_NS_MAX or made > ROW_BYTES_MAX:
                raise InvalidPredicateError(
                    f"the filter has too much to do for a row with texts of {size:,} bytes, which it may search for"
                    f" {ns / 1e9:.0f} seconds and change to {int(made):,} bytes: use fewer conditions on texts, or"
                    " shorter patterns with fewer of the wildcard _"
                )
            yield rows, ns + self.batch_ns
            return
        half = n // 2
        yield from self.slices(rows.slice(0, half))
        yield from self.slices(rows.slice(half))


class _Total:
    def __init__(self) -> None:
        self.batch_ns = self.row_ns = self.byte_ns = self.row_bytes = self.byte_bytes = 0.0


def _size(node: Node, known: Mapping[int, Size], schema: pa.Schema, wide: set[str], total: _Total) -> Size:
    """How large the values of a node are, of whose arguments it is known; what they take is added to the total."""
    if isinstance(node, Field):
        kind = schema.field(node.path[0]).type
        if pa.types.is_primitive(kind) or pa.types.is_decimal(kind):
            return Size(_VALUE_BYTES, 0)
        wide.add(node.path[0])
        return Size(_VALUE_BYTES, 1)
    if isinstance(node, Scalar):
        return Size(_VALUE_BYTES + _length(node.value), 0)
    sizes = [known[id(argument)] for argument in node.arguments]
    name = node.function
    each, times = sum(s.each for s in sizes), sum(s.times for s in sizes)
    row, byte = _pace(name)
    if name in PATTERNS:
        row, byte = _search(node)
        total.batch_ns += 1e3 * len(_pattern(node))
    elif name == "is_in":
        total.batch_ns += 100.0 * _members(node)
    total.batch_ns += _CALL_NS
    total.row_ns += row + byte * each
    total.byte_ns += byte * times
    if name in _CHOOSES:
        made = Size(max(s.each for s in sizes), max(s.times for s in sizes))
    elif name in _TEXT_OF:
        made = Size(64 + 2 * each, 2 * times)  # the upper case of a letter may have more bytes; numbers become texts
    else:
        made = Size(_VALUE_BYTES, 0)
    total.row_bytes += made.each
    total.byte_bytes += made.times
    return made


def _pace(function: str) -> tuple[float, float]:
    """Nanoseconds of a row, and of a byte of the arguments."""
    if function in _QUICK:
        return 5, 0.2
    if function in _TEXTS:
        return 40, 6
    if function in _MOMENTS:
        return 150, 0
    return (500, 5) if function == "cast" else (50, 0.5)


def _search(call: Call) -> tuple[float, float]:
    """The same of looking for a pattern: one with many wildcards is compared with each byte at each of its places."""
    pattern = _pattern(call)
    wild = len(pattern) > _PLAIN_PATTERN_MAX or pattern.count(b"_") > _WILD_MAX
    return 200, 20.0 * len(pattern) if wild else 6


def _pattern(call: Call) -> bytes:
    pattern = call.option("pattern")
    return pattern if isinstance(pattern, bytes) else str(pattern).encode()


def _members(call: Call) -> int:
    members = call.options["value_set"] if call.options is not None else None
    return len(members.values) if isinstance(members, pa.ListScalar) and members.is_valid else 1


def _length(value: pa.Scalar) -> int:
    """Bytes of a text, none of what is no text."""
    plain = value.is_valid and hasattr(value, "as_buffer")
    return value.as_buffer().size if plain else 0
