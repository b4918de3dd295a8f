"""The server of the shop's tables: ``python -m examples.shop.server FOLDER``, until its standard input ends.

It is ``lakehead server``, but that none is left behind when whoever started it is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from lakehead.cli.main import run


def main() -> None:
    # Not for the thread that waits for the input: the server takes the signal, and closes its folder.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_the_input, daemon=True).start()
    run("-o", "json", "server", "--data")


def _end_with_the_input() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
