"""Mutants of what is found of a table: which rows, by which definition, and of which table."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

OF_READING = (
    Mutant(
        "ignore prev_offset",
        "log/netchange.py",
        "replaced = prev_offsets[_REPLACES.take(change_types)]",
        "replaced = prev_offsets[:0]",
        "tests/unit/log/test_netchange.py tests/properties/test_netchange.py",
    ),
    Mutant(
        "ignore prev_offset where a range is read",
        "log/netchange.py",
        "replaced = prev[_REPLACES.take(types)]",
        "replaced = prev[:0]",
        "tests/unit/log/test_netchange.py tests/properties/test_netchange.py",
    ),
    Mutant(
        "keep rows that the range itself replaces",
        "log/netchange.py",
        "replaced_within[replaced[within] - start] = True",
        "replaced_within[:0] = True",
        "tests/unit/log/test_netchange.py tests/properties/test_netchange.py",
    ),
    Mutant(
        "begin the log one row late",
        "lake/union_read.py",
        "return view.offsets.get(tablet.key, 0)",
        "return view.offsets.get(tablet.key, -1) + 1",
        "tests/integration/test_trimmed.py",
    ),
    Mutant(
        "begin the log one row early",
        "lake/union_read.py",
        "return view.offsets.get(tablet.key, 0)",
        "return max(view.offsets.get(tablet.key, 0) - 1, 0)",
        "tests/integration/test_trimmed.py",
    ),
    Mutant(
        "compare an hour that comes twice by the clock",
        "predicate/bounds.py",
        'scalar = scalar.cast(pa.timestamp(own.unit, "UTC"))',
        "pass",
        "tests/integration/test_repeated_hours.py",
    ),
    Mutant(
        "ask for keys that Arrow cut",
        "predicate/bounds.py",
        'return pa.array(values, pa.timestamp("us", t.tz)).cast(t)',
        "return pa.array(values, t)",
        "tests/integration/test_repeated_hours.py",
    ),
    Mutant(
        "count combinations of partitions beyond a number",
        "client/row_routing.py",
        "if codes_end * len(dictionary) > _CODES_MAX:",
        "if False:",
        "tests/unit/client/test_row_routing.py",
    ),
    Mutant(
        "write rows of one definition by another",
        "api/table.py",
        "parts = handle.writers.write(kind, rows)",
        "parts = handle.now().writers.write(kind, rows)",
        "tests/integration/test_altered_meanwhile.py",
    ),
    Mutant(
        "put an older definition back",
        "api/table.py",
        "if now.desc.schema_id >= self._handle.desc.schema_id:",
        "if True:",
        "tests/integration/test_altered_meanwhile.py",
    ),
    Mutant(
        "insert where a statement does not begin with it",
        "spark/statements.py",
        "for words, at in inserts(text):",
        "for words, at in inserts(text)[:0]:",
        "tests/unit/spark/test_statements.py",
    ),
    Mutant(
        "names of a with everywhere",
        "spark/table_names.py",
        "own.name == bare and own.start <= name.start < own.end",
        "own.name == bare",
        "tests/unit/spark/test_table_names.py",
    ),
    Mutant(
        "note the time at which a turn of maintenance began",
        "server/tablet.py",
        "self._log.observe(self._clock.now_us(), self._steady_us())",
        "self._log.observe(now_us, self._steady_us())",
        "tests/properties/test_clock_leaps.py",
    ),
    Mutant(
        "wait twice for a server",
        "spark/connections.py",
        "planned = planned and not isinstance(e, UnavailableError)",
        "planned = planned",
        "tests/unit/spark/test_connections.py",
    ),
    Mutant(
        "all records whatever is wanted of a stream",
        "spark/parts.py",
        "spec = ReadSpec((*wanted, *needed), _where(handle, part))",
        "spec = ReadSpec((*wanted, *needed))",
        "tests/integration/test_spark_stream_reader.py",
    ),
    Mutant(
        "all lake rows whatever is wanted of them",
        "spark/parts.py",
        "batches = lake.read(part.files, ReadSpec(tuple(wanted), where), part.superseded)",
        "batches = lake.read(part.files, ReadSpec(tuple(wanted)), part.superseded)",
        "tests/integration/test_spark_read.py",
    ),
    Mutant(
        "make a table anew that a pipeline has lost",
        "spark/layers.py",
        "if table is None and target.table in self._opened and",
        "if False and",
        "tests/integration/test_layers.py",
    ),
)
