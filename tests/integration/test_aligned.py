"""Whatever way rows come, their columns are aligned: no engine warns of them, or refuses them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import lakehead as lh
from lakehead.client import channel

SCHEMA = pa.schema(
    [("k", pa.int64()), ("p", pa.string()), ("i", pa.int32()), ("f", pa.float64()), ("l", pa.list_(pa.int64()))]
)


def rows(size: int, partition: str) -> pa.Table:
    k = np.arange(size)
    lists = pa.ListArray.from_arrays(np.arange(size + 1, dtype=np.int32), k)
    return pa.table([k, pa.repeat(partition, size), k.astype(np.int32), k / 3, lists], schema=SCHEMA)


def unaligned(array: pa.Array) -> Iterator[str]:
    """What begins elsewhere than at a multiple of its values' width."""
    if pa.types.is_list(array.type) or pa.types.is_string(array.type):
        width = 4
        if pa.types.is_list(array.type):
            yield from unaligned(array.values)
    else:
        width = array.type.bit_width // 8
    if array.buffers()[1].address % width:
        yield str(array.type)


@pytest.mark.parametrize("size", [3, 20_000])
@pytest.mark.parametrize("keyed", [False, True])
def test_columns_are_aligned(
    con: lh.Connection, name: str, keyed: bool, size: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """A message's columns lie where what goes before them ends: the partition's name moves them, byte by byte."""
    for length in range(1, 9):
        key = ["k", "p"] if keyed else None
        table = con.create_table(f"{name}_{length}", SCHEMA, primary_key=key, partition_by="p", buckets=1)
        write = table.upsert if keyed else table.append
        write(rows(size, "x" * length))
        found = [table.scan().to_arrow(), *(b.rows for b in table.subscribe("earliest", stop="now"))]
        if keyed:
            found.append(table.lookup([{"k": k, "p": "x" * length} for k in range(3)]))
        for some in found:
            whole = some if isinstance(some, pa.Table) else pa.Table.from_batches([some])
            assert not [(c, u) for c in whole.column_names for a in whole[c].chunks for u in unaligned(a)]
            assert whole.filter(pc.field("f") >= 0).num_rows == whole.num_rows
    assert "aligned" not in capfd.readouterr().err


@pytest.mark.parametrize("columns", [["k"], ["f", "i"], ["k", "p", "i", "f", "l"]])
def test_large_batches_arrive_aligned(
    con: lh.Connection, name: str, columns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncopied, that is: the server fills up what goes before the columns."""
    monkeypatch.setattr(channel, "_STREAMED", pa.ipc.IpcReadOptions())
    with lh.connect(con.uri) as unchecked:
        for length in range(1, 9):
            table = con.create_table(f"{name}_{length}", SCHEMA, partition_by="p", buckets=1)
            table.append(rows(30_000, "x" * length))
            batches = list(unchecked.table(f"{name}_{length}").scan(columns=columns).to_batches())
            assert sum(b.num_rows for b in batches) == 30_000
            assert not [u for b in batches for c in b.columns for u in unaligned(c)]
