"""What a process that is forked leaves to its child: nothing inherited is destroyed there, and nothing new begun by
libraries whose threads it lacks.

The destructors of Flight servers, clients and streams, and of DuckDB, wait for threads that a child does not have, and
the child would wait for ever, or end by a signal; most children run another program at once and never need them. So
whoever makes one gives it to `keep_in_children`, or to `keep` after the fork; and the child's garbage collector passes
over all that was there before.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref

from lakehead.errors import InvalidRequestError

_kept: list[object] = []
# In a child it is frozen, and so lasts to the end, when what destructors and generators call is gone.
_kept.append(_kept)
_to_keep: weakref.WeakSet[object] = weakref.WeakSet()
_lock = threading.Lock()
_forking = 0
_collected = False
_has_threads = _lacks_threads = False


def has_threads() -> None:
    """From now on this process has threads of libraries, which its forked children will lack."""
    global _has_threads
    _has_threads = True


def require_threads() -> None:
    """Return in a process that has all of its libraries' threads.

    Raises:
        InvalidRequestError: it was forked from one that had such threads.
    """
    if _lacks_threads:
        raise InvalidRequestError(
            "this process was forked from one that had used Lakehead, and lacks what that one had running: start"
            " processes by multiprocessing's 'spawn' or 'forkserver', or connect in them alone"
        )


def keep(*inherited: object) -> None:
    """In a forked child: never let go of these."""
    _kept.extend(inherited)


def keep_in_children(what: object) -> None:
    """Have children that are forked keep this, as far as it is there then."""
    _to_keep.add(what)


def _before() -> None:
    global _forking, _collected
    with _lock:
        if not _forking:
            _collected = gc.isenabled()
            gc.disable()
        _forking += 1


def _in_parent() -> None:
    global _forking
    with _lock:
        _forking -= 1
        if not _forking and _collected:
            gc.enable()


def _in_child() -> None:
    global _lock, _forking, _lacks_threads
    _lock, _forking = threading.Lock(), 0
    _lacks_threads |= _has_threads
    keep(*_to_keep)
    gc.freeze()
    if _collected:
        gc.enable()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
