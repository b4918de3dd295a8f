"""The applications of the shop: a process that appends what happens, when it happens.

``python -m examples.shop.load URI --seed 1 --rate 10000 --seconds 30``, or until its standard input ends; a line
``drift`` there has it send the new column from now on. At its end it prints, as JSON, how much it has sent.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time

import numpy as np
import pyarrow as pa

import lakehead as lh
from examples.shop import tables
from examples.shop.model import DEVICES, KINDS, Columns, Shop, moments, texts

TICKS = 100
"""How often a second events are sent."""
CHANGES_EVERY = 10
"""In how many of these ticks changes of orders are sent."""


def event_rows(events: Columns, *, drifted: bool, sent_us: int | None = None) -> pa.Table:
    """Events as they are sent, at ``sent_us`` or else when they are due; ``drifted``: with the new column."""
    sent = events["due"] if sent_us is None else np.full(len(events["due"]), sent_us)
    rows = {f.name: pa.array(events[f.name], f.type) for f in tables.EVENT if f.name in events and f.type == pa.int64()}
    rows |= {"kind": texts(KINDS, events["kind"]), "event_at": moments(events["event_at"]), "sent_at": moments(sent)}
    if drifted:
        rows[tables.DRIFT] = texts(DEVICES, events["device"])
    return pa.table(rows)


def change_rows(changes: Columns) -> pa.Table:
    """What the orders database tells."""
    rows = {f.name: pa.array(changes[f.name], f.type) for f in tables.ORDER_CHANGE if f.type == pa.int64()}
    rows |= {"op": texts(tables.OPS, changes["op"]), "status": texts(tables.STATUSES, changes["op"])}
    return pa.table(rows | {"changed_at": moments(changes["changed_at"])})


class Load:
    """Sends until it is told to stop."""

    def __init__(self, con: lh.Connection, shop: Shop, start_us: int) -> None:
        self._events, self._changes = con.table(tables.EVENTS), con.table(tables.CHANGES)
        self._shop, self._start_us = shop, start_us
        self.stop = threading.Event()
        self.drifted = False
        self.sent = {"events": 0, "changes": 0}

    def run(self, seconds: float | None) -> None:
        """Send each tick what became due in it; after a pause, what waited."""
        for number, second in enumerate(self._shop.seconds()):
            begin = self._start_us + number * 1_000_000
            event = change = 0
            events = event_rows(second.events, drifted=True)
            for tick in range(1, TICKS + 1):
                if seconds is not None and number + (tick - 1) / TICKS >= seconds:
                    return
                now = begin + tick * 1_000_000 // TICKS
                if self.stop.wait(max(0.0, now / 1e6 - time.time())):
                    return
                event = self._send_events(events, event, int(np.searchsorted(second.events["due"], now)))
                if tick % CHANGES_EVERY == 0:
                    change = self._send_changes(
                        second.changes, change, int(np.searchsorted(second.changes["due"], now))
                    )

    def _send_events(self, events: pa.Table, first: int, end: int) -> int:
        if end > first:
            part = events.slice(first, end - first)
            sent = moments(np.full(end - first, time.time_ns() // 1000))
            part = part.set_column(part.column_names.index("sent_at"), "sent_at", sent)
            self._events.append(part if self.drifted else part.drop_columns([tables.DRIFT]))
            self.sent["events"] += end - first
        return end

    def _send_changes(self, changes: Columns, first: int, end: int) -> int:
        if end > first:
            self._changes.append(change_rows({name: column[first:end] for name, column in changes.items()}))
            self.sent["changes"] += end - first
        return end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("uri")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=int, default=10_000)
    parser.add_argument("--start-us", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=None)
    given = parser.parse_args()
    start_us = given.start_us or time.time_ns() // 1000
    with lh.connect(given.uri) as con:
        load = Load(con, Shop(seed=given.seed, rate=given.rate, start_us=start_us), start_us)

        def obey() -> None:
            for line in sys.stdin:
                load.drifted |= line.strip() == "drift"
            load.stop.set()

        threading.Thread(target=obey, daemon=True).start()
        load.run(given.seconds)
    print(json.dumps(load.sent), flush=True)


if __name__ == "__main__":
    main()
