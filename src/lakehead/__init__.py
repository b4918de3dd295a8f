"""Lakehead: one table that is a fast stream, a keyed table and an Iceberg table at once.

``connect`` is the way in; see the README for the first twenty lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lakehead.errors import (
    AuthenticationError,
    ChecksumError,
    ClosedError,
    ColumnNotFoundError,
    CommitConflictError,
    CommitError,
    CommitUnknownError,
    CorruptionError,
    FencedError,
    FolderCopiedError,
    InvalidFileError,
    InvalidPredicateError,
    InvalidPropertyError,
    InvalidRequestError,
    InvalidSchemaError,
    InvalidUriError,
    LakeFileMissingError,
    LakeheadError,
    LakeStateError,
    LimitExceededError,
    MissingDependencyError,
    NoLakeError,
    NotLeaderError,
    NullKeyError,
    OffsetOutOfRangeError,
    OutcomeUnknownError,
    OverloadedError,
    PermissionDeniedError,
    ProtocolVersionError,
    QuotaExceededError,
    RequestTimeoutError,
    SchemaChangedError,
    SchemaMismatchError,
    SequenceConflictError,
    SequenceGapError,
    SnapshotNotFoundError,
    SqlError,
    StorageError,
    TableExistsError,
    TableNotFoundError,
    TieringFencedError,
    TurnLostError,
    UnavailableError,
    UnsupportedFormatError,
    WriterFencedError,
    WrongTableKindError,
)

if TYPE_CHECKING:
    from lakehead.api.connection import Connection, connect
    from lakehead.api.copying import TableCopy
    from lakehead.api.lake import TieringResult
    from lakehead.api.scan import Scan
    from lakehead.api.subscription import Batch, Subscription
    from lakehead.api.table import Table, WriteResult
    from lakehead.api.writer import Writer
    from lakehead.config import LakeConfig
    from lakehead.types import ChangeType, TablePath, TabletId

__version__ = "0.1.0"

_LAZY = {
    "Batch": "lakehead.api.subscription",
    "ChangeType": "lakehead.types",
    "Connection": "lakehead.api.connection",
    "LakeConfig": "lakehead.config",
    "Scan": "lakehead.api.scan",
    "Subscription": "lakehead.api.subscription",
    "Table": "lakehead.api.table",
    "TablePath": "lakehead.types",
    "TabletId": "lakehead.types",
    "TieringResult": "lakehead.api.lake",
    "TableCopy": "lakehead.api.copying",
    "WriteResult": "lakehead.api.table",
    "Writer": "lakehead.api.writer",
    "connect": "lakehead.api.connection",
}

__all__ = [
    "AuthenticationError",
    "Batch",
    "ChangeType",
    "ChecksumError",
    "ClosedError",
    "ColumnNotFoundError",
    "CommitConflictError",
    "CommitError",
    "CommitUnknownError",
    "Connection",
    "CorruptionError",
    "FencedError",
    "FolderCopiedError",
    "InvalidFileError",
    "InvalidPredicateError",
    "InvalidPropertyError",
    "InvalidRequestError",
    "InvalidSchemaError",
    "InvalidUriError",
    "LakeConfig",
    "LakeFileMissingError",
    "LakeStateError",
    "LakeheadError",
    "LimitExceededError",
    "MissingDependencyError",
    "NoLakeError",
    "NotLeaderError",
    "NullKeyError",
    "OffsetOutOfRangeError",
    "OutcomeUnknownError",
    "OverloadedError",
    "PermissionDeniedError",
    "ProtocolVersionError",
    "QuotaExceededError",
    "RequestTimeoutError",
    "Scan",
    "SchemaChangedError",
    "SchemaMismatchError",
    "SequenceConflictError",
    "SequenceGapError",
    "SnapshotNotFoundError",
    "SqlError",
    "StorageError",
    "Subscription",
    "Table",
    "TableCopy",
    "TableExistsError",
    "TableNotFoundError",
    "TablePath",
    "TabletId",
    "TieringFencedError",
    "TieringResult",
    "TurnLostError",
    "UnavailableError",
    "UnsupportedFormatError",
    "WriteResult",
    "Writer",
    "WriterFencedError",
    "WrongTableKindError",
    "connect",
]


def __getattr__(name: str) -> Any:
    """Load the modules behind a name when it is first used, so that ``import lakehead`` stays fast."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'lakehead' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
