"""The lakes that these tests run on."""

from __future__ import annotations

from tests.lakes import any_keyed, any_lake, any_log, keyed, log, make_any, make_lake

__all__ = ["any_keyed", "any_lake", "any_log", "keyed", "log", "make_any", "make_lake"]
