"""What callers may do."""

from __future__ import annotations

from enum import Enum


class Privilege(Enum):
    """What a request needs from whoever sends it, on the tables that it names; none includes another."""

    DESCRIBE = "describe"
    """Learn which tables there are, and their definitions."""
    READ = "read"
    """Rows, and how far log and lake reach."""
    WRITE = "write"
    """Rows, and the names of writers."""
    TIER = "tier"
    """Commit to the lake, and clean it up."""
    ALTER = "alter"
    """Create, change and drop tables."""
    ADMIN = "admin"
    """Decide whose a lake is."""
