"""The prose keeps its word: Python and console blocks run, tables of errors and settings equal the code.

In README.md and docs/**/*.md

- ```` ```python ```` blocks of one file run in order, in one namespace and a fresh folder;
- ```` ```python spark ```` blocks run in the same way among them, in tests marked ``spark``;
- a block that has lines ``print(...)  # text`` must print exactly these texts;
- every ``$ lakehead ...`` line of a ```` ```console ```` block must parse, and those of a ```` ```console run ````
  block must succeed, in order, in a fresh folder.

``python tests/test_docs.py`` writes the generated tables again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import inspect
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import lakehead
from lakehead import config, errors

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RFCS = [path for path in DOCS if path.parent.name == "rfcs" and path.name != "0000-template.md"]
RFC_STATUSES = {"Draft", "Accepted", "Implemented", "Superseded", "Rejected"}
COMMAND_SECONDS = 30

_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```[ \t]*$", re.M | re.S)
_PRINTED = re.compile(r"^ *print\(.*\)  # (.+)$", re.M)
_GENERATED = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block: its info string, text and first line's number in the file."""

    info: tuple[str, ...]
    text: str
    line: int


def blocks(path: Path) -> list[Block]:
    """All fenced blocks of a Markdown file, in order."""
    text = path.read_text()
    return [Block(tuple(m[1].split()), m[2], text.count("\n", 0, m.start()) + 2) for m in _FENCE.finditer(text)]


def named(path: Path) -> str:
    """The test's name for a file."""
    return path.relative_to(ROOT).as_posix()


def has(path: Path, *info: str) -> bool:
    """True when a block of the file has this info string."""
    return any(block.info == info for block in blocks(path))


# ---- Python ---------------------------------------------------------------------------------------------------------


def run_python(path: Path, found: list[Block]) -> None:
    """Run blocks in one namespace in the current folder; what they opened and left open is closed."""
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    try:
        for block in found:
            # Empty lines before the text make tracebacks name lines of the file.
            code = compile("\n" * (block.line - 1) + block.text, str(path), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, namespace)
            if expected := _PRINTED.findall(block.text):
                assert out.getvalue().splitlines() == expected, f"{named(path)}:{block.line} prints something else"
    finally:
        for value in namespace.values():
            if type(value).__name__ == "Connection":
                value.close()
            elif type(value).__name__ == "SparkSession":
                value.stop()


@pytest.fixture
def lake_addresses(
    lake_on: Callable[[str], config.LakeConfig], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Path], None]:
    """Gives a page that asks for them the addresses of servers for its lake, and the secrets."""

    def give(path: Path) -> None:
        if "CATALOG_URI" not in path.read_text():
            return
        rest = lake_on("rest").catalog
        given = {"CATALOG_URI": lake_on("postgres").catalog["uri"], "S3_ENDPOINT": rest["s3.endpoint"]}
        given |= {"S3_KEY_ID": rest["s3.access-key-id"], "S3_SECRET": rest["s3.secret-access-key"]}
        given |= {"REST_URI": rest["uri"], "REST_WAREHOUSE": rest["warehouse"], "REST_CREDENTIAL": rest["credential"]}
        for name, value in given.items():
            monkeypatch.setenv(name, value)

    return give


@pytest.mark.parametrize("path", [p for p in DOCS if has(p, "python")], ids=named)
def test_python_blocks_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lake_addresses: Callable[[Path], None]
) -> None:
    lake_addresses(path)
    monkeypatch.chdir(tmp_path)
    run_python(path, [b for b in blocks(path) if b.info == ("python",)])


@pytest.mark.spark
@pytest.mark.parametrize("path", [p for p in DOCS if has(p, "python", "spark")], ids=named)
def test_spark_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_python(path, [b for b in blocks(path) if b.info[:1] == ("python",)])


def test_every_python_block_is_run() -> None:
    known = {
        ("python",),
        ("python", "spark"),
        ("console",),
        ("console", "run"),
        ("text",),
        ("sql",),
        ("toml",),
        ("nginx",),
        (),
    }
    unknown = [f"{named(p)}:{b.line} {' '.join(b.info)}" for p in DOCS for b in blocks(p) if b.info not in known]
    assert not unknown, "blocks with an info string that no test knows"


