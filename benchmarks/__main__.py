"""`python -m benchmarks`: `lakehead bench` with its options, and four more parts, tpch, layers, peers and paths.

It measures the part `spark` without being asked, too.
"""

from __future__ import annotations

from benchmarks.layers import layers
from benchmarks.paths import paths
from benchmarks.peers import peers
from benchmarks.tpch import tpch
from lakehead.benchmarks.run import Part
from lakehead.benchmarks.spark import on_spark
from lakehead.cli.extras import bench_with
from lakehead.cli.main import app, run
from lakehead.cli.session import command

if __name__ == "__main__":
    # Of two commands of one name typer takes the later one.
    more: dict[str, Part] = {"spark": on_spark, "tpch": tpch, "layers": layers, "peers": peers}
    command(app, "bench")(bench_with(more, {"paths": paths}))
    run("bench")
