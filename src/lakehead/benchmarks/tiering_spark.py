"""The figures of `lakehead bench` about rounds on Spark, with one core and with two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pyarrow as pa

import lakehead as lh
import lakehead.spark as lhs
from lakehead.benchmarks.events import Figure, rate
from lakehead.benchmarks.tiering import BUCKETS, bare_write, half_updated
from lakehead.tiering.service import RoundReport, TieringService

CORES = (1, 2)


def tiering_on_spark(base: str, batches: Sequence[pa.RecordBatch]) -> Iterator[Figure]:
    """Rounds of a log table, and of a keyed one with half of its records updates, as jobs of a service on Spark."""
    bare = bare_write(base, batches)[1]
    rows = sum(b.num_rows for b in batches)
    for cores in CORES:
        with lh.connect(f"{base}/spark-{cores}") as con:
            spark = lhs.session(con, master=f"local[{cores}]")
            try:
                for name, key in (("log table", None), ("keyed, 50 % updates", ["event_id"])):
                    table = con.create_table(
                        f"bench.of_{'log' if key is None else 'keys'}",
                        batches[0].schema,
                        primary_key=key,
                        buckets=BUCKETS,
                        lake="iceberg",
                    )
                    service = partial(lhs.tiering_service, spark, con, [table.name])
                    write = table.append if key is None else table.upsert
                    for batch in batches:
                        write(batch)
                    # Executors begin with the first round.
                    _tier(service, rows)
                    for batch in half_updated(batches, rows):
                        write(batch)
                    took = _tier(service, rows)
                    beside = (
                        f"{bare / took / cores:.2f} of a bare Parquet write a core, which does {rate(batches, bare)}"
                    )
                    value = rate(batches, took * cores)
                    yield Figure(f"round on Spark local[{cores}], a core, {name}", value, beside, bare / took / cores)
            finally:
                spark.stop()


def _tier(service: Callable[..., TieringService], rows: int) -> float:
    """Seconds of the rounds that bring so many rows to the lake."""
    rounds: list[RoundReport] = []
    service(on_round=rounds.append).run(lambda: sum(r.rows for r in rounds) >= rows)
    return sum(r.seconds for r in rounds)
