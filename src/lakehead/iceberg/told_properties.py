"""Properties that others told, and what they may make this process do: nothing but read and write the lake's files.

PyIceberg imports whatever class its properties name, and merges them with this user's own ``.pyiceberg.yaml``. Those
that a server sends are the server's to choose, those of a table anybody's who commits to it, and a REST catalog adds
some of its own when it is opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyiceberg.catalog import Catalog, MetastoreCatalog
from pyiceberg.table import Table, TableProperties
from pyiceberg.table.update import SetPropertiesUpdate, TableUpdate
from pyiceberg.typedef import Identifier

from lakehead.errors import InvalidPropertyError, LakeStateError
from lakehead.iceberg.file_io import PY_IO_IMPL, STORAGE_PREFIXES, SYNCED_FILE_IO
from lakehead.iceberg.known_metadata import in_order

FILE_IOS = (SYNCED_FILE_IO, "pyiceberg.io.pyarrow.PyArrowFileIO")
"""Classes that ``py-io-impl`` may name."""
_OF_CATALOGS = frozenset(
    {
        "type", "uri", "warehouse", "prefix", "token", "credential", "scope", "audience", "resource",
        "oauth2-server-uri", "token-refresh-enabled",
        "snapshot-loading-mode", "view-endpoints-supported", "init_catalog_tables", "pool_pre_ping", "echo",
    }
)  # fmt: skip
_PLACES = TableProperties.WRITE_PY_LOCATION_PROVIDER_IMPL
_CATALOG_PREFIXES = ("header.", "rest.")


def require_storage(properties: Mapping[str, str]) -> None:
    """That properties from a server say how files are read, and nothing else.

    Raises:
        InvalidPropertyError: one names a class that is not ours, or is no property of a storage.
    """
    for key, value in properties.items():
        if key == PY_IO_IMPL and value not in FILE_IOS:
            raise InvalidPropertyError(
                f"the server says to read lake files with {value!r}, which this process does not run: ask who runs the"
                f" server to leave {PY_IO_IMPL!r} out",
                name=key,
            )
        if key != PY_IO_IMPL and not key.startswith(STORAGE_PREFIXES):
            raise InvalidPropertyError(
                f"the server names {key!r} for its lake, which a client takes from nobody: ask who runs the server to"
                " leave it out",
                name=key,
            )


def require_catalog(properties: Mapping[str, str]) -> None:
    """That properties from a server say where a catalog is, how to log in to it, and how files are read.

    Raises:
        InvalidPropertyError: one is none of these.
    """
    own = {k for k in properties if k in _OF_CATALOGS or k.startswith(_CATALOG_PREFIXES)}
    require_storage({k: v for k, v in properties.items() if k not in own})


def require_no_code(name: Identifier, properties: Mapping[str, str]) -> None:
    """That a table's properties do not say which class finds places for its files: PyIceberg runs it when it writes.

    Raises:
        LakeStateError: they do.
    """
    if (named := properties.get(_PLACES)) is not None:
        raise LakeStateError(
            f"property {_PLACES!r} of lake table {'.'.join(name)} names {named!r}, which Lakehead does not run: remove"
            " the property",
            table=".".join(name),
            name=_PLACES,
        )


def read_with(io: str, catalog: Catalog) -> Catalog:
    """The same catalog, whose files this class reads and writes, whatever its tables and it itself say; it commits to
    none that names a class (`require_no_code`)."""
    load = catalog._load_file_io

    def ours(properties: Mapping[str, str] = {}, location: str | None = None) -> Any:
        return load({**properties, PY_IO_IMPL: io}, location)

    catalog._load_file_io = ours  # type: ignore[method-assign]
    if isinstance(catalog, MetastoreCatalog):  # others write no metadata here
        stage = catalog._update_and_stage_table

        def checked(table: Table | None, name: Identifier, requirements: Any, updates: Sequence[TableUpdate]) -> Any:
            said = {} if table is None else dict(table.metadata.properties)
            for update in updates:
                said |= update.updates if isinstance(update, SetPropertiesUpdate) else {}
            require_no_code(name, said)
            staged = stage(table, name, requirements, tuple(updates))
            staged.metadata = in_order(staged.metadata)
            return staged

        catalog._update_and_stage_table = checked  # type: ignore[assignment, method-assign]
    return catalog
