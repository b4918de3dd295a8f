"""The model: what was asked, what is in each tablet's log, and what must therefore be seen.

Every frame that reaches the simulated disk is compared, as it is written, with what a plain Python table would have
logged for that batch. So the logs kept here are right by construction, and every answer of the server is held to them.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pyarrow as pa
from tests.simulation.disk import Disk

from lakehead.format.defaults import defaults_of
from lakehead.format.frame import Frame, decode_body, decode_frame
from lakehead.protocol import messages as m
from lakehead.protocol.schemas import schema_from_text
from lakehead.types import UNPARTITIONED, ChangeType, TableDescriptor, TableSchema, TabletKey, field_id

Row = tuple[Any, ...]
Held = dict[int, Any]
"""A row by the ids of its fields, the same under every definition that has these. What is not there has its default;
nulls are there only of fields that have one."""
Key = tuple[Any, ...]
Writer = tuple[bytes, int]
"""Writer id and batch sequence: one batch, whichever attempt carries it."""


class Record(NamedTuple):
    """One row of a log; its offset is its place in `TabletHistory.records`."""

    change: int
    prev: int
    row: Held


@dataclass(frozen=True)
class Part:
    """What one batch asks of one tablet; columns by the ids of their fields."""

    kind: str
    columns: tuple[int, ...]
    rows: tuple[Row, ...]


Batch = dict[TabletKey, Part]
"""What one write asks of all its tablets."""


@dataclass(frozen=True)
class Logged:
    """One frame: where it lies on the disk and in the log."""

    path: str
    size_after: int
    start: int
    end: int
    batch: Writer
    synced_end: int


class TabletHistory:
    """The log of one tablet, as far as it can be in it now."""

    def __init__(self, desc: TableDescriptor, key: TabletKey, disk: Disk) -> None:
        self.desc = desc
        self.key = key
        self.records: list[Record] = []
        self.timestamps: list[int] = []
        self.frames: list[Logged] = []
        self.offsets: dict[Writer, tuple[int, int]] = {}
        self.versions: dict[Writer, frozenset[int]] = {}
        self.acked: set[Writer] = set()
        self.floor = 0
        self.log_start = 0
        self.cuts = 0
        self._disk = disk
        self._live: dict[Key, int] = {}
        self._last_sequence: dict[bytes, int] = {}
        fields = desc.schemas.current.fields
        self._key = [field_id(fields.field(c)) or 0 for c in desc.primary_key]

    def copied(self, disk: Disk, moved: Callable[[str], str]) -> TabletHistory:
        """The same log in a copy of the folder, which goes on by itself."""
        made = copy.copy(self)
        for name in ("records", "timestamps", "offsets", "versions", "acked", "_live", "_last_sequence"):
            setattr(made, name, copy.copy(getattr(self, name)))
        made._disk = disk
        made.frames = [replace(frame, path=moved(frame.path)) for frame in self.frames]
        return made

    @property
    def name(self) -> str:
        return f"{self.desc.path.table}:{self.key}"

    @property
    def end(self) -> int:
        """What the log holds, seen or not."""
        return len(self.records)

    @property
    def readable_end(self) -> int:
        """What may be seen: with ``durability="sync"`` only what a power cut spares."""
        return self.durable_end if self.desc.properties.durability == "sync" else self.end

    @property
    def durable_end(self) -> int:
        """What a power cut spares."""
        for frame in reversed(self.frames):
            if self._disk.holds(frame.path, frame.size_after, durably=True):
                return frame.end
        return 0

    def key_of(self, row: Held) -> Key:
        return tuple(row[i] for i in self._key)

    def state_at(self, end: int) -> dict[Key, int]:
        """Key -> offset of the live row, after the records below ``end``."""
        live: dict[Key, int] = {}
        for offset, record in enumerate(self.records[:end]):
            self._apply(live, offset, record)
        return live

    def live_at(self, end: int, schema: TableSchema) -> dict[int, Row]:
        """Offset -> row of what the table holds after the records below ``end``, under a definition."""
        if not self.desc.keyed:
            return {offset: shown(record.row, schema) for offset, record in enumerate(self.records[:end])}
        return {offset: shown(self.records[offset].row, schema) for offset in sorted(self.state_at(end).values())}

    def _apply(self, live: dict[Key, int], offset: int, record: Record) -> None:
        if record.change in (ChangeType.INSERT, ChangeType.UPDATE_AFTER):
            live[self.key_of(record.row)] = offset
        elif record.change == ChangeType.DELETE:
            del live[self.key_of(record.row)]

    # ---- what is written ------------------------------------------------------------------------------------------

    def expected(self, part: Part, schema: TableSchema) -> list[Record]:
        """What this part logs when it comes next, under a definition."""
        if part.kind == "append":
            return [Record(ChangeType.APPEND, -1, held(row, schema)) for row in part.rows]
        records: list[Record] = []
        live = dict(self._live)
        images: dict[int, Held] = {}
        for values in part.rows:
            given = dict(zip(part.columns, values, strict=True))
            key = self.key_of(given)
            old = live.get(key)
            image = None if old is None else images[old] if old in images else self.records[old].row
            image = None if image is None else held(shown(image, schema), schema)
            if part.kind == "delete":
                if old is not None and image is not None:
                    records.append(Record(ChangeType.DELETE, old, image))
                    del live[key]
                continue
            row = held(shown({**(image or {}), **given}, schema), schema)
            if old is None or image is None:
                records.append(Record(ChangeType.INSERT, -1, row))
            else:
                records.append(Record(ChangeType.UPDATE_BEFORE, old, image))
                records.append(Record(ChangeType.UPDATE_AFTER, old, row))
            live[key] = self.end + len(records) - 1
            images[live[key]] = row
        return records

    def append(self, path: str, size_after: int, frame: Frame, schema: TableSchema, parts: Mapping[int, Part]) -> None:
        """Take note of a frame that was written under a definition; ``parts`` are what was sent under its number, by
        version.

        Raises:
            AssertionError: it is not what must come next.
        """
        stamp = frame.body.stamp
        batch = (stamp.writer_id, stamp.sequence)
        require(bool(parts), f"{self.name} logs a batch {_short(batch)} that nobody sent")
        found = records_of(frame, schema, keyed=self.desc.keyed)
        fits = frozenset(version for version, part in parts.items() if self.expected(part, schema) == found)
        wanted = [self.expected(part, schema) for part in parts.values()]
        require(bool(fits), f"{self.name} logs at {self.end}\n  {found}\nfor {parts}, must be of\n  {wanted}")
        self._take(path, size_after, frame, found)
        self.versions[batch] = fits

    def append_deletes(self, path: str, size_after: int, frame: Frame, schema: TableSchema, before: int) -> None:
        """Take note of a frame of a truncation of what was written below this offset; errors as `append`."""
        found = records_of(frame, schema, keyed=self.desc.keyed)
        live = sorted(offset for offset in self._live.values() if offset < before)[: len(found)]
        wanted = [Record(ChangeType.DELETE, o, held(shown(self.records[o].row, schema), schema)) for o in live]
        require(bool(found) and found == wanted, f"{self.name} truncates {before} by\n  {found}\nnot\n  {wanted}")
        self._take(path, size_after, frame, found)
        self.versions[frame.body.stamp.writer_id, frame.body.stamp.sequence] = frozenset()

    def _take(self, path: str, size_after: int, frame: Frame, found: Sequence[Record]) -> None:
        stamp = frame.body.stamp
        batch = (stamp.writer_id, stamp.sequence)
        require(batch not in self.offsets, f"{self.name} logs batch {_short(batch)} twice")
        require(frame.base_offset == self.end, f"{self.name} goes on at {frame.base_offset}, its end is {self.end}")
        previous = self._last_sequence.get(stamp.writer_id, -1)
        require(
            stamp.previous_sequence == previous,
            f"{self.name} logs {_short(batch)}, which follows {stamp.previous_sequence}, after {previous}",
        )
        before = self.timestamps[-1] if self.timestamps else 0
        require(frame.timestamp_us >= before, f"{self.name}: the commit time goes back at {self.end}")
        self.frames.append(Logged(path, size_after, self.end, frame.end_offset, batch, frame.synced_end))
        self.offsets[batch] = (frame.base_offset, frame.end_offset)
        self._last_sequence[stamp.writer_id] = stamp.sequence
        for record in found:
            self._apply(self._live, self.end, record) if self.desc.keyed else None
            self.records.append(record)
            self.timestamps.append(frame.timestamp_us)

    def cut(self) -> int:
        """The power went: forget what is not on the disk any more; returns how many records.

        Raises:
            AssertionError: among it is what must survive.
        """
        held = [self._disk.holds(frame.path, frame.size_after) for frame in self.frames]
        kept = held.index(False) if False in held else len(held)
        lost, self.frames = self.frames[kept:], self.frames[:kept]
        if not lost:
            return 0
        for frame in lost:
            promised = self.desc.properties.durability == "sync" and frame.batch in self.acked
            require(not promised, f"{self.name} lost the acknowledged batch {_short(frame.batch)} in a power cut")
            del self.offsets[frame.batch], self.versions[frame.batch]
            self.acked.discard(frame.batch)
        end, rows = lost[0].start, self.end - lost[0].start
        del self.records[end:], self.timestamps[end:]
        self._live = self.state_at(end) if self.desc.keyed else {}
        self._last_sequence = dict(f.batch for f in self.frames)
        if self.desc.properties.durability == "sync":
            require(self.floor <= end, f"{self.name} showed offsets up to {self.floor}, a power cut left {end}")
        self.floor = min(self.floor, end)
        self.cuts += 1
        return rows

    def sealed_frames(self) -> list[Logged]:
        """Frames on the disk whose damage must be noticed: other frames there tell that they were synced. One without
        rows has no offset of its own, so only those that tell of a later offset speak for it."""
        held = [f for f in self.frames if self._disk.present(f.path)]
        marks = sorted((f.synced_end for f in held), reverse=True)[:2]
        if len(marks) < 2:
            return []
        others = {True: marks[1], False: marks[0]}
        return [f for f in held if max(f.end, f.start + 1) <= others[f.synced_end == marks[0]]]

    # ---- what is seen ---------------------------------------------------------------------------------------------

    def see(self, offset: int, floor: int, what: str) -> None:
        """A reader was told that all below this offset is readable; ``floor`` is what was, when it asked.

        Raises:
            AssertionError: that is less than others saw before, or more than may be seen.
        """
        readable = self.readable_end
        require(offset >= floor, f"{self.name}: {what} ends at {offset}, earlier readers saw up to {floor}")
        require(offset <= readable, f"{self.name}: {what} ends at {offset}, but only {readable} may be seen")
        self.floor = max(self.floor, offset)


def require(holds: bool, message: str) -> None:
    """Raises: AssertionError, unless it holds: a promise is broken."""
    if not holds:
        raise AssertionError(message)


def _short(batch: Writer) -> str:
    return f"{batch[0].hex()[:6]}#{batch[1]}"


def ids_of(schema: TableSchema) -> list[int]:
    """The ids of a definition's columns, in their order."""
    return [field_id(f) or 0 for f in schema.fields]


