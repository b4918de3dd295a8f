"""What those get of a lake's storage who may only read a table: credentials that end, and open that table alone.

A server exchanges its own at an STS, once for all readers of a table, and again when half of their time is over. Role,
STS and the server's own credentials stay with it. Without a role readers get the storage's properties as they are.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from urllib.parse import urlsplit

from lakehead.config import STORAGE_EXPIRES, LakeConfig
from lakehead.env.clock import Clock
from lakehead.errors import InvalidPropertyError, UnavailableError
from lakehead.iceberg.file_io import PY_IO_IMPL
from lakehead.iceberg.sts import S3Keys, Session, assume_role, read_policy

_OF_PLACE = frozenset(
    {
        PY_IO_IMPL, "s3.endpoint", "s3.region", "s3.force-virtual-addressing", "s3.connect-timeout",
        "s3.request-timeout", "s3.proxy-uri", "s3.resolve-region", "s3.retry-strategy-impl",
    }
)  # fmt: skip
"""What a reader is told beside credentials: all else may be one."""
_SCHEMES = ("s3", "s3a", "s3n")
_LAST_SECONDS = 60.0
_NAME = "lakehead-reader"


class ReaderSessions:
    """Thread-safe."""

    def __init__(self, config: LakeConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], Session] = {}

    def storage(self, location: str, properties: Mapping[str, str]) -> dict[str, str]:
        """The storage properties for who may read the table at a location, of those that the server has.

        Raises:
            UnavailableError: STS does not answer, or refuses, and no credentials are left that it gave before.
            InvalidPropertyError: there is nothing that could be exchanged.
        """
        place = urlsplit(location)
        if not self._config.reading or place.scheme not in _SCHEMES:
            return dict(properties)
        session = self._session(place.netloc, place.path.strip("/"), properties)
        return {
            **{k: v for k, v in properties.items() if k in _OF_PLACE},
            "s3.access-key-id": session.keys.key_id,
            "s3.secret-access-key": session.keys.secret,
            "s3.session-token": session.keys.token,
            STORAGE_EXPIRES: str(int(session.expires * 1000)),
        }

    @property
    def _seconds(self) -> int:
        return int(self._config.reading.get("seconds", 3600))

    def _now(self) -> float:
        return self._clock.now_us() / 1_000_000

    def _session(self, bucket: str, folder: str, properties: Mapping[str, str]) -> Session:
        with self._lock:
            now = self._now()
            self._known = {key: s for key, s in self._known.items() if s.expires > now}
            known = self._known.get((bucket, folder))
            if known is not None and known.expires - now > self._seconds / 2:
                return known
            reading = self._config.reading
            try:
                made = assume_role(
                    reading["sts"],
                    reading["role"],
                    read_policy(reading["role"], bucket, folder),
                    self._keys(),
                    name=_NAME,
                    seconds=self._seconds,
                    region=properties.get("s3.region", "us-east-1"),
                    now=now,
                )
            except UnavailableError:
                if known is not None and known.expires - now > _LAST_SECONDS:
                    return known
                raise
            self._known[bucket, folder] = made
            return made

    def _keys(self) -> S3Keys:
        """The server's own: those of its catalog's properties, not any that a catalog hands out for a table."""
        given, found = self._config.catalog, os.environ
        if "s3.access-key-id" in given:
            token = given.get("s3.session-token", "")
            return S3Keys(given["s3.access-key-id"], given.get("s3.secret-access-key", ""), token)
        if "AWS_ACCESS_KEY_ID" in found:
            token = found.get("AWS_SESSION_TOKEN", "")
            return S3Keys(found["AWS_ACCESS_KEY_ID"], found.get("AWS_SECRET_ACCESS_KEY", ""), token)
        raise InvalidPropertyError(
            "[lake] reading has credentials exchanged, and the server has none: set s3.access-key-id and"
            " s3.secret-access-key in catalog, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
