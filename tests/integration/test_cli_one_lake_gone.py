"""What one table's lake keeps from being told or done, commands tell and do of all others."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from tests.integration.test_cli import lakehead

import lakehead as lh


@pytest.fixture
def uri(tmp_path: Path) -> list[str]:
    """How commands find tables `s.a` to `s.c`, which have rows that the lake lacks, and `s.log`; the lake table of
    `s.b` was dropped there."""
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/shared.db", "warehouse": f"file://{tmp_path}/warehouse"}
    with lh.connect(tmp_path / "data", lake=lh.LakeConfig(name="w", catalog=catalog)) as con:
        for name in ("s.a", "s.b", "s.c"):
            table = con.create_table(name, {"id": "int64"}, lake="iceberg")
            table.append([{"id": 1}])
            con.tier(name)
            table.append([{"id": 2}, {"id": 3}])
        con.create_table("s.log", {"id": "int64"})
    with closing(SqlCatalog("w", uri=catalog["uri"], warehouse=catalog["warehouse"])) as shared:
        shared.drop_table("s.b")
    settings = tmp_path / "lakehead.toml"
    told = ", ".join(f"{name} = {json.dumps(value)}" for name, value in catalog.items())
    settings.write_text(f'[lake]\nname = "w"\ncatalog = {{{told}}}\n')
    settings.chmod(0o600)
    return ["--config", str(settings), "--uri", str(tmp_path / "data")]


def test_tables_are_told_but_for_one(uri: list[str]) -> None:
    def told(*words: str) -> dict[str, int | None]:
        done = lakehead(*uri, *words, "-o", "json", code=5)
        assert json.loads(done.stderr)["error"]["kind"] == "LakeStateError" and b"s.b" in done.stderr
        return {t["table"]: t["lag_rows"] for t in json.loads(done.stdout)["tables"]}

    assert told("status") == {"s.a": 2, "s.c": 2, "s.log": None}
    assert told("tier", "status") == {"s.a": 2, "s.c": 2}
    for words in (["status"], ["tier", "status"], ["tier", "status", "--files"]):
        done = lakehead(*uri, *words, code=5)
        assert b"s.a" in done.stdout and b"s.c" in done.stdout and b"error: table s.b" in done.stderr
    (look,) = map(json.loads, lakehead(*uri, "top", "--times", "1", "-o", "json", code=5).stdout.splitlines())
    assert [t["table"] for t in look["tables"]] == ["s.a", "s.c", "s.log"]
    assert [(e["table"], e["kind"]) for e in look["errors"]] == [("s.b", "LakeStateError")]
    shown = lakehead(*uri, "top", "--times", "1", code=5).stdout
    assert b"s.c" in shown and b"table s.b has no table" in shown


def test_rounds_are_done_but_for_one(uri: list[str]) -> None:
    def lacks() -> dict[str, int | None]:
        tables = json.loads(lakehead(*uri, "status", "-o", "json", code=5).stdout)["tables"]
        return {t["table"]: t["lag_rows"] for t in tables}

    lakehead(*uri, "tier", "run", "--local", "--table", "s.a", "--until-idle")
    assert lacks() == {"s.a": 0, "s.c": 2, "s.log": None}
    done = lakehead(*uri, "tier", "once", "--all", code=5)
    assert b"s.a: nothing to move" in done.stdout and b"s.c: 2 rows" in done.stdout
    assert b"error: table s.b" in done.stderr
    assert lacks() == {"s.a": 0, "s.c": 0, "s.log": None}
    done = lakehead(*uri, "tier", "run", "--local", "--until-idle", code=5)
    assert b"error: table s.b" in done.stderr, "which would never be idle"


def test_of_several_each_is_told(uri: list[str], tmp_path: Path) -> None:
    with closing(SqlCatalog("w", uri=f"sqlite:///{tmp_path}/shared.db", warehouse=f"file://{tmp_path}/w")) as shared:
        shared.drop_table("s.c")
    done = lakehead(*uri, "status", "-o", "json", code=5)
    first, second = map(json.loads, done.stderr.splitlines())
    assert "s.c" in first["warning"]["message"] and first["warning"]["message"] != second["error"]["message"]
    assert "s.b" in second["error"]["message"]
