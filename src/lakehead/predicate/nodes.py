"""Filters as trees: what functions are called with which columns and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa

COMPARISONS = {"equal": "==", "not_equal": "!=", "less": "<", "less_equal": "<=", "greater": ">", "greater_equal": ">="}


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
