"""Slips at the command line change nothing, and say so: folders that are no data folders, empty options, rights that
nobody had, files of another form."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
from pathlib import Path

import pytest
from tests.integration.test_cli import documents, lakehead

import lakehead as lh
from lakehead.cli import main as cli


@pytest.fixture
def uri(tmp_path: Path) -> tuple[object, ...]:
    made = ("--uri", tmp_path / "data")
    lakehead(*made, "table", "create", "t", "--schema", "k bigint, s string")
    return made


@pytest.mark.parametrize(
    "command", [["status"], ["tail", "nope", "--stop-now"], ["sql", "select 1"], ["table", "list"]]
)
def test_a_folder_of_other_files_stays_as_it_is(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(b"x")
    assert b"no data folder" in lakehead("--uri", tmp_path / "photos", *command, code=2).stderr
    assert os.listdir(tmp_path / "photos") == ["a.jpg"]


def test_a_server_wants_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert b"--data" in lakehead("server", "--data", "", code=2).stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("option", ["--primary-key", "--partition-by", "--bucket-key"])
def test_an_option_without_columns_makes_no_table(uri: tuple[object, ...], option: str) -> None:
    for empty in ("", " "):
        create = ("table", "create", "n", "--schema", "k bigint", option, empty)
        assert option.encode() in lakehead(*uri, *create, code=2).stderr
    assert b"default.n" not in lakehead(*uri, "table", "list").stdout


def test_what_nobody_had_is_not_taken_away(uri: tuple[object, ...]) -> None:
    lakehead(*uri, "grant", "read", "default.t", "--to", "alice")
    for wrong in (
        ["revoke", "read", "default.t", "--from", "alcie"],
        ["revoke", "write", "default.t", "--from", "alice"],
        ["revoke", "role:ops", "--from", "alice"],
        ["quota", "remove", "alcie"],
    ):
        assert b"error:" in lakehead(*uri, *wrong, code=2).stderr
    lakehead(*uri, "revoke", "read", "default.t", "--from", "alice")
    lakehead(*uri, "quota", "set", "alice", "--streams", "1")
    lakehead(*uri, "quota", "remove", "alice")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (gzip.compress(b"k,s\n1,a\n", mtime=0), b"gzip"),
        (b'[{"k": 1}]', b"jq -c"),
        (b'{"k": 7, "s": "\\ud800"}', b"half of a character"),
    ],
    ids=["gzip", "array", "surrogate"],
)
def test_files_of_another_form_are_told_what_they_are(uri: tuple[object, ...], text: bytes, says: bytes) -> None:
    kind = "csv" if b"gzip" in says else "jsonl"
    assert says in lakehead(*uri, "append", "t", "--format", kind, stdin=text, code=2).stderr


@pytest.mark.parametrize("text", [b"k,s", b"k,s\n", b"k,s\n1,a", b"k,s\n1,a\n", b'k,s\n1,"a\n"', b"k,s\r\n1,a\r\n"])
def test_a_last_line_may_lack_its_end(uri: tuple[object, ...], text: bytes) -> None:
    lakehead(*uri, "append", "t", "--format", "csv", stdin=text)
    rows = documents(*uri, "sql", "select k, s from t")
    assert rows == ([] if b"1" not in text else [{"k": 1, "s": "a\n" if b'"' in text else "a"}])


def test_a_quoted_field_that_is_cut_off_is_still_noticed(uri: tuple[object, ...]) -> None:
    assert b"cut off" in lakehead(*uri, "append", "t", "--format", "csv", stdin=b'k,s\n1,"a', code=2).stderr


def test_times_are_iso_8601(uri: tuple[object, ...]) -> None:
    query = "select timestamp '20000-01-01' a, timestamp '2000-01-01' b, timestamp_ns '2000-01-01 00:00:00.000000001' c"
    found = documents(*uri, "sql", query)
    assert found == [{"a": "20000-01-01T00:00:00", "b": "2000-01-01T00:00:00", "c": "2000-01-01T00:00:00.000000001"}]
    lakehead(*uri, "table", "create", "far", "--schema", "k bigint, a timestamp", "--primary-key", "k")
    with lh.connect(str(uri[1])) as con:
        con.table("far").upsert(con.sql("select 1::bigint k, timestamp '20000-01-01' a").to_arrow_table())
    assert documents(*uri, "get", "far", "1") == [{"k": 1, "a": "20000-01-01T00:00:00"}]
    assert b"20000-01-01" in lakehead(*uri, "get", "far", "1").stdout


def test_tables_are_printed_where_output_is_not_utf_8(uri: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), "latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    arguments = [str(a) for a in uri]
    assert cli.main([*arguments, "sql", "select 'é' x, '\u4e2d' y"]) == 0
    assert cli.main([*arguments, "sql", "select '\u4e2d' y", "-o", "json"]) == 0
    out.flush()
    text = out.buffer.getvalue().decode("latin-1")  # type: ignore[attr-defined]
    assert "---" in text and "é" in text and json.loads(text.splitlines()[-1]) == {"y": "?"}
