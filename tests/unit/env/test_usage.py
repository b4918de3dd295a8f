"""CPU of a thread and of those that worked for it, and memory."""

from __future__ import annotations

import mmap
import pickle
import threading

from lakehead.env.usage import CpuTime, memory_bytes, note_helper


def test_what_others_did_for_a_thread_is_its_own() -> None:
    began = CpuTime.now()
    sum(range(200_000))
    alone = CpuTime.now().since(began)
    note_helper(5.0)
    mine = CpuTime.now().since(began)
    assert 0 < alone.seconds < 5 <= mine.seconds < 10 and mine.thread == alone.thread
    found: list[CpuTime] = []
    thread = threading.Thread(target=lambda: found.append(CpuTime.now()))
    thread.start()
    thread.join()
    assert found[0].seconds < 5 and found[0].thread != mine.thread
    assert pickle.loads(pickle.dumps(mine)) == mine


def test_memory_is_that_of_a_process() -> None:
    before = memory_bytes()
    with mmap.mmap(-1, 64 << 20) as new:  # what is allocated may be what tests before this one have left
        new.write(b"x" * len(new))
        assert 1 << 20 < before < memory_bytes() < 1 << 40
