"""The same numbers by other ways: what a batch job reads from the lake, and what was generated, added up by numpy.

Once the lake holds all that the log does, they equal what gold shows, to the cent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa

import lakehead as lh
from examples.shop import tables
from examples.shop.model import CATEGORIES, KINDS, Columns, Second, Shop, joined, micros
from examples.shop.tables import COUNTS, SALES, Layers

Ask: TypeAlias = Callable[[str], pa.Table]
"""Answers SQL: DuckDB's or Spark's, the questions are the same."""

MINUTE = 60_000_000
_ONCE = ", ".join(f"any_value({c}) as {c}" for c in ("kind", "amount_cents", "event_at", "product_id"))
_EVENTS = "(select event_id, " + _ONCE + " from {table} group by event_id)"
_FUNNEL = "select date_trunc('minute', event_at) as minute, {counts} from {events} e group by 1"
_REVENUE = "select category, {sales} from {events} e join {products} p on e.product_id = p.product_id group by 1"
_CASES = {name: f"sum(case when kind = '{kind}' then 1 else 0 end)" for name, kind in zip(COUNTS, KINDS, strict=True)}
_CASES["revenue_cents"] = "sum(case when kind = 'payment' then amount_cents else 0 end)"


@dataclass(frozen=True)
class Numbers:
    """What gold says.

    Attributes:
        funnel: by the minute's first microsecond, the `COUNTS`.
        revenue: by category, the `SALES`.
    """

    funnel: dict[int, tuple[int, ...]]
    revenue: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, funnel: pa.Table, revenue: pa.Table) -> Numbers:
        """Of two tables with the columns of gold."""
        minutes = micros(funnel["minute"]).tolist()
        counts = zip(*(funnel[c].to_pylist() for c in COUNTS), strict=True)
        sales = zip(*(revenue[c].to_pylist() for c in SALES), strict=True)
        return cls(
            {m: tuple(map(int, c)) for m, c in zip(minutes, counts, strict=True)},
            {c: tuple(map(int, s)) for c, s in zip(revenue["category"].to_pylist(), sales, strict=True)},
        )


def live(con: lh.Connection, layers: Layers) -> Numbers:
    """What gold shows at this moment."""
    return Numbers.of(con.table(layers.funnel).scan().to_arrow(), con.table(layers.revenue).scan().to_arrow())


def of_lake(ask: Ask, events: str = tables.EVENTS) -> Numbers:
    """A batch job over the lake's bronze, where some events are twice, or over the silver of ``events``."""
    once = _EVENTS.format(table=f"{events}$lake")
    counts = ", ".join(f"{_CASES[c]} as {c}" for c in COUNTS)
    sales = ", ".join(f"{_CASES[c]} as {c}" for c in SALES)
    funnel = ask(_FUNNEL.format(counts=counts, events=once))
    return Numbers.of(funnel, ask(_REVENUE.format(sales=sales, events=once, products=f"{tables.PRODUCTS}$lake")))


def of_gold_in_lake(ask: Ask, layers: Layers) -> Numbers:
    """Gold, as any engine finds it in the lake."""
    return Numbers.of(ask(f"select * from {layers.funnel}$lake"), ask(f"select * from {layers.revenue}$lake"))


def generated(*, seed: int, rate: int, start_us: int, events: int) -> Numbers:
    """Of the first ``events`` deliveries that the model makes, those that come twice counted once."""
    shop = Shop(seed=seed, rate=rate, start_us=start_us)
    sent = _first(events, shop, lambda second: second.events)
    _, at = np.unique(sent["event_id"], return_index=True)
    kind, amount = sent["kind"][at], sent["amount_cents"][at]
    minute, category = sent["event_at"][at] // MINUTE * MINUTE, shop.category_of(sent["product_id"][at])
    paid = kind == KINDS.index("payment")
    revenue = {}
    for number, name in enumerate(CATEGORIES):
        own = category == number
        if own.any():
            counted = (own & (kind == KINDS.index("view"))).sum(), (own & paid).sum(), amount[own & paid].sum()
            revenue[name] = tuple(map(int, counted))
    minutes = np.unique(minute).tolist()
    funnel = {m: tuple(np.bincount(kind[minute == m], minlength=len(KINDS)).tolist()) for m in minutes}
    return Numbers(funnel, revenue)


def generated_orders(*, seed: int, rate: int, start_us: int, changes: int) -> dict[int, int]:
    """The orders that are left after the first ``changes`` changes, and of each the number of its last one's status."""
    shop = Shop(seed=seed, rate=rate, start_us=start_us)
    sent = _first(changes, shop, lambda second: second.changes)
    order = np.argsort(sent["seq"])
    newest = dict(zip(sent["order_id"][order].tolist(), sent["op"][order].tolist(), strict=True))
    return {order_id: op for order_id, op in newest.items() if op != tables.OPS.index("d")}


def live_orders(con: lh.Connection) -> dict[int, int]:
    """The same of the table that the changes were applied to."""
    rows = con.table(tables.ORDERS).scan(columns=["order_id", "status"]).to_arrow()
    return {o: tables.STATUSES.index(s) for o, s in zip(*(c.to_pylist() for c in rows.columns), strict=True)}


def in_lake(con: lh.Connection, names: list[str]) -> bool:
    """Whether the lake holds each of these tables up to the same offsets as the log."""
    states = [con.table(name).status() for name in names]
    return all(s["tiered_offset"].to_pylist() == s["high_watermark"].to_pylist() for s in states)


def _first(n: int, shop: Shop, of: Callable[[Second], Columns]) -> Columns:
    parts: list[Columns] = []
    for second in shop.seconds():
        parts.append(of(second))
        if sum(len(part["due"]) for part in parts) >= n:
            break
    return {name: column[:n] for name, column in joined(*parts).items()}
