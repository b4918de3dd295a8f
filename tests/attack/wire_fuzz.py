"""Damaged messages without end, to a server and to its clients: ``make attack-fuzz``.

Each kind runs in a process of its own, which is watched: it must not end, stand still or grow, and what a client raises
is an error of Lakehead's, whatever a server said.

- *requests*: a service gets damaged requests with damaged attachments.
- *predicates*: a service gets reads with damaged filters.
- *replies*: a client, over Flight, gets damaged replies and attachments.
- *streams*: a client, over Flight, gets streams with damaged headers and columns, or with others than it asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from tests.attack.hostile_server import HostileServer, Parts
from tests.properties.test_hostile_peers import SCHEMA, batch, create, flipped, fuzz, service, spoiled

import lakehead as lh
from lakehead.api.connection import open_server
from lakehead.env.clock import SystemClock
from lakehead.predicate import parse_predicate
from lakehead.protocol import messages as m

ROUND = 2_500
"""Cases between two looks at what the process holds."""
STANDS_STILL_SECONDS = 120.0
GROWTH_BYTES_MAX = 128 << 20
_WARM = 16
_K, _S = pc.field("k"), pc.field("s")
FILTERS = (
    "k > 1 and s like 'te%'",
    "s in ('a', 'b', 'text') or k in (1, 2, 3)",
    "k between 0 and 9 and not (s = 'texttext') and s is not null",
    pc.utf8_upper(_S) == "TEXT",
    pc.round(_K.cast(pa.float64()) / 7.0, ndigits=2) > 0.5,
    pc.utf8_length(_S) + _K > 4,
    pc.is_in(_K, pa.array([1, 2, 3])) | pc.match_like(_S, "t_x%"),
)


def requests(seed: int, cases: int) -> Counter[str]:
    return Counter(fuzz(seed, cases))


def predicates(seed: int, cases: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    good = [parse_predicate(text, SCHEMA).to_bytes() for text in FILTERS]
    with service() as server:
        log = create(server, "log", buckets=1)
        con = lh.api.connection.Connection(server, "lakehead://127.0.0.1:1", None)
        con.table("f.log").append(batch(70))
        whole = m.TabletRange(partition="", bucket=0, start=0, end=70)
        for case in range(seed, seed + cases):
            r = random.Random(case)
            read = m.Read(table_id=log, ranges=[whole], columns=["s"], predicate=flipped(r.choice(good), r))
            outcomes[_outcome(lambda: [rows for _, rows in server.stream(read)])] += 1  # noqa: B023
        con.close()
    return outcomes


def replies(seed: int, cases: int) -> Counter[str]:
    def spoil(r: random.Random, hostile: HostileServer) -> None:
        def reply(data: bytes, parts: Parts) -> tuple[bytes, Parts]:
            plain = spoiled(msgspec.msgpack.decode(data), r, r.choice([0.0, 0.05, 0.3]))
            sent = msgspec.msgpack.encode(plain)
            sent = flipped(sent, r) if r.random() < 0.2 else sent
            changed = [pa.py_buffer(flipped(p.to_pybytes(), r)) if r.random() < 0.6 else p for p in parts]
            return sent, r.choice([changed[1:], changed * 2, []]) if r.random() < 0.05 else changed

        hostile.reply = reply

    return _clients(seed, cases, spoil, CALLS)


def streams(seed: int, cases: int) -> Counter[str]:
    def spoil(r: random.Random, hostile: HostileServer) -> None:
        def item(data: bytes, rows: pa.RecordBatch) -> tuple[bytes, pa.RecordBatch]:
            if r.random() < 0.5:
                data = msgspec.msgpack.encode(spoiled(msgspec.msgpack.decode(data), r, 0.3))
            data = flipped(data, r) if r.random() < 0.1 else data
            return data, damaged(rows, r) if r.random() < 0.8 else rows

        hostile.item = item
        if r.random() < 0.1:
            hostile.columns = r.choice(OTHER_COLUMNS)

    return _clients(seed, cases, spoil, READS)


def damaged(rows: pa.RecordBatch, r: random.Random) -> pa.RecordBatch:
    """The rows with bytes of their columns changed, but for what Arrow reads when it sends them: where a column of
    texts or lists begins and ends."""
    copied = pa.ipc.read_record_batch(rows.serialize(), rows.schema)
    columns = [pa.Array.from_buffers(c.type, len(c), *_spoiled_buffers(c, r)) for c in copied.columns]
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)


def _spoiled_buffers(column: pa.Array, r: random.Random) -> tuple[Any, ...]:
    if pa.types.is_list(column.type):
        values = column.values
        child = pa.Array.from_buffers(values.type, len(values), *_spoiled_buffers(values, r))
        own = [_spoiled_buffer(b, r, offsets=i == 1, count=len(column)) for i, b in enumerate(column.buffers()[:2])]
        return own, -1, 0, [child]
    varying = pa.types.is_string(column.type) or pa.types.is_binary(column.type)
    buffers = column.buffers()
    return ([_spoiled_buffer(b, r, offsets=varying and i == 1, count=len(column)) for i, b in enumerate(buffers)],)


def _spoiled_buffer(buffer: pa.Buffer | None, r: random.Random, *, offsets: bool, count: int) -> pa.Buffer | None:
    if buffer is None or not buffer.size or r.random() < 0.5:
        return buffer
    data = buffer.to_pybytes()
    changed = flipped(data, r).ljust(len(data), b"\0")
    if offsets:
        changed = data[:4] + changed[4 : 4 * count] + data[4 * count :]
    return pa.py_buffer(changed)


def _renamed(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.rename_columns([f"{name}_" for name in rows.schema.names])


def _as_texts(rows: pa.RecordBatch) -> pa.RecordBatch:
    texts = pa.array(["x"] * rows.num_rows, pa.string())
    return pa.RecordBatch.from_arrays([texts] * rows.num_columns, names=rows.schema.names)


OTHER_COLUMNS: tuple[Callable[[pa.RecordBatch], pa.RecordBatch], ...] = (
    _renamed,
    _as_texts,
    lambda rows: rows.select(rows.schema.names[1:]),
    lambda rows: rows.select(rows.schema.names[::-1]),
    lambda rows: rows.append_column("more", pa.nulls(rows.num_rows, pa.int64())),
)


def listed(rows: pa.Table | pa.RecordBatch) -> None:
    """Look at each value, as far as Python has it: Arrow's moments of any year are rows as others."""
    with contextlib.suppress(OverflowError, ValueError):
        rows.to_pylist()


