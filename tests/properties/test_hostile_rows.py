"""Arrow messages with hostile contents are refused, or are rows that every later use may trust.

Without full validation such rows crash the process when they are taken, joined or shown. A crash here ends the tests:
that is the finding. A long run: ``python -m tests.properties.test_hostile_rows FIRST_SEED CASES``.
"""

from __future__ import annotations

import random
import struct
import sys
from functools import cache

import numpy as np
import pyarrow as pa
import pytest
from tests.golden.make_golden import EVERY_TYPE, every_type

from lakehead.errors import LakeheadError
from lakehead.format.frame import (
    BODY_HEADER_BYTES,
    STATISTICS_ROWS_MIN,
    FrameBody,
    WriterStamp,
    decode_body,
    encode_body,
)
from lakehead.format.statistics import may_match
from lakehead.predicate import parse_predicate

BYTES_MAX = 1 << 20
ODD = [0, 1, -1, 64, 128, 1000, 2**31 - 1, -(2**31), 2**32 - 1, 2**62, -(2**63), 2**63 - 1]


@cache
def bodies() -> list[tuple[pa.Schema, bytes, int]]:
    """(schema, body, first byte to spoil): of all types together and each alone, in every compression, with and without
    statistics."""
    made = []
    whole = pa.RecordBatch.from_pylist([every_type(n) for n in range(STATISTICS_ROWS_MIN)], EVERY_TYPE)
    for schema in [EVERY_TYPE, *(pa.schema([f]) for f in EVERY_TYPE)]:
        for compression in ("none", "lz4", "zstd"):
            for rows in (12, STATISTICS_ROWS_MIN):
                batch = whole.slice(0, rows).select(schema.names)
                stamp = WriterStamp(b"w" * 16, 1)
                body = encode_body(batch, schema_id=0, stamp=stamp, compression=compression)
                data = body.buffer.to_pybytes()
                # Mostly the message; sometimes statistics and the header of the body too.
                made.append((schema, data, len(data) - (body.message_length + 63) // 64 * 64))
                made.append((schema, data, BODY_HEADER_BYTES - 20))
    return made


def spoiled(data: bytes, start: int, r: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(r.choice([1, 1, 1, 2, 3, 8])):
        # The message's own header, which claims lengths and places, comes first.
        end = len(out) if r.random() < 0.6 else min(len(out), start + 700)
        at = r.randrange(start, end)
        how = r.random()
        if how < 0.4:
            out[at] ^= 1 << r.randrange(8)
        elif how < 0.6:
            out[at] = r.choice([0, 1, 127, 128, 255])
        else:
            size = 8 if how < 0.8 else 4
            at = at // size * size
            out[at : at + size] = struct.pack("<q", r.choice(ODD))[:size]
    return bytes(out[: len(data)])


def use(body: FrameBody, schema: pa.Schema, rows: pa.RecordBatch) -> None:
    """What a server, a reader and a round do with rows."""
    assert rows.num_rows == body.row_count and rows.schema.equals(schema)
    rows.take(pa.array(np.arange(rows.num_rows)[::-2]))
    pa.concat_batches([rows, rows.slice(1)]).serialize()
    for column in rows.columns:
        try:
            column.to_pylist()
        except (OverflowError, ValueError) as e:
            # Python's calendar ends before Arrow's.
            assert pa.types.is_temporal(column.type) and not isinstance(e, UnicodeDecodeError)
    body.rows(schema, [len(schema) - 1])
    if "n" in schema.names:
        predicate = parse_predicate("n > 3", schema)
        predicate.filter(rows)
        if body.statistics_length:
            may_match(body.statistics, schema, predicate.bounds)


def fuzz(seed: int, count: int) -> dict[str, int]:
    """How many cases were taken, and refused with which error."""
    outcomes: dict[str, int] = {}
    for case in range(seed, seed + count):
        r = random.Random(case)
        schema, data, start = r.choice(bodies())
        try:
            body = decode_body(pa.py_buffer(spoiled(data, start, r)))
            rows = body.received_rows(schema, bytes_max=BYTES_MAX)
        except LakeheadError as e:
            outcome = type(e).__name__
        else:
            use(body, schema, rows)
            outcome = "taken"
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return outcomes


@pytest.mark.parametrize("seed", [0, 10_000_000])
def test_spoiled_rows_are_refused_or_right(seed: int) -> None:
    outcomes = fuzz(seed, 2500)
    assert outcomes["taken"] > 200 and outcomes["CorruptionError"] > 200


if __name__ == "__main__":
    print(fuzz(int(sys.argv[1]), int(sys.argv[2])))
