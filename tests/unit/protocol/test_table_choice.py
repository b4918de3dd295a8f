"""Names and patterns of tables."""

from __future__ import annotations

import pytest

from lakehead.errors import InvalidRequestError
from lakehead.protocol.table_choice import TableChoice


def test_all_some_or_those_that_fit() -> None:
    every = TableChoice.of(None)
    assert "shop.orders" in every and not every.named
    some = TableChoice.of(["shop.orders", "clicks"])
    assert some.named == {"shop.orders", "default.clicks"}
    assert "shop.orders" in some and "default.clicks" in some and "shop.clicks" not in some
    assert "shop.orders" in TableChoice.of("shop.orders") and "shop.order" not in TableChoice.of("shop.orders")
    fit = TableChoice.of(["shop.*", "raw_*"])
    assert "shop.new" in fit and "default.raw_a" in fit and "other.raw_a" not in fit and not fit.named
    assert "shop.orders" not in TableChoice.of([])


@pytest.mark.parametrize("text", ["a.b.c", "shop.?", "", "shop.*.x", "-*"])
def test_what_is_no_name_and_no_pattern(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        TableChoice.of(text)
