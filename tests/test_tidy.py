"""The house rules that a machine can check: layers, purity, names, sizes, error codes, paths in prose."""

from __future__ import annotations

import ast
import functools
import inspect
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.mutation.__main__ import MUTANTS, Mutant

from lakehead.api.connection import Connection
from lakehead.errors import ERRORS_BY_CODE, LakeheadError, OutcomeUnknownError, error_from_code

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "lakehead"
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
OUTSIDE = sorted(p for folder in ("examples", "benchmarks") for p in (ROOT / folder).rglob("*.py"))

# Lowest first; names in one tuple never import each other.
LAYERS = (
    ("errors",),
    ("config",),
    ("types",),
    ("env",),
    ("predicate",),
    ("format",),
    ("log",),
    ("kv",),
    ("protocol",),
    ("server", "client"),
    ("lake",),
    ("iceberg", "tiering"),
    ("testing",),
    ("api",),
    ("spark", "rest"),
    ("demo", "benchmarks"),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
# Layers that use less than what lies below them.
NARROW = {"protocol": {"errors", "config", "types", "predicate", "format", "protocol"}}

OWNERS = {
    "duckdb": {"api"},
    "numba": {"kv"},
    "pyarrow.flight": {"server", "client"},
    "pyiceberg": {"iceberg"},
    "pyspark": {"spark"},
    "sqlglot": {"predicate"},
}
# A module that speaks with one of these imports it at its top; the one door to such modules imports them late.
AT_THE_TOP = {"duckdb", "numba", "sqlglot"}
IMPURE = {"asyncio", "concurrent", "multiprocessing", "random", "secrets", "socket", "threading", "time"}
PURE_LAYERS = {"errors", "config", "types", "predicate", "format", "log", "kv", "protocol"}
# What runs here takes clock, locks and threads from the `Env` that it is handed; transports have their own threads.
HANDED_THE_WORLD = {"server", "client", "lake", "tiering"}
OWN_THREADS = {
    "client/channel.py",
    "client/closable.py",
    "client/flight.py",
    "client/plain_socket.py",
    "client/tails.py",
    "lake/formats.py",  # once a process
    "server/deliveries.py",
    "server/flight.py",
    "server/flight_limit.py",
    "server/socket_server.py",
    "tiering/service.py",
}
PLANNER = re.compile(r"tiering/(queue|.*plan.*)\.py")
HEAVY = ("duckdb", "numba", "pandas", "polars", "pyiceberg", "pyspark", "sqlglot")
LIGHT = ["lakehead", *(["lakehead.cli.main"] if (PACKAGE / "cli" / "main.py").exists() else [])]

LINES_MAX = 600
DRAWERS = {"common", "helper", "helpers", "manager", "managers", "misc", "util", "utils"}
TEXT_SUFFIXES = {"", ".in", ".json", ".lock", ".md", ".py", ".sh", ".sql", ".toml", ".txt", ".yaml", ".yml"}


def each(paths: list[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """One test of a rule for all these files, which names each that breaks it."""

    def of(rule: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            broken = []
            for path in paths:
                try:
                    rule(path)
                except AssertionError as e:
                    broken.append(f"{path.relative_to(ROOT)}: {e}")
            assert not broken, "\n".join(broken)

        test.__name__, test.__doc__ = rule.__name__, rule.__doc__
        return test

    return of


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The module, parsed."""
    return ast.parse(path.read_text())


def layer_of(path: Path) -> str:
    """The layer a module belongs to; "" for the package's own ``__init__``."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def module_name(path: Path) -> str:
    """The dotted name that imports the module."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path, within: ast.AST | None = None) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, those inside functions and ``TYPE_CHECKING`` blocks too.

    ``from a import b`` yields both ``a`` and ``a.b``, as only the importer knows whether b is a module.
    """
    here = ("lakehead", *path.relative_to(PACKAGE).with_suffix("").parts)
    for node in ast.walk(within or tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*(here[: -node.level] if node.level else ()), *([node.module] if node.module else [])])
            yield node.lineno, base
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def files() -> list[Path]:
    """Files of the repository; everything on disk when this is no working copy."""
    found = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        paths = [p for p in ROOT.rglob("*") if not any(part in (".venv", ".git") for part in p.parts)]
    else:
        paths = [ROOT / name for name in found.stdout.split("\0") if name]
    return sorted(p for p in paths if p.is_file())


def tracked() -> list[Path]:
    """Files of the repository that hold text."""
    return [p for p in files() if p.suffix in TEXT_SUFFIXES]


@each(MODULES)
def test_imports_point_downward(path: Path) -> None:
    own = layer_of(path)
    if not own:
        return
    assert own in RANK, f"src/lakehead/{own} is in no layer: add it to DESIGN, pyproject.toml and LAYERS"
    for line, name in imports(path):
        parts = name.split(".")
        if parts[0] != "lakehead" or len(parts) < 2 or parts[1] not in RANK or parts[1] == own:
            continue
        target = parts[1]
        assert RANK[target] < RANK[own], f"{path}:{line}: {own} imports {target}, which is not below it"
        assert own not in NARROW or target in NARROW[own], f"{path}:{line}: {own} may not use {target}"
        assert target != "testing", f"{path}:{line}: product code imports lakehead.testing"


@each([p for p in MODULES if layer_of(p) in HANDED_THE_WORLD])
def test_the_world_is_handed_down(path: Path) -> None:
    if path.relative_to(PACKAGE).as_posix() not in OWN_THREADS:
        for line, name in imports(path):
            assert name.split(".")[0] not in ("threading", "concurrent"), f"{path}:{line}: take Threads (lakehead.env)"
    assert not re.search(r"System(Clock|Threads)\(|Env\.system\(", path.read_text()), f"{path}: take an Env"


def test_modules_import_each_other_in_no_circle() -> None:
    # Those that stand inside functions or are for type checkers alone count, too: they only hide a circle.
    paths = {module_name(path): path for path in MODULES}
    known: dict[str, set[str]] = {}
    for name, path in paths.items():
        found = [(line, n) for line, n in imports(path) if n in paths]
        # From a package that is named along with its module only the module is wanted.
        known[name] = {n for line, n in found if not any(o[0] == line and o[1].startswith(f"{n}.") for o in found)}
    while free := [name for name, below in known.items() if not below & known.keys()]:
        for name in free:
            del known[name]
    way: list[str] = []
    here = min(known, default="")
    while here and here not in way:
        way.append(here)
        here = min(known[here] & known.keys())
    assert not known, " imports ".join([*way[way.index(here) :], here])


@each(MODULES)
def test_engines_have_one_owner(path: Path) -> None:
    for line, name in imports(path):
        for engine, owners in OWNERS.items():
            if name == engine or name.startswith(engine + "."):
                assert layer_of(path) in owners, f"{path}:{line}: only {sorted(owners)} may import {engine}"


@each(MODULES)
def test_engines_are_imported_at_the_top(path: Path) -> None:
    for function in ast.walk(tree_of(path)):
        if isinstance(function, ast.FunctionDef):
            for line, name in imports(path, function):
                assert name.split(".")[0] not in AT_THE_TOP, f"{path}:{line}: import {name} at the top"


def test_batches_are_joined_in_one_place() -> None:
    # Elsewhere nobody asks how many bytes they are, and 2 GiB of text are more than a batch holds.
    engine = [p for p in MODULES if layer_of(p) != "demo"]
    assert [p.name for p in engine if re.search(r"\b(concat_batches|sort_by)\(", p.read_text())] == ["joins.py"]


@each(MODULES)
def test_pure_cores_are_pure(path: Path) -> None:
    relative = path.relative_to(PACKAGE).as_posix()
    if layer_of(path) not in PURE_LAYERS and not PLANNER.fullmatch(relative):
        return
    for line, name in imports(path):
        assert name.split(".")[0] not in IMPURE, f"{path}:{line}: {relative} is pure and imports {name}"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "open", f"{path}:{node.lineno}: {relative} is pure: take a Storage"


@pytest.mark.parametrize("module", LIGHT)
def test_heavy_modules_load_when_first_needed(module: str) -> None:
    code = f"import {module}, sys; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not loaded, f"import {module} loads {loaded}"


DOORS = {
    "lakehead.api.backup": "lakehead.iceberg.inventory",
    "lakehead.api.connection": "lakehead.api.sql lakehead.api.sql_engine lakehead.api.tiering lakehead.client.flight",
    "lakehead.api.embedded": "lakehead.server.host",
    "lakehead.api.folder": "lakehead.client.flight",
    "lakehead.api.lake": "lakehead.iceberg.iceberg_table lakehead.iceberg.orphans lakehead.tiering.compaction"
    " lakehead.tiering.expiry lakehead.tiering.expiry_plan lakehead.tiering.round lakehead.tiering.truncation",
    "lakehead.api.status": "lakehead.lake.pinned_lake",
    "lakehead.config": "tomllib",
    "lakehead.env.https": "http.client ssl",
    "lakehead.env.secret_files": "keyring",
    "lakehead.env.tls": "ssl",
    "lakehead.iceberg.open_catalog": "lakehead.iceberg.rest_catalog",
    "lakehead.predicate": "lakehead.predicate.sql",
    "lakehead.server.signatures": "jwt",
    "lakehead.server.tablet": "lakehead.kv",
    "lakehead.spark": "lakehead.spark.change_feed lakehead.spark.key_join lakehead.spark.lag lakehead.spark.launch"
    " lakehead.spark.layers lakehead.spark.table_names lakehead.spark.tiering",
    "lakehead.spark.launch": "lakehead.spark.checks lakehead.spark.source pyspark pyspark.sql",
}
"""What a module loads when it is first needed: an engine, or a part that many processes never need."""


@each([p for p in MODULES if layer_of(p) not in ("", "cli")])
def test_imports_stand_at_the_top_but_for_a_few_doors(path: Path) -> None:
    """The command line loads what a command needs when it runs; `lakehead` itself, what a name means."""
    inside: set[str] = set()
    for function in ast.walk(tree_of(path)):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom):
                    inside.add(node.module or "")
                elif isinstance(node, ast.Import):
                    inside.update(alias.name for alias in node.names)
    assert inside == set(DOORS.get(module_name(path), "").split())


def test_what_knows_no_lake_format_loads_none() -> None:
    modules = [p for p in MODULES if layer_of(p) in ("lake", "tiering", "server", "client")]
    names = [".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts) for p in modules]
    code = f"import importlib, sys; [importlib.import_module(m) for m in {names!r}]; print('pyiceberg' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert loaded == "False"


@each([p for p in MODULES if layer_of(p) not in ("testing", "cli", "format", "predicate")])
def test_what_guards_data_is_alive_without_assertions(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Assert):
            test = node.test
            narrows = isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "isinstance"
            narrows |= isinstance(test, ast.Compare) and [type(op) for op in test.ops] == [ast.IsNot]
            assert narrows, f"{path}:{node.lineno}: python -O drops this check: raise a typed error"


@each(MODULES + OUTSIDE)
def test_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(tree_of(path)), f"{path} has no docstring"


@each(MODULES + OUTSIDE + TESTS)
def test_module_is_a_readable_size(path: Path) -> None:
    lines = path.read_text().count("\n")
    assert lines <= LINES_MAX, f"{path} has {lines} lines: split it along the data path"


@each(MODULES + OUTSIDE + TESTS)
def test_module_is_named_by_its_concept(path: Path) -> None:
    for part in path.relative_to(ROOT).with_suffix("").parts:
        assert not DRAWERS & set(part.lower().split("_")), f"{path}: {part} is a drawer; name the concept"


def test_unit_tests_mirror_the_source() -> None:
    for path in (ROOT / "tests" / "unit").rglob("test_*.py"):
        relative = path.relative_to(ROOT / "tests" / "unit")
        subject = PACKAGE / relative.parent / relative.stem.removeprefix("test_")
        assert subject.with_suffix(".py").exists() or (subject / "__init__.py").exists(), f"{path}: no {subject}.py"


@each(MODULES)
def test_destructors_do_nothing_while_the_interpreter_ends(path: Path) -> None:
    """What they call may be gone by then. What only calls C has nothing to lose."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef) and node.name == "__del__" and layer_of(path) != "testing":
            assert [ast.unparse(d) for d in node.args.defaults] == ["sys.is_finalizing"], f"{path}:{node.lineno}"


def test_nothing_is_left_for_later() -> None:
    marker = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked()
        if path.suffix != ".lock"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marker.search(line)
    ]
    assert not found


def test_nothing_large_or_made_elsewhere_is_kept() -> None:
    """A file of more than this is a download, or what a build or a run has left, as a folder without Git may have."""
    kept = files() if (ROOT / ".git").exists() else []
    assert not [str(p.relative_to(ROOT)) for p in kept if p.stat().st_size > 500_000 or p.suffix == ".whl"]


def test_no_merge_is_left_half_done() -> None:
    marker = re.compile(r"^(<{7}|>{7}|[|]{7}) ", re.M)
    assert not [str(path.relative_to(ROOT)) for path in tracked() if marker.search(path.read_text())]


def test_no_registry_is_named() -> None:
    hosts = re.compile(r"py" + r"pi\.org|python" + r"hosted\.org|\bma" + r"ven[\w-]*\.\w", re.I)
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if hosts.search(line)
    ]
    assert not found


def all_errors(cls: type[LakeheadError] = LakeheadError) -> list[type[LakeheadError]]:
    """Every error class that exists once ``lakehead.errors`` is loaded."""
    return [cls, *(below for child in cls.__subclasses__() for below in all_errors(child))]


def test_every_error_has_its_own_code() -> None:
    codes = [cls.__dict__.get("code") for cls in all_errors()]
    assert None not in codes
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("cls", ERRORS_BY_CODE.values())
def test_error_survives_pickle_and_wire(cls: type[LakeheadError]) -> None:
    error = cls("orders is missing; create it", table="shop.orders", offset=7, column=None)
    for copy in (pickle.loads(pickle.dumps(error)), error_from_code(cls.code, error.message, error.context)):
        assert type(copy) is cls
        assert (copy.message, copy.context, str(copy)) == (error.message, error.context, str(error))


@pytest.mark.parametrize("cls", [cls for cls in ERRORS_BY_CODE.values() if cls is not LakeheadError])
def test_error_code_tells_its_kind(cls: type[LakeheadError]) -> None:
    kind = ERRORS_BY_CODE[cls.code // 1000 * 1000]
    # A client that does not know it sends the same bytes again, as its kind says; no handler that writes anew may.
    assert issubclass(cls, kind) != (cls is OutcomeUnknownError) and cls.__name__.endswith("Error")
    assert type(error_from_code(cls.code // 1000 * 1000 + 999, "from a newer peer", {})) is kind


@each([m for m in MODULES if m.name != "errors.py"])
def test_errors_live_in_one_file(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = [ast.unparse(base) for base in node.bases]
            assert not any(b.endswith(("Error", "Exception")) for b in bases), f"{path}:{node.lineno}: {node.name}"


MARKDOWN = [path for path in tracked() if path.suffix == ".md"]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FOLDERS = r"(?:src|tests|docs|scripts|requirements|examples|benchmarks|\.ci)"
PATH_IN_CODE = re.compile(rf"`({FOLDERS}/[\w./-]+)`")


def slugs(path: Path) -> set[str]:
    """Anchors of a Markdown file's headings."""
    headings = re.findall(r"^#+ +(.+?)\s*$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@each(MARKDOWN)
def test_links_and_paths_in_prose_resolve(path: Path) -> None:
    text = path.read_text()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    for target in LINK.findall(prose):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        assert linked.exists(), f"{path.relative_to(ROOT)} links to {target}"
        if anchor and linked.suffix == ".md":
            assert anchor in slugs(linked), f"{path.relative_to(ROOT)} links to {target}, a heading that is not there"
    for named in PATH_IN_CODE.findall(prose):
        assert (ROOT / named).exists(), f"{path.relative_to(ROOT)} names {named}"


MEMBER_IN_CODE = re.compile(r"`([A-Z]\w+)\.(\w+)[`(]")
CALL_IN_CODE = re.compile(r"`con\.(\w+)\(([^`]*)\)`")


@functools.cache
def homes() -> dict[str, str]:
    """Class -> the text of its module, or of all modules with a class of that name."""
    found: dict[str, str] = {}
    for text in (path.read_text() for path in MODULES):
        for name in re.findall(r"^class (\w+)", text, re.M):
            found[name] = found.get(name, "") + text
    return found


@each([path for path in MARKDOWN if path.parent.name != "rfcs"])  # those tell what was decided, in its words
def test_names_in_prose_are_there(path: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    for cls, member in MEMBER_IN_CODE.findall(prose):
        home = homes().get(cls)
        assert home is None or re.search(rf"\b{member}\b", home), f"no {cls} has {member}"
    for name, written in CALL_IN_CODE.findall(prose):
        parameters = list(inspect.signature(getattr(Connection, name)).parameters.values())[1:]
        for given, parameter in zip(written.split(", "), parameters, strict=False):
            positional = given.isidentifier() and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            assert not positional or given == parameter.name, f"con.{name}({written}) calls {parameter.name} {given}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_each_mutant_changes_a_line_that_is_there(mutant: Mutant) -> None:
    assert mutant.line in (ROOT / "src/lakehead" / mutant.file).read_text(), f"tests/mutation: {mutant.name}"
    for tests in mutant.tests.split():
        assert (ROOT / tests.partition("::")[0]).exists(), f"tests/mutation: {mutant.name}"
