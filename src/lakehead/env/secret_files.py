"""Secrets that are elsewhere: in files of their own, and in the system's keyring."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from lakehead.errors import InvalidPropertyError, MissingDependencyError

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


def read_keyring(reference: str) -> str:
    """What the keyring of this user keeps as ``service/name``.

    Raises:
        InvalidPropertyError: there is no such secret, or no keyring, or it does not open.
        MissingDependencyError: the package is not installed.
    """
    service, _, name = reference.rpartition("/")
    if not service or not name:
        raise InvalidPropertyError(f"${{keyring:{reference}}} names no secret: write ${{keyring:service/name}}")
    try:
        import keyring
    except ImportError as e:
        raise MissingDependencyError(
            f"${{keyring:{reference}}} needs the package keyring: pip install 'lakehead[keyring]'"
        ) from e
    try:
        found = keyring.get_password(service, name)
    except (keyring.errors.KeyringError, RuntimeError, OSError) as e:
        raise InvalidPropertyError(
            f"the keyring does not give ${{keyring:{reference}}}: {e or type(e).__name__}"
        ) from e
    if not found:
        raise InvalidPropertyError(
            f"the keyring has no secret ${{keyring:{reference}}}: keyring set {service} {name}, as this user"
        )
    return found


SECRETS: Mapping[str, Callable[[str], str]] = {"file": read_secret, "keyring": read_keyring}
"""What reads the references of a configuration file, by their kind; `lakehead.config.load` reads variables itself."""
