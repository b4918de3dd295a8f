"""Connections of Spark's processes: which one a session means, and one per worker process and address.

A process on the same machine takes tokens from this user's files. What `connect` was given goes to Python workers in
their environment: never in options, settings, plans or logs. Where nobody connected, as in a session of Spark Connect,
it is what their environment says of one address (`presented`).
"""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from lakehead.api.connection import Connection, connect, open_server, presented
from lakehead.api.table import Table, handle_of
from lakehead.client.patience import Patience
from lakehead.client.table import TableHandle
from lakehead.config import names_principal
from lakehead.env.address import SocketAddress, parse_uri
from lakehead.env.clock import SystemClock
from lakehead.env.credentials import server_place
from lakehead.env.forks import keep
from lakehead.env.randomness import SystemRandomness
from lakehead.env.tls import Tls, renewed
from lakehead.errors import (
    AuthenticationError,
    ClosedError,
    InvalidRequestError,
    TableNotFoundError,
    UnavailableError,
)

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

T = TypeVar("T")

_GIVEN = "LAKEHEAD_SPARK_CREDENTIALS"
"""Environment variables of Python workers begin with it: the tokens and certificates that connections were given."""
_PART_CHARACTERS = 100_000
"""Linux takes no environment variable above 128 KiB, which a file of all public authorities is."""

_ATTACHED = "LAKEHEAD_SPARK_URI"
"""Another: the address of the connection that a session was attached to."""

_NAME = "spark.lakehead.session"
"""The setting by which a session has a name: the copies that Spark makes of it for streams have it, too."""

# A worker that finds its master on loopback is on the machine of both.
_ON_THIS_MACHINE = re.compile(r"local$|local\[|local-cluster\[|spark://(localhost|127(\.\d+){3}):\d+$")

_lock = threading.Lock()
_telling = threading.RLock()
_numbers: dict[tuple[str | None, Tls | None], int] = {}
"""Of what connections of this process were given; of no use to others, as what it is cannot be told from it."""
_of_sessions: dict[str, Connection] = {}
"""By the name of a session, and for those that nobody attached by the id of their application."""
_makers: dict[str, str] = {}
"""By the name of a session, which it is for Spark."""
_names: weakref.WeakKeyDictionary[SparkSession, str] = weakref.WeakKeyDictionary()
_of_process: dict[tuple[int, str], Connection] = {}


def opened(con_or_uri: Connection | str | os.PathLike[str]) -> Connection:
    """The connection itself, or a new one to a folder or address.

    Raises:
        ClosedError: it is closed.
    """
    con = con_or_uri if isinstance(con_or_uri, Connection) else connect(con_or_uri)
    con._require_open()
    return con


def bind_session(spark: SparkSession, con: Connection) -> None:
    """Make a connection the one that names in this session mean, and in those of its application that nobody attached;
    and one that its workers can make.

    Raises:
        InvalidRequestError: workers on other machines could not make it.
    """
    tell_workers(spark, con)
    name, maker = _name_of(spark), str(spark._jsparkSession.sessionUUID())
    if name is None or _makers.get(name) != maker:  # a copy, which Spark makes for a stream, has its original's
        name = _names[spark] = SystemRandomness().uuid_hex()
        spark.conf.set(_NAME, name)
        _makers[name] = maker
    _of_sessions[name] = _of_sessions[application_of(spark)] = con


def tell_workers(spark: SparkSession, con: Connection) -> None:
    """Have Python functions that are registered or shipped after this reach workers with what a connection was given.

    Raises:
        InvalidRequestError: workers on other machines could not make it.
    """
    require_reachable(con, spark.sparkContext.master)
    environment = spark.sparkContext.environment
    with _telling:
        known = _told(environment)
        named = worker_address(con)
        token, tls = con._given
        if token is None and tls is None and _place(con.uri) not in known:
            return
        if token is not None or tls is not None:
            now = None if tls is None else renewed(tls)
            pem = None if now is None else [_text(x) for x in (now.authorities, now.chain, now.key)]
            known[_place(named)] = [token, pem]
        known[_place(con.uri)] = _place(named)
        text = json.dumps(known, sort_keys=True)
        parts = range(0, len(text), _PART_CHARACTERS)
        for name in [name for name in environment if name.startswith(_GIVEN)][len(parts) :]:
            del environment[name]
        for number, at in enumerate(parts):
            environment[f"{_GIVEN}_{number}"] = text[at : at + _PART_CHARACTERS]


def worker_address(con: Connection) -> str:
    """A connection's address as functions take it to workers: with what the connection was given, whatever other
    sessions of its application were attached to there."""
    with _telling:
        number = _numbers.setdefault(con._given, len(_numbers))
    return f"{con.uri}#{number}"


def _told(environment: Mapping[str, str]) -> dict[str, Any]:
    """By address, the token and certificates that were given for it, or the address, with a number, that has them."""
    names = itertools.takewhile(environment.__contains__, (f"{_GIVEN}_{number}" for number in itertools.count()))
    found: dict[str, Any] = json.loads("".join(environment[name] for name in names) or "{}")
    return found


def _place(address: str) -> str:
    uri, _, number = address.partition("#")
    return f"{server_place(uri)}#{number}" if number else server_place(uri)


def tell_address(spark: SparkSession, con: Connection) -> None:
    """Have a source that is registered after this mean a connection's server where it is told of none."""
    spark.sparkContext.environment[_ATTACHED] = con.uri


