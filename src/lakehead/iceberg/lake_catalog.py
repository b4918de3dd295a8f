"""The lake's catalog: creating, loading and dropping the Iceberg tables of Lakehead's tables.

By default an SQLite catalog and a ``lake`` folder beside the data; any PyIceberg catalog by configuration. A lake table
carries the id of the table whose rows it holds, and is never touched for a table with another id.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa
from pydantic import ValidationError
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.exceptions import (
    BadRequestError,
    NoSuchNamespaceError,
    NoSuchPropertyException,
    NoSuchTableError,
    NotInstalledError,
    RESTError,
    TableAlreadyExistsError,
)
from pyiceberg.io import FileIO, load_file_io
from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids
from pyiceberg.schema import assign_fresh_schema_ids
from pyiceberg.table import StaticTable
from pyiceberg.table.sorting import SortField, SortOrder
from pyiceberg.transforms import IdentityTransform
from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from lakehead.config import LakeConfig
from lakehead.env.clock import SystemClock
from lakehead.env.storage import LocalStorage, make_private, storage_errors
from lakehead.errors import (
    InvalidPropertyError,
    InvalidRequestError,
    LakeStateError,
    MissingDependencyError,
    StorageError,
    UnavailableError,
)
from lakehead.format.schema import lake_schema
from lakehead.iceberg.file_io import PY_IO_IMPL, SYNCED_FILE_IO, lake_files, locate_file, storage_properties
from lakehead.iceberg.known_metadata import load_table, read_metadata
from lakehead.iceberg.open_catalog import is_error_of_rest, is_rest, open_catalog, request_errors
from lakehead.iceberg.own_place import (
    NOT_IN_ADDRESSES,
    catalog_beside,
    lake_beside,
    local_path,
    require_collectable,
)
from lakehead.iceberg.tablets import partition_spec
from lakehead.iceberg.told_properties import require_storage
from lakehead.lake.marks import OWNER, TABLE_ID
from lakehead.types import BUCKET_COLUMN, OFFSET_COLUMN, SYSTEM_FIELDS, TIMESTAMP_COLUMN, TableDescriptor, TablePath

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table
    from pyiceberg.typedef import Identifier

_TABLE_PROPERTIES = {
    "format-version": "2",
    "write.parquet.compression-codec": "zstd",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "50",
    # Column statistics are kept for the first 100 columns only, and ours are the last.
    **{f"write.metadata.metrics.column.{c}": "full" for c in (BUCKET_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN)},
}
_FILE_REMEDIES = {
    "disk is full": "free some room, and try again",
    "readonly database": "let this user write to it and to its folder, and try again",
    "disk I/O error": "see what the disk has, and try again",
    # SQLite does not say why.
    "unable to open database file": "its folder has to be there, this user to be allowed to write to it, and this"
    " process to open one file more (ulimit -n)",
    "not a database": "restore it, from a backup of the folder",
    "malformed": "restore it, from a backup of the folder",
    "no such table": "someone has removed or emptied it: restore it, from a backup of the folder",
}
"""By words of SQLite's errors."""
_REFUSALS = ("password", "authentication", "unauthorized", "invalid_client", "forbidden", "permission denied")
"""Words of catalogs, and of what stands before them, for someone whom they do not know."""
_REMOVAL_PAUSES_S = (0.02, 0.1, 0.3, 1.0)


