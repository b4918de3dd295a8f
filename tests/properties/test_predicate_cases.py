"""Conditions of many seeds keep the rows DuckDB keeps, in memory and in real tables before and after rounds."""

from __future__ import annotations

import pyarrow as pa
import pytest
from tests.properties.predicate_cases import KEY, Oracle, make_case, sql
from tests.properties.predicate_fuzz import Asked, run_case

from lakehead.predicate import Predicate, parse_predicate


@pytest.mark.parametrize("seed", range(20))
def test_a_condition_keeps_the_rows_duckdb_keeps(seed: int) -> None:
    case = make_case(seed)
    oracle = Oracle(case)
    for chunk in case.chunks:
        oracle.add(chunk)
    whole = pa.concat_tables(case.chunks)
    for condition in case.conditions:
        wanted = oracle.keys(condition)
        if wanted is None:
            continue
        text = sql(condition)
        predicate = parse_predicate(text, case.schema)
        again = Predicate.from_bytes(predicate.to_bytes(), case.schema)
        for p in (predicate, again):
            assert sorted(p.filter(whole)[KEY].to_pylist()) == wanted, f"seed {seed}: {text}"


@pytest.mark.parametrize("seed", range(4))
def test_a_statement_has_one_answer_in_log_lake_and_union(seed: int) -> None:
    asked = Asked()
    run_case(seed, asked)
    assert asked.answers["scan"] > 250 and asked.answers["con.sql"] > 250 and asked.answers["expression"] > 20
    assert asked.answers["refused"] < 10
