"""Which tables something is for: all, those named, or those whose names fit a pattern."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from lakehead.types import TablePath


@dataclass(frozen=True)
class TableChoice:
    """``name in choice`` tells; made by `of`.

    Attributes:
        texts: as they were given; None for every table.
        named: whole names; these must exist.
        patterns: such as ``shop.*``; tables created later may fit them. None of both is every table.
    """

    texts: list[str] | None = None
    named: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: Sequence[str] | str | None) -> TableChoice:
        """Read names and patterns, where ``*`` is any text and a bare one lives in ``default``; None is every table.

        Raises:
            InvalidRequestError: one is no table name.
        """
        if given is None:
            return cls(patterns=("*",))
        texts = [given] if isinstance(given, str) else list(given)
        named, patterns = set(), []
        for text in texts:
            if isinstance(text, str) and "*" in text:
                # Read with a letter in its place, it is a name.
                TablePath.parse(text.replace("*", "x"))
                patterns.append(text if "." in text else f"default.{text}")
            else:
                named.add(str(TablePath.parse(text)))
        return cls(texts, frozenset(named), tuple(patterns))

    def __contains__(self, name: str) -> bool:
        return name in self.named or any(fnmatch.fnmatchcase(name, p) for p in self.patterns)