class LakeCatalog:
    """The Iceberg catalog that holds the lake tables. Thread-safe; opened when first needed.

    Attributes:
        name: the catalog's name; engines that share an SQL catalog must use the same.
        properties: all that another process needs to open the same catalog with `open`.
    """

    def __init__(self, config: LakeConfig, data_dir: str, *, told: bool = False) -> None:
        self.name = config.name
        self._told = told
        self.properties: dict[str, str] = dict(config.catalog) or catalog_beside(os.path.abspath(data_dir))
        self.properties.setdefault(PY_IO_IMPL, SYNCED_FILE_IO)

    @classmethod
    def open(cls, name: str, properties: Mapping[str, str]) -> LakeCatalog:
        """The catalog of a name and complete `properties`, which a server told."""
        return cls(LakeConfig(name=name, catalog=dict(properties)), "", told=True)

    @cached_property
    def iceberg(self) -> Catalog:
        """PyIceberg's catalog.

        Raises:
            UnavailableError: it cannot be reached.
            InvalidPropertyError: its properties do not say what it is.
            MissingDependencyError: what it needs is not installed.
        """
        uri = self.properties.get("uri", "")
        if uri.startswith("sqlite:///") and os.path.dirname(path := make_url(uri).database or ""):
            LocalStorage().make_folder(os.path.dirname(path))
            with storage_errors(path, "open"):
                make_private(path)
        with catalog_errors(self.name):
            try:
                return open_catalog(self.name, self.properties, told=self._told)
            except NotInstalledError as e:
                lacks = getattr(e.__cause__, "name", None)
                why = f"the Python package {lacks!r} is not installed" if lacks else str(e)
                why += ": pip install 'lakehead[postgres]'" if lacks == "psycopg" else ""
                raise MissingDependencyError(f"lake catalog {self.name!r} cannot be opened: {why}") from e
            except ValidationError:  # it is reached, and does not answer as catalogs do
                raise
            except (ValueError, NoSuchPropertyException) as e:
                # PyIceberg names the address, in which a password may stand.
                why = str(e).replace(uri, "its uri") if uri else "it has no 'uri'" if "URI" in str(e) else str(e)
                raise InvalidPropertyError(f"lake catalog {self.name!r} cannot be opened: {why}") from None

    def create_table(self, desc: TableDescriptor, *, owner: str = "") -> Table:
        """Create the lake table of a table; nothing happens when it exists with this table id.

        Args:
            owner: the incarnation that it belongs to.

        Raises:
            LakeStateError: another table has that name in the lake.
            InvalidPropertyError: the catalog is not told where files go, or no such storage is known.
            InvalidRequestError: the catalog takes no such table.
            UnavailableError: the catalog cannot be reached.
        """
        with catalog_errors(self.name), self._takes(desc.path):
            self.iceberg.create_namespace_if_not_exists(desc.path.database)
            if (found := self._find(desc)) is not None:
                return found
            self._require_warehouse()
            schema = iceberg_schema(desc)
            offset = schema.find_field(OFFSET_COLUMN).field_id
            create = functools.partial(
                self.iceberg.create_table,
                schema=schema,
                location=self._location(desc),
                partition_spec=partition_spec(desc, schema),
                sort_order=SortOrder(SortField(offset, IdentityTransform())),
                properties={**_TABLE_PROPERTIES, TABLE_ID: desc.table_id, **({OWNER: owner} if owner else {})},
            )
            *odd, plain = _spellings(desc.path)
            for identifier in odd:
                with contextlib.suppress(BadRequestError):
                    return _made(create, self.iceberg, identifier, desc)
            return _made(create, self.iceberg, plain, desc)

    @contextmanager
    def _takes(self, path: TablePath) -> Iterator[None]:
        """Tell of what a catalog refuses that it was asked for, rather than that it cannot be reached: names mostly,
        as each catalog has rules of its own."""
        try:
            yield
        except BadRequestError as e:
            raise InvalidRequestError(
                f"lake catalog {self.name!r} takes no table {path}: {e}: choose another name", table=str(path)
            ) from e

    def _require_warehouse(self) -> None:
        warehouse = self.iceberg.properties.get("warehouse")
        if is_rest(self.iceberg):
            return
        give = "give it 'warehouse': 'file:///folder' or 's3://bucket/folder'"
        if not warehouse:
            raise InvalidPropertyError(f"lake catalog {self.name!r} is not told where files go: {give}")
        if bad := next((c for c in warehouse if c in NOT_IN_ADDRESSES), None):
            raise InvalidPropertyError(
                f"lake catalog {self.name!r} has {bad!r} in its warehouse {warehouse!r}, which addresses of lake files"
                " cannot hold: choose another folder; spaces and other letters stand as they are"
            )
        if "://" not in warehouse and not os.path.isabs(warehouse.removeprefix("file:")):
            raise InvalidPropertyError(
                f"lake catalog {self.name!r} has the warehouse {warehouse!r}, which leads elsewhere from each folder"
                f" that a process works in: {give}"
            )
        try:
            locate_file(load_file_io(dict(self.properties), warehouse), warehouse)
        except (ValueError, TypeError, ImportError) as e:
            raise InvalidPropertyError(f"lake catalog {self.name!r} has no such storage ({e}): {give}") from e

    def drop_table(self, desc: TableDescriptor, *, purge: bool) -> None:
        """Remove the lake table from the catalog; with ``purge`` its files too, also when it is missing, as when the
        catalog let it go and a file did not.

        Raises:
            LakeStateError: the lake table of that name is another table's; it stays.
            UnavailableError: the catalog or its storage cannot be reached.
        """
        with catalog_errors(self.name):
            table = self._find(desc)
            if table is None:
                location = self._location(desc)
                if purge and location is not None and not is_rest(self.iceberg):
                    self._require_warehouse()
                    _remove_folder(load_file_io(dict(self.properties), location), location)
                return
            if purge:
                require_collectable(table)
            identifier = table.name()
            own, served = _is_place(table.location(), self._location(desc)), is_rest(self.iceberg)
            beside = lake_beside(self.properties) is not None
            try:
                if purge and (served or not (own or beside)):
                    self.iceberg.purge_table(identifier)
                else:
                    self.iceberg.drop_table(identifier)
            except NoSuchTableError:  # others dropped it meanwhile
                pass
            except Exception:
                # Its answer may have been lost. Who asks again finds no table, and cannot tell whose files these are.
                if self._has(desc):
                    raise
            if served and self._has(desc):
                raise UnavailableError(
                    f"lake catalog {self.name!r} was told to drop {'.'.join(identifier)}, and has it still: perhaps"
                    " something else, such as a proxy, answers at its address",
                    catalog=self.name,
                )
            chosen = table.location() if own else self._location(desc) if beside else None
            if purge and chosen is not None:
                # The folder is this table's alone: what failed commits left there goes too. A server may have removed
                # it, or let nobody there any more. What another engine put elsewhere, a copy may have, too.
                with contextlib.suppress(OSError) if served else contextlib.nullcontext():
                    _remove_folder(table.io, chosen)

    def load(self, desc: TableDescriptor, name: str = "") -> Table:
        """The lake table as it is now.

        Args:
            name: what it is called, where that is known better than from its table.

        Raises:
            LakeStateError: it is missing, or another table's.
            UnavailableError: the catalog cannot be reached.
        """
        with catalog_errors(self.name):
            found = self._find(desc, name)
        if found is None:
            raise LakeStateError(
                f"table {desc.path} has no table in lake catalog {self.name!r} ({self._kind()}): the catalog is"
                " not the one that the table was made in (give lake= or --config again), or someone dropped it there"
                " (restore it; or drop the table here, with all its rows, and create it again)",
                table=str(desc.path),
            )
        return found

    def _find(self, desc: TableDescriptor, name: str = "") -> Table | None:
        """The lake table under its table's name, or one that the table had before.

        Raises:
            LakeStateError: it is under none of them, and another table has its name.
        """
        others = []
        for identifier in ([tuple(name.split("."))] if name else []) + lake_names(desc):
            with _no_such_table(identifier):
                table = load_table(self.iceberg, identifier)
                if table.properties.get(TABLE_ID) == desc.table_id:
                    return table
                others.append(table)
        return _checked(others[0], desc) if others else None

    def _has(self, desc: TableDescriptor) -> bool:
        try:
            return self._find(desc) is not None
        except LakeStateError:  # another has its name already
            return False

    def require_free(self, desc: TableDescriptor, *, besides: Sequence[str]) -> None:
        """See `LakeState.require_free`."""
        for identifier in _spellings(desc.path):
            with catalog_errors(self.name), self._takes(desc.path), _no_such_table(identifier):
                table = self.iceberg.load_table(identifier)
                if table.properties.get(TABLE_ID) not in (desc.table_id, *besides):
                    _checked(table, desc)

    def named_as(self, table: Table, desc: TableDescriptor, *, leaves: Callable[[Table], bool]) -> Table:
        """The lake table, called as its table is; as it was where the catalog cannot rename, or will not.

        Args:
            leaves: whether a lake table that has the name is about to get another one.
        """
        spellings = _spellings(desc.path)
        if table.name() in spellings:
            return table
        for wanted in spellings:
            try:
                with catalog_errors(self.name):
                    self.iceberg.create_namespace_if_not_exists(desc.path.database)
                    try:
                        return self.iceberg.rename_table(table.name(), wanted)
                    except TableAlreadyExistsError:
                        aside = lake_names(desc)[-1]
                        if table.name() != aside and leaves(self.iceberg.load_table(wanted)):
                            return self.iceberg.rename_table(table.name(), aside)
                        return table
            except (NotImplementedError, UnavailableError):
                continue
        return table

    def _kind(self) -> str:
        """What tells this catalog from others; no address, in which a password may stand."""
        uri = self.properties.get("uri", "")
        return uri if uri.startswith("sqlite:") else self.properties.get("type", "of its own kind")

    def storage_properties(self, table: Table) -> dict[str, str]:
        """What `open_metadata` needs, beside the metadata location, to read the table's files."""
        return storage_properties(table.io)

    def _location(self, desc: TableDescriptor) -> str | None:
        """A folder of the table's own, so that a new table of the same name finds no files; None: the catalog's."""
        warehouse = self.properties.get("warehouse", "")
        if "://" not in warehouse:
            return None
        return f"{warehouse.rstrip('/')}/{desc.origin.database}/{desc.origin.table}-{desc.table_id}"


