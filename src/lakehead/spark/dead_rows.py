"""Which rows of a lake snapshot are dead, in the form Spark takes them out by.

Whatever can be is one set of offsets per tablet, so that one anti-join does it: what the log supersedes, and deleted
positions of files whose offsets tell their rows apart. A file that others wrote may hold an offset that is dead in one
place and live in another; its deleted rows are taken out by position.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakehead.env.threads import WorkerPool
from lakehead.errors import LimitExceededError
from lakehead.iceberg.file_io import FILES_AT_ONCE
from lakehead.iceberg.iceberg_table import native_table
from lakehead.iceberg.positions import deleted_positions, offsets_at
from lakehead.lake.lake_table import LakeFile
from lakehead.lake.pinned_lake import PinnedLake
from lakehead.lake.superseded import require_tablet, superseded_in
from lakehead.log.netchange import NO_OFFSETS, Offsets, union
from lakehead.spark.floats import quoted
from lakehead.spark.frame_steps import anti_join, where
from lakehead.types import BUCKET_COLUMN, OFFSET_COLUMN, TableDescriptor, TabletKey, parse_partition_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEY_COLUMN = "__dead_key"
PARTITION_COLUMN = "__dead_{}"
OFFSET_BITS = 48
DEAD_IN_PLAN_MAX = 512
"""So few dead offsets stand in the plan itself: nothing is read, sent around and joined for them."""
_REMEMBERED = 256
_NO_KEYS = range(-12, 0)
"""Beside so many, others are looked for in a set of which Spark's compiled code is the same for all statements."""
Dead: TypeAlias = "DataFrame | tuple[int, ...] | None"
"""Dead offsets, by the keys of `dead_table`: a frame of them, or those themselves."""


@dataclass(frozen=True, eq=False)
class LakeParts:
    """Data files by what has to be taken out of them.

    Attributes:
        whole: nothing.
        by_offset: rows whose offset is dead.
        by_position: rows at these positions, and those whose offset is dead.
        dead: dead offsets per tablet, sorted; no tablet without any.
    """

    whole: tuple[LakeFile, ...]
    by_offset: tuple[LakeFile, ...]
    by_position: tuple[tuple[LakeFile, Offsets], ...]
    dead: Mapping[TabletKey, Offsets]


def split_files(view: PinnedLake, files: Sequence[LakeFile], superseded: Mapping[TabletKey, Offsets]) -> LakeParts:
    """Sort planned files of a lake snapshot by how their dead rows are found.

    Args:
        files: all files of the snapshot that are read; see `PinnedLake.plan`.
        superseded: offsets that the log replaces, sorted.

    Raises:
        LakeStateError: rows may be superseded but belong to no tablet.
    """
    name = str(view.desc.path)
    hot = {k: v for k, v in superseded.items() if len(v)}
    deleted = dict(zip([f for f in files if f.delete_files], _resolve_all(view, files), strict=True))
    whole: list[LakeFile] = []
    by_offset: list[LakeFile] = []
    by_position: list[tuple[LakeFile, Offsets]] = []
    dead: dict[TabletKey, list[Offsets]] = {}
    for f in files:
        replaced = superseded_in(f, hot, name) if hot else NO_OFFSETS
        if f in deleted:
            positions, offsets = deleted[f]
            if offsets is None:
                by_position.append((f, positions))
            else:
                by_offset.append(f)
                replaced = union(replaced, offsets)
        else:
            (by_offset if len(replaced) else whole).append(f)
        if len(replaced):
            dead.setdefault(require_tablet(f.tablet, f.path, name), []).append(replaced)
    return LakeParts(tuple(whole), tuple(by_offset), tuple(by_position), {k: union(*v) for k, v in dead.items()})


