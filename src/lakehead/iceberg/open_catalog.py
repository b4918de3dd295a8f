"""Opening a PyIceberg catalog so that no call to it lasts for ever, and no connection outlives its call."""

from __future__ import annotations

import functools
import sys
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from pyiceberg.catalog import CatalogType, infer_catalog_type, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from sqlalchemy import NullPool, create_engine, event
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

from lakehead.env.clock import SystemClock
from lakehead.errors import InvalidPropertyError
from lakehead.iceberg.file_io import PY_IO_IMPL
from lakehead.iceberg.told_properties import read_with, require_catalog

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.catalog.rest import RestCatalog
    from sqlalchemy import URL, Connection, Engine

CONNECT_S, ANSWER_S = 10, 60
"""How long a server may take to accept a connection, and to answer."""
LOCK_S = 10
"""How long a commit waits for another that stands still between its `UPDATE` and its end."""
_LIBPQ = ("psycopg", "psycopg2")


def open_catalog(name: str, properties: Mapping[str, str], *, told: bool) -> Catalog:
    """PyIceberg's catalog of a name and properties; raises what PyIceberg, SQLAlchemy and requests do.

    Args:
        properties: ``py-io-impl`` among them.
        told: they are a server's, not this process's own.

    Raises:
        InvalidPropertyError: a server may not choose one of them.
    """
    catalog = read_with(properties[PY_IO_IMPL], _loaded(name, properties, told))
    if isinstance(catalog, SqlCatalog):
        url = catalog.engine.url
        catalog.engine.dispose()
        catalog.engine = _engine(url)
    if is_rest(catalog):
        from lakehead.iceberg.rest_catalog import bound

        bound(catalog, CONNECT_S, ANSWER_S)
    return catalog


def is_rest(catalog: Catalog) -> TypeGuard[RestCatalog]:
    """Whether it is a REST catalog; loads nothing to find out."""
    kind = getattr(sys.modules.get("pyiceberg.catalog.rest"), "RestCatalog", None)
    return kind is not None and isinstance(catalog, kind)


def is_error_of_rest(text: str) -> bool:
    """Whether a REST catalog says this of a request that it refuses."""
    from lakehead.iceberg.rest_catalog import is_error

    return is_error(text)


def request_errors() -> tuple[type[Exception], ...]:
    """What calls of REST catalogs raise that get no answer; none before there is such a catalog."""
    kind = getattr(sys.modules.get("requests"), "RequestException", None)
    return () if kind is None else (kind,)


def _loaded(name: str, properties: Mapping[str, str], told: bool) -> Catalog:
    load = _told_catalog if told else lambda name, properties: load_catalog(name, **properties)
    try:
        return load(name, properties)
    except (ProgrammingError, IntegrityError):
        # Two processes that are the first to open a database both make its tables: one finds the other's.
        return load(name, properties)


def _told_catalog(name: str, properties: Mapping[str, str]) -> Catalog:
    """PyIceberg's catalog of exactly these properties: without what this user's own files say of one of that name.

    Raises:
        InvalidPropertyError: as `require_catalog`, or it is neither an SQL nor a REST catalog.
    """
    require_catalog(properties)
    given: dict[str, Any] = dict(properties)
    inferred = None if "type" in given else infer_catalog_type(name, given)
    kind: str = given["type"] if inferred is None else inferred.value
    if kind == CatalogType.SQL.value:
        return SqlCatalog(name, **given)
    if kind == CatalogType.REST.value:
        from lakehead.iceberg.rest_catalog import ToldRestCatalog

        return ToldRestCatalog(name, **given)
    raise InvalidPropertyError(f"the server names a lake catalog of type {kind!r}: it may be 'sql' or 'rest'")


@functools.lru_cache(maxsize=64)
def _engine(url: URL) -> Engine:
    """Connects for each operation: PyIceberg never closes the connections that it pools, a catalog is opened for many a
    short life, in rounds, clients and Spark drivers, and no pooled connection survives a restart of the database. What
    SQLAlchemy has compiled stays for the catalog that is opened next."""
    if url.get_driver_name() not in _LIBPQ:
        return create_engine(url, poolclass=NullPool)
    ours: dict[str, Any] = {
        "connect_timeout": CONNECT_S,
        "tcp_user_timeout": 1000 * ANSWER_S,
        "keepalives_idle": ANSWER_S,
    }
    engine = create_engine(url, poolclass=NullPool, connect_args={k: v for k, v in ours.items() if k not in url.query})

    @event.listens_for(engine, "begin")
    def bound(connection: Connection) -> None:
        # Of this transaction alone, as poolers want it. A process that dies in it must not hold the row for hours.
        connection.exec_driver_sql(f"set local lock_timeout = '{LOCK_S}s'")
        connection.exec_driver_sql(f"set local idle_in_transaction_session_timeout = '{ANSWER_S}s'")

    if url.get_driver_name() == "psycopg":
        event.listen(engine, "connect", _answers_or_ends, insert=True)
    return engine


def _answers_or_ends(connection: Any, _: object) -> None:
    """Have a connection of psycopg end when a statement is not answered in time. What TCP is told above ends one whose
    other side takes no bytes; a server that stands still, or a proxy, takes them and says nothing for ever."""
    wait = connection.wait
    connection.wait = lambda gen, *args, **given: wait(_ending(connection, gen), *args, **given)


def _ending(connection: Any, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """What psycopg waits for, with an end; now and then it says that nothing has come yet."""
    clock = SystemClock()
    end = clock.monotonic() + ANSWER_S
    try:
        wanted = next(gen)
        while True:
            come = yield wanted
            if not come and clock.monotonic() >= end:
                connection.pgconn.finish()  # nobody waits for a rollback on it either
                raise OperationalError(f"no answer for {ANSWER_S} seconds", None, TimeoutError())
            wanted = gen.send(come)
    except StopIteration as e:
        return e.value
