"""The server's front: answers every request of the protocol, whatever transport it came by."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import crc32c
import pyarrow as pa

from lakehead.config import Limits
from lakehead.env import Env
from lakehead.env.clock import SteadyClock
from lakehead.env.interrupts import shielded
from lakehead.env.place import Place
from lakehead.errors import (
    CorruptionError,
    FolderCopiedError,
    InvalidRequestError,
    LakeheadError,
    LimitExceededError,
    NoLakeError,
    NullKeyError,
    OutcomeUnknownError,
    OverloadedError,
    SchemaMismatchError,
    TableExistsError,
    TableNotFoundError,
    WrongTableKindError,
)
from lakehead.format.content import content_checksum
from lakehead.format.frame import WRITE_KINDS, Content, FrameBody, WriterStamp, decode_body
from lakehead.format.ipc_message import read_received
from lakehead.format.joins import require_answer
from lakehead.format.schema import validate_definition
from lakehead.format.values import check_storable
from lakehead.log.checkpoint import USUAL_CHECKPOINTS, CheckpointPolicy
from lakehead.protocol import messages as m
from lakehead.server.admission import Bounded
from lakehead.server.incarnations import unfenced
from lakehead.server.lake_state import LakeState
from lakehead.server.leases import Leases
from lakehead.server.maintenance import Maintenance
from lakehead.server.metadata import MetadataStore
from lakehead.server.named_writers import NamedWriters
from lakehead.server.streams import ServerStream, open_read, open_read_live, open_subscription
from lakehead.server.tables import LiveTable, LiveTables
from lakehead.server.tablet import PendingWrite, Tablet
from lakehead.types import Incarnation, Schemas, TableDescriptor, TablePath, TabletKey

_Answer = tuple[m.AnyReply, list[pa.Buffer]]


class Service:
    """All tables of one data folder, as an `Endpoint`. Thread-safe."""

    def __init__(
        self,
        folder: str,
        *,
        env: Env,
        limits: Limits,
        lake: LakeState | None,
        maintenance_seconds: float | None = None,
        place: Place | None = None,
        checkpoint_policy: CheckpointPolicy = USUAL_CHECKPOINTS,
        fence: Callable[[], None] = unfenced,
    ) -> None:
        """Open the data folder, which the caller has locked.

        Args:
            place: where the folder lies, so that a copy is noticed; None does not look.
            checkpoint_policy: when tablets make one.
            fence: raises `FencedError` once the folder may have another owner.
            maintenance_seconds: how often a thread calls `maintain`; None leaves that to the caller.

        Raises:
            UnsupportedFormatError: it was written by a newer version.
            StorageError: it cannot be written.
        """
        env = dataclasses.replace(env, clock=SteadyClock(env.clock))
        env.storage.make_folder(folder)
        self._env = env
        self._limits = limits
        self._lake = lake
        self._fence = fence
        self._metadata = MetadataStore(f"{folder}/metadata.db", env, place=place, fence=fence)
        if lake is not None:
            lake.serve(self._metadata)
        self._pool = env.threads.pool(8, "lakehead-write")
        self._tables = LiveTables(
            metadata=self._metadata,
            env=env,
            folder=f"{folder}/tables",
            lake=lake,
            run_in_background=self._pool.submit,
            seed=int(env.randomness.uuid_hex()[:16], 16),
            checkpoint_policy=checkpoint_policy,
        )
        self._tables.remove_dropped()
        self._leases = Leases(env, limits)
        self._maintenance = Maintenance(self._tables, self._leases, lake, env)
        self._create_lock = env.threads.lock()
        self._writers = NamedWriters(self._metadata, env.threads)
        self._subscriptions = Bounded(env.threads, "subscriptions_max", "subscriptions", limits.subscriptions_max)
        self._reads = Bounded(env.threads, "reads_max", "reads", limits.reads_max)
        self._write_bytes = Bounded(env.threads, "write_bytes_max", "bytes of writes", limits.write_bytes_max)
        self.closing = False
        self._handlers: dict[type[m.Request], Callable[[Any, Sequence[pa.Buffer]], _Answer]] = {
            m.Hello: self._hello,
            m.CreateTable: self._create_table,
            m.GetTable: self._get_table,
            m.ListTables: self._list_tables,
            m.ListDatabases: self._list_databases,
            m.DropTable: self._drop_table,
            m.Write: self._write,
            m.OpenWriter: self._open_writer,
            m.CloseWriter: self._close_writer,
            m.Lookup: self._lookup,
            m.Watermarks: self._watermarks,
            m.TimestampsAt: self._timestamps_at,
            m.OpenLeases: self._open_leases,
            m.RenewLeases: self._renew_leases,
            m.LeasedMetadata: self._leased_metadata,
            m.LakeInfo: self._lake_info,
            m.ReportTiered: self._report_tiered,
            m.AdoptLake: self._adopt_lake,
        }
        if maintenance_seconds is not None:
            self._maintenance.start(maintenance_seconds)

    @property
    def folder_id(self) -> str:
        """Identity of the data folder; a copy gets its own when it is first served."""
        return self.incarnation.folder_id

    @property
    def incarnation(self) -> Incarnation:
        """This start of the folder's owner."""
        return self._metadata.incarnation

    def call(self, request: m.Request, attachments: Sequence[pa.Buffer] = ()) -> _Answer:
        """Answer a request, whatever interrupts the caller: nothing here ends half done.

        Raises:
            LakeheadError: it was refused, or failed.
        """
        handler = self._handlers[type(request)]
        if type(request) is m.Lookup and self._tables.is_open(request.table_id):
            # It changes nothing, holds one plain lock, and is quicker than another thread is woken.
            return handler(request, attachments)
        return shielded(lambda: handler(request, attachments))

    def stream(self, request: m.Request) -> ServerStream:
        """Open a stream; errors as in `call`."""
        return shielded(lambda: self._stream(request), undo=ServerStream.close)

    def _stream(self, request: m.Request) -> ServerStream:
        if isinstance(request, m.Subscribe | m.Read | m.ReadLive):
            self._require_same_folder(request.folder_id)
        if isinstance(request, m.Subscribe):
            return self._counted(
                self._subscriptions, lambda: open_subscription(self._tables.get(request.table_id), request)
            )
        if isinstance(request, m.Read | m.ReadLive):
            return self._counted(self._reads, lambda: self._read(request))
        raise InvalidRequestError(f"{type(request).__name__} is not a stream request")

    def _require_same_folder(self, folder_id: str) -> None:
        if folder_id not in ("", self.folder_id):
            raise FolderCopiedError(
                "this server serves another copy of the data folder than the one that the offsets are of: open the"
                " table again, and read it from its beginning",
                folder_id=self.folder_id,
                expected=folder_id,
            )

    def close(self) -> None:
        """End subscriptions, close all tablets cleanly, release the files."""
        self.closing = True
        self._maintenance.stop()
        with contextlib.ExitStack() as stack:
            stack.callback(self._metadata.close)
            stack.callback(self._pool.shutdown)
            stack.callback(self._maintenance.join)
            stack.callback(self._leases.end_all)
            stack.callback(self._tables.close)

    def maintain(self) -> None:
        """Checkpoint and trim what is due, now, in this thread."""
        self._maintenance.run()

    # ---- metadata ---------------------------------------------------------------------------------------------

    def _hello(self, request: m.Hello, _: Sequence[pa.Buffer]) -> _Answer:
        me = self.incarnation
        hello = m.HelloReply(folder_id=me.folder_id, version=m.PROTOCOL_VERSION, pid=os.getpid(), incarnation=me.number)
        return hello, []

    def _create_table(self, request: m.CreateTable, _: Sequence[pa.Buffer]) -> _Answer:
        asked = request.info.descriptor()
        schema, primary_key, partition_by, bucket_key = validate_definition(
            asked.schema,
            primary_key=asked.primary_key,
            partition_by=asked.partition_by,
            buckets=asked.buckets,
            bucket_key=asked.bucket_key or None,
            limits=self._limits,
        )
        desc = dataclasses.replace(
            asked,
            table_id=self._env.randomness.uuid_hex(),
            schemas=Schemas.only(schema, asked.schema_id),
            primary_key=primary_key,
            partition_by=partition_by,
            bucket_key=bucket_key,
        )
        if desc.lake not in (None, "iceberg"):
            raise InvalidRequestError(f"lake={desc.lake!r} is not supported: use 'iceberg' or None")
        with self._create_lock:
            self._fence()
            try:
                existing = self._metadata.table(desc.path)
            except TableNotFoundError:
                pass
            else:
                reply = self._existing(existing, desc, if_not_exists=request.if_not_exists)
                if existing.lake is not None:
                    # A crash between the two steps below leaves a table without its lake table: made up for here.
                    self._lake_state().create(existing)
                return reply
            lake = self._lake_state() if desc.lake is not None else None
            self._metadata.create_table(desc)
            if lake is not None:
                try:
                    lake.create(desc)
                except BaseException:
                    self._tables.drop(desc)
                    raise
        return m.TableReply(info=m.TableInfo.of(desc), folder_id=self.folder_id), []

    def _existing(self, existing: TableDescriptor, asked: TableDescriptor, *, if_not_exists: bool) -> _Answer:
        if not if_not_exists:
            raise TableExistsError(
                f"table {asked.path} exists already: pass if_not_exists=True or drop it first", table=str(asked.path)
            )
        if any(getattr(asked, name) != getattr(existing, name) for name in ("schema", "primary_key", "partition_by")):
            raise TableExistsError(
                f"table {asked.path} exists already with other columns or keys: see table.describe()",
                table=str(asked.path),
            )
        return m.TableReply(info=m.TableInfo.of(existing), folder_id=self.folder_id), []

    def _get_table(self, request: m.GetTable, _: Sequence[pa.Buffer]) -> _Answer:
        desc = self._metadata.table(TablePath(request.database, request.table))
        return m.TableReply(info=m.TableInfo.of(desc), folder_id=self.folder_id), []

    def _list_tables(self, request: m.ListTables, _: Sequence[pa.Buffer]) -> _Answer:
        return m.NamesReply(names=[str(t.path) for t in self._metadata.tables(request.database)]), []

    def _list_databases(self, request: m.ListDatabases, _: Sequence[pa.Buffer]) -> _Answer:
        return m.NamesReply(names=self._metadata.databases()), []

    def _drop_table(self, request: m.DropTable, _: Sequence[pa.Buffer]) -> _Answer:
        desc = self._metadata.table(TablePath(request.database, request.table))
        with self._create_lock:
            self._fence()
            # The lake first: whatever a crash leaves, dropping again goes on from there.
            if desc.lake is not None:
                self._lake_state().drop(desc, purge=request.purge)
            self._tables.drop(desc)
            self._leases.end_all(desc.table_id)
        return m.Done(), []

    # ---- write ------------------------------------------------------------------------------------------------

    def _write(self, request: m.Write, attachments: Sequence[pa.Buffer]) -> _Answer:
        table = self._tables.get(request.table_id)
        desc = table.desc
        if desc.keyed == (request.kind == "append"):
            kind, use = ("primary-key", "upsert") if desc.keyed else ("log", "append")
            raise WrongTableKindError(f"{desc.path} is a {kind} table: use {use}, not {request.kind}")
        schema = self._body_schema(desc, request)
        if not len(request.tablets) == len(request.checksums) == len(attachments):
            raise InvalidRequestError("a write must have one checksum and one attachment for each tablet")
        parts = []
        for buffer, crc in zip(attachments, request.checksums, strict=True):
            body = decode_body(buffer, crc)
            parts.append((body, self._checked_rows(desc, request, body, schema)))
        self._check_partitions(table, request.tablets)
        stamp = _common_stamp(request, [body for body, _ in parts])
        with self._write_bytes.held(sum(a.size for a in attachments)):
            if stamp is None:
                return self._write_parts(table, request, parts, None)
            content = _whole_content(request, [rows for _, rows in parts])
            with self._writers.writing(table, stamp, content):
                return self._write_parts(table, request, parts, content)

    def _write_parts(
        self,
        table: LiveTable,
        request: m.Write,
        parts: list[tuple[FrameBody, pa.RecordBatch]],
        content: Content | None,
    ) -> _Answer:
        """``content`` is that of a named writer's batch; an anonymous one can only send the same bytes again."""
        kind = WRITE_KINDS[request.kind]
        writes = [
            PendingWrite(
                request.kind,
                body,
                rows if table.desc.keyed else None,
                self._env.threads.event(),
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
        return m.WriteReply(offsets=self._submit(tablets, writes)), []

    def _check_partitions(self, table: LiveTable, tablets: Sequence[m.TabletRef]) -> None:
        new = {ref.partition for ref in tablets if ref.key not in table.tablets}
        count = len(new | {key.partition for key in table.tablets}) if new else 0
        if count > self._limits.partitions_max:
            raise LimitExceededError(
                f"{table.desc.path} would have {count:,} partitions, over the limit of {self._limits.partitions_max:,}:"
                f" partition_by={list(table.desc.partition_by)} is too fine, use buckets for columns of many values",
                partitions_max=self._limits.partitions_max,
            )

    @staticmethod
    def _body_schema(desc: TableDescriptor, request: m.Write) -> pa.Schema:
        known = set(desc.schema.names)
        if not set(request.columns) <= known:
            raise SchemaMismatchError(f"{desc.path} has no columns {sorted(set(request.columns) - known)}")
        if request.kind == "upsert" and request.columns != [c for c in desc.schema.names if c in request.columns]:
            raise SchemaMismatchError(f"columns {request.columns} are not in the order that {desc.path} has them")
        if request.kind == "append" and request.columns != desc.schema.names:
            raise SchemaMismatchError(f"an append to {desc.path} must hold all its columns in their order")
        if request.kind == "delete" and request.columns != list(desc.primary_key):
            raise SchemaMismatchError(f"a delete from {desc.path} must hold exactly the columns {desc.primary_key}")
        required = [f.name for f in desc.schema if not f.nullable]
        if request.kind == "upsert" and not set(required) <= set(request.columns):
            raise SchemaMismatchError(f"an upsert to {desc.path} must hold the non-null columns {required}")
        return pa.schema([desc.schema.field(c) for c in request.columns])

    def _checked_rows(
        self, desc: TableDescriptor, request: m.Write, body: FrameBody, schema: pa.Schema
    ) -> pa.RecordBatch:
        if body.buffer.size > self._limits.batch_bytes_max:
            raise LimitExceededError(
                f"a batch of {body.buffer.size} bytes is over the limit of {self._limits.batch_bytes_max}: split it",
                batch_bytes_max=self._limits.batch_bytes_max,
            )
        if body.schema_id != desc.schema_id:
            raise SchemaMismatchError(f"the batch has schema {body.schema_id}, {desc.path} has {desc.schema_id}")
        try:
            rows = body.received_rows(schema, bytes_max=self._limits.batch_bytes_max)
        except CorruptionError as e:
            raise SchemaMismatchError(f"the batch does not have the schema of {desc.path}: {e}") from e
        for field, column in zip(schema, rows.columns, strict=True):
            if not field.nullable and column.null_count:
                raise NullKeyError(f"column {field.name!r} of {desc.path} may not be null", column=field.name)
        check_storable(rows.columns, schema, f"a batch for {desc.path}")
        return rows

    def _submit(self, tablets: list[Tablet], writes: list[PendingWrite]) -> list[tuple[int, int]]:
        idle = [tablet for tablet, write in zip(tablets, writes, strict=True) if tablet.submit(write)]
        # Each tablet syncs its own file: side by side, or the syncs would add up.
        for tablet in idle[1:]:
            self._pool.submit(tablet.drive)
        if idle:
            idle[0].drive()
        errors: list[LakeheadError] = []
        offsets: list[tuple[int, int]] = []
        written: list[str] = []
        for tablet, write in zip(tablets, writes, strict=True):
            try:
                offsets.append(write.wait())
            except LakeheadError as e:
                errors.append(e)
            else:
                written.append(f"{tablet.key}: {offsets[-1]}")
        errors.sort(key=lambda e: not isinstance(e, OutcomeUnknownError))
        if errors and written:
            first, done = errors[0], "; ".join(written)
            context = {**first.context, "acknowledged": done}
            raise type(first)(f"{first} (other tablets have their part: {done})", **context) from first
        if errors:
            raise errors[0]
        return offsets

    def _open_writer(self, request: m.OpenWriter, _: Sequence[pa.Buffer]) -> _Answer:
        table = self._tables.get(request.table_id)
        return self._writers.open(table, request, writers_max=self._limits.named_writers_max), []

    def _close_writer(self, request: m.CloseWriter, _: Sequence[pa.Buffer]) -> _Answer:
        self._writers.close(request)
        return m.Done(), []

    # ---- read -------------------------------------------------------------------------------------------------

    def _lookup(self, request: m.Lookup, attachments: Sequence[pa.Buffer]) -> _Answer:
        table = self._tables.get(request.table_id)
        desc = table.desc
        if not desc.keyed:
            raise WrongTableKindError(f"{desc.path} is a log table: it has no keys to look up, scan it with where=")
        if request.prefix and tuple(request.prefix) != desc.prefix_key:
            raise InvalidRequestError(f"{desc.path} has no prefix {request.prefix} to look up by")
        if len(request.tablets) != len(attachments):
            raise InvalidRequestError("a lookup must have one attachment for each tablet")
        schema = pa.schema([desc.schema.field(c) for c in request.prefix or desc.primary_key])
        out: list[pa.Buffer] = []
        asked = held = 0
        for ref, buffer in zip(request.tablets, attachments, strict=True):
            try:
                keys = read_received(buffer, schema, bytes_max=self._limits.batch_bytes_max)
                if keys.num_rows > self._limits.lookup_keys_max:
                    raise LimitExceededError(
                        f"a lookup of {keys.num_rows:,} keys is over the limit of {self._limits.lookup_keys_max:,}:"
                        " ask in parts",
                        lookup_keys_max=self._limits.lookup_keys_max,
                    )
            except CorruptionError as e:
                raise SchemaMismatchError(f"the keys do not have the schema of {desc.path}: {e}") from e
            found = self._lookup_in(table, ref, keys, prefix=bool(request.prefix))
            out += found
            asked, held = asked + keys.num_rows, held + sum(part.size for part in found)
            # Each tablet bounds its part; many of them are one answer.
            require_answer(asked, held)
        return m.LookupReply(), out

    @staticmethod
    def _lookup_in(table: LiveTable, ref: m.TabletRef, keys: pa.RecordBatch, *, prefix: bool) -> list[pa.Buffer]:
        tablet = table.tablet(ref.key)
        if tablet is None:
            return [pa.py_buffer(b""), pa.py_buffer(b"")]
        if prefix:
            return [tablet.prefix_lookup(keys).serialize(), pa.py_buffer(b"")]
        rows, positions = tablet.lookup(keys)
        return [rows.serialize(), pa.py_buffer(positions)]

    def _watermarks(self, request: m.Watermarks, _: Sequence[pa.Buffer]) -> _Answer:
        states = []
        at = request.at_timestamp_us
        if request.sync:
            self._fence()
        for key, tablet in sorted(self._tables.get(request.table_id).tablets.items()):
            end = tablet.sync() if request.sync else tablet.high_watermark
            at_timestamp = None if at is None else tablet.offset_at(at)
            states.append(self._tablet_state(key, tablet, tablet.log_start_offset, end, at_timestamp))
        me = self.incarnation
        return m.WatermarksReply(tablets=states, folder_id=me.folder_id, incarnation=me.number), []

    @staticmethod
    def _tablet_state(
        key: TabletKey, tablet: Tablet, start: int, end: int, at_timestamp: int | None = None
    ) -> m.TabletState:
        return m.TabletState(
            partition=key.partition,
            bucket=key.bucket,
            log_start=start,
            high_watermark=end,
            rows=tablet.row_count,
            at_timestamp=at_timestamp,
            damage="; ".join(map(str, tablet.damages())) or None,
        )

    def _open_leases(self, request: m.OpenLeases, _: Sequence[pa.Buffer]) -> _Answer:
        self._leases.release(request.release)
        self._fence()
        tables = [sorted(self._tables.get(t.table_id).tablets.items()) for t in request.tables]
        with self._tables.moment:  # no watermark moves: each lies within its view
            seen = [{key: (t.view(), t.high_watermark) for key, t in tablets} for tablets in tables]
        opened: list[m.Lease] = []
        try:
            for asked, tablets, views in zip(request.tables, tables, seen, strict=True):
                held = {key: view for key, (view, _) in views.items()}
                lease = self._leases.open(asked.table_id, held, asked.lake_metadata, planned=request.planned)
                states = [self._tablet_state(k, t, held[k].log_start_offset, views[k][1]) for k, t in tablets]
                opened.append(m.Lease(lease=lease, tablets=states))
        except OverloadedError:
            self._leases.release([held.lease for held in opened])
            raise
        return m.LeasesReply(leases=opened, seconds=self._limits.lease_seconds), []

    def _renew_leases(self, request: m.RenewLeases, _: Sequence[pa.Buffer]) -> _Answer:
        self._leases.release(request.release)
        self._leases.renew(request.leases)
        return m.Done(), []

    def _leased_metadata(self, request: m.LeasedMetadata, _: Sequence[pa.Buffer]) -> _Answer:
        return m.NamesReply(names=self._leases.lake_metadata(request.table_id)), []

    def _timestamps_at(self, request: m.TimestampsAt, _: Sequence[pa.Buffer]) -> _Answer:
        tablets = self._tables.get(request.table_id).tablets
        times = [tablets[r.key].timestamp_at(r.start) if r.key in tablets else None for r in request.ranges]
        return m.TimestampsReply(now_us=self._env.clock.now_us(), timestamps_us=times), []

    def _read(self, request: m.Read | m.ReadLive) -> ServerStream:
        leased = self._leases.views(request.table_id, request.lease)
        table = self._tables.get(request.table_id)
        return (
            open_read(table, request, leased) if isinstance(request, m.Read) else open_read_live(table, request, leased)
        )

    @staticmethod
    def _counted(bounded: Bounded, open_stream: Callable[[], ServerStream]) -> ServerStream:
        held = bounded.take()
        try:
            stream = open_stream()
        except BaseException:
            bounded.give_back(held)
            raise
        stream.on_close(lambda: bounded.give_back(held))
        return stream

    # ---- lake -------------------------------------------------------------------------------------------------

    def _lake_state(self) -> LakeState:
        if self._lake is None:
            raise NoLakeError("this server was started without a lake: configure one to use lake='iceberg'")
        return self._lake

    def _lake_table(self, table_id: str) -> TableDescriptor:
        desc = self._tables.get(table_id).desc
        if desc.lake is None:
            raise NoLakeError(f"table {desc.path} has no lake: create it with lake='iceberg'", table=str(desc.path))
        return desc

    def _report_tiered(self, request: m.ReportTiered, _: Sequence[pa.Buffer]) -> _Answer:
        self._maintenance.round_reported(self._lake_table(request.table_id).table_id)
        return m.Done(), []

    def _lake_info(self, request: m.LakeInfo, _: Sequence[pa.Buffer]) -> _Answer:
        self._fence()
        return self._lake_state().info(self._lake_table(request.table_id)), []

    def _adopt_lake(self, request: m.AdoptLake, _: Sequence[pa.Buffer]) -> _Answer:
        self._fence()
        table = self._tables.get(self._lake_table(request.table_id).table_id)
        ends = {key: tablet.sync() for key, tablet in table.tablets.items()}
        adopted = self._lake_state().adopt(table.desc, ends)
        return m.NamesReply(names=[str(table.desc.path)] if adopted else []), []


def _common_stamp(request: m.Write, bodies: Sequence[FrameBody]) -> WriterStamp | None:
    """Of a named writer's batch the stamp, but for what differs between tablets; None for an anonymous one's.

    Raises:
        InvalidRequestError: the bodies are not parts of one batch.
    """
    stamps = {dataclasses.replace(b.stamp, previous_sequence=-1) for b in bodies}
    if len(stamps) > 1 or any(s.tablets not in (0, len(request.tablets)) for s in stamps):
        raise InvalidRequestError("the parts of a write must be those of one batch of one writer")
    stamp = next(iter(stamps), None)
    return stamp if stamp is not None and stamp.epoch else None


def _whole_content(request: m.Write, parts: Sequence[pa.RecordBatch]) -> Content:
    """What a client's batch says, whichever tablets its rows belong to."""
    checksum = 0
    for ref, rows in sorted(zip(request.tablets, parts, strict=True), key=lambda part: part[0].key):
        tablet = f"{ref.partition}\0{ref.bucket}\0".encode()
        checksum = content_checksum(rows, crc32c.crc32c(tablet, checksum))
    return Content(checksum or 1, WRITE_KINDS[request.kind])
