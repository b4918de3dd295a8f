"""Batches that are in a tablet's log and state before readers see any: its high watermark moves once for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from lakehead.env import Env
from lakehead.format.frame import FrameBody, WriterStamp
from lakehead.format.read_as import given_as
from lakehead.log import LogTablet
from lakehead.server.changelog import changelog, encoded
from lakehead.server.committer import Committer
from lakehead.server.group_commit import PendingWrite, rows_if_small
from lakehead.types import Offset, TableDescriptor

if TYPE_CHECKING:
    from lakehead.kv import KvTablet


class Unseen:
    """Logs and applies batches of one tablet, whose owner holds its locks and moves its high watermark."""

    def __init__(
        self, desc: TableDescriptor, log: LogTablet, kv: KvTablet | None, committer: Committer, env: Env
    ) -> None:
        self._desc = desc
        self._log = log
        self._kv = kv
        self._committer = committer
        self._env = env

    def delete_below(self, before: Offset) -> None:
        """Of a keyed tablet, log that each live row below an offset is deleted."""
        if self._kv is None:
            return
        writer = bytes.fromhex(self._env.randomness.uuid_hex())
        for n, change in enumerate(self._kv.deletions(before)):
            self._take([encoded(self._desc, change, WriterStamp(writer, n, n - 1))], change.rows)

    def write(self, write: PendingWrite) -> None:
        """One batch, which the tablet does not have; errors as of a write."""
        if self._kv is None:
            self._take([write.body], rows_if_small([write]), write)
            return
        assert write.rows is not None
        schemas, given = self._desc.schemas, write.body.schema_id
        rows = write.rows if given == schemas.current.id else given_as(write.rows, given, schemas)
        deleted = write.kind == "delete"
        self._kv.require_change(rows, deleted=deleted)
        change = self._kv.plan_delete(rows) if deleted else self._kv.plan_upsert(rows, self._log.log_end_offset)
        self._take(changelog(self._desc, [write], change), change.rows, write)

    def _take(
        self, bodies: Sequence[FrameBody], rows: pa.RecordBatch | None, write: PendingWrite | None = None
    ) -> None:
        contents = None if write is None else [write.content]
        frames = self._log.encode(bodies, self._env.clock.now_us(), contents)
        self._committer.commit(self._log, frames)
        self._log.apply(frames, rows)
