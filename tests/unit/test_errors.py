"""The error tree: remedies by kind, unknown codes from newer peers, pickles."""

from __future__ import annotations

import pickle

import pytest

from lakehead import errors
from lakehead.errors import ERRORS_BY_CODE, LakeheadError, UnavailableError, error_from_code

KINDS = {1: "InvalidRequestError", 2: "UnavailableError", 3: "FencedError", 4: "CorruptionError", 5: "CommitError"}


@pytest.mark.parametrize("cls", ERRORS_BY_CODE.values(), ids=lambda c: c.__name__)
def test_errors_are_values(cls: type[LakeheadError]) -> None:
    error = cls("say what to do", table="a.b", offset=3)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.message, copy.context) == (cls, "say what to do", {"table": "a.b", "offset": 3})
    assert str(error) == "say what to do" and error.args == ("say what to do",)
    assert cls.retryable == (issubclass(cls, UnavailableError) or cls is errors.CommitConflictError)
    assert cls.__doc__


@pytest.mark.parametrize(("thousands", "name"), KINDS.items())
def test_unknown_codes_keep_their_remedy(thousands: int, name: str) -> None:
    assert type(error_from_code(thousands * 1000 + 998, "newer", {})) is getattr(errors, name)
    assert type(error_from_code(987_654, "newest", {})) is LakeheadError


def test_exit_codes_tell_kinds_apart() -> None:
    by_kind = {ERRORS_BY_CODE[k * 1000].exit_code for k in range(1, 7)}
    assert len(by_kind) == 6 and 0 not in by_kind
    for cls in ERRORS_BY_CODE.values():
        kind = ERRORS_BY_CODE.get(cls.code // 1000 * 1000, LakeheadError)
        assert cls.exit_code == kind.exit_code
