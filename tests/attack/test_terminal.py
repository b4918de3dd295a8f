"""What somebody wrote into a row decides what a reader's screen says, and nothing that the terminal does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.waiting import WAIT_SECONDS

import lakehead as lh
from lakehead.cli import main as cli
from lakehead.cli.output import printable

EVIL = "\x1b]0;renamed\x07\x1b[2J\x1b[31mred\x9b1m\r\b\x7f\n\x00\u202egnp.exe\u2066"
COLUMN = "say\x1b[2Jwhat"
SCHEMA = pa.schema([pa.field("id", pa.string(), False), (COLUMN, pa.string()), ("l", pa.list_(pa.string()))])
ROW = {"id": EVIL, COLUMN: EVIL, "l": [EVIL]}


@pytest.fixture(scope="module")
def con(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path_factory.mktemp("screen") / "data") as connection:
        connection.create_table("shop.orders", SCHEMA, primary_key=["id"]).upsert([ROW])
        connection.create_table("shop.notes", pa.schema([("n", pa.int64())])).append([{"n": 1}])
        with connection.table("shop.notes").alter() as a:
            a.set_comment(None, EVIL)
        yield connection


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize(
    "command",
    [
        ["sql", "from shop.orders"],
        ["sql", "summarize shop.orders"],
        ["sql", f"select error('{EVIL}') from shop.notes".replace("\x00", "")],
        ["tail", "shop.orders", "--start", "earliest", "--stop-now"],
        ["get", "shop.orders", EVIL],
        ["get", "shop.orders", EVIL + "none"],
        ["get", f"shop.{EVIL}", "1"],
        ["table", "describe", "shop.orders"],
        ["table", "describe", "shop.notes"],
    ],
)
def test_no_command_prints_what_a_terminal_acts_on(
    con: lh.Connection, capfd: pytest.CaptureFixture[str], command: list[str], form: str
) -> None:
    cli.main(["--uri", con.uri, "-o", form, *command])
    printed = capfd.readouterr()
    text = printed.out + printed.err
    assert text and all(line == printable(line) for line in text.split("\n")), text
    if form == "json" and command[:2] == ["sql", "from shop.orders"]:
        assert json.loads(printed.out) == ROW


def test_a_traceback_neither(con: lh.Connection, tmp_path: Path) -> None:
    call = [
        sys.executable,
        "-m",
        "lakehead.cli.main",
        "--debug",
        "--uri",
        str(tmp_path / EVIL.replace("\x00", "")),
        "status",
    ]
    done = subprocess.run(call, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert done.returncode == 2 and "Traceback" in done.stderr
    assert all(line == printable(line) for line in done.stderr.split("\n"))
