"""Thread priority for bulk work."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

BULK_NICENESS = 10


def lower_thread_priority() -> None:
    """Lower the priority of this thread, which moves bulk data, below those that answer calls (Linux).

    Not to the minimum: a thread that waits while it holds the interpreter lock delays the others too.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BULK_NICENESS)
