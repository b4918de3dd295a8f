"""How connections, tables and results print themselves in a terminal and a notebook; printing asks no server."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from lakehead.errors import InvalidRequestError

THIS_PROCESS = (
    "a {} belongs to the connection and the process that made it, and cannot be copied or sent to another: connect"
    " there, with lh.connect(uri), and open the table; give rows as Arrow"
)


class Displayed:
    """Shows the facts of `_facts`: on one line, and in notebooks as a small table."""

    def _facts(self) -> Mapping[str, object]:
        """Facts by name; None and [] are left out."""
        raise NotImplementedError

    def _shown(self) -> dict[str, str]:
        return {k: str(v) for k, v in self._facts().items() if v is not None and v != []}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in self._shown().items())})"

    def _repr_html_(self) -> str:
        cells = ((html.escape(k), html.escape(v)) for k, v in self._shown().items())
        rows = "".join(f"<tr><th align='left'>{k}</th><td align='left'>{v}</td></tr>" for k, v in cells)
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


class Handle(Displayed):
    """What is of a connection, and goes with it: it is not copied, and not sent to other processes."""

    def __reduce_ex__(self, protocol: object) -> Any:
        raise InvalidRequestError(THIS_PROCESS.format(type(self).__name__))
