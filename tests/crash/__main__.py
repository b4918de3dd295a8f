"""`make crash`: kills at every named point and at random times, with the data checked after each.

    python -m tests.crash [--seed N] [--only KIND] [--no-spark] [--folder PATH]

A point that no kill was at fails the run, as wrong data does. The seed fixes what is killed where and what is written,
not how threads and processes take turns.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tests.crash.deployment import PATIENCE_SECONDS, Counts
from tests.crash.history import WrongDataError
from tests.crash.quiet import quiet_stderr
from tests.crash.suite import Player, deck, missed_points, query_deck, spark_deck

from lakehead.client import patience


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make crash", description=__doc__)
    parser.add_argument("--seed", type=int, help="default: a new one, which is printed")
    parser.add_argument("--only", action="append", help="only steps of this kind or at this point; may be repeated")
    parser.add_argument("--no-spark", action="store_true", help="leave out what needs Java")
    parser.add_argument("--folder", type=Path, help="for the data; default: a new temporary one")
    given = parser.parse_args(arguments)
    patience.PATIENCE_SECONDS = PATIENCE_SECONDS
    seed = random.SystemRandom().randrange(1_000_000) if given.seed is None else given.seed
    root = given.folder or Path(tempfile.mkdtemp(prefix="lakehead-crash-"))
    root.mkdir(parents=True, exist_ok=True)
    wanted = given.only
    steps = [s for s in deck(seed) if not wanted or s.kind in wanted or s.point in wanted]
    on_spark, queries = (
        [] if given.no_spark else [s for s in made(seed) if not wanted or s.kind in wanted]
        for made in (spark_deck, query_deck)
    )
    with_spark = len(on_spark) + len(queries)
    print(f"crash suite, seed {seed}: {len(steps)} steps and {with_spark} with Spark, in {root}", flush=True)
    begin = time.perf_counter()
    player = Player(root, seed, lambda text: print(text, flush=True))
    wrong = ""
    with quiet_stderr(root / "stderr.txt"):
        try:
            if on_spark:
                player.play_spark(on_spark)
            player.play_queries(queries)
            player.play(steps)
        except WrongDataError as e:
            wrong = str(e)
    print_summary(player.counts, time.perf_counter() - begin)
    missed = [] if wanted or given.no_spark else missed_points(player.counts)
    if wrong:
        print(f"\nFAILED, seed {seed}, data kept in {root}: {wrong}")
    elif missed:
        print(f"\nFAILED, seed {seed}: no kill was at {', '.join(missed)}")
    else:
        shutil.rmtree(root, ignore_errors=True)
        print(f"\nall right, seed {seed}")
    return 1 if wrong or missed else 0


def print_summary(counts: Counts, seconds: float) -> None:
    """The table at the end of a run."""
    print(f"\n{'killed, or at fault, at':48}{'times':>6}{'missed':>8}")
    for name in sorted(counts.kills.keys() | counts.missed.keys()):
        print(f"{name:48}{counts.kills[name]:6}{counts.missed[name] or '':>8}")
    faults = sum(n for name, n in counts.kills.items() if name.startswith(("lost", "asleep", "catalog locked: re")))
    print(f"\n{counts.kills.total() - faults} kills and {faults} other faults in {seconds:.0f} s")
    for label, values in (("ready", counts.start_seconds), ("first lookup", counts.answer_seconds)):
        if values:
            print(f"server starts: {label} after p50 {np.median(values):.2f} s, max {max(values):.2f} s")
    if taken := counts.takeover_seconds:
        print(f"tables of a dead tiering job: taken over after p50 {np.median(taken):.1f} s, max {max(taken):.1f} s")
    print(
        f"{counts.starts} starts, {counts.checks} checks of {counts.rows_checked:,} rows,"
        f" {counts.acknowledged:,} rows acknowledged, {counts.unanswered} writes without an answer\n"
        f"{counts.scans:,} scans and {counts.lookups:,} lookups under load, named writers resumed"
        f" {counts.writers_resumed} times, subscribers {counts.feeds_resumed} times, {counts.feeds_restarted} of them"
        f" from live rows\nlake prefixes compared {counts.prefixes_checked} (not seen row by row:"
        f" {counts.prefixes_unseen}), deepest log start {counts.deepest_trim:,}\nrounds: {dict(counts.rounds)}\n"
        f"maintenance: {dict(counts.maintenance)}; {counts.orphans} orphans found by checks, {counts.scans_held} scans"
        " held through kills of it"
    )


if __name__ == "__main__":
    sys.exit(main())
