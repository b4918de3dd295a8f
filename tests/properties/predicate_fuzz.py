"""One statement has one answer: from log, lake and both, through `scan` and `con.sql`, before and after rounds.

A seed makes a table (with or without a key, a partition, a second bucket), writes a case's chunks into it with rounds
between them, through real Parquet in row groups of a few rows, and asks conditions at every stage. The answer is
DuckDB's on the plain rows; for the same condition as an Arrow expression it is Arrow's on the plain rows.

    python -m tests.properties.predicate_fuzz SEED --cases 100      (make fuzz SEED=... CASES=...)
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from unittest import mock

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from tests.properties.predicate_cases import (
    KEY,
    PARTITIONS,
    Case,
    Condition,
    Oracle,
    arrow,
    make_case,
    plain_literal,
    sql,
)
from tests.sql_copies import copying_at_once

import lakehead as lh
from lakehead.api.table import Table, handle_of
from lakehead.errors import InvalidPredicateError, LakeheadError
from lakehead.lake.union_read import Pin, UnionRead, pin
from lakehead.predicate import Predicate, parse_predicate
from lakehead.predicate.read_spec import ReadSpec

NAME = "fuzz.t"
STAGES = ("log", "lake", "union", "lake, many files")
ALWAYS = 20
"""Conditions that are asked at each stage."""
AT_ONCE = 25
"""Conditions in one statement of `con.sql`; each is pushed down on its own."""


@dataclass
class Asked:
    """What a run did."""

    cases: int = 0
    answers: Counter[str] = field(default_factory=Counter)


class Disagreement(AssertionError):
    """Two ways to read gave different rows; says how to repeat it."""


def run_case(seed: int, asked: Asked, *, conditions: int = 300) -> None:
    """Play one seed.

    Raises:
        Disagreement: a statement has two answers.
    """
    rng = random.Random(f"partition of {seed}")
    case = make_case(seed, conditions=conditions, partition=rng.choice((None, None, *PARTITIONS)))
    folder = tempfile.mkdtemp(prefix="lakehead-fuzz-")
    try:
        # Row groups of a few rows: what is skipped by their bounds is what goes wrong.
        with mock.patch("lakehead.iceberg.data_files.ROW_GROUP_ROWS", (4, 6)), lh.connect(folder) as con:
            _Run(case, con, asked).play()
        asked.cases += 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Run:
    def __init__(self, case: Case, con: lh.Connection, asked: Asked) -> None:
        rng = random.Random(case.seed)
        self._case = case
        self._con = con
        self._asked = asked
        self._rng = rng
        self._keyed = rng.random() < 0.5
        partition = [case.partition.name] if case.partition else []
        self._table: Table = con.create_table(
            NAME,
            case.schema,
            primary_key=[*partition, KEY] if self._keyed else None,
            partition_by=partition,
            buckets=rng.choice((1, 1, 2)),
            lake="iceberg",
        )
        self._oracle = Oracle(case)
        self._rows = case.schema.empty_table()

    def play(self) -> None:
        first, second, third, last = self._case.chunks
        self._write(first)
        self._write(second)
        self._ask("log")
        self._con.tier(NAME)
        self._ask("lake")
        self._write(third)
        if self._keyed:
            self._write(self._replacing(second))
        self._ask("union")
        self._con.tier(NAME)
        self._write(last)
        self._con.tier(NAME)
        self._ask("lake, many files")
        self._oracle.close()

    def _replacing(self, chunk: pa.Table) -> pa.Table:
        """The chunk's rows under keys that are there."""
        old = self._rows.take(self._rng.sample(range(self._rows.num_rows), chunk.num_rows))
        for name in self._table.primary_key:
            at = chunk.schema.get_field_index(name)
            chunk = chunk.set_column(at, chunk.schema.field(at), old[name])
        return chunk

    def _write(self, chunk: pa.Table) -> None:
        (self._table.upsert if self._keyed else self._table.append)(chunk)
        self._oracle.add(chunk)
        old = self._rows.filter(pc.invert(pc.is_in(self._rows[KEY], value_set=chunk[KEY])))
        self._rows = pa.concat_tables([old, chunk])

    # -- asking -----------------------------------------------------------------------------------------------------

    def _ask(self, stage: str) -> None:
        pinned = pin(handle_of(self._table))
        answered: list[tuple[Condition, list[int]]] = []
        for condition in self._asked_at(stage):
            wanted = self._oracle.keys(condition)
            self._scan(stage, condition, wanted, pinned)
            if wanted is not None:
                answered.append((condition, wanted))
            self._arrow(stage, condition, pinned)
        for at in range(0, len(answered), AT_ONCE):
            self._sql(stage, answered[at : at + AT_ONCE])
            with copying_at_once():
                self._sql(stage, answered[at : at + AT_ONCE], "con.sql, copied")
        self._public(stage, self._rng.sample(answered, min(3, len(answered))))

    def _asked_at(self, stage: str) -> Sequence[Condition]:
        """A few at every stage, of the others a part."""
        always, rest = self._case.conditions[:ALWAYS], self._case.conditions[ALWAYS:]
        return [*always, *rest[STAGES.index(stage) :: len(STAGES)]]

    def _scan(self, stage: str, condition: Condition, wanted: list[int] | None, pinned: Pin) -> None:
        text = sql(condition)
        try:
            predicate = parse_predicate(text, self._case.schema)
        except InvalidPredicateError:
            self._asked.answers["refused"] += 1
            return
        try:
            found = self._read(pinned, predicate)
        except LakeheadError as e:
            if wanted is not None:
                raise self._disagreement(stage, "scan", text, f"{type(e).__name__}: {e}", wanted) from e
            self._asked.answers["errors of both"] += 1
            return
        if wanted is not None:
            self._agree(stage, "scan", text, found, wanted)

    def _read(self, pinned: Pin, predicate: Predicate) -> list[int]:
        read = UnionRead(handle_of(self._table), pinned, ReadSpec((KEY,), predicate))
        return sorted(_keys(read.batches()))

    def _arrow(self, stage: str, condition: Condition, pinned: Pin) -> None:
        """The same as an expression, which means what Arrow says of the plain rows."""
        expression = arrow(condition, self._case.schema)
        if expression is None:
            return
        try:
            wanted = sorted(self._rows.filter(expression)[KEY].to_pylist())
        except pa.ArrowException:
            return
        found = self._read(pinned, parse_predicate(expression, self._case.schema))
        self._agree(stage, "expression", str(expression), found, wanted)

    def _sql(self, stage: str, some: Sequence[tuple[Condition, list[int]]], way: str = "con.sql") -> None:
        texts = [sql(condition, plain_literal) for condition, _ in some]
        parts = (f"select {i} as i, {KEY} from {NAME} where {text}" for i, text in enumerate(texts))
        found: list[list[int]] = [[] for _ in some]
        try:
            for i, key in self._con.sql(" union all ".join(parts)).fetchall():
                found[i].append(key)
        except (LakeheadError, duckdb.Error) as e:
            if len(some) > 1:
                for one in some:
                    self._sql(stage, [one], way)
                return
            raise self._disagreement(stage, way, texts[0], f"{type(e).__name__}: {e}", some[0][1]) from e
        for text, keys, (_, wanted) in zip(texts, found, some, strict=True):
            self._agree(stage, way, text, sorted(keys), wanted)

    def _public(self, stage: str, some: Sequence[tuple[Condition, list[int]]]) -> None:
        """A few through the public calls, with limits and counts."""
        for condition, wanted in some:
            text, limit = sql(condition), self._rng.randint(0, 5)
            try:
                scan = self._table.scan(where=text)
            except InvalidPredicateError:
                continue
            self._agree(stage, "scan()", text, sorted(_keys(scan.to_batches())), wanted)
            few = self._table.scan(where=text, limit=limit, columns=[KEY])
            keys = _keys(few.to_batches())
            counts = (scan.count(), few.count(), len(keys), len(set(keys) - set(wanted)))
            if counts != (len(wanted), *[min(limit, len(wanted))] * 2, 0):
                raise self._disagreement(stage, f"count and limit={limit}", text, str(counts), wanted)

    def _agree(self, stage: str, way: str, text: str, found: list[int], wanted: list[int]) -> None:
        self._asked.answers[way] += 1
        if found != wanted:
            lost, more = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
            raise self._disagreement(stage, way, text, f"lost {lost}, also {more}", wanted)

    def _disagreement(self, stage: str, way: str, text: str, what: str, wanted: list[int]) -> Disagreement:
        return Disagreement(
            f"seed {self._case.seed}, {'keyed' if self._keyed else 'log'} table, stage {stage!r}, {way}: {text!r}\n"
            f"  {what}\n  DuckDB, or Arrow for an expression, keeps {len(wanted)} of {self._rows.num_rows} rows\n"
            f"  columns: {self._case.schema.to_string()}\n"
            f"repeat it: make fuzz SEED={self._case.seed} CASES=1"
        )


