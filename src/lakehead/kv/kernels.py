"""The tight loops of the key index, compiled by numba (nogil, cached on disk).

All arguments are typed numpy arrays. Callers guarantee: ``entries`` has a power-of-two number of rows and at least one
empty one, arrays indexed by slot are longer than every slot in ``entries``, and key offsets are ascending; ``exact``
keys have none.

``keys`` are 64 mixed bits, uint64: those of a number (``exact``), which no other number has, or a hash, whose bytes
are compared in ``arena`` at the slot's ``key_start`` and ``key_length``. An index entry is ``(key, slot + 1)``;
slot + 1 = 0 is empty. Linear probing from the high bits of the key; removal shifts later entries back, so that there
are no tombstones.

An index that grew has two tables for a while: entries move from ``before``, the smaller one, to ``entries`` bit by bit,
in the order of their homes. ``moved`` is where that began and how far it is: where a key's home is says which table it
belongs to, and only one of both has it. So each part of the new table is touched when its turn has come, and no write
waits until there is memory for all of it. ``before`` is empty at other times.

``seed`` is a secret of the process: who does not know it cannot choose keys that all land in one place, where linear
probing would take quadratic time. Nothing that is stored or sent depends on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numba.core.caching import FunctionCache
from numba.core.runtime.nrt import rtsys

from lakehead.env.storage import storage_errors
from lakehead.errors import StorageError

_TOUCHED = 64
_KEY, _SLOT = np.uint64(0), np.uint64(1)
"""What is where in an entry."""


class _Compiled(FunctionCache):
    """What was compiled, without what only a compiler needs: to load that takes ten times as long as all kernels. Numba
    gets it by itself when there is something to compile."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        rtsys.initialize(target_context)
        try:
            with storage_errors(str(self.cache_path), "read what was compiled in"):
                return self._load_overload(sig, target_context)
        except StorageError:
            raise
        except Exception:  # a file was cut off, as by a power cut: it is compiled again
            with contextlib.suppress(Exception):
                self._cache_file.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(Exception):  # without what was compiled before, each process compiles
            super().save_overload(sig, data)


def _jit(kernel: Callable[..., Any]) -> Any:
    """For kernels, which use no function that numba has in Python, as `min` and `np.empty` are: its module would be
    loaded with the kernel."""
    compiled: Any = njit(nogil=True, boundscheck=False)(kernel)
    compiled._cache = _Compiled(kernel)  # as `enable_caching` does
    return compiled


@_jit
def _least(a: Any, b: Any) -> Any:
    return a if a < b else b


@_jit
def mix(key: Any, seed: Any) -> Any:
    """Finalizer of MurmurHash3 (64 bit), keyed before each of its rounds: spreads keys over the table. No two have the
    same: each of its steps can be undone."""
    h = np.uint64(key) ^ seed
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xFF51AFD7ED558CCD)
    h ^= (h >> np.uint64(33)) ^ (seed << np.uint64(32)) ^ (seed >> np.uint64(32))
    h *= np.uint64(0xC4CEB9FE1A85EC53)
    return h ^ (h >> np.uint64(33))


@_jit
def mix_keys(numbers: Any, seed: Any, out: Any) -> None:
    """The exact keys of these numbers: several at a time, as only a loop of nothing else is compiled."""
    for i in range(len(numbers)):
        out[i] = mix(numbers[i], seed)


@_jit
def _word(data: Any, at: Any) -> Any:
    """The eight bytes from here, all of which are there: one load. Positions are unsigned, as others may be negative,
    and each byte would be asked whether its is."""
    word = np.uint64(0)
    for b in range(8):
        word |= np.uint64(data[at + np.uint64(b)]) << np.uint64(8 * b)
    return word


@_jit
def _last_word(data: Any, at: Any, end: Any) -> Any:
    """Less than eight bytes, as the low ones of a word."""
    word = np.uint64(0)
    for b in range(np.int64(end - at)):
        word |= np.uint64(data[at + np.uint64(b)]) << np.uint64(8 * b)
    return word


@_jit
def _put_word(out: Any, at: Any, word: Any) -> None:
    for b in range(8):
        out[at + np.uint64(b)] = np.uint8(word >> np.uint64(8 * b))


