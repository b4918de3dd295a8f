"""The demo's Spark process: the tiering service, and answers to the demo's questions from the same session."""

from __future__ import annotations

import base64
import logging
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

import lakehead.spark as lhs
from lakehead.demo.child import Parent


def main(arguments: Sequence[str]) -> int:
    """``URI TABLE...``: tier these tables on two cores until the demo closes us; meanwhile answer ``{"sql": ...}``."""
    uri, tables = arguments[0], list(arguments[1:])
    parent = Parent()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("lakehead.tiering").setLevel(logging.INFO)
    try:
        spark = lhs.session(uri, master="local[2]")
    except BaseException as e:
        parent.tell_error(e)
        return 1
    stop = threading.Event()

    def tier() -> None:
        try:
            lhs.tiering_service(spark, uri, tables).run(until=stop.is_set)
        except BaseException as e:
            parent.tell_error(e)

    service = threading.Thread(target=tier, name="demo-tiering")
    service.start()
    parent.tell("ready")
    try:
        for message in parent.messages():
            parent.tell("answer", rows=_encoded(lhs.sql(spark, message["sql"])))
    except BaseException as e:
        parent.tell_error(e)
        return 1
    finally:
        stop.set()
        service.join()
        spark.stop()
    return 0


def _encoded(frame: Any) -> str:
    """A DataFrame's rows as base64 of an Arrow stream."""
    rows: pa.Table = frame.toArrow()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return base64.b64encode(sink.getvalue()).decode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
