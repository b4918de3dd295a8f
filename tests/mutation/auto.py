"""Break lines at random and count what the tests notice: `make mutants-auto`.

Cosmic Ray knows where Python can be broken and how; a seed chooses some of these places. Each mutant is one change in a
copy of the package. First the tests of its module run against it, then those of its folder, then some seeds of the
simulation. What none of them notices is printed with its change: it stands for a test that is missing, or changes
nothing that anyone could see.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import parso  # before Cosmic Ray, whose modules import each other in a circle otherwise
from cosmic_ray import plugins
from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import mutate_code

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "lakehead"
FOLDERS = {
    "log": "tests/unit/log tests/unit/server tests/properties/test_netchange.py tests/properties/test_log_damage.py"
    " tests/properties/test_durable_names.py tests/integration/test_trimmed.py",
    "kv": "tests/unit/kv tests/unit/server/test_tablet.py tests/properties/test_table_model.py",
    "server": "tests/unit/server tests/integration/test_both_transports.py tests/integration/test_trimmed.py",
    "lake": "tests/unit/lake tests/unit/tiering tests/properties/test_lake_rounds.py"
    " tests/integration/test_lake_round.py",
    "iceberg": "tests/unit/iceberg tests/unit/lake tests/integration/test_lake_round.py",
    "tiering": "tests/unit/lake tests/unit/tiering tests/properties/test_lake_rounds.py"
    " tests/integration/test_lake_round.py",
}
SECONDS_MAX = 300
SEEDS = 12
_CLASS_GUARDS = ("frozen", "slots")
_HASTES = ("_jit", "njit", "functools.lru_cache", "functools.cache")
assert parso


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    path: Path
    line: int
    operator: str
    occurrence: int

    def code(self) -> str:
        """The module with the change in it."""
        operator = plugins.get_operator(self.operator)()
        changed: str = mutate_code(self.path.read_bytes(), operator, self.occurrence)
        return changed

    def diff(self) -> str:
        """The lines that differ."""
        lines = difflib.unified_diff(self.path.read_text().splitlines(), self.code().splitlines(), lineterm="", n=0)
        return "\n".join(x for x in lines if x[:1] in "+-" and x[:3] not in ("+++", "---"))


def sample(folder: str, count: int, draws: random.Random) -> Iterator[Mutant]:
    """Mutants of a folder: a module by its length, a place in it, and a change of that place."""
    modules = [p for p in sorted((SOURCE / folder).glob("*.py")) if p.name != "__init__.py"]
    sizes = [len(p.read_bytes()) for p in modules]
    places: dict[Path, dict[tuple[int, int], list[Mutant]]] = {}
    seen: set[Mutant] = set()
    while len(seen) < count:
        (module,) = draws.choices(modules, sizes)
        known = places.setdefault(module, {}) or places.setdefault(module, {})
        if not known:
            known.update(_places(module))
        if not known:
            continue
        mutant = draws.choice(known[draws.choice(sorted(known))])
        if mutant not in seen:
            seen.add(mutant)
            yield mutant


def _places(module: Path) -> dict[tuple[int, int], list[Mutant]]:
    unseen = _unseen(module)
    found: dict[tuple[int, int], list[Mutant]] = {}
    for item in _all_work_items([module], {}):
        (spec,) = item.mutations
        if not any(start <= spec.start_pos < end for start, end in unseen):
            mutant = Mutant(module, spec.start_pos[0], spec.operator_name, spec.occurrence)
            found.setdefault(spec.start_pos, []).append(mutant)
    return found


def _unseen(module: Path) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where a change says nothing about the tests:

    - types, which do nothing at run time, and aliases of types;
    - values of constants, which are tuned and not proven;
    - what an error carries beside its text (keywords of a raised error), which is for whoever looks into it;
    - guards against mistakes that no caller makes: ``frozen``, ``slots``, ``strict`` of `zip`;
    - decorators that make the same answer come sooner: compilers and caches.
    """
    spans = []
    for node in ast.walk(ast.parse(module.read_text())):
        for part in (*_types(node), *_constants(node), *_contexts(node), *_guards(node), *_hastes(node)):
            if part is not None and part.end_lineno is not None and part.end_col_offset is not None:
                # One column early: a decorator begins with its sign.
                spans.append(((part.lineno, part.col_offset - 1), (part.end_lineno, part.end_col_offset)))
    return spans


