"""What each side of a connection with TLS has: certificates and keys, from PEM files."""

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
    """

    authorities: bytes | None
    chain: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


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
    return Tls(trusted, own, secret)


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        with open(path, "rb") as f:
            return f.read()
    except OSError as e:
        raise InvalidPropertyError(f"cannot read {os.fspath(path)}: {e.strerror}", path=os.fspath(path)) from e
