"""Whether executors run the Python of their driver, with what is installed for it."""

from __future__ import annotations

import os
import shutil
import sys


def is_own_python(command: str) -> bool:
    """Whether a command is the Python that runs this, with what is installed for it."""
    found = shutil.which(command)
    # Environments share their interpreter's file: what is installed goes by where the link is.
    folders = [os.path.dirname(os.path.abspath(path)) for path in (found or "", sys.executable)]
    return found is not None and folders[0] == folders[1] and os.path.samefile(found, sys.executable)
