"""Mutants of who is let in, and of what they may do."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

OF_ACCESS = (
    Mutant(
        "let in who knows a token's id",
        "server/principals.py",
        "if token is _NOBODY or not same:",
        "if token is _NOBODY:",
        "tests/attack/test_grants.py",
    ),
    Mutant(
        "go by grants that were taken back",
        "server/principals.py",
        "if seen.version != version:",
        "if seen.version < 0:",
        "tests/attack/test_grants.py",
    ),
    Mutant(
        "let others read by a lease",
        "server/leases.py",
        "held.table_id == table_id and held.principal == principal:",
        "held.table_id == table_id:",
        "tests/attack/test_grants.py",
    ),
    Mutant(
        "let others write under a name",
        "server/named_writers.py",
        "            require_own_writer(name.owner, principal)",
        "            pass",
        "tests/attack/test_grants.py",
    ),
)
