"""Filters as trees: what functions are called with which columns and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import pyarrow as pa

COMPARISONS = {"equal": "==", "not_equal": "!=", "less": "<", "less_equal": "<=", "greater": ">", "greater_equal": ">="}
ASSOCIATIVE = frozenset(
    ("and", "and_kleene", "or", "or_kleene", "xor", "add", "add_checked", "multiply", "multiply_checked")
)
"""Functions whose calls in one another Arrow makes one chain of, each call within the one before it."""


@dataclass(frozen=True)
class Field:
    path: tuple[str, ...]


@dataclass(frozen=True)
class Scalar:
    value: pa.Scalar


@dataclass
class Call:
    function: str
    arguments: list[Node]
    options: pa.Scalar | None = None
    chain: int = field(default=1, compare=False, repr=False)
    below: int = field(default=0, compare=False, repr=False)

    @property
    def depth(self) -> int:
        """How deep Arrow nests it, which makes a chain of all ``or`` that stand beside or in one another."""
        return self.chain + self.below

    def close(self) -> None:
        """All arguments are there."""
        self.chain, self.below = 1, 0
        for argument in self.arguments:
            if isinstance(argument, Call):
                joins = self.function in ASSOCIATIVE and argument.function == self.function
                self.chain += argument.chain if joins else 0
                self.below = max(self.below, argument.below if joins else argument.depth)

    def option(self, name: str) -> object:
        """One field of the options, None without it."""
        try:
            return self.options[name].as_py() if self.options is not None else None
        except (KeyError, ValueError, pa.ArrowException):
            return None


Node: TypeAlias = Field | Scalar | Call


def walk(tree: Node) -> Iterator[Node]:
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, Call):
            pending += node.arguments
