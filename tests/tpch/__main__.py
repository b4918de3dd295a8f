"""What TPC-H takes over tables that are half hot, beside plain Parquet files: `make tpch` (SCALE=0.1)."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
from tests.tpch.data import KEYS, fill, generate, same_rows, write_plain

import lakehead as lh

Answer = Callable[[str], list[tuple[object, ...]]]
Took = dict[str, list[float]]
"""Seconds of each query over the tables, ``union``, and over plain files, ``plain``, the quickest of its runs; and of
the first run over the tables, ``first``."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--spark", action="store_true", help="by Spark, too")
    parser.add_argument(
        "--times", type=int, default=3, help="of these runs of all queries, the quickest of each query counts"
    )
    parser.add_argument("--folder", help="where temporary data goes")
    parser.add_argument("--json", action="store_true", help="print what every query took, as JSON")
    asked = parser.parse_args()
    found: dict[str, Took] = {}
    tables, queries = generate(asked.scale)
    with (
        tempfile.TemporaryDirectory(prefix="lakehead-tpch-", dir=asked.folder) as folder,
        lh.connect(f"{folder}/data") as con,
    ):
        write_plain(tables, Path(folder))
        fill(con, tables)
        with duckdb.connect() as other:
            for name in KEYS:
                other.execute(f"create view {name} as from '{folder}/{name}.parquet'")

            def union(query: str) -> list[tuple[object, ...]]:
                return con.sql(query).fetchall()

            def plain(query: str) -> list[tuple[object, ...]]:
                return other.execute(query).fetchall()

            def move() -> None:
                for name, rows in tables.items():
                    con.table(name).upsert(rows.slice(0, 1))

            for engine, before in (("DuckDB", None), ("DuckDB, tables that change before each", move)):
                found[engine] = _compare(engine, queries, union, plain, asked.times, before)
        if asked.spark:
            found |= _by_spark(con, queries, folder, asked.times, move)
    if asked.json:
        print(json.dumps(found))


def _by_spark(
    con: lh.Connection, queries: list[str], folder: str, times: int, move: Callable[[], None]
) -> dict[str, Took]:
    """Over tables that stand still, and where they ``move`` before each query."""
    import lakehead.spark as lhs

    spark = lhs.session(con)
    try:
        for name in KEYS:
            spark.read.parquet(f"{folder}/{name}.parquet").createOrReplaceTempView(f"{name}")
        # A name without a database is the plain view's, and with one the table's.
        named = {query: _qualified(query) for query in queries}

        def union(query: str) -> list[tuple[object, ...]]:
            return [tuple(row) for row in lhs.sql(spark, named[query]).collect()]

        def plain(query: str) -> list[tuple[object, ...]]:
            return [tuple(row) for row in spark.sql(query).collect()]

        still = _compare("Spark", queries, union, plain, times)
        engine = "Spark, tables that change before each"
        return {"Spark": still, engine: _compare(engine, queries, union, plain, times, move)}
    finally:
        spark.stop()


def _qualified(query: str) -> str:
    views = ", ".join(f"{name} as (select * from default.{name})" for name in KEYS if re.search(rf"\b{name}\b", query))
    rest = query.lstrip()
    return f"with {views}, {rest[5:]}" if rest[:5].lower() == "with " else f"with {views} {rest}"


def _compare(
    engine: str, queries: list[str], union: Answer, plain: Answer, times: int, before: Callable[[], None] | None = None
) -> Took:
    runs: dict[str, list[list[float]]] = {"union": [], "plain": []}
    for _ in range(times):
        for took in runs.values():
            took.append([])
        for number, query in enumerate(queries, 1):
            answers = []
            if before is not None:
                before()
            for took, answer in zip(runs.values(), (union, plain), strict=True):
                start = time.perf_counter()
                answers.append(answer(query))
                took[-1].append(time.perf_counter() - start)
            if not same_rows(*answers):
                raise SystemExit(f"{engine}: query {number} differs")
    found = {name: [min(of_query) for of_query in zip(*took, strict=True)] for name, took in runs.items()}
    for number, (own, beside) in enumerate(zip(found["union"], found["plain"], strict=True), 1):
        print(f"  {engine} {number:>2}  {own:7.3f} s  plain {beside:7.3f} s  {own / beside:6.2f}", file=sys.stderr)
    found["first"] = runs["union"][0]
    own, beside, first = (sum(found[name]) for name in ("union", "plain", "first"))
    said = f"22 queries {own:.2f} s, plain Parquet {beside:.2f} s: {own / beside:.2f} times; first {first:.2f} s"
    print(f"{engine}: {said}", file=sys.stderr)
    return found


if __name__ == "__main__":
    main()
