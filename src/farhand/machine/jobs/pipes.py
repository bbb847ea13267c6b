"""The input and outputs of a command, as its worker serves them.

Standard library only: the keeper imports this file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from farhand.machine.jobs.output import OutputWriter
from farhand.machine.jobs.spawn import RequestRefused

READ_SIZE = 65536
READS_AT_ONCE = 16  # then other events get a turn
INPUT_LIMIT = 1024 * 1024
INPUT_LOW = 256 * 1024  # a patient writer is answered when no more than this is left


class OutputChannel:
    """One output of a command: everything that is read from `pipe` is stored.

    With a `window`, reading pauses while that many bytes are stored beyond those that a reader has received. So the
    command waits for its reader, and nothing is dropped before it was read. Without one, nothing blocks the command.
    """

    def __init__(self, pipe: int, stored: OutputWriter, window: int | None = None) -> None:
        """`pipe` is not blocking; the channel closes it."""
        self.pipe = pipe
        self.stored = stored
        self._window = window
        self._received = 0

    @property
    def open(self) -> bool:
        return self.pipe >= 0

    @property
    def paused(self) -> bool:
        return self._window is not None and self.stored.size - self._received >= self._window

    def received(self, offset: int) -> None:
        """Note that a reader has everything before `offset`."""
        self._received = max(self._received, min(offset, self.stored.size))

    def lift_window(self) -> None:
        """Read on without waiting for a reader: the command has ended, and what is left fits."""
        self._window = None

    def pump(self) -> bool:
        """Store what there is; return whether there was anything. Closes the pipe at its end."""
        moved = False
        for _ in range(READS_AT_ONCE):
            if not self.open or self.paused:
                break
            try:
                data = os.read(self.pipe, READ_SIZE)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                data = b""  # a terminal that no process has open any more
            if not data:
                os.close(self.pipe)
                self.pipe = -1
                break
            self.stored.append(data)
            moved = True
        return moved


class InputChannel:
    """The input of a command: what was written and not yet read by it waits here, within a limit."""

    def __init__(self, pipe: int, end: bytes | None = None) -> None:
        """`pipe` is not blocking, -1 for none; the channel closes it. `end` is sent instead of closing it."""
        self.pipe = pipe
        self._end = end
        self._pending = bytearray()
        self._closing = False
        self._waiting: list[Callable[[], None]] = []

    @property
    def blocked(self) -> bool:
        """Whether something waits for the command to read."""
        return self.pipe >= 0 and bool(self._pending)

    def write(self, data: bytes, answered: Callable[[], None] | None = None) -> None:
        """Accept `data`. Raises RequestRefused if there is no input, or no room.

        `answered`: called once most of what waits was read, which may be at once; such a writer sends one piece after
        the other and is not refused when there is no room.
        """
        if self.pipe < 0 or self._closing:
            raise RequestRefused("failed", "the command's standard input is not writable")
        waiting = len(self._pending)
        if waiting + len(data) > INPUT_LIMIT * (1 if answered is None else 2):
            raise RequestRefused(
                "failed",
                f"the command has not read {waiting} bytes of its input yet and {len(data)} more are over the limit "
                f"of {INPUT_LIMIT}; nothing of them was written",
            )
        self._pending += data
        self.flush()
        if self.pipe < 0:
            raise RequestRefused("failed", "the command's standard input is not writable")
        if answered is not None:
            self._waiting.append(answered)
            self._answer()

    def end(self) -> None:
        """End the input after what was written."""
        if self._end is not None:
            if self.pipe >= 0:
                self._pending += self._end
        else:
            self._closing = True
        self.flush()

    def flush(self) -> None:
        """Write what the command takes now; closes the pipe when it is done, or nothing reads it any more."""
        if self.pipe < 0:
            return
        try:
            while self._pending:
                del self._pending[: os.write(self.pipe, self._pending[:READ_SIZE])]
        except BlockingIOError:
            self._answer()
            return
        except OSError:
            self.close()
            return
        if self._closing:
            self.close()
        self._answer()

    def close(self) -> None:
        """Close the pipe and drop what was not read."""
        self._pending.clear()
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1
        self._answer()

    def _answer(self) -> None:
        if len(self._pending) <= INPUT_LOW:
            waiting, self._waiting = self._waiting, []
            for answered in waiting:
                answered()
