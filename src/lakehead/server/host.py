"""A running server: a locked data folder, its service and its Flight endpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
from collections.abc import Callable
from typing import Any

from lakehead.config import ServerConfig
from lakehead.env import Env
from lakehead.env.address import Address, SocketAddress, TcpAddress
from lakehead.env.credentials import KeptToken
from lakehead.env.descriptors import raise_descriptors
from lakehead.env.folder_lock import FolderLock
from lakehead.env.https import fetch
from lakehead.env.own_sockets import OwnSocket
from lakehead.env.place import Place
from lakehead.env.rotated_file import RotatedFile
from lakehead.env.tls import Tls, read_tls
from lakehead.errors import StorageError
from lakehead.server.admission import Bounded
from lakehead.server.answers import Answers
from lakehead.server.audit import FILES_KEPT, Audit
from lakehead.server.door import Door
from lakehead.server.endpoint import LocalEndpoint
from lakehead.server.flight import FlightServer
from lakehead.server.lake_state import LakeState
from lakehead.server.service import Service
from lakehead.server.signatures import Signatures
from lakehead.server.socket_server import SocketServer

_METADATA = "metadata.db"
_MAINTENANCE_SECONDS = 2.0
_LOOPBACK = TcpAddress("127.0.0.1", 0)
_log = logging.getLogger("lakehead.server")


class ServerHost:
    """Serves one data folder in this process until `close`.

    One that speaks TLS listens on a Unix socket without, too, for this user's own processes: the certificate is for
    other names, and nobody between them could read along.

    Attributes:
        uri: where clients reach it.
        local_uri: where processes of this user on this machine do, without a certificate.
        port: of ``uri``; None where that is a Unix socket.
    """

    def __init__(
        self,
        folder: str,
        lock: FolderLock,
        config: ServerConfig,
        env: Env,
        make_lake: Callable[[str], LakeState | None],
    ) -> None:
        """Open the folder that ``lock`` owns and listen; the lock is released by `close`, and when this fails.

        Raises:
            UnsupportedFormatError: a newer version wrote the folder.
            StorageError: it cannot be written, or has tables and no metadata.
            InvalidRequestError: the address cannot be listened on, a certificate is none, another process writes to the
                file of the audit, or what signed tokens need is not installed.
        """
        self._lock = lock
        self._clock = env.clock
        self._kept: list[KeptToken] = []
        self._servers: list[FlightServer | SocketServer] = []
        self._sockets: list[OwnSocket[FlightServer] | OwnSocket[SocketServer]] = []
        self.token = config.token or env.randomness.token()
        tablets_max = min(config.limits.tablets_max, raise_descriptors() * 3 // 4)
        limits = dataclasses.replace(config.limits, tablets_max=tablets_max)
        exchanges = Bounded(env.threads, "exchanges_max", "conversations", limits.exchanges_max)
        try:
            tls = None
            if config.tls_cert is not None:
                tls = read_tls(authorities=config.tls_client_ca, chain=config.tls_cert, key=config.tls_key)
            _require_whole(folder)
            self.service = Service(
                folder,
                env=env,
                limits=limits,
                lake=make_lake(folder),
                maintenance_seconds=_MAINTENANCE_SECONDS,
                place=lambda: Place.of(folder, _METADATA),
                fence=lock.require_held,
            )
            lock.watch(os.path.join(folder, _METADATA))
        except BaseException:
            lock.release()
            raise
        self.endpoint = LocalEndpoint(self.service)
        self._audit: Audit | None = None
        try:
            if config.audit is not None:
                file = RotatedFile(config.audit, bytes_max=config.audit_bytes, kept=FILES_KEPT)
                self._audit = Audit(file, env.clock, self.service.principals.table_name)
            signatures = Signatures(config.oidc, env, fetch) if config.oidc.issuer else None
            door = Door(self.token, self.service.principals, env, self._audit, signatures)
            self._how: dict[str, Any] = {"door": door, "exchanges": exchanges, "clock": env.clock}
            self._answers = Answers(self.service, self._audit)
            # A copy of a folder that has the same id does not take the name of the one it is of.
            place = f"{self.service.folder_id} {os.path.realpath(folder)}"
            self._name = hashlib.sha256(place.encode()).hexdigest()[:16]
            self._plain = self._listen_plainly()
            at = TcpAddress(config.host, config.port)
            address = self._listen_locally(at) if config.unix else self._listen(at, tls)
            local = address if tls is None else self._listen_locally(_LOOPBACK)
            self.port = address.port if isinstance(address, TcpAddress) else None
            self.uri, self.local_uri = address.uri, local.uri
            lock.announce(self.local_uri, self.service.folder_id, config.lake)
        except BaseException:
            self.close()
            raise

    def _flight(self, address: Address, tls: Tls | None = None) -> FlightServer:
        return FlightServer(self._answers, address=address, tls=tls, **self._how)

    def _listen_plainly(self) -> SocketAddress | None:
        """Listen on a plain socket, too, which this user's processes find beside the token; None where none can be."""
        try:
            placed = OwnSocket(f"{self._name}.plain", lambda at: SocketServer(self._answers, address=at, **self._how))
        except StorageError as e:
            _log.info("there is no plain socket, and all travels by Flight: %s", e.message)
            return None
        self._servers.append(placed.server)
        self._sockets.append(placed)
        return placed.address

    def _listen(self, at: TcpAddress, tls: Tls | None) -> Address:
        listening = self._flight(at, tls)
        self._servers.append(listening)
        self._keep_token(listening.address)
        return listening.address

    def _listen_locally(self, otherwise: TcpAddress) -> Address:
        """Listen where this user's processes alone can reach it; where no socket can be, on TCP."""
        try:
            placed = OwnSocket(f"{self._name}.sock", self._flight)
        except StorageError as e:
            address = self._listen(otherwise, None)
            _log.warning("%s: listening on %s instead, where who has no token is refused", e.message, address)
            return address
        self._servers.append(placed.server)
        self._sockets.append(placed)
        self._keep_token(placed.address)
        return placed.address

    def _keep_token(self, address: Address) -> None:
        self._kept.append(KeptToken(address, self.service.folder_id, self.token, self._plain))

    def close(self) -> None:
        """End subscriptions, sync and close every tablet, release the folder.

        Raises:
            StorageError: a last sync failed; all is closed and released.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._lock.release)
            if self._audit is not None:
                stack.callback(self._audit.close)
            stack.callback(self.service.close)
            for listening in self._servers:
                stack.callback(listening.stop)
            for placed in self._sockets:
                stack.callback(placed.remove)
            for kept in self._kept:
                stack.callback(kept.remove)

    def wait_stopped(self, seconds: float) -> bool:
        """After `close`: return when no client holds on any more, or after that time; True in the first case. A
        process that ends earlier cuts clients off."""
        deadline = self._clock.monotonic() + seconds
        return all([s.wait_stopped(max(0.0, deadline - self._clock.monotonic())) for s in self._servers])

    def forget(self) -> None:
        """In a forked child: hold neither the folder nor the port; the parent goes on."""
        self._lock.forget()
        if self._audit is not None:
            self._audit.forget()
        for placed in self._sockets:
            placed.forget()
        for server in self._servers:
            if isinstance(server, SocketServer):
                server.forget()
        for kept in self._kept:
            kept.forget()


def _require_whole(folder: str) -> None:
    """Return if a folder that has tables has what tells which they are: an empty one would be served instead.

    Raises:
        StorageError: it has not.
    """
    metadata, tables = os.path.join(folder, _METADATA), os.path.join(folder, "tables")
    there = any(os.path.exists(at) and os.path.getsize(at) for at in (metadata, f"{metadata}-wal"))
    if not there and os.path.isdir(tables) and os.listdir(tables):
        raise StorageError(
            f"{folder} holds tables, and {_METADATA}, which tells what they are, is missing or empty: restore it with"
            " the folder from a backup, or begin another folder",
            path=metadata,
        )
