"""What is taken back while a call waits for its quota is refused, and nothing of the call is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lakehead as lh
from lakehead.client import channel
from lakehead.server.quotas import Quotas


@pytest.mark.parametrize("what", ["grant", "token", "nothing"])
@pytest.mark.parametrize("call", ["append", "lookup", "get"])
def test_what_waits_is_refused_when_it_was_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, call: str
) -> None:
    monkeypatch.setattr(channel, "SILENCE_SECONDS", 0.2)  # the server is asked whether it lives, with the token
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table("s.t", {"id": "int64", "v": "string"}, primary_key="id")
        for privilege in ("read", "write"):
            con.grant(privilege, "s.t", to="p")
        token = con.create_token("p")
        taken: dict[str, Callable[[], object]] = {
            "grant": lambda: [con.revoke(privilege, "s.t", from_="p") for privilege in ("read", "write")],
            "token": lambda: con.revoke_token(token.id),
            "nothing": lambda: None,
        }
        with lh.connect(con.uri, token=token.token) as theirs:
            asked = theirs.table("s.t")
            con.set_quota("p", bytes_in="10KiB", bytes_out="10KiB")
            asked.upsert([{"id": 1, "v": "z" * 20_000}])  # a second ahead of what is free
            admit = Quotas.admit

            def admitted(self: Quotas, request: Any, size: int, caller: Any) -> bool:
                if caller.principal:
                    monkeypatch.setattr(Quotas, "admit", admit)
                    taken[what]()
                return admit(self, request, size, caller)

            monkeypatch.setattr(Quotas, "admit", admitted)
            calls: dict[str, Callable[[], object]] = {
                "append": lambda: asked.upsert([{"id": 2, "v": "late"}]),
                "lookup": lambda: asked.lookup([1]).num_rows,
                "get": lambda: asked.get(1),
            }
            if what == "nothing":
                assert calls[call]()
            else:
                error = lh.PermissionDeniedError if what == "grant" else lh.AuthenticationError
                with pytest.raises(error):
                    calls[call]()
        assert table.scan().count() == (2 if (call, what) == ("append", "nothing") else 1)
