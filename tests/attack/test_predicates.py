"""Filters that a client made to end a server, or to keep it busy, are refused before they are computed."""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.integration.conftest import ServerProcess

import lakehead as lh
from lakehead.errors import InvalidPredicateError
from lakehead.predicate import Predicate
from lakehead.predicate.functions import PLAIN
from lakehead.protocol import messages as m

SCHEMA = pa.schema(
    [("i", pa.int64()), ("f", pa.float64()), ("s", pa.string()), ("t", pa.timestamp("us")), ("o", pa.bool_())]
)
NUMBER, FLOAT, TEXT, TIME, FLAG = (pc.field(name) for name in SCHEMA.names)
NULL_TEXT = pa.scalar(None, pa.large_string())


def call(name: str, *arguments: pc.Expression, options: Any = None) -> pc.Expression:
    """A call as Arrow has it, which is not asked whether it makes sense."""
    return pc.Expression._call(name, list(arguments), options)


def with_options(raw: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """A serialised filter whose one column, of options or a literal, is another one."""
    batch = pa.ipc.open_file(raw).get_batch(0)
    value = batch.column(0)[0]
    fields = {f.name: value[f.name] for f in value.type}
    change(fields)
    struct = pa.StructArray.from_arrays([pa.array([v.as_py()], v.type) for v in fields.values()], list(fields))
    schema = pa.schema([("", struct.type)], metadata=batch.schema.metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch([struct], schema=schema))
    return sink.getvalue().to_pybytes()


def bomb(compression: str) -> bytes:
    """A few kilobytes that decompress to a list of 256 MiB."""
    members = pa.array([[0] * (1 << 25)], pa.list_(pa.int64()))
    schema = pa.schema([("", members.type)], metadata={"literal": "0"})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(pa.record_batch([members], schema=schema))
    return sink.getvalue().to_pybytes()


def deep(condition: pc.Expression, levels: int) -> pc.Expression:
    for _ in range(levels):
        condition = ~condition
    return condition


def doubled(condition: pc.Expression, times: int) -> pc.Expression:
    """2 ** times of them, not nested deeply."""
    for _ in range(times):
        condition = condition | condition
    return condition


def balanced(parts: list[pc.Expression], combine: Callable[..., pc.Expression] = operator.or_) -> pc.Expression:
    """One chain to Arrow, though not nested deeply."""
    while len(parts) > 1:
        pairs = [combine(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + (parts[-1:] if len(parts) % 2 else [])
    return parts[0]


ATTACKS: dict[str, pc.Expression] = {
    "a division by zero in Arrow": pc.floor_temporal(TIME, multiple=0).is_valid(),
    "the same, rounding": pc.round_temporal(TIME, multiple=0, unit="month").is_valid(),
    "the same, upward": pc.ceil_temporal(TIME, multiple=-(2**31), unit="nanosecond").is_valid(),
    "2**62 digits": pc.round(FLOAT, ndigits=2**62) > 1,
    "-2**62 digits": pc.round(FLOAT, ndigits=-(2**62)) > 1,
    "digits of each row": pc.round_binary(FLOAT, NUMBER) > 1,
    "multiples of zero": pc.round_to_multiple(FLOAT, multiple=0.0) > 1,
    "one argument where Arrow prints two": call("and_kleene", FLAG),
    "no argument": call("equal"),
    "three arguments": call("less", NUMBER, NUMBER, NUMBER),
    "a thousand arguments": pc.coalesce(*[NUMBER] * 1000).is_valid(),
    "a null without an address": pc.equal(TEXT, pc.scalar(NULL_TEXT)),
    "the same, to choose from": pc.if_else(FLAG, pc.scalar(NULL_TEXT), TEXT).is_valid(),
    "any length": pc.binary_repeat(TEXT, NUMBER).is_valid(),
    "any width": pc.utf8_lpad(TEXT, 2**31 - 1).is_valid(),
    "values of a megabyte": call("coalesce", pc.scalar(pa.scalar(b"x" * (1 << 20), pa.binary(1 << 20)))).is_valid(),
    "lists of a million": pc.scalar(None).cast(pa.list_(pa.int64(), 1 << 20)).is_valid(),
    "a program for each row": pc.extract_regex(TEXT, r"(?P<a>(x+x+)+y)").is_valid(),
    "a path as a time zone": pc.assume_timezone(TIME, "../../../../etc/passwd").is_valid(),
    "the same in a type": TIME.cast(pa.timestamp("us", "/etc/passwd")).is_valid(),
    "a format": pc.strftime(TIME, format="%" * 4000).is_valid(),
    "other rows": call("random", options=None) > 0.5,
    "two thousand patterns": doubled(pc.match_like(TEXT, "%a%"), 11),
    "thirty thousand conditions": doubled(FLAG, 15),
    "too deep": deep(FLAG, 5000),
    "nine thousand in one chain": balanced([i == NUMBER for i in range(9000)]),
    "the same, of numbers": balanced([NUMBER] * 9000, pc.add) == 1,
    "chains within chains": balanced([balanced([FLAG & (i == NUMBER)] * 40, operator.and_) for i in range(990)]),
    "half a megabyte of patterns": balanced([pc.match_like(TEXT, f"%{i}" + "a_" * 2000) for i in range(130)]),
}
BYTES: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "a bomb of zstd": lambda: bomb("zstd"),
    "a bomb of lz4": lambda: bomb("lz4"),
    "options that are another's": lambda: with_options(
        raw(pc.round(FLOAT, ndigits=1) > 1), lambda o: o.update(_type_name=pa.scalar(b"CastOptions"))
    ),
    "digits as text": lambda: with_options(
        raw(pc.round(FLOAT, ndigits=1).is_valid()), lambda o: o.update(ndigits=pa.scalar("x"))
    ),
    "a mode that is none": lambda: with_options(
        raw(pc.round(FLOAT, ndigits=1).is_valid()), lambda o: o.update(round_mode=pa.scalar(77, pa.int8()))
    ),
    "options that lack one": lambda: with_options(raw(TEXT.isin(["a"])), lambda o: o.pop("value_set")),
    "a list that is no list": lambda: with_options(raw(TEXT.isin(["a"])), lambda o: o.update(value_set=pa.scalar(3))),
}


def raw(where: pc.Expression) -> bytes:
    data: bytes = where.__reduce__()[1][0].to_pybytes()
    return data


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("predicates") / "data")
    yield process
    process.kill()


@pytest.fixture(scope="module")
def table(server: ServerProcess) -> Iterator[lh.Table]:
    with lh.connect(server.uri, token=server.token) as con:
        made = con.create_table("a.t", SCHEMA)
        made.append(pa.Table.from_pylist([{"i": 1, "f": 1.5, "s": "x", "t": 0, "o": True}], schema=SCHEMA))
        yield made


def ask(table: lh.Table, predicate: bytes) -> int:
    """Send a filter as it is; the rows that come back."""
    handle = table._handle
    whole = m.TabletRange(partition="", bucket=0, start=0, end=1)
    request = m.Read(table_id=handle.desc.table_id, ranges=[whole], columns=["i"], predicate=predicate)
    return sum(rows.num_rows for _, rows in handle._server.stream(request))


@pytest.mark.parametrize("attack", [*ATTACKS, *BYTES])
def test_a_server_refuses_it_and_lives(server: ServerProcess, table: lh.Table, attack: str) -> None:
    pid, began = server.process.pid, time.monotonic()
    with pytest.raises(InvalidPredicateError):
        ask(table, raw(ATTACKS[attack]) if attack in ATTACKS else BYTES[attack]())
    assert time.monotonic() - began < 30
    assert server.process.poll() is None and server.process.pid == pid
    assert ask(table, raw(NUMBER == 1)) == 1


def test_as_many_conditions_as_are_let_through_are_computed(server: ServerProcess, table: lh.Table) -> None:
    for condition in (
        balanced([i == NUMBER for i in range(999)]),
        balanced([NUMBER] * 997, pc.add) == 997,
        deep(NUMBER == 1, 490),
        balanced([pc.coalesce(balanced([i == NUMBER for i in range(n, n + 450)])) for n in range(0, 9000, 450)]),
    ):
        assert ask(table, raw(condition)) == 1
    assert table.scan(where=" or ".join(f"i = {i}" for i in range(8000))).count() == 1
    assert server.process.poll() is None


def test_what_filters_may_call_stands_any_value() -> None:
    """Extremes of every type, in every function that is let through."""
    ends = pa.array([-(2**63), -1, 0, 1, 2**63 - 1, None], pa.int64())
    columns = {
        "i": ends,
        "i8": pa.array([-128, -1, 0, 1, 127, None], pa.int8()),
        "f": pa.array([float("nan"), float("-inf"), -0.0, 1e308, 5e-324, None]),
        "d": pa.array([Decimal("9" * 38), Decimal("-" + "9" * 38), Decimal(0), Decimal(1), Decimal(-1), None]),
        "s": pa.array(["", "İß" * 9, "\0", "%", "\\", None]),
        "t": ends.cast(pa.timestamp("us")),
        "z": ends.cast(pa.timestamp("ns", "Europe/Oslo")),
        "o": pa.array([True, False, None, True, False, None]),
        "l": pa.array([[], [1], [None], None, [2**63 - 1] * 9, [0]], pa.list_(pa.int64())),
        "n": pa.array([1, 2, -1, 127, -128, None], pa.int8()),  # no zero, by which some refuse to divide
    }
    rows = pa.table(columns)
    answered = set()
    for name in sorted(PLAIN):
        arity = pc.get_function(name).arity
        for given in itertools.product(columns, repeat=arity if isinstance(arity, int) and arity < 3 else 2):
            if arity == 3:
                given = ("o", *given)
            try:
                Predicate.from_bytes(raw(call(name, *map(pc.field, given)).is_valid()), rows.schema).filter(rows)
                answered.add(name)
            except InvalidPredicateError:
                continue
    assert answered == PLAIN, "of each, some types at least are let through"
