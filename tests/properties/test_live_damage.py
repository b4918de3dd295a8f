"""Damage under a live server: whatever is done to the files, readers get the right rows or an error that names it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.log_writing import write

from lakehead.env.storage import LocalStorage
from lakehead.errors import CorruptionError
from lakehead.format.frame import WriterStamp, encode_body
from lakehead.log.checkpoint import live_at, write_checkpoint
from lakehead.log.tablet import LogTablet
from lakehead.types import ChangeType, Schemas

SCHEMA = pa.schema([("n", pa.int64())])
ROWS = 20


class Live:
    """A tablet that is open, with sealed segments and a checkpoint of its rows, all of them read before."""

    def __init__(self, folder: Path) -> None:
        self.storage, self.folder = LocalStorage(), str(folder / "tablet")
        self.log = LogTablet(self.storage, self.folder, segment_bytes=1500)
        self.write(20)
        footer = self.log.take_checkpoint(0)
        rows = live_at(None, self.log.view().records, footer.offset, Schemas.only(SCHEMA))
        self.log.install(write_checkpoint(self.storage, self.folder, footer, SCHEMA, rows))
        self.write(5)
        assert self.changes() == self.live() == list(range(25 * ROWS))

    def write(self, batches: int) -> None:
        for _ in range(batches):
            end = self.log.log_end_offset
            batch = pa.RecordBatch.from_pydict({"n": list(range(end, end + ROWS))}, schema=SCHEMA)
            body = encode_body(
                batch, schema_id=0, stamp=WriterStamp(end.to_bytes(16, "little"), 0),
                change_types=np.full(ROWS, ChangeType.INSERT, np.int8), prev_offsets=np.full(ROWS, -1),
            )  # fmt: skip
            write(self.log, [body], 1)
        self.log.sync()
        self.log.advance_high_watermark()

    def changes(self) -> list[int]:
        frames = self.log.frames(0, self.log.log_end_offset)
        return [n for f in frames for n in f.body.rows(SCHEMA).column(0).to_pylist()]

    def live(self) -> list[int]:
        view = self.log.view()
        batches = live_at(view.checkpoint, view.records, view.log_end_offset, Schemas.only(SCHEMA))
        return [n for b in batches for n in b.rows.column(0).to_pylist()]

    def read(self, path: str) -> list[int]:
        return self.changes() if path.endswith(".log") else self.live()

    def scrub(self) -> None:
        for _ in self.log.scrub():
            pass

    @property
    def sealed(self) -> list[str]:
        names = self.storage.list_files(self.folder)
        logs = [n for n in names if n.endswith(".log")][:-1]
        return [f"{self.folder}/{n}" for n in (*logs, *(n for n in names if n.endswith(".checkpoint")))]


@pytest.fixture
def live(tmp_path: Path) -> Live:
    return Live(tmp_path)


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]


DAMAGES: dict[str, Callable[[bytes, int], bytes]] = {
    "cut": lambda data, at: data[:at],
    "a bit": flip,
    "zeros": lambda data, at: data[:at] + bytes(len(data) - at),
}


def put(path: str, data: bytes) -> None:
    """As a program does that writes the file where it is."""
    before = os.stat(path)
    with open(path, "r+b") as f:
        f.write(data)
        f.truncate(len(data))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


@pytest.mark.parametrize("how", DAMAGES)
def test_what_a_program_damages_is_an_error_until_it_is_restored(live: Live, how: str) -> None:
    expected = list(range(25 * ROWS))
    assert {Path(path).suffix for path in live.sealed} == {".log", ".checkpoint"}
    for path in live.sealed:
        data = Path(path).read_bytes()
        for at in range(0, len(data), 1 + len(data) // 9):
            put(path, DAMAGES[how](data, at))
            if Path(path).read_bytes() == data:
                continue
            for _ in range(2):
                with pytest.raises(CorruptionError) as raised:
                    live.read(path)
                assert raised.value.context["path"] == path and "position" in raised.value.context
            assert path in str(live.log.damages()[0])
            live.write(1)
            expected = list(range(len(expected) + ROWS))
            put(path, data)
            assert live.read(path) == expected and live.log.damages() == []


def test_a_cut_segment_that_is_still_written_is_an_error(live: Live) -> None:
    [path] = [f"{live.folder}/{n}" for n in live.storage.list_files(live.folder) if n.endswith(".log")][-1:]
    live.write(1)
    data = Path(path).read_bytes()
    for at in range(0, len(data), 1 + len(data) // 9):
        os.truncate(path, at)
        with pytest.raises(CorruptionError, match="was cut") as raised:
            live.changes()
        assert raised.value.context == {"path": path, "position": at}
        put(path, data)


def test_what_a_disk_damages_is_found_by_the_scrub(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    live.scrub()
    assert live.log.damages() == []
    for path in live.sealed:
        data = Path(path).read_bytes()
        for at in range(0, len(data), 1 + len(data) // 5):
            before = os.stat(path)
            put(path, flip(data, at))
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            live.scrub()
            [damage] = live.log.damages()
            assert damage.context["path"] == path
            with pytest.raises(CorruptionError):
                live.read(path)
            put(path, data)
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            live.scrub()
            assert live.log.damages() == [] and live.read(path) == live.live()


def test_files_that_are_restored_from_elsewhere_or_trimmed_harm_no_reader(live: Live) -> None:
    view, expected = live.log.view(), live.changes()
    for path in live.sealed:
        data = Path(path).read_bytes()
        os.unlink(path)
        Path(path).write_bytes(data[: len(data) // 2])
    assert live.changes() == expected == live.live()
    live.log.trim(live.log.checkpoint_offset)
    frames = view.frames(0, view.log_end_offset)
    assert [n for f in frames for n in f.body.rows(SCHEMA).column(0).to_pylist()] == expected