@_jit
def hash_keys(offsets: Any, data: Any, seed: Any, out: Any) -> None:
    """Hashes of the encoded keys ``data[offsets[i]:offsets[i + 1]]``."""
    for i in range(len(out)):
        at, end = np.uint64(offsets[i]), np.uint64(offsets[i + 1])
        h = end - at
        while at + np.uint64(8) <= end:
            h = mix(h ^ _word(data, at), seed)
            at += np.uint64(8)
        out[i] = mix(h ^ mix(_last_word(data, at, end) + (end - at), seed), seed)


@_jit
def scatter_fixed(out: Any, starts: Any, values: Any) -> None:
    """Copy row i of the byte matrix ``values`` to ``out`` at ``starts[i]``, and move the start behind it."""
    width = values.shape[1]
    for i in range(len(starts)):
        s = starts[i]
        for j in range(width):
            out[s + j] = values[i, j]
        starts[i] = s + width


@_jit
def scatter_bytes(out: Any, starts: Any, offsets: Any, data: Any) -> None:
    """Copy value i, with a 4-byte length before it, to ``out`` at ``starts[i]``, and move the start behind it."""
    for i in range(len(starts)):
        s = starts[i]
        n = offsets[i + 1] - offsets[i]
        for b in range(4):
            out[s + b] = (n >> (8 * b)) & 255
        s += 4
        for j in range(offsets[i], offsets[i + 1]):
            out[s] = data[j]
            s += 1
        starts[i] = s


@_jit
def _same(a: Any, a_at: Any, b: Any, b_at: Any, n: Any) -> Any:
    for j in range(n):  # noqa: SIM110 (numba compiles no generator here)
        if a[a_at + j] != b[b_at + j]:
            return False
    return True


@_jit
def _same_key(offsets: Any, data: Any, i: Any, j: Any) -> Any:
    n = offsets[i + 1] - offsets[i]
    return offsets[j + 1] - offsets[j] == n and _same(data, offsets[i], data, offsets[j], n)


@_jit
def _find(entries: Any, shift: Any, key: Any, exact: Any, offsets: Any, data: Any, i: Any, starts: Any, lengths: Any,
          arena: Any) -> Any:  # fmt: skip
    """Position, unsigned as those of `_word`, of key i in the index, or of the empty entry where it belongs."""
    mask = np.uint64(len(entries) - 1)
    p = key >> shift
    while entries[p, _SLOT] != 0:
        if np.uint64(entries[p, _KEY]) == key:
            if exact:
                return p
            slot = entries[p, _SLOT] - 1
            n = offsets[i + 1] - offsets[i]
            if lengths[slot] == n and _same(arena, starts[slot], data, offsets[i], n):
                return p
        p = (p + np.uint64(1)) & mask
    return p


@_jit
def _stays(before: Any, before_shift: Any, moved: Any, key: Any) -> Any:
    """Whether there are two tables, and a key's home has not moved from the smaller one yet."""
    n = len(before)
    return n > 0 and ((np.int64(key >> before_shift) - moved[0]) & (n - 1)) >= moved[1]


@_jit
def _touch(entries: Any, shift: Any, before: Any, before_shift: Any, moved: Any, keys: Any, start: Any) -> Any:
    """Load where the next keys belong, all at once: one after the other each would wait for memory. What is returned
    depends on the loads and must be returned by the kernel, or the compiler leaves them out."""
    seen = np.int64(0)
    for i in range(start, _least(start + _TOUCHED, len(keys))):
        if _stays(before, before_shift, moved, keys[i]):
            seen ^= before[keys[i] >> before_shift, _SLOT]
        else:
            seen ^= entries[keys[i] >> shift, _SLOT]
    return seen


@_jit
def probe(entries: Any, shift: Any, before: Any, before_shift: Any, moved: Any, keys: Any, exact: Any, offsets: Any,
          data: Any, starts: Any, lengths: Any, arena: Any, out: Any) -> Any:  # fmt: skip
    """Slot of each key, -1 when it is not in the index."""
    seen = np.int64(0)
    for i in range(len(keys)):
        if i % _TOUCHED == 0:
            seen ^= _touch(entries, shift, before, before_shift, moved, keys, i)
        if _stays(before, before_shift, moved, keys[i]):
            p = _find(before, before_shift, keys[i], exact, offsets, data, i, starts, lengths, arena)
            out[i] = before[p, _SLOT] - 1
        else:
            p = _find(entries, shift, keys[i], exact, offsets, data, i, starts, lengths, arena)
            out[i] = entries[p, _SLOT] - 1
    return seen


