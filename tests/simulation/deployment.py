"""One simulated deployment: a server that is killed and started again, its disk, its clients' network, its tables."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os

import pyarrow as pa
from tests.simulation.disk import Disk, MountedDisk
from tests.simulation.history import History, require
from tests.simulation.lake import SimulatedLake, SimulatedLakes
from tests.simulation.network import FolderLock, Network, RunningServer
from tests.simulation.observer import Observer
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.threads import TaskThreads
from tests.simulation.trace import Trace
from tests.standby import with_standby

from lakehead.config import Limits, TableProperties
from lakehead.env import Env
from lakehead.env.place import Place
from lakehead.env.randomness import SeededRandomness
from lakehead.errors import StorageError
from lakehead.log.checkpoint import CheckpointPolicy
from lakehead.protocol import messages as m
from lakehead.server.endpoint import LocalEndpoint
from lakehead.server.lake_state import LakeState
from lakehead.server.metadata import MetadataStore
from lakehead.server.service import Service
from lakehead.types import Schemas, TableDescriptor, TablePath, TabletKey

_START_US = 1_700_000_000_000_000


class VirtualClock:
    """A process's clocks: the scheduler's time, and a wall clock that may be wrong and jump.

    Attributes:
        error_us: by how much the wall clock is wrong.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.error_us = 0

    def now_us(self) -> int:
        return _START_US + self._scheduler.now_us + self.error_us

    def monotonic(self) -> float:
        return self._scheduler.now_us / 1e6

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(seconds)


