"""One lake snapshot that adds data files and position deletes and takes files away.

PyIceberg has no producer for such a commit. This one builds on its private ``_SnapshotProducer`` (pinned to one minor
series for that): it writes manifests of both contents itself and keeps their number small. It lands on the version of
the table that it was planned on or not at all: PyIceberg's way of building a snapshot anew on what others committed
since is refused, because it checks retries only, and misses deletes of all but the newest of several commits, whose
rows a rewrite would bring back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

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
from pyiceberg.table.update import AddSnapshotUpdate, TableUpdate, UpdatesAndRequirements
from pyiceberg.table.update.snapshot import _SnapshotProducer
from pyiceberg.typedef import Record

from lakehead.env.clock import SteadyClock, SystemClock
from lakehead.iceberg.data_files import IcebergFile, discard_files
from lakehead.iceberg.manifests import manifests_of
from lakehead.iceberg.settings import avro_codec

MANIFESTS_MAX = 10
"""Small manifests of one kind that may stand beside each other before a commit writes them as one."""
SMALL_MANIFEST_BYTES = 1 << 20
_CLOCK = SteadyClock(SystemClock())


class RowDelta(_SnapshotProducer["RowDelta"]):
    """Stages one snapshot in a transaction.

    Args:
        transaction: where to stage it; its table's metadata is the version that the delta lands on.
        summary: entries of the snapshot summary.
    """

    def __init__(self, transaction: Transaction, summary: Mapping[str, str]) -> None:
        super().__init__(Operation.OVERWRITE, transaction, transaction._table.io, None, dict(summary))
        self._compression = avro_codec(transaction._table.metadata.properties)
        self._added_deletes: list[DataFile] = []
        self._removed_deletes: set[DataFile] = set()

    def add_deletes(self, file: DataFile) -> None:
        """Add a position-delete file."""
        self._added_deletes.append(file)

    def remove_deletes(self, file: DataFile) -> None:
        """Drop a delete file that applies to nothing any more."""
        self._removed_deletes.add(file)

    @property
    def written_paths(self) -> tuple[str, ...]:
        """Manifests and manifest lists written so far."""
        return (*self._written_manifests, *self._written_manifest_lists)

    def discard(self) -> None:
        """Remove the manifests of a delta that certainly did not land."""
        discard_files(self._io, self.written_paths)

    def _validate_concurrency(self) -> None:
        # PyIceberg asks before it builds the snapshot again on newer metadata.
        raise ValidationException("The table has moved on since this change was planned")

    def _commit(self) -> UpdatesAndRequirements:
        """As PyIceberg does, but that the table's history does not go back with the clock: the Java library refuses to
        read a table whose snapshots are more than a minute out of order. Nor does it leap ahead with the clock at once:
        what is committed after a leap that was taken back would have its time until that comes."""
        updates, requirements = super()._commit()
        log, now = self._base.snapshot_log, _CLOCK.now_us() // 1000
        newest = log[-1].timestamp_ms if log else 0
        return tuple(_timed(update, newest, max(newest, now)) for update in updates), requirements

    def _manifests(self) -> list[ManifestFile]:
        out = self._write(ManifestContent.DATA, map(self._added, self._added_data_files))
        out += self._write(ManifestContent.DELETES, map(self._added, self._added_deletes))
        kept: list[ManifestFile] = []
        # Of each kind in one manifest: readers open them all, and most entries may be of files that are gone.
        hit_manifests: dict[ManifestContent, list[ManifestEntry]] = {}
        missing = self._deleted_data_files | self._removed_deletes
        for manifest in self._parent_manifests():
            gone = self._deleted_data_files if manifest.content == ManifestContent.DATA else self._removed_deletes
            entries = manifest.fetch_manifest_entry(self._io) if gone else []
            hit = {e.data_file for e in entries} & gone
            if hit:
                carried = [self._carried(e, e.data_file in hit) for e in entries]
                hit_manifests.setdefault(manifest.content, []).extend(carried)
                missing = missing - hit
            else:
                kept.append(manifest)
        if missing:
            raise ValidationException(f"Files were concurrently removed: {sorted(f.file_path for f in missing)}")
        for content, entries in hit_manifests.items():
            out += self._write(content, entries)
        return out + self._fold(kept)

    def _parent_manifests(self) -> Iterator[ManifestFile]:
        if self._parent_snapshot_id is None:
            return
        parent = self._base.snapshot_by_id(self._parent_snapshot_id)
        for manifest in manifests_of(parent, self._io) if parent else ():
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


def _timed(update: TableUpdate, first_ms: int, last_ms: int) -> TableUpdate:
    """A snapshot with a time that is neither before the first nor after the last."""
    if not isinstance(update, AddSnapshotUpdate):
        return update
    time = min(max(update.snapshot.timestamp_ms, first_ms), last_ms)
    return AddSnapshotUpdate(snapshot=update.snapshot.model_copy(update={"timestamp_ms": time}))


class _DeleteManifestWriter(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


def to_data_file(file: IcebergFile) -> DataFile:
    """The manifest's form of a file that was written."""
    contents = DataFileContent.POSITION_DELETES if file.deletes else DataFileContent.DATA
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
