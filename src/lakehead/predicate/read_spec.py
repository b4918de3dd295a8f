"""What a read wants of a table."""

from __future__ import annotations

from dataclasses import dataclass

from lakehead.predicate import Bound, Predicate
from lakehead.types import SYSTEM_FIELDS


@dataclass(frozen=True)
class ReadSpec:
    """Columns, and rows.

    Attributes:
        columns: in this order; system columns may be among them.
        predicate: exact condition on the table's columns; None for all rows.
        limit: at most so many rows; None for all.
        system_columns: add those system columns that ``columns`` lacks, at the end.
    """

    columns: tuple[str, ...]
    predicate: Predicate | None = None
    limit: int | None = None
    system_columns: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All columns of the result."""
        lacking = [f.name for f in SYSTEM_FIELDS if f.name not in self.columns] if self.system_columns else []
        return (*self.columns, *lacking)

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """Necessary conditions, by which data is skipped."""
        return self.predicate.bounds if self.predicate is not None else ()
