"""What a mutant is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A change of one place, and the tests that must notice it."""

    name: str
    file: str
    line: str
    becomes: str
    tests: str
