"""A Python process that Spark starts alone, as for each streaming source (``python -P lone_worker.py -m module``).

Spark gives up on one that has not connected after ten seconds, which nothing configures, and its modules connect when
all that they need is loaded: half a second of computing, which is ten where many processes share the cores. Run as a
file, which loads nothing of this package; connects first, then runs the module as ``python -m`` does.
"""

from __future__ import annotations

import importlib
import os
import runpy
import socket
import sys
from typing import Any

CONNECTED_TO = "PYTHON_WORKER_FACTORY_SOCK_PATH"
"""Where Spark has such a process connect to, where that is a Unix socket; workers that a daemon forks have none."""
_BUFFER_BYTES = 65536


def run(address: str, module: str) -> None:
    """Connect to Spark, and run a module that takes this connection for its own; errors are those of the module."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Who is gone, or has given up, is told of by the module, which asks for a connection of its own then.
    connected = connection.connect_ex(address) == 0
    util: Any = importlib.import_module("pyspark.util")
    connect = util.local_connect_and_auth

    def connect_once(where: str | int | None, secret: str | None) -> tuple[Any, socket.socket]:
        nonlocal connected
        if where != address or not connected:
            return connect(where, secret)
        connected = False
        # As PySpark has it where it connects itself.
        connection.settimeout(int(os.environ.get("SPARK_AUTH_SOCKET_TIMEOUT", 15)))
        size = int(os.environ.get("SPARK_BUFFER_SIZE", _BUFFER_BYTES))
        return connection.makefile("rwb", size), connection

    util.local_connect_and_auth = connect_once
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, os.getcwd())  # and not the folder of this file, whose modules have names of Python's own
    del sys.argv[1]  # -m; the rest is as it is for the module
    run(os.environ[CONNECTED_TO], sys.argv.pop(1))