def attached_uri() -> str | None:
    """The address that ``format("lakehead")`` means where it names none: that of the session which plans it. Each
    session has registered the source with what its workers were told then."""
    return os.environ.get(_ATTACHED)


def _name_of(spark: SparkSession) -> str | None:
    """The name of a session, which it keeps; None before it has one."""
    if (known := _names.get(spark)) is not None:
        return known
    found: str | None = spark.conf.get(_NAME, None)  # asked of the JVM once
    if found is not None:
        _names[spark] = found
    return found


def require_reachable(con: Connection, master: str) -> None:
    """Return if the workers of a Spark master can reach the server of a connection, as far as its address says that.

    Raises:
        InvalidRequestError: it listens on a Unix socket, and they may be on other machines.
    """
    if isinstance(parse_uri(con.uri), SocketAddress) and not _ON_THIS_MACHINE.match(master):
        raise InvalidRequestError(
            f"executors of master {master} cannot reach the Unix socket of this machine on which the server listens:"
            " start 'lakehead server --data FOLDER --listen HOST:PORT', and connect to that address",
            uri=con.uri,
            master=master,
        )


def require_classic(spark: SparkSession) -> None:
    """Return if a session holds the JVM that it works with.

    Raises:
        InvalidRequestError: it is one of Spark Connect, whose JVM is elsewhere, or no session at all.
    """
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise InvalidRequestError(
            "lakehead.spark works with sessions that hold a sparkContext, and this is one of Spark Connect: there"
            " spark.read, readStream, df.write and writeStream have format('lakehead'), with options uri and table"
        )
    if not hasattr(spark, "sparkContext"):
        raise InvalidRequestError(
            f"a {type(spark).__name__} is no Spark session: give what lakehead.spark.session made"
        )


def application_of(spark: SparkSession) -> str:
    """The id of a session's application."""
    context = spark.sparkContext
    known = _applications.get(context)
    if known is None:  # asked of the JVM once
        known = _applications[context] = str(context.applicationId)
    return known


_applications: weakref.WeakKeyDictionary[SparkContext, str] = weakref.WeakKeyDictionary()


def is_attached(spark: SparkSession) -> bool:
    """Whether a session, or the one that it is a copy of, was attached itself."""
    return _name_of(spark) in _of_sessions


def connection_of(spark: SparkSession) -> Connection:
    """The session's connection.

    Raises:
        InvalidRequestError: it has none.
    """
    require_classic(spark)
    con = _of_sessions.get(_name_of(spark) or application_of(spark)) or _of_sessions.get(application_of(spark))
    if con is None:
        raise InvalidRequestError(
            "this Spark session knows no Lakehead connection: make it with lakehead.spark.session(con), or call"
            " lakehead.spark.attach(spark, con)"
        )
    return con


def in_worker(uri: str, use: Callable[[Connection], T], *, planned: bool = False) -> T:
    """Use this process's connection to an address, which is made when it is first needed, and anew when it broke: then
    ``use`` is called again, also when what it did the first time was done.

    Args:
        planned: another process has reached the server, for the same work: while it is away it is waited for, as calls
            wait. An address that nobody has reached may be wrong, and fails at once.
    """
    key = (os.getpid(), uri)
    with _lock:
        con = _of_process.get(key)
        if con is not None:
            try:
                return use(con)
            except (UnavailableError, AuthenticationError, ClosedError) as e:
                planned = planned and not isinstance(e, UnavailableError)  # which the call has waited for
                con.close()
                del _of_process[key]
        con = _of_process[key] = _waited_for(uri) if planned else _connected(uri)
        return use(con)


def worker_table(uri: str, name: str, *, planned: bool = False) -> Table:
    """A table through this process's connection to an address; ``planned`` as of `in_worker`."""
    return in_worker(uri, lambda con: con.table(name), planned=planned)


def planned_handle(uri: str, name: str, table_id: str, schema_id: int) -> TableHandle:
    """A table as it was when what this process carries out was planned.

    Raises:
        TableNotFoundError: it was dropped, or another one has its name.
        SchemaChangedError: it was altered since: read now, rows would have other columns than was planned.
    """
    handle = handle_of(worker_table(uri, name, planned=True))
    if handle.desc.table_id != table_id:
        raise TableNotFoundError(
            f"table {name} is another one than when this was first read, which was dropped or overwritten: load the"
            " DataFrame again, or replace the view",
            table=name,
        )
    handle.desc.require_schema(schema_id)
    return handle


def _waited_for(uri: str) -> Connection:
    patience = Patience.bounded(SystemClock(), f"connecting to {uri.partition('#')[0]}")
    while True:
        try:
            return _connected(uri)
        except UnavailableError as e:
            patience.wait(e)


def _connected(address: str) -> Connection:
    uri, known = address.partition("#")[0], _told(os.environ)
    given = known.get(_place(address))
    if isinstance(given, str):
        given = known.get(given)
    if given is None:
        return connect(uri, **presented(uri, os.environ))
    token, pem = given
    tls = None if pem is None else Tls(*(None if x is None else x.encode() for x in pem))
    try:
        return open_server(uri, token=token, tls=tls)
    except AuthenticationError:
        if token is not None and names_principal(token):
            raise  # what is found instead may be of who may do more
        # The server was restarted with another one: on its machine it stands in this user's files.
        return open_server(uri, token=None, tls=tls)


def _text(pem: bytes | None) -> str | None:
    return None if pem is None else pem.decode()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    keep(_of_process.copy(), _of_sessions.copy())
    _of_process.clear()
    _of_sessions.clear()


os.register_at_fork(after_in_child=_after_fork)
