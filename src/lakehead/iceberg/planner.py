"""Which lake files a read needs, as plain values that Spark and workers can carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyiceberg.expressions import BooleanExpression
from pyiceberg.manifest import FileFormat
from pyiceberg.table import FileScanTask, Table
from pyiceberg.types import DoubleType, FloatType

from lakehead.env.recently_used import RecentlyUsed
from lakehead.errors import LakeStateError
from lakehead.iceberg.contract import same_tablets
from lakehead.iceberg.file_io import FileStamp, file_stamps, lake_files
from lakehead.iceberg.manifests import file_filter, manifests_of, scan_of
from lakehead.iceberg.positions import offset_bounds, with_offsets
from lakehead.iceberg.pruning import row_filter
from lakehead.iceberg.tablets import parted_by, partition_of, tablet_of
from lakehead.lake.lake_table import LakeFile
from lakehead.predicate import Bound
from lakehead.types import OFFSET_COLUMN


@dataclass(frozen=True, eq=False)
class FilePlan:
    """Data files of a lake snapshot, in tablet and offset order, and by address what their manifests say."""

    files: Sequence[LakeFile]
    tasks: Mapping[str, FileScanTask]


@dataclass(frozen=True, eq=False)
class _Known:
    """What was read of a snapshot's manifests.

    Attributes:
        key: their list, and by which schema and partition spec it was read, in words: where a lake is put back to what
            it was, others get their ids.
        plan: the files.
        stamps: of the manifests and their list, by address.
        size: how many columns of files it tells of.
    """

    key: tuple[str, str, str]
    plan: FilePlan
    stamps: Mapping[str, FileStamp]
    size: int


_known: RecentlyUsed[tuple[str, str], _Known] = RecentlyUsed(1 << 17, lambda known: known.size)
"""Of each table, where it has few files, those that were asked for last; by its id and where it is. At the bound some
60 MB."""
_FEW_FILES = 128


def plan_files(table: Table, snapshot_id: int | None = None, bounds: Sequence[Bound] = ()) -> Sequence[LakeFile]:
    """The files of `read_manifests`; where a snapshot has few, its manifests are read once, whatever the bounds."""
    whole = _all_of_few(table, snapshot_id)
    if whole is None:
        return read_manifests(table, snapshot_id, bounds).files
    if not bounds:
        return whole.files
    may_hold = file_filter(table, _row_filter(table, bounds), {b.column for b in bounds})
    return [f for f in whole.files if may_hold(whole.tasks[f.path].file)]


def all_files(table: Table, snapshot_id: int | None = None) -> FilePlan:
    """What `read_manifests` reads without bounds, which is remembered where files are few."""
    whole = _all_of_few(table, snapshot_id)
    return read_manifests(table, snapshot_id) if whole is None else whole


def _all_of_few(table: Table, snapshot_id: int | None) -> FilePlan | None:
    """All files of a snapshot; None: they are many, or nobody counted them."""
    snapshot = table.current_snapshot() if snapshot_id is None else table.snapshot_by_id(snapshot_id)
    if snapshot is None or snapshot.summary is None:
        return None
    name = str(table.metadata.table_uuid), table.location()
    key = snapshot.manifest_list, str(table.schema()), str(table.spec())
    known = _known.get(name)
    if known is None or known.key != key or known.stamps != file_stamps(table.io, known.stamps):
        counts = [str(snapshot.summary.get(f"total-{kind}-files") or "") for kind in ("data", "delete")]
        if not all(n.isdecimal() and int(n) <= _FEW_FILES for n in counts):
            return None
        with lake_files():
            read = [snapshot.manifest_list, *(m.manifest_path for m in manifests_of(snapshot, table.io))]
        stamps, plan = file_stamps(table.io, read), read_manifests(table, snapshot.snapshot_id)
        if stamps is None:
            return plan
        known = _Known(key, plan, stamps, (1 + len(plan.files)) * len(table.schema().fields))
        _known.note(name, known)
    return known.plan


def _row_filter(table: Table, bounds: Sequence[Bound]) -> BooleanExpression:
    schema = table.schema()
    return row_filter(bounds, schema, parted=parted_by(table.spec(), schema))


def read_manifests(table: Table, snapshot_id: int | None = None, bounds: Sequence[Bound] = ()) -> FilePlan:
    """Data files of a lake snapshot that can hold rows within the bounds, in tablet and offset order.

    Args:
        snapshot_id: None reads the current one; the table may have none, which holds no files.
        bounds: conditions that every wanted row meets; they only skip files, rows must be filtered still.

    Raises:
        LakeStateError: the snapshot has equality deletes, or files that are not Parquet, which tiering never writes.
        LakeFileMissingError: a manifest is gone.
    """
    schema, spec, specs = table.schema(), table.spec(), table.specs()
    offset_id = schema.find_field(OFFSET_COLUMN).field_id
    floats = {f.field_id: f.name for f in schema.fields if isinstance(f.field_type, FloatType | DoubleType)}
    scan = scan_of(table, row_filter=_row_filter(table, bounds), snapshot_id=snapshot_id)
    try:
        with lake_files():
            tasks = list(scan.plan_files())
    except ValueError as e:
        if "equality delete" not in str(e):
            raise
        raise LakeStateError(
            f"lake table {'.'.join(table.name())} has equality deletes, which cannot be read: compact it with the"
            " engine that wrote them"
        ) from e
    files = []
    for task in tasks:
        f = task.file
        for part in (f, *task.delete_files):
            if part.file_format is not FileFormat.PARQUET:
                raise LakeStateError(
                    f"lake table {'.'.join(table.name())} has a file in {part.file_format.name}, {part.file_path},"
                    " which another engine wrote, and Parquet is read here: have that engine write Parquet"
                    " (write.format.default, write.delete.format.default), and rewrite its files",
                    path=part.file_path,
                )
        files.append(
            LakeFile(
                f.file_path,
                f.file_size_in_bytes,
                f.record_count,
                tablet_of(f.partition, specs[f.spec_id], schema) if same_tablets(specs[f.spec_id], spec) else None,
                offset_bounds(f, offset_id),
                (f.null_value_counts or {}).get(offset_id),
                tuple(sorted(d.file_path for d in task.delete_files)),
                frozenset(floats[i] for i, nans in (f.nan_value_counts or {}).items() if nans == 0 and i in floats),
                partition_of(f.partition, specs[f.spec_id], schema) if same_tablets(specs[f.spec_id], spec) else None,
            )
        )
    known = with_offsets(table.io, files, offset_id)
    known.sort(key=lambda f: (str(f.tablet), f.offsets or (-1, -1), f.path))
    return FilePlan(known, {t.file.file_path: t for t in tasks})
