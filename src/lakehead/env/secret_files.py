"""Secrets that stand in files of their own."""

from __future__ import annotations

import os

from lakehead.errors import InvalidPropertyError

SECRET_BYTES_MAX = 1 << 16


def read_secret(path: str) -> str:
    """What a file says, without the end of its last line.

    Raises:
        InvalidPropertyError: other users can read it, or this one cannot.
    """
    try:
        with open(path, "rb") as f:
            found = os.fstat(f.fileno())
            if found.st_mode & 0o077 or found.st_uid not in (0, os.getuid()):
                raise InvalidPropertyError(f"other users can read the secret in {path}: chmod 600 {path}", path=path)
            data = f.read(SECRET_BYTES_MAX)
        return data.decode().removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeDecodeError) as e:
        why = getattr(e, "strerror", None) or "it is no text"
        raise InvalidPropertyError(f"the secret in {path} cannot be read: {why}", path=path) from e
