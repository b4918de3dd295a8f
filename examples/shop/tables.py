"""The tables of the shop: bronze as it arrives, silver clean and complete, gold ready to be shown. All are in the lake.

Amounts are whole cents, so that sums are equal whoever adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

import lakehead as lh
from examples.shop.model import Shop

TIME = pa.timestamp("us", "UTC")
EVENT = [
    pa.field("event_id", pa.int64()),
    pa.field("user_id", pa.int64()),
    pa.field("session_id", pa.int64()),
    pa.field("product_id", pa.int64()),
    pa.field("kind", pa.string()),
    pa.field("amount_cents", pa.int64()),
    pa.field("event_at", TIME),
    pa.field("sent_at", TIME),
]
ENRICHED = [
    *EVENT,
    pa.field("bronze_offset", pa.int64()),
    pa.field("country", pa.string()),
    pa.field("segment", pa.string()),
    pa.field("category", pa.string()),
]
ORDER_CHANGE = [
    pa.field("op", pa.string()),
    pa.field("seq", pa.int64()),
    pa.field("order_id", pa.int64()),
    pa.field("user_id", pa.int64()),
    pa.field("product_id", pa.int64()),
    pa.field("amount_cents", pa.int64()),
    pa.field("status", pa.string()),
    pa.field("changed_at", TIME),
]
OPS, STATUSES = ("c", "u", "d"), ("placed", "paid", "cancelled")
"""What a change of an order is, and the status that the order has after it, at the same positions."""
COUNTS = ("views", "carts", "orders", "payments")
FUNNEL = [pa.field("minute", TIME), *(pa.field(c, pa.int64()) for c in COUNTS), pa.field("last_sent", TIME)]
SALES = ("views", "payments", "revenue_cents")
REVENUE = [pa.field("category", pa.string()), *(pa.field(c, pa.int64()) for c in SALES), pa.field("last_sent", TIME)]
ALERT = [
    pa.field("user_id", pa.int64()),
    pa.field("clicks", pa.int64()),
    pa.field("sent_at", TIME),
    pa.field("alert_at", TIME),
]

EVENTS, CHANGES, ALERTS = "bronze.events", "bronze.order_changes", "gold.alerts"
USERS, PRODUCTS, ORDERS = "silver.users", "silver.products", "silver.orders"
DRIFT = "device"
"""The column that nobody had told anyone of."""


@dataclass(frozen=True)
class Layers:
    """The tables that one way of building the pipeline fills.

    Attributes:
        clean: events once each, on their way to ``events``; None where nothing is in between.
        events: silver: events once each, with what is known of user and product.
        funnel, revenue: gold.
    """

    clean: str | None
    events: str
    funnel: str
    revenue: str

    @property
    def all(self) -> tuple[str, ...]:
        return (*([self.clean] if self.clean else []), self.events, self.funnel, self.revenue)


ONE = Layers(None, "silver.events", "gold.funnel", "gold.revenue")
CHAIN = Layers("chain.clean", "chain.events", "chain.funnel", "chain.revenue")


def create(con: lh.Connection, shop: Shop) -> None:
    """Make all tables; users and products are there from the start."""

    def table(name: str, fields: list[pa.Field], key: str | None = None) -> lh.Table:
        return con.create_table(name, pa.schema(fields), primary_key=[key] if key else None, lake="iceberg")

    table(EVENTS, EVENT)
    table(CHANGES, ORDER_CHANGE)
    table(ALERTS, ALERT)
    for name, rows in ((USERS, shop.users()), (PRODUCTS, shop.products())):
        table(name, list(rows.schema), rows.schema.names[0]).upsert(rows)
    table(ORDERS, [f for f in ORDER_CHANGE if f.name not in ("op", "seq")], "order_id")
    for layers in (ONE, CHAIN):
        if layers.clean:
            table(layers.clean, EVENT, "event_id")
        table(layers.events, ENRICHED, "event_id")
        table(layers.funnel, FUNNEL, "minute")
        table(layers.revenue, REVENUE, "category")


def drift(con: lh.Connection) -> None:
    """Clients begin to say what device they are: the column goes through all layers, while all of them are in use."""
    names = [EVENTS, *(name for layers in (ONE, CHAIN) for name in (layers.clean, layers.events) if name)]
    # What is read last is altered first: a row never comes to a table that does not take its columns yet.
    for name in reversed(names):
        with con.table(name).alter() as change:
            change.add_column(DRIFT, pa.string())
