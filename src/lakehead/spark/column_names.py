"""Names of columns as a table has them, for what says them in another case, as Spark lets its users do; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def named_as(known: Sequence[str], names: Sequence[str]) -> list[str]:
    """Names of columns as a table has them; those that it does not have, or that would be one twice, as they are."""
    folded = {name.lower(): name for name in known}
    found = [name if name in known else folded.get(name.lower(), name) for name in names]
    return [new if found.count(new) == 1 else name for name, new in zip(names, found, strict=True)]


def as_named(known: Sequence[str], columns: Any) -> Any:
    """Columns that are asked for, named as they are there, whatever the case; what names no columns as it is."""
    if isinstance(columns, str):
        return named_as(known, [columns])
    columns = list(columns) if isinstance(columns, Iterable) else columns
    named = isinstance(columns, list) and all(isinstance(name, str) for name in columns)
    return named_as(known, columns) if named else columns
