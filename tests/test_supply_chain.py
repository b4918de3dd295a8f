"""What the lock installs is known, whole and hashed; known vulnerabilities are found, and nobody is told that there are
none who could not know."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import audit, sbom
from scripts.locked import LOCK, ROOT, brought, project, read_lock

NOW = datetime(2026, 11, 1, tzinfo=UTC)
SHA = "a" * 64


def affected(*events: dict[str, str], versions: tuple[str, ...] = (), kind: str = "ECOSYSTEM") -> dict[str, Any]:
    ranges = [{"type": kind, "events": list(events)}] if events else []
    return {"package": {"ecosystem": "PyPI", "name": "PyArrow"}, "ranges": ranges, "versions": list(versions)}


def record(*parts: dict[str, Any], id: str = "PYSEC-1", modified: str = "2026-10-30T00:00:00Z", **more: Any) -> Any:
    return {"id": id, "modified": modified, "affected": list(parts), **more}


@pytest.mark.parametrize(
    ("events", "inside", "outside"),
    [
        ([{"introduced": "0"}, {"fixed": "1.5"}], ["0.1", "1.4.9", "1.5rc1", "1.5.dev1"], ["1.5", "1.5.post1", "2"]),
        ([{"introduced": "1.0"}, {"last_affected": "1.5"}], ["1.0", "1.5"], ["0.9", "1.5.1", "1.0rc1"]),
        ([{"introduced": "2"}, {"fixed": "3"}, {"introduced": "1"}, {"fixed": "1.2"}], ["1.1", "2.9"], ["1.2", "3"]),
        ([{"introduced": "1.10"}], ["1.10", "99"], ["1.9"]),
        ([{"introduced": "0"}, {"fixed": "which one"}], ["1.0"], []),
    ],
)
def test_ranges(events: list[dict[str, str]], inside: list[str], outside: list[str]) -> None:
    assert [v for v in inside + outside if audit.is_affected(v, affected(*events))] == inside


def test_lists_of_versions_and_other_kinds() -> None:
    listed = affected(versions=("1.0", "not one", "1.2.0"))
    assert [v for v in ("1", "1.1", "1.2") if audit.is_affected(v, listed)] == ["1", "1.2"]
    assert not audit.is_affected("1.0", affected({"introduced": "0"}, kind="GIT"))


def lock_of(version: str = "14.0.0") -> str:
    return f"pyarrow=={version} \\\n    --hash=sha256:{SHA}\n    # via -r requirements/dev.in\n"


def audited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *records: Any, lock: str = "", more: tuple[str, ...] = ()
) -> tuple[int, str]:
    folder = tmp_path / "osv"
    folder.mkdir(exist_ok=True)
    for n, one in enumerate(records):
        (folder / f"{n}.json").write_text(json.dumps(one))
    (tmp_path / "a.lock").write_text(lock or lock_of())
    code = audit.main(["--advisories", str(folder), "--lock", str(tmp_path / "a.lock"), *more], NOW)
    return code, capsys.readouterr().out


BAD = affected({"introduced": "0"}, {"fixed": "14.0.1"})


def test_a_vulnerable_package_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = (
        record(BAD, aliases=["GHSA-1", "CVE-1"], summary="runs code\nand more"),
        record(affected({"introduced": "0"}), id="GHSA-1", aliases=["CVE-1"]),
    )
    code, told = audited(tmp_path, capsys, *both)
    assert code == audit.SOME_KNOWN and told.count("pyarrow 14.0.0") == 1
    assert "PYSEC-1 (CVE-1, GHSA-1), fixed in 14.0.1: runs code\n" in told
    code, told = audited(tmp_path, capsys, more=("--ignore", "CVE-1"))
    assert code == audit.NONE_KNOWN and "(ignored)" in told
    assert audited(tmp_path, capsys, lock=lock_of("14.0.1"))[0] == audit.SOME_KNOWN, "the other one says so"


def test_none_is_said_only_of_what_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = record({**BAD, "package": {"ecosystem": "npm", "name": "pyarrow"}}, id="GHSA-2")
    code, told = audited(tmp_path, capsys, other, record(BAD, withdrawn="2026-01-01T00:00:00Z"))
    assert code == audit.NONE_KNOWN and "no vulnerability is known (1 packages, 2 advisories up to 2026-10-30)" in told
    for path in (tmp_path / "osv").iterdir():
        path.unlink()
    old = record(BAD, modified="2026-09-01T00:00:00Z")
    code, told = audited(tmp_path, capsys, old, lock=lock_of("99"))
    assert code == audit.COULD_NOT_TELL and "are old" in told
    assert audited(tmp_path, capsys, old)[0] == audit.SOME_KNOWN


def test_without_advisories_it_could_not_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.zip").write_bytes(b"no zip")
    (tmp_path / "list").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "list" / "a.json").write_text("[]")
    cases = ["a.zip", "list", "empty", "missing.zip"]
    for arguments in ([], *(["--advisories", str(tmp_path / case)] for case in cases)):
        assert audit.main(arguments, NOW) == audit.COULD_NOT_TELL
        assert "could not tell" in capsys.readouterr().out


def test_a_zip_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("PYSEC-1.json", json.dumps(record(BAD)))
    (tmp_path / "a.lock").write_text(lock_of())
    arguments = ["--advisories", str(tmp_path / "all.zip"), "--lock", str(tmp_path / "a.lock")]
    assert audit.main(arguments, NOW) == audit.SOME_KNOWN
    assert "PYSEC-1, fixed in 14.0.1" in capsys.readouterr().out


def test_as_make_runs_it() -> None:
    done = subprocess.run([sys.executable, "-m", "scripts.audit"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == audit.COULD_NOT_TELL and "could not tell" in done.stdout


@pytest.mark.parametrize(
    "text",
    [
        "pyarrow>=14\n",
        "pyarrow==14.0.0\n",
        f"{lock_of()}{lock_of()}",
        f"{lock_of()}    --no-binary\n",
        "-r other.txt\n",
        "pyarrow @ https://example.org/a.whl\n",
        f"pyarrow==14.0.0 \\\n    --hash=md5:{SHA}\n",
    ],
)
def test_a_lock_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="lock"):
        read_lock(text)


def test_the_lock_is_what_the_wheel_asks_for() -> None:
    lock = read_lock(LOCK.read_text())
    texts = [*project()["dependencies"], *(r for rs in project()["optional-dependencies"].values() for r in rs)]
    names = {canonicalize_name(Requirement(t).name) for t in texts} - {"lakehead"}
    assert names <= brought(lock, [t for t in texts if not t.startswith("lakehead")]) <= set(lock)
    for wanted in ("pyarrow==1.*", "nothing-of-that-name"):
        with pytest.raises(ValueError, match="make lock"):
            brought(lock, [wanted])


def test_the_sbom_is_whole_and_the_same_each_time(tmp_path: Path) -> None:
    assert sbom.main([str(tmp_path / "a.json")]) == sbom.main([str(tmp_path / "b.json")]) == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    made = json.loads((tmp_path / "a.json").read_text())
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.6")
    parts = {c["name"]: c for c in made["components"]}
    lock = read_lock(LOCK.read_text())
    assert {"pyarrow", "pyiceberg", "duckdb", "pydantic"} <= {n for n, c in parts.items() if c["scope"] == "required"}
    assert {"pyspark", "py4j", "pyjwt", "cryptography"} <= {n for n, c in parts.items() if c["scope"] == "optional"}
    assert not {"pytest", "ruff", "mypy", "hypothesis"} & set(parts), "tools are not brought"
    for name, part in parts.items():
        assert part["version"] == lock[name].version and part["purl"] == f"pkg:pypi/{name}@{part['version']}"
        assert {h["content"] for h in part["externalReferences"][0]["hashes"]} == set(lock[name].hashes)
    refs = [made["metadata"]["component"]["bom-ref"], *(c["bom-ref"] for c in made["components"])]
    assert len(set(refs)) == len(refs)
    assert [d["ref"] for d in made["dependencies"]] == refs
    reached, left = set(), [refs[0]]
    children = {d["ref"]: d["dependsOn"] for d in made["dependencies"]}
    while left:
        ref = left.pop()
        if ref not in reached:
            reached.add(ref)
            left += children[ref]
    assert reached == set(refs), "each is there because something asks for it"
