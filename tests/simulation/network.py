"""The network between clients and the server: slow, lossy, and given to delivering things twice or late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from tests.simulation.history import require
from tests.simulation.observer import Observer, Seen
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.trace import Trace

from lakehead.errors import ClosedError, FencedError, RequestTimeoutError, UnavailableError
from lakehead.protocol import messages as m
from lakehead.protocol.codec import decode_call, decode_stream_header, decode_stream_request, encode
from lakehead.server.access import TOKEN_HOLDER
from lakehead.server.service import Service

CALL_SECONDS = 1.0
"""How long a client waits for an answer."""


@dataclass
class NetworkFaults:
    """Chances, each per request.

    Attributes:
        lost: it never arrives.
        broken: the connection breaks; it may have arrived, or arrive after what is sent next.
        repeated: it arrives again some time later.
        silent: nobody answers, and nobody says so; it may have arrived.
    """

    lost: float = 0.0
    broken: float = 0.0
    repeated: float = 0.0
    silent: float = 0.0


class FolderLock:
    """What a server looks at to know that the folder is its own."""

    removed = False

    def require_held(self) -> None:
        """See `lakehead.env.folder_lock.FolderLock.require_held`."""
        if self.removed:
            raise FencedError("the lock was removed")


@dataclass(frozen=True)
class RunningServer:
    """A server process that answers."""

    process: Process
    service: Service
    lock: FolderLock


class Network:
    """Reaches the server that runs now, if there is one.

    Attributes:
        first: one that was let run on after another has opened its folder; writers reach it until it refuses them.
    """

    def __init__(self, scheduler: Scheduler, trace: Trace, observer: Observer) -> None:
        self.scheduler = scheduler
        self.trace = trace
        self.observer = observer
        self.faults = NetworkFaults()
        self.server: RunningServer | None = None
        self.first: RunningServer | None = None
        self.silent_until_us = 0

    @property
    def silent(self) -> bool:
        """Whether nothing gets through now, and nobody says so."""
        return self.scheduler.now_us < self.silent_until_us

    def time_out(self, who: str, request: m.Request[object]) -> RequestTimeoutError:
        """Wait as long as a client does for an answer that does not come."""
        self.note(who, "request unanswered", type(request).__name__)
        self.scheduler.sleep(CALL_SECONDS)
        return RequestTimeoutError("no answer in time")

    def delay(self, seconds: float = 0.002) -> None:
        self.scheduler.sleep(self.scheduler.draws.random() * seconds)

    def deliver(
        self, request: m.Request[m.R], attachments: Sequence[pa.Buffer], server: RunningServer | None = None
    ) -> tuple[m.R, list[pa.Buffer]]:
        """Have a server, the one that runs now if none is named, answer a request, in the caller's task."""
        with _Serving(self, server or self.server) as server:
            seen, fenced = self.observer.before(request), server.lock.removed
            if fenced:
                seen = Seen(seen.floors, {})  # what writers its successor has opened it cannot know
            reply, out = server.service.call(request, attachments, TOKEN_HOLDER)
            self.scheduler.check_alive()
            if fenced:
                # Of a batch that it wrote while it was the owner, a repeat may have the answer once more.
                self.note("first owner", "repeats an answer", type(request).__name__)
                with self.scheduler.judging():
                    require(isinstance(request, m.Write), "an owner opens a writer after another has opened the folder")
            self.observer.after(request, attachments, reply, out, seen)
            return reply, out

    def deliver_late(self, request: m.Request[m.R], attachments: Sequence[pa.Buffer], seconds: float) -> None:
        """Let a request arrive once more, and nobody hear the answer."""

        def arrive() -> None:
            self.delay(seconds)
            try:
                self.deliver(request, attachments)
            except Exception as e:
                self.note("network", "late answer", type(e).__name__)

        self.scheduler.spawn("late request", Process("network"), arrive)

    def note(self, who: str, what: str, detail: object = "") -> None:
        self.trace.add(self.scheduler.now_us, who, what, detail)


