"""The server's front: answers every request of the protocol, whatever transport it came by."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from lakehead.config import Limits
from lakehead.env import Env
from lakehead.env.clock import SteadyClock
from lakehead.env.interrupts import shielded, uninterrupted
from lakehead.env.place import Place
from lakehead.errors import FolderCopiedError
from lakehead.log.checkpoint import USUAL_CHECKPOINTS, CheckpointPolicy
from lakehead.log.joined import JoinedRoom
from lakehead.protocol import messages as m
from lakehead.protocol.codec import encode
from lakehead.protocol.grants import CreateToken, Grant, ListGrants, ListTokens, Revoke, RevokeToken, WhoAmI
from lakehead.protocol.privileges import Privilege
from lakehead.protocol.quotas import ListQuotas, SetQuota
from lakehead.protocol.staging import AskTurn, Publish, Stage, Unstage
from lakehead.protocol.tiering import AskTieringStatus, AskTieringWork, ReportTiered
from lakehead.server.access import Caller, authorize, may
from lakehead.server.committer import Committers, local_committer
from lakehead.server.definitions import Definitions
from lakehead.server.grants import Grants
from lakehead.server.incarnations import unfenced
from lakehead.server.lake_state import LakeState
from lakehead.server.leases import Leases
from lakehead.server.maintenance import Maintenance
from lakehead.server.metadata import MetadataStore
from lakehead.server.placement import Home, everything_here
from lakehead.server.principals import Principals
from lakehead.server.quotas import Quotas
from lakehead.server.reads import Reads
from lakehead.server.staging import Staging
from lakehead.server.streams import ServerStream
from lakehead.server.tables import LiveTables
from lakehead.server.tiering_jobs import TieringJobs
from lakehead.server.writes import Writes
from lakehead.types import Incarnation

_Handler: TypeAlias = Callable[[Any, Sequence[pa.Buffer], Caller], tuple[Any, list[pa.Buffer]]]


class Service:
    """All tables of one data folder. Thread-safe."""

    def __init__(
        self,
        folder: str,
        *,
        env: Env,
        limits: Limits,
        lake: LakeState | None,
        maintenance_seconds: float | None = None,
        place: Callable[[], Place] | None = None,
        checkpoint_policy: CheckpointPolicy = USUAL_CHECKPOINTS,
        committers: Committers = local_committer,
        fence: Callable[[], None] = unfenced,
        home: Home = everything_here,
    ) -> None:
        """Open the data folder, which the caller has locked.

        Args:
            place: tells where the folder lies, so that a copy is noticed; None does not look.
            checkpoint_policy: when tablets make one.
            home: tells which tablets live on another server.
            committers: makes what makes the writes of each tablet durable.
            fence: raises `FencedError` once the folder may have another owner.
            maintenance_seconds: how often a thread calls `maintain`; None leaves that to the caller.

        Raises:
            UnsupportedFormatError: it was written by a newer version.
            StorageError: it cannot be written.
        """
        env = dataclasses.replace(env, clock=SteadyClock(env.clock))
        env.storage.make_folder(folder)
        self.closing = False
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
            home=home,
            committers=committers,
            room=JoinedRoom(limits.joined_bytes_max, env.threads.lock()),
            complete=lambda table: self._staging.complete(table),
        )
        self._tables.remove_dropped()
        self._leases = Leases(env, limits)
        self._writes = Writes(self._metadata, self._tables, limits, env.threads, self._pool.submit)
        self._staging = Staging(self._metadata, self._tables, self._writes, env, limits)
        self._maintenance = Maintenance(self._tables, self._leases, self._staging, lake, env)
        self._quotas = Quotas(self._metadata, self._tables, env, limits, lake, self._leases.count, lambda: self.closing)
        self._definitions = Definitions(
            self._metadata,
            self._tables,
            leases=self._leases,
            maintenance=self._maintenance,
            jobs=TieringJobs(env.clock, env.threads),
            lake=lake,
            env=env,
            limits=limits,
            fence=fence,
            quotas=self._quotas,
            forget=(self._writes.forget, self._staging.forget),
        )
        self.principals = Principals(self._metadata, env.clock)
        self._grants = Grants(self._metadata, env, limits, self._quotas)
        self._reads = Reads(
            self._metadata, self._tables, self._leases, env=env, limits=limits, fence=fence, quotas=self._quotas
        )
        self._handlers: dict[type[m.Request[Any]], _Handler] = {}
        self._answer_all()
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

    def _answer_all(self) -> None:
        definitions, writes, reads, staging = self._definitions, self._writes, self._reads, self._staging
        grants = self._grants
        self._answer(m.Hello, self._hello)
        self._answer_to(m.CreateTable, definitions.create)
        self._answer_to(m.GetTable, definitions.get)
        self._answer_to(m.ListTables, definitions.list_tables)
        self._answer_to(m.ListDatabases, definitions.list_databases)
        self._answer_to(m.DropTable, definitions.drop)
        self._answer(m.AlterTable, definitions.alter)
        self._answer_to(m.RenameTable, definitions.rename)
        self._answer(m.TableNow, definitions.now)
        self._answer(m.Truncate, definitions.truncate)
        self._answer(ReportTiered, definitions.report_tiered)
        self._answer(m.AdoptLake, definitions.adopt_lake)
        self._answer_to(AskTieringWork, definitions.tiering_work)
        self._answer_to(AskTieringStatus, definitions.tiering_status)
        self._answer_to(m.OpenWriter, writes.open_writer)
        self._answer_to(m.CloseWriter, writes.close_writer)
        self._answer(AskTurn, staging.turn)
        self._answer(Unstage, staging.unstage)
        self._answer(m.Get, reads.get)
        self._answer(m.Watermarks, reads.watermarks)
        self._answer(m.TimestampsAt, reads.timestamps_at)
        self._answer_to(m.OpenLeases, reads.open_leases)
        self._answer_to(m.RenewLeases, reads.renew_leases)
        self._answer(m.LeasedLake, reads.leased_lake)
        self._answer_to(m.LakeInfo, self._lake_info)
        self._answer_to(WhoAmI, grants.who_am_i)
        self._answer(CreateToken, grants.create_token)
        self._answer(ListTokens, grants.list_tokens)
        self._answer(RevokeToken, grants.revoke_token)
        self._answer(Grant, grants.grant)
        self._answer(Revoke, grants.revoke)
        self._answer_to(ListGrants, grants.list_grants)
        self._answer(SetQuota, self._quotas.set_quota)
        self._answer_to(ListQuotas, self._quotas.list_quotas)
        self._handlers[m.Write] = lambda request, attachments, caller: (
            writes.write(request, attachments, caller),
            [],
        )
        self._handlers[Stage] = lambda request, attachments, _: (staging.stage(request, attachments), [])
        self._handlers[Publish] = lambda request, attachments, _: (staging.publish(request, attachments), [])
        self._handlers[m.Lookup] = lambda request, attachments, _: reads.lookup(request, attachments)

    def _answer(self, kind: type[m.Request[m.R]], handler: Callable[[Any], m.R]) -> None:
        """Have a function answer what has no attachments and is the same for all callers."""
        self._handlers[kind] = lambda request, _, __: (handler(request), [])

    def _answer_to(self, kind: type[m.Request[m.R]], handler: Callable[[Any, Caller], m.R]) -> None:
        """Have a function answer what has no attachments, and is not the same for all callers."""
        self._handlers[kind] = lambda request, _, caller: (handler(request, caller), [])

    def call(
        self, request: m.Request[m.R], attachments: Sequence[pa.Buffer], caller: Caller
    ) -> tuple[m.R, list[pa.Buffer]]:
        """Answer a request, whatever interrupts the caller: nothing here ends half done.

        Raises:
            LakeheadError: it was refused, or failed.
        """
        self._require(request, caller)
        if self._quotas.admit(request, sum(a.size for a in attachments), caller):
            self._require(request, caller)  # what was granted may be taken back while it waits
        reply, parts = self._handled(request, attachments, caller)
        if caller.principal and isinstance(request, m.Get | m.Lookup):
            self._quotas.sent(lambda: sum(p.size for p in parts) or len(encode(reply)), caller)
        return reply, parts

    def _handled(
        self, request: m.Request[m.R], attachments: Sequence[pa.Buffer], caller: Caller
    ) -> tuple[m.R, list[pa.Buffer]]:
        handler = self._handlers[type(request)]
        if isinstance(request, m.Get | m.Lookup) and self._tables.is_open(request.table_id):
            # It changes nothing, holds one plain lock, and is quicker than another thread is woken.
            return handler(request, attachments, caller)
        if isinstance(request, m.Write) and self._tables.is_open(request.table_id):
            return uninterrupted(lambda: handler(request, attachments, caller))
        return shielded(lambda: handler(request, attachments, caller))

    def _require(self, request: m.Request[Any], caller: Caller) -> None:
        """That the caller may ask this, and asks of this folder."""
        for privilege, target in request.needs:
            authorize(caller, privilege, target)
        if isinstance(request, m.TableRequest | Publish):
            self._require_folder(request.folder_id)
        elif isinstance(request, m.OpenLeases):
            for table in request.tables:
                self._require_folder(table.folder_id)

    def _require_folder(self, folder_id: str) -> None:
        if folder_id not in ("", self.folder_id):
            raise FolderCopiedError(
                "this server serves another copy of the data folder than the one that the table was opened in: open the"
                " table again, and read it from its beginning",
                folder_id=self.folder_id,
                expected=folder_id,
            )

    def stream(
        self, request: m.Request[m.Stream], caller: Caller, gone: Callable[[], bool] = lambda: False
    ) -> ServerStream:
        """Open a stream, for which ``gone()`` tells that nobody waits any more; errors as in `call`."""
        self._require(request, caller)
        assert isinstance(request, m.Read | m.ReadLive | m.Subscribe)
        opened = self._quotas.open_stream(caller)
        try:
            stream = shielded(lambda: self._reads.stream(request, caller, gone), undo=ServerStream.close)
        except BaseException:
            self._quotas.close_stream(opened)
            raise
        stream.on_close(lambda: self._quotas.close_stream(opened))
        if caller.principal:

            def before_each(size: int, gone: Callable[[], bool]) -> None:
                self._quotas.pace(size, caller, gone)
                self._require(request, caller)  # what was granted may be taken back while it lasts

            stream.before_each(before_each)
        return stream

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

    def _hello(self, _: m.Hello) -> m.HelloReply:
        me = self.incarnation
        return m.HelloReply(folder_id=me.folder_id, version=m.PROTOCOL_VERSION, pid=os.getpid(), incarnation=me.number)

    def _lake_info(self, request: m.LakeInfo, caller: Caller) -> m.LakeReply:
        return self._definitions.lake_info(request, reading=not may(caller, Privilege.TIER, request.table_id))
