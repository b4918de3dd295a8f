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
    if name in sys.modules:
        return importlib.import_module(name)  # which waits for a thread that is at it
    return shielded(lambda: importlib.import_module(name))
