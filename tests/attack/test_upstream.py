"""What Arrow, gRPC beneath it and PyIceberg leave open, each as the report that its project would get: a test fails
when a release has mended it, so that our way around it may go, and what SECURITY.md says of it.

Each is played in a process of its own, against servers and files without anything of Lakehead's.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap

import pytest

_SERVER = """
import pyarrow as pa, pyarrow.flight as fl

class NoOne(fl.ServerMiddlewareFactory):
    def start_call(self, info, headers):
        raise fl.FlightUnauthenticatedError("nobody is let in")

class Server(fl.FlightServerBase):
    received = 0
    def do_action(self, context, action):
        Server.received = max(Server.received, len(action.body))
        return []
    def do_get(self, context, ticket):
        return fl.GeneratorStream(batch.schema, iter([batch]))
"""


def _played(script: str, *, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _SERVER + textwrap.dedent(script)], capture_output=True, text=True, timeout=seconds
    )


def test_a_flight_server_takes_messages_of_any_size() -> None:
    """`FlightServerBase` sets gRPC's bound of a message's size to none, and has no option for it: 64 MiB reach the
    handler, where gRPC's own default is 4. A server that expects requests of kilobytes cannot say so.
    """
    done = _played("""
        with Server("grpc://127.0.0.1:0") as server, fl.connect(f"grpc://127.0.0.1:{server.port}") as client:
            list(client.do_action(fl.Action("a", bytes(64 << 20))))
            print(Server.received >> 20)
    """)
    assert done.stdout.strip() == "64", done.stderr


def test_a_flight_server_makes_a_large_message_of_a_small_one() -> None:
    """With gRPC's compression, which a `FlightServerBase` cannot refuse, 16 MiB of zeros come as some 16 KiB: who pays
    for the memory is not who pays for the network.
    """
    done = _played("""
        import socket, threading
        sent = 0
        def relay(port):
            place = socket.create_server(("127.0.0.1", 0))
            def pump(a, b, counts):
                global sent
                while data := a.recv(1 << 16):
                    sent += len(data) if counts else 0
                    b.sendall(data)
                b.shutdown(socket.SHUT_WR)
            def take():
                a, b = place.accept()[0], socket.create_connection(("127.0.0.1", port))
                for pair in ((a, b, True), (b, a, False)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()
            threading.Thread(target=take, daemon=True).start()
            return place.getsockname()[1]
        with Server("grpc://127.0.0.1:0") as server:
            options = [("grpc.default_compression_algorithm", 2)]
            with fl.connect(f"grpc://127.0.0.1:{relay(server.port)}", generic_options=options) as client:
                list(client.do_action(fl.Action("a", bytes(16 << 20))))
            print(Server.received >> 20, sent < 1 << 18)
    """)
    assert done.stdout.split() == ["16", "True"], done.stderr


def test_a_flight_server_keeps_connections_that_say_nothing() -> None:
    """Any number of them, for as long as they like: neither their number nor their age can be bounded, so who may open
    a socket can take all descriptors of the process.
    """
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"{_SERVER}\nserver = Server('grpc://127.0.0.1:0', middleware={{'no': NoOne()}})\n"
            "print(server.port, flush=True)\ninput()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        held = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(300)]
        try:
            for talking in held:  # the server's first words: it has taken the connection
                assert talking.recv(1)
                talking.settimeout(0)
            still = 0
            for talking in held:
                try:
                    while talking.recv(4096):
                        continue
                except BlockingIOError:
                    still += 1
            assert still == len(held)
        finally:
            for talking in held:
                talking.close()
            server.communicate("\n")


def test_a_flight_client_does_not_check_what_it_receives() -> None:
    """Offsets of strings that point past their data come out of a stream as a batch; whoever looks at them reads what
    is not his, or ends. `RecordBatch.validate(full=True)` finds it, and nothing calls it.
    """
    done = _played("""
        lying = pa.Array.from_buffers(
            pa.string(), 2, [None, pa.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, 1 << 30, 4))),
                             pa.py_buffer(b"text")])
        batch = pa.RecordBatch.from_arrays([lying], ["s"])
        with Server("grpc://127.0.0.1:0") as server, fl.connect(f"grpc://127.0.0.1:{server.port}") as client:
            received = client.do_get(fl.Ticket(b"")).read_all()
            try:
                received.validate(full=True)
            except pa.ArrowInvalid:
                print("received", received.num_rows)
    """)
    assert done.stdout.split() == ["received", "2"], done.stderr


if os.environ.get("LAKEHEAD_EVERY_WAY"):  # `make attack`: on a crowded machine it takes minutes

    def test_a_server_that_is_gone_ends_a_client_that_ends_a_stream() -> None:
        """`FlightStreamWriter.done_writing` in one thread, while a read in another meets the end of the connection and
        ends the writing too: neither knows of the other, and gRPC aborts the process ("API misuse of type
        GRPC_CALL_ERROR_TOO_MANY_OPERATIONS"). One of some thirty kills does it, each an eighth of a second.
        """
        done = _played(
            """
            import contextlib, signal, subprocess, sys, threading
            serve = "\\n".join([
                "import pyarrow as pa, pyarrow.flight as fl",
                "class Exchanging(fl.FlightServerBase):",
                "    def do_exchange(self, context, descriptor, reader, writer):",
                "        writer.begin(pa.schema([]))",
                "        for chunk in reader: pass",
                "server = Exchanging('grpc://127.0.0.1:0')",
                "print(server.port, flush=True)",
                "server.serve()",
            ])
            def read(reader):
                with contextlib.suppress(StopIteration, OSError, pa.ArrowException):
                    while True:
                        reader.read_chunk()
            def end(writers):
                go.wait()
                for writer in writers:
                    with contextlib.suppress(OSError, pa.ArrowException):
                        writer.done_writing()
            for _ in range(400):
                server = subprocess.Popen([sys.executable, "-c", serve], stdout=subprocess.PIPE)
                client = fl.connect(f"grpc://127.0.0.1:{int(server.stdout.readline())}")
                streams = [client.do_exchange(fl.FlightDescriptor.for_command(b"")) for _ in range(60)]
                for writer, _ in streams:
                    writer.begin(pa.schema([]))
                go = threading.Event()
                threads = [threading.Thread(target=read, args=(reader,)) for _, reader in streams]
                threads += [threading.Thread(target=end, args=([w for w, _ in streams[n::4]],)) for n in range(4)]
                for thread in threads:
                    thread.start()
                server.send_signal(signal.SIGKILL)
                go.set()
                for thread in threads:
                    thread.join()
                server.wait()
            print("lived")
        """,
            seconds=280,
        )
        assert "TOO_MANY_OPERATIONS" in done.stderr and "lived" not in done.stdout, "it does not end any more"


@pytest.mark.skipif(sys.platform != "linux", reason="stacks of other sizes")
def test_deep_expressions_end_a_process() -> None:
    """Expressions are walked by recursion, without a bound: a filter of a few hundred kilobytes that came over a wire,
    and is well formed, overflows the stack of whoever evaluates it.
    """
    done = _played("""
        import pyarrow.compute as pc, pyarrow.dataset as ds
        wanted = pc.field("k") == 0
        for n in range(1, 40_000):
            wanted = wanted | (pc.field("k") == n)
        ds.dataset(pa.table({"k": [1, 2, 3]})).to_table(filter=wanted)
        print("answered")
    """)
    assert done.returncode < 0 and "answered" not in done.stdout, "it does not end any more"


def test_pyiceberg_reads_past_the_end_of_an_avro_file() -> None:
    """The decoder that is compiled checks the lengths that a file says against nothing: of a manifest that was cut, or
    has a wrong bit, it decodes memory that lies behind it, or ends the process. `lakehead.iceberg.avro` is ours.
    """
    done = _played("""
        from pyiceberg.avro.decoder_fast import CythonBinaryDecoder
        print(len(CythonBinaryDecoder(b"\\x08ab").read_bytes()))  # four bytes are to follow, and two do
    """)
    assert done.stdout.strip() == "4", "it says that the file ends"
