"""Checkpoints: all that a log's first part made of a tablet, so that the part need not be kept or replayed.

A checkpoint at offset C holds the writers' state after the frames below C and, for keyed tables, the rows that are live
at C. It is made from the one before it and the log between, by the same net change that tiering and union reads use,
beside the write path. A file ``<C as 20 digits>.checkpoint``::

     0  4s  magic "LHK1"
     4  u32 zero
     8      one Arrow IPC stream: ``__offset`` int64, ``__timestamp``, the table's columns; rows in offset order.
            Log tables have no rows in it
     .      the footer: MessagePack, `Footer`
     .  u32 length of the footer
     .  u32 crc32c of everything before
     .  4s  magic "LHK1"

It is written under another name, synced and renamed: a file of this name is whole, or damaged later.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import crc32c
import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakehead.env.storage import LogFile, Storage
from lakehead.errors import ChecksumError, CorruptionError, LakeheadError, UnsupportedFormatError
from lakehead.format.arrays import to_arrow, to_numbers
from lakehead.format.joins import gathered, join
from lakehead.format.read_as import rows_as
from lakehead.log.netchange import NO_OFFSETS, Offsets, contains, live_rows, superseded_offsets, union
from lakehead.log.records import Records
from lakehead.log.verified import CHUNK_BYTES, Watch, copied
from lakehead.log.writers import WriterState
from lakehead.types import OFFSET_COLUMN, TIMESTAMP_COLUMN, TIMESTAMP_TYPE, Offset, Schemas

SUFFIX = ".checkpoint"
MAGIC = b"LHK1"
_HEADER = MAGIC + bytes(4)
_TAIL = struct.Struct("<II4s")
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_BATCH_ROWS = 1 << 16
_SYNC_BYTES = 8 << 20
"""A checkpoint goes to disk in parts of this size: on many file systems the writers' syncs wait for all of what another
file has in memory, too."""
_ROW_FIELDS = (pa.field(OFFSET_COLUMN, pa.int64(), False), pa.field(TIMESTAMP_COLUMN, TIMESTAMP_TYPE, False))

ReadRecords = Callable[[int, int], Iterator[Records]]
"""What holds the rows of ``[start, end)``, in offset order."""


@dataclass(frozen=True)
class CheckpointPolicy:
    """When a tablet makes a checkpoint.

    Attributes:
        log_bytes: log after which one is due, unless the checkpoint itself is larger.
        small_bytes: up to this size one is made for whatever could be trimmed after it.
    """

    log_bytes: int = 64 << 20
    small_bytes: int = 1 << 20


USUAL_CHECKPOINTS = CheckpointPolicy()


class Footer(msgspec.Struct, frozen=True):
    """What a checkpoint says beside its rows.

    Attributes:
        offset: the log below it is covered.
        timestamp_us: greatest commit timestamp below ``offset``.
        schema_id: of the rows.
        rows: how many there are.
        writers: as `WriterTable.state`.
        segment: number of the first segment at ``offset`` that is not covered: frames without rows fill those before.
    """

    offset: Offset
    timestamp_us: int
    schema_id: int
    rows: int
    writers: list[WriterState]
    segment: int = 0


def checkpoint_name(offset: Offset) -> str:
    """File name of the checkpoint at this offset."""
    return f"{offset:020d}{SUFFIX}"


def named_by_offset(storage: Storage, folder: str, suffix: str) -> list[str]:
    """Files of ours with this suffix, oldest first; what someone else has put beside them is left alone."""
    names = (n for n in storage.list_files(folder) if n.endswith(suffix))
    return [n for n in names if re.fullmatch(r"\d{20}", n.removesuffix(suffix))]


class Checkpoint:
    """A checkpoint that is open for reading, by any number of threads, also after its file was removed."""

    def __init__(self, path: str, data: pa.Buffer, watch: Watch | None = None) -> None:
        """Check the bytes of a whole file.

        Args:
            watch: has looked at their checksum, and is asked before they are read.

        Raises:
            ChecksumError, CorruptionError: it is not as it was written; ``context`` names it.
            UnsupportedFormatError: a newer version wrote it.
        """
        self.path = path
        self.size_bytes = data.size
        self._watch = watch
        head, tail = data[:4].to_pybytes(), data[max(0, data.size - _TAIL.size) :].to_pybytes()
        if head != MAGIC and head[:3] == MAGIC[:3]:
            raise UnsupportedFormatError(
                f"{path} is a checkpoint of format {head!r}, this version reads {MAGIC!r}: upgrade Lakehead", path=path
            )
        if head != MAGIC or len(tail) < _TAIL.size or data.size < len(_HEADER) + _TAIL.size:
            raise ChecksumError(f"{path} is no checkpoint, or cut off: restore it", path=path, position=0)
        length, crc, magic = _TAIL.unpack(tail)
        rows_end = data.size - _TAIL.size - length
        if magic != MAGIC or rows_end < len(_HEADER) or (watch is None and crc32c.crc32c(data[: data.size - 8]) != crc):
            raise ChecksumError(f"{path} is damaged: its checksum does not match; restore it", path=path, position=0)
        try:
            self.footer = msgspec.msgpack.decode(data[rows_end : rows_end + length].to_pybytes(), type=Footer)
        except msgspec.MsgspecError as e:
            raise CorruptionError(f"{path} has a footer that cannot be read: {e}", path=path, position=rows_end) from e
        self._rows = data[len(_HEADER) : rows_end]

    @property
    def offset(self) -> Offset:
        """The log below it is covered."""
        return self.footer.offset

    def batches(self, schemas: Schemas | None = None, columns: list[int] | None = None) -> Iterator[LiveBatch]:
        """The rows, in offset order.

        Args:
            schemas: of the table, to have rows of its current one; None gives them as they were written.
            columns: positions in the current schema, None for all.

        Raises:
            CorruptionError: the rows cannot be decoded, or there is no schema of their id.
        """
        first = len(_ROW_FIELDS)
        try:
            for batch in self._watched():
                rows = batch.select(list(range(first, batch.num_columns)))
                if schemas is not None:
                    rows = rows_as(rows, self.footer.schema_id, schemas, columns)
                yield LiveBatch(to_numbers(batch.column(0)), batch.column(1), rows)
        except (pa.ArrowException, OSError) as e:
            raise CorruptionError(f"{self.path} holds rows that cannot be read: {e}", path=self.path) from e

    def _watched(self) -> Iterator[pa.RecordBatch]:
        stream = None
        while True:
            # Each time: to touch what was cut meanwhile kills the process.
            if self._watch is not None:
                self._watch.require_whole()
            stream = stream or pa.ipc.open_stream(self._rows)
            try:
                yield stream.read_next_batch()
            except StopIteration:
                return

    @property
    def damage(self) -> CorruptionError | None:
        """What was found when the file was last looked at."""
        return self._watch.damage if self._watch is not None else None

    def verify(self) -> Iterator[int]:
        """Look at all bytes of the file, copied, and remember what is wrong in `damage`; yields bytes looked at."""
        return self._watch.check() if self._watch is not None else iter(())


@dataclass(frozen=True, eq=False)
class LiveBatch:
    """Live rows with their identity: ``offsets`` int64, ``timestamps`` as `TIMESTAMP_TYPE`, one of each a row."""

    offsets: npt.NDArray[np.int64]
    timestamps: pa.Array
    rows: pa.RecordBatch

    def keep(self, mask: npt.NDArray[np.bool_]) -> LiveBatch:
        """The rows where the mask is true."""
        chosen = to_arrow(mask)
        return LiveBatch(self.offsets[mask], self.timestamps.filter(chosen), self.rows.filter(chosen))


def live_at(
    previous: Checkpoint | None, records: ReadRecords, end: int, schemas: Schemas, columns: list[int] | None = None
) -> Iterator[LiveBatch]:
    """Rows of a keyed tablet that are live at exactly ``end``, in offset order.

    Args:
        previous: where to begin; None begins at offset 0.
        records: the log from there to ``end``, which is the end of a frame.
        schemas: of the table; the rows are of the current one.
        columns: positions in it of the columns wanted; None for all.
    """
    start = previous.offset if previous is not None else 0
    gone = _superseded(records(start, end))
    if previous is not None:
        for batch in previous.batches(schemas, columns):
            dead = contains(gone, batch.offsets)
            live = batch.keep(~dead) if dead.any() else batch
            if len(live.offsets):
                yield live
    for some in records(start, end):
        offsets = np.arange(some.base_offset, some.end_offset)
        keep = live_rows(some.change_types, offsets, gone)
        if keep.any():
            timestamps = to_arrow(some.timestamps_us, TIMESTAMP_TYPE)
            batch = LiveBatch(offsets, timestamps, some.read_as(schemas, columns))
            yield batch if keep.all() else batch.keep(keep)


def _superseded(records: Iterable[Records]) -> Offsets:
    parts = [superseded_offsets(r.change_types, r.prev_offsets) for r in records if r.end_offset > r.base_offset]
    return union(*parts) if parts else NO_OFFSETS


def write_checkpoint(
    storage: Storage, folder: str, footer: Footer, schema: pa.Schema, batches: Iterable[LiveBatch]
) -> Checkpoint:
    """Write a checkpoint durably and open it.

    Args:
        footer: what it says; ``rows`` is counted here.
        schema: the columns of the schema that it names.
        batches: the live rows, in offset order; none for log tables.

    Raises:
        StorageError: the disk refused; nothing is left of it.
    """
    path = f"{folder}/{checkpoint_name(footer.offset)}"
    temporary = f"{path}.tmp"
    storage.remove(temporary)
    file = storage.open_log(temporary)
    try:
        crc, rows = _write_rows(file, schema, batches)
        text = msgspec.msgpack.encode(msgspec.structs.replace(footer, rows=rows))
        end = text + struct.pack("<I", len(text))
        file.append([end, struct.pack("<I4s", crc32c.crc32c(end, crc), MAGIC)])
        file.sync()
        storage.rename(temporary, path)
    except BaseException:
        with suppress(LakeheadError):
            storage.remove(temporary)
        raise
    finally:
        file.close()
    return open_checkpoint(storage, path)


def _write_rows(file: LogFile, schema: pa.Schema, batches: Iterable[LiveBatch]) -> tuple[int, int]:
    crc, rows, synced = 0, 0, 0
    whole = pa.schema([*_ROW_FIELDS, *schema])

    def write(part: object) -> None:
        nonlocal crc, synced
        file.append([part])
        crc = crc32c.crc32c(part, crc)  # type: ignore[arg-type]
        if file.size - synced >= _SYNC_BYTES:
            file.sync()
            synced = file.size

    write(_HEADER)
    write(whole.serialize())
    for batch in _gathered(batches):
        columns = [to_arrow(batch.offsets), batch.timestamps, *batch.rows.columns]
        write(pa.RecordBatch.from_arrays(columns, schema=whole).serialize())
        rows += len(batch.offsets)
    write(_END_OF_STREAM)
    return crc, rows


def _gathered(batches: Iterable[LiveBatch]) -> Iterator[LiveBatch]:
    """The same rows in fewer batches."""
    groups = gathered(
        batches, lambda b: (len(b.offsets), b.rows.nbytes), rows_max=_BATCH_ROWS, rows_enough=_BATCH_ROWS // 2
    )
    return (_joined(group) for group in groups)


def _joined(batches: list[LiveBatch]) -> LiveBatch:
    if len(batches) == 1:
        return batches[0]
    return LiveBatch(
        np.concatenate([b.offsets for b in batches]),
        pa.concat_arrays([b.timestamps for b in batches]),
        join([b.rows for b in batches]),
    )


def open_checkpoint(storage: Storage, path: str) -> Checkpoint:
    """Open and check a checkpoint's file; see `Checkpoint` for errors."""
    file = storage.open_log(path)
    try:
        size = file.size
        if size < len(_HEADER) + _TAIL.size or copied(storage, path).read(0, 4).to_pybytes() != MAGIC:
            return Checkpoint(path, file.read(0, size))  # which says what is wrong
        watch = Watch(storage, path, lambda: _check_file(storage, path, size))
        watch.require_whole()
        return Checkpoint(path, file.read(0, size), watch)
    finally:
        file.close()


def _check_file(storage: Storage, path: str, size: int) -> Iterator[int]:
    """Compare the checksum at a file's end with its bytes, read by copying; yields bytes looked at."""
    reader, crc, at = copied(storage, path), 0, 0
    while at < size - 8:
        part = reader.read(at, min(CHUNK_BYTES, size - 8 - at))
        if not part.size:
            break
        crc, at = crc32c.crc32c(part, crc), at + part.size
        yield part.size
    if reader.read(size - 8, 4).to_pybytes() != struct.pack("<I", crc):
        raise ChecksumError(f"{path} is damaged: its checksum does not match; restore it", path=path, position=0)