# ---- console --------------------------------------------------------------------------------------------------------


def commands(block: Block) -> list[str]:
    """What stands behind ``$`` in a console block, continued lines joined."""
    joined = block.text.replace("\\\n", " ")
    return [line[2:] for line in joined.splitlines() if line.startswith("$ ")]


def lakehead_calls(command: str) -> Iterator[list[str]]:
    """Arguments of every ``lakehead`` in a shell line."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    call: list[str] | None = None
    for word in [*lexer, ";"]:
        if set(word) <= set("|&;<>"):
            if call is not None:
                yield call
            call = None
        elif call is not None:
            call.append(word)
        elif word == "lakehead":
            call = []


CONSOLE = [(p, b) for p in DOCS for b in blocks(p) if b.info[:1] == ("console",)]


@pytest.mark.parametrize(("path", "block"), CONSOLE, ids=[f"{named(p)}:{b.line}" for p, b in CONSOLE])
def test_console_blocks_parse(path: Path, block: Block) -> None:
    import typer

    from lakehead.cli.main import app

    root: Any = typer.main.get_command(app)
    for line in commands(block):
        for words in lakehead_calls(line):
            command, context = root, None
            rest = words
            while True:
                try:
                    context = command.make_context(command.name or "lakehead", list(rest), parent=context)
                except Exception as e:
                    # --help and --version end the parse by design.
                    if type(e).__name__ == "Exit":
                        break
                    pytest.fail(f"{named(path)}: {line!r}: {getattr(e, 'message', e)}")
                remaining = [*context._protected_args, *context.args]
                if not hasattr(command, "commands") or not remaining:
                    break
                name, command, rest = command.resolve_command(context, remaining)
                assert command is not None, f"{named(path)}: {line!r}: there is no command {name!r}"


@pytest.mark.parametrize("path", [p for p in DOCS if has(p, "console", "run")], ids=named)
def test_console_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, as starting one for each line takes seconds: ``bash`` only feeds standard input."""
    from lakehead.cli.main import main

    monkeypatch.chdir(tmp_path)
    for name in ("LAKEHEAD_URI", "LAKEHEAD_CONFIG", "LAKEHEAD_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for block in blocks(path):
        for line in commands(block) if block.info == ("console", "run") else ():
            where = f"{named(path)}:{block.line}: {line}"
            calls = list(lakehead_calls(line))
            assert len(calls) <= 1, f"{where}: one lakehead a line"
            feed = line.partition("lakehead ")[0].rstrip("| ") if calls else line
            done = subprocess.run(["bash", "-c", feed], capture_output=True, timeout=COMMAND_SECONDS, check=False)
            assert done.returncode == 0, f"{where}: {done.stderr.decode()}"
            if calls:
                words = [w for word in calls[0] for w in (glob.glob(word) or [word])]
                monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(done.stdout))))
                with contextlib.redirect_stderr(io.StringIO()) as error, contextlib.redirect_stdout(io.StringIO()):
                    code = main(words)
                assert code == 0, f"{where}: {error.getvalue()}"


# ---- tables that equal the code --------------------------------------------------------------------------------------


def first_paragraph(thing: object) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split()).replace("``", "`")


def attribute_meanings(cls: type) -> dict[str, str]:
    """Name -> text of a class docstring's ``Attributes:``."""
    lines = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2].splitlines()
    meanings: dict[str, str] = {}
    name = ""
    for line in lines:
        if found := re.match(r"    (\w+): (.*)", line):
            name, meanings[found[1]] = found[1], found[2]
        elif line.startswith("      ") and name:
            meanings[name] += " " + line.strip()
    return meanings


