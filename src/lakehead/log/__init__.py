"""The log tablet: a pure core that appends, reads, rolls, checkpoints, trims and recovers batch frames."""

from lakehead.log.tablet import LogTablet
from lakehead.log.view import LogView
from lakehead.log.writers import WriterTable

__all__ = ["LogTablet", "LogView", "WriterTable"]
