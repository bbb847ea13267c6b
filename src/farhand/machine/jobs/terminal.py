"""Start a command on a pseudo-terminal for the keeper, and resize it.

The worker holds the terminal's master side, so the terminal lives as long as its command, whatever happens to the
programs that use it. Standard library only: the keeper imports this file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios

from farhand.machine.jobs.spawn import Action, RequestRefused, Spawned, start_process

MOST_CELLS = 1000  # columns, and rows
END_OF_INPUT = b"\x04"  # Ctrl-D: what a terminal has instead of a closed pipe


def spawn_on_terminal(
    argv: list[str], environment: dict[str, str], workdir: int, home: int, cols: int, rows: int
) -> Spawned:
    """Run `argv` in a new session whose controlling terminal is a new one, as `spawn` does.

    Raises RequestRefused when it could not be started.
    """
    try:
        master, slave = os.openpty()
    except OSError as error:
        raise RequestRefused("failed", f"no terminal is available: {error.strerror}; nothing was started") from None
    try:
        set_size(master, cols, rows)
        _edit_utf8(slave)
        # The child leads a new session, so the first terminal that it opens becomes its controlling one.
        place = os.ttyname(slave)
        actions: list[Action] = [
            (os.POSIX_SPAWN_OPEN, 0, place, os.O_RDWR, 0),
            (os.POSIX_SPAWN_DUP2, 0, 1),
            (os.POSIX_SPAWN_DUP2, 0, 2),
        ]
        pid = start_process(argv, environment, workdir, home, actions)
    except BaseException:
        os.close(master)
        os.close(slave)
        raise
    os.set_blocking(master, False)
    # The slave side stays open: many programs close all their files just before they exit, and would get SIGHUP if the
    # master were then closed as at the end of a pipe.
    return Spawned(pid, master, os.dup(master), terminal=slave)


def set_size(master: int, cols: int, rows: int) -> None:
    """Set the size of a terminal; its foreground processes get SIGWINCH. Raises RequestRefused for an invalid size."""
    for name, value in (("cols", cols), ("rows", rows)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_CELLS:
            raise RequestRefused("invalid_args", f"{name} must be between 1 and {MOST_CELLS}, not {value!r}")
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


def _edit_utf8(slave: int) -> None:
    """Make the line editor of the terminal erase whole characters."""
    with contextlib.suppress(termios.error):
        modes = termios.tcgetattr(slave)
        modes[0] |= getattr(termios, "IUTF8", 0x4000 if os.uname().sysname == "Linux" else 0)
        termios.tcsetattr(slave, termios.TCSANOW, modes)
