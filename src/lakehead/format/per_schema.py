"""What follows from a schema alone, found once: to look at its fields takes as long as to write a row."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

import pyarrow as pa

T = TypeVar("T")
_KEPT_MAX = 1024


def once_per_schema(find: Callable[[pa.Schema], T]) -> Callable[[pa.Schema], T]:
    """The function, which remembers what it found for a schema by the object: to compare schemas is no cheaper than to
    look at their fields. Thread-safe."""
    known: dict[int, tuple[pa.Schema, T]] = {}

    def found(schema: pa.Schema) -> T:
        entry = known.get(id(schema))
        if entry is None:
            if len(known) >= _KEPT_MAX:
                known.clear()
            # What is remembered is kept alive, so that no other object has its id.
            entry = known[id(schema)] = (schema, find(schema))
        return entry[1]

    return found


@once_per_schema
def digest_of_schema(schema: pa.Schema) -> str:
    """What tells it from all others, the metadata of its fields included: names, types, field ids, defaults."""
    return hashlib.blake2b(schema.serialize(), digest_size=16).hexdigest()
