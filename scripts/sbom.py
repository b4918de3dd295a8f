"""What the wheel brings with it, as a CycloneDX document: `make sbom`.

Packages, versions and hashes are those of the lock, with which everything was tested; the same lock gives the same
bytes. What only an extra brings is optional.
"""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.locked import LOCK, ROOT, Package, brought, project, read_lock


def document(lock: dict[str, Package]) -> dict[str, Any]:
    """CycloneDX 1.6, as its JSON."""
    about = project()
    name, version = about["name"], about["version"]
    core: list[str] = about["dependencies"]
    extras = [r for texts in about["optional-dependencies"].values() for r in texts if Requirement(r).name != name]
    required, every = brought(lock, core), brought(lock, [*core, *extras])
    own = {
        "type": "library",
        "bom-ref": _purl(name, version),
        "name": name,
        "version": version,
        "purl": _purl(name, version),
        "description": about["description"],
        "licenses": [{"license": {"id": about["license"]}}],
    }
    parts = [_component(lock[n], required=n in required) for n in sorted(every)]
    direct = sorted({canonicalize_name(Requirement(text).name) for text in (*core, *extras)})
    depends = [{"ref": own["bom-ref"], "dependsOn": [_ref(lock[n]) for n in direct]}]
    for n in sorted(every):
        children = sorted(c for c in every if n in lock[c].parents)
        depends.append({"ref": _ref(lock[n]), "dependsOn": [_ref(lock[c]) for c in children]})
    body = {"metadata": {"component": own}, "components": parts, "dependencies": depends}
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(body, sort_keys=True))
    head = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{number}",
        "version": 1,
    }
    return {**head, **body}


def _component(package: Package, *, required: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "library",
        "bom-ref": _ref(package),
        "name": package.name,
        "version": package.version,
        "scope": "required" if required else "optional",
        "purl": _ref(package),
        "externalReferences": [
            {
                "type": "distribution",
                "url": _ref(package),
                "hashes": [{"alg": "SHA-256", "content": h} for h in package.hashes],
            }
        ],
    }
    if package.marker:
        found["properties"] = [{"name": "python:marker", "value": package.marker}]
    return found


def _ref(package: Package) -> str:
    return _purl(package.name, package.version)


def _purl(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version.replace('+', '%2B')}"


def main(arguments: list[str]) -> int:
    """Write it to the path that is given, or where wheels go."""
    made = document(read_lock(LOCK.read_text()))
    own = made["metadata"]["component"]
    path = Path(arguments[0]) if arguments else ROOT / "dist" / f"{own['name']}-{own['version']}.cdx.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made, indent=1) + "\n")
    required = sum(c["scope"] == "required" for c in made["components"])
    print(f"sbom: {path} has {required} packages, and {len(made['components']) - required} more of extras")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
