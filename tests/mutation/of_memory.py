"""Mutants of what reads and writes take from memory."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

OF_MEMORY = (
    Mutant(
        "join rows that do not follow one another",
        "log/joined.py",
        "a.end_offset == b.base_offset and ",
        "",
        "tests/properties/test_joined_records.py",
    ),
    Mutant(
        "live rows of a moment with what was joined later",
        "log/joined.py",
        "yield part.within(start, end)",
        "yield part",
        "tests/properties/test_joined_records.py",
    ),
    Mutant(
        "joined rows with a wrong time",
        "log/records.py",
        "times = np.full(rows.num_rows, first.timestamp_us, np.int64)",
        "times = np.full(rows.num_rows, 0, np.int64)",
        "tests/properties/test_joined_records.py",
    ),
    Mutant(
        "joined rows without a bound",
        "log/joined.py",
        "while self.bytes_held > self.bytes_max:",
        "while False:",
        "tests/properties/test_joined_records.py",
    ),
    Mutant(
        "rows of other engines are not counted",
        "lake/pinned_lake.py",
        "return rows if desc.keyed or snapshot.records == rows else None",
        "return rows",
        "tests/integration/test_counts.py",
    ),
    Mutant(
        "old images from the rows that replace them",
        "kv/kernels.py",
        "out[k] = held[at] if at >= 0 else given[~at]",
        "out[k] = given[~at if at < 0 else 0]",
        "tests/unit/kv/test_heap.py tests/unit/kv/test_tablet.py",
    ),
    Mutant(
        "a step of keys that move ends within a run",
        "kv/kernels.py",
        "while d < end or full:",
        "while d < end:",
        "tests/unit/kv/test_index.py",
    ),
    Mutant(
        "keys that came around the end of a table stay behind",
        "kv/kernels.py",
        "while d < end or full:",
        "while d < end or (full and d < n):",
        "tests/unit/kv/test_index.py",
    ),
    Mutant(
        "frames in memory need not reach the newest",
        "log/newest.py",
        "self._frames[-1].end_offset != frames[0].base_offset",
        "False",
        "tests/unit/log/test_newest.py",
    ),
    Mutant(
        "subscribers share what others asked for",
        "server/streams.py",
        "turn = (self._same, key, start, end)",
        "turn = (key, start, end)",
        "tests/unit/server/test_shared_turns.py",
    ),
)
