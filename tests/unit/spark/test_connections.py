"""Which Spark masters can be given which servers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lakehead.errors import InvalidRequestError
from lakehead.spark.connections import require_reachable

HERE = ["local", "local[2]", "local[*]", "local[2, 3]", "local-cluster[1,2,1024]", "spark://127.0.0.1:7077",
        "spark://localhost:7077"]  # fmt: skip
ELSEWHERE = ["yarn", "spark://box:7077", "k8s://https://box:443", "spark://127.0.0.1.evil.org:1", "local.example.org"]


def con(uri: str) -> Any:
    return SimpleNamespace(uri=uri)


@pytest.mark.parametrize("master", HERE)
def test_workers_of_this_machine_reach_a_socket(master: str) -> None:
    require_reachable(con("lakehead:///home/ada/.lakehead/sockets/a.sock"), master)


@pytest.mark.parametrize("master", ELSEWHERE)
def test_those_of_others_need_an_address(master: str) -> None:
    with pytest.raises(InvalidRequestError, match="--listen HOST:PORT"):
        require_reachable(con("lakehead:///home/ada/.lakehead/sockets/a.sock"), master)


@pytest.mark.parametrize("master", HERE + ELSEWHERE)
def test_an_address_is_theirs_to_reach(master: str) -> None:
    require_reachable(con("lakehead://127.0.0.1:9123"), master)
