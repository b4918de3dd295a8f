"""`python -m benchmarks`: `lakehead bench` with its options, and one part more, `peers`."""

from __future__ import annotations

from benchmarks.peers import peers
from lakehead.cli.extras import bench_with
from lakehead.cli.main import app, run
from lakehead.cli.session import command

if __name__ == "__main__":
    # Of two commands of one name typer takes the later one.
    command(app, "bench")(bench_with({"peers": peers}))
    run("bench")
