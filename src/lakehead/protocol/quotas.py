"""How much of a server principals may take: what bounds each of them, and what it takes now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from lakehead.protocol.messages import Done, Int64, Message, Reply, Request
from lakehead.protocol.privileges import EVERYTHING, Privilege, Target

EVERY_PRINCIPAL = EVERYTHING.name
"""Stands for each principal that has no quota of its own."""
RATE_MIN = 1024
"""Bytes a second: with fewer, a call would wait for hours."""

Rate: TypeAlias = Annotated[int, msgspec.Meta(ge=RATE_MIN, le=2**63 - 1)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Quota(Message, frozen=True, kw_only=True):
    """What a principal may take at once; what is None is not bounded.

    Attributes:
        bytes_in: of rows and keys that it sends, a second.
        bytes_out: of rows that it is sent, a second.
        streams: reads and subscriptions that it has open.
        leases: pinned reads that it holds.
        tables: tables that it has made and that are still there.
        stored_bytes: what the files of those take in the server's folder, whoever writes; of a lake if it is there.
    """

    bytes_in: Rate | None = None
    bytes_out: Rate | None = None
    streams: Count | None = None
    leases: Count | None = None
    tables: Count | None = None
    stored_bytes: Count | None = None


class Used(Message, frozen=True, kw_only=True):
    """What a principal takes now, as in `Quota`. Of rates it is what is not paid for yet: whoever is more than a
    second's worth behind waits."""

    bytes_in: Int64
    bytes_out: Int64
    streams: Int64
    leases: Int64
    tables: Int64
    stored_bytes: Int64


class QuotaInfo(Message, frozen=True, kw_only=True):
    """What bounds a principal, and what it takes; of ``*``, which is nobody, nothing."""

    principal: str
    quota: Quota
    used: Used | None


class QuotasReply(Reply, frozen=True, kw_only=True):
    quotas: list[QuotaInfo]


class ListQuotas(Request[QuotasReply], frozen=True, kw_only=True):
    """What bounds the sender; all quotas, where it is admin of everything."""

    privilege = Privilege.USAGE


class SetQuota(Request[Done], frozen=True, kw_only=True):
    """Bound a principal, or each that has no quota of its own (``*``), by this and nothing else from now on."""

    privilege = Privilege.ADMIN
    principal: Annotated[str, msgspec.Meta(max_length=300)]
    quota: Quota

    @property
    def needs(self) -> Sequence[tuple[Privilege, Target]]:
        return [(Privilege.ADMIN, EVERYTHING)]
