"""Results of `lakehead bench` as a file, and what moved since another."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from lakehead.benchmarks.events import Figure
from lakehead.env.storage import storage_errors
from lakehead.errors import InvalidRequestError

_PACKAGES = ("lakehead", "pyarrow", "numpy", "duckdb", "pyiceberg", "pyspark", "rocksdict", "redis")
MOVED = 1.5
"""A ratio that is so many times another has moved: timings of one machine differ by less, mostly."""


@dataclass(frozen=True)
class Results:
    """What one run measured.

    Attributes:
        rows: of each measurement, unless its name says otherwise.
        machine: what it ran on and with, by name.
        figures: by part, in the order of the run.
    """

    rows: int
    machine: dict[str, str]
    figures: dict[str, list[Figure]]

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a file.

        Raises:
            StorageError: the disk refused.
        """
        with storage_errors(str(path), "write"):
            Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Results:
        """Read a file.

        Raises:
            InvalidRequestError: it is none, or not one of results.
        """
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as e:
            raise InvalidRequestError(
                f"{path} has no results: name a file that `lakehead bench --save` has written ({e})", path=str(path)
            ) from e


def check_place(path: str) -> None:
    """Look whether results can be written there, before minutes are spent on them.

    Raises:
        InvalidRequestError: they cannot.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        wrong = "is a folder"
    elif not os.path.isdir(folder):
        wrong = f"is in a folder that is not there, {folder}"
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        wrong = "cannot be written to"
    else:
        return
    raise InvalidRequestError(f"{path} {wrong}: name a file that the results can be written to", path=path)


def this_machine() -> dict[str, str]:
    """Cores, memory and versions."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    told = {
        "cores": str(os.cpu_count()),
        "memory": f"{pages / (1 << 30):.0f} GiB",
        "processor": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            told[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return told


def moved(before: Results, now: Results) -> list[tuple[str, float, float]]:
    """Figures of both whose ratio is not what it was, nor near: name, ratio before, and now."""
    known = {(part, f.name): f.ratio for part, figures in before.figures.items() for f in figures}
    out = []
    for part, figure in ((part, f) for part, figures in now.figures.items() for f in figures):
        then = known.get((part, figure.name))
        if then and figure.ratio and not 1 / MOVED < figure.ratio / then < MOVED:
            out.append((figure.name, then, figure.ratio))
    return out


def moved_lines(changes: Sequence[tuple[str, float, float]], path: str, *, before: int, now: int) -> list[str]:
    """What `moved` found, for people; ``before`` and ``now`` are the rows of both."""
    other = [f"{path} is of {before:,} rows, this of {now:,}: ratios differ for that, too"] if before != now else []
    if not changes:
        return [*other, f"no ratio is {MOVED} times what it is in {path}, or less than its part"]
    lines = [f"  {name:<60} {then:8.2f} -> {ratio:8.2f}" for name, then, ratio in changes]
    return [*other, f"moved since {path}:", *lines]
