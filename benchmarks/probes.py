"""Where the time of a call goes: spans of named functions, in all threads of one process or two, laid over one clock.

While probes are in, each named function notes when it begins and ends. `divided` then gives each moment of a call to
the phase whose function began last and still runs, in whichever thread or process that is: who waits for another began
before it. So phases never overlap, and with `REST` they are the whole call.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import lakehead as lh

REST = "the rest"


class Mark(NamedTuple):
    """That a span of a phase began, or, without a phase, that it ended; by `time.perf_counter_ns`, which on Linux is
    one clock for all processes."""

    at_ns: int
    span: int
    phase: str | None


class Probes:
    """Notes when functions begin and end, from `put_in` to `take_out`.

    Args:
        phases: names of functions, as ``module:function`` or ``module:Class.method``, of each phase.
        first_span: number of the first span; processes whose marks come together have ranges of their own.

    Raises:
        InvalidRequestError: there is no such function.
    """

    def __init__(self, phases: Mapping[str, Sequence[str]], first_span: int = 0) -> None:
        self._found = [(phase, *find(name, phase)) for phase, names in phases.items() for name in names]
        self._spans = itertools.count(first_span)
        self._undo: list[tuple[object, str, object]] = []
        self._marks: list[tuple[int, int, str | None]] = []

    def put_in(self) -> None:
        """Begin to note."""
        for phase, owner, name, function in self._found:
            watched = self._watched(function, phase)
            for place, at in [(owner, name)] if inspect.isclass(owner) else _users(function):
                self._undo.append((place, at, function))
                setattr(place, at, watched)

    def take_out(self) -> list[Mark]:
        """Note no more; what was noted."""
        for place, name, function in self._undo:
            setattr(place, name, function)
        self._undo.clear()
        marks, self._marks = self._marks, []
        return [Mark(*mark) for mark in marks]

    def _watched(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        # Called for each span, and so bare: the list and the counter are safe between threads as they are.
        note, spans, clock = self._marks.append, self._spans, time.perf_counter_ns

        def watched(*args: Any, **options: Any) -> Any:
            span = next(spans)
            note((clock(), span, phase))
            try:
                return function(*args, **options)
            finally:
                note((clock(), span, None))

        def each(*args: Any, **options: Any) -> Iterator[Any]:
            items = function(*args, **options)
            try:
                while True:
                    span = next(spans)
                    note((clock(), span, phase))
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                    finally:
                        note((clock(), span, None))
                    yield item
            finally:
                items.close()

        return functools.wraps(function)(each if inspect.isgeneratorfunction(function) else watched)


def find(name: str, phase: str) -> tuple[object, str, Callable[..., Any]]:
    """What has the function that is so named, under which name, and the function.

    Raises:
        InvalidRequestError: there is none.
    """
    module, _, path = name.partition(":")
    *outer, last = path.split(".")
    try:
        owner: object = importlib.import_module(module)
        for part in outer:
            owner = vars(owner)[part]
        found = vars(owner)[last]
    except (ImportError, KeyError):
        found = None
    if not inspect.isfunction(found):
        raise lh.InvalidRequestError(
            f"phase {phase!r} is the time of {name}, and there is no such function: name the one that does it now"
        )
    return owner, last, found


def _users(function: object) -> list[tuple[object, str]]:
    """Modules of Lakehead that know a function, and its name there."""
    modules = [m for n, m in list(sys.modules.items()) if n == "lakehead" or n.startswith("lakehead.")]
    return [(m, name) for m in modules for name, value in list(vars(m).items()) if value is function]


def divided(marks: Sequence[Mark], calls: Sequence[tuple[int, int]]) -> list[Counter[str]]:
    """Nanoseconds of each phase, and of `REST`, in each of these calls, which are told by when they began and ended
    and follow one another."""
    ordered = sorted(marks, key=lambda m: m.at_ns)
    running: dict[int, str] = {}  # in the order in which they began
    out, i = [], 0
    for began, ended in calls:
        taken: Counter[str] = Counter()
        at = began
        while i < len(ordered) and ordered[i].at_ns < ended:
            mark, i = ordered[i], i + 1
            if mark.at_ns > at:
                taken[next(reversed(running.values()), REST)] += mark.at_ns - at
                at = mark.at_ns
            if mark.phase is None:
                running.pop(mark.span, None)
            else:
                running[mark.span] = mark.phase
        taken[next(reversed(running.values()), REST)] += ended - at
        out.append(taken)
    return out