def resume(table: lh.Table) -> None:
    with table.writer("w") as writer:
        writer.upsert(batch(2))


def alter(table: lh.Table) -> None:
    with table.alter() as change:
        change.set_comment(None, "a comment")


CALLS: tuple[Callable[[lh.Connection, lh.Table, lh.Table], object], ...] = (
    lambda con, log, keyed: con.tables(),
    lambda con, log, keyed: con.databases(),
    lambda con, log, keyed: con.whoami(),
    lambda con, log, keyed: con.grants(),
    lambda con, log, keyed: con.table("f.log").scan(),
    lambda con, log, keyed: con.quotas(),
    lambda con, log, keyed: con.tokens(),
    lambda con, log, keyed: listed(con.table("f.keyed").lookup([1, 2, 3])),
    lambda con, log, keyed: listed(keyed.lookup([1, 2, 3])),
    lambda con, log, keyed: listed(keyed.prefix_lookup([1, 2])),
    lambda con, log, keyed: listed(keyed.scan(where="k in (1, 2)").to_arrow()),
    lambda con, log, keyed: resume(keyed),
    lambda con, log, keyed: alter(keyed),
    lambda con, log, keyed: log.truncate(),
    lambda con, log, keyed: keyed.get(4),
    lambda con, log, keyed: log.status(),
    lambda con, log, keyed: log.append(batch(3)),
    lambda con, log, keyed: keyed.upsert(batch(3)),
    lambda con, log, keyed: log.scan(limit=3).to_arrow(),
    lambda con, log, keyed: con.create_table("f.log", SCHEMA, buckets=2, if_not_exists=True),
)
READS: tuple[Callable[[lh.Connection, lh.Table, lh.Table], object], ...] = (
    lambda con, log, keyed: listed(log.scan().to_arrow()),
    lambda con, log, keyed: listed(log.scan(where="k > 1 and s <> 'a'").to_arrow()),
    lambda con, log, keyed: listed(keyed.scan(limit=5).to_arrow()),
    lambda con, log, keyed: [listed(b.rows) for b in log.subscribe("earliest", stop="now")],
    lambda con, log, keyed: [listed(b.rows) for b in keyed.subscribe("full", stop="now")],
    lambda con, log, keyed: [listed(b.rows) for b in keyed.subscribe("earliest", stop="now")],
)


