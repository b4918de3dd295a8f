"""Rows that wait on the server until their job publishes them; see `lakehead.protocol.staging`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from lakehead.client.batch_writer import encoded_write
from lakehead.client.patience import ask
from lakehead.client.routes import Routes
from lakehead.client.row_routing import halves, route, slices
from lakehead.env import Env
from lakehead.errors import InvalidRequestError, LimitExceededError
from lakehead.format.frame import WRITER_ID_BYTES, WriterStamp
from lakehead.format.storable import check_valid
from lakehead.protocol import messages as m
from lakehead.protocol.staging import Publish, Published, Stage, StagedPart, StagedTable, Unstage
from lakehead.types import TableDescriptor, WriteKind

_NOBODY = WriterStamp(bytes(WRITER_ID_BYTES), 0)


@dataclass(frozen=True)
class JobBatch:
    """What is published at once: a batch of a job, which is a streaming query by its id or one run of a batch job."""

    job: str
    number: int = 0


class StagedRows:
    """What one attempt at a task stages. One thread at a time.

    Args:
        attempt: 32 random hexadecimal digits.
        share: spreads the tasks of a batch over the buckets of a table without a bucket key.
    """

    def __init__(self, staging: Staging, batch: JobBatch, attempt: str, share: int = 0) -> None:
        self._staging = staging
        self._batch = batch
        self._attempt = attempt
        self._share = share
        self._pieces = 0

    def add(self, kind: WriteKind, rows: pa.Table) -> None:
        """Keep rows, which were conformed to the table's schema, on the server, durably; errors as of a write."""
        parts = list(slices(rows))
        while parts:
            batch = parts.pop(0)
            try:
                self._staging.send(self._batch, self._attempt, self._pieces, kind, batch, self._share)
            except LimitExceededError as e:
                if batch.num_rows == 1 or "batch_bytes_max" not in e.context:
                    raise
                parts = [*halves(batch), *parts]
                continue
            except InvalidRequestError:
                check_valid(batch.columns, batch.schema, "rows that are staged")  # names the row
                raise
            self._pieces += 1

    def done(self) -> StagedPart:
        """What `Staging.publish` makes part of the table."""
        return StagedPart(attempt=self._attempt, pieces=self._pieces)


class Staging:
    """The staged rows of one table. Thread-safe."""

    def __init__(self, desc: TableDescriptor, routes: Routes, env: Env, folder_id: str = "") -> None:
        self._desc = desc
        self._routes = routes
        self._env = env
        self._folder_id = folder_id

    @property
    def _server(self) -> m.Endpoint:
        servers = self._routes.servers(self._desc.table_id)
        if len(servers) > 1:
            raise InvalidRequestError(
                f"{self._desc.path} lives on several servers, of which none can publish what the others have staged:"
                " write with append or upsert"
            )
        return servers[0]

    def rows(self, batch: JobBatch, share: int = 0) -> StagedRows:
        """A new attempt at a task."""
        return StagedRows(self, batch, self._env.randomness.uuid_hex(), share)

    def send(
        self, batch: JobBatch, attempt: str, number: int, kind: WriteKind, rows: pa.RecordBatch, share: int
    ) -> None:
        """Stage one piece, of at most what a write holds."""
        desc = self._desc
        parts = list(route(desc, rows, unkeyed_bucket=(share + number) % desc.buckets))
        write, bodies = encoded_write(desc, kind, rows, parts, lambda _: _NOBODY, folder_id=self._folder_id)
        request = Stage(
            table_id=desc.table_id,
            folder_id=self._folder_id,
            job=batch.job,
            batch=batch.number,
            attempt=attempt,
            number=number,
            write=write,
        )
        ask(self._server, self._env.clock, request, bodies)

    def publish(
        self, batch: JobBatch, parts: Sequence[StagedPart], *, lasting: bool, overwrite: bool = False
    ) -> Published:
        """Make parts of a batch part of the table, in this order; see `Publish`. With ``overwrite`` the partitions that
        they have rows of lose all others.

        Raises:
            InvalidRequestError: some of it is not there any more; nothing was decided.
            OutcomeUnknownError: it was decided, and is there in part; the server goes on with it.
            LakeheadError: it is open whether the batch is there: the same call again makes it whole.
        """
        return publish_together(batch, [(self, parts)], lasting=lasting, overwrite=overwrite)

    def discard(self, batch: JobBatch) -> None:
        """Forget what is staged for a batch, unless it is decided."""
        request = Unstage(table_id=self._desc.table_id, folder_id=self._folder_id, job=batch.job, batch=batch.number)
        ask(self._server, self._env.clock, request)


def publish_together(
    batch: JobBatch,
    staged: Sequence[tuple[Staging, Sequence[StagedPart]]],
    *,
    lasting: bool,
    overwrite: bool = False,
) -> Published:
    """Make a batch part of several tables, of all or of none; errors as of `Staging.publish`.

    Raises:
        InvalidRequestError: the tables live on several servers.
    """
    first = staged[0][0]
    if any(staging._server is not first._server for staging, _ in staged):
        raise InvalidRequestError(
            f"{', '.join(str(s._desc.path) for s, _ in staged)} live on several servers, of which none can publish what"
            " the others have staged: write them one by one"
        )
    request = Publish(
        folder_id=first._folder_id,
        job=batch.job,
        batch=batch.number,
        tables=[StagedTable(table_id=s._desc.table_id, parts=list(parts), overwrite=overwrite) for s, parts in staged],
        lasting=lasting,
    )
    return ask(first._server, first._env.clock, request)[0]
