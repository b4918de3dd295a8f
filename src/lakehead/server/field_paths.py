"""Fields inside columns by their full names, as Iceberg spells them: ``spot.x``, ``tags.element``, ``counts.value``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import pyarrow as pa

from lakehead.types import children, with_children

Path: TypeAlias = tuple[int, ...]
"""Places, one in each level: of a column, of a field in it, and so on."""


def full_names(fields: Sequence[pa.Field], before: str = "", at: Path = ()) -> Iterator[tuple[str, Path]]:
    """All fields by their full names, which are unique in a table."""
    for i, f in enumerate(fields):
        name, path = before + f.name, (*at, i)
        yield name, path
        yield from full_names(_spelled(f.type), f"{name}.", path)


def field_at(fields: Sequence[pa.Field], path: Path) -> pa.Field:
    """The field in this place."""
    f = fields[path[0]]
    return f if len(path) == 1 else field_at(children(f.type), path[1:])


def edited(fields: Sequence[pa.Field], path: Path, edit: Callable[[list[pa.Field], int], object]) -> list[pa.Field]:
    """The fields after an edit of the list in which this place is, which gets the place in it too."""
    made, at = list(fields), path[0]
    if len(path) == 1:
        edit(made, at)
    else:
        f = made[at]
        made[at] = f.with_type(with_children(f.type, edited(children(f.type), path[1:], edit)))
    return made


def in_map_key(fields: Sequence[pa.Field], path: Path) -> bool:
    """Whether the place is the key of a map, or inside of one."""
    return any(pa.types.is_map(field_at(fields, path[:n]).type) and path[n] == 0 for n in range(1, len(path)))


def _spelled(t: pa.DataType) -> list[pa.Field]:
    names = ["key", "value"] if pa.types.is_map(t) else ["element"] if not pa.types.is_struct(t) else None
    return children(t) if names is None else [f.with_name(n) for f, n in zip(children(t), names, strict=False)]
