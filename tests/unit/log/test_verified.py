"""Files are looked at once, and again when someone has touched them."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pyarrow as pa
import pytest

from lakehead.errors import ChecksumError, CorruptionError, StorageError
from lakehead.log.verified import CHUNK_BYTES, ReadAhead, Watch, copied
from lakehead.testing.storage import FaultyStorage

PATH = "/d/file"


@pytest.fixture
def storage() -> FaultyStorage:
    made = FaultyStorage()
    made.make_folder("/d")
    made.write_atomic(PATH, b"as written")
    return made


class Watched:
    """A watch that finds a file damaged when it holds an x."""

    def __init__(self, storage: FaultyStorage) -> None:
        self.storage = storage
        self.looks = 0
        self.watch = Watch(storage, PATH, self.check)

    def check(self) -> Iterator[int]:
        self.looks += 1
        data = self.storage.read_file(PATH) or b""
        yield len(data)
        if b"x" in data:
            raise ChecksumError("an x", path=PATH, position=data.index(b"x"))


def test_a_file_is_looked_at_when_it_is_first_read_and_when_it_was_touched(storage: FaultyStorage) -> None:
    watched = Watched(storage)
    for _ in range(3):
        watched.watch.require_whole()
    assert watched.looks == 1
    storage.flip_bit(PATH, 0, by_a_program=True)
    for _ in range(3):
        watched.watch.require_whole()
    assert watched.looks == 2
    log = storage.open_log(PATH)
    log.append([b"x"])
    for _ in range(3):
        with pytest.raises(ChecksumError) as raised:
            watched.watch.require_whole()
        assert raised.value.context["position"] == 10
    assert watched.looks == 3 and watched.watch.damage is not None
    log.truncate(10)
    watched.watch.require_whole()
    assert watched.watch.damage is None, "it was restored"


def test_what_is_trusted_is_looked_at_once_it_is_touched(storage: FaultyStorage) -> None:
    watched = Watched(storage)
    watched.watch.trust()
    watched.watch.require_whole()
    assert watched.looks == 0
    storage.cut(PATH, 3)
    watched.watch.require_whole()
    assert watched.looks == 1


def test_a_file_that_was_removed_or_replaced_is_what_is_open(storage: FaultyStorage) -> None:
    watched = Watched(storage)
    watched.watch.trust()
    storage.write_atomic(PATH, b"xxx")
    watched.watch.require_whole()
    storage.remove(PATH)
    watched.watch.require_whole()
    assert watched.looks == 0 and list(watched.watch.check()) == []


def test_a_file_that_is_removed_while_it_is_looked_at_is_not_damaged(storage: FaultyStorage) -> None:
    storage.write_atomic(PATH, b"x")
    watched = Watched(storage)
    look = watched.watch.check()
    assert next(look) == 1
    storage.remove(PATH)
    assert list(look) == [] and watched.watch.damage is None


def test_a_look_finds_what_no_one_has_touched(storage: FaultyStorage) -> None:
    watched = Watched(storage)
    watched.watch.trust()
    storage.flip_bit(PATH, 0, bit=0)
    data = bytearray(storage.read_file(PATH) or b"")
    for bit in range(8):
        if (data[0] ^ ord("x")) >> bit & 1:
            storage.flip_bit(PATH, 0, bit)
    watched.watch.require_whole()
    assert list(watched.watch.check()) == [10]
    with pytest.raises(ChecksumError, match="an x"):
        watched.watch.require_whole()


def test_reading_ahead_asks_for_chunks() -> None:
    data = bytes(range(256)) * 10_000
    asked: list[int] = []

    def fetch(start: int, length: int) -> pa.Buffer:
        asked.append(start)
        return pa.py_buffer(data[start : start + length])

    ahead = ReadAhead(fetch)
    for start in range(0, len(data), 1000):
        assert ahead.read(start, 1000).to_pybytes() == data[start : start + 1000]
    assert len(asked) <= len(data) // CHUNK_BYTES + 2
    assert ahead.read(5, 2 * CHUNK_BYTES).to_pybytes() == data[5 : 5 + 2 * CHUNK_BYTES]
    assert ahead.read(len(data) - 3, 10).to_pybytes() == data[-3:]


def test_what_the_disk_cannot_read_is_damage_with_its_place(storage: FaultyStorage) -> None:
    def refuse(number: int) -> None:
        def before(action: str, path: str) -> None:
            raise OSError(number, "refused")

        storage.before = before

    refuse(errno.EIO)
    with pytest.raises(CorruptionError) as raised:
        copied(storage, PATH).read(3, 4)
    assert (raised.value.context["path"], raised.value.context["position"]) == (PATH, 3)
    refuse(errno.EMFILE)
    with pytest.raises(StorageError):
        copied(storage, PATH).read(3, 4)
    storage.before = None
    assert copied(storage, PATH).read(3, 4).to_pybytes() == b"writ"
    assert copied(storage, "/d/none").read(0, 4).size == 0