def written(name: str, value: object) -> str:
    """A default as users write it."""
    if value is None or isinstance(value, bool):
        return f"`{value}`"
    if name.endswith("_ms"):
        assert isinstance(value, int)
        unit, size = next((u, s) for u, s in (("d", 86_400_000), ("h", 3_600_000), ("s", 1000)) if value % s == 0)
        return f'`"{value // size}{unit}"`'
    if name.endswith("_bytes") or name.endswith("_bytes_max"):
        assert isinstance(value, int) and value % (1 << 20) == 0
        return f'`"{value >> 20}MiB"`'
    if dataclasses.is_dataclass(value):
        return "see below"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def settings_table(cls: type, *, names: str) -> str:
    """Name, default and meaning of each field of a configuration class."""
    meanings = attribute_meanings(cls)
    defaults = cls()
    rows = [f"| {names} | default | meaning |", "|---|---|---|"]
    for f in dataclasses.fields(cls):
        shown = f.name.removesuffix("_ms") if cls is config.TableProperties else f.name
        meaning = meanings[f.name].replace("|", "\\|").replace("``", "`")
        rows.append(f"| `{shown}` | {written(f.name, getattr(defaults, f.name))} | {meaning} |")
    return "\n".join(rows)


def errors_table() -> str:
    """Code, class, exit code, whether a retry may help, and meaning of each error."""
    rows = ["| code | class | exit code | retry | when |", "|---|---|---|---|---|"]
    for code, cls in sorted(errors.ERRORS_BY_CODE.items()):
        retry = "yes" if cls.retryable else "no"
        rows.append(f"| {code} | `{cls.__name__}` | {cls.exit_code} | {retry} | {first_paragraph(cls)} |")
    return "\n".join(rows)


GENERATED = {
    "errors": errors_table,
    "table-properties": lambda: settings_table(config.TableProperties, names="property"),
    "server-settings": lambda: settings_table(config.ServerConfig, names="setting"),
    "oidc-settings": lambda: settings_table(config.OidcConfig, names="setting"),
    "lake-settings": lambda: settings_table(config.LakeConfig, names="setting"),
    "limits": lambda: settings_table(config.Limits, names="limit"),
}


def regenerated(text: str) -> str:
    """The text with every generated part as the code has it now."""
    return _GENERATED.sub(lambda m: f"{m[1]}\n{GENERATED[m[2]]()}\n\n{m[3]}", text)


def test_generated_tables_equal_the_code() -> None:
    found = [m[2] for p in DOCS for m in _GENERATED.finditer(p.read_text())]
    assert sorted(found) == sorted(GENERATED)
    stale = [named(p) for p in DOCS if regenerated(p.read_text()) != p.read_text()]
    assert not stale, "run python tests/test_docs.py and commit what it changed"


def test_error_kinds_equal_the_code() -> None:
    text = (ROOT / "docs/guides/errors.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| (\d)xxx \| (\d+) \|", text, re.M)
    kinds = [(c.__name__, str(n // 1000), str(c.exit_code)) for n, c in errors.ERRORS_BY_CODE.items() if n % 1000 == 0]
    assert sorted(listed) == sorted(kinds)


@pytest.mark.parametrize("cls", errors.ERRORS_BY_CODE.values())
def test_every_error_that_is_told_can_be_caught(cls: type[errors.LakeheadError]) -> None:
    assert getattr(lakehead, cls.__name__) is cls and cls.__name__ in lakehead.__all__


# ---- RFCs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RFCS, ids=named)
def test_rfc_has_its_parts(path: Path) -> None:
    text = path.read_text()
    number = re.match(r"# RFC (\d{4}): .+\n", text)
    assert number and path.name.startswith(f"{number[1]}-"), "the first line is '# RFC <number>: <title>'"
    status = re.search(r"^- Status: (\w+)", text, re.M)
    assert status and status[1] in RFC_STATUSES, f"'- Status:' is one of {sorted(RFC_STATUSES)}"
    headings = re.findall(r"^## (.+)$", text, re.M)
    wanted = re.findall(r"^## (.+)$", (ROOT / "docs/rfcs/0000-template.md").read_text(), re.M)
    assert [h for h in headings if h in wanted] == wanted, f"the headings are {wanted}, in this order"


def test_rfc_numbers_are_consecutive() -> None:
    assert [int(p.name[:4]) for p in RFCS] == list(range(1, len(RFCS) + 1))


if __name__ == "__main__":
    for document in DOCS:
        if (before := document.read_text()) != (after := regenerated(before)):
            document.write_text(after)
            print(f"wrote {named(document)}")
