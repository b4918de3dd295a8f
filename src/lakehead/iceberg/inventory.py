"""Every file that one version of a lake table leads to."""

from __future__ import annotations

from collections.abc import Iterator

from pyiceberg.manifest import ManifestEntryStatus

from lakehead.iceberg.lake_catalog import open_metadata
from lakehead.iceberg.manifests import manifests_of
from lakehead.protocol.messages import LakeReply


def inventory(info: LakeReply) -> Iterator[tuple[str, bool]]:
    """Addresses, each once, and whether reads of the current snapshot need the file: what only older snapshots name may
    have been cleaned up by others.

    Raises:
        FileNotFoundError: a manifest is gone.
        UnavailableError: the metadata file cannot be read.
    """
    table = open_metadata(info.metadata_location, info.storage_properties)
    metadata, io = table.metadata, table.io
    needed: dict[str, bool] = {info.metadata_location: True}

    def add(address: str, need: bool) -> bool:
        new = address not in needed
        needed[address] = needed.get(address, False) or need
        return new

    for entry in metadata.metadata_log:
        add(entry.metadata_file, False)
    for statistics in (*metadata.statistics, *metadata.partition_statistics):
        add(statistics.statistics_path, False)
    newest_first = sorted(metadata.snapshots, key=lambda s: s.snapshot_id != metadata.current_snapshot_id)
    for snapshot in newest_first:
        current = snapshot.snapshot_id == metadata.current_snapshot_id
        try:
            manifests = manifests_of(snapshot, io)
            add(snapshot.manifest_list, current)
            for manifest in manifests:
                if not add(manifest.manifest_path, current):
                    continue
                for found in manifest.fetch_manifest_entry(io, discard_deleted=False):
                    add(found.data_file.file_path, current and found.status != ManifestEntryStatus.DELETED)
        except FileNotFoundError:
            if current:
                raise
    yield from needed.items()
