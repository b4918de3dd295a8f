"""Data folders as connections of this process reach them: served here, or by the process that owns them now.

An owner that ends is followed by one of those that were attached to it: whoever gets the lock serves, the others attach
to that one. Nobody above notices more than a call that is made again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from lakehead.api.embedded import host_folder
from lakehead.client.patience import is_gone
from lakehead.config import LakeConfig, ServerConfig
from lakehead.env import SystemClock
from lakehead.env.address import SocketAddress, parse_uri
from lakehead.env.credentials import FoundToken
from lakehead.env.folder_lock import FolderLock, catalog_id, read_announcement
from lakehead.env.forks import keep
from lakehead.env.own_sockets import require_own
from lakehead.errors import (
    AuthenticationError,
    ClosedError,
    InvalidRequestError,
    InvalidUriError,
    LakeheadError,
    ProtocolVersionError,
    UnavailableError,
)
from lakehead.protocol import messages as m

if TYPE_CHECKING:
    from lakehead.server.host import ServerHost

_ATTACH_SECONDS = 10.0

_hosts: dict[str, tuple[ServerHost, int]] = {}
_hosts_lock = threading.RLock()
_closed_hosts: list[ServerHost] = []


@dataclass(frozen=True)
class Reached:
    """Where a folder is served.

    Attributes:
        owner: tells one owner from the next; None for this process.
        lake: the `catalog_id` of the owner's lakes, as far as it says.
    """

    endpoint: m.Endpoint
    uri: str
    owner: tuple[str, str] | None
    lake: str | None = None


def open_folder(folder: str, lake: LakeConfig) -> Reached:
    """Serve the folder, or attach to its owner.

    Raises:
        UnavailableError: it has one that does not answer.
        LakeheadError: it cannot be served.
    """
    clock = SystemClock()
    deadline = clock.monotonic() + _ATTACH_SECONDS
    while True:
        reached = _look(folder, lake, None)
        if reached is not None:
            return reached
        if clock.monotonic() > deadline:
            raise UnavailableError(
                f"another process holds {folder} but does not answer: stop it, or wait and connect again", path=folder
            )
        clock.sleep(0.05)


def _look(folder: str, lake: LakeConfig, gone: Reached | None) -> Reached | None:
    """Try once to serve the folder, or to find an owner other than the ``gone`` one.

    Raises:
        UnavailableError: that one had its lakes elsewhere, so this process may not follow it.
    """
    follows = gone is None or gone.lake in (None, catalog_id(lake))
    with _hosts_lock:
        if folder in _hosts:
            host, users = _hosts[folder]
            _hosts[folder] = (host, users + 1)
            return Reached(host.endpoint, host.uri, None)
        # Not for a moment where it is another's to have: a server that starts then would not get it.
        lock = FolderLock.try_acquire(folder) if follows else None
        if lock is not None:
            host = host_folder(folder, lock, ServerConfig(unix=True, lake=lake))
            _hosts[folder] = (host, 1)
            return Reached(host.endpoint, host.uri, None)
    note = read_announcement(folder)
    owner = None if note is None else (note["uri"], note.get("pid", ""))
    if note is not None and owner is not None and (gone is None or owner != gone.owner):
        return _attach(note, owner)
    if not follows:
        raise UnavailableError(
            f"the server of {folder} has ended, and this process may not take its place: it had its lakes in another"
            " catalog than this connection was given (lake=, or --config). Start that server again, or connect with its"
            " lake="
        )
    return None


def _attach(note: dict[str, str], owner: tuple[str, str]) -> Reached | None:
    from lakehead.client.flight import FlightEndpoint

    try:
        address = parse_uri(note["uri"])
        if isinstance(address, SocketAddress):
            require_own(address)
    except (UnavailableError, InvalidUriError):
        return None
    # The token of a server of this folder: another that has the port later is not the one that is meant.
    endpoint = FlightEndpoint(address, token=FoundToken(address, note["folder_id"]))
    try:
        reply, _ = endpoint.call(m.Hello())
    except ProtocolVersionError:
        endpoint.close()
        raise
    except (UnavailableError, InvalidRequestError):
        endpoint.close()
        return None
    if reply.folder_id != note["folder_id"]:
        endpoint.close()
        return None
    return Reached(endpoint, note["uri"], owner, note.get("lake"))


def release_folder(folder: str) -> None:
    """Give up one use of a folder that this process serves; the last use stops the server.

    Raises:
        StorageError: a last sync failed; all is closed.
    """
    with _hosts_lock:
        host, users = _hosts[folder]
        if users > 1:
            _hosts[folder] = (host, users - 1)
            return
        del _hosts[folder]
        _closed_hosts[:] = [h for h in _closed_hosts if not h.wait_stopped(0)]
        _closed_hosts.append(host)
        host.close()


def wait_stopped(seconds: float) -> None:
    """Wait so long for the clients of each server that was closed here."""
    for host in _closed_hosts:
        host.wait_stopped(seconds)


def forget_folders() -> None:
    """In a forked child: hold no folder and no port."""
    global _hosts_lock
    keep(_hosts.copy(), _closed_hosts.copy())
    _hosts_lock = threading.RLock()
    for host, _ in _hosts.values():
        host.forget()
    _hosts.clear()
    _closed_hosts.clear()


class AttachedEndpoint:
    """The server of a folder that another process owns, and when that ends, the next one, which may be here."""

    def __init__(self, folder: str, lake: LakeConfig, reached: Reached) -> None:
        self._folder = folder
        self._lake = lake
        self._reached = reached
        self._left: list[m.Endpoint] = []
        self._closed = False
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        """Where the folder is served now."""
        return self._reached.uri

    @property
    def serves(self) -> bool:
        """Whether this process has become the owner."""
        return self._reached.owner is None

    def call(self, request: m.Request[m.R], attachments: Sequence[pa.Buffer] = ()) -> tuple[m.R, list[pa.Buffer]]:
        reached = self._reached
        try:
            return reached.endpoint.call(request, attachments)
        except (UnavailableError, AuthenticationError) as e:
            raise self._followed(reached, e) from e

    def stream(self, request: m.Request[m.Stream]) -> m.Stream:
        reached = self._reached
        try:
            return reached.endpoint.stream(request)
        except (UnavailableError, AuthenticationError) as e:
            raise self._followed(reached, e) from e

    def _followed(self, reached: Reached, e: LakeheadError) -> LakeheadError:
        """Look for the next owner, which the next attempt then reaches; returns the error for this attempt."""
        if reached.owner is None:
            return e
        if isinstance(e, AuthenticationError):
            e = UnavailableError(f"the process that served {self._folder} is gone: call again", gone=True)
        if is_gone(e):
            with self._lock:
                if self._closed:
                    return ClosedError("the connection is closed: connect again")
                if self._reached is not reached:
                    return e
                try:
                    found = _look(self._folder, self._lake, reached)
                except UnavailableError as refused:
                    return UnavailableError(refused.message, **e.context)  # of what was sent nothing else is known
                if found is not None:
                    # Other threads may still wait on the former connection: it is closed when this endpoint is.
                    self._left.append(reached.endpoint)
                    self._reached = found
        return e

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for endpoint in self._left:
            endpoint.close()
        if self._reached.owner is None:
            release_folder(self._folder)
        else:
            self._reached.endpoint.close()
