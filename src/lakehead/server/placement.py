"""Where tablets live: a server answers for its own, and says of the others that they are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from lakehead.types import TabletKey

Home: TypeAlias = Callable[[str, TabletKey], str | None]
"""Tells for a table's id and one of its tablets the address of the server where it lives; None: here.

A tablet that was never written has a home, too: the server that will make it, and that knows that it is empty.
"""


def everything_here(table_id: str, tablet: TabletKey) -> str | None:
    """The home of every tablet of a server that is alone."""
    return None