@_jit
def link_duplicates(keys: Any, exact: Any, offsets: Any, data: Any, table: Any, shift: Any, prior: Any) -> None:
    """For each row the latest earlier row with the same key, or -1.

    ``table`` is scratch: zeros, a power of two long, at least twice the rows.
    """
    mask = np.uint64(len(table) - 1)
    for i in range(len(keys)):
        p = keys[i] >> shift
        prior[i] = -1
        while table[p] != 0:
            j = table[p] - 1
            if keys[j] == keys[i] and (exact or _same_key(offsets, data, i, j)):
                prior[i] = j
                break
            p = (p + np.uint64(1)) & mask
        table[p] = i + 1


@_jit
def plan_upsert(slots: Any, prior: Any, live_offsets: Any, base: Any, latest: Any, below: Any, change: Any, prev: Any,
                image: Any, under: Any, ends: Any) -> Any:  # fmt: skip
    """Records that an upsert of rows in this order makes; returns how many.

    ``image[k]`` is where record k's given columns come from: a slot, or ``~row`` of the batch; ``under[k]`` is the slot
    that its other columns come from, -1 for null. ``ends[i]`` is the number of records after row i. ``latest`` and
    ``below`` are scratch of as many rows.
    """
    k = 0
    for i in range(len(slots)):
        j = prior[i]
        if j < 0 and slots[i] < 0:
            change[k] = 1
            prev[k] = -1
            below[i] = -1
        else:
            if j >= 0:
                old = latest[j]
                image[k] = ~j
                below[i] = below[j]
            else:
                old = live_offsets[slots[i]]
                image[k] = slots[i]
                below[i] = slots[i]
            change[k] = 2
            prev[k] = old
            under[k] = below[i]
            k += 1
            change[k] = 3
            prev[k] = old
        image[k] = ~i
        under[k] = below[i]
        latest[i] = base + k
        k += 1
        ends[i] = k
    return k


@_jit
def merge(image: Any, held: Any, given: Any, out: Any) -> None:
    """Fixed-width values, each of a slot of the heap or, for ``~row``, of a row that is given."""
    for k in range(len(image)):
        at = image[k]
        out[k] = held[at] if at >= 0 else given[~at]


@_jit
def scatter_short(words: Any, lengths: Any, slots: Any, offsets: Any, data: Any, valid: Any) -> None:
    """Set short values: row i of ``words`` begins with the bytes of the value of slot i, whatever comes after them;
    ``lengths`` are one more, and 0 for null.

    ``valid`` is empty where all of the given values are.
    """
    some = len(valid) > 0
    width, size = np.uint64(words.shape[1]), np.uint64(len(data))
    for i in range(len(slots)):
        s = np.uint64(slots[i])
        if some and not valid[i]:
            lengths[s] = 0
            continue
        at, end = np.uint64(offsets[i]), np.uint64(offsets[i + 1])
        lengths[s] = end - at + np.uint64(1)
        for j in range(width):
            if at + np.uint64(8) <= size:
                words[s, j] = _word(data, at)
            elif at < end:
                words[s, j] = _last_word(data, at, end)
            at += np.uint64(8)


@_jit
def short_offsets(lengths: Any, image: Any, offsets: Any, valid: Any, out: Any, present: Any) -> Any:
    """Ends of the values that ``image`` says, each of a slot or, for ``~row``, of a row that is given; where none is
    given, a negative one is null. Returns how many are null."""
    given, some = len(offsets) > 0, len(valid) > 0
    end = np.int64(0)
    nulls = 0
    out[0] = 0
    for k in range(len(image)):
        at = image[k]
        n = np.int64(0)
        if at >= 0:
            n = np.int64(lengths[np.uint64(at)])
        elif given and not (some and not valid[np.uint64(~at)]):
            n = offsets[np.uint64(~at + 1)] - offsets[np.uint64(~at)] + 1
        present[k] = n > 0
        if n > 0:
            end += n - 1
        else:
            nulls += 1
        out[k + 1] = end
    return nulls


