"""Iceberg as a `LakeFormat`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from pyiceberg.table import Table

from lakehead.client.table import RenewableLake
from lakehead.config import LakeConfig
from lakehead.env.clock import Clock
from lakehead.errors import (
    CommitConflictError,
    FolderCopiedError,
    LakeheadError,
    PermissionDeniedError,
    UnavailableError,
)
from lakehead.iceberg.catalog_state import CatalogLakeState
from lakehead.iceberg.file_io import RenewedFileIO
from lakehead.iceberg.iceberg_table import IcebergLakeTable
from lakehead.iceberg.lake_catalog import LakeCatalog, open_metadata, open_metadata_by
from lakehead.iceberg.told_properties import require_storage
from lakehead.lake.marks import OWNER
from lakehead.protocol.messages import LakeReply
from lakehead.protocol.privileges import Privilege
from lakehead.types import TableDescriptor


class IcebergFormat:
    """Implements `lakehead.lake.formats.LakeFormat`."""

    def tables(self, config: LakeConfig, folder: str, clock: Clock) -> CatalogLakeState:
        """See `LakeFormat.tables`."""
        return CatalogLakeState(config, folder, clock)

    def open(self, desc: TableDescriptor, info: LakeReply) -> IcebergLakeTable:
        """See `LakeFormat.open`."""
        if not info.may_commit:
            raise PermissionDeniedError(
                f"the catalog of the lake of {desc.path} is for those who may tier the table: ask who runs the server",
                table=str(desc.path),
                privilege=Privilege.TIER.value,
            )
        catalog = LakeCatalog.open(info.catalog_name, info.catalog_properties)

        def load() -> Table:
            try:
                table = catalog.load(desc, info.name)
            except LakeheadError:
                raise
            except Exception as e:
                raise UnavailableError(
                    f"the lake's catalog cannot be opened from this process ({type(e).__name__}: {e}): run the round"
                    " where it can be, or configure a catalog that both reach",
                    table=str(desc.path),
                ) from e
            _require_owner(table, info)
            return table

        return IcebergLakeTable(load, desc, info.incarnation)

    def at(self, desc: TableDescriptor, info: LakeReply) -> IcebergLakeTable:
        """See `LakeFormat.at`."""
        name = info.name or str(desc.path)
        if isinstance(info, RenewableLake):
            require_storage(info.storage_properties)
            io = RenewedFileIO(info.storage_properties, _checked(info.renew), info.clock)
            table = open_metadata_by(io, info.metadata_location, name)
        else:
            table = _static_table(info.metadata_location, tuple(sorted(info.storage_properties.items())), name)
        return IcebergLakeTable(lambda: table, desc)


FORMAT = IcebergFormat()


def _checked(renew: Callable[[], Mapping[str, str]]) -> Callable[[], Mapping[str, str]]:
    def checked() -> Mapping[str, str]:
        found = renew()
        require_storage(found)
        return found

    return checked


@functools.lru_cache(maxsize=64)
def _static_table(metadata_location: str, properties: tuple[tuple[str, str], ...], name: str) -> Table:
    return open_metadata(metadata_location, dict(properties), name)


def _require_owner(table: Table, info: LakeReply) -> None:
    """That nobody else has taken the lake table over since the server knew it for its own."""
    found = table.properties.get(OWNER, "")
    if found in (info.owner, info.incarnation):
        return
    name = ".".join(table.name())
    if found.split("/")[0] == info.incarnation.split("/")[0]:
        raise CommitConflictError(f"the server of lake table {name} was started anew: run the round again", table=name)
    raise FolderCopiedError(
        f"lake table {name} was taken over by another copy of the data folder ({found}): stop writing here", table=name
    )
