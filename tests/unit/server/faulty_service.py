"""A service over a disk that fails when it is told to."""

from __future__ import annotations

import contextlib
from typing import Any

import pyarrow as pa

from lakehead.client.routes import OneServer
from lakehead.client.table import TableHandle
from lakehead.config import Limits
from lakehead.env import Env, SystemClock, SystemThreads
from lakehead.env.randomness import SeededRandomness
from lakehead.errors import LakeheadError
from lakehead.protocol import messages as m
from lakehead.server.endpoint import LocalEndpoint
from lakehead.server.service import Service
from lakehead.testing.storage import FaultyStorage
from lakehead.types import Schemas, TableDescriptor, TablePath

SCHEMA = pa.schema([pa.field("k", pa.int64(), False), ("v", pa.string())])


class Clock(SystemClock):
    """Tells a later time when it is told to, and pauses for no one."""

    ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead

    def now_us(self) -> int:
        return super().now_us() + int(self.ahead * 1e6)

    def sleep(self, seconds: float) -> None:
        self.ahead += seconds


class Deployment:
    """A service over a storage that fails, which can be started again."""

    def __init__(self, limits: Limits) -> None:
        self.storage = FaultyStorage()
        self.clock = Clock()
        self.env = Env(self.clock, self.storage, SeededRandomness(1), SystemThreads())
        self.limits = limits
        self.service = self.start()

    def start(self) -> Service:
        service = Service("/data", env=self.env, limits=self.limits, lake=None)
        self.routes = OneServer(LocalEndpoint(service))
        return service

    def restart(self, *, power_cut: bool = False) -> None:
        if power_cut:
            self.storage.crash()
            old, self.service = self.service, self.start()
            with contextlib.suppress(LakeheadError):
                old.close()
        else:
            self.service.close()
            self.service = self.start()

    def table(
        self, *, keyed: bool = False, buckets: int = 3, name: str = "t", partitioned: bool = False
    ) -> TableHandle:
        schema, key, by = SCHEMA, ("k",) if keyed else (), ()
        if partitioned:
            schema, key, by = schema.set(1, SCHEMA.field(1).with_nullable(False)), ("v", "k") if keyed else (), ("v",)
        desc = TableDescriptor("", TablePath("a", name), Schemas.only(schema), key, by, ("k",), buckets, None)
        reply, _ = LocalEndpoint(self.service).call(m.CreateTable(info=m.TableInfo.of(desc), if_not_exists=True))
        return self.handle(reply.info.descriptor())

    def handle(self, desc: TableDescriptor) -> TableHandle:
        return TableHandle(desc, self.routes, self.env)

    def frames(self, handle: TableHandle) -> list[list[dict[str, Any]]]:
        """The rows of each frame, tablet by tablet."""
        table = self.service._tables.get(handle.desc.table_id)
        tablets = [t for _, t in sorted(table.tablets.items())]
        return [f.body.rows(SCHEMA).to_pylist() for t in tablets for f in t.frames(0, t.high_watermark)]

    def rows(self, handle: TableHandle) -> list[tuple[int, str | None]]:
        return sorted((r["k"], r["v"]) for frame in self.frames(handle) for r in frame)

    def live(self, handle: TableHandle) -> list[tuple[int, str | None]]:
        """The rows that there are."""
        table = self.service._tables.get(handle.desc.table_id)
        if handle.desc.keyed:
            found = [rows for t in table.tablets.values() for _, rows in t.live_rows([0, 1])[1]]
        else:
            frames = (f for t in table.tablets.values() for f in t.frames(t.log_start_offset, t.high_watermark))
            found = [f.body.rows(SCHEMA) for f in frames]
        return sorted((r["k"], r["v"]) for rows in found for r in rows.to_pylist())

    def staged_files(self) -> list[str]:
        return [name for name in self.storage._files if "/staged/" in name]
