"""``python -m tests.simulation SEED`` runs one seed; with ``--seeds N``, so many from that one on, on all
cores, until one fails."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tests.simulation.run import Outcome, simulate_quietly


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 when all holds, 1 when it does not."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--seeds", type=int, default=1, metavar="N")
    chosen = parser.parse_args(arguments)
    outcome = simulate_quietly(chosen.seed) if chosen.seeds == 1 else run_many(chosen.seed, chosen.seeds)
    if outcome is not None:
        report(outcome)
    return 0 if outcome is None or outcome.failure is None else 1


def report(outcome: Outcome) -> None:
    """Print what happened; the same for the same seed."""
    if outcome.failure is not None:
        print("\n".join(("last events:", *outcome.events, "")))
    print(f"seed {outcome.seed}")
    for what, count in outcome.counts.items():
        print(f"  {what:<24} {count:>6}")
    print(f"trace {outcome.digest}")
    if outcome.failure is not None:
        print(f"FAILED: {outcome.failure}\nrepeat with: make sim SEED={outcome.seed}")


def run_many(first: int, seeds: int) -> Outcome | None:
    """Run many seeds on all cores; returns the first outcome that is a failure."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Not forked: the workers' threads and kernels must be their own.
    with (
        multiprocessing.get_context("spawn").Pool() as pool,
        Progress(*columns, console=Console(file=sys.stderr)) as progress,
    ):
        bar = progress.add_task(f"seeds from {first}", total=seeds)
        for outcome in pool.imap_unordered(simulate_quietly, range(first, first + seeds), chunksize=4):
            if outcome.failure is not None:
                return outcome
            progress.advance(bar)
    print(f"{seeds} seeds from {first}: all holds")
    return None


if __name__ == "__main__":
    sys.exit(main())
