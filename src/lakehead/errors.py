"""Every error a user can meet, in one tree split by what the caller should do next.

Codes are stable integers, never reused; the hundreds say the kind, so that an unknown code from a newer peer still maps
to the right remedy. Messages say what was wrong and what to do; they are not API, the code and ``context`` are.

    LakeheadError
      InvalidRequestError    1xxx  fix the call
      UnavailableError       2xxx  retry, or reach the service another way
      OutcomeUnknownError    2004  ask before writing it again: it may have landed
      FencedError            3xxx  stop: a newer owner exists
      CorruptionError        4xxx  stop: restore or inspect the data
      CommitError            5xxx  a lake commit did not (knowingly) land
      ClosedError            6xxx  the handle was closed by its owner
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class LakeheadError(Exception):
    """Root of all Lakehead errors.

    Args:
        message: one sentence that says what was wrong, and what to do.
        context: plain values (str, int, float, bool, None) that name the table, column, offset and so on.
    """

    code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, **context: object) -> None:
        super().__init__(message)
        self.message = message
        self.context: Mapping[str, object] = context

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, dict(self.context)))


def _rebuild(cls: type[LakeheadError], message: str, context: dict[str, object]) -> LakeheadError:
    return cls(message, **context)


class InvalidRequestError(LakeheadError):
    """The call is wrong; fix it. Nothing was changed."""

    code = 1000
    exit_code = 2


class TableNotFoundError(InvalidRequestError):
    """No table of that name exists."""

    code = 1001


class TableExistsError(InvalidRequestError):
    """A table of that name exists already."""

    code = 1002


class SchemaMismatchError(InvalidRequestError):
    """The data's columns or types do not fit the table."""

    code = 1003


class ColumnNotFoundError(InvalidRequestError):
    """A named column does not exist in the table."""

    code = 1004


class NullKeyError(InvalidRequestError):
    """A key, bucket-key, partition or otherwise non-nullable column holds a null."""

    code = 1005


class WrongTableKindError(InvalidRequestError):
    """The operation does not exist for this kind of table (log or primary-key)."""

    code = 1006


class InvalidSchemaError(InvalidRequestError):
    """The schema, key, partition or bucket definition of a table is not possible."""

    code = 1007


class InvalidPropertyError(InvalidRequestError):
    """A property or option is unknown or its value cannot be read."""

    code = 1008


class InvalidPredicateError(InvalidRequestError):
    """A filter cannot be parsed or does not fit the table's columns."""

    code = 1009


class OffsetOutOfRangeError(InvalidRequestError):
    """The asked offsets are not in the log; ``context`` names the range that is."""

    code = 1010


class InvalidUriError(InvalidRequestError):
    """A connection URI or path cannot be understood."""

    code = 1011


class LimitExceededError(InvalidRequestError):
    """A request is larger than a limit; split it. ``context`` names the limit."""

    code = 1012


class SnapshotNotFoundError(InvalidRequestError):
    """The lake snapshot does not exist (never, or no more)."""

    code = 1013


class SqlError(InvalidRequestError):
    """A SQL statement cannot be parsed or executed."""

    code = 1014


class NoLakeError(InvalidRequestError):
    """The table has no lake; create it with ``lake="iceberg"``."""

    code = 1015


class SequenceGapError(InvalidRequestError):
    """A writer's batch came without its predecessor; re-send from the last acknowledged one."""

    code = 1016


class MissingDependencyError(InvalidRequestError):
    """An optional part (Java, PySpark, an extension) is not installed; the message says what to install."""

    code = 1017


class InvalidFileError(InvalidRequestError):
    """An input file cannot be read in any supported format."""

    code = 1018


class AuthenticationError(InvalidRequestError):
    """The token is missing, wrong, revoked or expired, there is no certificate that says who one is, or who listens
    on a Unix socket may be another user."""

    code = 1019


class SequenceConflictError(InvalidRequestError):
    """A writer's batch differs from the one that landed under its number; nothing was written."""

    code = 1020