def held(row: Row, schema: TableSchema) -> Held:
    """A row of a definition by the ids of its fields."""
    defaults = defaults_in(schema)
    return {i: v for i, v in zip(ids_of(schema), row, strict=True) if v is not None or i in defaults}


def shown(row: Held, schema: TableSchema) -> Row:
    """A row as a definition has it, with defaults in columns that are newer."""
    defaults = defaults_in(schema)
    return tuple(row.get(i, defaults.get(i)) for i in ids_of(schema))


@functools.lru_cache(maxsize=256)
def defaults_in(schema: TableSchema) -> dict[int, Any]:
    """Defaults by the ids of their fields."""
    found = defaults_of(schema.fields)
    return {field_id(f) or 0: found[f.name].as_py() for f in schema.fields if f.name in found}


def records_of(frame: Frame, schema: TableSchema, *, keyed: bool) -> list[Record]:
    """The records of a frame, read column by column."""
    rows = [held(row, schema) for row in rows_of(frame.body.rows(schema.columns))]
    changes = frame.body.change_types.tolist()
    previous = frame.body.prev_offsets.tolist() if keyed else [-1] * len(rows)
    return [Record(*values) for values in zip(changes, previous, rows, strict=True)]


def rows_of(batch: pa.RecordBatch | pa.Table) -> list[Row]:
    """Rows as tuples."""
    return list(zip(*(c.to_pylist() for c in batch.columns), strict=True))


