"""Modules that are loaded when something is first asked of them."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from lakehead.env.interrupts import shielded


def load(name: str) -> ModuleType:
    """Import a module where no interrupt lands: an extension module whose import was cut off, as DuckDB's or NumPy's,
    can never be imported again in the process.

    Raises:
        ImportError: it is not there, or lacks something.
    """
    found = sys.modules.get(name)
    return found if found is not None else shielded(lambda: importlib.import_module(name))