def _is_place(location: str, chosen: str | None) -> bool:
    """Whether a location is the one that was chosen, however it is spelled."""
    return chosen is not None and local_path(location).rstrip("/") == local_path(chosen).rstrip("/")


def _remove_folder(io: FileIO, location: str) -> None:
    """Remove all files there. A round that is under way may write others meanwhile, and learns at its commit that the
    table is gone."""
    fs, folder = locate_file(io, location)
    if not location.rstrip("/").endswith(folder.rstrip("/").lstrip("/")):  # what is cut off would be others' folder
        raise StorageError(f"{location} leads to {folder}, which is another folder: remove the table's files by hand")
    for pause in _REMOVAL_PAUSES_S:
        try:
            fs.delete_dir(folder)
            return
        except FileNotFoundError:
            return
        except OSError:
            SystemClock().sleep(pause)
    fs.delete_dir(folder)


def lake_names(desc: TableDescriptor) -> list[tuple[str, ...]]:
    """What a lake table may be called: as its table, as it was called before, and in between, when it made room for
    one with which it changes names."""
    names = [name for p in (desc.path, *reversed(desc.former)) for name in _spellings(p)]
    aside = (desc.origin.database, f"lakehead_{desc.table_id}")
    return [*dict.fromkeys(names), aside] if desc.former else names


