"""Tokens and plain sockets of the servers this user runs on this machine, so that local clients need not be told them.

One file per address, in a folder of this user alone, which the server holds locked while it lives: whoever has its
address later gets no token. A token never travels in options, URIs, command lines or logs.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import sys
import threading
from collections.abc import Callable

from lakehead.env.address import Address, SocketAddress, TcpAddress, parse_uri
from lakehead.env.own_folders import OwnFolder, own_folders
from lakehead.errors import StorageError

_ANY = ("0.0.0.0", "::", "[::]")
_LOOPBACK = re.compile(r"127(\.\d{1,3}){3}")


def local_host(host: str) -> str:
    """The address that a host's name stands for: ``localhost`` is one of two, and another user may have the other."""
    return "127.0.0.1" if host.lower() == "localhost" else host


def server_place(uri: str) -> str:
    """An address by which all spellings that lead to one server of this machine are the same.

    Raises:
        InvalidUriError: it is none.
    """
    address = parse_uri(uri)
    return uri if isinstance(address, SocketAddress) else f"{local_host(address.host)}:{address.port}"


def _folder() -> OwnFolder:
    return next(own_folders("tokens"))


def _name(address: Address) -> str:
    if isinstance(address, SocketAddress):
        return f"unix-{hashlib.sha256(os.fsencode(address.path)).hexdigest()[:32]}"
    return f"{local_host(address.host).strip('[]').replace(':', '_')}-{address.port}"


class KeptToken:
    """A server's token where this user's clients find it, as long as this process lives and does not `remove` it."""

    def __init__(self, address: Address, folder_id: str, token: str, plain: SocketAddress | None = None) -> None:
        """Leave it.

        Args:
            plain: the plain socket at which that server answers, too.

        Raises:
            StorageError: there is no place for it that is this user's alone.
        """
        own = _folder()
        own.keep_private("a token")
        folder = own.path
        _remove_stale(folder)
        self._path = os.path.join(folder, _name(address))
        temporary = f"{self._path}.{os.getpid()}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = os.open(temporary, flags, 0o600)
            note = {"folder_id": folder_id, "token": token} | ({} if plain is None else {"plain": plain.path})
            os.write(self._fd, json.dumps(note).encode())
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            os.replace(temporary, self._path)
        except OSError as e:
            raise StorageError(f"cannot keep a token in {folder}: {e.strerror}", path=folder) from e

    def remove(self) -> None:
        """Forget it, unless another server has the address by now. A second call does nothing."""
        if self._fd < 0:
            return
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._fd)):
                os.unlink(self._path)
        self.forget()

    def forget(self) -> None:
        """In a forked child: the parent keeps it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class FoundToken:
    """The token of this user's server at an address, as far as there is one and it lives. Calling it looks for it.

    Args:
        folder_id: which folder the server must serve; None for any.

    Attributes:
        was_found: there was one, so that a server without one is another's.
        plain: the plain socket at which the server answers, too, whose token was found last.
    """

    def __init__(self, address: Address, folder_id: str | None = None) -> None:
        addresses = [address]
        if isinstance(address, TcpAddress) and _LOOPBACK.fullmatch(local_host(address.host)):
            addresses += [TcpAddress(host, address.port) for host in _ANY]
        self._names = list(dict.fromkeys(_name(a) for a in addresses))
        self._folder_id = folder_id
        self._fd = -1
        self.was_found = False
        self.plain: SocketAddress | None = None
        # A descriptor that one thread closes may be another file before the next has looked at it.
        self._lock = threading.Lock()

    def __call__(self) -> str | None:
        with self._lock:
            return self._find()

    def _find(self) -> str | None:
        self._let_go()
        folder = _folder().path
        for name in self._names:
            token = self._read(os.path.join(folder, name))
            if token is not None:
                return token
        return None

    def _read(self, path: str) -> str | None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            found = os.fstat(fd)
            own = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
            if not own or not _is_held(fd):
                return None
            kept = json.loads(os.read(fd, 1 << 16))
            if self._folder_id not in (None, kept["folder_id"]):
                return None
            token = str(kept["token"])
            self.plain = SocketAddress(str(kept["plain"])) if "plain" in kept else None
            self._fd, fd, self.was_found = fd, -1, True
            return token
        except (OSError, ValueError, KeyError, TypeError):
            return None
        finally:
            if fd >= 0:
                os.close(fd)

    def lives(self) -> bool:
        """Whether the server whose token was found last lives: no one else can have its address then."""
        with self._lock:
            return self._fd >= 0 and _is_held(self._fd)

    def _let_go(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if ends():  # the process gives all back, and what this would call may be gone
            return
        self._let_go()


def _is_held(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def _remove_stale(folder: str) -> None:
    """Remove what servers that were killed, and earlier versions, have left."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                stale = not name.endswith(".new") and not _is_held(fd)
                if stale and os.path.samestat(os.lstat(path), os.fstat(fd)):
                    os.unlink(path)
            finally:
                os.close(fd)
