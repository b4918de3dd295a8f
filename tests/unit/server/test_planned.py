"""Whether where a micro-batch ends lies within where a later one does."""

from __future__ import annotations

import json
import random

import pytest

from lakehead.server.planned import ends_within

OLD = '{"table": "a.t", "table_id": "x", "schema_id": 0, "offsets": {"/0": 7, "p=1/0": 3}}'


@pytest.mark.parametrize(
    ("one", "other", "within"),
    [
        (OLD, OLD, True),
        (OLD, OLD.replace("7", "8"), True),
        (OLD, OLD.replace('"schema_id": 0', '"schema_id": 1'), True),
        (OLD, OLD.replace("}}", ', "p=2/0": 1}}'), True),
        (OLD, OLD.replace("7", "6"), False),
        (OLD, OLD.replace(', "p=1/0": 3', ""), False),
        (OLD, OLD.replace('"x"', '"y"'), False),
        (OLD.replace("}}", '}, "live": {"lease": "l", "ranges": {"/0": [0, 9]}}}'), OLD, False),
        ('{"clicks": {"0": 5, "1": 9}}', '{"clicks": {"0": 5, "1": 10}, "carts": {"0": 1}}', True),
        ('{"clicks": {"0": 6, "1": 9}}', '{"clicks": {"0": 5, "1": 10}}', False),
        ("17", "17", True),
        ("16", "17", True),
        ("17.5", "17", False),
        ('{"logOffset":5} sha256 ab', '{"logOffset":9} sha256 cd', False),
        ("sha256 ab", "sha256 cd", False),
        ("sha256 ab", "sha256 ab", True),
        ("[1, 2]", "[1, 3]", True),
        ("[1, 2]", "[1]", False),
        ("true", "1", False),
        ('{"isStartingVersion": true}', '{"isStartingVersion": false}', False),
        ("null", "null ", True),
        ("NaN", "NaN ", False),
        ('"a"', '"b"', False),
        ("-", "-", True),
        ("-", "5", False),
        (f"{OLD}\n5", f"{OLD}\n6", True),
        (f"{OLD}\n7", f"{OLD}\n6", False),
        (OLD, f"{OLD}\n6", False),
        ("[" * 100_000, "[" * 99_999, False),
        ("1" * 5000, "2", False),
    ],
)
def test_what_lies_within(one: str, other: str, within: bool) -> None:
    assert ends_within(one, other) is within


@pytest.mark.parametrize("seed", range(20))
def test_it_is_so_of_what_a_query_has_passed_and_of_nothing_else(seed: int) -> None:
    random_ = random.Random(seed)
    at: dict[str, int] = {}
    ends = []
    for _ in range(30):
        for _ in range(random_.randrange(1, 4)):
            tablet = f"p={random_.randrange(3)}/{random_.randrange(2)}"
            at[tablet] = at.get(tablet, 0) + random_.randrange(1, 5)
        ends.append(dict(at))
    for i, one in enumerate(ends):
        for j, other in enumerate(ends):
            assert ends_within(json.dumps({"offsets": one}), json.dumps({"offsets": other})) == (i <= j)
