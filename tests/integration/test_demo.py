"""The demo, smaller: all flows and is checked, what it prints works when pasted, nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import duckdb_extension_avro
import duckdb_extension_iceberg
import pyarrow as pa
import pytest
from tests.waiting import WAIT_SECONDS

import lakehead as lh
from lakehead.demo import feed, run
from lakehead.demo.data import load

ROWS = 20_000
RUN = "import sys; from lakehead.demo.run import run_demo; sys.exit(run_demo(sys.argv[1], rows=20_000, output='json'))"

pytestmark = pytest.mark.spark(apart=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("demo") / "data"
    done = subprocess.run([sys.executable, "-c", RUN, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def test_all_rows_went_everywhere(finished: dict[str, Any]) -> None:
    data = load().first(ROWS)
    assert finished["ok"] and finished["violations"] == []
    assert finished["checks_passed"] > 10
    expected = {
        "nyc.flights": ROWS,
        "nyc.flight_status": ROWS - data.flights["dep_at"].null_count,
        "nyc.weather": data.weather.num_rows,
        "nyc.planes": 3_322,
        "nyc.airports": 1_458,
        "nyc.airlines": 16,
    }
    tables = {t["name"]: t for t in finished["tables"]}
    assert {name: t["union_rows"] for name, t in tables.items()} == expected
    assert {name: t["lake_rows"] for name, t in tables.items()} == expected
    assert tables["nyc.flight_status"]["delete_files"] > 0


def test_rounds_were_committed_while_data_flowed_and_the_lake_lagged(finished: dict[str, Any]) -> None:
    assert finished["rounds_while_flowing"]["nyc.flights"] >= 2
    assert finished["at_stream_end"]["union"] == ROWS
    assert finished["at_stream_end"]["lake"] < ROWS
    assert finished["lag"]["rows_max"] > 0


def test_the_subscriber_got_every_row_in_time(finished: dict[str, Any]) -> None:
    push = finished["push"]
    assert push["rows"] == ROWS
    for phase in ("paced", "burst"):
        assert 0 < push[phase]["p50_ms"] <= push[phase]["p99_ms"]


def test_each_question_has_one_answer(finished: dict[str, Any]) -> None:
    assert len(finished["questions"]) == 4
    for question in finished["questions"]:
        assert {"DuckDB", "PySpark"} <= set(question["answered_by"])
        assert question["rows"]


def test_the_lines_for_pyiceberg_work_when_pasted(finished: dict[str, Any]) -> None:
    *before, last = finished["open"]["pyiceberg"]
    scope: dict[str, Any] = {}
    exec("\n".join(before), scope)
    rows: pa.Table = eval(last, scope)
    assert rows.num_rows == 5
    assert "flight_id" in rows.column_names


def test_the_lines_for_duckdb_work_when_pasted(finished: dict[str, Any]) -> None:
    con = duckdb.connect()
    for extension in (duckdb_extension_avro, duckdb_extension_iceberg):
        (file,) = Path(extension.__file__).parent.rglob("*.duckdb_extension")
        con.load_extension(str(file))
    assert finished["open"]["duckdb"][0] == "INSTALL iceberg; LOAD iceberg;"
    assert con.sql(finished["open"]["duckdb"][1]).fetchone() == (ROWS,)


def test_the_folder_remains_for_its_user(finished: dict[str, Any]) -> None:
    with lh.connect(finished["folder"]) as con:
        assert con.table("nyc.flights").scan().count() == ROWS
        assert con.table("nyc.planes").get("N14228")
    assert (Path(finished["folder"]) / "spark.log").exists()


def test_a_row_written_twice_is_told_and_fails_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    once = feed.Feed._append

    def twice(self: feed.Feed, size: int) -> None:
        if self.flights.sent == 1_001:
            self._tables["nyc.flights"].append(self._data.flights.slice(0, 1))
        once(self, size)

    monkeypatch.setattr(feed.Feed, "_append", twice)
    assert run.run_demo(str(tmp_path / "data"), rows=ROWS, output="text") == 1
    assert "nyc.flights: 1 rows were read twice" in capsys.readouterr().out


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="looks for processes in /proc")
def test_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path / "data")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stderr is not None
    for line in run.stderr:
        if "Sending" in line:
            break
    children = [int(pid) for task in Path(f"/proc/{run.pid}/task").iterdir() for pid in _words(task / "children")]
    assert len(children) == 2
    run.send_signal(signal.SIGINT)
    _, rest = run.communicate(timeout=WAIT_SECONDS)
    assert run.returncode == 130, rest
    assert "remains in" in rest
    left = [stat.read_text() for stat in Path("/proc").glob("[0-9]*/stat") if _session(stat) in children]
    assert not left, "every child led a session of its own"


def _session(stat: Path) -> int | None:
    """Session of a process; None when it has ended."""
    words = " ".join(_words(stat)).rpartition(")")[2].split()
    return int(words[3]) if words and words[0] != "Z" else None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
