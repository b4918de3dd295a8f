"""A real browser without a window: Chromium, spoken to over a pair of pipes in the protocol of its developer tools."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.waiting import WAIT_SECONDS, wait_until

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")
SECONDS = 120.0


class Browser:
    """One tab of a browser of its own, whose profile lies in ``folder``; what scripts throw is in ``errors``."""

    def __init__(self, folder: Path) -> None:
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        assert program is not None, "no Chromium is installed: make browser"
        (heard, self._to), (self._from, said) = _pipe(), _pipe()
        # The protocol's descriptors are 3 and 4, which a shell can give them without a step between fork and exec.
        wanted = [
            *("bash", "-c", f'exec "$@" 3<&{heard} 4>&{said}', "bash", program, "--remote-debugging-pipe"),
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder}"),
        ]
        self.errors: list[str] = []
        self._read = b""
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        self._log = folder.with_name(f"{folder.name}.log")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(wanted, pass_fds=(heard, said), stdout=log, stderr=log)
        os.close(heard)
        os.close(said)
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        self._ask("Runtime.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait(WAIT_SECONDS)
        os.close(self._to)
        os.close(self._from)

    def open(self, url: str) -> None:
        """Go to a page, until it is loaded and its scripts have begun."""
        answer = self._ask("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        wait_until(lambda: self.ask("[location.href, document.readyState]") == [url, "complete"], SECONDS)

    def ask(self, script: str) -> Any:
        """What an expression is in the page, as JSON has it."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            said = self._next()
            if said.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(said["params"]["exceptionDetails"]))
            if said.get("id") == number:
                assert "result" in said, said
                result: dict[str, Any] = said["result"]
                return result

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._from], [], [], max(deadline - time.monotonic(), 0))
            piece = os.read(self._from, 1 << 16) if ready else b""
            assert piece, f"the browser says nothing more: {self._log.read_text(errors='replace')[-3000:]}"
            self._read += piece
        message, _, self._read = self._read.partition(b"\0")
        said: dict[str, Any] = json.loads(message)
        return said


def _pipe() -> tuple[int, int]:
    """Both ends of a pipe, numbered so that neither is in the way of 3 and 4."""
    low = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low]
    for end in low:
        os.close(end)
    return high[0], high[1]
