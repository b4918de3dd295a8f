"""What the frames of a tablet come to: the writers' answers and, of keyed tablets, the live rows.

`TabletState.apply` is the only thing that changes it. The live leader applies what it has made durable, a restart what
it finds in the log, a standby what it is sent: the same frames through the same code, so that all of them are equal.

Pure core: no threads, no clock. The owner holds its lock around `apply` and every read of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakehead.errors import CorruptionError
from lakehead.format.frame import Frame
from lakehead.format.joins import ROWS_MAX, gathered, join
from lakehead.format.read_as import read_as
from lakehead.log.checkpoint import Checkpoint
from lakehead.log.writers import WriterTable
from lakehead.types import Offset, Schemas


class LiveRows(Protocol):
    """The rows of a keyed tablet; `lakehead.kv.KvTablet`."""

    schemas: Schemas

    def __len__(self) -> int: ...

    def reserve(self, rows: int) -> None:
        """Make room for so many rows before they are loaded."""
        ...

    def load(self, offsets: npt.NDArray[np.int64], rows: pa.RecordBatch) -> None:
        """Take rows of a checkpoint, which were written at these offsets."""
        ...

    def apply(self, base_offset: Offset, change_types: npt.NDArray[np.int8], rows: pa.RecordBatch) -> None:
        """Change as records that begin at this offset say."""
        ...


class TabletState:
    """The state after the frames below ``offset``.

    Attributes:
        writers: what each writer was answered.
        rows: the live rows; None for a log table.
        offset: end of the last frame that was applied.
    """

    def __init__(self, rows: LiveRows | None = None) -> None:
        self.writers = WriterTable()
        self.rows = rows
        self.offset = 0

    @property
    def live_rows(self) -> int:
        """How many rows a keyed tablet has; 0 for a log table."""
        return 0 if self.rows is None else len(self.rows)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Become the state that a checkpoint keeps; frames above it are applied after that.

        Raises:
            CorruptionError: its rows cannot be read.
        """
        self.writers.restore(checkpoint.footer.writers)
        self.offset = checkpoint.offset
        if self.rows is not None:
            self.rows.reserve(checkpoint.footer.rows)
            for batch in checkpoint.batches(self.rows.schemas):
                self.rows.load(batch.offsets, batch.rows)

    def apply(self, frames: Sequence[Frame], rows: pa.RecordBatch | None = None) -> None:
        """Change the state as these frames say, which follow one another.

        Args:
            rows: those of all the frames, where the caller has them; None decodes them.

        Raises:
            CorruptionError: they do not begin where the state ends, or cannot be decoded; nothing changed.
        """
        if not frames:
            return
        base = frames[0].base_offset
        if base != self.offset:
            raise CorruptionError(
                f"records from offset {base} on were to be applied to a state that ends at {self.offset}: open the"
                " tablet again",
                base_offset=base,
            )
        if self.rows is not None:
            changed = [f for f in frames if f.body.row_count]
            if rows is not None:
                self._change(self.rows, changed, rows)
            else:
                decoded = [(f, read_as(f.body, self.rows.schemas)) for f in changed]
                for some in gathered(decoded, _measure, rows_max=ROWS_MAX, rows_enough=ROWS_MAX // 4):
                    self._change(self.rows, [f for f, _ in some], join([batch for _, batch in some]))
        for frame in frames:
            self.writers.apply(frame)
        self.offset = frames[-1].end_offset

    @staticmethod
    def _change(live: LiveRows, frames: Sequence[Frame], rows: pa.RecordBatch) -> None:
        if frames:
            live.apply(frames[0].base_offset, np.concatenate([f.body.change_types for f in frames]), rows)


def _measure(decoded: tuple[Frame, pa.RecordBatch]) -> tuple[int, int]:
    return decoded[1].num_rows, decoded[1].nbytes
