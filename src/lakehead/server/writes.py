"""Writes of one server: the whole request is checked before the first tablet has anything of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import crc32c
import msgspec
import pyarrow as pa

from lakehead.config import Limits
from lakehead.env import Threads
from lakehead.errors import (
    CorruptionError,
    InvalidRequestError,
    LakeheadError,
    LimitExceededError,
    NullKeyError,
    OutcomeUnknownError,
    SchemaMismatchError,
    WrongTableKindError,
)
from lakehead.format.content import content_checksum
from lakehead.format.frame import WRITE_KINDS, Content, FrameBody, WriterStamp, decode_body, encode_body
from lakehead.format.nulls import required_columns
from lakehead.format.storable import check_storable
from lakehead.protocol import messages as m
from lakehead.protocol.privileges import Privilege
from lakehead.server.access import Caller, may
from lakehead.server.admission import Bounded
from lakehead.server.group_commit import PendingWrite
from lakehead.server.metadata import MetadataStore, require_tablets
from lakehead.server.named_writers import NamedWriters, require_clients_own
from lakehead.server.tables import LiveTable, LiveTables
from lakehead.server.tablet import Tablet
from lakehead.types import Offset, TableDescriptor, TabletKey, WriteKind

_EVERY_SEQUENCE = 2**63
_SMALL_PART_BYTES = 256 << 10


class CheckedBatch(NamedTuple):
    """Rows that were checked, for tablets of one table, as a batch of a writer."""

    table: LiveTable
    kind: WriteKind
    schema_id: int
    rows: Mapping[TabletKey, pa.RecordBatch]
    stamp: WriterStamp


class Writes:
    """Answers requests of writers. Thread-safe."""

    def __init__(
        self,
        metadata: MetadataStore,
        tables: LiveTables,
        limits: Limits,
        threads: Threads,
        run_in_background: Callable[[Callable[[], None]], object],
    ) -> None:
        self._tables = tables
        self._metadata = metadata
        self._me = metadata.incarnation
        self._limits = limits
        self._threads = threads
        self._run_in_background = run_in_background
        self._writers = NamedWriters(metadata, threads)
        self._bytes = Bounded(threads, "write_bytes_max", "bytes of writes", limits.write_bytes_max)

    def write(self, request: m.Write, attachments: Sequence[pa.Buffer], caller: Caller) -> m.WriteReply:
        """See `Write`; named writers are those of the caller's principal."""
        table = self._tables.get(request.table_id)
        parts = self.checked(table, request, attachments)
        for body, _ in parts:
            require_clients_own(body.stamp.writer_id)
        stamp = _common_stamp(request, [body for body, _ in parts])
        held = self._bytes.take(sum(a.size for a in attachments), caller.share)
        try:
            if stamp is None:
                return self._write_parts(table, request, parts, None)
            content = _whole_content(request, [rows for _, rows in parts])
            with self._writers.writing(table, stamp, content, caller.principal):
                return self._write_parts(table, request, parts, content)
        finally:
            self._bytes.give_back(held)

    def checked(
        self, table: LiveTable, request: m.Write, attachments: Sequence[pa.Buffer]
    ) -> list[tuple[FrameBody, pa.RecordBatch]]:
        """The parts of a batch that fits the table, for each tablet of the request.

        Raises:
            LakeheadError: something of it may not be written; see `Write`.
        """
        if not len(request.tablets) == len(request.checksums) == len(attachments):
            raise InvalidRequestError("a write must have one checksum and one attachment for each tablet")
        bodies = [decode_body(buffer, crc) for buffer, crc in zip(attachments, request.checksums, strict=True)]
        desc = table.as_of(bodies[0].schema_id) if bodies else table.desc
        if desc.keyed == (request.kind == "append"):
            kind, use = ("primary-key", "upsert") if desc.keyed else ("log", "append")
            raise WrongTableKindError(f"{desc.path} is a {kind} table: use {use}, not {request.kind}")
        schema = body_schema(desc, request)
        parts = [(body, self._checked_rows(desc, body, schema)) for body in bodies]
        self.check_partitions(table, request.tablets)
        return parts

    def publish(self, batches: Sequence[CheckedBatch]) -> list[LakeheadError | None]:
        """Write batches of different tables side by side, each to the tablets that do not have it yet. It says nothing
        of a writer's batch before, which each tablet knows.

        Returns:
            for each what kept its part from some tablets, if anything did: the same again gives it to them alone.
        """
        errors: list[LakeheadError | None] = [None] * len(batches)
        begun: list[tuple[int, list[Tablet], list[PendingWrite]]] = []
        held: list[int] = []
        try:
            for n, batch in enumerate(batches):
                try:
                    held.append(self._bytes.take(sum(rows.nbytes for rows in batch.rows.values())))
                    begun.append((n, *self._unwritten(batch)))
                except LakeheadError as e:
                    errors[n] = e
            self._begin([t for _, tablets, _ in begun for t in tablets], [w for *_, writes in begun for w in writes])
            for n, tablets, writes in begun:
                try:
                    _answers(tablets, writes)
                except LakeheadError as e:
                    errors[n] = e
        finally:
            for taken in held:
                self._bytes.give_back(taken)
        return errors

    def _unwritten(self, batch: CheckedBatch) -> tuple[list[Tablet], list[PendingWrite]]:
        """What is to be written of a batch, and to which tablets."""
        tablets: list[Tablet] = []
        writes: list[PendingWrite] = []
        table, stamp = batch.table, batch.stamp
        for key, rows in batch.rows.items():
            tablet = table.tablet(key, create=True)
            assert tablet is not None
            last = tablet.writers.last_sequence(stamp.writer_id, _EVERY_SEQUENCE)
            if last is not None and last >= stamp.sequence:
                continue
            writes.append(self._published(table, batch.kind, batch.schema_id, rows, stamp, last))
            tablets.append(tablet)
        if len(tablets) > 1:
            for tablet, write in zip(tablets, writes, strict=True):
                tablet.require_change(write)
        return tablets, writes

    def replace(
        self, table: LiveTable, key: TabletKey, before: Offset, schema_id: int,
        batches: Iterable[tuple[WriteKind, pa.RecordBatch, WriterStamp]],
    ) -> None:  # fmt: skip
        """Write batches of a writer to a tablet that does not have them yet, in place of all rows below an offset, also
        of those of a lake; see `Tablet.truncate`.

        Raises:
            LakeheadError: the tablet does not have them all; the same call again goes on.
        """
        tablet = table.tablet(key, create=True)
        assert tablet is not None

        def writes() -> Iterator[PendingWrite]:
            for kind, batch, stamp in batches:
                last = tablet.writers.last_sequence(stamp.writer_id, _EVERY_SEQUENCE)
                if last is None or last < stamp.sequence:
                    yield self._published(table, kind, schema_id, batch, stamp, last)

        with tablet.paused():
            tablet.truncate(before, writes(), lake_follows=not table.desc.log_decides)
        table.progress.notify()

    def _published(
        self, table: LiveTable, kind: WriteKind, schema_id: int, batch: pa.RecordBatch, stamp: WriterStamp,
        last: int | None,
    ) -> PendingWrite:  # fmt: skip
        appended = kind == "append"
        body = encode_body(
            batch,
            schema_id=schema_id,
            stamp=msgspec.structs.replace(stamp, previous_sequence=-1 if last is None else last),
            compression=table.desc.properties.compression if appended else "none",
            with_statistics=appended,
        )
        return PendingWrite(kind, body, batch, self._threads.done(), Content(body.crc or 1, WRITE_KINDS[kind]))

    def _write_parts(
        self,
        table: LiveTable,
        request: m.Write,
        parts: list[tuple[FrameBody, pa.RecordBatch]],
        content: Content | None,
    ) -> m.WriteReply:
        """``content`` is that of a named writer's batch; an anonymous one can only send the same bytes again."""
        kind = WRITE_KINDS[request.kind]
        writes = [
            PendingWrite(
                request.kind,
                body,
                rows,
                self._threads.done(),
                content or Content(body.crc or 1, kind),
            )
            for body, rows in parts
        ]
        found = [table.tablet(ref.key, create=True) for ref in request.tablets]
        tablets = [t for t in found if t is not None]
        if len(tablets) > 1:
            # What one tablet alone would refuse, none may have written.
            for tablet, write in zip(tablets, writes, strict=True):
                tablet.require_change(write)
        offsets = self._submit(tablets, writes)
        return m.WriteReply(offsets=offsets, folder_id=self._me.folder_id, incarnation=self._me.number)

    def check_partitions(self, table: LiveTable, tablets: Sequence[m.TabletRef]) -> None:
        """Return if rows may be written to all of these tablets.

        Raises:
            NotLeaderError: one lives on another server.
            LimitExceededError: the table would have too many partitions.
        """
        unknown = [ref.key for ref in tablets if ref.key not in table.tablets]
        for key in unknown:
            table.require_here(key)
        new = {key.partition for key in unknown}
        count = len(new | {key.partition for key in table.tablets}) if new else 0
        if count > self._limits.partitions_max:
            raise LimitExceededError(
                f"{table.desc.path} would have {count:,} partitions, over the limit of {self._limits.partitions_max:,}:"
                f" partition_by={list(table.desc.partition_by)} is too fine, use buckets for columns of many values",
                partitions_max=self._limits.partitions_max,
            )
        longest = max((len(name) for name in new), default=0)
        if longest > self._limits.partition_name_max:
            raise LimitExceededError(
                f"the values of a partition of {table.desc.path} take {longest:,} bytes, over the limit of"
                f" {self._limits.partition_name_max:,}: partition by shorter ones",
                partition_name_max=self._limits.partition_name_max,
            )
        if new:
            require_tablets(self._metadata, table.desc.path, len(new) * table.desc.buckets, self._limits)

    def _checked_rows(self, desc: TableDescriptor, body: FrameBody, schema: pa.Schema) -> pa.RecordBatch:
        if body.buffer.size > self._limits.batch_bytes_max:
            raise LimitExceededError(
                f"a batch of {body.buffer.size} bytes is over the limit of {self._limits.batch_bytes_max}: split it",
                batch_bytes_max=self._limits.batch_bytes_max,
            )
        if body.schema_id != desc.schema_id:
            raise SchemaMismatchError(
                f"one batch has schema {body.schema_id}, another {desc.schema_id}: write one each"
            )
        try:
            rows = body.received_rows(schema, bytes_max=self._limits.batch_bytes_max)
        except CorruptionError as e:
            raise SchemaMismatchError(f"the batch does not have the schema of {desc.path}: {e}") from e
        for name in required_columns(schema):
            if rows.column(name).null_count:
                raise NullKeyError(f"column {name!r} of {desc.path} may not be null", column=name)
        check_storable(rows, schema, f"a batch for {desc.path}")
        return rows

    def _submit(self, tablets: list[Tablet], writes: list[PendingWrite]) -> list[tuple[int, int]]:
        self._begin(tablets, writes)
        return _answers(tablets, writes)

    def _begin(self, tablets: list[Tablet], writes: list[PendingWrite]) -> None:
        idle = [tablet for tablet, write in zip(tablets, writes, strict=True) if tablet.submit(write)]
        if not any(tablet.committer.waits for tablet in idle) and _small(writes):
            for tablet in idle:
                tablet.drive()
            return
        # Each tablet syncs its own file: side by side, or the syncs would add up.
        for tablet in idle[1:]:
            try:
                self._run_in_background(tablet.drive)
            except RuntimeError:  # the server is closing: nobody else would, and who comes after would wait for ever
                tablet.drive()
        if idle:
            idle[0].drive()

    def forget(self, table_id: str) -> None:
        """Forget the named writers of a table that is dropped."""
        self._writers.forget(table_id)

    def open_writer(self, request: m.OpenWriter, caller: Caller) -> m.WriterReply:
        """See `OpenWriter`. Who may manage the table may take a name that is another's."""
        table = self._tables.get(request.table_id)
        taking = may(caller, Privilege.MANAGE, request.table_id)
        limit = self._limits.named_writers_max
        return self._writers.open(table, request, writers_max=limit, principal=caller.principal, taking=taking)

    def close_writer(self, request: m.CloseWriter, caller: Caller) -> m.Done:
        """See `CloseWriter`."""
        self._writers.close(request, caller.principal)
        return m.Done()


