"""Filters: one exact Arrow expression, the columns it reads, and bounds by which data can be skipped.

A predicate comes from SQL text (`predicate_sql`) or from a ``pyarrow.compute`` expression. On the wire it is Arrow's
own serialization of the expression, never a pickle: an Arrow IPC file with one row, whose columns are literals and
options and whose schema metadata lists the tree in pre-order::

    call <function> ... arguments ... [options <column>] end <function>
    field_ref <name>   |   nested_field_ref <n>, then n field_refs   |   literal <column>

That form is read here for both kinds of input, to find columns and bounds. It is for messages between peers of one
version, not for storage.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

# Not pyarrow.acero, which re-exports these but also imports pyarrow.dataset and with it pandas: 0.8 s.
from pyarrow import _acero as acero

from lakehead.errors import InvalidPredicateError
from lakehead.format.predicate_literals import DOUBLE_EXACT_MAX, is_bytes, is_text

PREDICATE_BYTES_MAX = 16 << 20
TREE_DEPTH_MAX = 500
TEXT_BYTES_MAX = 4096
"""Of a text that a function may put into every row."""

BoundOp: TypeAlias = Literal["==", "<", "<=", ">", ">=", "in", "is_null", "not_null"]
_Rows = TypeVar("_Rows", pa.Table, pa.RecordBatch)

_BOUND_OPS: dict[str, BoundOp] = {
    "equal": "==",
    "less": "<",
    "less_equal": "<=",
    "greater": ">",
    "greater_equal": ">=",
}
_TAKE_LONG_TEXTS = frozenset([*_BOUND_OPS, "not_equal"])
_MAKE_LONG_TEXTS = frozenset(
    [
        *(f"{encoding}_{f}" for encoding in ("ascii", "utf8") for f in ("lpad", "rpad", "center")),
        *("utf8_zero_fill", "utf8_replace_slice", "binary_replace_slice", "binary_repeat", "binary_join"),
        *("binary_join_element_wise", "replace_substring", "replace_substring_regex", "list_slice"),
    ]
)
"""Functions whose results can be larger than rows and filter together, so that a few bytes could take any memory."""
_FLIPPED: dict[BoundOp, BoundOp] = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "=="}


@dataclass(frozen=True)
class Bound:
    """A condition on one top-level column that every matching row satisfies.

    ``value`` is a Python value of the column's type, a tuple of them for "in", None for the two null tests. Among
    floats NaN is greater than every number: ``>`` and ``>=`` may not skip data that can hold NaN.
    """

    column: str
    op: BoundOp
    value: object


@dataclass(frozen=True, eq=False)
class Predicate:
    """A filter over the rows of one schema.

    Attributes:
        arrow: the exact condition; rows for which it is false or null are dropped.
        columns: top-level columns it reads, sorted.
        bounds: necessary conditions, for skipping data only; may be empty.
    """

    arrow: pc.Expression
    columns: tuple[str, ...]
    bounds: tuple[Bound, ...]

    def to_bytes(self) -> bytes:
        """The wire form, for `from_bytes`."""
        data: bytes = _serialize(self.arrow).to_pybytes()
        return data

    @classmethod
    def from_bytes(cls, data: bytes, schema: pa.Schema) -> Predicate:
        """Read a wire form and bind it to a schema.

        Raises:
            InvalidPredicateError: the bytes are no predicate, or one that does not fit the schema.
        """
        if len(data) > PREDICATE_BYTES_MAX:
            raise InvalidPredicateError(f"a filter is at most {PREDICATE_BYTES_MAX} bytes long, this has {len(data)}")
        buffer = pa.py_buffer(data)
        tree = _read_tree(buffer)
        try:
            arrow: pc.Expression = pc.Expression._deserialize(buffer)
        except (pa.ArrowException, OSError, ValueError, LookupError, MemoryError) as e:
            raise InvalidPredicateError(f"a filter's bytes cannot be read: {e}") from e
        return _bind(arrow, tree, schema)

    def filter(self, table: _Rows) -> _Rows:
        """The rows for which the predicate is true, in order, with the input's schema.

        Raises:
            InvalidPredicateError: the condition fails on a row (overflow, text that is no number) or a column lacks.
        """
        whole = table if isinstance(table, pa.Table) else pa.Table.from_batches([table])
        source = acero.Declaration("table_source", acero.TableSourceNodeOptions(whole))
        filtering = acero.Declaration("filter", acero.FilterNodeOptions(self.arrow))
        try:
            kept = acero.Declaration.from_sequence([source, filtering]).to_table(use_threads=False)
        except (pa.ArrowException, KeyError) as e:
            raise InvalidPredicateError(f"a filter failed on the rows it read: {_first_line(e)}") from e
        if isinstance(table, pa.Table):
            return kept
        batches = kept.combine_chunks().to_batches()
        return batches[0] if batches else table.slice(0, 0)


def parse_predicate(where: str | pc.Expression, schema: pa.Schema) -> Predicate:
    """A predicate over the schema's columns from SQL text or an Arrow expression.

    SQL follows DuckDB: three-valued logic, NaN is the greatest float. Names match exactly first, else without regard
    to case. Literals take the type of what they are compared with; against a column with a time zone, a timestamp
    without one is UTC.

    Raises:
        InvalidPredicateError: it cannot be parsed, uses something unsupported, does not fit the schema or is no
            condition.
    """
    if isinstance(where, str):
        from lakehead.format.predicate_sql import translate

        arrow = translate(where, schema)
    elif isinstance(where, pc.Expression):
        arrow = where
    else:
        raise InvalidPredicateError(
            f"a filter is SQL text or a pyarrow.compute expression, not a {type(where).__name__}"
        )
    return _bind(arrow, _read_tree(_serialize(arrow)), schema)


def _first_line(e: BaseException) -> str:
    return (str(e).splitlines() or [""])[0].strip()


def _serialize(arrow: pc.Expression) -> pa.Buffer:
    try:
        buffer: pa.Buffer = arrow.__reduce__()[1][0]
        return buffer
    except pa.ArrowException as e:
        raise InvalidPredicateError(f"a filter's columns must be given by name, its functions by Arrow's: {e}") from e


def _bind(arrow: pc.Expression, tree: _Node, schema: pa.Schema) -> Predicate:
    """Check the expression against the schema by filtering no rows with it."""
    columns = tuple(sorted({node.path[0] for node in _walk(tree) if isinstance(node, _Field)}))
    missing = [c for c in columns if schema.get_field_index(c) < 0]
    if missing:
        raise InvalidPredicateError(f"a filter reads {missing[0]!r}, which is not one of the columns {schema.names}")
    bounds = tuple(bound for part in _conjuncts(tree) for bound in _bounds_of(part, schema))
    predicate = Predicate(arrow, columns, bounds)
    try:
        predicate.filter(schema.empty_table())
    except InvalidPredicateError as e:
        raise InvalidPredicateError(f"the filter {_short(arrow)} does not fit the table: {_first_line(e)}") from e
    return predicate


def _short(arrow: pc.Expression) -> str:
    text = str(arrow)
    return text if len(text) <= 200 else text[:197] + "..."


# -- the serialized tree ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Field:
    path: tuple[str, ...]


@dataclass(frozen=True)
class _Scalar:
    value: pa.Scalar


@dataclass
class _Call:
    function: str
    arguments: list[_Node]
    options: pa.Scalar | None = None

    def option(self, name: str) -> object:
        """One field of the options, None without it."""
        try:
            return self.options[name].as_py() if self.options is not None else None
        except (KeyError, ValueError, pa.ArrowException):
            return None


_Node: TypeAlias = _Field | _Scalar | _Call


def _read_tree(buffer: pa.Buffer) -> _Node:
    """Parse and check a serialized expression, so that Arrow is only given well-formed ones to rebuild."""
    try:
        with pa.ipc.open_file(buffer) as reader:
            if reader.num_record_batches != 1:
                raise ValueError("not one record batch")
            batch = reader.get_batch(0)
        batch.validate(full=True)
        if batch.num_rows != 1:
            raise ValueError("not one row")
        return _parse(_metadata(batch.schema), batch)
    except (pa.ArrowException, OSError, ValueError, LookupError, MemoryError, OverflowError, TypeError) as e:
        raise InvalidPredicateError(f"a filter's bytes cannot be read: {_first_line(e)}") from e


def _parse(pairs: list[tuple[str, str]], batch: pa.RecordBatch) -> _Node:
    root = _Call("", [])
    open_calls = [root]
    at = 0

    def column(text: str) -> pa.Scalar:
        index = int(text)
        if not (text.isdecimal() and index < batch.num_columns):
            raise ValueError(f"there is no column {text!r}")
        return batch.column(index)[0]

    while at < len(pairs):
        key, value = pairs[at]
        at += 1
        top = open_calls[-1]
        if key == "call":
            if len(open_calls) > TREE_DEPTH_MAX:
                raise ValueError("nested too deeply")
            call = _Call(value, [])
            top.arguments.append(call)
            open_calls.append(call)
        elif key == "literal":
            top.arguments.append(_Scalar(column(value)))
        elif key == "field_ref":
            top.arguments.append(_Field((value,)))
        elif key == "nested_field_ref":
            depth = int(value)
            names = pairs[at : at + depth]
            if not 1 <= depth == len(names) <= TREE_DEPTH_MAX or any(k != "field_ref" for k, _ in names):
                raise ValueError("a nested column is cut off")
            top.arguments.append(_Field(tuple(name for _, name in names)))
            at += depth
        elif key == "options" and top is not root:
            top.options = column(value)
            if at == len(pairs) or pairs[at][0] != "end":
                raise ValueError("options are not the last of a call")
        elif key == "end" and top is not root and value == top.function:
            _check_call(open_calls.pop())
        else:
            raise ValueError(f"unexpected {key!r}")
    if len(open_calls) != 1 or len(root.arguments) != 1:
        raise ValueError("not one whole expression")
    return root.arguments[0]


def _check_call(call: _Call) -> None:
    """Arrow trusts a call's options to be of its function's class; bytes from elsewhere may say otherwise."""
    function = pc.get_function(call.function)
    if (function.kind != "scalar" and call.function != "cast") or call.function == "random":
        raise ValueError(f"{call.function!r} is not a function of one row")
    wanted = function._doc.options_class
    if call.function in _MAKE_LONG_TEXTS:
        raise ValueError(f"{call.function!r} makes values of any length: filter by it after reading")
    texts = [a.value for a in call.arguments if isinstance(a, _Scalar) and call.function not in _TAKE_LONG_TEXTS]
    if call.function == "strftime" and call.options is not None:
        texts.append(call.options["format"])
    if any(_bytes_of(text) > TEXT_BYTES_MAX for text in texts):
        raise ValueError(f"{call.function!r} is given a text of more than {TEXT_BYTES_MAX} bytes")
    given = call.option("_type_name")
    if given != (wanted.encode() or None) and (call.options is not None or function._doc.options_required):
        raise ValueError(f"the options of {call.function!r} are not its own")


def _bytes_of(scalar: pa.Scalar) -> int:
    size: int = pa.array([scalar.as_py()], scalar.type).nbytes if scalar.is_valid else 0
    return size


def _metadata(schema: pa.Schema) -> list[tuple[str, str]]:
    """The schema's metadata in order and with repeated keys, which ``schema.metadata`` (a dict) would merge.

    They are read from Arrow's C data interface: the third pointer of ArrowSchema is an int32 count, then an int32
    length and the bytes for each key and each value.
    """
    capsule = schema.__arrow_c_schema__()
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = ctypes.cast(pointer_of(capsule, b"arrow_schema"), ctypes.POINTER(ctypes.c_void_p))[2]
    if not address:
        return []

    def number() -> int:
        nonlocal address
        value = ctypes.c_int32.from_address(address).value
        address += 4
        return value

    def text() -> str:
        nonlocal address
        length = number()
        raw = ctypes.string_at(address, length)
        address += length
        return raw.decode()

    return [(text(), text()) for _ in range(number())]


def _walk(tree: _Node) -> Iterator[_Node]:
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, _Call):
            pending += node.arguments


# -- bounds -----------------------------------------------------------------------------------------


def _conjuncts(tree: _Node) -> Iterator[_Node]:
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, _Call) and node.function in ("and_kleene", "and"):
            pending += reversed(node.arguments)
        else:
            yield node


def _bounds_of(node: _Node, schema: pa.Schema) -> Iterator[Bound]:
    """What a conjunct demands of one column; nothing where that is not plain to see."""
    if isinstance(node, _Field):
        yield from _bound(node, "==", True, schema)
    if not isinstance(node, _Call) or not node.arguments:
        return
    name, first = node.function, node.arguments[0]
    second = node.arguments[1] if len(node.arguments) == 2 else None
    if name in _BOUND_OPS and second is not None:
        op = _BOUND_OPS[name]
        if isinstance(first, _Scalar):
            first, second, op = second, first, _FLIPPED[op]
        if isinstance(first, _Field) and isinstance(second, _Scalar):
            yield from _bound(first, op, _value_for(second.value, first, schema), schema)
    elif name in ("or", "or_kleene") and isinstance(second, _Call) and second.function == "is_nan":
        # "x > 3 or x is NaN" is SQL's x > 3; NaN is above every number for bounds too.
        for bound in _bounds_of(first, schema):
            if bound.op in (">", ">=") and second.arguments == [_Field((bound.column,))]:
                yield bound
    elif name == "is_valid" or (name == "invert" and isinstance(first, _Call) and first.function == "is_null"):
        field = first if name == "is_valid" else first.arguments[0] if isinstance(first, _Call) else first
        if isinstance(field, _Field):
            yield from _bound(field, "not_null", None, schema)
    elif name == "is_null" and isinstance(first, _Field) and node.option("nan_is_null") is False:
        yield from _bound(first, "is_null", None, schema)
    elif name == "invert" and isinstance(first, _Field):
        yield from _bound(first, "==", False, schema)
    elif name == "is_in" and isinstance(first, _Field) and node.options is not None:
        yield from _bound(first, "in", _value_set(node.options, first, schema), schema)
    elif name in ("starts_with", "match_like") and isinstance(first, _Field):
        prefix = _prefix(node)
        if prefix and is_text(_column_type(first, schema)):
            yield from _bound(first, ">=", prefix, schema)
            yield from _bound(first, "<", _after_prefix(prefix), schema)


def _bound(field: _Field, op: BoundOp, value: object, schema: pa.Schema) -> Iterator[Bound]:
    known = len(field.path) == 1 and schema.get_field_index(field.path[0]) >= 0
    if known and (value is not None or op in ("is_null", "not_null")):
        yield Bound(field.path[0], op, value)


def _column_type(field: _Field, schema: pa.Schema) -> pa.DataType:
    index = schema.get_field_index(field.path[0])
    return schema.field(index).type if index >= 0 and len(field.path) == 1 else pa.null()


def _value_for(scalar: pa.Scalar, field: _Field, schema: pa.Schema) -> object:
    """The scalar as a Python value of the column's type; None where the two do not compare exactly as those."""
    column, own = _column_type(field, schema), scalar.type
    types = pa.types
    if not scalar.is_valid or getattr(column, "unit", None) == "ns":
        return None
    try:
        value: object = scalar.as_py()
    except (ValueError, OverflowError, pa.ArrowException):
        return None
    if isinstance(value, float) and value != value:
        return None
    if own == column or (is_text(own) and is_text(column)) or (is_bytes(own) and is_bytes(column)):
        return None if types.is_nested(column) or types.is_dictionary(column) else value
    if types.is_integer(own) and types.is_integer(column):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < DOUBLE_EXACT_MAX:
        if types.is_floating(column):
            return float(value)
        if types.is_integer(column) and value == int(value):
            return int(value)
    if types.is_decimal(column) and isinstance(value, int | Decimal) and not isinstance(value, bool):
        return Decimal(value)
    return None


def _value_set(options: pa.Scalar, field: _Field, schema: pa.Schema) -> tuple[object, ...] | None:
    members = options["value_set"].values
    matches_null = options["null_matching_behavior"].as_py() == 0
    if members is None or (members.null_count and matches_null):
        return None
    values = [_value_for(member, field, schema) for member in members if member.is_valid]
    return None if any(v is None for v in values) else tuple(values)


def _prefix(call: _Call) -> str | None:
    """Text with which every match of a LIKE or starts_with begins."""
    pattern = call.option("pattern")
    if isinstance(pattern, bytes):
        pattern = pattern.decode(errors="replace")
    if not isinstance(pattern, str) or call.option("ignore_case") is not False or "\ufffd" in pattern:
        return None
    if call.function == "starts_with":
        return pattern
    for i, c in enumerate(pattern):
        if c in "%_\\":
            return pattern[:i]
    return pattern


def _after_prefix(prefix: str) -> str | None:
    """The least text, in code point order, above everything that starts with the prefix."""
    while prefix:
        following = ord(prefix[-1]) + 1
        if following <= 0x10FFFF:
            return prefix[:-1] + chr(0xE000 if 0xD800 <= following <= 0xDFFF else following)
        prefix = prefix[:-1]
    return None
