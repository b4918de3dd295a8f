"""Messages as bytes: MessagePack, and the type that a peer's bytes must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, get_args

import msgspec

from lakehead.protocol import messages as m
from lakehead.protocol.grants import CreateToken, Grant, ListGrants, ListTokens, Revoke, RevokeToken, WhoAmI
from lakehead.protocol.messages import ErrorReply, Message, R, Request, StreamHeader
from lakehead.protocol.quotas import ListQuotas, SetQuota
from lakehead.protocol.staging import AskTurn, Publish, Stage, Unstage
from lakehead.protocol.tiering import AskTieringStatus, AskTieringWork, ReportTiered

AnyCall = (
    m.Hello | m.CreateTable | m.GetTable | m.ListTables | m.ListDatabases | m.DropTable | m.AlterTable | m.RenameTable
    | m.TableNow | m.Write | m.OpenWriter | m.CloseWriter | m.Lookup | m.Get | m.Watermarks | m.TimestampsAt
    | m.OpenLeases | m.RenewLeases | m.LeasedLake | m.LakeInfo | m.AdoptLake | AskTieringWork | ReportTiered
    | AskTieringStatus | m.Truncate | Stage | Publish | AskTurn | Unstage
    | WhoAmI | CreateToken | ListTokens | RevokeToken | Grant | Revoke | ListGrants | SetQuota | ListQuotas
)  # fmt: skip
AnyStream = m.Read | m.ReadLive | m.Subscribe

_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_calls = msgspec.msgpack.Decoder(AnyCall)
_streams = msgspec.msgpack.Decoder(AnyStream)
_errors = msgspec.msgpack.Decoder(ErrorReply)
_headers = msgspec.msgpack.Decoder(StreamHeader)


def answer_type(request: type[Request[Any]]) -> Any:
    """What answers requests of this class."""
    (base,) = request.__orig_bases__  # type: ignore[attr-defined]
    return get_args(base)[0]


_replies: Mapping[type, msgspec.msgpack.Decoder[Any]] = {
    request: msgspec.msgpack.Decoder(answer_type(request) | ErrorReply) for request in get_args(AnyCall)
}


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_call(data: bytes) -> AnyCall:
    """Inverse of `encode`; raises `msgspec.DecodeError` for bytes that are no request that one reply answers."""
    return _decoded(_calls, data)


def decode_stream_request(data: bytes) -> AnyStream:
    """Inverse of `encode`; raises `msgspec.DecodeError` for bytes that are no request that a stream answers."""
    return _decoded(_streams, data)


def decode_reply(data: bytes, request: Request[R]) -> R | ErrorReply:
    """Inverse of `encode`; raises `msgspec.DecodeError` for bytes that do not answer the request."""
    found: R | ErrorReply = _decoded(_replies[type(request)], data)
    return found


def decode_error(data: bytes) -> ErrorReply:
    """Inverse of `encode`; raises `msgspec.DecodeError` for bytes that are no error."""
    return _decoded(_errors, data)


def decode_stream_header(data: bytes) -> StreamHeader:
    """Inverse of `encode`; raises `msgspec.DecodeError` for bytes that are no header."""
    return _decoded(_headers, data)


def _decoded(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as e:
        raise msgspec.DecodeError(f"not a message: {e}") from e