@dataclass
class History:
    """All tables of a deployment: what was sent, and the tablets' logs.

    Attributes:
        schema_texts: definitions of a table as the catalog has them.
        truncations: offsets below which tablets of a table are to have no rows, as the catalog has them.
        sent_batches: what was sent under each number; more than one only by writers that are `divergent`.
        epochs: the newest of each named writer, by table.
    """

    disk: Disk
    partition_names: Callable[[str], Mapping[int, str]]
    schema_texts: Callable[[str], Mapping[int, str]]
    truncations: Callable[[str], Mapping[TabletKey, int]]
    tables: dict[str, TableDescriptor] = field(default_factory=dict)
    tablets: dict[tuple[str, TabletKey], TabletHistory] = field(default_factory=dict)
    sent_batches: dict[tuple[str, Writer], list[Batch]] = field(default_factory=dict)
    divergent: set[bytes] = field(default_factory=set)
    epochs: dict[str, dict[bytes, int]] = field(default_factory=dict)
    lakes: dict[str, Callable[[], Mapping[TabletKey, int]]] = field(default_factory=dict)
    _schemas: dict[tuple[str, int], TableSchema] = field(default_factory=dict)

    def copied(
        self,
        disk: Disk,
        partition_names: Callable[[str], Mapping[int, str]],
        schema_texts: Callable[[str], Mapping[int, str]],
        truncations: Callable[[str], Mapping[TabletKey, int]],
        moved: Callable[[str], str],
    ) -> History:
        """That of a copy of the folder, without lakes."""
        return History(
            disk,
            partition_names,
            schema_texts,
            truncations,
            dict(self.tables),
            {at: tablet.copied(disk, moved) for at, tablet in self.tablets.items()},
            {number: list(batches) for number, batches in self.sent_batches.items()},
            set(self.divergent),
            {table_id: dict(epochs) for table_id, epochs in self.epochs.items()},
        )

    def of(self, table_id: str) -> Iterator[TabletHistory]:
        """Tablets of a table that were written to, by key."""
        for (owner, _), tablet in sorted(self.tablets.items()):
            if owner == table_id and (tablet.frames or tablet.cuts):
                yield tablet

    def tablet(self, table_id: str, key: TabletKey) -> TabletHistory:
        at = (table_id, key)
        if at not in self.tablets:
            self.tablets[at] = TabletHistory(self.tables[table_id], key, self.disk)
        return self.tablets[at]

    def definition(self, table_id: str, schema_id: int) -> TableSchema:
        """One of a table's definitions; of a table that is dropped its first at least."""
        if schema_id == (first := self.tables[table_id].schemas.current).id:
            return first
        if (table_id, schema_id) not in self._schemas:
            texts = self.schema_texts(table_id)
            require(schema_id in texts, f"schema {schema_id} is used, the catalog has {sorted(texts)}")
            self._schemas |= {(table_id, i): schema_from_text(i, text) for i, text in texts.items()}
        return self._schemas[table_id, schema_id]

    def sent(self, request: m.Write, bodies: Sequence[pa.Buffer]) -> None:
        """A writer is about to send this, for the first time or again.

        Raises:
            AssertionError: it sent something else under the same number before, and is none that does.
        """
        self.version(request, bodies)

    def version(self, request: m.Write, bodies: Sequence[pa.Buffer]) -> int:
        """Which of the batches that were sent under its number this one is; see `sent`."""
        definition = self.definition(request.table_id, decode_body(bodies[0]).schema_id)
        schema = pa.schema([definition.columns.field(c) for c in request.columns])
        ids = tuple(field_id(definition.fields.field(c)) or 0 for c in request.columns)
        batch: Batch = {}
        for ref, buffer in zip(request.tablets, bodies, strict=True):
            body = decode_body(buffer)
            batch[ref.key] = Part(request.kind, ids, tuple(rows_of(body.rows(schema))))
        number = (body.stamp.writer_id, body.stamp.sequence)
        known = self.sent_batches.setdefault((request.table_id, number), [])
        if batch not in known:
            again = bool(known) and number[0] not in self.divergent
            require(not again, f"{_short(number)} is sent with other rows than before")
            known.append(batch)
        return known.index(batch)

    def landed(self, table_id: str, number: Writer) -> frozenset[int] | None:
        """Which versions of a batch may be what is in the log, None while no tablet has any.

        Raises:
            AssertionError: tablets have parts of different ones.
        """
        found = [t.versions[number] for t in self.of(table_id) if number in t.versions]
        if not found:
            return None
        common = frozenset.intersection(*found)
        require(bool(common), f"parts of different batches landed as {_short(number)}")
        return common

    def missing(self, table_id: str, number: Writer) -> list[TabletKey]:
        """Tablets that lack their part of a batch, of the version that landed if any has."""
        sent = self.sent_batches[table_id, number]
        landed = self.landed(table_id, number)
        lacks = [
            [k for k in batch if number not in self.tablet(table_id, k).offsets]
            for version, batch in enumerate(sent)
            if landed is None or version in landed
        ]
        return min(lacks, key=len)

    def opened(self, request: m.OpenWriter, reply: m.WriterReply) -> None:
        """A writer was opened: its successor goes on after the last batch that is in every tablet it went to.

        Raises:
            AssertionError: it is told something else.
        """
        table_id, writer_id, last = request.table_id, request.writer_id, reply.last_sequence
        tablets = list(self.of(table_id))
        lossy = any(t.cuts for t in tablets) and self.tables[table_id].properties.durability == "os"
        if lossy or reply.epoch <= self.epochs.get(table_id, {}).get(writer_id, 0):
            return
        newest = max((b[1] for t in tablets for b in t.offsets if b[0] == writer_id), default=-1)
        require(last <= newest, f"a writer is to go on after {last}, its newest batch is {newest}")
        if newest >= 0 and not self.missing(table_id, (writer_id, newest)):
            require(last == newest, f"a writer is to go on after {last}, but {newest} is in every tablet")
        for n in range(last + 1):
            lacks = self.missing(table_id, (writer_id, n)) if (table_id, (writer_id, n)) in self.sent_batches else []
            require(not lacks, f"a writer is to go on after {last}, but {lacks} lack their part of {n}")

    def answered(self, request: m.Write, bodies: Sequence[pa.Buffer], reply: m.WriteReply) -> None:
        """The server acknowledged this; the answer may still get lost.

        Raises:
            AssertionError: it is not, or not yet durably, in the log.
        """
        version = self.version(request, bodies)
        for ref, buffer, offsets in zip(request.tablets, bodies, reply.offsets, strict=True):
            stamp = decode_body(buffer).stamp
            batch = (stamp.writer_id, stamp.sequence)
            tablet = self.tablet(request.table_id, ref.key)
            logged = tablet.offsets.get(batch)
            require(
                logged == tuple(offsets),
                f"{tablet.name} answers that batch {_short(batch)} has offsets {offsets}; it has {logged}",
            )
            require(version in tablet.versions[batch], f"{tablet.name} acknowledges other rows than it has: {batch}")
            readable = tablet.readable_end
            require(
                offsets[1] <= readable,
                f"{tablet.name} acknowledges {_short(batch)} up to {offsets[1]}, {readable} is safe",
            )
            tablet.acked.add(batch)
            tablet.floor = max(tablet.floor, offsets[1])

    def unwritten(self, writer_id: bytes) -> list[str]:
        """Parts of a writer's batches that are in no log."""
        return [
            f"{key} {_short(number)}"
            for table_id, number in self.sent_batches
            if number[0] == writer_id
            for key in self.missing(table_id, number)
        ]

    def written(self, path: str, data: bytes, size_after: int) -> None:
        """Bytes were appended to a file; those of segments are frames."""
        if not path.endswith(".log"):
            return
        table_id, key = self._tablet_at(os.path.dirname(path))
        tablet = self.tablet(table_id, key)
        buffer, at = pa.py_buffer(data), 0
        while at < len(data):
            frame = decode_frame(buffer.slice(at), check=True)
            at += frame.length
            stamp = frame.body.stamp
            number = (stamp.writer_id, stamp.sequence)
            sent = self.sent_batches.get((table_id, number), [])
            parts = {version: batch[key] for version, batch in enumerate(sent) if key in batch}
            schema = self.definition(table_id, frame.body.schema_id)
            before = None if sent else self.truncations(table_id).get(key)
            if before is not None:
                tablet.append_deletes(path, size_after - len(data) + at, frame, schema, before)
                continue
            tablet.append(path, size_after - len(data) + at, frame, schema, parts)
            self.landed(table_id, number)

    def removed(self, path: str) -> None:
        """A file is about to be removed; a segment only when nobody needs it any more.

        Raises:
            AssertionError: it is needed.
        """
        if not path.endswith(".log"):
            return
        tablet = self.tablet(*self._tablet_at(os.path.dirname(path)))
        end = max((f.end for f in tablet.frames if f.path == path), default=0)
        folder = os.path.dirname(path)
        covered = [
            int(n.removesuffix(".checkpoint")) for n in self.disk.list_files(folder) if n.endswith(".checkpoint")
        ]
        require(end <= max(covered, default=0), f"{tablet.name} trims up to {end}, its checkpoints are at {covered}")
        if table := self.lakes.get(tablet.desc.table_id):
            tiered = table().get(tablet.key, 0)
            require(end <= tiered, f"{tablet.name} trims up to {end}, its lake ends at {tiered}")
        tablet.log_start = max(tablet.log_start, end)

    def _tablet_at(self, folder: str) -> tuple[str, TabletKey]:
        rest, bucket = os.path.split(folder)
        table_folder, _ = os.path.split(rest)
        short = table_folder.rsplit("-", 1)[1]
        table_id = next(i for i in self.tables if i.startswith(short))
        number = int(os.path.basename(rest).rsplit("-", 1)[1])
        partition = self.partition_names(table_id)[number] if self.tables[table_id].partition_by else UNPARTITIONED
        return table_id, TabletKey(partition, int(bucket.rsplit("-", 1)[1]))

    def cut(self) -> int:
        """The power went; see `TabletHistory.cut`."""
        self._schemas.clear()
        return sum(tablet.cut() for _, tablet in sorted(self.tablets.items()))

    def floors(self, table_id: str) -> Mapping[TabletKey, int]:
        """What readers of a table have seen so far."""
        return {t.key: t.floor for t in self.of(table_id)}


def by_offset(rows: Iterable[tuple[int, Row]]) -> dict[int, Row]:
    """Rows by offset.

    Raises:
        AssertionError: an offset comes twice.
    """
    out: dict[int, Row] = {}
    for offset, row in rows:
        require(offset not in out, f"offset {offset} is read twice: {out.get(offset)} and {row}")
        out[offset] = row
    return out
