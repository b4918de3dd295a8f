"""What keeps a session that we make from other users of its machine: whom its processes listen to, what crosses between
them, and who reads their files. What the user set himself, in whichever way, stays as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lakehead.env.address import SocketAddress
from lakehead.env.own_folders import own_folders
from lakehead.env.randomness import Randomness
from lakehead.env.scratch_folders import ScratchFolder
from lakehead.errors import StorageError

LOOPBACK = "127.0.0.1"
LOOPBACK_SETTINGS = {"spark.driver.host": LOOPBACK, "spark.driver.bindAddress": LOOPBACK}
_TRAFFIC = {
    "spark.authenticate": "true",
    "spark.network.crypto.enabled": "true",
    "spark.network.crypto.cipher": "AES/GCM/NoPadding",
    # Who claims to know no better would be let in by MD5.
    "spark.network.crypto.saslFallback": "false",
}
_OF_TRAFFIC = ("spark.authenticate", "spark.network.crypto.", "spark.ssl.rpc.")
_JWS = "org.apache.spark.ui.JWSFilter"
_SECRET = re.compile(r"(?i)secret|passw|passphrase|token|credential|(access|private|encryption|account)[._-]?key")
# As PySpark names sockets.
_LONGEST_SOCKET = ".00000000-0000-0000-0000-000000000000.sock"


def is_local(master: str) -> bool:
    """Whether the executors of this master run in the driver's process, and so share its files."""
    return master == "local" or master.startswith("local[")


def is_local_cluster(master: str) -> bool:
    """Whether the driver starts a cluster of its own, on its machine."""
    return master.startswith("local-cluster[")


def is_private(master: str) -> bool:
    """Whether all processes of this master are started by the driver, on its machine: nobody else has to know their
    secret, or where their files lie."""
    return is_local(master) or is_local_cluster(master)


def tells_a_secret(name: str) -> bool:
    """Whether the value of a setting may be nobody's business: every user of a machine sees the arguments of all
    processes. What executors find in their environment is among it, whatever its name."""
    return name.startswith("spark.executorEnv.") or _SECRET.search(name) is not None


@dataclass(frozen=True)
class Scratch:
    """Folders of this user alone, for what Spark's processes on this machine write while they live.

    Attributes:
        folder: for files; whoever asked for it has it removed.
        held: that folder, as long as this process lives; None where somebody else made it.
        sockets: for sockets; None where every path is too long for one.
    """

    folder: str
    sockets: str | None
    held: ScratchFolder | None = None

    @classmethod
    def made(cls) -> Scratch:
        """A new one, among temporary files.

        Raises:
            StorageError: there is no place for it.
        """
        held = ScratchFolder("lakehead-spark-")
        held.remove.atexit = False  # Java may need it for longer
        return cls(held.path, held.path if _holds_sockets(held.path) else _elsewhere(), held)


def _holds_sockets(folder: str) -> bool:
    return SocketAddress(f"{folder}/{_LONGEST_SOCKET}").possible


def _elsewhere() -> str | None:
    for place in own_folders("spark"):
        if _holds_sockets(place.path):
            try:
                place.keep_private("sockets")
            except StorageError:
                continue
            return place.path
    return None


def close_to_others(above: str, name: str) -> None:
    """Make a folder this user's alone, whether it is there already or not; its parent need not be there either."""
    path = os.path.join(above, name)
    os.makedirs(path, mode=0o700, exist_ok=True)
    os.chmod(path, 0o700)


def private_settings(
    master: str,
    configured: Mapping[str, str],
    scratch: Scratch,
    randomness: Randomness,
    *,
    has_local_dirs: bool,
) -> dict[str, str]:
    """What to set beside what the user has ``configured``, for a session on a master that `is_private`.

    Of settings that belong together he has either all or none from us: one that he left out may be meant to be.

    Args:
        has_local_dirs: the environment says where Spark's files are, and Spark goes by that alone.
    """
    settings = {k: v for k, v in LOOPBACK_SETTINGS.items() if k not in configured}
    if not _speaks_of(configured, *_OF_TRAFFIC):
        settings |= _TRAFFIC
        if is_local_cluster(master):
            settings["spark.authenticate.secret"] = randomness.token()
    if not has_local_dirs and "spark.local.dir" not in configured:
        settings["spark.local.dir"] = scratch.folder
    elif not _speaks_of(configured, "spark.io.encryption."):
        # Spark leaves the folders that it makes there open to whoever may enter that one.
        settings["spark.io.encryption.enabled"] = "true"
    if "spark.python.unix.domain.socket.dir" not in configured:
        if scratch.sockets is not None:
            settings["spark.python.unix.domain.socket.dir"] = scratch.sockets
        elif "spark.python.unix.domain.socket.enabled" not in configured:
            settings["spark.python.unix.domain.socket.enabled"] = "false"
    if is_local_cluster(master) and not _speaks_of(configured, "spark.ui."):
        # The pages of its master and workers cannot be turned off: nobody has what they ask for.
        settings["spark.ui.filters"] = _JWS
        settings[f"spark.{_JWS}.param.secretKey"] = randomness.token() * 2  # as long as it has to be
    return settings


def _speaks_of(configured: Mapping[str, str], *beginnings: str) -> bool:
    return any(name.startswith(beginnings) for name in configured)
