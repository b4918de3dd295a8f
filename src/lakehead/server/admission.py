"""How much a server takes on at once; it refuses more, and the client tries again after a while."""

from __future__ import annotations

from lakehead.env.threads import Threads
from lakehead.errors import OverloadedError
from lakehead.server.access import NOBODY, Share

_SHARE = 4
_TOGETHER = 16


class Bounded:
    """A counter of something that requests hold, with a limit. Thread-safe.

    Args:
        name: the name of the limit in `lakehead.config.Limits`.
        what: what is counted, for messages.
    """

    def __init__(self, threads: Threads, name: str, what: str, limit: int) -> None:
        self._name = name
        self._what = what
        self._limit = limit
        self._held: dict[int, tuple[Share, int]] = {}
        self._next = 0
        # Reentrant, as the garbage collector may close a forgotten stream at any point of any thread.
        self._lock = threads.reentrant_lock()

    def take(self, amount: int = 1, share: Share = NOBODY) -> int:
        """Hold so much; returns what `give_back` asks for. One holder alone may exceed the limit.

        Args:
            share: whose it is, where that is known: it gets up to `_SHARE` times what it leaves free, so that however
                few take what they can, there is something left for others. All processes of one, which may be as many
                as somebody made up, together get `_TOGETHER` times that.

        Raises:
            OverloadedError: others hold too much, or this share does.
        """
        with self._lock:
            takers = list(self._held.values())  # at once: `give_back` takes no lock
            held = sum(a for _, a in takers)
            free = self._limit - held
            own = sum(a for s, a in takers if s == share) if share.of else 0
            together = sum(a for s, a in takers if s.of == share.of) if share.process else 0
            if held and (amount > free or own > _SHARE * free or together > _TOGETHER * free):
                raise OverloadedError(
                    f"{held:,} {self._what} at once are the limit of this server ({self._name}={self._limit:,}):"
                    " try again, or hold fewer",
                    **{self._name: self._limit},
                )
            self._next += 1
            self._held[self._next] = (share, amount)
            return self._next

    def give_back(self, taken: int) -> None:
        """Give back what `take` returned; a second call does nothing."""
        self._held.pop(taken, None)
