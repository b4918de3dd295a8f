"""Decimals on their way from Python to Arrow."""

from __future__ import annotations

from decimal import Decimal

PLACES_MAX = 38
"""As many as a column has at most behind the point."""


def near(value: Decimal) -> Decimal:
    """The decimal itself, which Arrow then takes, or refuses, for a column of any precision and scale.

    Arrow looks up by how much a decimal is to be scaled and does not ask how far its table reaches: one that begins
    far behind the point becomes another value, or ends the process.

    Raises:
        ValueError: it has more than `PLACES_MAX` places behind the point.
    """
    # More digits than a column has are refused by Arrow, so that the exponent is that of a value which begins early.
    if value.adjusted() < 0:
        exponent = value.as_tuple().exponent
        if isinstance(exponent, int) and exponent < -PLACES_MAX:
            raise ValueError(f"it has {-exponent:,} places behind the point, and a decimal {PLACES_MAX} at most")
    return value