class _Serving:
    """The current task runs in the server's process; when that is killed, the caller's connection is reset."""

    def __init__(self, network: Network, server: RunningServer | None) -> None:
        self._network = network
        self._reached = server

    def __enter__(self) -> RunningServer:
        server = self._reached
        if server is None:
            raise UnavailableError("no server answers", gone=True)
        self._server = server
        self._inside = self._network.scheduler.inside(server.process)
        self._inside.__enter__()
        return server

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._inside.__exit__(None, None, None)
        if isinstance(error, ClosedError) and self._server.service.closing:
            raise UnavailableError("the server was stopped", gone=True) from error
        if not self._server.process.alive and not isinstance(error, GeneratorExit):
            self._network.scheduler.check_alive()
            raise UnavailableError("the connection was reset", gone=True) from error


class NetworkEndpoint:
    """An `Endpoint` of one client."""

    def __init__(self, network: Network, name: str) -> None:
        self._network = network
        self._name = name
        self._left: RunningServer | None = None

    def call(self, request: m.Request[m.R], attachments: Sequence[pa.Buffer] = ()) -> tuple[m.R, list[pa.Buffer]]:
        network, draws = self._network, self._network.scheduler.draws
        require(decode_call(encode(request)) == request, "a request survives the wire")
        network.observer.sending(request, attachments)
        network.delay()
        fate, faults = draws.random(), network.faults
        if network.silent or fate > 1 - faults.silent:
            if draws.random() < 0.5:
                network.deliver_late(request, attachments, 2 * CALL_SECONDS)
            raise network.time_out(self._name, request)
        if fate < faults.lost:
            network.note(self._name, "request lost", type(request).__name__)
            network.delay(0.02)
            raise UnavailableError("no answer", gone=True)
        if fate < faults.lost + faults.broken:
            network.note(self._name, "connection broken", type(request).__name__)
            network.deliver_late(request, attachments, 0.05)
            network.delay(0.05)
            raise UnavailableError("the connection broke", gone=True)
        if draws.random() < faults.repeated:
            network.note(self._name, "request repeated", type(request).__name__)
            network.deliver_late(request, attachments, draws.choice([0.01, 1.0, 20.0]))
        begun = network.scheduler.now_us
        answer = self._deliver(request, attachments)
        took = (network.scheduler.now_us - begun) / 1e6
        with network.scheduler.judging():
            require(took < CALL_SECONDS, f"{type(request).__name__} took the server {took} seconds")
        network.delay()
        if network.silent:
            raise network.time_out(self._name, request)
        return answer

    def _deliver(self, request: m.Request[m.R], attachments: Sequence[pa.Buffer]) -> tuple[m.R, list[pa.Buffer]]:
        """Writes go to the first of two owners until it refuses one: then the client connects to the other."""
        first = self._network.first
        if first is None or first is self._left or type(request) not in (m.Write, m.OpenWriter):
            return self._network.deliver(request, attachments)
        try:
            return self._network.deliver(request, attachments, first)
        except FencedError as e:
            self._network.note(self._name, "leaves the first owner", type(e).__name__)
            self._left = first
            raise

    def stream(self, request: m.Request[m.Stream]) -> NetworkStream:
        self._network.delay()
        require(decode_stream_request(encode(request)) == request, "a request survives the wire")
        return NetworkStream(self._network, request)

    def close(self) -> None:
        """Nothing is held."""


class NetworkStream:
    """A `Stream` that breaks with its server, and sometimes on its own."""

    def __init__(self, network: Network, request: m.Request[m.Stream]) -> None:
        self._network = network
        self._request = request
        with _Serving(network, network.server) as server:
            self._stream = server.service.stream(request, TOKEN_HOLDER)
            self._server = server
        self.schema: pa.Schema = self._stream.schema

    def __iter__(self) -> Iterator[tuple[m.StreamHeader, pa.RecordBatch]]:
        items = iter(self._stream)
        network = self._network
        while True:
            if network.server is not self._server:
                raise UnavailableError("the connection was reset", gone=True)
            if network.silent:
                raise network.time_out("stream", self._request)
            with _Serving(network, self._server):
                try:
                    header, batch = next(items)
                except StopIteration:
                    return
            network.delay()
            if network.scheduler.draws.random() < network.faults.lost:
                raise UnavailableError("the connection broke", gone=True)
            yield decode_stream_header(encode(header)), batch

    def close(self) -> None:
        if self._server.process.alive:
            self._stream.close()
