"""Fraud alerts at once: a process that is pushed the clicks and tells of users who click as no human does.

``python -m examples.shop.alerts URI``, until its standard input ends; then it prints, as JSON, how long events were
under way to it.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import threading
import time

import numpy as np
import pyarrow as pa

import lakehead as lh
from examples.shop import model, tables
from examples.shop.freshness import Arrivals
from examples.shop.model import Ints, micros, moments

WINDOW_SECONDS = 5
CLICKS_MAX = 50


class RapidClicks:
    """Counts each user's clicks of the last seconds, a batch at a time."""

    def __init__(self, users: int = model.USERS) -> None:
        self._clicks = np.zeros((WINDOW_SECONDS, users), np.int64)
        self._total = np.zeros(users, np.int64)
        self._quiet_until = np.zeros(users, np.int64)
        self._second = 0

    def take(self, users: Ints, second: int) -> tuple[Ints, Ints]:
        """Count these clicks of a second; the users who are to be told of now, and their clicks in the window."""
        for passed in range(max(self._second + 1, second - WINDOW_SECONDS + 1), second + 1):
            slot = self._clicks[passed % WINDOW_SECONDS]
            self._total -= slot
            slot[:] = 0
        self._second = max(second, self._second)
        clicked, counts = np.unique(users, return_counts=True)
        self._clicks[self._second % WINDOW_SECONDS, clicked] += counts
        self._total[clicked] += counts
        rapid = clicked[(self._total[clicked] > CLICKS_MAX) & (self._quiet_until[clicked] <= self._second)]
        self._quiet_until[rapid] = self._second + WINDOW_SECONDS
        return rapid, self._total[rapid]


def watch(events: lh.Table, alerts: lh.Table, arrivals: Arrivals, stop: threading.Event) -> None:
    """Write an alert for each user who clicks too fast, until told to stop."""
    rapid = RapidClicks()
    with events.subscribe(columns=["user_id", "sent_at"]) as subscription:

        def end() -> None:
            stop.wait()
            subscription.close()

        threading.Thread(target=end, daemon=True).start()
        for batch in subscription:
            now_us = time.time_ns() // 1000
            sent = micros(batch.rows["sent_at"])
            arrivals.saw(now_us, sent)
            users, clicks = rapid.take(batch.rows["user_id"].to_numpy(), int(sent[-1]) // 1_000_000)
            if len(users):
                told = {"user_id": users, "clicks": clicks, "sent_at": moments(np.full(len(users), sent[-1]))}
                told["alert_at"] = moments(np.full(len(users), time.time_ns() // 1000))
                alerts.append(pa.table(told))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("uri")
    stop, arrivals = threading.Event(), Arrivals()
    with lh.connect(parser.parse_args().uri) as con:
        args = con.table(tables.EVENTS), con.table(tables.ALERTS), arrivals, stop
        watching = threading.Thread(target=watch, args=args)
        watching.start()
        gc.freeze()  # of what is loaded, which a full collection passes over then: nobody is told of anything meanwhile
        for line in sys.stdin:  # "measure SINCE UNTIL"
            since, until = map(int, line.split()[1:])
            print(json.dumps(arrivals.percentiles(since, until)), flush=True)
        stop.set()
        watching.join()


if __name__ == "__main__":
    main()
