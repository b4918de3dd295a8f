"""The Java runtime that Spark needs: found and checked before anything is started."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from lakehead.errors import MissingDependencyError

JAVA_MIN = 17
_VFORK_VERSION_MAX = 25
_ANSWER_SECONDS = 30
_INSTALL = (
    "install one (Debian and Ubuntu: apt-get install openjdk-17-jre-headless; macOS: brew install openjdk@17;"
    " elsewhere any Java 17 or newer) and set JAVA_HOME or PATH to it"
)
_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')


@dataclass(frozen=True)
class Java:
    """A Java runtime: its executable, the home that Spark's launcher wants, and its major version."""

    executable: str
    home: str
    version: int

    @property
    def options(self) -> tuple[str, ...]:
        """What makes it start processes in half the time, without a helper program in between: Spark has ``chmod`` run
        for each of the two files of a micro-batch. Only where it is known to be taken, as Java ends at what is not."""
        knows = sys.platform == "linux" and self.version <= _VFORK_VERSION_MAX
        return ("-Djdk.lang.Process.launchMechanism=VFORK",) if knows else ()


def find_java() -> Java:
    """The first runtime of `JAVA_HOME` and ``PATH`` that Spark can use.

    Raises:
        MissingDependencyError: there is none, or all are too old; the message says what to install.
    """
    seen = []
    for executable in _candidates():
        version = _version_of(executable)
        if version is not None and version >= JAVA_MIN:
            return Java(executable, os.path.dirname(os.path.dirname(os.path.realpath(executable))), version)
        seen.append(f"{executable} is {f'Java {version}' if version else 'no working Java'}")
    found = f" ({'; '.join(seen)})" if seen else ""
    raise MissingDependencyError(f"Spark needs a Java {JAVA_MIN}+ runtime, and none was found{found}: {_INSTALL}")


def parse_java_version(text: str) -> int | None:
    """Major version that ``java -version`` reports (``1.8.0`` is 8); None when it reports none."""
    found = _VERSION.search(text)
    if found is None:
        return None
    major = int(found[1])
    return int(found[2] or 0) if major == 1 else major


def _candidates() -> Iterator[str]:
    home = os.environ.get("JAVA_HOME")
    if home:
        yield os.path.join(home, "bin", "java")
    on_path = shutil.which("java")
    if on_path:
        yield on_path


def _version_of(executable: str) -> int | None:
    try:
        answer = subprocess.run(
            [executable, "-version"], capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_java_version(answer.stderr + answer.stdout) if answer.returncode == 0 else None