def _spellings(path: TablePath) -> list[tuple[str, ...]]:
    """How a lake table may be called that has this name: some catalogs take no ``$``."""
    return [(path.database, name) for name in dict.fromkeys((path.table, path.table.replace("$", "__")))]


def _made(create: Callable[[Identifier], Table], catalog: Catalog, name: Identifier, desc: TableDescriptor) -> Table:
    try:
        return create(name)
    except TableAlreadyExistsError as e:
        try:
            found = catalog.load_table(name)
        except NoSuchTableError:
            raise LakeStateError(
                f"the lake has something called {'.'.join(name)} that is no table, such as a view, or somebody dropped"
                f" the table at this moment: have it removed there, or choose another name ({e})",
                table=str(desc.path),
            ) from e
        return _checked(found, desc)


@contextmanager
def _no_such_table(name: Identifier) -> Iterator[None]:
    """Go on where a catalog has no such table, or takes no such name."""
    try:
        yield
    except NoSuchTableError as e:
        if not _is_answer(e):
            # Without what it says, in which there may be credentials.
            raise UnavailableError(
                f"whether there is a lake table {'.'.join(name)} is not known: perhaps something else than its catalog,"
                " such as a proxy, answers at its address",
                table=".".join(name),
            ) from None
    except BadRequestError:
        if "$" not in name[-1]:
            raise


