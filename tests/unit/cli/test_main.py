"""The command line's frame: options, exit codes, errors in both forms, what ``--help`` loads."""

from __future__ import annotations

import errno
import io
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lakehead as lh
from lakehead.cli import main as cli
from lakehead.errors import ERRORS_BY_CODE, LakeheadError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run one command in this process, in an empty folder: (exit code, stdout, stderr)."""
    for name in ("LAKEHEAD_URI", "LAKEHEAD_CONFIG", "LAKEHEAD_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([str(a) for a in arguments])
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def test_help_loads_nothing_heavy() -> None:
    heavy = ("pyarrow", "numpy", "pyiceberg", "duckdb", "pyspark", "pandas", "sqlglot", "numba", "rich", "msgspec")
    code = (
        f"from lakehead.cli.main import main; import sys; main(['--help']); print(*set({heavy!r}) & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""
    for name in (
        "demo",
        "server",
        "table",
        "append",
        "upsert",
        "delete",
        "get",
        "tail",
        "sql",
        "tier",
        "lake",
        "inspect",
    ):
        assert f"\n  {name} " in done.stdout


def test_every_command_has_help(run: Run) -> None:
    for words in (
        "table create",
        "table list",
        "table describe",
        "table drop",
        "tier once",
        "tier run",
        "tier status",
        "lake compact",
        "lake expire",
        "lake orphans",
    ):
        assert run(*words.split(), "--help")[0] == 0
    for word in ["demo", "server", "append", "upsert", "delete", "get", "tail", "sql", "status", "bench"]:
        code, out, _ = run(word, "--help")
        assert code == 0 and "--uri" in out and "--output" in out
    assert run("inspect", "segment", "--help")[0] == 0


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"lakehead {lh.__version__}\n", "")


@pytest.mark.parametrize("cls", ERRORS_BY_CODE.values())
def test_each_error_kind_has_its_exit_code_and_both_forms(
    cls: type[LakeheadError], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise cls("what was wrong:\n  what to do", table="a.b", offsets=[1])

    monkeypatch.setattr(lh, "connect", fail, raising=False)
    code, out, err = run("--uri", "lakehead://h:1", "table", "list")
    assert (code, out, err) == (cls.exit_code, "", "error: what was wrong: what to do\n")
    code, out, err = run("--uri", "lakehead://h:1", "table", "list", "-o", "json")
    assert (code, out) == (cls.exit_code, "")
    assert json.loads(err) == {
        "error": {
            "code": cls.code,
            "kind": cls.__name__,
            "message": "what was wrong:\n  what to do",
            "context": {"table": "a.b", "offsets": "[1]"},
        }
    }


def test_exit_codes_tell_kinds_apart() -> None:
    kinds = [ERRORS_BY_CODE[n * 1000] for n in range(1, 7)]
    assert [k.exit_code for k in kinds] == [2, 3, 4, 5, 6, 7]


def test_unexpected_errors_are_short_and_debug_shows_where(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("boom\nsecond line")

    monkeypatch.setattr(lh, "connect", fail, raising=False)
    code, _, err = run("--uri", "lakehead://h:1", "table", "list")
    assert code == 1 and err == "error: unexpected RuntimeError: boom (--debug shows where)\n"
    code, _, err = run("--uri", "lakehead://h:1", "table", "list", "--debug")
    assert code == 1 and "Traceback" in err


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("debug", [False, True])
def test_with_json_both_streams_have_json_alone(
    fails: bool, debug: bool, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    connect = lh.connect

    def noisy(*given: Any, **more: Any) -> Any:
        logging.getLogger("lakehead.env").warning("others can look into %s\n", "it")
        logging.getLogger("another.library").error("\x1b[31mred")
        warnings.showwarning(UserWarning("old"), UserWarning, "a.py", 1)
        if fails:
            raise RuntimeError("boom")
        return connect(*given, **more)

    monkeypatch.setattr(lh, "connect", noisy, raising=False)
    arguments = ["--uri", str(tmp_path), "table", "list", "-o", "json", *(["--debug"] if debug else [])]
    code, out, err = run(*arguments)
    told = [json.loads(line) for line in err.splitlines()]
    assert code == int(fails) and [json.loads(line) for line in out.splitlines()] == ([] if fails else [[]])
    assert [next(iter(t)) for t in told] == ["warning"] * 3 + [*(["error"] if fails else [])]
    assert told[0] == {"warning": {"message": "others can look into it\n"}} and "\x1b" not in err
    assert not fails or ("boom" in str(told[-1]["error"].get("traceback"))) == debug


def test_what_the_demo_needs_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lakehead.demo.check", "lakehead.demo.run"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert run("demo") == (2, "", "error: the demo needs pandas: pip install 'lakehead[demo]'\n")


def test_a_round_of_all_tables_says_when_there_is_none(run: Run) -> None:
    assert run("table", "create", "web.clicks", "--schema", "n bigint")[0] == 0
    assert run("tier", "once", "--all") == (0, "no table has a lake: see `lakehead table create --lake`\n", "")
    assert run("tier", "once", "--all", "-o", "json") == (0, "", "")


@pytest.mark.parametrize("command", [("tier", "once"), ("table", "describe"), ("lake", "compact")])
def test_what_is_not_there_is_told_in_commands(command: tuple[str, str], run: Run) -> None:
    run("table", "create", "shop.o", "--schema", "id bigint")
    code, _, err = run(*command, "zzz")
    assert (code, err) == (2, "error: there is no table default.zzz: see `lakehead table list`, or create it\n")
    if command != ("table", "describe"):
        code, _, err = run(*command, "shop.o", "-o", "json")
        assert code == 2 and "has no lake: create it with --lake iceberg" in json.loads(err)["error"]["message"]


class _Full(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("command", [("table", "list"), ("--version",), ("--help",)])
def test_output_to_a_full_disk_is_told(command: tuple[str, ...], run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("table", "create", "a.t", "--schema", "id bigint")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", _Full())
        assert run(*command) == (3, "", "error: the output cannot be written: No space left on device\n")
        patch.setattr(sys, "stderr", _Full())
        assert run(*command)[0] == 3


def test_interrupt_is_quiet(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lh, "connect", fail, raising=False)
    assert run("--uri", "lakehead://h:1", "table", "list") == (130, "", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tabel"], "No such command 'tabel'"),
        (["table", "lst"], "Did you mean 'list'"),
        (["append"], "Missing argument 'TABLE'"),
        (["get", "a.b", "1", "--bogus"], "No such option: --bogus"),
        (["table", "list", "-o", "xml"], "'xml'"),
        (["append", "a.b", "x", "--format", "xls"], "'xls'"),
    ],
)
def test_misuse_is_one_line_and_says_where_help_is(arguments: list[str], words: str, run: Run) -> None:
    code, out, err = run(*arguments)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert words in err and "--help" in err
    code, _, err = run("-o", "json", *arguments)
    assert code == 2 and json.loads(err)["error"]["kind"] == "InvalidRequestError"


def test_no_command_shows_help(run: Run) -> None:
    for group in ((), ("table",), ("tier",), ("lake",)):
        code, out, err = run(*group)
        assert code == 0 and err == "" and "Commands:" in out and out.count("\n") > 5


def test_uri_before_after_and_from_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    created = run("--uri", "one", "table", "create", "a.t", "--schema", "id bigint")
    assert created == (0, "created a.t: log table, 1 bucket\n", "")
    assert run("table", "list", "--uri", "one")[:2] == (0, "a.t\n")
    monkeypatch.setenv("LAKEHEAD_URI", str(tmp_path / "one"))
    assert run("table", "list", "-o", "json")[:2] == (0, '["a.t"]\n')
    assert run("--uri", "two", "table", "list")[0] == 2


def test_a_missing_folder_is_not_made_by_reading(run: Run, tmp_path: Path) -> None:
    for words in (["status"], ["table", "list"], ["sql", "select 1"], ["append", "a.b", "x.csv"]):
        code, _, err = run(*words)
        assert code == 2 and "there is no data folder ./data" in err
    assert list(tmp_path.iterdir()) == []


def test_configuration_reaches_an_embedded_lake(run: Run, tmp_path: Path) -> None:
    catalog = f'{{type = "sql", uri = "sqlite:///{tmp_path}/other.db", warehouse = "file://{tmp_path}/warehouse"}}'
    (tmp_path / "l.toml").write_text(f'[lake]\nname = "mine"\ncatalog = {catalog}\n')
    config = ("--config", "l.toml")
    assert run(*config, "table", "create", "a.t", "--schema", "id bigint", "--lake", "iceberg")[0] == 0
    assert (tmp_path / "other.db").exists()
    (tmp_path / "bad.toml").write_text("[lake]\nnmae = 'x'\n")
    code, _, err = run("--config", "bad.toml", "table", "list")
    assert code == 2 and "did you mean 'name'?" in err
    assert run("--config", "none.toml", "table", "list")[0] == 2
