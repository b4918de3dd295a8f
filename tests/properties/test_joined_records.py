"""Rows of small frames that were joined in memory are those of the file: offsets, times, changes and all."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from lakehead.config import Limits, TableProperties
from lakehead.env import Env, SystemClock, SystemRandomness, SystemThreads
from lakehead.env.interrupts import Latch
from lakehead.env.storage import LocalStorage
from lakehead.errors import ClosedError
from lakehead.format.frame import WriterStamp, encode_body
from lakehead.log import LogView, joined
from lakehead.log.checkpoint import live_at
from lakehead.log.joined import JoinedRoom
from lakehead.log.records import FrameRecords, JoinedRecords
from lakehead.predicate import parse_predicate
from lakehead.protocol.alterations import AddColumn, Alteration, RenameColumn, WidenColumn
from lakehead.protocol.schemas import field_to_text
from lakehead.server.alteration import altered
from lakehead.server.group_commit import PendingWrite
from lakehead.server.notes import MakeCheckpoint, Roll, Trim
from lakehead.server.projection import Projection
from lakehead.server.tablet import Tablet
from lakehead.types import Schemas, TableDescriptor, TablePath, TabletKey

SCHEMA = pa.schema([pa.field("k", pa.int64(), False), ("v", pa.string()), ("n", pa.int32())])
SYSTEM = ["__offset", "__timestamp", "__change_type", "__prev_offset", "__bucket"]
DONE = ClosedError("the test is over")


class Written:
    """A tablet with random writes, alterations, restarts and trims."""

    def __init__(self, folder: Path, room: JoinedRoom, r: random.Random, *, keyed: bool) -> None:
        self.folder, self.room, self.r, self.keyed = str(folder), room, r, keyed
        properties = TableProperties(segment_bytes=1 << 16, compression=r.choice(["none", "lz4"]))
        key = ("k",) if keyed else ()
        path = TablePath("a", "t")
        self.desc = TableDescriptor("t1", path, Schemas.only(SCHEMA), key, (), key, 1, None, properties)
        self.sequence = 0
        self.held: LogView | None = None
        self.ends: list[int] = []
        self.tablet = self.open()

    def open(self) -> Tablet:
        return Tablet(
            self.desc,
            TabletKey("", 3),
            env=Env(SystemClock(), LocalStorage(), SystemRandomness(), SystemThreads()),
            folder=self.folder,
            on_progress=lambda: None,
            run_in_background=lambda work: None,
            seed=7,
            moment=threading.Lock(),
            room=self.room,
        )

    def write(self) -> None:
        for _ in range(self.r.choice([1, 5, 40])):
            # Several at once are one group, and in one call of the writer's there is one frame for each.
            writes = []
            for writer in range(self.r.choice([1, 1, 1, 5])):
                n = self.r.choice([1, 1, 2, 10, 10, 100] if self.r.random() < 0.98 else [5000])
                keys = pa.array([self.r.randrange(300) for _ in range(n)], pa.int64())
                texts = pa.array([self.r.choice([None, "", "x", "yy" * 9]) for _ in range(n)])
                columns = [keys, texts, *(pa.array(range(n)).cast(t) for t in self.desc.schema.types[2:])]
                rows = pa.RecordBatch.from_arrays(columns, schema=pa.schema(list(self.desc.schema)))
                stamp = WriterStamp(bytes([writer]) * 16, self.sequence, -1 if writer else self.sequence - 1)
                if writer:
                    stamp = WriterStamp(self.r.randbytes(16), 0)
                body = encode_body(
                    rows, schema_id=self.desc.schema_id, stamp=stamp, with_statistics=not self.keyed,
                    compression="none" if self.keyed else self.desc.properties.compression,
                )  # fmt: skip
                writes.append(PendingWrite("upsert" if self.keyed else "append", body, rows, Latch()))
            self.sequence += 1
            drives = [self.tablet.submit(w) for w in writes]
            assert drives == [True] + [False] * (len(writes) - 1)
            self.tablet.drive()
            self.ends += [w.wait()[1] for w in writes]

    def delete(self) -> None:
        if self.keyed:
            keys = pa.RecordBatch.from_pydict({"k": [self.r.randrange(300)]}, pa.schema([SCHEMA.field("k")]))
            body = encode_body(keys, schema_id=self.desc.schema_id, stamp=WriterStamp(self.r.randbytes(16), 0))
            write = PendingWrite("delete", body, keys, Latch())
            assert self.tablet.submit(write)
            self.tablet.drive()
            write.wait()

    def alter(self) -> None:
        names, types = self.desc.schema.names, self.desc.schema.types
        change: Alteration = self.r.choice(
            [
                AddColumn(name=f"c{len(names)}", field=field_to_text(pa.field("c", pa.int32()))),
                RenameColumn(name=names[1], to=f"v{self.sequence}"),
                WidenColumn(name="n", field=field_to_text(pa.field("n", pa.int64()))),
            ]
        )
        if len(names) > 6 or (isinstance(change, WidenColumn) and types[2] == pa.int64()):
            return
        self.desc = altered(self.desc, [change], Limits())
        with self.tablet.paused():
            self.tablet.alter(self.desc)

    def restart(self) -> None:
        self.held = None
        self.tablet.close(DONE)
        self.tablet = self.open()

    def trim(self) -> None:
        self.tablet.apply_note(self.r.choice([Roll(), MakeCheckpoint()]))
        self.tablet.apply_note(Trim(self.r.randint(self.tablet.log_start_offset, self.tablet.high_watermark)))

    def hold(self) -> None:
        self.held = self.tablet.view()

    def check(self) -> int:
        """Compare some ranges; how many records came from memory."""
        view = self.held if self.held is not None and self.r.random() < 0.3 else None
        low = view.log_start_offset if view is not None else self.tablet.log_start_offset
        high = min(view.log_end_offset, self.tablet.high_watermark) if view is not None else self.tablet.high_watermark
        start, end = sorted(self.r.choice([low, high, self.r.randint(low, high)]) for _ in range(2))
        names = self.desc.schema.names
        columns = self.r.sample([*names, *SYSTEM], self.r.randint(0, len(names) + 5))
        where = self.r.choice([None, None, "k = 7", "k > 250 and n < 3"])
        where = where if set(names) >= {"k", "n"} else None
        projection = Projection(self.desc.schemas, columns, parse_predicate(where, self.desc.schema) if where else None)
        records = list(self.tablet.records(start, end, projection.schemas, view))
        frames = map(FrameRecords, (view.frames if view else self.tablet.frames)(start, end))
        found, wanted = (
            pa.Table.from_batches(
                [b for r in some if (b := projection.records(r, 3, start, end)) is not None], projection.schema
            )
            for some in (records, frames)
        )
        assert found.combine_chunks().equals(wanted.combine_chunks()), (start, end, columns, where)
        assert not columns or found.num_rows == wanted.num_rows
        if self.keyed and self.r.random() < 0.3:
            now = self.tablet.view()
            covered = now.checkpoint.offset if now.checkpoint is not None else 0
            end = self.r.choice([e for e in [*self.ends, self.tablet.high_watermark] if e >= covered])
            live, plain = (
                [
                    row
                    for b in batches
                    for row in zip(b.offsets.tolist(), b.timestamps.to_pylist(), b.rows.to_pylist(), strict=True)
                ]
                for batches in (
                    self.tablet.live_at(end, [0, 1, 2]),
                    live_at(now.checkpoint, now.records, end, self.desc.schemas, [0, 1, 2]),
                )
            )
            assert live == plain
        return sum(isinstance(r, JoinedRecords) for r in records)


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("bytes_max", [0, 20_000, 128 << 20])
@pytest.mark.parametrize("seed", range(2))
def test_joined_records_are_those_of_the_log(
    tmp_path: Path, seed: int, bytes_max: int, keyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = random.Random(f"{seed} {keyed}")
    monkeypatch.setattr(joined, "_FAN", r.choice([2, 3, 16]))
    monkeypatch.setattr(joined, "ROWS_MAX", r.choice([500, 1 << 16]))
    monkeypatch.setattr(joined, "_PARTS_MAX", r.choice([20, 512]))
    room = JoinedRoom(bytes_max, threading.Lock())
    tablets = [Written(tmp_path / str(i), room, r, keyed=keyed) for i in range(2)]
    from_memory = 0
    for _ in range(25):
        t = r.choice(tablets)
        steps = [t.write] * 8 + [t.delete, t.alter, t.trim, t.hold] + [t.restart] * 2
        r.choice(steps)()
        from_memory += t.check()
        assert room.bytes_held <= bytes_max
        assert room.bytes_held == sum(p.size_bytes for t in tablets for p in t.tablet._log._joined.parts)
    assert (from_memory > 0) == (bytes_max > 0)
    for t in tablets:
        t.tablet.close(DONE)
    assert room.bytes_held == 0
