"""The loops of the key index by example."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lakehead.kv import kernels
from lakehead.kv.keys import encode_keys

SEED = np.uint64(0xFEDCBA9876543210)


def ints(*values: int) -> Any:
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ab", "a", "ab", "", "a", "abc", ""], [-1, -1, 0, -1, 1, -1, 3]),
        (["a"] * 9, [-1, *range(8)]),
        (["b", "a", "c"], [-1, -1, -1]),
        ([], []),
    ],
)
def test_rows_of_one_key_are_linked_by_their_bytes_when_all_hashes_are_equal(
    words: list[str], expected: list[int]
) -> None:
    offsets, data = np.cumsum([0, *map(len, words)]), np.frombuffer("".join(words).encode(), np.uint8)
    prior = np.full(len(words), 7, np.int64)
    keys, table = np.full(len(words), 42, np.uint64), np.zeros(32, np.int64)
    kernels.link_duplicates(keys, False, offsets, data, table, np.uint64(59), prior)
    assert prior.tolist() == expected


def test_exact_keys_are_linked_by_themselves() -> None:
    keys = encode_keys([pa.array([5, 0, 5, -1, 0, 5])], SEED)
    prior = np.full(6, 7, np.int64)
    kernels.link_duplicates(
        keys.keys, keys.exact, keys.offsets, keys.data, np.zeros(16, np.int64), np.uint64(60), prior
    )
    assert keys.exact and prior.tolist() == [-1, -1, 0, -1, 1, 2]


def test_an_upsert_is_planned() -> None:
    """Rows: a new key, a live one in slot 0, a live one in slot 2, the new one again, slot 2 again."""
    slots, prior = ints(-1, 0, 2, -1, 2), ints(-1, -1, -1, 0, 2)
    change, prev, image, under, ends = (np.full(10, 99, np.int64) for _ in range(5))
    latest, below = np.full(5, 99, np.int64), np.full(5, 99, np.int64)
    k = kernels.plan_upsert(slots, prior, ints(11, 12, 13), 100, latest, below, change, prev, image, under, ends)
    assert k == 9
    assert change[:k].tolist() == [1, 2, 3, 2, 3, 2, 3, 2, 3]
    assert prev[:k].tolist() == [-1, 11, 11, 13, 13, 100, 100, 104, 104]
    assert image[:k].tolist() == [~0, 0, ~1, 2, ~2, ~0, ~3, ~2, ~4]
    assert under[:k].tolist() == [-1, 0, 0, 2, 2, -1, -1, 2, 2]
    assert ends[:5].tolist() == [1, 3, 5, 7, 9]


def test_a_delete_is_planned() -> None:
    """Keys: slot 0, none, slot 2, slot 0 again."""
    change, prev, image, ends = (np.full(4, 99, np.int64) for _ in range(4))
    k = kernels.plan_delete(ints(0, -1, 2, 0), ints(-1, -1, -1, 0), ints(11, 12, 13), change, prev, image, ends)
    assert (k, change[:k].tolist(), prev[:k].tolist()) == (2, [4, 4], [11, 13])
    assert image[:k].tolist() == [0, 2] and ends.tolist() == [1, 1, 2, 2]


def test_key_bytes_of_live_slots_move_together() -> None:
    arena = np.frombuffer(b"xxaabbbc", np.uint8)
    starts, lengths, out = ints(2, 4, 7, 0), ints(2, 3, 1, 0), np.zeros(3, np.uint8)
    assert kernels.compact_arena(arena, starts, lengths, ints(5, -1, 6, 7), 4, out) == 3
    assert out.tobytes() == b"aac" and [starts[i] for i in (0, 2, 3)] == [0, 2, 3]


_KEYED = """
import sys
import lakehead as lh, pyarrow as pa

with lh.connect(sys.argv[1]) as con:
    ints = con.create_table("a.ints", pa.schema([("k", pa.int64()), ("v", pa.string())]), primary_key=["k"])
    text = con.create_table("a.text", pa.schema([("k", pa.string()), ("n", pa.int32())]), primary_key=["k", "n"])
    ints.upsert([{"k": n, "v": "v"} for n in range(3000)])
    ints.upsert([{"k": 1}], columns=["k"])
    ints.delete([1])
    text.upsert([{"k": str(n), "n": n} for n in range(3000)])
    text.delete([("5", 5)])
    print(ints.lookup([3, 4]).num_rows, ints.get(1), text.get(("4", 4)))
print("numba.np.arrayobj" in sys.modules)
"""


def test_what_is_compiled_is_loaded_without_the_compilers_modules(tmp_path: Path) -> None:
    """They take a fifth of a second. The first process compiles what nobody has compiled here yet."""
    for run in range(2):
        child = [sys.executable, "-c", _KEYED, str(tmp_path / str(run))]
        told = subprocess.run(child, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()
        assert told[0] == "2 None {'k': '4', 'n': 4}"
    assert told[1] == "False"


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("left", [0, 100])
def test_what_was_compiled_and_is_cut_off_is_compiled_again(tmp_path: Path, kind: str, left: int) -> None:
    """As a power cut leaves files."""
    code = (
        "import numpy as np; from lakehead.kv import kernels; out = np.empty(3, np.uint64);"
        "kernels.mix_keys(np.arange(3), np.uint64(1), out);"
        "print(out.tolist(), sum(kernels.mix_keys.stats.cache_hits.values()))"
    )
    compiled = tmp_path / "compiled"

    def run() -> str:
        env = {**os.environ, "NUMBA_CACHE_DIR": str(compiled)}
        child = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
        assert child.returncode == 0, child.stderr
        return child.stdout

    whole = run()
    files = [path for path in compiled.rglob("*") if path.suffix == f".{kind}"]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[:left])
    assert run() == whole and whole.endswith(" 0\n")
    assert run().endswith(" 1\n"), "and loaded from then on"
