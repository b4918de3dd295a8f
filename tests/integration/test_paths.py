"""Where the time of a call goes: each path runs, its phases are functions that exist, and the page says what was
measured."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import lakehead as lh
from benchmarks import paths
from benchmarks.phases import KINDS, PATHS, Phase, functions_of, kinds
from benchmarks.probes import REST, Mark, Probes, divided, find
from lakehead.benchmarks.events import event_batches
from lakehead.benchmarks.results import Results
from lakehead.log.tablet import LogTablet
from scripts.performance_page import PAGE, RESULTS, page

PHASES = {phase.name: phase for phases in PATHS.values() for phase in phases}


@pytest.mark.parametrize("phase", PHASES.values(), ids=lambda p: p.name)
def test_the_functions_of_each_phase_exist(phase: Phase) -> None:
    for name in functions_of([phase])[phase.name]:
        find(name, phase.name)
    assert kinds()[phase.name] in KINDS
    assert all(p == phase for phases in PATHS.values() for p in phases if p.name == phase.name), "one name, one phase"


def test_no_path_has_a_function_in_two_phases() -> None:
    for name, phases in PATHS.items():
        functions = [f for phase in phases for f in phase.functions]
        assert len(functions) == len(set(functions)), name


@pytest.mark.parametrize("name", ["gone:f", "log.tablet:LogTablet.gone", "log.tablet:Gone.f", "log.tablet:LogTablet"])
def test_a_phase_whose_function_is_gone_is_an_error(name: str) -> None:
    with pytest.raises(lh.InvalidRequestError, match=r"phase 'framed' is the time of lakehead\..*no such function"):
        Probes(functions_of([Phase("framed", "server", (name,))]))


def test_a_phase_in_which_nothing_runs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_ROUNDS", 1)
    phase = Phase("framed", "server", ("log.tablet:LogTablet.encode",))
    with pytest.raises(lh.InvalidRequestError, match="nothing ran in phase 'framed' of path 'none'"):
        list(paths._measured("none", [phase], paths.Case(lambda _: None)))


def test_each_moment_belongs_to_what_began_last_and_still_runs() -> None:
    marks = [
        Mark(5, 1, "outer"),  # began before the call
        Mark(12, 2, "inner"),
        Mark(14, 9, "elsewhere"),  # in another thread, while the first one waits
        Mark(15, 2, None),
        Mark(17, 9, None),
        Mark(19, 1, None),
        Mark(25, 3, "outer"),
        Mark(27, 3, None),
    ]
    first, second = divided(list(reversed(marks)), [(10, 20), (22, 28)])
    assert first == {"outer": 2 + 2, "inner": 2, "elsewhere": 3, REST: 1}
    assert second == {"outer": 2, REST: 3 + 1}
    assert sum(first.values()) == 10 and sum(second.values()) == 6


def test_probes_leave_nothing_behind_and_note_each_step_of_a_generator(tmp_path: Path) -> None:
    from lakehead.api import table as api_table
    from lakehead.server import streams

    before = (LogTablet.encode, api_table.rows_for_append, streams.coalesce)
    named = {
        "a": ["lakehead.log.tablet:LogTablet.encode"],
        "b": ["lakehead.api.input:rows_for_append"],
        "c": ["lakehead.server.projection:coalesce"],
    }
    probes = Probes(named)
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", event_batches(10)[0].schema)
        probes.put_in()
        with pytest.raises(lh.SchemaMismatchError):
            table.append([{"event_id": "no number"}])
        thread = threading.Thread(target=table.append, args=(event_batches(10)[0],))
        thread.start()
        thread.join()
        assert table.scan().to_arrow().num_rows == 10
        marks = probes.take_out()
    assert (LogTablet.encode, api_table.rows_for_append, streams.coalesce) == before
    phases = [m.phase for m in marks if m.phase]
    assert phases.count("a") == 1 and phases.count("b") == 2 and phases.count("c") == 2
    assert len({m.span for m in marks}) * 2 == len(marks)


@pytest.fixture
def few_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(paths, "_ROUNDS", 1)
    monkeypatch.setattr(paths, "_SECONDS", 0.0)
    monkeypatch.setattr(paths, "_CALLS_MIN", 1)
    yield


@pytest.mark.usefixtures("few_calls")
def test_each_path_runs_with_few_rows(tmp_path: Path) -> None:
    figures = list(paths.paths(str(tmp_path), event_batches(2000)))
    names = [n.format(batch="2,000", keys="1,000", rows="2,000") for n in PATHS]
    assert [f.name for f in figures if ": " not in f.name] == names
    for name, phases in zip(names, PATHS.values(), strict=True):
        found = {f.name.partition(": ")[2]: f for f in figures if f.name.startswith(f"{name}: ")}
        assert list(found) == ["CPU", *(p.name for p in phases), REST]
        assert sum(f.ratio or 0.0 for f in found.values()) == pytest.approx(1.0)


def test_times_are_told_for_people() -> None:
    assert [paths.told(s) for s in (1e-6, 2.5e-5, 0.0012, 0.25)] == ["1.0 µs", "25 µs", "1.20 ms", "250.0 ms"]


def test_the_page_is_what_the_results_say() -> None:
    stale = [path.name for path, text in page(Results.read(RESULTS)).items() if path.read_text() != text]
    assert not stale, "run make bench-page and commit what it changed"


def test_the_prose_has_no_numbers_of_its_own() -> None:
    prose = re.sub(r"^<!-- measured.*?^<!-- end -->|^```.*?^```|`[^`]*`", "", PAGE.read_text(), flags=re.M | re.S)
    assert not re.findall(r".*\d.*", prose)
