"""The server of the shop's tables: ``python -m examples.shop.server FOLDER``, until its standard input ends.

What `lakehead server` is, but that none is left behind when whoever started it is killed.
"""

from __future__ import annotations

import json
import sys

import lakehead as lh


def main() -> None:
    with lh.connect(sys.argv[1]) as con:
        print(json.dumps({"uri": con.uri}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
