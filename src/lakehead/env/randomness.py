"""Ids and tokens, as an injectable thing."""

from __future__ import annotations

import random
import secrets
import uuid
from typing import Protocol


class Randomness(Protocol):
    """Where new ids come from."""

    def uuid_hex(self) -> str:
        """32 hexadecimal digits, unique for ever."""
        ...

    def token(self) -> str:
        """A secret that cannot be guessed."""
        ...


class SystemRandomness:
    """The operating system's randomness."""

    def uuid_hex(self) -> str:
        return uuid.uuid4().hex

    def token(self) -> str:
        return secrets.token_urlsafe(24)


class SeededRandomness:
    """The same ids in the same order for the same seed; for simulation and tests, never for secrets.

    Attributes:
        draws: where they come from, for whoever decides other things by the seed.
    """

    def __init__(self, seed: int) -> None:
        self.draws = random.Random(seed)

    def uuid_hex(self) -> str:
        return f"{self.draws.getrandbits(128):032x}"

    def token(self) -> str:
        return self.uuid_hex()
