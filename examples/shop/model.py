"""What happens in the shop: visitors who look, fill a cart, order and pay, and the clients and networks in between.

A seed gives the same events each time. Some are delivered late, some twice, and what the orders database tells of its
changes comes out of order, as all of that does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

KINDS = ("view", "cart", "order", "payment")
CATEGORIES = ("audio", "books", "games", "garden", "kitchen", "shoes", "sports", "toys")
COUNTRIES = ("de", "dk", "fi", "fr", "nl", "no", "pl", "se")
SEGMENTS = ("new", "regular", "loyal")
DEVICES = ("phone", "desktop", "tablet")

USERS = 20_000
PRODUCTS = 1_000
BOTS = 20
"""The users with the smallest ids click as no human does."""

_SECOND = 1_000_000
_CHANCES = {"view more": 0.7, "cart": 0.4, "order": 0.5, "payment": 0.9, "late": 0.01, "twice": 0.01, "cancel": 0.5}
_EVENTS_PER_SESSION = 4.0
_VIEWS_MAX = 12
_BOT_CLICKS = 80
_BOT_EVERY_SECONDS = 2

Ints = npt.NDArray[np.int64]
Columns = dict[str, Ints]


@dataclass(frozen=True)
class Second:
    """What is delivered in one second, in the order of delivery.

    Attributes:
        events, changes: columns; texts are positions in the tuples of this module.
        events["due"], changes["due"]: when each is delivered, in microseconds since 1970.
    """

    events: Columns
    changes: Columns


class Shop:
    """A shop with about ``rate`` events a second from ``start_us`` on, microseconds since 1970."""

    def __init__(self, *, seed: int, rate: int, start_us: int) -> None:
        self._chance = np.random.default_rng(seed)
        self._rate, self._start_us = rate, start_us
        self._category = self._chance.integers(0, len(CATEGORIES), PRODUCTS)
        self._price = self._chance.integers(300, 20_000, PRODUCTS)
        self._country = self._chance.integers(0, len(COUNTRIES), USERS)
        self._segment = self._chance.integers(0, len(SEGMENTS), USERS)
        # Few products have most of the visitors.
        popular = 1 / np.arange(1, PRODUCTS + 1)
        self._popular = np.cumsum(popular / popular.sum())
        self._events = self._sessions = self._changes = 0

    def users(self) -> pa.Table:
        """All users, by ``user_id``."""
        ids = np.arange(USERS)
        return pa.table(
            {"user_id": ids, "country": texts(COUNTRIES, self._country), "segment": texts(SEGMENTS, self._segment)}
        )

    def products(self) -> pa.Table:
        """All products, by ``product_id``."""
        ids = np.arange(PRODUCTS)
        names = [f"{CATEGORIES[c]} no. {i}" for i, c in enumerate(self._category)]
        return pa.table(
            {
                "product_id": ids,
                "name": names,
                "category": texts(CATEGORIES, self._category),
                "price_cents": self._price,
            }
        )

    def category_of(self, products: Ints) -> Ints:
        """The categories of products, as positions in `CATEGORIES`."""
        return self._category[products]

    def seconds(self) -> Iterator[Second]:
        """What is delivered second by second, without end; call it once."""
        waiting_events: Columns = {}
        waiting_changes: Columns = {}
        begin = self._start_us
        for number in range(1 << 31):
            visits = self._visits(begin, bot=number % _BOT_EVERY_SECONDS == 1)
            end = begin + _SECOND
            events, waiting_events = _until(end, joined(waiting_events, self._delivered(visits)))
            changes, waiting_changes = _until(end, joined(waiting_changes, self._told(visits)))
            yield Second(events, changes)
            begin = end

    def _visits(self, begin: int, *, bot: bool) -> Columns:
        """The events of the sessions that begin in a second, by session, in the order in which they happen."""
        chance, n = self._chance, max(1, round(self._rate / _EVENTS_PER_SESSION))
        views = np.minimum(chance.geometric(1 - _CHANCES["view more"], n), _VIEWS_MAX)
        cart = chance.random(n) < _CHANCES["cart"]
        order = cart & (chance.random(n) < _CHANCES["order"])
        paid = order & (chance.random(n) < _CHANCES["payment"])
        user = chance.integers(BOTS, USERS, n)
        pause = np.full(n, 0.4 * _SECOND)
        if bot:
            views[0], cart[0], order[0], paid[0] = _BOT_CLICKS, False, False, False
            user[0], pause[0] = chance.integers(0, BOTS), 0.02 * _SECOND
        steps = views + cart + order + paid
        first = np.cumsum(steps) - steps
        total = int(steps.sum())
        session = np.repeat(np.arange(n), steps)
        kind = np.clip(np.arange(total) - first[session] - views[session] + 1, 0, len(KINDS) - 1)
        passed = np.cumsum(chance.exponential(pause[session]))
        product = np.searchsorted(self._popular, chance.random(n)).clip(max=PRODUCTS - 1)[session]
        amount = self._price[product] * chance.integers(1, 4, n)[session]
        device = chance.integers(0, len(DEVICES), n)[session]
        happened = begin + chance.integers(0, _SECOND, n)[session] + (passed - passed[first][session]).astype(np.int64)
        ids, self._events = np.arange(total) + self._events, self._events + total
        sessions, self._sessions = session + self._sessions, self._sessions + n
        return {
            "event_id": ids,
            "user_id": user[session],
            "session_id": sessions,
            "product_id": product,
            "kind": kind,
            "amount_cents": np.where(kind >= KINDS.index("order"), amount, 0),
            "device": device,
            "event_at": happened,
        }

    def _delivered(self, visits: Columns) -> Columns:
        """Events as they arrive: some seconds late, some twice."""
        chance, n = self._chance, len(visits["event_id"])
        late = np.where(chance.random(n) < _CHANCES["late"], chance.exponential(5 * _SECOND, n), 0)
        once = visits | {"due": visits["event_at"] + late.astype(np.int64)}
        chosen = np.flatnonzero(chance.random(n) < _CHANCES["twice"])
        again = {name: column[chosen] for name, column in once.items()}
        again["due"] = again["due"] + chance.integers(_SECOND // 5, 3 * _SECOND, len(chosen))
        return joined(once, again)

    def _told(self, visits: Columns) -> Columns:
        """Changes of the orders database: an order is placed, then paid, or cancelled and deleted."""
        chance = self._chance
        ordered = visits["kind"] == KINDS.index("order")
        paid = visits["kind"] == KINDS.index("payment")
        of_session = dict(
            zip(visits["session_id"][ordered].tolist(), visits["event_id"][ordered].tolist(), strict=True)
        )
        unpaid = ordered & ~np.isin(visits["session_id"], visits["session_id"][paid])
        cancelled = unpaid & (chance.random(len(ordered)) < _CHANCES["cancel"])
        parts = []
        for op, rows, delay in ((0, ordered, 0), (1, paid, 0), (2, cancelled, _SECOND)):
            part = {name: visits[name][rows] for name in ("user_id", "product_id", "amount_cents")}
            orders = [of_session[s] for s in visits["session_id"][rows].tolist()]
            part |= {"order_id": np.array(orders, np.int64), "op": np.full(len(orders), op)}
            parts.append(part | {"changed_at": visits["event_at"][rows] + delay})
        changes = _by(joined(*parts), "changed_at")
        n = len(changes["op"])
        changes["seq"], self._changes = np.arange(n) + self._changes, self._changes + n
        changes["due"] = changes["changed_at"] + chance.integers(0, _SECOND, n)
        return changes


def texts(of: tuple[str, ...], positions: Ints) -> pa.Array:
    """The texts at these positions."""
    return pa.array(of, pa.string()).take(pa.array(positions))


def moments(micros: Ints) -> pa.Array:
    """Microseconds since 1970 as Arrow timestamps."""
    return pa.array(micros, pa.int64()).cast(pa.timestamp("us", "UTC"))


def micros(column: pa.Array | pa.ChunkedArray) -> Ints:
    """Arrow timestamps, none of which is null, as microseconds since 1970."""
    found: Ints = column.cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_numpy()
    return found


def joined(*parts: Columns) -> Columns:
    """The rows of one after those of the other."""
    given = [part for part in parts if part]
    return {name: np.concatenate([part[name] for part in given]) for name in given[0]}


def _by(columns: Columns, name: str) -> Columns:
    order = np.argsort(columns[name], kind="stable")
    return {n: column[order] for n, column in columns.items()}


def _until(end: int, columns: Columns) -> tuple[Columns, Columns]:
    """What is due before a moment, in order, and the rest."""
    columns = _by(columns, "due")
    n = int(np.searchsorted(columns["due"], end))
    return {name: c[:n] for name, c in columns.items()}, {name: c[n:] for name, c in columns.items()}
