"""The Python of Spark's workers: whether it is the driver's, with what is installed for that, and how it begins."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import site
import sys

from lakehead.spark import lone_worker

_NAME = "python"
_BEGIN = """#!/bin/sh
# Spark puts its own modules first, as archives, whose modules are compiled anew by each process: half a second of the
# start of a stream. They are installed as files, too.
kept=
IFS=:
set -f
for entry in $PYTHONPATH; do
  case "$entry" in
    {home}/python/lib/*.zip | {home}/jars/*) ;;
    *) kept="$kept${{kept:+:}}$entry" ;;
  esac
done
unset IFS
# One that is started alone connects to Spark before it loads anything.
if [ "$1" = -m ] && [ -n "${{{connected_to}}}" ]; then
  set -- -P {lone_worker} "$@"
fi
PYTHONPATH="$kept" exec {python} "$@"
"""
_quick: set[str] = set()
"""Commands that begin the driver's own Python."""


def is_own_python(command: str) -> bool:
    """Whether a command is the Python that runs this, with what is installed for it."""
    if command in _quick:
        return True
    found = shutil.which(command)
    # Environments share their interpreter's file: what is installed goes by where the link is.
    folders = [os.path.dirname(os.path.abspath(path)) for path in (found or "", sys.executable)]
    return found is not None and folders[0] == folders[1] and os.path.samefile(found, sys.executable)


def quick_python(folder: str) -> str:
    """A command that begins this Python with Spark's modules as they are installed; ``sys.executable`` where a process
    that begins anew would find others, or none, or may run nothing in this folder, which is to be this user's alone."""
    home = _installed("pyspark")
    if os.name != "posix" or home is None or _installed("py4j") is None:
        return sys.executable
    path = os.path.join(folder, _NAME)
    with open(path, "w", encoding="utf-8") as script:
        own = {"home": home, "python": sys.executable, "lone_worker": lone_worker.__file__}
        script.write(
            _BEGIN.format(connected_to=lone_worker.CONNECTED_TO, **{k: shlex.quote(v) for k, v in own.items()})
        )
    os.chmod(path, 0o700)
    if not os.access(path, os.X_OK):  # of a file system that says so
        return sys.executable
    _quick.add(path)
    return path


def _installed(package: str) -> str | None:
    """The folder of a package, where any process of this Python, with this environment, finds it there."""
    spec = importlib.util.find_spec(package)
    found = None if spec is None or spec.origin is None else os.path.dirname(os.path.abspath(spec.origin))
    if found is None or not os.path.isdir(found):
        return None
    places = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    places += [*([site.getusersitepackages()] if site.ENABLE_USER_SITE else []), *site.getsitepackages()]
    first = next((p for p in places if os.path.exists(os.path.join(p, package, "__init__.py"))), None)
    return found if first is not None and os.path.samefile(os.path.join(first, package), found) else None
