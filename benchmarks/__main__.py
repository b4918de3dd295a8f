"""`python -m benchmarks`: `lakehead bench` with its options, and three parts more, `layers`, `peers` and `paths`; it
measures the part `spark` without being asked, too."""

from __future__ import annotations

from benchmarks.layers import layers
from benchmarks.paths import paths
from benchmarks.peers import peers
from lakehead.benchmarks.spark import on_spark
from lakehead.cli.extras import bench_with
from lakehead.cli.main import app, run
from lakehead.cli.session import command

if __name__ == "__main__":
    # Of two commands of one name typer takes the later one.
    command(app, "bench")(bench_with({"spark": on_spark, "layers": layers, "peers": peers}, {"paths": paths}))
    run("bench")
