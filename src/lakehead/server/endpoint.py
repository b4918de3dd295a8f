"""A service as one caller reaches it in its own process."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from lakehead.protocol.messages import R, Request, Stream
from lakehead.server.access import EMBEDDED_OWNER, Caller
from lakehead.server.service import Service
from lakehead.server.streams import ServerStream


class LocalEndpoint:
    """An `Endpoint` without a transport: calls run in the caller's thread. Thread-safe."""

    def __init__(self, service: Service, caller: Caller = EMBEDDED_OWNER) -> None:
        self.service = service
        self._caller = caller

    def call(self, request: Request[R], attachments: Sequence[pa.Buffer] = ()) -> tuple[R, list[pa.Buffer]]:
        """See `lakehead.protocol.messages.Endpoint`."""
        return self.service.call(request, attachments, self._caller)

    def stream(self, request: Request[Stream]) -> ServerStream:
        """See `lakehead.protocol.messages.Endpoint`."""
        return self.service.stream(request, self._caller)

    def close(self) -> None:
        """Nothing is held: who made the service closes it."""
