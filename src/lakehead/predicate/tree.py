"""The tree of a serialized Arrow expression, read from bytes that anyone may have sent.

Arrow serializes an expression as an IPC file with one row, whose columns are literals and options and whose schema
metadata lists the tree in pre-order::

    call <function> ... arguments ... [options <column>] end <function>
    field_ref <name>   |   nested_field_ref <n>, then n field_refs   |   literal <column>
"""

from __future__ import annotations

import ctypes

import pyarrow as pa

from lakehead.errors import InvalidPredicateError
from lakehead.predicate.functions import PATTERNS, check_call
from lakehead.predicate.nodes import Call, Field, Node, Scalar

TREE_DEPTH_MAX = 500
CALLS_MAX = 20_000
CHAIN_MAX = 1000
"""Conditions that are joined by one ``or``, or ``and``, and what is within them: Arrow, which puts each into the one
before it, takes the square of their number for each batch, and ends the process for nine thousand."""
PATTERNS_MAX = 1000
PATTERN_BYTES_MAX = 1 << 18
"""Of all patterns together, which are compiled for each batch."""


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
    at = calls = patterns = pattern_bytes = 0

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
            calls, patterns = calls + 1, patterns + (value in PATTERNS)
            if calls > CALLS_MAX or patterns > PATTERNS_MAX:
                raise ValueError(
                    f"more than {CALLS_MAX:,} conditions, or {PATTERNS_MAX:,} of texts with patterns: use IN for lists"
                )
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
            check_call(top)
            top.close()
            if value in PATTERNS:
                pattern_bytes += len(str(top.option("pattern")))
            if top.depth > CHAIN_MAX or pattern_bytes > PATTERN_BYTES_MAX:
                raise ValueError(
                    f"more than {CHAIN_MAX:,} conditions in one chain of OR or AND, or patterns of more than"
                    f" {PATTERN_BYTES_MAX:,} bytes: use IN for lists"
                )
            open_calls.pop()
        else:
            raise ValueError(f"unexpected {key!r}")
    if len(open_calls) != 1 or len(root.arguments) != 1:
        raise ValueError("not one whole expression")
    return root.arguments[0]


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


def first_line(e: BaseException) -> str:
    """What Arrow says, without where in its sources."""
    return (str(e).splitlines() or [""])[0].strip()