@_jit
def _touch_words(words: Any, image: Any, start: Any) -> Any:
    """As `_touch`, the values that come next."""
    seen, last = np.uint64(0), np.uint64(words.shape[1] - 1)
    for k in range(start, _least(start + _TOUCHED, len(image))):
        if image[k] >= 0:
            at = np.uint64(image[k])
            seen ^= words[at, np.uint64(0)] ^ words[at, last]
    return seen


@_jit
def short_bytes(words: Any, image: Any, offsets: Any, data: Any, ends: Any, out: Any) -> Any:
    """The bytes of the values that `short_offsets` laid out. Whole words are copied, what is too much of one value is
    under the next: ``out`` has room for a row of ``words`` behind the last."""
    width, size = np.uint64(words.shape[1]), np.uint64(len(data))
    seen = np.uint64(0)
    for k in range(len(image)):
        if k % _TOUCHED == 0:
            seen ^= _touch_words(words, image, k)
        to = np.uint64(ends[k])
        if image[k] >= 0:
            at = np.uint64(image[k])
            for j in range(width):
                _put_word(out, to + np.uint64(8) * j, words[at, j])
            continue
        end = np.uint64(ends[k + 1])
        if to == end:
            continue
        at = np.uint64(offsets[np.uint64(~image[k])])
        while to < end:
            if at + np.uint64(8) <= size:
                _put_word(out, to, _word(data, at))
            else:
                _put_word(out, to, _last_word(data, at, at + (end - to)))
            to += np.uint64(8)
            at += np.uint64(8)
    return seen


@_jit
def plan_delete(slots: Any, prior: Any, live_offsets: Any, change: Any, prev: Any, image: Any, ends: Any) -> Any:
    """Records that deleting these keys makes; returns how many. Keys without a live row make none."""
    k = 0
    for i in range(len(slots)):
        if prior[i] < 0 and slots[i] >= 0:
            change[k] = 4
            prev[k] = live_offsets[slots[i]]
            image[k] = slots[i]
            k += 1
        ends[i] = k
    return k


@_jit
def _remove(entries: Any, shift: Any, p: Any) -> None:
    mask = len(entries) - 1
    hole = p
    q = (p + 1) & mask
    while entries[q, 1] != 0:
        home = np.int64(np.uint64(entries[q, 0]) >> shift)
        # The entry may move into the hole unless its home lies cyclically in (hole, q].
        if ((q - home) & mask) >= ((q - hole) & mask):
            entries[hole, 0] = entries[q, 0]
            entries[hole, 1] = entries[q, 1]
            hole = q
        q = (q + 1) & mask
    entries[hole, 0] = 0
    entries[hole, 1] = 0


@_jit
def apply_changes(entries: Any, shift: Any, before: Any, before_shift: Any, moved: Any, keys: Any, exact: Any,
                  offsets: Any, data: Any, starts: Any, lengths: Any, arena: Any, deleted: Any, row_offsets: Any,
                  live_offsets: Any, free: Any, state: Any, out: Any) -> Any:  # fmt: skip
    """Apply these records in log order.

    ``state`` = [next unused slot, number of free slots, arena end, arena garbage, live rows], updated in place;
    ``out[i]`` is the slot of record i, -1 for a delete of an absent key.
    """
    seen = np.int64(0)
    for i in range(len(keys)):
        if i % _TOUCHED == 0:
            seen ^= _touch(entries, shift, before, before_shift, moved, keys, i)
        # A name for the table that it is would be counted as used and as free again, key by key.
        stays = _stays(before, before_shift, moved, keys[i])
        if stays:
            p = _find(before, before_shift, keys[i], exact, offsets, data, i, starts, lengths, arena)
            slot = before[p, _SLOT] - 1
        else:
            p = _find(entries, shift, keys[i], exact, offsets, data, i, starts, lengths, arena)
            slot = entries[p, _SLOT] - 1
        if deleted[i]:
            out[i] = slot
            if slot >= 0:
                live_offsets[slot] = -1
                free[state[1]] = slot
                state[1] += 1
                state[4] -= 1
                if not exact:
                    state[3] += lengths[slot]
                if stays:
                    _remove(before, before_shift, np.int64(p))
                else:
                    _remove(entries, shift, np.int64(p))
            continue
        if slot < 0:
            if state[1] > 0:
                state[1] -= 1
                slot = free[state[1]]
            else:
                slot = state[0]
                state[0] += 1
            if stays:
                before[p, _KEY], before[p, _SLOT] = np.int64(keys[i]), slot + 1
            else:
                entries[p, _KEY], entries[p, _SLOT] = np.int64(keys[i]), slot + 1
            state[4] += 1
            if not exact:
                many = offsets[i + 1] - offsets[i]
                starts[slot] = state[2]
                lengths[slot] = many
                for j in range(many):
                    arena[state[2] + j] = data[offsets[i] + j]
                state[2] += many
        live_offsets[slot] = row_offsets[i]
        out[i] = slot
    return seen