def dead_table(desc: TableDescriptor, dead: Mapping[TabletKey, Offsets]) -> pa.Table:
    """Dead offsets as rows: ``(bucket << 48) | offset`` as `KEY_COLUMN`, then a column for each partition column."""
    types = desc.partition_types
    fields = [pa.field(KEY_COLUMN, pa.int64(), False)]
    fields += [pa.field(PARTITION_COLUMN.format(i), t, False) for i, t in enumerate(types)]
    schema = pa.schema(fields)
    batches = []
    for tablet, offsets in dead.items():
        if tablet.bucket >= 1 << 15 or (len(offsets) and offsets[-1] >= 1 << OFFSET_BITS):
            raise LimitExceededError(
                f"tablet {tablet} has offsets or a bucket beyond what one number holds in Spark: read it with scan()",
                tablet=str(tablet),
                limit=f"offsets below 2**{OFFSET_BITS}, buckets below 2**15",
            )
        key = (np.int64(tablet.bucket) << OFFSET_BITS) | offsets
        values = parse_partition_name(tablet.partition, types)
        repeated = [pa.repeat(pa.scalar(v, t), len(offsets)) for v, t in zip(values, types, strict=True)]
        batches.append(pa.RecordBatch.from_arrays([pa.array(key), *repeated], schema=schema))
    return pa.Table.from_batches(batches, schema)


def dead_in_plan(desc: TableDescriptor, dead: pa.Table) -> tuple[int, ...] | None:
    """Dead offsets, as of `dead_table`, where they are so few that they may stand in a plan."""
    plain = dead.num_rows <= DEAD_IN_PLAN_MAX and not desc.partition_by
    return tuple(dead[KEY_COLUMN].to_pylist()) if plain else None


def without_offsets(rows: DataFrame, desc: TableDescriptor, dead: Dead) -> DataFrame:
    """Rows with their system columns, without those that are dead; rows without an offset stay."""
    if dead is None or dead == ():
        return rows
    key = f"(shiftleft(cast({BUCKET_COLUMN} as bigint), {OFFSET_BITS}) | {OFFSET_COLUMN})"
    if isinstance(dead, tuple):
        return where(rows, f"not coalesce({key} in ({', '.join(f'{d}L' for d in (*dead, *_NO_KEYS))}), false)")
    same = [f"{key} = {KEY_COLUMN}"]
    same += [f"{quoted(column)} = {PARTITION_COLUMN.format(i)}" for i, column in enumerate(desc.partition_by)]
    return anti_join(rows, dead, " and ".join(same))


def _resolve_all(view: PinnedLake, files: Sequence[LakeFile]) -> list[tuple[Offsets, Offsets | None]]:
    wanted = [f for f in files if f.delete_files]
    if not wanted:
        return []
    separate = separate_files(files)

    def resolve(f: LakeFile) -> tuple[Offsets, Offsets | None]:
        return _deleted.get(view, f, by_offset=f in separate)

    with WorkerPool(FILES_AT_ONCE) as pool:
        return list(pool.map(resolve, wanted))


def separate_files(files: Iterable[LakeFile]) -> set[LakeFile]:
    """Files whose rows all have offsets, and whose offsets stand in no other of these files."""
    by_tablet: dict[TabletKey, list[LakeFile]] = {}
    for f in files:
        if f.null_offsets == f.record_count:
            continue
        if f.tablet is None:
            return set()
        by_tablet.setdefault(f.tablet, []).append(f)
    out: set[LakeFile] = set()
    for group in by_tablet.values():
        if any(f.offsets is None for f in group):
            continue
        bounds: npt.NDArray[np.int64] = np.array([f.offsets for f in group], np.int64)
        order = np.lexsort((bounds[:, 1], bounds[:, 0]))
        low, high = bounds[order, 0], bounds[order, 1]
        reach = np.maximum.accumulate(high)
        alone = np.ones(len(group), np.bool_)
        alone[1:] &= low[1:] > reach[:-1]
        alone[:-1] &= high[:-1] < low[1:]
        out.update(group[i] for i, one in zip(order, alone, strict=True) if one and group[i].null_offsets == 0)
    return out


class _Deleted:
    """Deleted rows of files, remembered: both files are immutable."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, tuple[str, ...], bool], tuple[Offsets, Offsets | None]] = {}

    def get(self, view: PinnedLake, f: LakeFile, *, by_offset: bool) -> tuple[Offsets, Offsets | None]:
        """Deleted positions of a file, and their offsets if those tell the file's rows apart."""
        key = (f.path, f.delete_files, by_offset)
        with self._lock:
            if key in self._known:
                return self._known[key]
        table = native_table(view.table)
        io = table.io
        positions = deleted_positions(io, f.path, f.delete_files)
        field_id = table.schema().find_field(OFFSET_COLUMN).field_id
        found = positions, offsets_at(io, f.path, f.record_count, positions, field_id) if by_offset else None
        with self._lock:
            while len(self._known) >= _REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[key] = found
        return found


_deleted = _Deleted()
