"""CSV as Arrow reads it: a last line has its end, and whether a file ends inside a quoted field is told, of which Arrow
takes no notice."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

_QUOTE = ord('"')
_BEFORE_FIELDS = b",\r\n"
_MARK = b"\xef\xbb\xbf"
_SETTLE_SECONDS = 0.3


class Quotes:
    """A binary stream that follows the quotes of the CSV which is read from it.

    As in Arrow, a quote at the start of a field opens it, two are one of its text, and any other ends the quoted part.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._last = ord("\n")  # the byte before the next one; 0 for a quote that is a field's text
        self._begun = False
        self._in_quotes = False
        self._ended = threading.Event()
        self.closed = False

    @property
    def open(self) -> bool:
        """Whether what was read ends inside a quoted field."""
        return self._in_quotes

    def read(self, size: int = -1) -> bytes:
        """The next bytes of the stream, at most so many."""
        data: bytes = b"" if self.closed else self._stream.read(size)
        if data:
            self._follow(data if self._begun else data.removeprefix(_MARK))
            self._begun = True
        else:
            self._ended.set()
        # Arrow finds no header in a block without a line's end. Less than was asked for is all that there is.
        return data + b"\n" if 0 < len(data) < size and data[-1] != ord("\n") else data

    def close(self) -> None:
        """Nothing more is read; the stream stays open."""
        self.closed = True

    def settle(self) -> None:
        """Close, and wait until who reads ahead in a thread of its own has found that out, or for a moment: a thread
        that comes to Python while the process ends would end it by a signal."""
        self.close()
        self._ended.wait(_SETTLE_SECONDS)

    def _follow(self, data: bytes) -> None:
        if not data:
            return
        found = np.frombuffer(data, np.uint8)
        places = np.flatnonzero(found == _QUOTE)
        last = data[-1]
        if len(places):
            before = np.concatenate([[self._last], found[:-1]])[places]
            opening = before[int(self._in_quotes) :: 2]
            # A quote that opens stands at the start of a field, or right behind the one that it makes a text of.
            if np.isin(opening, [*_BEFORE_FIELDS, _QUOTE]).all():
                self._in_quotes ^= bool(len(places) % 2)
            else:
                closed_at = self._follow_each(places.tolist(), before.tolist())
                last = 0 if last == _QUOTE and closed_at != len(data) - 1 else last
        self._last = last

    def _follow_each(self, places: list[int], before: list[int]) -> int | None:
        """The same where quotes stand within fields that have none around them; where the last one closed."""
        closed_at = -1 if self._last == _QUOTE else None
        for at, byte in zip(places, before, strict=True):
            if self._in_quotes:
                self._in_quotes, closed_at = False, at
            else:
                self._in_quotes = byte in _BEFORE_FIELDS or closed_at == at - 1
        return closed_at
