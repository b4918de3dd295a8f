"""What tells those who wait for new rows of a table that something happened."""

from __future__ import annotations

from collections.abc import Callable

from lakehead.env import Env
from lakehead.errors import LakeheadError


class Progress:
    """The progress of all tablets of a table. Thread-safe."""

    def __init__(self, env: Env) -> None:
        self._clock = env.clock
        self._changed = env.threads.condition()
        # Reentrant, as the garbage collector may close a forgotten subscription at any point of any thread.
        self._lock = env.threads.reentrant_lock()
        self._version = 0
        self._watching: tuple[Callable[[], None], ...] = ()
        self._ended: LakeheadError | None = None

    def notify(self) -> None:
        """Wake everyone who waits."""
        with self._lock:
            self._version += 1
            watching = self._watching
        self._changed.notify_all()
        for call in watching:
            call()

    @property
    def version(self) -> int:
        """Grows with every progress of any tablet; read it before looking, then `wait`."""
        return self._version

    def wait(self, version: int, gone: Callable[[], bool], seconds: float, check_seconds: float = 1.0) -> None:
        """Return once there was progress since ``version``, after that time, or on ``gone()``, which is asked now and
        then.

        Raises:
            ClosedError: as `require_going`.
        """
        end = self._clock.monotonic() + seconds
        self._changed.wait_for(
            lambda: self._version != version or self._ended is not None or gone() or self._clock.monotonic() >= end,
            min(seconds, check_seconds),
        )
        self.require_going()

    def watch(self, call: Callable[[], None]) -> Callable[[], None]:
        """Have this called by whoever makes progress, while writers wait: it returns at once, and raises nothing.

        Returns:
            what ends that.
        """
        with self._lock:
            self._watching = (*self._watching, call)

        def end() -> None:
            with self._lock:
                self._watching = tuple(c for c in self._watching if c is not call)

        return end

    def end(self, reason: LakeheadError) -> None:
        """There is no progress any more; `wait` raises this from now on."""
        self._ended = reason
        self.notify()

    def require_going(self) -> None:
        """Raises: ClosedError: the server is closing, or the table was dropped."""
        if self._ended is not None:
            raise self._ended
