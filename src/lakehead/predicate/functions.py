"""Which of Arrow's functions a filter may call, and with which options: anyone may have written it.

Arrow checks little of what it is given: some functions end the process for options that make no sense, some go on for
ever, some make gigabytes of a few bytes. So those are known by name that are quick for every row, keep their results
about as large as the rows, and stand all options that are let through here.
"""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from lakehead.predicate.nodes import COMPARISONS, Call, Scalar

TEXT_BYTES_MAX = 4096
"""Of a text that a function may put into every row."""
ARGUMENTS_MAX = 100
DIGITS_MAX = 76
"""Of the widest decimal."""

_LOGIC = ("and", "and_kleene", "and_not", "and_not_kleene", "or", "or_kleene", "xor", "invert", "true_unless_null")
_CHOICES = ("if_else", "coalesce", "is_valid", "is_nan", "is_finite", "is_inf")
_CHECKED = ("abs", "add", "divide", "multiply", "negate", "subtract")
_NUMBERS = (*_CHECKED, *(f"{f}_checked" for f in _CHECKED), "ceil", "floor", "remainder", "sign", "sqrt", "trunc")
_TEXTS = (
    *("binary_length", "list_value_length", "utf8_length", "utf8_lower", "utf8_upper"),
    *(f"utf8_{where}trim_whitespace" for where in ("l", "r", "")),
)
_MOMENTS = (
    *("year", "quarter", "month", "day", "day_of_year", "iso_week", "iso_year"),
    *("hour", "minute", "second", "millisecond", "microsecond", "nanosecond"),
)
PLAIN = frozenset((*COMPARISONS, *_LOGIC, *_CHOICES, *_NUMBERS, *_TEXTS, *_MOMENTS))
"""Functions without options."""
PATTERNS = frozenset(("match_like", "match_substring", "starts_with", "ends_with"))
"""Functions that look for a text in each row: a thousand times the work of a comparison."""
_OPTIONS: dict[str, frozenset[str]] = {
    **dict.fromkeys(PATTERNS, frozenset(("pattern", "ignore_case"))),
    "cast": frozenset(("to_type", *(f"allow_{what}" for what in ("int_overflow", "time_truncate", "time_overflow")),
                       "allow_decimal_truncate", "allow_float_truncate", "allow_invalid_utf8")),
    "is_in": frozenset(("value_set", "null_matching_behavior")),
    "is_null": frozenset(("nan_is_null",)),
    "round": frozenset(("ndigits", "round_mode")),
    "assume_timezone": frozenset(("timezone", "ambiguous", "nonexistent")),
}  # fmt: skip
_CLASSES = {
    **dict.fromkeys(PATTERNS, b"MatchSubstringOptions"),
    "cast": b"CastOptions",
    "is_in": b"SetLookupOptions",
    "is_null": b"NullOptions",
    "round": b"RoundOptions",
    "assume_timezone": b"AssumeTimezoneOptions",
}
_OPTIONAL = frozenset(("is_null", "round"))
_ZONE = re.compile(r"[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+){0,2}|[+-]\d\d:\d\d|")


def check_call(call: Call) -> None:
    """Return if a filter may call this function so.

    Raises:
        ValueError: it may not.
    """
    name = call.function
    if name not in PLAIN and name not in _OPTIONS:
        raise ValueError(f"{name!r} is not one of the functions that filters call: filter by it after reading")
    # Arrow counts them when it computes, and reads beyond them when it prints.
    wanted, given = pc.get_function(name).arity, len(call.arguments)
    if given != wanted if isinstance(wanted, int) else not 1 <= given <= ARGUMENTS_MAX:
        raise ValueError(f"{name!r} is given {given} arguments (at most {ARGUMENTS_MAX} where any number may be)")
    for argument in call.arguments:
        if isinstance(argument, Scalar):
            _check_literal(name, argument.value)
    if name in PLAIN:
        if call.options is not None:
            raise ValueError(f"{name!r} takes no options")
    elif call.options is not None or name not in _OPTIONAL:
        _check_options(name, call.options)


def _check_literal(name: str, value: pa.Scalar) -> None:
    require_plain(value.type)
    if not value.is_valid and not (pa.types.is_primitive(value.type) or pa.types.is_null(value.type)):
        raise ValueError(f"a null is written without a type, not as one of {value.type}")  # Arrow follows no address
    if name not in COMPARISONS and _bytes_of(value) > TEXT_BYTES_MAX:
        raise ValueError(f"{name!r} is given a text of more than {TEXT_BYTES_MAX} bytes")


def _bytes_of(scalar: pa.Scalar) -> int:
    size: int = pa.array([scalar.as_py()], scalar.type).nbytes if scalar.is_valid else 0
    return size


def _check_options(name: str, options: pa.Scalar | None) -> None:
    """Arrow trusts a call's options to be of its function's class, and most numbers in them."""
    if options is None or not pa.types.is_struct(options.type) or not options.is_valid:
        raise ValueError(f"{name!r} lacks its options")
    names = [f.name for f in options.type]
    if sorted(names) != sorted((*_OPTIONS[name], "_type_name")) or options["_type_name"].as_py() != _CLASSES[name]:
        raise ValueError(f"the options of {name!r} are not its own")
    if name == "cast":
        require_plain(options["to_type"].type)
    elif name == "is_in":
        members = options["value_set"].type
        require_plain(members.value_type if pa.types.is_list(members) else members)
    elif name == "round" and not abs(_whole(options["ndigits"])) <= DIGITS_MAX:
        raise ValueError(f"numbers have at most {DIGITS_MAX} digits to round to")
    elif name == "assume_timezone":
        require_zone(options["timezone"].as_py())


def _whole(value: pa.Scalar) -> int:
    number = value.as_py()
    if not isinstance(number, int):
        raise ValueError("a number of digits is a whole number")
    return number


def require_plain(t: Any) -> None:
    """Return if values of this type are single ones of a few bytes, or texts that have their bytes with them."""
    types = pa.types
    if types.is_fixed_size_binary(t) and not types.is_decimal(t):
        plain = t.byte_width <= TEXT_BYTES_MAX
    elif types.is_timestamp(t):
        require_zone(t.tz or "")
        plain = True
    else:
        plain = (
            types.is_primitive(t) or types.is_decimal(t) or types.is_null(t) or types.is_string(t) or types.is_binary(t)
            or types.is_large_string(t) or types.is_large_binary(t)
        )  # fmt: skip
    if not plain:
        raise ValueError(f"a filter holds a value of type {str(t)[:100]}, which filters do not compare")


def require_zone(zone: object) -> None:
    """Return if this may be a time zone's name: where Arrow looks for it, it may become part of a path."""
    if not isinstance(zone, str) or len(zone) > 64 or not _ZONE.fullmatch(zone):
        raise ValueError(f"{str(zone)[:64]!r} is no time zone")
