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
    Mutant(
        "believe keys that are for something else",
        "server/signatures.py",
        'or jwk.get("use", "sig") != "sig"',
        "or False",
        "tests/attack/test_signed_tokens.py",
    ),
    Mutant(
        "let in by a token for another audience",
        "server/signatures.py",
        '"verify_sub": False,',
        '"verify_sub": False, "verify_aud": False,',
        "tests/attack/test_signed_tokens.py",
    ),
    Mutant(
        "let in by a token that has expired",
        "server/signatures.py",
        "if now >= expires + LEEWAY_SECONDS:",
        "if now >= expires + 1e9:",
        "tests/attack/test_signed_tokens.py",
    ),
    Mutant(
        "ask an issuer for each key that is made up",
        "server/signatures.py",
        "and now - keys.tried >= RETRY_SECONDS:",
        "and True:",
        "tests/attack/test_signed_tokens.py",
    ),
    Mutant(
        "give the name of an account to who has none",
        "server/grants.py",
        "principal = require_unsigned(request.principal)",
        "principal = require_principal(request.principal)",
        "tests/attack/test_signed_tokens.py",
    ),
    Mutant(
        "forget what was taken of a quota",
        "server/quotas.py",
        "            debt.bytes += size\n            if seconds <= 0:",
        "            if seconds <= 0:",
        "tests/unit/server/test_quotas.py",
    ),
    Mutant(
        "let two streams through at once by one quota",
        "server/quotas.py",
        "if limit is not None and held >= limit:",
        "if limit is not None and held > limit:",
        "tests/attack/test_quotas.py",
    ),
    Mutant(
        "start with passwords that others can read",
        "config.py",
        "if _SECRET.search(name) and _KEPT not in text",
        "if False and _KEPT not in text",
        "tests/attack/test_secrets.py",
    ),
)
