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
    Mutant(
        "read a copy of a table that has changed",
        "api/still_tables.py",
        "            if seen is None or seen.rows != rows:\n",
        "            if seen is None:\n",
        "tests/integration/test_sql_still.py",
    ),
    Mutant(
        "take other rows at the same offsets for those that were copied",
        "api/still_tables.py",
        "        if found is not None and found.rows == rows:\n",
        "        if found is not None:\n",
        "tests/integration/test_sql_still.py",
    ),
    Mutant(
        "copy what has not been read long enough",
        "api/still_tables.py",
        "seen.seconds >= COPY_SECONDS + seen.cells / CELLS_PER_SECOND",
        "True",
        "tests/integration/test_sql_still.py",
    ),
    Mutant(
        "copy however large a table is",
        "api/still_tables.py",
        "                if made.nbytes > TABLE_BYTES_MAX:\n",
        "                if False:\n",
        "tests/integration/test_sql_still.py",
    ),
    Mutant(
        "keep every copy",
        "api/still_tables.py",
        "                if held <= BYTES_MAX or seen.copy is None:\n",
        "                if True:\n",
        "tests/integration/test_sql_still.py",
    ),
    Mutant(
        "look through a copy for a whole key",
        "api/sql.py",
        "        if statement.catalog or by_key:",
        "        if statement.catalog:",
        "tests/integration/test_sql_still.py",
    ),
    Mutant(
        "apply what an earlier plan found out",
        "kv/tablet.py",
        "planned.records is rows and",
        "True and",
        "tests/unit/kv/test_tablet.py",
    ),
    Mutant(
        "keep the messages that updates came in",
        "kv/tablet.py",
        "if given is None or column.keeps_given else",
        "if given is None else",
        "tests/unit/kv/test_tablet.py",
    ),
)
