"""Processes that a benchmark starts and that speak in lines: one that ends too early is an error with what it said."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO

from lakehead.errors import UnavailableError

_STOP_SECONDS = 30.0
_TOLD_CHARACTERS = 2000


class Child:
    """A process that runs; made by `child`."""

    def __init__(self, name: str, process: subprocess.Popen[str], errors: IO[str]) -> None:
        self._name, self._process, self._errors = name, process, errors

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def line(self, having: str = "") -> str:
        """The next line of its standard output that has this text in it; those before it are skipped.

        Raises:
            UnavailableError: it ended without.
        """
        assert self._process.stdout is not None
        skipped = []
        for line in self._process.stdout:
            if having in line:
                return line.strip()
            skipped.append(line)
        code = self._process.wait()
        self._errors.seek(0)
        said = ("".join(skipped) + self._errors.read()).strip()[-_TOLD_CHARACTERS:]
        raise UnavailableError(f"{self._name} ended with {code} before it was ready: {said or 'it said nothing'}")

    def tell(self, line: str = "") -> None:
        """Write a line to its standard input.

        Raises:
            UnavailableError: it has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except BrokenPipeError as e:
            raise UnavailableError(f"{self._name} ended with {self._process.wait()} before it was told to") from e


@contextlib.contextmanager
def child(name: str, command: Sequence[str], *, stop: signal.Signals = signal.SIGTERM) -> Iterator[Child]:
    """Run a command until the ``with`` block is left; then it gets that signal, and if it does not end, SIGKILL."""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            yield Child(name, process, errors)
        finally:
            process.send_signal(stop)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it ended with something unread
                process.stdin.close()
