"""How long a client goes on trying while its server is away: pauses that grow, and an end."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pyarrow as pa

from lakehead.env.clock import Clock
from lakehead.errors import LakeheadError, RequestTimeoutError, UnavailableError
from lakehead.protocol.messages import Endpoint, R, Request

PATIENCE_SECONDS = 30.0
"""How long calls that may be repeated are repeated; at least once."""

_PAUSE_FIRST_SECONDS = 0.02
_PAUSE_MAX_SECONDS = 1.0
_log = logging.getLogger("lakehead.client")


def is_gone(error: BaseException) -> bool:
    """Whether a call failed because no server answered it: another attempt may reach one."""
    return isinstance(error, UnavailableError) and error.context.get("gone") is True


class Patience:
    """Waits between attempts at the same thing. One thread at a time.

    Args:
        what: is tried, for the log.
        seconds: after the first failure until it gives up; None never does.
    """

    def __init__(self, clock: Clock, what: str, seconds: float | None) -> None:
        self._clock = clock
        self._what = what
        self._seconds = seconds
        self._failed_since: float | None = None
        self._pause = _PAUSE_FIRST_SECONDS
        self._timeout: LakeheadError | None = None

    @classmethod
    def bounded(cls, clock: Clock, what: str) -> Patience:
        """For calls: `PATIENCE_SECONDS`."""
        return cls(clock, what, PATIENCE_SECONDS)

    def progress(self) -> None:
        """An attempt got somewhere."""
        self._failed_since = self._timeout = None
        self._pause = _PAUSE_FIRST_SECONDS

    def wait(self, error: LakeheadError) -> None:
        """Return when it is time for the next attempt.

        Raises:
            UnavailableError: there shall be none; `RequestTimeoutError` when any attempt ended so.
            LakeheadError: the error itself, when another attempt would fail as well.
        """
        if not is_gone(error):
            raise error
        if isinstance(error, RequestTimeoutError):
            self._timeout = error
        now = self._clock.monotonic()
        if self._failed_since is None:
            self._failed_since = now
            _log.log(
                logging.WARNING if self._seconds is None else logging.DEBUG, "%s: trying again: %s", self._what, error
            )
        elif self._seconds is not None and now + self._pause > self._failed_since + self._seconds:
            raise self._timeout or error
        self._clock.sleep(self._pause)
        self._pause = min(2 * self._pause, _PAUSE_MAX_SECONDS)


def ask(
    endpoint: Endpoint, clock: Clock, request: Request[R], attachments: Sequence[pa.Buffer] = ()
) -> tuple[R, list[pa.Buffer]]:
    """A call that is repeated while its server is away; what is not idempotent, only when it has not reached one.

    Raises:
        UnavailableError: no server answered for `PATIENCE_SECONDS`.
        LakeheadError: the request was refused.
    """
    patience = None
    while True:
        try:
            return endpoint.call(request, attachments)
        except UnavailableError as e:
            if not request.idempotent and not e.context.get("unsent"):
                raise
            patience = patience or Patience.bounded(clock, type(request).__name__)
            patience.wait(e)
