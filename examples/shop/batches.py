"""What becomes of the events of one micro-batch, in Arrow: only the new ones, complete, and summed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import lakehead as lh
from examples.shop.model import KINDS
from examples.shop.tables import COUNTS

KNOWN = (("user_id", ("country", "segment")), ("product_id", ("category",)))
"""What events are completed with: keys of users and products, and columns of these."""


def new(events: pa.Table, silver: lh.Table, users: lh.Table, products: lh.Table) -> pa.Table:
    """Events that silver does not have, each once, complete: what is delivered again is there already, or twice in
    here."""
    _, first = np.unique(events["event_id"].to_numpy(), return_index=True)
    once = events.take(np.sort(first))
    known = silver.lookup(once.select(["event_id"]))
    is_new = pc.invert(pc.is_in(once["event_id"], known["event_id"].combine_chunks()))
    return enriched(once.filter(is_new), users, products)


def inserted(changes: pa.Table) -> pa.Table:
    """Of changes those rows whose keys were not there before: an event that is delivered again is an update."""
    rows = changes.filter(pc.equal(changes["__change_type"], "+I"))
    return rows.drop_columns([name for name in rows.column_names if name.startswith("__")])


def enriched(events: pa.Table, users: lh.Table, products: lh.Table) -> pa.Table:
    """Events with what is known of their users and products at this moment."""
    for table, (key, columns) in zip((users, products), KNOWN, strict=True):
        rows = table.lookup(pa.table({key: pc.unique(events[key])}))
        at = pc.index_in(events[key], rows[key].combine_chunks())
        for name in columns:
            events = events.append_column(name, rows[name].combine_chunks().take(at))
    return events


def summed(events: pa.Table, key: str, sums: Sequence[str]) -> pa.Table:
    """What gold adds to a table of this key, ``minute`` or ``category``."""
    amounts = {name: pc.equal(events["kind"], kind).cast(pa.int64()) for name, kind in zip(COUNTS, KINDS, strict=True)}
    amounts["revenue_cents"] = pc.multiply(amounts["payments"], events["amount_cents"])
    minute = pc.floor_temporal(events["event_at"], unit="minute")
    of_key = minute if key == "minute" else events[key]
    rows = pa.table({key: of_key, "last_sent": events["sent_at"], **{name: amounts[name] for name in sums}})
    found = rows.group_by(key, use_threads=False).aggregate([*((name, "sum") for name in sums), ("last_sent", "max")])
    return found.select([key, *(f"{name}_sum" for name in sums), "last_sent_max"]).rename_columns(
        [key, *sums, "last_sent"]
    )
