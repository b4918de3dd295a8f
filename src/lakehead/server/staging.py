"""Rows that wait beside a table until their job publishes them: how many tasks, which fail and run twice, write once.

A piece that a task has written is a file in ``<table>/staged/<job>-<batch>/``. That a batch is published, of which
attempts, is one command of the catalog, which holds the pieces that came with the request itself; from then on the
pieces are written to the tablets in their order, joined, as numbered batches of a writer that stands for the job. Each
tablet knows which of them it has: whoever opens the table after a crash carries out what was decided, and no tablet has
a row of it twice.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import pyarrow as pa

from lakehead.config import Limits
from lakehead.env import Env
from lakehead.errors import (
    InvalidRequestError,
    LakeheadError,
    LimitExceededError,
    OutcomeUnknownError,
)
from lakehead.format.frame import FrameBody, WriterStamp, decode_body
from lakehead.format.joins import ROWS_MAX, gathered, join
from lakehead.protocol.messages import Done, TabletRef
from lakehead.protocol.staging import (
    GIVEN_BYTES_MAX,
    AskTurn,
    Publish,
    Published,
    Stage,
    StagedTable,
    Turn,
    Unstage,
)
from lakehead.server.catalog import BeginPublication, EndPublication, Part
from lakehead.server.metadata import MetadataStore, Publication
from lakehead.server.pieces import STAGED, decoded, encoded, job_writer, staged_folder
from lakehead.server.planned import require_planned
from lakehead.server.tables import LiveTable, LiveTables
from lakehead.server.turns import Turns
from lakehead.server.writes import CheckedBatch, Writes, body_schema
from lakehead.types import Offset, TableDescriptor, TabletKey, WriteKind

_log = logging.getLogger("lakehead.server.staging")

KEPT_SECONDS = 24 * 3600.0
"""How long pieces wait for their job after it staged the last one, and jobs that do not last are remembered."""
_TOGETHER_ROWS = 4 << 20
"""Pieces of so many rows, or of as many bytes as are joined, are looked at together."""
_TABLETS_AT_ONCE = 4
"""Batches of so many tablets, if they are full, are written side by side."""
_IN_TURN = ""
"""Whoever publishes what follows from a table's rows, or takes some away, is alone as this job, too."""


class _Piece(NamedTuple):
    """Rows of one staged write, by tablet; they had schema ``schema_id`` when they were staged."""

    kind: WriteKind
    schema_id: int
    columns: tuple[str, ...]
    bodies: dict[TabletKey, FrameBody]
    size: int
    schema: pa.Schema

    @property
    def plan(self) -> tuple[WriteKind, int, tuple[str, ...]]:
        """Pieces with the same are written together."""
        return self.kind, self.schema_id, self.columns

    @property
    def row_count(self) -> int:
        return sum(body.row_count for body in self.bodies.values())


class _Turn(NamedTuple):
    """What is written at once: for some tablets the bodies that are joined to a batch."""

    kind: WriteKind
    schema_id: int
    schema: pa.Schema
    bodies: dict[TabletKey, list[FrameBody]]

    @property
    def size(self) -> int:
        return sum(body.buffer.size for of in self.bodies.values() for body in of)

    @property
    def row_count(self) -> int:
        return sum(body.row_count for of in self.bodies.values() for body in of)

    def batch(self, key: TabletKey) -> pa.RecordBatch:
        return join([body.rows(self.schema) for body in self.bodies[key]])

    def rows(self) -> dict[TabletKey, pa.RecordBatch]:
        return {key: self.batch(key) for key in self.bodies}


@dataclass
class _Begun:
    """A batch of a job that is decided for one table, and how far it is carried out.

    Attributes:
        stamp: of its next turn.
        turns: those that are left.
        rows: how many were written, or were there.
        error: why it goes no further.
    """

    table: LiveTable
    publication: Publication
    stamp: WriterStamp
    turns: Iterator[_Turn]
    rows: int = 0
    error: LakeheadError | None = None

    def next_turn(self) -> _Turn | None:
        return next(self.turns, None)

    def wrote(self, turns: Sequence[_Turn]) -> None:
        """Note that these are written."""
        self.rows += sum(turn.row_count for turn in turns)
        self.stamp = msgspec.structs.replace(self.stamp, sequence=self.stamp.sequence + len(turns))


