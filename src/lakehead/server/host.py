"""A running server: a locked data folder, its service and its Flight endpoint."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

from lakehead.config import ServerConfig
from lakehead.env import Env
from lakehead.env.credentials import KeptToken
from lakehead.env.descriptors import raise_descriptors
from lakehead.env.folder_lock import FolderLock
from lakehead.env.place import Place
from lakehead.server.admission import Bounded
from lakehead.server.endpoint import LocalEndpoint
from lakehead.server.flight import FlightServer
from lakehead.server.lake_state import LakeState
from lakehead.server.service import Service

_MAINTENANCE_SECONDS = 2.0


class ServerHost:
    """Serves one data folder in this process until `close`."""

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
            StorageError: it cannot be written.
            InvalidRequestError: the address cannot be listened on.
        """
        self._lock = lock
        self._kept: KeptToken | None = None
        self.token = config.token or env.randomness.token()
        tablets_max = min(config.limits.tablets_max, raise_descriptors() * 3 // 4)
        limits = dataclasses.replace(config.limits, tablets_max=tablets_max)
        exchanges = Bounded(env.threads, "exchanges_max", "conversations", limits.exchanges_max)
        try:
            self.service = Service(
                folder,
                env=env,
                limits=limits,
                lake=make_lake(folder),
                maintenance_seconds=_MAINTENANCE_SECONDS,
                place=Place.of(folder),
                fence=lock.require_held,
            )
            self._flight = FlightServer(
                self.service, host=config.host, port=config.port, token=self.token, exchanges=exchanges
            )
        except BaseException:
            lock.release()
            raise
        self.endpoint = LocalEndpoint(self.service)
        self.port: int = self._flight.port
        self.uri = f"lakehead://{config.host}:{self.port}"
        try:
            self._kept = KeptToken(config.host, self.port, self.service.folder_id, self.token)
            lock.announce(self.uri, self.service.folder_id)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End subscriptions, sync and close every tablet, release the folder.

        Raises:
            StorageError: a last sync failed; all is closed and released.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._lock.release)
            stack.callback(self.service.close)
            stack.callback(self._flight.stop)
            if self._kept is not None:
                stack.callback(self._kept.remove)

    def wait_stopped(self, seconds: float) -> bool:
        """After `close`: return when no client holds on any more, or after that time; True in the first case. A
        process that ends earlier cuts clients off."""
        return self._flight.wait_stopped(seconds)

    def forget(self) -> None:
        """In a forked child: hold neither the folder nor the port; the parent goes on."""
        self._lock.forget()
        if self._kept is not None:
            self._kept.forget()
