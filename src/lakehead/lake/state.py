"""What a server knows of its lake tables, from their catalog: the server's `LakeState`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lakehead.config import LakeConfig
from lakehead.protocol.messages import LakeReply
from lakehead.types import TableDescriptor, TabletKey

if TYPE_CHECKING:
    from lakehead.lake.catalog import LakeCatalog


class CatalogLakeState:
    """Lake tables of one PyIceberg catalog, opened when the first one is used. Thread-safe."""

    def __init__(self, config: LakeConfig, folder: str) -> None:
        self._config = config
        self._folder = folder
        self._lock = threading.Lock()
        self._catalog: LakeCatalog | None = None
        self._proven: dict[str, frozenset[str]] = {}

    def _open(self) -> LakeCatalog:
        from lakehead.lake.catalog import LakeCatalog

        if self._catalog is None:
            self._catalog = LakeCatalog(self._config, self._folder)
        return self._catalog

    def create(self, desc: TableDescriptor) -> None:
        """See `LakeState.create`."""
        with self._lock:
            self._open().create_table(desc)

    def drop(self, desc: TableDescriptor, *, purge: bool) -> None:
        """See `LakeState.drop`."""
        with self._lock:
            self._open().drop_table(desc, purge=purge)

    def info(self, desc: TableDescriptor) -> LakeReply:
        """See `LakeState.info`."""
        with self._lock:
            catalog = self._open()
            table = catalog.load(desc)
        return LakeReply(
            metadata_location=table.metadata_location,
            catalog_name=self._config.name,
            catalog_properties=catalog.properties,
            storage_properties=catalog.storage_properties(table),
        )

    def tiered_offsets(self, desc: TableDescriptor) -> Mapping[TabletKey, int]:
        """See `LakeState.tiered_offsets`."""
        from lakehead.lake.marks import read_mark

        with self._lock:
            mark = read_mark(self._open().load(desc))
        return mark.offsets if mark else {}

    def proven_offsets(self, desc: TableDescriptor) -> Mapping[TabletKey, int]:
        """See `LakeState.proven_offsets`."""
        from lakehead.lake.file_io import missing_file
        from lakehead.lake.proof import manifest_paths, missing_files
        from lakehead.lake.view import checked_mark

        with self._lock:
            table = self._open().load(desc)
        mark = checked_mark(table, desc)
        if mark is None:
            return {}
        for missing in missing_files(table, proven=self._proven.get(desc.table_id, ())):
            raise missing_file(missing.path)
        self._proven[desc.table_id] = frozenset(manifest_paths(table))
        return mark.offsets