@_jit
def begin_of_move(before: Any) -> Any:
    """A position after an empty one: no entry from there on has its home before it."""
    q = 0
    while before[(q - 1) & (len(before) - 1), 1] != 0:
        q += 1
    return q


@_jit
def move_entries(before: Any, moved: Any, many: Any, entries: Any, shift: Any) -> None:
    """Move what is at the next positions to the larger table, and on until an empty one: from there on all have their
    homes there, too. Only keys that came since the move began are around its end, and less of them than have moved."""
    mask = np.uint64(len(entries) - 1)
    d, n = moved[1], len(before)
    end = _least(d + many, n)
    full = False
    while d < end or full:
        q = np.uint64((moved[0] + d) & (n - 1))
        full = before[q, _SLOT] != 0
        if full:
            p = np.uint64(before[q, _KEY]) >> shift
            while entries[p, _SLOT] != 0:
                p = (p + np.uint64(1)) & mask
            entries[p, _KEY], entries[p, _SLOT] = before[q, _KEY], before[q, _SLOT]
            before[q, _KEY] = before[q, _SLOT] = 0
        d += 1
    moved[1] = _least(d, n)


@_jit
def compact_arena(arena: Any, starts: Any, lengths: Any, live_offsets: Any, slots: Any, out: Any) -> Any:
    """Copy the key bytes of live slots to a new arena; returns its end."""
    end = 0
    for s in range(slots):
        if live_offsets[s] >= 0:
            for j in range(lengths[s]):
                out[end + j] = arena[starts[s] + j]
            starts[s] = end
            end += lengths[s]
    return end


@_jit
def link(prefixes: Any, slots: Any, heads: Any, links: Any) -> None:
    """Put each slot first in the list of its prefix: ``heads`` and ``links`` are those of `PrefixIndex`."""
    for i in range(len(slots)):
        p, s = prefixes[i], slots[i]
        after = heads[p, 0]
        links[s, 0], links[s, 1], links[s, 2] = after, 0, p + 1
        if after > 0:
            links[after - 1, 1] = s + 1
        heads[p, 0] = s + 1
        heads[p, 1] += 1


@_jit
def unlink(slots: Any, heads: Any, links: Any, last: Any) -> Any:
    """Take slots out of their lists, if they are in any. Those that were the last one of a prefix are written to
    ``last``; returns how many."""
    k = 0
    for i in range(len(slots)):
        s = slots[i]
        after, before, p = links[s, 0], links[s, 1], links[s, 2] - 1
        if p < 0:
            continue
        if before > 0:
            links[before - 1, 0] = after
        else:
            heads[p, 0] = after
        if after > 0:
            links[after - 1, 1] = before
        links[s, 0] = links[s, 1] = links[s, 2] = 0
        heads[p, 1] -= 1
        if heads[p, 1] == 0:
            last[k] = s
            k += 1
    return k


@_jit
def follow(prefixes: Any, heads: Any, links: Any, out: Any) -> None:
    """The slots of these prefixes, one list after the other."""
    k = 0
    for i in range(len(prefixes)):
        s = heads[prefixes[i], 0]
        while s > 0:
            out[k] = s - 1
            k += 1
            s = links[s - 1, 0]
