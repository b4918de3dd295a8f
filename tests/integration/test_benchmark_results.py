"""Results of the benchmark are kept, compared, and told on a page that is what they say."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pytest

import lakehead as lh
from benchmarks import layers, peers, tpch
from lakehead.benchmarks import growth
from lakehead.benchmarks.events import Figure
from lakehead.benchmarks.results import Results, moved, moved_lines
from lakehead.benchmarks.run import ASKED_PARTS, PARTS, _server_process, run_bench
from scripts.benchmark_page import RESULTS, _bars, page

MORE = {"peers": peers.peers}


def test_the_page_is_what_the_results_say() -> None:
    stale = [path.name for path, text in page(Results.read(RESULTS)).items() if path.read_text() != text]
    assert not stale, "run make bench-page and commit what it changed"
    assert set(Results.read(RESULTS).figures) == {*PARTS, "spark", "tpch", "layers", "peers"}


def test_the_shop_tells_how_old_each_layer_is() -> None:
    times = {"p50_ms": 1.25, "p99_ms": 20.0, "events": 9}
    fresh = dict.fromkeys(("bronze", "silver", "gold", "subscriber"), times)
    gold = dict(fresh, gold={**times, "p99_ms": 30.0})
    figures = list(layers.of_shop({"freshness": {"one query": gold}}))
    assert [f.value for f in figures] == ["1.2 / 20.0 ms", "1.2 / 20.0 ms", "1.2 / 30.0 ms", "1.2 / 20.0 ms"]
    assert figures[2].name == "one query: event → gold, p50 / p99" and figures[2].beside.endswith("3 min")


def test_tpch_tells_what_the_queries_took_and_which_loses_most() -> None:
    took = {"union": [0.5, 0.25, 0.25], "plain": [0.25, 0.05, 0.2], "first": [1.0, 0.5, 0.5]}
    total, first, worst = tpch.of_engines({"DuckDB": took})
    assert (total.name, total.value, total.beside, total.ratio) == (
        "22 queries by DuckDB", "1.00 s", "plain Parquet 0.50 s", 0.5,
    )  # fmt: skip
    assert (first.name, first.value, first.ratio) == ("those asked first, by DuckDB", "2.00 s", 0.25)
    assert (worst.value, worst.beside, worst.ratio) == ("250 ms", "query 2, plain Parquet 50 ms", 0.2)


def test_bars_are_green_where_the_figure_is_good() -> None:
    assert ("#2a7" in _bars([("a", 2.0)], more_is_better=True)) and (
        "#2a7" in _bars([("a", 0.5)], more_is_better=False)
    )
    assert ("#c63" in _bars([("a", 0.5)], more_is_better=True)) and (
        "#c63" in _bars([("a", 2.0)], more_is_better=False)
    )


def test_results_are_saved_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(growth, "_TABLES", (4, 8))
    monkeypatch.setattr(growth, "_PARTITIONS", (2, 4))
    monkeypatch.setattr(growth, "_TIMES", 3)
    monkeypatch.setattr(peers, "_SMALL_CALLS", 5)
    monkeypatch.setattr(peers, "_SMALL_CALLS_ICEBERG", 2)
    first, second = str(tmp_path / "first.json"), str(tmp_path / "second.json")
    parts = ["growth", "peers"]
    assert run_bench(rows=20_000, folder=str(tmp_path), only=parts, save=first, more=MORE) == 0
    told = capsys.readouterr().out
    results = Results.read(first)
    assert list(results.figures) == parts and results.rows == 20_000 and results.machine["pyarrow"]
    assert all(f.name in told and f.value in told for figures in results.figures.values() for f in figures)
    assert {"SQLite", "DuckDB", "PyIceberg"} <= {f.name.rpartition(": ")[2] for f in results.figures["peers"]}

    syncing = [f for f in results.figures["peers"] if f.name.endswith(("DuckDB", "PyIceberg")) and "end" in f.name]
    assert len(syncing) == 2 and all(f.beside.startswith("Lakehead, synced: ") for f in syncing)

    slower = {
        part: [dataclasses.replace(f, ratio=f.ratio and f.ratio * 1000) for f in figures]
        for part, figures in results.figures.items()
    }
    Path(first).write_text(dataclasses.replace(results, figures=slower).to_json())
    run_bench(rows=20_000, folder=str(tmp_path), only=["growth"], save=second, compare=first)
    told = capsys.readouterr().out
    assert f"moved since {first}" in told and f"{first} is of" not in told
    run_bench(rows=20_000, folder=str(tmp_path), only=["growth"], output="json", compare=first)
    names = [m["name"] for m in json.loads(capsys.readouterr().out)["moved"]]
    assert names == [f.name for f in results.figures["growth"] if f.ratio]


def test_the_options_are_those_of_the_command_and_name_every_part() -> None:
    told = [
        subprocess.run([sys.executable, "-m", *words, "--help"], capture_output=True, text=True, check=True).stdout
        for words in (["lakehead.cli.main", "bench"], ["benchmarks"])
    ]
    assert all(part in told[0] for part in (*PARTS, *ASKED_PARTS)) and "peers" not in told[0]
    assert "peers" in told[1].partition("Options:")[0]
    assert told[0].partition("Options:")[2] == told[1].partition("Options:")[2]


@pytest.mark.parametrize(("rows", "steps"), [(100, [100]), (15_000, [10_000, 15_000])])
def test_names_say_how_many_rows_there_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rows: int, steps: list[int]
) -> None:
    scanned = []

    def to_arrow(scan: lh.Scan) -> pa.Table:
        found = _to_arrow(scan)
        scanned.append(found.num_rows)
        return found

    _to_arrow = lh.Scan.to_arrow
    monkeypatch.setattr(lh.Scan, "to_arrow", to_arrow)
    monkeypatch.setattr(growth, "_TABLES", ())
    monkeypatch.setattr(growth, "_PARTITIONS", ())
    monkeypatch.setattr(growth, "_BUCKETS", ())
    monkeypatch.setattr(peers, "_SMALL_CALLS", 5)
    monkeypatch.setattr(peers, "_SMALL_CALLS_ICEBERG", 2)
    run_bench(rows=rows, output="json", folder=str(tmp_path), only=["growth", "peers"], more=MORE)
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert sorted(set(scanned)) == steps
    most, few = min(rows, 10_000), min(rows, 1000)
    for work in (f"append of {most:,} rows", f"upsert of {most:,} keys that are there", f"lookup of {few:,} keys"):
        assert [f["name"] for f in figures if f["name"].startswith(work)] == [f"{work}, {n:,} rows" for n in steps]
    told = [f["beside"].partition(":")[0] for f in figures if "times as many" in f["beside"]]
    assert set(told) == ({"with 1.5 times as many rows"} if len(steps) > 1 else set())
    assert any(f["name"] == f"lookup, {few:,} keys a call: SQLite" for f in figures)


def test_ratios_of_other_rows_are_said_to_be() -> None:
    assert moved_lines([], "x.json", before=10, now=10) == [moved_lines([], "x.json", before=1000, now=10)[1]]
    told = moved_lines([("a", 1.0, 2.0)], "x.json", before=1000, now=10)
    assert told[:2] == ["x.json is of 1,000 rows, this of 10: ratios differ for that, too", "moved since x.json:"]


def test_what_moved_is_what_is_far_from_before() -> None:
    def of(**ratios: float | None) -> Results:
        return Results(1, {}, {"part": [Figure(name, "", "", ratio) for name, ratio in ratios.items()]})

    before = of(a=1.0, b=1.0, c=1.0, gone=1.0, none=None)
    assert moved(before, of(a=1.4, b=1.6, c=0.5, new=9.0, none=3.0)) == [("b", 1.0, 1.6), ("c", 1.0, 0.5)]


_FIGURES = '{"rows": 1, "machine": {}, "figures": {"a": [%s]}}'


@pytest.mark.parametrize(
    "text",
    [None, "", "[]", '{"rows": 1}', _FIGURES % "{}", _FIGURES % '{"name": "a", "value": "1", "ratio": "2"}', "\udc80"],
)
def test_what_is_no_results_is_refused_before_anything_is_measured(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "results.json"
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(lh.InvalidRequestError, match="has no results"):
        run_bench(only=["embedded"], compare=str(path))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"save": "missing/x.json"}, "is in a folder that is not there"),
        ({"save": "."}, "is a folder"),
        ({"save": "mine/x.json"}, "cannot be written to"),
        ({"save": "old.json"}, "cannot be written to"),
        ({"folder": "missing"}, "name another one with --folder"),
        ({"compare": "missing.json"}, "name a file that `lakehead bench --save` has written"),
        ({"rows": 0}, "give 1 at least"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], told: str
) -> None:
    def measure(base: str, batches: object) -> NoReturn:
        raise AssertionError("it was measured")

    (tmp_path / "mine").mkdir()
    (tmp_path / "old.json").touch()
    monkeypatch.chdir(tmp_path)
    # Root may write to all there is.
    monkeypatch.setattr(os, "access", lambda path, mode: str(path).endswith("missing"))
    with pytest.raises(lh.InvalidRequestError, match=told):
        run_bench(only=["mine"], more={"mine": measure}, **options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "old.json"]


_COMPILED = """
import sys
from benchmarks.peers import _by_key, _Lakehead
from lakehead import connect
from lakehead.benchmarks.events import event_batches
from lakehead.benchmarks.run import warm_up
from lakehead.kv import kernels
batches = event_batches(30_000)
with connect(sys.argv[1]) as con:
    warm_up(con, batches)
    def compiled():
        return {name: len(of.signatures) for name, of in vars(kernels).items() if hasattr(of, "signatures")}
    before = compiled()
    list(_by_key([_Lakehead(con, batches[0].schema)], batches, 30_000))
    print(sum(before.values()) > 0, compiled() == before)
"""


def test_no_figure_of_keys_pays_for_what_is_compiled_once(tmp_path: Path) -> None:
    asked = [sys.executable, "-c", _COMPILED, str(tmp_path / "data")]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split() == ["True", "True"]


def test_a_server_that_does_not_begin_is_an_error_with_what_it_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(lh.UnavailableError, match=r"the server ended with [1-9].*error: .*file") as caught,
        _server_process(str(tmp_path / "file")),
    ):
        pass
    assert "\n" not in caught.value.message
