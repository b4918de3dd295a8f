"""What each side of a connection with TLS has: certificates and keys, from PEM files, which others may renew."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from lakehead.env.secret_files import read_secret
from lakehead.errors import InvalidPropertyError


@dataclass(frozen=True)
class Tls:
    """One side's part, as PEM.

    Attributes:
        authorities: who signs the certificates of the other side; None of a server that asks its clients for none.
        chain: own certificate, and those between it and its authority; None of a client that has none.
        key: of that certificate.
        files: where the three were read, as far as they were.
    """

    authorities: bytes | None
    chain: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    files: tuple[str | None, str | None, str | None] | None = field(default=None, compare=False, repr=False)


def read_tls(
    *,
    authorities: str | os.PathLike[str] | None,
    chain: str | os.PathLike[str] | None,
    key: str | os.PathLike[str] | None,
) -> Tls:
    """Read PEM files, and see that a certificate and its key belong together.

    Raises:
        InvalidPropertyError: a file cannot be read or holds something else, others can read the key, or of a
            certificate and its key one is missing.
    """
    import ssl

    if (chain is None) != (key is None):
        raise InvalidPropertyError("a certificate and its key belong together: give tls_cert and tls_key")
    trusted = own = secret = None
    if authorities is not None:
        trusted = _read(authorities)
        try:
            ssl.create_default_context(cadata=trusted.decode())
        except (ssl.SSLError, ValueError) as e:
            raise InvalidPropertyError(f"{os.fspath(authorities)} holds no certificates in PEM form: {e}") from e
    if chain is not None and key is not None:
        own, secret = _read(chain), read_secret(os.fspath(key)).encode()
        try:
            # A password is never asked for: who starts a server may not be there to type it.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key, password=lambda: b"")
        except (ssl.SSLError, ValueError, OSError) as e:
            raise InvalidPropertyError(
                f"{os.fspath(key)} is not the key of the certificate in {os.fspath(chain)}, both in PEM form and"
                f" without a password: {e}"
            ) from e
    # The process may be elsewhere when it reads them again.
    places = [None if path is None else os.path.abspath(path) for path in (authorities, chain, key)]
    return Tls(trusted, own, secret, (places[0], places[1], places[2]))


def renewed(tls: Tls) -> Tls:
    """What the files hold now; what they held where they cannot be read, or one is not yet the other's: whoever renews
    them does so one after the other."""
    if tls.files is None:
        return tls
    authorities, chain, key = tls.files
    try:
        return read_tls(authorities=authorities, chain=chain, key=key)
    except InvalidPropertyError:
        return tls


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        with open(path, "rb") as f:
            return f.read()
    except OSError as e:
        raise InvalidPropertyError(f"cannot read {os.fspath(path)}: {e.strerror}", path=os.fspath(path)) from e