class Deployment:
    """What the actors of a simulation share."""

    def __init__(self, seed: int) -> None:
        self.scheduler = Scheduler(seed)
        self.draws = self.scheduler.draws
        self.trace = Trace()
        self.disk = Disk(self.scheduler, self._appended, self._removed, self._replaced)
        self.history = History(self.disk, self._partition_names, self._schema_texts, self._truncations)
        self.network = Network(self.scheduler, self.trace, Observer(self.scheduler, self.history))
        self.clock = VirtualClock(self.scheduler)
        self.env = Env(self.clock, self.disk, SeededRandomness(seed + 1), TaskThreads(self.scheduler))
        self.checkpoint_policy = CheckpointPolicy()
        self.folder = "/data"
        self.lakes = SimulatedLakes(
            lambda desc: SimulatedLake(self.scheduler, self.history, desc, SeededRandomness(seed + 2))
        )
        self.starts = 0
        self.damaged: tuple[str, int] | None = None
        self._restored_us = -1_000_000
        self.calm = False
        self.metadata: MetadataStore | None = None
        self._lake: LakeState | None = self.lakes
        self._place = Place("data", 1, 1, "machine")
        self._copies = 0
        self._folder_id = ""
        self._first_ended_us = -1_000_000

    def note(self, who: str, what: str, detail: object = "") -> None:
        self.trace.add(self.scheduler.now_us, who, what, detail)

    def _appended(self, path: str, data: bytes, size_after: int) -> None:
        with self.scheduler.judging():
            self._require_owner("writes to a log")
            self.history.written(path, data, size_after)

    def _removed(self, path: str) -> None:
        with self.scheduler.judging():
            self._require_owner("removes a file")
            self.history.removed(path)
        self.note("server", f"removes {os.path.splitext(path)[1]}")

    def _replaced(self, path: str) -> None:
        with self.scheduler.judging():
            self._require_owner(f"replaces {os.path.basename(path)}")

    def _require_owner(self, does: str) -> None:
        first = self.network.first
        mine = first is None or self.scheduler.current.process is not first.process
        require(mine, f"the first owner {does} after the second has opened the folder")

    def _partition_names(self, table_id: str) -> dict[int, str]:
        """Past the store's lock: nothing may come between a write and its being noted."""
        assert self.metadata is not None
        rows = self.metadata._db.execute("select id, name from partitions where table_id = ?", (table_id,))
        return dict(rows.fetchall())

    def _schema_texts(self, table_id: str) -> dict[int, str]:
        """As the disk has them: they are asked for while no server runs, too."""
        assert self.metadata is not None
        db = self.disk.open_database(self.metadata._path)
        try:
            rows = db.execute("select schema_id, schema from schemas where table_id = ?", (table_id,))
            return dict(rows.fetchall())
        finally:
            db.close()

    def _truncations(self, table_id: str) -> dict[TabletKey, int]:
        assert self.metadata is not None
        db = self.disk.open_database(self.metadata._path)
        try:
            rows = db.execute("select tablet, before from truncations where table_id = ?", (table_id,)).fetchall()
            return {TabletKey.parse(tablet): before for tablet, before in rows}
        finally:
            db.close()

    def newest_schema(self, table_id: str) -> int:
        """The id of the table's newest definition."""
        return max(self._schema_texts(table_id), default=-1)

    # ---- the server ---------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self.network.server is not None

    def start(self) -> None:
        """Start a server on the disk as it is, again and again while the disk refuses."""
        while not self._started():
            self.scheduler.sleep(self.draws.random() * 0.1)

    def _started(self) -> bool:
        self.starts += 1
        lock = FolderLock()
        process = Process(f"server {self.starts}")
        try:
            with self.scheduler.inside(process):
                service = Service(
                    self.folder,
                    env=dataclasses.replace(self.env, storage=MountedDisk(self.disk, process)),
                    limits=Limits(),
                    lake=self._lake,
                    maintenance_seconds=None if self._lake is None else 0.05,
                    place=lambda: self._place,
                    checkpoint_policy=self.checkpoint_policy,
                    committers=with_standby,
                    fence=lock.require_held,
                )
        except StorageError:
            self.note("server", "does not start")
            self.scheduler.kill(process)
            return False
        self.metadata = service._metadata
        self.network.server = RunningServer(process, service, lock)
        self._folder_id = self._folder_id or service.folder_id
        require(service.folder_id == self._folder_id, "the folder has become another one")
        self.note("server", "start")
        return True

    def stop(self) -> None:
        """Stop the server in good order."""
        server = self.network.server
        assert server is not None
        self.note("server", "stop")
        with contextlib.suppress(StorageError), self.scheduler.inside(server.process):
            server.service.close()
        self.network.server = None
        self.scheduler.kill(server.process)

    def kill(self) -> None:
        """Kill the server's process: what it wrote is still with the operating system."""
        server, self.network.server = self.network.server, None
        assert server is not None
        self.note("server", "kill")
        self._end(server)

    def _end(self, server: RunningServer) -> None:
        self.scheduler.kill(server.process)

    def let_second_in(self) -> None:
        """Take the lock from under the server that runs, and start another on its folder. Both answer until
        `end_first`. Nobody may be between looking at the lock and writing."""
        first = self.network.server
        assert first is not None
        first.lock.removed = True
        self.network.first, self.network.server = first, None
        self.note("server", "lock removed")
        self.start()

    def end_first(self) -> None:
        """End the server whose lock was removed."""
        first, self.network.first = self.network.first, None
        assert first is not None
        self.note("server", "first owner killed")
        self._end(first)
        self._first_ended_us = self.scheduler.now_us

    @property
    def tells_second_owner(self) -> bool:
        """Whether somebody may be told now, or is on his way with having been told, that the folder has another."""
        return self.network.first is not None or self.scheduler.now_us < self._first_ended_us + 100_000

    # ---- copies -------------------------------------------------------------------------------------------------

    def copied(self) -> Deployment:
        """A copy of the folder, with clients of its own and no lake; no server may run."""
        assert not self.running
        self._copies += 1
        folder = f"/copy{self._copies}"

        def moved(path: str) -> str:
            return folder + path.removeprefix(self.folder)

        made = copy.copy(self)
        made.disk = self.disk.copied(made._appended, made._removed, made._replaced, moved)
        made.history = self.history.copied(
            made.disk, made._partition_names, made._schema_texts, made._truncations, moved
        )
        made.network = Network(self.scheduler, self.trace, Observer(self.scheduler, made.history))
        made.folder, made.metadata, made._lake, made._folder_id = folder, None, None, ""
        made._place = Place("copy", 1 + self._copies, 1, "machine")
        return made

    def contents(self) -> dict[str, bytes]:
        """All bytes of the folder; no server may run."""
        return {path: self.disk.read_file(path) or b"" for path in self.disk.paths()}

    def cut_power(self) -> None:
        """Kill the server and take from the disk what was not synced, except for the start of the last write."""
        if self.running:
            self.kill()
        torn = self.draws.randrange(self.disk.unsynced_bytes() + 1) if self.draws.random() < 0.7 else 0
        self.disk.crash(torn_bytes=torn)
        with self.scheduler.judging():
            lost = self.history.cut()
        self.note("server", "power cut", f"{lost} records lost, {torn} bytes torn")

    def damage(self) -> bool:
        """Flip one bit that was synced long ago; False when there is none. Requests may be refused until `repair`."""
        frames = [f for t in self.history.tablets.values() for f in t.sealed_frames()]
        if not frames:
            return False
        frame = self.draws.choice(frames)
        size = self.draws.randrange(64, 512)
        self.damaged = (frame.path, max(0, frame.size_after - 1 - self.draws.randrange(size)))
        self.disk.flip_bit(*self.damaged)
        self.note("disk", "bit flipped", f"{os.path.basename(frame.path)} byte {self.damaged[1]}")
        return True

    def repair(self) -> None:
        """Restore what was damaged."""
        assert self.damaged is not None
        path, position = self.damaged
        if self.disk.present(path) and self.disk.holds(path, position + 1):
            self.disk.flip_bit(path, position)
        self.damaged, self._restored_us = None, self.scheduler.now_us
        self.note("disk", "restored")

    @property
    def tells_damage(self) -> bool:
        """Whether somebody may be told of damage now, or is on his way with what he was told."""
        return self.damaged is not None or self.scheduler.now_us < self._restored_us + 100_000

    # ---- tables and clients -------------------------------------------------------------------------------------

    def create_table(
        self,
        name: str,
        schema: pa.Schema,
        key: tuple[str, ...],
        buckets: int,
        properties: TableProperties,
        *,
        partition_by: tuple[str, ...],
        lake: bool,
    ) -> TableDescriptor:
        """Create a table, before anything goes wrong."""
        path, kind = TablePath("sim", name), "iceberg" if lake else None
        asked = TableDescriptor("", path, Schemas.only(schema), key, partition_by, key[-1:], buckets, kind, properties)
        server = self.network.server
        assert server is not None
        with self.scheduler.inside(server.process):
            reply, _ = LocalEndpoint(server.service).call(
                m.CreateTable(info=m.TableInfo.of(asked), if_not_exists=False)
            )
        desc = reply.info.descriptor()
        self.took(desc)
        return desc

    def took(self, desc: TableDescriptor) -> None:
        """A table was created."""
        self.history.tables[desc.table_id] = desc
        if desc.lake is not None:
            self.history.lakes[desc.table_id] = self.lakes.by_table[desc.table_id].offsets
