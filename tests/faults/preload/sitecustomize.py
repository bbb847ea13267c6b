"""Loaded by a gateway under test before anything else: the disk fails, or the process dies, where a file says so.

The file that `DISK_FAULT` names holds `WHERE NUMBER WHAT`: at the NUMBER-th `write` or `sync` of the store from then
on, `kill`, or fail with `EIO` or `ENOSPC` (and go on failing while the file is there). It needs no ptrace, and no
hook in the program itself: SQLite is given a file system of its own, and Python's own syncs are counted as well.
"""

import errno
import os
import signal
from pathlib import Path

import apsw

ORDER = Path(os.environ.get("DISK_FAULT", "/nonexistent"))
counts = {"write": 0, "sync": 0}


def reached(where):
    """The error to fail with at this point, if any."""
    try:
        place, number, what = ORDER.read_text().split()
    except (OSError, ValueError):
        counts.update(write=0, sync=0)
        return None
    if place != where:
        return None
    counts[where] += 1
    if counts[where] < int(number):
        return None
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return getattr(errno, what)


class FaultyFile(apsw.VFSFile):
    def __init__(self, name, flags):
        super().__init__("unix", name, flags)

    def xWrite(self, data, offset):  # noqa: N802
        if (error := reached("write")) is not None:
            raise apsw.FullError("injected") if error == errno.ENOSPC else apsw.IOError("injected")
        return super().xWrite(data, offset)

    def xSync(self, flags):  # noqa: N802
        if reached("sync") is not None:
            failure = apsw.IOError("injected")
            failure.extendedresult = apsw.SQLITE_IOERR_FSYNC
            raise failure
        return super().xSync(flags)


class FaultyDisk(apsw.VFS):
    def __init__(self):
        super().__init__("faulty", "unix", makedefault=True)

    def xOpen(self, name, flags):  # noqa: N802
        return FaultyFile(name, flags)


def faulty(real):
    def sync(descriptor):
        if (error := reached("sync")) is not None:
            raise OSError(error, os.strerror(error))
        return real(descriptor)

    return sync


if "DISK_FAULT" in os.environ:
    disk = FaultyDisk()
    os.fsync, os.fdatasync = faulty(os.fsync), faulty(os.fdatasync)