def _keys(batches: Iterator[pa.RecordBatch]) -> list[int]:
    return [key for batch in batches for key in batch.column(KEY).to_pylist()]


def main() -> int:
    """Play seeds until one fails, or there were enough."""
    parser = argparse.ArgumentParser(prog="make fuzz")
    parser.add_argument("seed", type=int, nargs="?", default=None, help="the first seed (default: of the clock)")
    parser.add_argument("--cases", type=int, default=None)
    parser.add_argument("--minutes", type=float, default=None)
    options = parser.parse_args()
    first = int(time.time()) if options.seed is None else options.seed
    cases = options.cases or (10**9 if options.minutes else 100)
    end = time.monotonic() + (options.minutes * 60 if options.minutes else 10**9)
    asked = Asked()
    for seed in range(first, first + cases):
        try:
            run_case(seed, asked)
        except BaseException as e:
            print(e if isinstance(e, Disagreement) else f"seed {seed}: repeat it: make fuzz SEED={seed} CASES=1")
            if isinstance(e, Disagreement):
                return 1
            raise
        if time.monotonic() > end:
            break
    answers = ", ".join(f"{n} {way}" for way, n in sorted(asked.answers.items()))
    print(f"{asked.cases} cases from seed {first}: every statement has one answer ({answers})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
