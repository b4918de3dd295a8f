"""The lock (requirements/dev.lock) as values: what is installed, who asks for it, and the hashes of its files."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements" / "dev.lock"
PROJECT = ROOT / "pyproject.toml"
_PIN = re.compile(r"([A-Za-z0-9._-]+)==(\S+?)(?:\s*;\s*(.+?))?(?:\s*\\)?")


@dataclass(frozen=True)
class Package:
    """One version of one package.

    Attributes:
        name: normalized.
        marker: where it is installed; no text for everywhere.
        hashes: SHA-256 of each of its files that may be installed.
        parents: normalized names of the packages that ask for it.
    """

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]
    parents: frozenset[str]


def read_lock(text: str) -> dict[str, Package]:
    """Packages of a lock by name.

    Raises:
        ValueError: a line is none that is known here; nothing is passed by.
    """
    found: dict[str, Package] = {}
    pin: re.Match[str] | None = None
    hashes: list[str] = []
    parents: set[str] = set()

    def end() -> None:
        if pin is not None:
            name = canonicalize_name(pin[1])
            if name in found:
                raise ValueError(f"the lock has {name} twice")
            if not hashes:
                raise ValueError(f"the lock has no hash of {name}")
            found[name] = Package(name, pin[2], pin[3] or "", tuple(hashes), frozenset(parents))

    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if not line[0].isspace():
            if line.startswith("#"):
                continue
            end()
            pin = _PIN.fullmatch(line)
            hashes, parents = [], set()
            if pin is None:
                raise ValueError(f"line {number} of the lock is no package with its version: {line!r}")
        elif one := re.fullmatch(r"\s+--hash=sha256:([0-9a-f]{64})(?:\s*\\)?", line):
            hashes.append(one[1])
        elif via := re.fullmatch(r"\s+#\s+(?:via\s+)?(\S.*)", line):
            if via[1] != "via" and not via[1].startswith("-"):
                parents.add(canonicalize_name(via[1]))
        else:
            raise ValueError(f"line {number} of the lock is unknown: {line!r}")
    end()
    return found


def project() -> Mapping[str, Any]:
    """What pyproject.toml says of the project."""
    found: Mapping[str, Any] = tomllib.loads(PROJECT.read_text())["project"]
    return found


def brought(lock: Mapping[str, Package], wanted: Iterable[str]) -> set[str]:
    """Names of what is installed for these requirements, by whatever is asked for in turn.

    Raises:
        ValueError: the lock lacks one, or has another version of it.
    """
    children: dict[str, set[str]] = {}
    for package in lock.values():
        for parent in package.parents:
            children.setdefault(parent, set()).add(package.name)
    found: set[str] = set()
    left = []
    for text in wanted:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name not in lock:
            raise ValueError(f"the lock lacks {text}: make lock")
        if not requirement.specifier.contains(lock[name].version, prereleases=True):
            raise ValueError(f"the lock has {name} {lock[name].version}, which is not {text}: make lock")
        left.append(name)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += children.get(name, ())
    return found
