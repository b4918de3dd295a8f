"""PyIceberg's REST catalogs, as far as Lakehead has more to say of them.

To be imported where there is one, and not before: with requests and urllib3 it is a tenth of what a process loads for
its first statement. `lakehead.iceberg.open_catalog` is the door.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pyiceberg.catalog.rest import AUTH, SSL, RestCatalog
from pyiceberg.catalog.rest.response import ErrorResponse
from requests.adapters import HTTPAdapter


class ToldRestCatalog(RestCatalog):
    """One of properties that others told."""

    def _fetch_config(self) -> None:
        super()._fetch_config()
        # What the catalog says of itself comes before its session is made, and is as little believed.
        for key in (AUTH, SSL):
            self.properties.pop(key, None)


class _Bounded(HTTPAdapter):
    def __init__(self, connect_s: float, answer_s: float) -> None:
        super().__init__()
        self._timeout = connect_s, answer_s

    def send(self, request: Any, *args: Any, **given: Any) -> Any:
        """As requests does, with an end; it has none of its own."""
        return super().send(request, *args, **given | {"timeout": given.get("timeout") or self._timeout})


def bound(catalog: RestCatalog, connect_s: float, answer_s: float) -> None:
    """Have each of its calls end: a server may take so many seconds to accept a connection, and to answer."""
    for scheme in ("http://", "https://"):
        catalog._session.mount(scheme, _Bounded(connect_s, answer_s))


def is_error(text: str) -> bool:
    """Whether a REST catalog says this of a request that it refuses."""
    try:
        ErrorResponse.model_validate_json(text)
    except ValidationError:
        return False
    return True
