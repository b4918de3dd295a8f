"""Which server answers for which tablet: requests are split by it, and their answers joined again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lakehead.errors import NotLeaderError
from lakehead.protocol.messages import Endpoint
from lakehead.types import TabletKey


class Routes(Protocol):
    """The servers of a deployment, as a client knows them. Thread-safe."""

    def servers(self, table_id: str | None = None) -> Sequence[Endpoint]:
        """All on which tablets of the table live, or will; the first answers for the table as such, too. Without one:
        all there are."""
        ...

    def leader(self, table_id: str, tablet: TabletKey) -> Endpoint:
        """The one of these on which a tablet lives, or will once it is written."""
        ...

    def moved(self, error: NotLeaderError) -> bool:
        """Take note that a server refused; tells whether it is known by now which one to ask."""
        ...


class OneServer:
    """All there is lives on one server."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._servers = (endpoint,)

    def servers(self, table_id: str | None = None) -> Sequence[Endpoint]:
        """See `Routes`."""
        return self._servers

    def leader(self, table_id: str, tablet: TabletKey) -> Endpoint:
        """See `Routes`."""
        return self._servers[0]

    def moved(self, error: NotLeaderError) -> bool:
        """See `Routes`."""
        return False


def by_server(routes: Routes, table_id: str, tablets: Sequence[TabletKey]) -> list[tuple[Endpoint, Sequence[int]]]:
    """Each server that some of the tablets live on, with their places among them, in order; at least one server."""
    servers = routes.servers(table_id)
    if len(servers) == 1 or not tablets:
        return [(servers[0], range(len(tablets)))]
    places: dict[int, tuple[Endpoint, list[int]]] = {}
    for place, tablet in enumerate(tablets):
        leader = routes.leader(table_id, tablet)
        places.setdefault(id(leader), (leader, []))[1].append(place)
    return list(places.values())
