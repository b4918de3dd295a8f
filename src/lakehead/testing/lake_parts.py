"""What a `lakehead.testing.lake.MemoryLake` is made of: files, what snapshots hold of them, and the catalog's state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from lakehead.format.defaults import default_of
from lakehead.lake.marks import LakeSnapshot
from lakehead.log.netchange import Offsets
from lakehead.types import OFFSET_COLUMN, SYSTEM_FIELDS, TableDescriptor, TableSchema, TabletKey, field_id

Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Data:
    tablet: TabletKey | None
    rows: tuple[Row, ...]
    schema: TableSchema

    @property
    def offsets(self) -> Offsets:
        """-1 for none."""
        return np.array([-1 if (o := r.get(OFFSET_COLUMN)) is None else o for r in self.rows], np.int64)


@dataclass(frozen=True, eq=False)
class Deletes:
    target: str
    positions: Offsets


@dataclass(frozen=True)
class Content:
    """What a snapshot holds: addresses."""

    data: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()
    manifests: tuple[str, ...] = ()

    @property
    def paths(self) -> set[str]:
        return {*self.data, *self.deletes, *self.manifests}


@dataclass
class State:
    """What the catalog has of one table; ``desc`` is the definition that the lake has."""

    table_uuid: str
    properties: dict[str, str]
    desc: TableDescriptor
    current_id: int | None = None
    sequence_number: int = 0
    snapshots: dict[int, LakeSnapshot] = field(default_factory=dict)
    contents: dict[int, Content] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the version: another one for each snapshot and each definition."""
        return f"{self.current_id}/{self.desc.schema_id}"

    @property
    def content(self) -> Content:
        return self.contents[self.current_id] if self.current_id is not None else Content()


def row_as(row: Row, written: TableSchema, wanted: TableSchema) -> Row:
    """A row of one definition as another has it, by the ids of its fields; system columns as they are."""
    if written == wanted:
        return row
    names = {field_id(f): f.name for f in written.fields}
    own = {f.name: row.get(names[field_id(f)]) if field_id(f) in names else _default(f) for f in wanted.fields}
    return own | {f.name: row[f.name] for f in SYSTEM_FIELDS if f.name in row}


def _default(f: pa.Field) -> Any:
    value = default_of(f)
    return None if value is None else value.as_py()
