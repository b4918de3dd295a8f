"""What a server sent, looked at before anything is computed with it: columns that point outside of themselves would end
this process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lakehead.errors import CorruptionError
from lakehead.format.ipc_message import UNREADABLE, read_received
from lakehead.format.joins import CHANGE_BYTES_MAX
from lakehead.protocol.codec import decode_stream_header
from lakehead.protocol.messages import StreamHeader


def streamed(chunk: Any, *, from_own: bool) -> tuple[StreamHeader, pa.RecordBatch]:
    """What one item of a stream says, and its rows.

    Costs about 3 ns for each text, next to nothing for other types.

    Args:
        from_own: a server of this user sent it, which checked it when it was written.

    Raises:
        CorruptionError: it is no item of a stream, or holds values that cannot be.
    """
    try:
        header = decode_stream_header(chunk.app_metadata.to_pybytes())
        chunk.data.validate(full=not from_own)
    except (AttributeError, ValueError, *UNREADABLE) as e:
        raise CorruptionError(f"the server sent what is no part of a stream: {e}") from e
    return header, chunk.data


def found_rows(message: pa.Buffer, schema: pa.Schema) -> pa.RecordBatch:
    """The rows that a tablet has of the keys asked for.

    Raises:
        CorruptionError: they are not rows of this schema, or hold values that cannot be.
        LimitExceededError: they take more memory than any answer may.
    """
    return read_received(message, schema, bytes_max=CHANGE_BYTES_MAX)


def found_places(data: pa.Buffer, *, rows: int, asked: int) -> NDArray[np.int64]:
    """Which of so many keys these rows are of.

    Raises:
        CorruptionError: of none that was asked for.
    """
    if data.size == 8 * rows:
        places = np.frombuffer(data, np.int64)
        # Negative ones are large ones, so that one look is enough.
        if not rows or places.view(np.uint64).max() < asked:
            return places
    raise CorruptionError("the server found rows of keys that it was not asked for")