def _types(node: ast.AST) -> list[ast.expr | None]:
    if isinstance(node, ast.AnnAssign):
        return [node.annotation, node.value if "TypeAlias" in ast.unparse(node.annotation) else None]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        taken = node.args
        every = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs, taken.vararg, taken.kwarg]
        return [node.returns, *(a.annotation for a in every if a is not None)]
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return [node.test]
    return []


def _constants(node: ast.AST) -> list[ast.expr | None]:
    if not isinstance(node, ast.Module):
        return []
    assigned = [(n.targets[0], n.value) for n in node.body if isinstance(n, ast.Assign)]
    noted = [(n.target, n.value) for n in node.body if isinstance(n, ast.AnnAssign)]
    return [value for target, value in (*assigned, *noted) if ast.unparse(target).isupper()]


def _contexts(node: ast.AST) -> list[ast.expr | None]:
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        return [k.value for k in node.exc.keywords]
    return []


def _guards(node: ast.AST) -> list[ast.expr | None]:
    if isinstance(node, ast.ClassDef):
        calls = [d for d in node.decorator_list if isinstance(d, ast.Call)]
        return [k.value for k in (*node.keywords, *(k for c in calls for k in c.keywords)) if k.arg in _CLASS_GUARDS]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "zip":
        return [k.value for k in node.keywords if k.arg == "strict"]
    return []


def _hastes(node: ast.AST) -> list[ast.expr | None]:
    if isinstance(node, ast.FunctionDef):
        return [d for d in node.decorator_list if ast.unparse(d).split("(")[0] in _HASTES]
    return [node] if isinstance(node, ast.Call) and ast.unparse(node.func) == "njit" else []


def fate(mutant: Mutant, folder: str, copy: Path) -> str:
    """What the tests do with a mutant in a copy of the package: "killed", "hung" or "SURVIVED"."""
    changed = copy / mutant.path.relative_to(ROOT / "src")
    changed.write_text(mutant.code())
    try:
        own = ROOT / "tests" / "unit" / folder / f"test_{mutant.path.name}"
        stages = [str(own)] if own.exists() else []
        if all(_pass(tests, copy) for tests in (*stages, FOLDERS[folder])) and _simulates(copy):
            return "SURVIVED"
        return "killed"
    except subprocess.TimeoutExpired:
        return "hung"
    finally:
        shutil.copy2(mutant.path, changed)


def _pass(tests: str, copy: Path) -> bool:
    return _succeeds(["pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", *tests.split()], copy)


def _simulates(copy: Path) -> bool:
    return _succeeds(["tests.simulation", "0", "--seeds", str(SEEDS)], copy)


def _succeeds(module: list[str], copy: Path) -> bool:
    environ = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    environ["NUMBA_BOUNDSCHECK"] = "1"  # what compiled code reads beside its arrays is an error, and no matter of luck
    command = [sys.executable, "-m", *module]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, timeout=SECONDS_MAX, check=False)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folders", nargs="*", default=list(FOLDERS), help=f"of {', '.join(FOLDERS)}")
    parser.add_argument("--count", type=int, default=25, help="mutants of each folder")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary, "src")
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        for folder in options.folders:
            if not all(_pass(tests, copy) for tests in FOLDERS[folder].split()):
                sys.exit(f"the tests of {folder} fail without any mutant")
            for mutant in sample(folder, options.count, random.Random(f"{options.seed} {folder}")):
                end = fate(mutant, folder, copy)
                counts[folder, end] += 1
                where = f"{mutant.path.relative_to(SOURCE)}:{mutant.line}"
                print(f"{end:<9} {where:<32} {mutant.operator}", flush=True)
                if end == "SURVIVED":
                    print(mutant.diff(), flush=True)
    for folder in options.folders:
        killed, hung, alive = (counts[folder, end] for end in ("killed", "hung", "SURVIVED"))
        print(f"{folder:<8} {killed + hung} of {killed + hung + alive} killed, {hung} of these by a time-out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