def _is_answer(e: NoSuchTableError) -> bool:
    """Whether a catalog says that it has no such table, or what stands before a REST catalog that there is no such
    page, as while the catalog is restarted: then who dropped the table would leave it there."""
    response = getattr(e.__cause__, "response", None)
    if response is None or not response.text:
        return True
    return is_error_of_rest(response.text)


def iceberg_schema(desc: TableDescriptor) -> Schema:
    """The Iceberg schema of a table's lake: the user's columns, then the system columns, which are nullable."""
    arrow = pa.schema([*lake_schema(desc.schema), *SYSTEM_FIELDS])
    return assign_fresh_schema_ids(_pyarrow_to_schema_without_ids(arrow))


def open_metadata(metadata_location: str, properties: Mapping[str, str], name: str = "") -> Table:
    """A lake table, for reading, from its metadata file and `LakeCatalog.storage_properties`, without a catalog.

    Args:
        name: what the table is called in errors.

    Raises:
        UnavailableError: the file cannot be read.
        InvalidPropertyError: the properties are not those of a storage.
    """
    require_storage(properties)
    with catalog_errors(metadata_location):
        # Not `StaticTable.from_metadata`, which reads files with the class that the table names.
        io = load_file_io(dict(properties), metadata_location)
    return open_metadata_by(io, metadata_location, name)


def open_metadata_by(io: FileIO, metadata_location: str, name: str = "") -> Table:
    """`open_metadata`, of files that are read by what is given."""
    with catalog_errors(metadata_location):
        metadata = read_metadata(io, metadata_location)
        place = tuple((name or metadata_location).split("."))
        return StaticTable(place, metadata, metadata_location, io, NoopCatalog("static-table"))


def _checked(table: Table, desc: TableDescriptor) -> Table:
    found = table.properties.get(TABLE_ID)
    if found != desc.table_id:
        raise LakeStateError(
            f"lake table {'.'.join(table.name())} is not this table's: it belongs to "
            + (f"a table with id {found}" if found else "someone else")
            + "; rename or drop it in the lake, or use another name",
            table=str(desc.path),
            expected=desc.table_id,
            found=found,
        )
    return table


@contextmanager
def catalog_errors(name: str) -> Iterator[None]:
    """Turn what catalogs and storage raise when they cannot be reached, or lack a file, into errors that say what to
    do: `UnavailableError`, which is `StorageError` where it was a disk."""
    try:
        with lake_files(), _no_requests(name):
            yield
    except NotImplementedError as e:
        raise UnavailableError(f"lake catalog {name!r} does not do what it was asked for: {e}", catalog=name) from e
    except (SQLAlchemyError, RESTError, OSError) as e:
        raise _unusable(name, e) from e
    except (NoSuchTableError, NoSuchNamespaceError, TableAlreadyExistsError) as e:
        raise UnavailableError(f"others changed lake catalog {name!r} meanwhile, try again: {e}", catalog=name) from e
    except ValidationError as e:
        # Without what it says, in which there may be credentials.
        raise UnavailableError(
            f"lake catalog {name!r} answers what is no {e.title}: perhaps something else, such as a proxy, answers at"
            " its address",
            catalog=name,
        ) from None


@contextmanager
def _no_requests(name: str) -> Iterator[None]:
    """`catalog_errors` of requests, whose errors would pass for those of a disk."""
    try:
        yield
    except request_errors() as e:
        raise _unusable(name, e) from e


def _unusable(name: str, e: Exception) -> UnavailableError:
    # SQLAlchemy adds the statement and an address of its documentation, line by line.
    cause = getattr(e, "orig", None) or e
    why = " ".join(str(cause).split())
    if isinstance(cause, sqlite3.Error) and (remedy := next((r for w, r in _FILE_REMEDIES.items() if w in why), None)):
        return StorageError(f"the file of lake catalog {name!r} cannot be used ({why}): {remedy}", catalog=name)
    if not isinstance(e, OSError) and any(word in why.lower() for word in _REFUSALS):
        return UnavailableError(
            f"lake catalog {name!r} does not let us in ({why}): see whether its user, password or token is right still,"
            " and try again",
            catalog=name,
        )
    return UnavailableError(
        f"lake catalog {name!r} cannot be reached ({why}): see whether it runs, and try again", catalog=name
    )
