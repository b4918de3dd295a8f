"""The shop's other processes: each reads commands from its standard input, and ends when that ends, also because the
process that started it was killed."""

from __future__ import annotations

import json
import subprocess
import sys
from types import TracebackType
from typing import Any


class Child:
    """A module that runs as a process until the ``with`` block is left, or it is asked to end."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._module = module
        # In a group of its own, as Ctrl-C is for the parent, which ends its children in order. Not in a session of its
        # own: among sessions Linux may share the processor out evenly, and then no process of one gives way to another.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            process_group=0,
        )

    def answer(self) -> dict[str, Any]:
        """The next line that it prints, which is JSON.

        Raises:
            RuntimeError: it has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._module} ended with {self._process.wait()}; what it said stands above")
        found: dict[str, Any] = json.loads(line)
        return found

    def tell(self, *words: object) -> None:
        """Give it a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def ask(self, *words: object) -> dict[str, Any]:
        """Give it a command, and take its answer."""
        self.tell(*words)
        return self.answer()

    def end(self) -> None:
        """Have it end; what it prints then is still to be read."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
