"""Named writers of one server: who may write under a name now, and what a successor goes on after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lakehead.env.threads import Threads
from lakehead.errors import InvalidRequestError, WriterFencedError
from lakehead.format.frame import PUBLISHERS, WRITER_ID_BYTES, Content, WriterStamp
from lakehead.log.writers import Answer, sequence_conflict
from lakehead.protocol.messages import CloseWriter, OpenWriter, TabletRef, WriterReply
from lakehead.server.catalog import EndWriter, RegisterWriter, require_own_writer
from lakehead.server.metadata import MetadataStore
from lakehead.server.tables import LiveTable
from lakehead.types import Epoch, TabletKey

_EVERY_SEQUENCE = 2**63


@dataclass
class _Name:
    """``newest`` is the greatest sequence that any tablet had when this epoch or server began; ``under_way`` counts the
    writes of each epoch that were let in and have not ended. ``owner`` is the principal that opened it last."""

    epoch: Epoch
    owner: str
    newest: int = -1
    under_way: Counter[int] = field(default_factory=Counter)


def require_clients_own(writer_id: bytes) -> None:
    """Return unless an id is one under which the server itself writes, where its batches would be taken for a job's.

    Raises:
        InvalidRequestError: it is.
    """
    if writer_id.startswith(PUBLISHERS):
        raise InvalidRequestError(
            f"writer ids that begin with the bytes {PUBLISHERS.hex(' ')} are those of jobs that publish: take another"
        )


class NamedWriters:
    """Thread-safe."""

    def __init__(self, metadata: MetadataStore, threads: Threads) -> None:
        self._metadata = metadata
        self._names: dict[tuple[str, bytes], _Name] = {}
        self._lock = threads.lock()
        self._ended = threads.condition()

    @contextmanager
    def writing(self, table: LiveTable, stamp: WriterStamp, content: Content, principal: str = "") -> Iterator[None]:
        """A batch of a named writer is written inside. Its successor is not told anything before that has ended.

        Raises:
            PermissionDeniedError: another principal opened it last.
            WriterFencedError: a newer writer of the name was opened.
            InvalidRequestError: it was not opened.
            SequenceConflictError: the batch that landed under its number, in any tablet, was another one.
        """
        name = self._name(table, stamp.writer_id)
        with self._lock:
            require_own_writer(name.owner, principal)
            if stamp.epoch < name.epoch:
                raise WriterFencedError(
                    f"a newer writer (epoch {name.epoch}) with the same writer_id has taken over: stop this one",
                    epoch=name.epoch,
                )
            if stamp.epoch > name.epoch:
                raise InvalidRequestError(
                    f"epoch {stamp.epoch} of a named writer was never given out: open the writer first",
                    epoch=name.epoch,
                )
            name.under_way[stamp.epoch] += 1
        try:
            if stamp.sequence <= name.newest:
                _check_repeat(table, stamp, content)
            yield
        finally:
            with self._lock:
                name.under_way[stamp.epoch] -= 1
            self._ended.notify_all()

    def _name(self, table: LiveTable, writer_id: bytes) -> _Name:
        key = (table.desc.table_id, writer_id)
        known = self._names.get(key)
        if known is None:
            owner = self._metadata.writer_owner(*key)
            fresh = _Name(self._metadata.writer_epoch(*key), owner, _newest(table, writer_id))
            with self._lock:
                known = self._names.get(key)
                if known is None:
                    known = fresh
                    if fresh.epoch:
                        self._names[key] = fresh
        return known

    def open(
        self, table: LiveTable, request: OpenWriter, *, writers_max: int, principal: str = "", taking: bool = True
    ) -> WriterReply:
        """Fence whoever writes under a name, and say what a successor goes on after: the last batch that is in every
        tablet it went to.

        Args:
            principal: whose the name is from now on.
            taking: whether it may be another's before.

        Raises:
            PermissionDeniedError: it is another's.
            InvalidRequestError: the id is none.
            LimitExceededError: the table has had too many names.
            LakeheadError: a tablet takes no writes, after a failure perhaps, which left open what is on disk.
        """
        writer_id = request.writer_id
        if len(writer_id) != WRITER_ID_BYTES:
            raise InvalidRequestError(f"a writer id has {WRITER_ID_BYTES} bytes, this one {len(writer_id)}")
        require_clients_own(writer_id)
        register = RegisterWriter(request.table_id, writer_id, writers_max, owner=principal, taking=taking)
        epoch = self._metadata.submit(register).epoch
        with self._lock:
            name = self._names.setdefault((request.table_id, writer_id), _Name(epoch, principal))
            # Of two that open at once either may come here first: what was given out last stays.
            if epoch >= name.epoch:
                name.epoch, name.owner = epoch, principal
        self._ended.wait_for(lambda: not self._is_writing(name, before=epoch))
        with self._lock:
            for old in [e for e in name.under_way if e < epoch]:
                del name.under_way[old]
        newest = _newest(table, writer_id)
        with self._lock:
            name.newest = max(name.newest, newest)
        through = max(newest if _landed(table, writer_id, newest) else -1, self._acknowledged(table, writer_id))
        last = {k: t.writers.last_sequence(writer_id, through) for k, t in table.tablets.items()}
        known = {k: s for k, s in last.items() if s is not None}
        return WriterReply(
            epoch=epoch,
            last_sequence=through,
            tablets=[TabletRef.of(k) for k in known],
            sequences=list(known.values()),
        )

    def _is_writing(self, name: _Name, *, before: int) -> bool:
        with self._lock:
            return any(n for epoch, n in name.under_way.items() if epoch < before)

    def _acknowledged(self, table: LiveTable, writer_id: bytes) -> int:
        told = [t.writers.acked_through(writer_id) for t in table.tablets.values()]
        return max(*told, self._metadata.writer_acked_through(table.desc.table_id, writer_id), -1)

    def forget(self, table_id: str) -> None:
        """Forget the writers of a table that is dropped."""
        with self._lock:
            for key in [key for key in self._names if key[0] == table_id]:
                del self._names[key]

    def close(self, request: CloseWriter, principal: str = "") -> None:
        """Note what a named writer had seen answered when it ended; nothing happens when it is fenced.

        Raises:
            PermissionDeniedError: another principal opened it last.
        """
        require_own_writer(self._metadata.writer_owner(request.table_id, request.writer_id), principal)
        self._metadata.submit(EndWriter(request.table_id, request.writer_id, request.epoch, request.acked_through))


def _newest(table: LiveTable, writer_id: bytes) -> int:
    """The writer's greatest sequence in any tablet; -1 for none."""
    last = (t.writers.last_sequence(writer_id, _EVERY_SEQUENCE) for t in table.tablets.values())
    return max((s for s in last if s is not None), default=-1)


def _holders(table: LiveTable, writer_id: bytes, sequence: int) -> dict[TabletKey, Answer]:
    known = {k: t.writers.known(writer_id, sequence) for k, t in table.tablets.items()}
    return {k: a for k, a in known.items() if a is not None}


def _landed(table: LiveTable, writer_id: bytes, sequence: int) -> bool:
    """Whether a batch is known to be in every tablet it went to."""
    holders = _holders(table, writer_id, sequence)
    return bool(holders) and all(a.tablets == len(holders) for a in holders.values())


def _check_repeat(table: LiveTable, stamp: WriterStamp, content: Content) -> None:
    """Whatever part of a batch its predecessor wrote, in any tablet, must be part of this one."""
    for answer in _holders(table, stamp.writer_id, stamp.sequence).values():
        if answer.content.contradicts(content):
            raise sequence_conflict(stamp.sequence)
