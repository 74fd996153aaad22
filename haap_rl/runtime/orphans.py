"""No process outlives the one that started it, however that was ended."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing import parent_process


def end_with_parent() -> None:
    """Leave Ctrl-C to the process that started this one, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
