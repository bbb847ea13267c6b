"""A program that exchanges lines over its standard input and output, such as an MCP server.

Unlike a job, it does not outlive the process that started it: a closed input tells it to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from farhand.protocol.errors import Failed, InvalidArgs, NotFound

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 16 * 1024 * 1024
# Output that was not fetched yet; the program waits when there is more.
MAX_PENDING_BYTES = 32 * 1024 * 1024
# Input that the program has not read yet; more is refused.
MAX_UNREAD_BYTES = 32 * 1024 * 1024
MAX_ERROR_BYTES = 8 * 1024
# How long a program may take to end after its input is closed, and again after SIGTERM.
END_SECONDS = 2.0


class Lines(msgspec.Struct, frozen=True):
    """Lines of output: the number of the last one, and how the program ended, if it did."""

    lines: list[str] = []
    last: int = 0
    exited: bool = False
    exit_code: int | None = None
    # The end of what the program wrote to standard error.
    errors: str = ""


class LineProcess:
    """One running program. Its owner calls `close`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lines: deque[tuple[int, str]] = deque()
        self._pending = 0
        self._last = 0
        self._errors = b""
        self._fault = ""
        self._exited = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._readers = [asyncio.ensure_future(self._read_output()), asyncio.ensure_future(self._read_errors())]
        self._watcher = asyncio.ensure_future(self._watch())

    @classmethod
    async def start(cls, argv: Sequence[str], environment: Mapping[str, str], workdir: str) -> LineProcess:
        """Start a program in a session of its own. Raises NotFound, InvalidArgs or Failed if it cannot be started."""
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=dict(environment),
                cwd=workdir,
                start_new_session=True,
                limit=MAX_LINE_BYTES,
            )
        except FileNotFoundError:
            raise NotFound(f"cannot start {argv[0]!r}: no such program, or no folder {workdir!r}") from None
        except ValueError as error:
            raise InvalidArgs(f"cannot start {argv[0]!r}: {error}") from None
        except OSError as error:
            raise Failed(f"cannot start {argv[0]!r}: {error.strerror}") from None
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exited(self) -> bool:
        return self._exited

    def write(self, lines: Sequence[str]) -> None:
        """Send lines to the program. Raises Failed when it has ended or does not read its input."""
        stdin = self._process.stdin
        assert stdin is not None
        if self._exited or stdin.is_closing():
            raise Failed("the program has ended")
        if stdin.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            raise Failed("the program does not read its input")
        stdin.write("".join(f"{line}\n" for line in lines).encode())

    async def read(self, after: int, seconds: float, most_bytes: int) -> Lines:
        """Return the lines after number `after`, once there are some or the program has ended; none after `seconds`.

        Lines up to `after` are forgotten.
        """
        while self._lines and self._lines[0][0] <= after:
            self._pending -= len(self._lines.popleft()[1])
        if self._pending < MAX_PENDING_BYTES:
            self._room.set()
        if not self._lines and not self._exited:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._news.wait()
        found: list[str] = []
        size, last = 0, after
        for number, line in self._lines:
            size += len(line)
            if found and size > most_bytes:
                break
            found.append(line)
            last = number
        over = self._exited and last >= self._last
        errors = self._fault or self._errors.decode(errors="replace")
        return Lines(found, last, over, self._process.returncode if over else None, errors if over else "")

    async def close(self) -> None:
        """End the program: close its input, then SIGTERM, then SIGKILL to it and its children."""
        stdin = self._process.stdin
        if stdin is not None:
            stdin.close()
        self._room.set()
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                self._signal(number)
            await asyncio.wait({self._watcher}, timeout=END_SECONDS)
            if self._watcher.done():
                break
        self._signal(signal.SIGKILL)  # children that outlived it
        for task in (*self._readers, self._watcher):
            task.cancel()
        await asyncio.gather(*self._readers, self._watcher, return_exceptions=True)
        # The pipes stay open as long as a process that left the group holds them.
        self._process._transport.close()  # type: ignore[attr-defined]

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    async def _read_output(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        try:
            while line := await stdout.readline():
                text = line.decode(errors="replace").strip()
                if not text:
                    continue
                self._last += 1
                self._lines.append((self._last, text))
                self._pending += len(text)
                self._news.set()
                if self._pending >= MAX_PENDING_BYTES:
                    self._room.clear()
                    await self._room.wait()
        except ValueError:
            self._fault = f"it was ended: it wrote a line of more than {MAX_LINE_BYTES} bytes"
            self._signal(signal.SIGKILL)

    async def _read_errors(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None
        while data := await stderr.read(4096):
            self._errors = (self._errors + data)[-MAX_ERROR_BYTES:]

    async def _watch(self) -> None:
        await self._process.wait()
        # Its children may hold the pipes open, so this does not wait for their end for long.
        await asyncio.wait(self._readers, timeout=0.5)
        self._exited = True
        self._news.set()
