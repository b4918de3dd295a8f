"""What `con.sql` reads of copies that go on with their tables is what the tables have, whatever comes between two
statements; and each relation reads its own moment, however far the copy has gone on since.

``python -m tests.properties.test_copies_go_on 1000 50`` tries fifty other seeds.
"""

from __future__ import annotations

import gc
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.properties.moving_table import KINDS, MovingTable, shown
from tests.sql_copies import copying_at_once

import lakehead as lh
from lakehead.api import copied_table
from lakehead.api.copied_table import CopiedTable

STEPS = 30


class Counted:
    """How statements were answered from copies: ``went_on``, ``given_up``, ``older`` than what is known."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.found: Counter[str] = Counter()
        at = CopiedTable.at

        def counted(copy: CopiedTable, *args: Any) -> Any:
            known = len(copy._versions)
            rows = at(copy, *args)
            went_on = "went_on" if len(copy._versions) > known else "same"
            self.found["given_up" if copy.outdated else "older" if rows is None else went_on] += 1
            return rows

        patch.setattr(CopiedTable, "at", counted)


def asked(con: lh.Connection, text: str) -> list[tuple[Any, ...]]:
    return con.sql(text).fetchall()


def run(seed: int, folder: Path) -> Counter[str]:
    """What statements found, by how they were answered."""
    rng = random.Random(seed)
    keyed, lake, partitioned = KINDS[seed % len(KINDS)]
    with lh.connect(folder / f"d{seed}") as con, pytest.MonkeyPatch.context() as patch, copying_at_once():
        counted = Counted(patch)
        if rng.random() < 0.3:  # much comes at once
            patch.setattr(copied_table, "LATER_LEAST", 5)
        if rng.random() < 0.3:
            patch.setattr(copied_table, "VERSIONS_MAX", 2)
        world = MovingTable(con, rng, keyed=keyed, lake=lake, partitioned=partitioned)
        held: list[tuple[Any, list[str]]] = []
        for _ in range(STEPS):
            for _ in range(rng.choice([0, 1, 1, 3])):
                world.step()
            now = {"now": world.table.scan().to_arrow()}
            plain = shown(con.sql("from now", frames=now).fetchall())
            assert shown(asked(con, "from s.t")) == plain
            counts = "select count(*), count(x), count(distinct k) from"
            assert asked(con, f"{counts} s.t") == con.sql(f"{counts} now", frames=now).fetchall()
            if rng.random() < 0.4:
                held.append((con.sql("from s.t"), plain))
            if held and rng.random() < 0.3:
                held.pop(rng.randrange(len(held)))
            for relation, was in held if rng.random() < 0.2 else ():
                assert shown(relation.fetchall()) == was
        for relation, was in held:
            assert shown(relation.fetchall()) == was
        return counted.found


@pytest.mark.parametrize("seed", range(8))
def test_copies_have_what_their_tables_have(seed: int, tmp_path: Path) -> None:
    found = run(seed, tmp_path)
    assert found["went_on"] > 0, found


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    yield
    gc.collect()


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:3])
    total: Counter[str] = Counter()
    for number in range(first, first + count):
        with tempfile.TemporaryDirectory() as name:
            print(number, found := run(number, Path(name)), flush=True)
            total += found
    print(total)
