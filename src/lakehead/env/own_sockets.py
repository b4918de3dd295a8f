"""Unix sockets of the servers that this user runs, in a folder of this user alone.

A socket that gRPC binds has the modes of the umask, takes the place of another, and goes when its server is shut down,
whoever listens there by then. So a server binds to a name of its own, and is put in place when it listens.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import socket
import stat
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from lakehead.env.address import SocketAddress
from lakehead.env.own_folders import OwnFolder, own_folders
from lakehead.errors import AuthenticationError, InvalidRequestError, StorageError, UnavailableError

_binds = itertools.count()


class Listening(Protocol):
    """Who listens on an address."""

    def stop(self) -> None:
        """Listen no more."""
        ...


L = TypeVar("L", bound=Listening)


class OwnSocket(Generic[L]):
    """A socket on which this process listens, for this user's processes alone, until `remove`.

    Attributes:
        address: where they find it; the same for each server of this name.
        server: who listens.
    """

    def __init__(self, name: str, listen: Callable[[SocketAddress], L]) -> None:
        """Have ``listen`` called with an address, and put the socket in place; one of that name that is there already
        belongs to a server that has ended, or that has lost its folder.

        Args:
            name: of its file.

        Raises:
            StorageError: no socket can be listened on; the message says why, for each place that was tried.
        """
        refused = []
        for folder in own_folders("sockets"):
            try:
                self.address, self.server, placed = _listen_in(folder, name, listen)
                self._placed: os.stat_result | None = placed
                return
            except (StorageError, InvalidRequestError) as e:
                refused.append(e.message)
        raise StorageError(f"cannot listen on a Unix socket: {'; '.join(refused)}")

    def remove(self) -> None:
        """Let nobody find it, unless another server has its name by now. A second call does nothing."""
        if self._placed is None:
            return
        folder = os.path.dirname(self.address.path)
        # As long as its server lives, no other file has its number.
        with contextlib.suppress(OSError), _alone(folder):
            if os.path.samestat(os.lstat(self.address.path), self._placed):
                os.unlink(self.address.path)
        self._placed = None

    def forget(self) -> None:
        """In a forked child: the parent keeps it."""
        self._placed = None


def _listen_in(
    folder: OwnFolder, name: str, listen: Callable[[SocketAddress], L]
) -> tuple[SocketAddress, L, os.stat_result]:
    address = SocketAddress(os.path.join(folder.path, name))
    bound = SocketAddress(os.path.join(folder.path, f"{os.getpid()}.{next(_binds)}.new"))
    if not (address.possible and bound.possible):
        raise StorageError(f"{address} is too long a path, or has a character that cannot be in one", path=folder.path)
    folder.keep_private("a socket")
    try:
        with _alone(folder.path):
            _remove_stale(folder.path)
            server = listen(bound)
            try:
                os.chmod(bound.path, 0o600)
                placed = os.lstat(bound.path)
                os.rename(bound.path, address.path)
            except OSError:
                server.stop()
                raise
    except OSError as e:
        raise StorageError(f"cannot listen on {address}: {e.strerror}", path=folder.path) from e
    return address, server, placed


@contextlib.contextmanager
def _alone(folder: str) -> Iterator[None]:
    """Be the only process of this user that puts sockets into the folder, or takes them away."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor, too
    finally:
        os.close(fd)


def _remove_stale(folder: str) -> None:
    """Remove what servers that were killed have left."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            if name.endswith(".new") or not _is_listened_on(path):
                os.unlink(path)


def _is_listened_on(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # it is busy, or no socket, and nobody's to remove
        return True


def require_own(address: SocketAddress) -> None:
    """Return if nobody but this user, and root, can have put the socket there.

    Raises:
        UnavailableError: there is none.
        AuthenticationError: another user can, so that it may be anyone's.
    """
    folder = os.path.dirname(address.path)
    try:
        around, found = os.lstat(folder), os.lstat(address.path)
    except OSError as e:
        raise UnavailableError(
            f"there is no Unix socket {address} here ({e.strerror}): its server has ended, or runs on another machine,"
            " from which this one can reach it if it is started with --listen HOST:PORT",
            address=str(address),
            gone=True,
            unsent=True,
        ) from e
    mine = all(s.st_uid == os.getuid() for s in (around, found))
    if not (mine and stat.S_ISDIR(around.st_mode) and not around.st_mode & 0o077 and stat.S_ISSOCK(found.st_mode)):
        raise AuthenticationError(
            f"who listens on {address} may be another user: a server is reached by this user's own sockets, in a folder"
            " of mode 0700 that is no link; from elsewhere, it is reached when it is started with --listen HOST:PORT"
        )
