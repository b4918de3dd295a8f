"""A second tablet behind each one of a service, which gets what the first has committed, byte for byte.

It stands for a standby of a cluster. What the first has made of its frames, live and through restarts, the second must
have made of them: the same frames, the same answers to writers, the same live rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa

from lakehead.env import Env, SystemClock, SystemRandomness, SystemThreads
from lakehead.format.frame import Frame, decode_frame
from lakehead.kv import KvTablet
from lakehead.log import LogTablet
from lakehead.server.committer import Committer, local_committer
from lakehead.server.tablet import Tablet
from lakehead.testing.storage import MemoryStorage
from lakehead.types import TableDescriptor, TabletKey

_FOLDER = "/standby/bucket-0"
_COMPARED_EVERY = 5
comparisons = 0
"""How often two tablets were compared in this process."""
_standbys: WeakValueDictionary[tuple[str, TabletKey], Standby] = WeakValueDictionary()


class Standby:
    """A committer that hands on what another one has committed."""

    def __init__(self, desc: TableDescriptor, key: TabletKey, fence: Callable[[], None]) -> None:
        self._desc, self._key, self._fence = desc, key, fence
        self._leader = local_committer(desc, key, fence)
        self._tablet: Tablet | None = None
        self._same_until = 0
        self._commits = 0

    def follows(self, desc: TableDescriptor, fence: Callable[[], None]) -> bool:
        """Take the definition that the first tablet takes, as a standby does before frames of it come; False for one
        that was opened anew."""
        if fence is not self._fence or desc.schema_id <= self._desc.schema_id:
            return False
        self._desc, self._leader = desc, local_committer(desc, self._key, fence)
        if self._tablet is not None:
            with self._tablet.paused():
                self._tablet.alter(desc)
        return True

    @property
    def waits(self) -> bool:
        return self._leader.waits

    def commit(self, log: LogTablet, frames: Sequence[Frame]) -> None:
        if self._tablet is None:
            self._tablet = self.opened(log)
        elif self._commits % _COMPARED_EVERY == 0:
            self.compare(log, self._tablet._log)
        self._commits += 1
        self._leader.commit(log, frames)
        self.hand_on(self._tablet, frames)

    def hand_on(self, tablet: Tablet, frames: Sequence[Frame]) -> None:
        """Have the second tablet take what the first has committed."""
        tablet.apply([decode_frame(pa.py_buffer(as_bytes(f)), check=True) for f in frames])

    def opened(self, log: LogTablet) -> Tablet:
        """One that restarts from the files that the first has now."""
        storage = MemoryStorage()
        storage.make_folder(_FOLDER)
        for name in log._storage.list_files(log._folder):
            data = log._storage.read_file(f"{log._folder}/{name}")
            if data is not None and not name.endswith((".tmp", ".json")):
                file = storage.open_log(f"{_FOLDER}/{name}")
                file.append([data])
                file.sync()
                file.close()
        return Tablet(
            self._desc,
            self._key,
            env=Env(SystemClock(), storage, SystemRandomness(), SystemThreads()),
            folder=_FOLDER,
            on_progress=lambda: None,
            run_in_background=lambda work: None,
            seed=2,
            moment=SystemThreads().lock(),
            incarnation=2**32 - 1,
        )

    def compare(self, leader: LogTablet, standby: LogTablet) -> None:
        """Require that both are the same."""
        global comparisons
        comparisons += 1
        assert leader.state.offset == standby.state.offset == standby.high_watermark == standby.log_end_offset
        assert leader.last_timestamp_us == standby.last_timestamp_us
        assert leader.writers.state() == standby.writers.state()
        start = max(self._same_until, leader.log_start_offset, standby.log_start_offset)
        self._same_until = leader.log_end_offset
        frames = [[as_bytes(f) for f in log.frames(start, self._same_until)] for log in (leader, standby)]
        assert frames[0] == frames[1]
        rows = [log.state.rows for log in (leader, standby)]
        if isinstance(rows[0], KvTablet) and isinstance(rows[1], KvTablet):
            (offsets, live), (others, same) = (flat(r) for r in rows if isinstance(r, KvTablet))
            assert np.array_equal(offsets, others) and live.equals(same)


def as_bytes(frame: Frame) -> bytes:
    return frame.header + frame.body.buffer.to_pybytes()


def flat(kv: KvTablet) -> tuple[np.ndarray, pa.Table]:
    batches = kv.live_rows()
    return np.concatenate([[], *(o for o, _ in batches)]), pa.Table.from_batches([b for _, b in batches], kv.schema)


def with_standby(desc: TableDescriptor, key: TabletKey, fence: Callable[[], None]) -> Committer:
    """`local_committer`, followed; by the same standby when the table is altered."""
    standby = _standbys.get((desc.table_id, key))
    if standby is None or not standby.follows(desc, fence):
        standby = _standbys[desc.table_id, key] = Standby(desc, key, fence)
    return standby
