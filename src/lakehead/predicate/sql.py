"""SQL boolean text (DuckDB's dialect) to one Arrow compute expression over a schema, with SQL's three-valued logic.

sqlglot parses, this module types and translates node by node; what it does not know it refuses by name, so that a
filter never means something else than it says. Differences from Arrow's own operators: null logic is Kleene's, NaN
equals itself and is the greatest float, ``/`` divides as double, integers compute as int64 and overflow is an error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp, parse_one
from sqlglot.dialects.duckdb import DuckDB
from sqlglot.errors import SqlglotError

from lakehead.errors import InvalidPredicateError
from lakehead.predicate import literals as lit
from lakehead.predicate import types
from lakehead.predicate.literals import COMPARE, FLIPPED, NULL_BOOLEAN, Literal

TEXT_CHARACTERS_MAX = 1 << 20

_CHAIN_MAX = 250
_COMPARISONS = {"EQ": "==", "NEQ": "!=", "LT": "<", "LTE": "<=", "GT": ">", "GTE": ">="}
_ARITHMETIC = {
    "Add": "add",
    "Sub": "subtract",
    "Mul": "multiply",
    "Div": "divide",
    "IntDiv": "divide",
    "Mod": "remainder",
}
_BOOLEAN_NODES = {
    *_COMPARISONS, "And", "Or", "Not", "Between", "In", "Is", "NullSafeEQ", "NullSafeNEQ", "Like", "ILike", "Escape",
    "StartsWith", "EndsWith", "Contains",
}  # fmt: skip
# Every argument of a node that the translation reads; a node with any other argument set is refused.
_KNOWN_ARGS = {"this", "expression", "expressions", "low", "high", "to", "ifs", "default", "negate", "safe", "typed"}
_HARMLESS_ARGS = {
    "In": {"this", "expressions"},
    "Column": {"this", "table", "db", "catalog"},
    "Identifier": {"this", "quoted"},
    "Literal": {"this", "is_string"},
}


@dataclass(frozen=True)
class _Value:
    """A translated node: an expression and its type, or a literal that has no type yet."""

    expr: pc.Expression | None
    type: pa.DataType
    literal: Literal = None

    @property
    def is_literal(self) -> bool:
        return self.expr is None

    def fixed(self) -> tuple[pc.Expression, pa.DataType]:
        """Expression and type; a literal gets the type it has on its own."""
        return lit.materialize(self.literal) if self.expr is None else (self.expr, self.type)


def translate(text: str, schema: pa.Schema) -> pc.Expression:
    """The expression that is true for exactly the rows for which the SQL text is.

    Raises:
        InvalidPredicateError: the text cannot be parsed, names no column, is not boolean or uses something unsupported.
    """
    if len(text) > TEXT_CHARACTERS_MAX:
        raise InvalidPredicateError(f"a filter is at most {TEXT_CHARACTERS_MAX} characters long, this has {len(text)}")
    try:
        tree = parse_one(text, read=DuckDB, into=exp.Condition)
        return _Translator(schema).boolean(tree, truth=True)
    except SqlglotError as e:
        raise InvalidPredicateError(
            f"the filter {_short(text)} is not a SQL condition such as \"price > 3 and city = 'Oslo'\":"
            f" {_first_line(e.__cause__ or e)}"  # of a text that is no condition the cause says why
        ) from e
    except RecursionError as e:
        raise InvalidPredicateError("a filter is nested too deeply: simplify it, or use IN for lists of values") from e


def _short(text: str) -> str:
    return repr(text if len(text) <= 120 else text[:117] + "...")


def _first_line(e: BaseException) -> str:
    """Without the classes of the parser, which name nothing that a user wrote."""
    return re.sub(r" for <class '[^']*'>", "", (str(e).splitlines() or [""])[0]).strip()


def _refuse(node: exp.Expr, why: str) -> InvalidPredicateError:
    return InvalidPredicateError(f"a filter cannot use {_short(node.sql(dialect='duckdb'))}: {why}")


def _balanced(
    combine: Callable[[pc.Expression, pc.Expression], pc.Expression], parts: list[pc.Expression]
) -> pc.Expression:
    """Combine in a tree of logarithmic depth. Arrow makes one chain of it all the same, unless something stands in
    between, and takes the square of its length."""
    while len(parts) > _CHAIN_MAX:
        groups = [parts[i : i + _CHAIN_MAX] for i in range(0, len(parts), _CHAIN_MAX)]
        parts = [pc.coalesce(_balanced(combine, group)) for group in groups]
    while len(parts) > 1:
        pairs = [combine(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + (parts[-1:] if len(parts) % 2 else [])
    return parts[0]


class _Translator:
    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    # -- boolean nodes ----------------------------------------------------------------------------

    def boolean(self, node: exp.Expr, *, truth: bool) -> pc.Expression:
        """A node that must be boolean; with ``truth`` its null and false may stand for each other."""
        node = node.unnest()
        kind = type(node).__name__
        self._check_args(node)
        if isinstance(node, exp.And | exp.Or):
            parts = [self.boolean(part, truth=truth) for part in node.flatten()]
            return _balanced(pc.and_kleene if isinstance(node, exp.And) else pc.or_kleene, parts)
        if isinstance(node, exp.Not):
            inner = node.this.unnest()
            if isinstance(inner, exp.Is) and isinstance(inner.expression, exp.Null):
                return self._nullness(inner.this, null=False)
            return pc.invert(self.boolean(node.this, truth=False))
        if kind in _COMPARISONS:
            return self.compare(_COMPARISONS[kind], self.value(node.this), self.value(node.expression), node, truth)
        if isinstance(node, exp.Between):
            bounds = [self.value(node.args["low"]), self.value(node.args["high"])]
            x = _beside(self.value(node.this), bounds)
            low, high = _texts_beside(x, bounds)
            above = self.compare(">=", x, low, node, truth)
            return pc.and_kleene(above, self.compare("<=", x, high, node, truth))
        if isinstance(node, exp.In):
            return self._in(node, truth)
        if isinstance(node, exp.Is):
            return self._is(node)
        if isinstance(node, exp.NullSafeEQ | exp.NullSafeNEQ):
            same = self._not_distinct(node)
            return same if isinstance(node, exp.NullSafeEQ) else pc.invert(same)
        if isinstance(node, exp.Like | exp.ILike | exp.Escape):
            return self._like(node)
        if isinstance(node, exp.StartsWith | exp.EndsWith | exp.Contains):
            return self._affix(node, kind, node.this, node.expression)
        value = self.value(node)
        expr, t = value.fixed()
        if pa.types.is_null(t):
            return NULL_BOOLEAN
        if not pa.types.is_boolean(t):
            raise _refuse(node, f"it is of type {t} where a condition is needed")
        return expr

    def _nullness(self, node: exp.Expr, *, null: bool) -> pc.Expression:
        expr, _ = self.value(node).fixed()
        return expr.is_null() if null else expr.is_valid()

    def _is(self, node: exp.Is) -> pc.Expression:
        right = node.expression
        if isinstance(right, exp.Null):
            return self._nullness(node.this, null=True)
        if isinstance(right, exp.Boolean):
            condition = self.boolean(node.this, truth=False)
            return pc.coalesce(condition if right.this else pc.invert(condition), pc.scalar(False))
        raise _refuse(node, "IS is followed by NULL, TRUE or FALSE")

    def _not_distinct(self, node: exp.Expr) -> pc.Expression:
        left, right = self.value(node.this), self.value(node.expression)
        (a, _), (b, _) = left.fixed(), right.fixed()
        if right.is_literal and right.literal is None:
            return a.is_null()
        equal = pc.coalesce(self.compare("==", left, right, node, False), pc.scalar(False))
        return pc.or_kleene(equal, pc.and_kleene(a.is_null(), b.is_null()))

    def _in(self, node: exp.In, truth: bool) -> pc.Expression:
        members = [self.value(e) for e in node.expressions]
        if not members:
            raise _refuse(node, "IN needs a list of values")
        x = _beside(self.value(node.this), members)
        members = _texts_beside(x, members)
        if x.expr is not None and all(m.is_literal for m in members):
            found = lit.in_literals(x.expr, x.type, [m.literal for m in members], truth=truth)
            if found is not None:
                return found
        return _balanced(pc.or_kleene, [self.compare("==", x, m, node, truth) for m in members])

    def _like(self, node: exp.Expr) -> pc.Expression:
        escape, like = "", node
        if isinstance(node, exp.Escape):
            like = node.this
            self._check_args(like)
            escape = str(self.value(node.expression).literal)
        if not isinstance(like, exp.Like | exp.ILike) or len(escape) > 1:
            raise _refuse(node, "ESCAPE takes one character after LIKE or ILIKE")
        x, t = self.value(like.this).fixed()
        pattern = self.value(like.expression)
        if not lit.is_text(t) or not isinstance(pattern.literal, str):
            raise _refuse(node, "LIKE needs a text column and a literal pattern")
        arrow_pattern = _like_pattern(pattern.literal, escape, node)
        matched = pc.match_like(x, arrow_pattern, ignore_case=isinstance(like, exp.ILike))
        return pc.invert(matched) if like.args.get("negate") else matched

    def _affix(self, node: exp.Expr, kind: str, this: exp.Expr, pattern: exp.Expr) -> pc.Expression:
        x, t = self.value(this).fixed()
        wanted = self.value(pattern)
        if not lit.is_text(t) or not isinstance(wanted.literal, str):
            raise _refuse(node, "it needs a text column and a literal text")
        name = {"StartsWith": "starts_with", "EndsWith": "ends_with", "Contains": "match_substring"}[kind]
        function: Callable[..., pc.Expression] = getattr(pc, name)
        return function(x, pattern=wanted.literal)

    # -- comparisons ------------------------------------------------------------------------------

    def compare(self, op: str, a: _Value, b: _Value, node: exp.Expr, truth: bool) -> pc.Expression:
        """``a op b``; a literal takes the type of the other side."""
        if a.is_literal and not b.is_literal:
            a, b, op = b, a, FLIPPED[op]
        if a.expr is None:
            if a.literal is None or b.literal is None:
                return NULL_BOOLEAN
            expr, t = a.fixed()
            a = _Value(expr, t)
        assert a.expr is not None
        if b.expr is None:
            return lit.compare_literal(op, a.expr, a.type, b.literal, truth=truth)
        x, y, t = self._unify(a, b, node)
        return lit.compare_floats(op, x, y) if pa.types.is_floating(t) else COMPARE[op](x, y)

    def _unify(self, a: _Value, b: _Value, node: exp.Expr) -> tuple[pc.Expression, pc.Expression, pa.DataType]:
        (x, s), (y, t) = a.fixed(), b.fixed()
        common = types.common_type(s, t)
        if common is None:
            raise _refuse(node, f"it brings together values of types {s} and {t}; CAST one of them")
        return types.convert(x, s, common), types.convert(y, t, common), common

    # -- values -----------------------------------------------------------------------------------

    def value(self, node: exp.Expr) -> _Value:
        """Any scalar node."""
        node = node.unnest()
        self._check_args(node)
        match node:
            case exp.Literal():
                return _Value(None, pa.null(), node.this if node.is_string else lit.number_of(node.this))
            case exp.Null():
                return _Value(None, pa.null())
            case exp.Boolean():
                return _Value(None, pa.bool_(), bool(node.this))
            case exp.Column() | exp.Dot():
                return self._column(node)
            case exp.Neg():
                return self._negate(node)
            case exp.Cast() if not isinstance(node, exp.TryCast):
                return self._cast(node)
            case exp.Add() | exp.Sub() | exp.Mul() | exp.Div() | exp.IntDiv() | exp.Mod():
                return self._arithmetic(node)
            case exp.Case() | exp.If():
                return self._case(node)
            case exp.Coalesce():
                return self._coalesce(node)
            case exp.Lower() | exp.Upper() | exp.Length() | exp.Abs() | exp.Year() | exp.Month() | exp.Day():
                return self._function(node)
        if type(node).__name__ in _BOOLEAN_NODES:
            return _Value(self.boolean(node, truth=False), pa.bool_())
        raise _refuse(node, "it is not supported here; compare columns with values, or filter the result afterwards")

    def _check_args(self, node: exp.Expr) -> None:
        if isinstance(node, exp.AggFunc | exp.Window | exp.Query | exp.Exists) or node.args.get("query"):
            raise _refuse(node, "it is not of one row, and a filter sees one at a time: ask con.sql() for it")
        known = _HARMLESS_ARGS.get(type(node).__name__, _KNOWN_ARGS)
        for name, argument in node.args.items():
            if argument and name not in known:
                raise _refuse(node, f"its {name.replace('_', ' ')!r} part is not supported")

    def _column(self, node: exp.Expr) -> _Value:
        parts = [p.name for p in node.parts]  # type: ignore[attr-defined]
        names = self._schema.names
        name = self._resolve(parts[0], names, "column")
        path, t = [name], self._schema.field(name).type
        for part in parts[1:]:
            if not pa.types.is_struct(t):
                raise InvalidPredicateError(
                    f"a filter reads {'.'.join(parts)!r}, but {'.'.join(path)!r} is a {t}, not a struct"
                )
            children = [t.field(i).name for i in range(t.num_fields)]
            path.append(self._resolve(part, children, f"field of {'.'.join(path)!r}"))
            t = t.field(path[-1]).type
        return _Value(pc.field(*path), t)

    def _resolve(self, name: str, names: Sequence[str], what: str) -> str:
        if names.count(name) == 1:
            return name
        folded = [n for n in names if n.lower() == name.lower()]
        if len(folded) == 1:
            return folded[0]
        if folded:
            raise InvalidPredicateError(
                f"a filter names {name!r}, which could be any of {', '.join(folded)}: write it exactly"
            )
        near = difflib.get_close_matches(name.lower(), [n.lower() for n in names], 1, 0.5)
        hint = next((f"did you mean {n!r}?" for n in names if near and n.lower() == near[0]), None)
        shown = ", ".join(list(names)[:20]) + (", ..." if len(names) > 20 else "")
        raise InvalidPredicateError(
            f"a filter names {name!r}, but there is no such {what}: {hint or 'there are ' + shown}", column=name
        )

    def _negate(self, node: exp.Neg) -> _Value:
        value = self.value(node.this)
        if isinstance(value.literal, Decimal):
            # Not "-": that rounds to the digits of the thread's decimal context.
            return _Value(None, value.type, value.literal.copy_negate())
        if isinstance(value.literal, int | float) and not isinstance(value.literal, bool):
            return _Value(None, value.type, -value.literal)
        x, t = value.fixed()
        if not lit.is_number(t):
            raise _refuse(node, f"a value of type {t} has no negative")
        t = pa.int64() if pa.types.is_integer(t) else t
        return _Value(pc.negate_checked(x.cast(t)), t)

    def _arithmetic(self, node: exp.Expr) -> _Value:
        kind = type(node).__name__
        left, right = self.value(node.this), self.value(node.expression)
        folded = types.fold(kind, left.literal, right.literal)
        if folded is not None:
            return _Value(None, pa.null(), folded)
        (x, s), (y, t) = self._operand(left, right), self._operand(right, left)
        if (left.is_literal and left.literal is None) or (right.is_literal and right.literal is None):
            return _Value(None, pa.null())
        if not (lit.is_number(s) and lit.is_number(t)):
            raise _refuse(node, f"arithmetic needs numbers, not {s} and {t}")
        common = _arithmetic_type(kind, left, right, s, t)
        decimal = pa.types.is_decimal(common)
        x = types.convert(x, s, types.as_decimal(s) if decimal else common)
        y = types.convert(y, t, types.as_decimal(t) if decimal else common)
        if kind in ("IntDiv", "Mod") and not pa.types.is_integer(common):
            raise _refuse(node, "it needs whole numbers; CAST both sides to BIGINT")
        if kind in ("IntDiv", "Mod"):
            y = pc.if_else(y == pc.scalar(0), pc.scalar(pa.scalar(None, common)), y)
        name = _ARITHMETIC[kind] + ("" if kind in ("Div", "Mod") else "_checked")
        function: Callable[..., pc.Expression] = getattr(pc, name)
        if decimal:
            result = types.decimal_result(kind, types.as_decimal(s), types.as_decimal(t))
            if result is None:
                raise _refuse(node, "the result has more than 38 digits; CAST one side to DOUBLE")
            return _Value(function(x, y), result)
        return _Value(function(x, y), common)

    def _operand(self, value: _Value, other: _Value) -> tuple[pc.Expression, pa.DataType]:
        """A whole literal beside a decimal has only the digits it needs, so that the result fits."""
        exact = Decimal(value.literal) if type(value.literal) is int else value.literal
        return lit.materialize(exact) if value.is_literal and pa.types.is_decimal(other.type) else value.fixed()

    def _cast(self, node: exp.Cast) -> _Value:
        name = node.to.this.name
        if name == "DECIMAL":
            numbers = [int(p.name) for p in node.to.expressions] or [18, 3]
            target = pa.decimal128(numbers[0], numbers[1] if len(numbers) > 1 else 0)
        elif name in types.CAST_TYPES and not node.to.expressions:
            target = types.CAST_TYPES[name]
        else:
            raise _refuse(node, "casts go to integer, float, decimal, boolean, text, blob, date and time types")
        value = self.value(node.this)
        if value.is_literal:
            done = types.cast_literal(value.literal, target)
            if done is not None:
                return _Value(None, target, done)
        x, s = value.fixed()
        return _Value(types.cast_expression(x, s, target), target)

    def _case(self, node: exp.Expr) -> _Value:
        branches = node.args.get("ifs") or [node]
        subject = node.this if isinstance(node, exp.Case) else None
        results = [self.value(b.args["true"]) for b in branches]
        default = node.args.get("default") if isinstance(node, exp.Case) else node.args.get("false")
        results.append(self.value(default) if default is not None else _Value(None, pa.null()))
        converted, t = self._same_type(results, node)
        answer = converted[-1]
        for branch, then in reversed(list(zip(branches, converted[:-1], strict=True))):
            if subject is None:
                condition = self.boolean(branch.this, truth=True)
            else:
                condition = self.compare("==", self.value(subject), self.value(branch.this), node, False)
            answer = pc.if_else(pc.coalesce(condition, pc.scalar(False)), then, answer)
        return _Value(answer, t)

    def _coalesce(self, node: exp.Expr) -> _Value:
        parts, t = self._same_type([self.value(e) for e in (node.this, *node.expressions)], node)
        return _Value(pc.coalesce(*parts), t)

    def _same_type(self, values: list[_Value], node: exp.Expr) -> tuple[list[pc.Expression], pa.DataType]:
        fixed = [v.fixed() for v in values]
        common = reduce(lambda a, b: None if a is None else types.common_type(a, b), [t for _, t in fixed])
        if common is None:
            raise _refuse(node, f"its values have different types: {', '.join(str(t) for _, t in fixed)}")
        return [types.convert(x, t, common) for x, t in fixed], common

    def _function(self, node: exp.Expr) -> _Value:
        name = type(node).__name__
        x, t = self.value(node.this).fixed()
        if name in ("Lower", "Upper", "Length") and lit.is_text(t):
            function: Callable[..., pc.Expression] = getattr(pc, f"utf8_{name.lower()}")
            return _Value(function(x).cast(pa.int64()), pa.int64()) if name == "Length" else _Value(function(x), t)
        if name == "Abs" and lit.is_number(t):
            t = pa.int64() if pa.types.is_integer(t) else t
            return _Value(pc.abs_checked(x.cast(t)), t)
        if name in ("Year", "Month", "Day") and (pa.types.is_date(t) or pa.types.is_timestamp(t)):
            part: Callable[..., pc.Expression] = getattr(pc, name.lower())
            return _Value(part(types.in_utc(x, t)), pa.int64())
        raise _refuse(node, f"{name.upper()} does not take a value of type {t}")


def _beside(x: _Value, others: Sequence[_Value]) -> _Value:
    """The number x in the type in which SQL compares it with all the others alike: a float when one of them is."""
    if x.expr is None or not lit.is_number(x.type):
        return x
    kinds = [pa.float64() if isinstance(v.literal, float) else v.type for v in (x, *others)]
    floats = [t for t in kinds if pa.types.is_floating(t)]
    exact = pa.types.is_integer(x.type) and all(v.is_literal and lit.is_small(v.literal) for v in others)
    if not floats or exact:
        return x
    common = pa.float64() if pa.float64() in floats else pa.float32()
    return _Value(types.convert(x.expr, x.type, common), common)


def _texts_beside(x: _Value, others: Sequence[_Value]) -> list[_Value]:
    """What a day or time x is compared with, its texts as SQL takes them: as times of the finest type of all."""

    def unit(v: _Value) -> str | None:
        stamp = "us" if isinstance(v.literal, lit.TimestampLiteral) else None
        return v.type.unit if v.expr is not None and pa.types.is_timestamp(v.type) else stamp

    units = {u for v in (x, *others) if (u := unit(v)) is not None}
    plain = x.expr is not None and (pa.types.is_date(x.type) or (pa.types.is_timestamp(x.type) and not x.type.tz))
    if not plain or not units - {unit(x)}:
        return list(others)
    finest = next(u for u in ("us", "ms", "s") if u in units)

    def taken(v: _Value) -> _Value:
        if not isinstance(v.literal, str):
            return v
        return replace(v, literal=lit.rounded(lit.parse_timestamp(v.literal), finest))

    return [taken(v) for v in others]


def _like_pattern(pattern: str, escape: str, node: exp.Expr) -> str:
    """SQL's pattern in Arrow's form, in which a backslash always escapes."""
    out, characters = [], iter(pattern)
    for c in characters:
        if c == escape:
            c = next(characters, "")
            if not c:
                raise _refuse(node, "the pattern ends with the escape character")
            out.append("\\" + c if c in "%_\\" else c)
        else:
            out.append("\\\\" if c == "\\" else c)
    return "".join(out)


def _arithmetic_type(kind: str, left: _Value, right: _Value, s: pa.DataType, t: pa.DataType) -> pa.DataType:
    if kind == "Div":
        return pa.float64()
    if pa.types.is_floating(s) or pa.types.is_floating(t):
        narrow = all(
            pa.types.is_float32(u) or (v.is_literal and not isinstance(v.literal, float))
            for v, u in ((left, s), (right, t))
        )
        return pa.float32() if narrow else pa.float64()
    return pa.int64() if pa.types.is_integer(s) and pa.types.is_integer(t) else pa.decimal128(38, 0)
