"""Certificates that last a day, made by openssl: an authority, and whoever it signs for."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Authority:
    """Signs certificates; all files lie in one folder.

    Attributes:
        ca: PEM file of its own certificate.
    """

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = name
        folder.mkdir(exist_ok=True)
        self.ca = folder / f"{name}.pem"
        own = ("-keyout", f"{name}.key", "-out", self.ca.name, "-subj", f"/CN={name}")
        self._openssl("req", "-x509", *_NEW_KEY, *own, "-addext", "keyUsage=critical,keyCertSign,cRLSign")

    def signed(self, name: str, *names: str, days: int = 1) -> tuple[Path, Path]:
        """PEM files of a certificate for these (``DNS:localhost``, ``URI:spiffe://a/b``) and of its key; with less than
        no days it has expired."""
        cert, key, request = (self._folder / f"{name}.{suffix}" for suffix in ("pem", "key", "csr"))
        self._openssl("req", *_NEW_KEY, "-keyout", key.name, "-out", request.name, "-subj", f"/CN={name}")
        # Python 3.13 and later want a key to say whose it is.
        ids = "subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
        (self._folder / f"{name}.ext").write_text(f"subjectAltName={','.join(names)}\n{ids}")
        own = ("-CA", self.ca.name, "-CAkey", f"{self._name}.key", "-CAcreateserial", "-extfile", f"{name}.ext")
        self._openssl("x509", "-req", "-days", str(days), "-in", request.name, "-out", cert.name, *own)
        key.chmod(0o600)
        return cert, key

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._folder, check=True, capture_output=True)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
