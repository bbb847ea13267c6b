"""Work that can wait gives way to work that is waited for."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

BULK_NICENESS = 10


def lower_thread_priority() -> None:
    """Let this thread, which moves bytes, wait for those that answer calls, where the system can tell threads apart.

    Not to the utmost: one that is kept waiting with Python's lock in its hands keeps the answers waiting too.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BULK_NICENESS)