@dataclass
class _Waiting:
    """Pieces of a batch that are not published: their bytes by file, and when the last one came."""

    sizes: dict[str, int]
    bytes: int = 0
    at: float = 0.0


class Staging:
    """Answers `Stage`, `Publish`, `AskTurn` and `Unstage`. Thread-safe."""

    def __init__(self, metadata: MetadataStore, tables: LiveTables, writes: Writes, env: Env, limits: Limits) -> None:
        self._metadata = metadata
        self._tables = tables
        self._writes = writes
        self._env = env
        self._limits = limits
        self._lock = env.threads.lock()
        self._ended = env.threads.condition()
        self._busy: set[tuple[str, str]] = set()
        self._waiting: dict[str, _Waiting] = {}
        self._turns = Turns(metadata.incarnation.number, env.threads)

    # ---- pieces -----------------------------------------------------------------------------------------------

    def stage(self, request: Stage, attachments: Sequence[pa.Buffer]) -> Done:
        """See `Stage`.

        Raises:
            LimitExceededError: too much waits on this server.
            LakeheadError: the rows may not be written to the table; nothing was kept.
        """
        if request.write.table_id != request.table_id:
            raise InvalidRequestError("what is staged for a table must be a write to that table")
        table = self._tables.get(request.table_id)
        self._writes.checked(table, request.write, attachments)
        data = encoded(request.write, attachments)
        folder = staged_folder(table.folder, request.job, request.batch)
        path = f"{folder}/{request.attempt}-{request.number}"
        held = sum(waiting.bytes for waiting in list(self._waiting.values()))
        if held + len(data) > self._limits.staged_bytes_max:
            raise LimitExceededError(
                f"{held:,} bytes are staged on this server and not published, and its limit is"
                f" {self._limits.staged_bytes_max:,} (staged_bytes_max): write less in one job or micro-batch, or"
                " wait until other jobs have ended",
                staged_bytes_max=self._limits.staged_bytes_max,
            )
        self._env.storage.make_folder(folder)
        self._env.storage.write_atomic(path, data)
        self._note(folder, path, len(data))
        return Done()

    def _note(self, folder: str, path: str, size: int) -> None:
        with self._lock:
            waiting = self._waiting.setdefault(folder, _Waiting({}))
            waiting.bytes += size - waiting.sizes.get(path, 0)
            waiting.sizes[path] = size
            waiting.at = self._env.clock.monotonic()

    def unstage(self, request: Unstage) -> Done:
        """See `Unstage`."""
        table = self._tables.get(request.table_id)
        with self._alone(request.table_id, request.job):
            if self._metadata.publication(request.table_id, request.job).begun != request.batch:
                self._forget(staged_folder(table.folder, request.job, request.batch))
        return Done()

    def _forget(self, folder: str) -> None:
        self._env.storage.remove_tree(folder)
        with self._lock:
            self._waiting.pop(folder, None)

    def maintain(self, table: LiveTable) -> None:
        """Go on with what was decided and failed, and forget what its jobs did not publish in time."""
        for publication in self._metadata.unfinished_publications(table.desc.table_id):
            with self._alone(table.desc.table_id, publication.job):
                now = self._metadata.publication(table.desc.table_id, publication.job)
                if now.begun is not None:
                    self._try_to_finish(table, now)
        self._remove_old(table)

    def _try_to_finish(self, table: LiveTable, publication: Publication) -> None:
        begun = self._begun(table, publication)
        self._carry_out([begun])
        if begun.error is not None:
            _log.warning(
                "batch %s that %s writes to %s is there in part: %s",
                publication.begun, publication.job, table.desc.path, begun.error,
            )  # fmt: skip

    def _remove_old(self, table: LiveTable) -> None:
        now = self._env.clock.monotonic()
        with self._lock:
            mine = [(folder, w) for folder, w in self._waiting.items() if folder.startswith(f"{table.folder}/")]
        for folder in [folder for folder, waiting in mine if now - waiting.at >= KEPT_SECONDS]:
            if folder not in self._decided(table):
                _log.warning("what was staged in %s was not published in time and is removed", folder)
                self._forget(folder)

    def _decided(self, table: LiveTable) -> set[str]:
        unfinished = self._metadata.unfinished_publications(table.desc.table_id)
        return {staged_folder(table.folder, p.job, p.begun) for p in unfinished if p.begun is not None}

    # ---- publishing -------------------------------------------------------------------------------------------

    def publish(self, request: Publish, attachments: Sequence[pa.Buffer]) -> Published:
        """See `Publish`.

        Raises:
            OutcomeUnknownError: it was decided, and is there in part; the rest comes.
            SchemaChangedError, TableNotFoundError: a table is not the one that was opened; nothing was decided.
            TurnLostError: the rows follow from what a table has no more; nothing was decided.
            SequenceConflictError: it is there already, and was made of something else.
            InvalidRequestError: some of the pieces are not here; nothing was decided.
            LakeheadError: it could not be decided.
        """
        job, batch = request.job, request.batch
        if len({t.table_id for t in request.tables}) < len(request.tables):
            raise InvalidRequestError("a batch was published with one table twice: name each table once")
        self._require_as_opened(request.tables)
        given = self._given(request, attachments)
        parts: dict[str, list[Part]] = {
            t.table_id: [*((part.attempt, part.pieces) for part in t.parts), *given[t.table_id]] for t in request.tables
        }
        tables = [self._tables.get(table_id) for table_id in parts]
        over = {t.table_id: t.overwrite for t in request.tables if t.overwrite is not None}
        turns = {t.table_id: t.turn for t in request.tables if t.turn is not None}
        in_turn = sorted({*over, *turns})
        with contextlib.ExitStack() as alone:
            if request.whole:
                alone.enter_context(self._alone("", job))
            asked = sorted({*parts, *(self._metadata.tables_of(job) if request.whole else ())})
            # Always in one order: nobody waits for who waits for him.
            for mine in [*((table_id, job) for table_id in asked), *((t, _IN_TURN) for t in in_turn)]:
                alone.enter_context(self._alone(*mine))
            self._finish(map(self._tables.get, asked), job)
            if any(batch <= self._metadata.publication(table_id, job).batch for table_id in asked):
                for table in tables:
                    self._forget(staged_folder(table.folder, job, batch))
                require_planned(self._metadata, request, [self._tables.get(table_id).desc for table_id in asked])
                return Published(rows=0, before=True)
            for table_id, turn in turns.items():
                self._turns.require(table_id, turn, functools.partial(self._is_unfinished, table_id))
            truncates: dict[str, dict[str, int]] = {}
            overwrites: dict[str, dict[str, int]] = {}
            for table in tables:
                table_id = table.desc.table_id
                if table_id in over:
                    table.desc.require_replaceable()
                partitions = self._require_pieces(table, job, batch, parts[table_id])
                if table_id in over:
                    lose = _overwritten(table.desc, over[table_id], partitions)
                    ends = {str(key): end for key, end in table.ends_of(lose).items()}
                    (truncates if table.desc.log_decides else overwrites)[table_id] = ends
            forget_before = self._env.clock.now_us() - int(KEPT_SECONDS * 1e6)
            jobs_max = self._limits.named_writers_max
            for table_id in in_turn:
                self._turns.begin(table_id, job)
            how = truncates, overwrites, request.planned
            self._metadata.submit(BeginPublication(job, batch, parts, request.lasting, jobs_max, forget_before, *how))
            return Published(rows=self._finish(tables, job), before=False)

    def forget(self, table_id: str) -> None:
        """Forget the turns of a table that is dropped."""
        self._turns.forget(table_id)

    def turn(self, request: AskTurn) -> Turn:
        """See `AskTurn`."""
        table_id = self._tables.get(request.table_id).desc.table_id
        with self._alone(table_id, _IN_TURN):  # after what is under way, under whose turn nothing else is published
            return Turn(number=self._turns.number(table_id))

    def _is_unfinished(self, table_id: str, job: str) -> bool:
        return self._metadata.publication(table_id, job).begun is not None

    def _require_as_opened(self, tables: Iterable[StagedTable]) -> None:
        for t in tables:
            if t.name:
                self._tables.get(t.table_id).desc.require_as_opened(t.name, t.schema_id)

    def _given(self, request: Publish, attachments: Sequence[pa.Buffer]) -> dict[str, list[bytes]]:
        """The pieces that come with a request, by table.

        Raises:
            LakeheadError: one may not be written to its table, or they are too large.
        """
        if sum(a.size for a in attachments) > GIVEN_BYTES_MAX:
            raise LimitExceededError(
                f"rows of more than {GIVEN_BYTES_MAX:,} bytes are to be staged before they are published",
                given_bytes_max=GIVEN_BYTES_MAX,
            )
        left = iter(attachments)
        found: dict[str, list[bytes]] = {}
        for t in request.tables:
            table, pieces = self._tables.get(t.table_id), found.setdefault(t.table_id, [])
            for write in t.writes:
                if write.table_id != t.table_id:
                    raise InvalidRequestError("what is published to a table must be a write to that table")
                bodies = list(itertools.islice(left, len(write.tablets)))
                self._writes.checked(table, write, bodies)
                pieces.append(encoded(write, bodies))
        if next(left, None) is not None:
            raise InvalidRequestError("a batch was published with more bodies than its writes have")
        return found

    def _finish(self, tables: Iterable[LiveTable], job: str) -> int:
        """Carry out what is decided for these tables, for each that it can be; returns how many rows that were."""
        of_job = [(table, self._metadata.publication(table.desc.table_id, job)) for table in tables]
        begun = [self._begun(*decided) for decided in of_job if decided[1].begun is not None]
        self._carry_out(begun)
        for left in begun:
            if left.error is not None:
                raise OutcomeUnknownError(
                    f"batch {left.publication.begun} of {job} is part of {left.table.desc.path}, but not all of it is"
                    " there yet: the server goes on with it now and then, and when it is started again. Do not write it"
                    f" under another name ({left.error})",
                    table=str(left.table.desc.path),
                    job=job,
                ) from left.error
        return sum(done.rows for done in begun)

    def complete(self, table: LiveTable) -> None:
        """Carry out what was decided before a crash, and find what waits; for who opens the table, before it is used.
        What fails is tried again by `maintain`."""
        for publication in self._metadata.unfinished_publications(table.desc.table_id):
            self._turns.begin(table.desc.table_id, publication.job)
            self._try_to_finish(table, publication)
        storage, base = self._env.storage, f"{table.folder}/{STAGED}"
        for folder in (f"{base}/{name}" for name in storage.list_files(base)):
            for path in (f"{folder}/{name}" for name in storage.list_files(folder)):
                self._note(folder, path, self._read(path).size)

    @contextlib.contextmanager
    def _alone(self, table_id: str, job: str) -> Iterator[None]:
        """One at a time does something for a job."""
        mine = (table_id, job)
        begun = False

        def begin() -> bool:
            nonlocal begun
            with self._lock:
                if not begun and mine not in self._busy:
                    self._busy.add(mine)
                    begun = True
            return begun

        self._ended.wait_for(begin)
        try:
            yield
        finally:
            with self._lock:
                self._busy.discard(mine)
            self._ended.notify_all()

    def _require_pieces(self, table: LiveTable, job: str, batch: int, parts: Iterable[Part]) -> set[str]:
        """Nothing is decided that could not be carried out. Returns the partitions that they have rows of."""
        tablets: dict[TabletKey, TabletRef] = {}
        for data, path in self._data(staged_folder(table.folder, job, batch), parts):
            write, buffers = decoded(data, path)
            for buffer, crc in zip(buffers, write.checksums, strict=True):
                decode_body(buffer, crc)
            tablets.update((ref.key, ref) for ref in write.tablets)
        self._writes.check_partitions(table, list(tablets.values()))
        return {key.partition for key in tablets}

    def _begun(self, table: LiveTable, publication: Publication) -> _Begun:
        assert publication.begun is not None
        folder = staged_folder(table.folder, publication.job, publication.begun)
        stamp = WriterStamp(job_writer(publication.job), publication.sequence, epoch=int(publication.lasting))
        return _Begun(table, publication, stamp, self._joined(table, folder, publication.parts))

    def _carry_out(self, begun: Sequence[_Begun]) -> None:
        """Do what was decided, and note that it is done; what keeps one from it is its ``error``."""
        left = []
        for of in begun:
            decided, publication = self._metadata, of.publication
            if of.table.desc.log_decides:
                replaced = decided.truncated(of.table.desc.table_id)
            else:
                replaced = decided.overwritten_by(of.table.desc.table_id, publication)
            if not replaced:
                left.append(of)
                continue
            try:
                self._replace(of, replaced)
            except LakeheadError as e:
                of.error = e
        while left:
            left = self._write_turns(left)
        self._end([of for of in begun if of.error is None])

    def _write_turns(self, begun: Sequence[_Begun]) -> list[_Begun]:
        """Write the next turn of each; which of them may have another. Small ones go side by side, as most of a small
        write is waiting for the disk."""
        turns: list[tuple[_Begun, _Turn]] = []
        for of in begun:
            try:
                if (turn := of.next_turn()) is not None:
                    turns.append((of, turn))
            except LakeheadError as e:
                of.error = e
        small = [t for t in turns if t[1].size <= GIVEN_BYTES_MAX]
        for together in [small, *([t] for t in turns if t[1].size > GIVEN_BYTES_MAX)]:
            self._write_together(together)
        return [of for of, _ in turns if of.error is None]

    def _write_together(self, turns: Sequence[tuple[_Begun, _Turn]]) -> None:
        decoded: list[tuple[_Begun, _Turn, CheckedBatch]] = []
        for of, turn in turns:
            try:
                batch = CheckedBatch(of.table, turn.kind, turn.schema_id, turn.rows(), of.stamp)
            except LakeheadError as e:
                of.error = e
            else:
                decoded.append((of, turn, batch))
        for (of, turn, _), error in zip(decoded, self._writes.publish([b for *_, b in decoded]), strict=True):
            of.error = error
            if error is None:
                of.wrote([turn])

    def _end(self, done: Sequence[_Begun]) -> None:
        """Note that these were carried out; what was staged for them is not needed any more. Where nothing was, whoever
        finds no note after a power cut has the rows to do it again, and tablets which have them: nobody waits for the
        disk."""
        if not done:
            return
        now = self._env.clock.now_us()
        try:
            ends = []
            folders = []
            for of in done:
                table_id, job, batch = of.table.desc.table_id, of.publication.job, of.publication.begun
                assert batch is not None
                ends.append(EndPublication(table_id, job, batch, of.stamp.sequence, now))
                folder = staged_folder(of.table.folder, job, batch)
                with self._lock:
                    waits = folder in self._waiting
                if waits or not all(isinstance(part, bytes) for part in of.publication.parts):
                    folders.append(folder)
            self._metadata.submit_all(ends, synced=bool(folders))
            for of in done:
                self._turns.end(of.table.desc.table_id, of.publication.job)
            for folder in folders:
                self._forget(folder)
        except LakeheadError as e:
            for of in done:
                of.error = e

    def _replace(self, begun: _Begun, ends: Mapping[TabletKey, Offset]) -> None:
        """Write all turns in place of what tablets held below these offsets, tablet by tablet."""
        table, stamp, turns = begun.table, begun.stamp, list(begun.turns)

        def batches(key: TabletKey) -> Iterator[tuple[WriteKind, pa.RecordBatch, WriterStamp]]:
            for n, turn in enumerate(turns):
                if key in turn.bodies:
                    own = msgspec.structs.replace(stamp, sequence=stamp.sequence + n)
                    yield turn.kind, turn.batch(key), own

        schema_id = turns[0].schema_id if turns else table.desc.schema_id
        for key in dict.fromkeys([*ends, *(key for turn in turns for key in turn.bodies)]):
            self._writes.replace(table, key, ends.get(key, 0), schema_id, batches(key))
        if table.desc.log_decides:
            table.end_truncation()
        begun.wrote(turns)

    def _joined(self, table: LiveTable, folder: str, parts: Sequence[Part]) -> Iterator[_Turn]:
        """The rows of all pieces in their order, in batches; the same ones whenever the pieces are the same. Of many
        pieces together, so that what many tasks have for many tablets is a few batches of each."""
        pieces = (self._piece(table, data, path) for data, path in self._data(folder, parts))
        for (kind, schema_id, _), alike in itertools.groupby(pieces, key=lambda piece: piece.plan):
            rows = _TOGETHER_ROWS
            for group in gathered(alike, lambda p: (p.row_count, p.size), rows_max=rows, rows_enough=rows):
                for bodies in _turns(group):
                    yield _Turn(kind, schema_id, group[0].schema, bodies)

    def _piece(self, table: LiveTable, data: pa.Buffer, path: str) -> _Piece:
        write, buffers = decoded(data, path)
        found = [decode_body(buffer, crc) for buffer, crc in zip(buffers, write.checksums, strict=True)]
        desc = table.as_of(found[0].schema_id) if found else table.desc
        bodies = {ref.key: body for ref, body in zip(write.tablets, found, strict=True)}
        return _Piece(write.kind, desc.schema_id, tuple(write.columns), bodies, data.size, body_schema(desc, write))

    def _data(self, folder: str, parts: Iterable[Part]) -> Iterator[tuple[pa.Buffer, str]]:
        """The bytes of pieces, in order, and where they are."""
        for part in parts:
            if isinstance(part, bytes):
                yield pa.py_buffer(part), f"the catalog, for {folder},"
            else:
                attempt, pieces = part
                for path in (f"{folder}/{attempt}-{number}" for number in range(pieces)):
                    yield self._read(path), path

    def _read(self, path: str) -> pa.Buffer:
        """The bytes of a piece, shared with its file.

        Raises:
            InvalidRequestError: it is not there.
        """
        if self._env.storage.version(path) is None:
            raise InvalidRequestError(
                f"rows are not there that a task said it has staged: the table was overwritten, or another one got its"
                f" name, while the job ran; or they waited for more than {KEPT_SECONDS / 3600:.0f} hours, or were"
                f" removed by hand. Run the job again, or start the query again from its checkpoint ({path})",
                path=path,
            )
        file = self._env.storage.open_log(path)
        try:
            return file.read(0, file.size)
        finally:
            file.close()


