"""No process outlives the one that started it, however that was ended."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import parent_process

BEAT_S = 1.0


def end_with_parent(beat: Callable[[], object] | None = None) -> None:
    """Leave Ctrl-C to the process that started this one, and end with it.

    beat: called every BEAT_S seconds from a thread of its own, as long as this process goes on at all.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()

    def wait() -> None:
        while parent is not None and parent.is_alive():
            if beat is not None:
                beat()
            parent.join(None if beat is None else BEAT_S)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