def _small(writes: Sequence[PendingWrite]) -> bool:
    """Whether other threads would take longer to be woken, and for their turns at the interpreter, than these writes
    take one after the other."""
    return sum(write.body.buffer.size for write in writes) <= len(writes) * _SMALL_PART_BYTES


def _answers(tablets: Sequence[Tablet], writes: Sequence[PendingWrite]) -> list[tuple[int, int]]:
    """The offsets of one batch's writes, once all have ended; raises what some failed with."""
    errors: list[LakeheadError] = []
    offsets: list[tuple[int, int]] = []
    written: list[Tablet] = []
    for tablet, write in zip(tablets, writes, strict=True):
        try:
            offsets.append(write.wait())
            written.append(tablet)
        except LakeheadError as e:
            errors.append(e)
    errors.sort(key=lambda e: not isinstance(e, OutcomeUnknownError))
    if errors and written:
        first = errors[0]
        done = "; ".join(f"{tablet.key}: {part}" for tablet, part in zip(written, offsets, strict=True))
        context = {**first.context, "acknowledged": done}
        raise type(first)(f"{first} (other tablets have their part: {done})", **context) from first
    if errors:
        raise errors[0]
    return offsets


def body_schema(desc: TableDescriptor, request: m.Write) -> pa.Schema:
    """The columns that the bodies of a write have.

    Raises:
        SchemaMismatchError: they are not those that the table takes for it.
    """
    if request.columns == desc.schema.names and request.kind != "delete":
        return desc.schema
    known = set(desc.schema.names)
    if not set(request.columns) <= known:
        raise SchemaMismatchError(f"{desc.path} has no columns {sorted(set(request.columns) - known)}")
    if request.kind == "upsert" and request.columns != [c for c in desc.schema.names if c in request.columns]:
        raise SchemaMismatchError(f"columns {request.columns} are not in the order that {desc.path} has them")
    if request.kind == "append" and request.columns != desc.schema.names:
        raise SchemaMismatchError(f"an append to {desc.path} must hold all its columns in their order")
    if request.kind == "delete" and request.columns != list(desc.primary_key):
        raise SchemaMismatchError(f"a delete from {desc.path} must hold exactly the columns {desc.primary_key}")
    required = required_columns(desc.schema)
    if request.kind == "upsert" and not set(required) <= set(request.columns):
        raise SchemaMismatchError(f"an upsert to {desc.path} must hold the non-null columns {required}")
    return pa.schema([desc.schema.field(c) for c in request.columns])


def _common_stamp(request: m.Write, bodies: Sequence[FrameBody]) -> WriterStamp | None:
    """Of a named writer's batch the stamp, but for what differs between tablets; None for an anonymous one's.

    Raises:
        InvalidRequestError: the bodies are not parts of one batch.
    """
    if not any(body.stamp.epoch for body in bodies):
        return None
    stamps = {msgspec.structs.replace(b.stamp, previous_sequence=-1) for b in bodies}
    if len(stamps) > 1 or any(s.tablets not in (0, len(request.tablets)) for s in stamps):
        raise InvalidRequestError("the parts of a write must be those of one batch of one writer")
    return next(iter(stamps))


def _whole_content(request: m.Write, parts: Sequence[pa.RecordBatch]) -> Content:
    """What a client's batch says, whichever tablets its rows belong to."""
    checksum = 0
    for ref, rows in sorted(zip(request.tablets, parts, strict=True), key=lambda part: part[0].key):
        tablet = f"{ref.partition}\0{ref.bucket}\0".encode()
        checksum = content_checksum(rows, crc32c.crc32c(tablet, checksum))
    return Content(checksum or 1, WRITE_KINDS[request.kind])
