"""A server that answers as a real one does, but for what it is told to spoil on the way to its clients."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from lakehead.env.address import TcpAddress
from lakehead.errors import InvalidRequestError, LakeheadError
from lakehead.protocol.attachments import ATTACHMENT_SCHEMA, send, unwrap, wrap
from lakehead.protocol.codec import decode_call, decode_stream_request, encode
from lakehead.protocol.messages import Endpoint, ErrorReply

Parts = list[pa.Buffer]
_ENDED = (StopIteration, fl.FlightError, pa.ArrowException, OSError)


class HostileServer(fl.FlightServerBase):
    """Answers as ``endpoint`` does.

    Attributes:
        reply: changes an encoded reply and its attachments.
        item: changes the metadata and the rows of an item of a stream.
        columns: changes the columns of a stream.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.reply: Callable[[bytes, Parts], tuple[bytes, Parts]] = lambda data, parts: (data, parts)
        self.item: Callable[[bytes, pa.RecordBatch], tuple[bytes, pa.RecordBatch]] = lambda data, rows: (data, rows)
        self.columns: Callable[[pa.RecordBatch], pa.RecordBatch] = lambda rows: rows
        super().__init__("grpc://127.0.0.1:0")

    @property
    def address(self) -> TcpAddress:
        return TcpAddress("127.0.0.1", self.port)

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        writer.begin(ATTACHMENT_SCHEMA)
        while True:
            try:
                data, attachments = unwrap(reader.read_chunk)
            except _ENDED:
                return
            parts: Parts = []
            try:
                reply, parts = self._endpoint.call(decode_call(data), attachments)
                answer = encode(reply)
            except LakeheadError as e:
                answer = encode(ErrorReply(code=e.code, message=e.message, context={}))
            except Exception as e:  # a client that it led astray asks for what cannot be
                answer = encode(ErrorReply(code=InvalidRequestError.code, message=str(e), context={}))
            send(writer, wrap(*self.reply(answer, parts)))

    def do_get(self, context: Any, ticket: Any) -> Any:
        try:
            stream = self._endpoint.stream(decode_stream_request(ticket.ticket))
        except Exception as e:
            code = e.code if isinstance(e, LakeheadError) else InvalidRequestError.code
            raise fl.FlightServerError(str(e), encode(ErrorReply(code=code, message=str(e), context={}))) from e

        columns = self.columns
        empty = pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in stream.schema], schema=stream.schema)

        def items() -> Iterator[tuple[pa.RecordBatch, pa.Buffer]]:
            try:
                for header, rows in stream.items(context.is_cancelled):  # type: ignore[attr-defined]
                    data, changed = self.item(encode(header), rows)
                    yield columns(changed), pa.py_buffer(data)
            finally:
                stream.close()

        return fl.GeneratorStream(columns(empty).schema, items())


def with_lying_texts(rows: pa.RecordBatch, column: str) -> pa.RecordBatch:
    """The rows, at least three, with texts of which the second begins a gigabyte behind the column's end."""
    count = rows.num_rows
    places = [0, 1 << 30, *range(2, count + 1)]
    offsets = pa.py_buffer(struct.pack(f"<{count + 1}i", *places))
    texts = pa.Array.from_buffers(pa.string(), count, [None, offsets, pa.py_buffer(b"x" * count)])
    return rows.set_column(rows.schema.get_field_index(column), rows.schema.field(column), texts)
