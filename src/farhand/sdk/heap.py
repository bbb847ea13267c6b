"""Return unused heap memory to the system after the start of a program."""

from __future__ import annotations

import sys


def trim_heap() -> None:
    """Call `malloc_trim` where the C library has it (GNU).

    Compiling modules leaves up to five megabytes of unused heap behind.
    """
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 - only here, in a plug-in

        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
