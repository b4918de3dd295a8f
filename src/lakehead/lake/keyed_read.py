"""A read by key, whole or its leading columns: the key index answers when the read is made, and neither a lease nor the
lake is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from lakehead.client.table import TableHandle
from lakehead.predicate.bounds import keys_of
from lakehead.predicate.read_spec import ReadSpec


class KeyedRead:
    """Rows that were asked for; may be repeated."""

    def __init__(self, handle: TableHandle, spec: ReadSpec, rows: pa.Table, asked: str) -> None:
        self._handle = handle
        self._spec = spec
        self._rows = rows
        self._asked = asked
        self.schema = pa.schema([handle.desc.schema.field(c) for c in spec.columns])

    @classmethod
    def of(cls, handle: TableHandle, spec: ReadSpec) -> KeyedRead | None:
        """What the whole table has of these rows as of now; None where their keys are not plain to see, are many, or
        several tablets have them, which do not answer as of one moment, or a scan is as quick."""
        desc, lookups = handle.desc, handle.lookups
        if not desc.keyed or spec.system_columns:
            return None
        keys = keys_of(spec.bounds, desc.key_columns)
        if keys is not None:
            rows = lookups.at_once(keys)
            return None if rows is None else cls(handle, spec, rows, f"{keys.num_rows:,}")
        prefixes = keys_of(spec.bounds, lookups.prefix_columns) if desc.prefix_key else None
        rows = None if prefixes is None else lookups.prefix_at_once(prefixes)
        return None if prefixes is None or rows is None else cls(handle, spec, rows, f"{prefixes.num_rows} by prefix")

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Rows with the columns of `schema`."""
        self._handle.require_open()
        met = self._rows if self._spec.predicate is None else self._spec.predicate.filter(self._rows)
        yield from met.slice(0, self._spec.limit).select(self.schema.names).to_batches()

    def count(self) -> int:
        """Number of rows that `batches` yields."""
        return sum(batch.num_rows for batch in self.batches())

    def explain(self) -> str:
        """What was read from where, as text."""
        desc, spec = self._handle.desc, self._spec
        lines = [
            f"read of {desc.path} by key",
            f"  columns: {', '.join(self.schema.names) or '(none)'}",
            f"  where:   {spec.predicate.arrow if spec.predicate else '(all rows)'}",
            *([] if spec.limit is None else [f"  limit:   {spec.limit}"]),
            f"  keys:    {self._asked}, asked of the key index, which had {self._rows.num_rows:,}",
        ]
        return "\n".join(lines)
