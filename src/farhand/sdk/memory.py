"""Memory that a program took for its start and needs no longer."""

from __future__ import annotations

import sys


def give_back() -> None:
    """Return it to the system, where the C library can be told to (GNU); it would keep it for later.

    Modules that had to be compiled leave up to five megabytes behind.
    """
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 - only here, in a plug-in

        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