def _clients(
    seed: int,
    cases: int,
    spoil: Callable[[random.Random, HostileServer], None],
    calls: tuple[Callable[[lh.Connection, lh.Table, lh.Table], object], ...],
) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    with service() as server:
        hostile = HostileServer(server)
        honest = (hostile.reply, hostile.item, hostile.columns)
        con = open_server(hostile.address.uri, token="t")
        log = con.create_table("f.log", SCHEMA, buckets=2, durability="os")
        keyed = con.create_table("f.keyed", SCHEMA, primary_key="k", durability="os")
        log.append(batch(70))
        keyed.upsert(batch(70))
        for case in range(seed, seed + cases):
            r = random.Random(case)
            call = r.choice(calls)
            spoil(r, hostile)
            outcomes[_outcome(lambda: call(con, log, keyed))] += 1  # noqa: B023
            hostile.reply, hostile.item, hostile.columns = honest
            if case % 1000 == 0:  # the client lives, and so does what it asks
                con.close()
                con = open_server(hostile.address.uri, token="t")
            if case % 100 == 0:  # what it was told of a table may be another one
                log, keyed = con.table("f.log"), con.table("f.keyed")
                log.truncate()
                log.append(batch(70))
                keyed.upsert(batch(70))
                assert log.scan().count() == 70
        con.close()
        hostile.shutdown()
    return outcomes


def _outcome(call: Callable[[], object]) -> str:
    try:
        call()
        return "answered"
    except lh.LakeheadError as e:
        return type(e).__name__
    except Exception as e:
        at = next((f for f in reversed(traceback.extract_tb(e.__traceback__)) if "lakehead" in f.filename), None)
        return f"{UNTYPED} {type(e).__name__} at {at and Path(at.filename).name}:{at and at.lineno}: {str(e)[:100]}"


UNTYPED = "no error of Lakehead's:"
KINDS: dict[str, Callable[[int, int], Counter[str]]] = {
    "requests": requests,
    "predicates": predicates,
    "replies": replies,
    "streams": streams,
}


def held_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def child(kind: str, seed: int, cases: int) -> None:
    """Play them, and say after each round what came of it."""
    # Whoever waits for a server that lied about being busy is not what is tried here.
    SystemClock.sleep = lambda self, seconds: time.sleep(min(seconds, 0.001))  # type: ignore[method-assign]
    for at in range(seed, seed + cases, ROUND):
        outcomes = KINDS[kind](at, min(ROUND, seed + cases - at))
        print(json.dumps({"at": at, "outcomes": outcomes, "held": held_bytes()}), flush=True)


def watch(kind: str, seed: int, cases: int) -> bool:
    """Run them in a process, and say what was wrong; True when nothing was."""
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.attack.wire_fuzz", kind, "--child"]
        process = subprocess.Popen(
            [*command, "--seed", str(seed), "--cases", str(cases)], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        lines: SimpleQueue[str] = SimpleQueue()
        reader = Thread(target=_pass_on, args=[process, lines], daemon=True)
        reader.start()
        outcomes: Counter[str] = Counter()
        held: list[int] = []
        began, wrong = time.monotonic(), ""
        while sum(outcomes.values()) < cases:
            with contextlib.suppress(Empty):
                if not (line := lines.get(timeout=STANDS_STILL_SECONDS)):
                    wrong = f"the process ended with {process.wait()}"
                    break
                told = json.loads(line)
                outcomes.update(told["outcomes"])
                held.append(told["held"])
                if len(held) > _WARM and held[-1] > held[_WARM - 1] + GROWTH_BYTES_MAX:
                    wrong = f"it grew from {held[_WARM - 1] >> 20} to {held[-1] >> 20} MiB"
                    break
                continue
            wrong = f"it has stood still for {STANDS_STILL_SECONDS:g} s"
            break
        wrong = wrong or next((outcome for outcome in outcomes if outcome.startswith(UNTYPED)), "")
        process.kill()
        process.wait()
        reader.join()
        seconds = time.monotonic() - began
        size = f"{held[min(_WARM, len(held)) - 1] >> 20} to {held[-1] >> 20} MiB" if held else ""
        print(f"{kind}: {sum(outcomes.values()):,} cases from {seed} in {seconds:.0f} s, {size}; {dict(outcomes)}")
        if wrong:
            errors.seek(0)
            print(f"{kind}: after case {seed + sum(outcomes.values())}: {wrong}\n{errors.read()[-4000:]}")
        return not wrong


def _pass_on(process: subprocess.Popen[str], lines: SimpleQueue[str]) -> None:
    assert process.stdout is not None
    with process.stdout as told:
        for line in told:
            lines.put(line)
    lines.put("")


def main() -> int:
    """Play each kind; 1 when a process ended, stood still or grew."""
    parser = argparse.ArgumentParser(prog="make attack-fuzz")
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.kinds[0], options.seed, options.cases)
        return 0
    return 0 if all([watch(kind, options.seed, options.cases) for kind in options.kinds]) else 1


if __name__ == "__main__":
    sys.exit(main())
