"""What Spark reads of tables that change between its statements is what they have, whatever happened; and each
DataFrame reads its own moment.

``python -m tests.integration.test_spark_kept_frames 1000 10`` tries ten other seeds.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from tests.integration.conftest import embedded_only
from tests.properties.moving_table import KINDS, MovingTable, shown

import lakehead as lh
import lakehead.spark as lhs
from lakehead.spark import dead_rows, kept_frame
from lakehead.spark.kept_frame import _KeptRead

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, embedded_only]
STEPS = 9


def rows_of(frame: DataFrame) -> list[str]:
    """Binary stays bytes, and instants are those of UTC, however the session shows them."""
    return shown([tuple(r.values()) for r in frame.toArrow().to_pylist()])


def plain(rows: pa.Table, like: DataFrame) -> list[str]:
    types = like.toArrow().schema.types
    return shown(
        [tuple(r.values()) for r in rows.cast(pa.schema(zip(rows.schema.names, types, strict=True))).to_pylist()]
    )


def run(seed: int, spark: SparkSession, folder: Path) -> Counter[str]:
    """How statements were answered."""
    rng = random.Random(seed)
    keyed, lake, partitioned = KINDS[seed % len(KINDS)]
    found: Counter[str] = Counter()
    with lh.connect(folder / f"d{seed}") as con, pytest.MonkeyPatch.context() as patch:
        frame_of = _KeptRead.frame

        def counted(read: _KeptRead) -> Any:
            frame = frame_of(read)
            still = read._base.rows == read._moment
            found["none" if frame is None else "still" if still else "went_on"] += 1
            return frame

        patch.setattr(_KeptRead, "frame", counted)
        without = kept_frame.without_offsets

        def without_gone(rows: DataFrame, desc: Any, dead: Any) -> DataFrame:
            found["gone"] += dead is not None and dead != ()
            return without(rows, desc, dead)

        patch.setattr(kept_frame, "without_offsets", without_gone)
        if rng.random() < 0.3:
            patch.setattr(dead_rows, "DEAD_IN_PLAN_MAX", 0)
        if rng.random() < 0.3:
            patch.setattr(kept_frame, "LATER_ROWS_MAX", 20)
        lhs.attach(spark, con)
        table = MovingTable(con, rng, keyed=keyed, lake=lake, partitioned=partitioned)
        held: list[tuple[DataFrame, list[str]]] = []
        for _ in range(8):  # rows that may be gone later
            table.write()
        for _ in range(STEPS):
            for _ in range(rng.choice([0, 1, 1, 2])):
                table.step()
            system = rng.random() < 0.3
            now = table.table.scan(system_columns=system).to_arrow()
            frame = lhs.table(spark, "s.t", system_columns=True) if system else lhs.sql(spark, "select * from s.t")
            expected = plain(now, frame)
            assert rows_of(frame) == expected
            hot = lhs.table(spark, "s.t", tier="hot")
            assert rows_of(hot) == plain(table.table.scan(tier="hot").to_arrow(), hot)
            names = rng.sample(table.table.schema.names, rng.choice([1, 2]))
            some_columns = lhs.table(spark, "s.t", columns=names)
            assert rows_of(some_columns) == plain(table.table.scan(columns=names).to_arrow(), some_columns)
            text = "select count(*) n, count(x) x, count(distinct k) k from s.t where k > 20"
            k, x = now["k"].to_pylist(), now["x"].to_pylist()
            some = [(a, b) for a, b in zip(k, x, strict=True) if a > 20]
            told = (len(some), sum(b is not None for _, b in some), len({a for a, _ in some}))
            assert tuple(lhs.sql(spark, text).first()) == told  # type: ignore[arg-type]
            if rng.random() < 0.5:
                held.append((frame, expected))
            for old, was in held if rng.random() < 0.2 else ():
                assert rows_of(old) == was
        for old, was in held:
            assert rows_of(old) == was
    return found


@pytest.mark.parametrize("seed", [1, 6, 12, 15])  # a log table, and keyed ones of which rows go
def test_statements_have_what_their_tables_have(seed: int, spark: SparkSession, tmp_path: Path) -> None:
    found = run(seed, spark, tmp_path)
    keyed, *_ = KINDS[seed % len(KINDS)]
    assert found["went_on"] and bool(found["gone"]) is keyed


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:3])
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name, lh.connect(f"{name}/session") as own:
        session = lhs.session(own)
        for number in range(first, first + count):
            print(number, one := run(number, session, Path(name)), flush=True)
            total += one
        session.stop()
    print(total)
