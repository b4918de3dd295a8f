"""Names of files and folders: whatever call a process dies in, what its successor acknowledges survives a power cut."""

from __future__ import annotations

import pyarrow as pa
import pytest
from tests.log_writing import write

from lakehead.errors import StorageError
from lakehead.format.frame import FrameBody, WriterStamp, encode_body
from lakehead.log.checkpoint import write_checkpoint
from lakehead.log.tablet import LogTablet
from lakehead.testing.storage import FaultyStorage

SCHEMA = pa.schema([("n", pa.int64())])
TABLET = "/data/tables/t/partition-0/bucket-0"


class Killed(BaseException):
    """Nothing that the process would do after this is done."""


def body(at: int, sequence: int, writer: bytes) -> FrameBody:
    batch = pa.RecordBatch.from_pydict({"n": [at, at + 1, at + 2]}, schema=SCHEMA)
    return encode_body(batch, schema_id=0, stamp=WriterStamp(writer, sequence, sequence - 1))


class Process:
    """One process after the other on one disk, and what they acknowledged."""

    def __init__(self) -> None:
        self.storage = FaultyStorage()
        self.acknowledged = 0

    def open(self) -> LogTablet:
        return LogTablet(self.storage, TABLET, segment_bytes=1000)

    def write(self, log: LogTablet, batches: int, writer: bytes) -> None:
        for sequence in range(batches):
            write(log, [body(log.log_end_offset, sequence, writer)], 5)
            log.sync()
            log.advance_high_watermark()
            self.acknowledged = log.high_watermark

    def checkpoint(self, log: LogTablet) -> None:
        log.install(write_checkpoint(self.storage, TABLET, log.take_checkpoint(0), SCHEMA, ()))

    def live(self) -> None:
        """A life: new folders, several segments, checkpoints, a trim, a clean stop."""
        log = self.open()
        self.write(log, 6, b"a" * 16)
        self.checkpoint(log)
        self.write(log, 6, b"b" * 16)
        self.checkpoint(log)
        log.trim(log.checkpoint_offset)
        self.write(log, 3, b"c" * 16)
        log.close()


@pytest.mark.parametrize("names_only", [True, False], ids=["at a folder sync", "at any call"])
def test_a_successor_keeps_what_it_acknowledges(names_only: bool) -> None:
    calls = 0
    while True:
        process, left = Process(), calls

        def kill(action: str, path: str) -> None:
            nonlocal left
            if action == "sync_folder" or not names_only:
                left -= 1
                if left < 0:
                    raise Killed

        process.storage.before = kill
        try:
            process.live()
        except Killed:
            died = True
        else:
            died = False
        process.storage.before = None
        log = process.open()
        process.write(log, 2, b"successor-------")
        process.storage.crash()
        log = process.open()
        assert log.log_end_offset >= process.acknowledged
        frames = log.frames(log.log_start_offset, log.log_end_offset)
        numbers = [n for f in frames for n in f.body.rows(SCHEMA).column(0).to_pylist()]
        assert numbers == list(range(log.log_start_offset, log.log_end_offset))
        if not died:
            assert calls > 10
            return
        calls += 1


def test_a_name_that_could_not_be_synced_is_made_anew() -> None:
    process = Process()
    log = process.open()
    process.write(log, 6, b"a" * 16)
    before = [n for n in process.storage.list_files(TABLET) if n.endswith(".log")]

    def refuse(action: str, path: str) -> None:
        if action == "sync_folder":
            raise OSError(5, "Input/output error")

    process.storage.before = refuse
    with pytest.raises(StorageError):
        log.roll()
    process.storage.before = None
    assert [n for n in process.storage.list_files(TABLET) if n.endswith(".log")] == before
    write(log, [body(log.log_end_offset, 0, b"between---------")], 5)
    assert sum(f.body.row_count for f in log.frames(0, log.log_end_offset)) == log.log_end_offset
    log.roll()
    process.write(log, 1, b"b" * 16)
    process.storage.crash()
    assert process.open().log_end_offset == process.acknowledged
