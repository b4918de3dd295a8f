"""The log tablet: a pure core that appends, reads, rolls, trims and recovers batch frames."""

from lakehead.log.tablet import LogTablet
from lakehead.log.writers import WriterTable

__all__ = ["LogTablet", "WriterTable"]
