"""What tells a micro-batch from others that have its number."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from lakehead.protocol.staging import PLANNED_BYTES_MAX
from lakehead.server.planned import ends_within
from lakehead.spark.checkpoint import in_folder, local_folder, planned_as

pytestmark = pytest.mark.spark


def planned(files: Mapping[str, str], number: int = 6) -> str:
    return planned_as(files.get, number)


def offsets(*ends: str, time: int = 1) -> dict[str, str]:
    return {"offsets/6": "\n".join(["v1", json.dumps({"batchTimestampMs": time}), *ends])}


def files(*paths: str, time: int = 1, compact: bool = False) -> dict[str, str]:
    log = {f"{name}.compact" if compact else name: text for name, text in listed("0", *paths, old=compact).items()}
    return {**offsets('{"logOffset":6}', time=time), **log}


def listed(folder: str, *paths: str, old: bool = False) -> dict[str, str]:
    """What Spark notes of the files of micro-batch 6."""
    numbers = {"old": 5} if old else {}
    entries = [{"path": p, "timestamp": 7, "batchId": numbers.get(p, 6)} for p in [*numbers, *paths]]
    return {f"sources/{folder}/6": "\n".join(["v1", *(json.dumps(e, separators=(",", ":")) for e in entries)])}


def test_the_end_of_each_source_tells_micro_batches_apart() -> None:
    assert planned(offsets('{"0": 60}', "9")) == planned(offsets('{"0": 60}', "9", time=2)) == '{"0": 60}\n9'
    assert planned(offsets('{"0": 60}', "9")) != planned(offsets('{"0": 60}', "10"))
    long = [planned(offsets(json.dumps({f"/{n}": 60 + (n == last) for n in range(90)}))) for last in (0, 89, 89)]
    assert long[0] != long[1] == long[2] and max(map(len, long)) <= PLANNED_BYTES_MAX


@pytest.mark.parametrize("compact", [False, True])
def test_files_are_told_apart_by_their_names(compact: bool) -> None:
    """Spark counts the batches of a folder, whatever is in them."""
    one = planned(files("a", "b", compact=compact))
    assert one and one == planned(files("b", "a", time=2)), "listed in another order, and not compacted then"
    assert one != planned(files("a", "c", compact=compact))
    assert one != planned(files("a", compact=compact))


FILES = '{"logOffset":6}'
OTHER = '{"logOffset":3}'


@pytest.mark.parametrize(
    ("lines", "folder"),
    [
        ([FILES, FILES], "0"),  # a source that is used twice has two lines, and one folder
        (["9", "9", FILES], "1"),
        (["9", FILES, "9", FILES], "1"),
        (["9", OTHER, FILES], "2"),
        (["9", "10", FILES], "2"),
    ],
)
def test_files_are_told_apart_whatever_else_is_read(lines: list[str], folder: str) -> None:
    """Spark numbers sources, and writes a line for each use of one."""
    other = {f"sources/{lines.index(OTHER)}/3": "v1"} if OTHER in lines else {}
    one, two = (planned({**offsets(*lines), **other, **listed(folder, path)}) for path in ("a", "b"))
    assert one and two and one != two
    if OTHER not in lines:
        assert planned({**offsets(*lines), **listed(str(len(lines)), "a")}) == "", "that is no source's of these"


def test_sources_with_names() -> None:
    """As the second version of the log has them."""

    def text(*lines: str) -> dict[str, str]:
        return {"offsets/6": "\n".join(["v2", "{}", *lines])}

    one, two = (planned({**text("0:9", f"lines:{FILES}"), **listed("lines", path)}) for path in ("a", "b"))
    assert one and two and one != two
    assert planned(text(f"lines:{FILES}")) == ""
    assert (
        planned(text('a:{"/0":1}', "b:9")) == planned(text("b:9", 'a:{"/0":1}')) != planned(text('a:{"/0":2}', "b:9"))
    )
    assert ends_within(planned(text('0:{"/0":1}')), planned(text('0:{"/0":2}')))
    assert not ends_within(planned(text('0:{"/0":1}')), planned(text('1:{"/0":2}')))


def test_what_cannot_be_read_tells_nothing(tmp_path: Path) -> None:
    assert planned({}) == planned(offsets('{"logOffset":6}')) == ""
    assert planned(offsets("-", "null", "no json", '{"logOffset":"6"}'))
    assert in_folder(str(tmp_path))("offsets/6") is None
    (tmp_path / "binary").write_bytes(b"\xff")
    assert in_folder(str(tmp_path))("binary") is None


def test_folders_of_this_machine(tmp_path: Path) -> None:
    folder = tmp_path / "a b%20c"
    folder.mkdir()
    for place in (str(folder), f"file:{folder}", f"file://{folder}"):
        assert local_folder(place) == str(folder)
    for place in ("", "relative", "..:x", "hdfs://name/tmp", "s3a://bucket/tmp", f"{folder}/not there"):
        assert local_folder(place) is None
