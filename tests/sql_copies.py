"""Statements that copy what they read into DuckDB, however little it was read before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lakehead.api import copied_tables


@contextmanager
def copying_at_once() -> Iterator[None]:
    """While this lasts, `con.sql` copies each table that it reads whole, when it is named first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copied_tables, "READS_LEAST", 0)
        patch.setattr(copied_tables, "COPY_SECONDS", 0.0)
        patch.setattr(copied_tables, "CELLS_PER_SECOND", float("inf"))
        patch.setattr(copied_tables, "COPY_LEAST", float("inf"))
        patch.setattr(copied_tables, "_per_cell", lambda seconds, cells: 0.0)
        yield
