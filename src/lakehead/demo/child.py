"""A process that the demo starts, speaks with in lines of JSON, and ends, with everything that it started itself.

The child's standard input stays open as long as the demo lives: a child that reads its end stops, so that none is left
behind even when the demo is killed. A child runs in its own session: Ctrl-C reaches the demo alone, which then ends its
children in order.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any, TextIO

from lakehead.env import Clock
from lakehead.env.storage import storage_errors
from lakehead.errors import LakeheadError, UnavailableError, error_from_code

_STOP_SECONDS = 20.0
_HURRY_SECONDS = 1.0
_KILL_SECONDS = 5.0
_POLL_SECONDS = 0.05


class Child:
    """A Python module running in another process; a context manager that ends it."""

    def __init__(self, module: str, arguments: list[str], *, log_path: str, clock: Clock) -> None:
        """Start ``python -m module arguments``; what it writes to standard error goes to ``log_path``."""
        self._name, self._log_path, self._clock = f"demo-{module.rpartition('.')[2]}", log_path, clock
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue(10_000)
        self._unread: deque[dict[str, Any]] = deque(maxlen=10_000)
        with storage_errors(log_path, "write"), open(log_path, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        threading.Thread(target=self._listen, name=self._name, daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._messages.put(json.loads(line))
        self._messages.put(None)

    def tell(self, **message: object) -> None:
        """Send one message."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None

    def wait_for(self, event: str, *, seconds: float) -> dict[str, Any]:
        """The next message of that event; others are skipped.

        Raises:
            LakeheadError: the child reported this error.
            UnavailableError: it ended, or did not answer in time.
        """
        deadline = self._clock.monotonic() + seconds
        while self._unread:
            message = self._unread.popleft()
            if message["event"] == event:
                return message
        while True:
            try:
                message = self._handle(self._messages.get(timeout=max(deadline - self._clock.monotonic(), 0)))
            except queue.Empty:
                raise UnavailableError(
                    f"{self._name} did not answer within {seconds:.0f} s: see {self._log_path}", path=self._log_path
                ) from None
            if message["event"] == event:
                return message

    def raise_error(self) -> None:
        """Raise the error that the child reported, or one that says that it ended without a word."""
        while True:
            try:
                message = self._messages.get_nowait()
            except queue.Empty:
                return
            if message is None and self._unread:
                self._messages.put(None)
                return
            self._unread.append(self._handle(message))

    def _handle(self, message: dict[str, Any] | None) -> dict[str, Any]:
        if message is None:
            raise self._ended()
        if message["event"] == "error":
            error = error_from_code(message["code"], message["message"], message["context"])
            error.add_note(f"{self._name} ended; its log: {self._log_path}")
            raise error
        return message

    def _ended(self) -> UnavailableError:
        code = self._process.poll()
        return UnavailableError(
            f"{self._name} ended unexpectedly (exit code {code}): see {self._log_path}", path=self._log_path
        )

    def close(self) -> None:
        """Ask the child to stop, wait, and end by force what does not."""
        self._end(_STOP_SECONDS)

    def _end(self, patience: float) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # It has ended already, with a message unread.
            self._process.stdin.close()
        for force, seconds in ((None, patience), (signal.SIGTERM, _KILL_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
            if force is not None:
                self._signal(force)
            try:
                self._process.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                continue
        # What the child started (a JVM) is no child of ours: it can only be looked at, not waited for.
        deadline = self._clock.monotonic() + _KILL_SECONDS
        while self._signal(signal.SIGKILL) and self._clock.monotonic() < deadline:
            self._clock.sleep(_POLL_SECONDS)

    def _signal(self, number: int) -> bool:
        """Send a signal to the child's process group: the child and what it started; False when none of them lives."""
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After Ctrl-C or a failure nobody waits for a round to finish: one that is cut short has no effect.
        self._end(_STOP_SECONDS if kind is None else _HURRY_SECONDS)


# ---- in the child ---------------------------------------------------------------------------------------------


class Parent:
    """The demo, as its child speaks with it. What else is written to standard output goes to standard error."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._out: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def tell(self, event: str, **values: object) -> None:
        """Send one message. It is no error when the demo has gone and nobody listens."""
        with self._lock:
            try:
                self._out.write(json.dumps({"event": event, **values}) + "\n")
                self._out.flush()
            except OSError:
                return

    def messages(self) -> Iterator[dict[str, Any]]:
        """What the demo says, until it closes this child or ends."""
        for line in sys.stdin:
            yield json.loads(line)

    def tell_error(self, error: BaseException) -> None:
        """Report an error, with what the demo needs to raise it again."""
        known = error if isinstance(error, LakeheadError) else LakeheadError(f"{type(error).__name__}: {error}")
        context = {k: v for k, v in known.context.items() if v is None or isinstance(v, str | int | float | bool)}
        self.tell("error", code=known.code, message=known.message, context=context)
