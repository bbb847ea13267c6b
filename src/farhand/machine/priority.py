"""Work that can wait gives way to work that is waited for."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import sys
import threading
from typing import Final

LOW, LOWER = 10, 19
TURN_NANOSECONDS = 100_000
_NUMBERS: Final = {"x86_64": (314, 315), "aarch64": (274, 275), "riscv64": (274, 275)}
"""Of the system calls sched_setattr and sched_getattr, for which the C library has no names."""
_ATTRIBUTES: Final = struct.Struct("<IIQiIQQQ")
"""struct sched_attr: size, policy, flags, niceness, priority, runtime, deadline, period."""


def step_back() -> None:
    """Let this thread, which moves bytes, wait for those that answer calls, where the system can tell threads apart.

    It may hold Python's lock while it is kept waiting, and those who answer then wait for it in turn. So it is put at
    the very end only where its turns are short: then they are also frequent.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWER if _has_short_turns() else LOW)


def _has_short_turns() -> bool:
    """Whether this thread can be interrupted after a tenth of a millisecond from now on, as since Linux 6.12."""
    if platform.machine() not in _NUMBERS or sys.maxsize < 2**32:
        return False
    set_attributes, get_attributes = map(ctypes.c_long, _NUMBERS[platform.machine()])
    niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_BATCH, 0, niceness, 0, TURN_NANOSECONDS, 0, 0)
    system_call = ctypes.CDLL(None)["syscall"]
    this, none, size = ctypes.c_int(0), ctypes.c_uint(0), ctypes.c_uint(_ATTRIBUTES.size)
    if system_call(set_attributes, this, ctypes.create_string_buffer(wanted, len(wanted)), none) != 0:
        return False
    found = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if system_call(get_attributes, this, found, size, none) != 0:
        return False
    turn: int = _ATTRIBUTES.unpack(found.raw)[5]
    return turn == TURN_NANOSECONDS
