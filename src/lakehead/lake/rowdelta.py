"""One lake snapshot that adds data files and position deletes and takes files away, checked on every attempt.

PyIceberg has no producer for such a commit. This one builds on its private ``_SnapshotProducer`` (pinned to one minor
series for that): it writes manifests of both contents itself, keeps their number small, and asks a guard about exactly
the metadata that an attempt is built on, the first as well as each retry. PyIceberg's own ``_validate_concurrency``
runs on retries only, so it cannot fence.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from pyiceberg.exceptions import ValidationException
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriter,
    ManifestWriterV2,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.update import TableRequirement, TableUpdate
from pyiceberg.table.update.snapshot import _SnapshotProducer
from pyiceberg.table.update.validate import _validate_data_files_exist
from pyiceberg.typedef import Record

from lakehead.lake.files import WrittenFile

MANIFESTS_MAX = 10
"""Small manifests of one kind that may stand beside each other before a commit writes them as one."""
SMALL_MANIFEST_BYTES = 1 << 20

Guard = Callable[[TableMetadata], None]
DeletesByFile = Mapping[str, frozenset[str]]


class RowDelta(_SnapshotProducer["RowDelta"]):
    """Stages one snapshot in a transaction.

    Args:
        transaction: where to stage it; its table's metadata is what the delta was planned on.
        summary: entries of the snapshot summary.
        guard: raises when the metadata that the snapshot would be built on is not as the caller expects.
    """

    def __init__(self, transaction: Transaction, summary: Mapping[str, str], guard: Guard) -> None:
        super().__init__(Operation.OVERWRITE, transaction, transaction._table.io, None, dict(summary))
        self._guard = guard
        self._added_deletes: list[DataFile] = []
        self._removed_deletes: set[DataFile] = set()
        self._required: set[DataFile] = set()
        self._planned_deletes: DeletesByFile = {}

    def add_deletes(self, file: DataFile, target: DataFile) -> None:
        """Add a position-delete file; its target must still exist when the commit lands."""
        self._added_deletes.append(file)
        self._required.add(target)

    def remove_deletes(self, file: DataFile) -> None:
        """Drop a delete file that applies to nothing any more."""
        self._removed_deletes.add(file)

    def replace_data_file(self, file: DataFile, delete_files: Iterable[str]) -> None:
        """Remove a data file whose rows, less those of these delete files, are written anew in this snapshot."""
        self.delete_data_file(file)
        self._planned_deletes = {**self._planned_deletes, file.file_path: frozenset(delete_files)}

    def discard(self) -> None:
        """Remove the manifests of a delta that certainly did not land."""
        self._clean_all_uncommitted()

    # What PyIceberg calls, in this order on a retry: _validate_concurrency, _commit (_manifests, _summary).

    def _validate_concurrency(self) -> None:
        window = self._commit_window
        if window is None or window.is_empty() or window.head is None:
            return
        needed = self._deleted_data_files | self._required
        if needed:
            _validate_data_files_exist(self._transaction._table, window.head, needed, window.base)

    def _commit(self) -> tuple[tuple[TableUpdate, ...], tuple[TableRequirement, ...]]:
        # Not the transaction's view: that already has the mark which this very commit sets.
        self._guard(self._base)
        self._refuse_new_deletes()
        return super()._commit()

    def _refuse_new_deletes(self) -> None:
        # PyIceberg 0.12 misses deletes of all but the newest of several concurrent commits; a rewrite would bring
        # their rows back.
        if not self._planned_deletes:
            return
        for task in self._transaction._scan().plan_files():
            planned = self._planned_deletes.get(task.file.file_path)
            if planned is not None and not {d.file_path for d in task.delete_files} <= planned:
                raise ValidationException(f"Rows of {task.file.file_path} were concurrently deleted")

    def _manifests(self) -> list[ManifestFile]:
        out = self._write(ManifestContent.DATA, map(self._added, self._added_data_files))
        out += self._write(ManifestContent.DELETES, map(self._added, self._added_deletes))
        kept: list[ManifestFile] = []
        missing = self._deleted_data_files | self._removed_deletes
        for manifest in self._parent_manifests():
            gone = self._deleted_data_files if manifest.content == ManifestContent.DATA else self._removed_deletes
            entries = manifest.fetch_manifest_entry(self._io) if gone else []
            hit = {e.data_file for e in entries} & gone
            if hit:
                out += self._write(manifest.content, [self._carried(e, e.data_file in hit) for e in entries])
                missing = missing - hit
            else:
                kept.append(manifest)
        if missing:
            raise ValidationException(f"Files were concurrently removed: {sorted(f.file_path for f in missing)}")
        return out + self._fold(kept)

    def _parent_manifests(self) -> Iterator[ManifestFile]:
        if self._parent_snapshot_id is None:
            return
        parent = self._base.snapshot_by_id(self._parent_snapshot_id)
        for manifest in parent.manifests(self._io) if parent else ():
            if manifest.has_added_files() or manifest.has_existing_files():
                yield manifest

    def _fold(self, manifests: list[ManifestFile]) -> list[ManifestFile]:
        """The same live entries in fewer manifests where there are many small ones."""
        out: list[ManifestFile] = []
        kinds: dict[tuple[ManifestContent, int], list[ManifestFile]] = {}
        for manifest in manifests:
            if manifest.manifest_length > SMALL_MANIFEST_BYTES:
                out.append(manifest)
            else:
                kinds.setdefault((manifest.content, manifest.partition_spec_id), []).append(manifest)
        for (content, _), small in kinds.items():
            if len(small) <= MANIFESTS_MAX:
                out += small
                continue
            entries = [e for m in small for e in m.fetch_manifest_entry(self._io)]
            out += self._write(content, [self._carried(e, False) for e in entries])
        return out

    def _write(self, content: ManifestContent, entries: Iterable[ManifestEntry]) -> list[ManifestFile]:
        out = []
        by_spec = sorted(entries, key=lambda e: e.data_file.spec_id)
        for spec_id, group in itertools.groupby(by_spec, lambda e: e.data_file.spec_id):
            with self._writer(content, spec_id) as writer:
                for entry in group:
                    writer.add_entry(entry)
            out.append(writer.to_manifest_file())
        return out

    def _writer(self, content: ManifestContent, spec_id: int) -> ManifestWriter:
        kind = ManifestWriterV2 if content == ManifestContent.DATA else _DeleteManifestWriter
        return kind(self.spec(spec_id), self.schema(), self.new_manifest_output(), self._snapshot_id, self._compression)

    # The transaction's own view deep-copies all metadata at each look, and differs in nothing asked here.

    @property
    def _base(self) -> TableMetadata:
        return self._transaction._table.metadata

    def schema(self) -> Schema:
        """The table's Iceberg schema."""
        return self._base.schema()

    def spec(self, spec_id: int) -> PartitionSpec:
        """A partition spec of the table."""
        return self._base.specs()[spec_id]

    def _added(self, file: DataFile) -> ManifestEntry:
        return ManifestEntry.from_args(
            status=ManifestEntryStatus.ADDED,
            snapshot_id=self._snapshot_id,
            sequence_number=None,
            file_sequence_number=None,
            data_file=file,
        )

    def _carried(self, entry: ManifestEntry, removed: bool) -> ManifestEntry:
        return ManifestEntry.from_args(
            status=ManifestEntryStatus.DELETED if removed else ManifestEntryStatus.EXISTING,
            snapshot_id=self._snapshot_id if removed else entry.snapshot_id,
            sequence_number=entry.sequence_number,
            file_sequence_number=entry.file_sequence_number,
            data_file=entry.data_file,
        )

    def _summary(self, snapshot_properties: dict[str, str] | None = None) -> Summary:
        # The stock collector counts what it finds in these two; it knows delete files by their content.
        added, removed = self._added_data_files, self._deleted_data_files
        self._added_data_files, self._deleted_data_files = added + self._added_deletes, removed | self._removed_deletes
        appends_only = not (self._added_deletes or removed or self._removed_deletes)
        self._operation = Operation.APPEND if appends_only else Operation.OVERWRITE
        try:
            return super()._summary(snapshot_properties or {})
        finally:
            self._added_data_files, self._deleted_data_files = added, removed

    def _deleted_entries(self) -> list[ManifestEntry]:
        return []

    def _existing_manifests(self) -> list[ManifestFile]:
        return []


class _DeleteManifestWriter(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


def to_data_file(file: WrittenFile) -> DataFile:
    """The manifest's form of a file that was written."""
    contents = DataFileContent.DATA if file.deletes_in is None else DataFileContent.POSITION_DELETES
    data_file = DataFile.from_args(
        content=contents,
        file_path=file.path,
        file_format=FileFormat.PARQUET,
        partition=Record(*file.partition),
        file_size_in_bytes=file.size,
        record_count=file.record_count,
        **file.statistics,
    )
    data_file.spec_id = file.spec_id
    return data_file
