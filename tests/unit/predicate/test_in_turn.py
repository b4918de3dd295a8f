"""Conditions that are computed part by part."""

from __future__ import annotations

import random

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from lakehead.errors import InvalidPredicateError
from lakehead.predicate import in_turn, parse_predicate, tree_of
from lakehead.predicate.in_turn import NODES_MAX, InTurn, _expression, computed

SCHEMA = pa.schema([("k", pa.int64()), ("s", pa.string()), ("a", pa.int64()), ("n", pa.struct([("x", pa.int32())]))])
LAST = 2**63 - 1
ROWS = pa.table(
    {
        "k": [1, 2, 3, None, 5, 6],
        "s": ["12", "x", None, "7", "", "40"],
        "a": [1, LAST, None, 4, 5, LAST],
        "n": [{"x": i} for i in range(6)],
    },
    SCHEMA,
)
NUMBER = "s in ('12', '7', '40')"


@pytest.mark.parametrize(
    ("where", "keys"),
    [
        (f"{NUMBER} and cast(s as int) > 10", [1, 6]),
        (f"cast(s as int) > 10 and {NUMBER}", [1, 6]),
        (f"cast(s as int) > 10 and k < 6 and {NUMBER}", [1]),
        (f"not ({NUMBER}) or cast(s as int) > 10", [1, 2, 5, 6]),
        (f"s is null or cast(s as int) > 10 or not ({NUMBER})", [1, 2, 3, 5, 6]),
        (f"case when {NUMBER} then cast(s as int) else 100 end > 10", [1, 2, 3, 5, 6]),
        (f"case when {NUMBER} then cast(s as int) end > 10", [1, 6]),
        ("case when k < 2 then a + 1 > 0 else false end", [1]),
        ("k < 2 and a + 1 > 0", [1]),
        ("k < 2 and not (a + 1 < 0)", [1]),
        (f"not (not ({NUMBER}) or cast(s as int) < 10)", [1, 6]),
        ("coalesce(k, a + 1) > 4 and s <> ''", [None, 6]),
        ("coalesce(k, case when a < 10 then a + 1 else 0 end) = 5", [None, 5]),
        ("k = 1 or (a < 10 and a + 1 = 5) or (k = 6 and a = 9223372036854775807)", [1, None, 6]),
        ("a < 9223372036854775807 and a + 1 > 2 and n.x < 5", [None, 5]),
        ("a + 1 > 2 and a <> 9223372036854775807", [None, 5]),
    ],
)
@pytest.mark.parametrize("as_batch", [False, True])
def test_a_part_is_not_asked_of_rows_that_another_keeps_from_it(
    where: str, keys: list[int | None], as_batch: bool
) -> None:
    rows = ROWS.combine_chunks().to_batches()[0] if as_batch else ROWS
    assert parse_predicate(where, SCHEMA).filter(rows).column("k").to_pylist() == keys


@pytest.mark.parametrize("where", ["cast(s as int) > 10", "k < 9 and a + 1 > 0", "k > 9 or a + 1 > 0"])
def test_what_nothing_guards_fails(where: str) -> None:
    with pytest.raises(InvalidPredicateError, match=r"failed on the rows it read: (Failed to parse|overflow)"):
        parse_predicate(where, SCHEMA).filter(ROWS)


def test_too_many_parts_are_not_tried_one_by_one() -> None:
    guards = " and ".join(f"k <> {n}" for n in range(100, 100 + NODES_MAX // 4))
    with pytest.raises(InvalidPredicateError, match="overflow"):
        parse_predicate(f"k < 2 and a + 1 > 0 and {guards}", SCHEMA).filter(ROWS)


@pytest.mark.parametrize("guarded", [True, False])
def test_parts_that_fail_in_one_another_are_not_asked_for_ever(guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each level has a second chance for what fails in it, and within that again: 2 to the 60th, if nobody counted."""
    asked = []

    def counted(arrow: pc.Expression, rows: pa.Table) -> pa.Array:
        asked.append(arrow)
        return computed(arrow, rows)

    monkeypatch.setattr(in_turn, "computed", counted)
    whole = pc.add_checked(pc.field("a"), 1) > 0
    for level in range(60):
        other = pc.field("k") < 9 + level
        whole = pc.and_kleene(whole, other) if level % 2 else pc.or_kleene(whole, pc.invert(other))
    if guarded:
        whole = pc.and_kleene(pc.field("k") < 2, whole)
        assert parse_predicate(whole, SCHEMA).filter(ROWS).column("k").to_pylist() == [1]
    else:
        with pytest.raises(InvalidPredicateError, match=r"overflow|again and again"):
            parse_predicate(whole, SCHEMA).filter(ROWS)
    assert len(asked) < 2500


def test_a_case_of_many_branches_is_computed_branch_by_branch() -> None:
    branches = " ".join(f"when k = {n} then a + {n - 1}" for n in range(1, 90) if n not in (2, 6))
    where = f"case {branches} else 7 end > 0"
    assert parse_predicate(where, SCHEMA).filter(ROWS).column("k").to_pylist() == [1, 2, None, 5, 6]


def test_it_fails_on_rows_that_are_not_there_no_more_than_it_did() -> None:
    live = pc.and_(ROWS.column("a").is_valid(), pc.equal(ROWS.column("k").fill_null(0), 1)).combine_chunks()
    assert parse_predicate("k < 9 and a + 1 > 0", SCHEMA).filter(ROWS, live).num_rows == 1


def condition(choose: random.Random, depth: int) -> pc.Expression:
    k, s, a, x = pc.field("k"), pc.field("s"), pc.field("a"), pc.field("n", "x")
    if depth == 0:
        leaves = [k < choose.randrange(7), s == choose.choice(["12", "x"]), x + k > 4, a.is_null(), k.isin([1, 5]),
                  pc.starts_with(s, "1"), pc.scalar(choose.choice([True, False, None])).cast("bool"), s.is_valid(),
                  pc.is_null(k, nan_is_null=True), a > 2]  # fmt: skip
        return choose.choice(leaves)
    one, two, three = (condition(choose, choose.randrange(depth)) for _ in range(3))
    kinds = [pc.and_kleene(one, two), pc.or_kleene(one, two), pc.invert(one), pc.if_else(one, two, three),
             pc.coalesce(one, two), pc.if_else(one, k, a) > 2, pc.coalesce(k, a) == pc.if_else(two, x, k),
             pc.and_kleene(pc.and_kleene(one, two), three), pc.xor(one, two)]  # fmt: skip
    return choose.choice(kinds)


@pytest.mark.parametrize("seed", range(200))
def test_the_value_is_that_of_the_whole_where_all_of_it_can_be_computed(seed: int) -> None:
    choose = random.Random(seed)
    whole = condition(choose, 4)
    tree = tree_of(whole)
    assert _expression(tree).equals(whole)
    rows = ROWS.take([choose.randrange(6) for _ in range(20)])
    assert InTurn(tree).value(rows).to_pylist() == computed(whole, rows).to_pylist()
    assert len(InTurn(tree).value(rows.slice(0, 0))) == 0
