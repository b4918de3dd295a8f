"""The tree of a serialized Arrow expression, read from bytes that anyone may have sent.

Arrow serializes an expression as an IPC file with one row, whose columns are literals and options and whose schema
metadata lists the tree in pre-order::

    call <function> ... arguments ... [options <column>] end <function>
    field_ref <name>   |   nested_field_ref <n>, then n field_refs   |   literal <column>
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from lakehead.errors import InvalidPredicateError

TREE_DEPTH_MAX = 500
TEXT_BYTES_MAX = 4096
"""Of a text that a function may put into every row."""

COMPARISONS = {"equal": "==", "not_equal": "!=", "less": "<", "less_equal": "<=", "greater": ">", "greater_equal": ">="}
_MAKE_LONG_TEXTS = frozenset(
    [
        *(f"{encoding}_{f}" for encoding in ("ascii", "utf8") for f in ("lpad", "rpad", "center")),
        *("utf8_zero_fill", "utf8_replace_slice", "binary_replace_slice", "binary_repeat", "binary_join"),
        *("binary_join_element_wise", "replace_substring", "replace_substring_regex", "list_slice"),
    ]
)
"""Functions whose results can be larger than rows and filter together, so that a few bytes could take any memory."""


@dataclass(frozen=True)
class Field:
    path: tuple[str, ...]


@dataclass(frozen=True)
class Scalar:
    value: pa.Scalar


@dataclass
class Call:
    function: str
    arguments: list[Node]
    options: pa.Scalar | None = None

    def option(self, name: str) -> object:
        """One field of the options, None without it."""
        try:
            return self.options[name].as_py() if self.options is not None else None
        except (KeyError, ValueError, pa.ArrowException):
            return None


Node: TypeAlias = Field | Scalar | Call


def read_tree(buffer: pa.Buffer) -> Node:
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
        raise InvalidPredicateError(f"a filter's bytes cannot be read: {first_line(e)}") from e


def _parse(pairs: list[tuple[str, str]], batch: pa.RecordBatch) -> Node:
    root = Call("", [])
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
            call = Call(value, [])
            top.arguments.append(call)
            open_calls.append(call)
        elif key == "literal":
            top.arguments.append(Scalar(column(value)))
        elif key == "field_ref":
            top.arguments.append(Field((value,)))
        elif key == "nested_field_ref":
            depth = int(value)
            names = pairs[at : at + depth]
            if not 1 <= depth == len(names) <= TREE_DEPTH_MAX or any(k != "field_ref" for k, _ in names):
                raise ValueError("a nested column is cut off")
            top.arguments.append(Field(tuple(name for _, name in names)))
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


def _check_call(call: Call) -> None:
    """Arrow trusts a call's options to be of its function's class; bytes from elsewhere may say otherwise."""
    function = pc.get_function(call.function)
    if (function.kind != "scalar" and call.function != "cast") or call.function == "random":
        raise ValueError(f"{call.function!r} is not a function of one row")
    wanted = function._doc.options_class
    if call.function in _MAKE_LONG_TEXTS:
        raise ValueError(f"{call.function!r} makes values of any length: filter by it after reading")
    texts = [a.value for a in call.arguments if isinstance(a, Scalar) and call.function not in COMPARISONS]
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


def walk(tree: Node) -> Iterator[Node]:
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, Call):
            pending += node.arguments


def first_line(e: BaseException) -> str:
    """What Arrow says, without where in its sources."""
    return (str(e).splitlines() or [""])[0].strip()