class PermissionDeniedError(InvalidRequestError):
    """Whoever sent the request may not do this to the table; ``context`` names the privilege."""

    code = 1021


class ProtocolVersionError(InvalidRequestError):
    """Client and server speak different versions of the protocol; install the same version of Lakehead at both."""

    code = 1022


class SchemaChangedError(InvalidRequestError):
    """The table was altered since it was opened; ``context`` has ``schema_id``, of the definition in force."""

    code = 1023


class TurnLostError(InvalidRequestError):
    """Rows were to be published that follow from what a table had, and somebody else has published such rows since it
    was read. `lakehead.spark` reads again by itself."""

    code = 1024


class UnavailableError(LakeheadError):
    """The service cannot be reached or cannot serve now; retry with back-off."""

    code = 2000
    retryable = True
    exit_code = 3


class RequestTimeoutError(UnavailableError):
    """No answer within the deadline. Of writes this is `OutcomeUnknownError`."""

    code = 2001


class OverloadedError(UnavailableError):
    """A limit on concurrent work was reached; retry after a while."""

    code = 2002


class QuotaExceededError(OverloadedError):
    """The sender's quota is used up for now; ``context`` has ``quota``, ``used``, ``limit`` and ``retry_after_ms``."""

    code = 2006


class StorageError(UnavailableError):
    """The disk refused an operation (full, read-only, no permission); ``context`` names the path."""

    code = 2003


class NotLeaderError(UnavailableError):
    """The tablet lives on another server, which ``context`` names where it is known; ask that one."""

    code = 2005


class OutcomeUnknownError(LakeheadError):
    """Whether a write landed is not known; ask (read, or resume the named writer) before writing it again."""

    code = 2004
    exit_code = 3


class FencedError(LakeheadError):
    """A newer owner exists; stop this one."""

    code = 3000
    exit_code = 4


class WriterFencedError(FencedError):
    """A newer writer with the same writer_id has taken over."""

    code = 3001


class TieringFencedError(FencedError):
    """A tiering job with a newer epoch has committed to this lake table."""

    code = 3002


class FolderCopiedError(FencedError):
    """The lake, or the log that a position or lease belongs to, is that of another copy of the data folder."""

    code = 3003


class CorruptionError(LakeheadError):
    """Stored bytes are not what was written; stop and restore. ``context`` names file and position."""

    code = 4000
    exit_code = 5


class ChecksumError(CorruptionError):
    """A checksum does not match."""

    code = 4001


class UnsupportedFormatError(CorruptionError):
    """The data was written by a newer version of Lakehead; upgrade to read it."""

    code = 4002


class LakeStateError(CorruptionError):
    """The lake table is not as tiering left it (rolled back, replaced, columns or rows changed); undo what it says."""

    code = 4003


class LakeFileMissingError(LakeStateError):
    """A file that the lake table names is gone; read again if others expired it meanwhile, else restore it."""

    code = 4004


class CommitError(LakeheadError):
    """A lake commit failed."""

    code = 5000
    exit_code = 6


class CommitConflictError(CommitError):
    """Someone else changed the lake table first; nothing was committed, plan again."""

    code = 5001
    retryable = True


class CommitUnknownError(CommitError):
    """The outcome of the commit is not known yet; read the lake before doing anything else."""

    code = 5002


class ClosedError(LakeheadError):
    """The handle (connection, writer, subscription) is closed."""

    code = 6000
    exit_code = 7


def _all_subclasses(cls: type[LakeheadError]) -> list[type[LakeheadError]]:
    return [cls, *(s for c in cls.__subclasses__() for s in _all_subclasses(c))]


ERRORS_BY_CODE: Mapping[int, type[LakeheadError]] = {c.code: c for c in _all_subclasses(LakeheadError)}


def error_from_code(code: int, message: str, context: Mapping[str, object]) -> LakeheadError:
    """Rebuild an error from its wire form; an unknown code becomes the error of its kind (its thousands)."""
    cls = ERRORS_BY_CODE.get(code) or ERRORS_BY_CODE.get(code // 1000 * 1000) or LakeheadError
    return cls(message, **dict(context))
