"""Are there known vulnerabilities in what the lock installs? `make audit ADVISORIES=all.zip`

Advisories are a folder, or a zip file, of OSV records as JSON. No package of the registry ships current ones, and
nothing is asked of the network: without advisories, or with old ones, it says that it could not tell, which is no
success.

    exit code 0  none is known
              1  some are
              2  it could not tell
"""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from scripts.locked import LOCK, Package, read_lock

OLD = timedelta(days=14)
WHERE = (
    "get https://osv-vulnerabilities.storage.googleapis.com/PyPI/all.zip, or any folder of OSV records as JSON, and run"
    " make audit ADVISORIES=all.zip"
)
NONE_KNOWN, SOME_KNOWN, COULD_NOT_TELL = 0, 1, 2


@dataclass(frozen=True)
class Finding:
    """A vulnerability of a locked package."""

    package: Package
    id: str
    names: frozenset[str]
    fixed: tuple[str, ...]
    summary: str

    def __str__(self) -> str:
        also = ", ".join(sorted(self.names - {self.id}))
        fixed = f"fixed in {', '.join(self.fixed)}" if self.fixed else "no version is known to be fixed"
        about = f"{self.package.name} {self.package.version}: {self.id}{f' ({also})' if also else ''}"
        return f"{about}, {fixed}{f': {self.summary}' if self.summary else ''}"


def records(path: Path) -> Iterator[Mapping[str, Any]]:
    """The records of a folder or zip file.

    Raises:
        ValueError: a file of it is no record.
        OSError: it cannot be read.
    """
    if path.is_dir():
        texts: Iterable[tuple[str, bytes]] = ((str(p), p.read_bytes()) for p in sorted(path.rglob("*.json")))
    else:
        texts = _zipped(path)
    for name, text in texts:
        record = json.loads(text)
        if not isinstance(record, dict) or not isinstance(record.get("id"), str):
            raise ValueError(f"{name} is no OSV record")
        yield record


def _zipped(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(".json"):
                    yield name, archive.read(name)
    except zipfile.BadZipFile as e:
        raise ValueError(f"{path} is no zip file") from e


def findings(lock: Mapping[str, Package], advisories: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """What is known of the locked versions, each vulnerability once, by package."""
    found: list[Finding] = []
    for record in advisories:
        if record.get("withdrawn"):
            continue
        for affected in record.get("affected", []):
            of = affected.get("package", {})
            package = lock.get(canonicalize_name(str(of.get("name", ""))))
            if package is None or of.get("ecosystem") != "PyPI" or not is_affected(package.version, affected):
                continue
            names = frozenset({record["id"], *record.get("aliases", [])})
            summary = str(record.get("summary", "")).splitlines()[:1]
            found.append(Finding(package, record["id"], names, _fixed(affected), "".join(summary)))
    once: list[Finding] = []
    for one in sorted(found, key=lambda f: (f.package.name, not f.fixed, f.id)):
        if not any(one.package == o.package and one.names & o.names for o in once):
            once.append(one)
    return once


def is_affected(version: str, affected: Mapping[str, Any]) -> bool:
    """Whether a version is among those that a record lists, or in one of its ranges. A range whose versions have no
    order that is known here holds every version: that is looked at, and not passed by."""
    own = Version(version)
    if any(_same(own, listed) for listed in affected.get("versions", [])):
        return True
    return any(_within(own, r.get("events", [])) for r in affected.get("ranges", []) if r.get("type") == "ECOSYSTEM")


def _same(version: Version, text: str) -> bool:
    try:
        return Version(text) == version
    except InvalidVersion:
        return False


def _within(version: Version, events: list[Mapping[str, str]]) -> bool:
    changes: list[tuple[Version, int, bool]] = []
    for event in events:
        for kind, text in event.items():
            if kind not in ("introduced", "fixed", "last_affected"):
                continue
            try:
                at = Version("0.dev0" if text == "0" else text)
            except InvalidVersion:
                return True
            # What was introduced in a version is in it, what was fixed is not; the last one affected is, none after it.
            changes.append((at, 1 if kind == "last_affected" else 0, kind == "introduced"))
    inside = False
    for at, after, begins in sorted(changes):
        if (at < version) if after else (at <= version):
            inside = begins
    return inside


def _fixed(affected: Mapping[str, Any]) -> tuple[str, ...]:
    events = [e for r in affected.get("ranges", []) if r.get("type") == "ECOSYSTEM" for e in r.get("events", [])]
    return tuple(sorted({e["fixed"] for e in events if "fixed" in e}))


def main(arguments: list[str], now: datetime) -> int:
    """Print what is known of the lock; returns the exit code."""
    options = argparse.ArgumentParser(prog="make audit", description="Known vulnerabilities in what the lock installs.")
    options.add_argument("--advisories", type=Path, help="folder or zip file of OSV records as JSON")
    options.add_argument("--lock", type=Path, default=LOCK)
    options.add_argument("--ignore", action="append", default=[], metavar="ID", help="one that was looked at")
    given = options.parse_args(arguments)
    lock = read_lock(given.lock.read_text())
    if given.advisories is None:
        print(
            f"audit: could not tell whether the {len(lock)} packages are vulnerable: there are no advisories; {WHERE}"
        )
        return COULD_NOT_TELL
    try:
        advisories = list(records(given.advisories))
    except (OSError, ValueError) as e:
        print(f"audit: could not tell: {e}; {WHERE}")
        return COULD_NOT_TELL
    if not advisories:
        print(f"audit: could not tell: {given.advisories} has no records; {WHERE}")
        return COULD_NOT_TELL
    found = findings(lock, advisories)
    for one in found:
        print(f"audit: {one}{' (ignored)' if one.names & set(given.ignore) else ''}")
    newest = max(str(r.get("modified", "")) for r in advisories)
    told = f"{len(lock)} packages, {len(advisories):,} advisories up to {newest[:10] or 'an unknown day'}"
    if any(not one.names & set(given.ignore) for one in found):
        print(f"audit: vulnerabilities are known ({told})")
        return SOME_KNOWN
    if newest < (now - OLD).isoformat():
        print(f"audit: could not tell: the advisories are old ({told}); {WHERE}")
        return COULD_NOT_TELL
    print(f"audit: no vulnerability is known ({told})")
    return NONE_KNOWN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], datetime.now(UTC)))
