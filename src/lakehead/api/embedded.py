"""A server in this process: the one place where server and lake are put together."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lakehead.config import ServerConfig
from lakehead.env import Env
from lakehead.env.descriptors import fill_standard_descriptors
from lakehead.env.folder_lock import FolderLock, read_announcement
from lakehead.env.place import real_path
from lakehead.errors import UnavailableError
from lakehead.lake.formats import LakesByKind

if TYPE_CHECKING:
    from lakehead.server.host import ServerHost


def host_folder(folder: str, lock: FolderLock, config: ServerConfig) -> ServerHost:
    """Serve the folder that ``lock`` owns until `ServerHost.close`; the lock is released when this fails."""
    from lakehead.server.host import ServerHost

    env = Env.system()
    return ServerHost(folder, lock, config, env, lambda f: LakesByKind(config.lake, f, env.clock))


def serve(folder: str | os.PathLike[str], config: ServerConfig) -> ServerHost:
    """Become the server of a data folder, made when it is missing, until `ServerHost.close`.

    Raises:
        UnavailableError: a live process serves the folder already; the message says where.
        StorageError: the folder cannot be created or written.
        UnsupportedFormatError: a newer version wrote it.
        InvalidRequestError: the address cannot be listened on.
    """
    path = real_path(os.fspath(folder))
    fill_standard_descriptors()
    lock = FolderLock.try_acquire(path)
    if lock is None:
        uri = (read_announcement(path) or {}).get("uri", "another address")
        raise UnavailableError(f"another process serves {path} at {uri}: connect to it, or stop it first", path=path)
    return host_folder(path, lock, config)