def _overwritten(desc: TableDescriptor, named: Collection[str], written: set[str]) -> Collection[str]:
    """The partitions that lose their rows; see `StagedTable`.

    Raises:
        InvalidRequestError: rows are of another one than those that are named.
    """
    if named and (beside := written.difference(named)):
        raise InvalidRequestError(
            f"rows for {desc.path} are of partition {min(beside)}, which is not one of those that are overwritten"
            f" ({', '.join(sorted(named))}): nothing was written; leave these rows out, or name it, too"
        )
    return named or written


def _turns(pieces: Sequence[_Piece]) -> Iterator[dict[TabletKey, list[FrameBody]]]:
    """The bodies of pieces, in turns: of each tablet those that are joined to its next batch, and of so many tablets as
    are written side by side."""
    of_tablet: dict[TabletKey, list[FrameBody]] = {}
    for piece in pieces:
        for key, body in piece.bodies.items():
            of_tablet.setdefault(key, []).append(body)
    waiting = {key: gathered(of, _measure, rows_max=ROWS_MAX, rows_enough=ROWS_MAX) for key, of in of_tablet.items()}
    while waiting:
        batches = [(key, held) for key, left in waiting.items() for held in itertools.islice(left, 1)]
        waiting = {key: waiting[key] for key, _ in batches}
        rows = ROWS_MAX * _TABLETS_AT_ONCE
        for turn in gathered(batches, lambda b: _sizes(b[1]), rows_max=rows, rows_enough=rows):
            yield dict(turn)


def _measure(body: FrameBody) -> tuple[int, int]:
    return body.row_count, body.buffer.size


def _sizes(bodies: Sequence[FrameBody]) -> tuple[int, int]:
    return sum(b.row_count for b in bodies), sum(b.buffer.size for b in bodies)
