"""Tokens of the servers this user runs on this machine, so that local clients need not be told them.

One file per port, readable by the user alone. A token never travels in options, URIs, command lines or logs.
"""

from __future__ import annotations

import contextlib
import os
import tempfile


def _folder() -> str:
    home = os.path.expanduser("~")
    if home != "~" and os.access(home, os.W_OK):
        return os.path.join(home, ".lakehead", "tokens")
    return os.path.join(tempfile.gettempdir(), f"lakehead-{os.getuid()}", "tokens")


def save_token(port: int, token: str) -> None:
    """Leave the token of a server on this port for this user's clients."""
    folder = _folder()
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, str(port))
    temporary = f"{path}.{os.getpid()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as f:
        f.write(token)
    os.replace(temporary, path)


def load_token(port: int) -> str | None:
    """The token of this user's server on this port; None when there is none."""
    try:
        with open(os.path.join(_folder(), str(port))) as f:
            return f.read()
    except OSError:
        return None


def remove_token(port: int, token: str) -> None:
    """Forget the token, unless another server has taken the port since."""
    if load_token(port) == token:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(_folder(), str(port)))
