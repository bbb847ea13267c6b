"""Start a command for the keeper: the shell, its working directory and its pipes.

Standard library only: the keeper imports this file.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Sequence
from typing import NamedTuple

_DEFAULTED = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGHUP, signal.SIGINT)


class RequestRefused(Exception):
    """A request that cannot be fulfilled: an error kind and a message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


Action = tuple[int, int, int] | tuple[int, int, str, int, int]


class Spawned(NamedTuple):
    """A running shell and our ends of its pipes, all non-blocking.

    `stdin` is -1 if it has no input, `errors` if its standard error goes to `output`. `terminal` is the side of its
    terminal that commands use, to be held open until the shell has exited; -1 if it has none.
    """

    pid: int
    output: int
    stdin: int
    errors: int = -1
    terminal: int = -1


def open_workdir(path: str) -> int:
    try:
        return os.open(encoded(path), os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        raise RequestRefused("not_found", f"working directory {path!r} does not exist; nothing was started") from None
    except NotADirectoryError:
        raise RequestRefused(
            "invalid_args", f"working directory {path!r} is not a directory; nothing was started"
        ) from None
    except PermissionError:
        raise RequestRefused(
            "not_allowed", f"no permission for working directory {path!r}; nothing was started"
        ) from None
    except (OSError, ValueError) as error:
        raise RequestRefused(
            "invalid_args", f"cannot use working directory {path!r}: {error}; nothing was started"
        ) from None


def spawn(
    argv: list[str], environment: dict[str, str], workdir: int, home: int, stdin: bool, split: bool = False
) -> Spawned:
    """Run `argv` in a new session in the folder `workdir`; the caller's working directory is `home` afterwards.

    `split`: standard error has a pipe of its own. Raises RequestRefused when it could not be started.
    """
    output, theirs = os.pipe()
    errors, their_errors = os.pipe() if split else (-1, theirs)
    reader, writer = os.pipe() if stdin else (os.open("/dev/null", os.O_RDONLY), -1)
    actions: list[Action] = [
        (os.POSIX_SPAWN_DUP2, reader, 0),
        (os.POSIX_SPAWN_DUP2, theirs, 1),
        (os.POSIX_SPAWN_DUP2, their_errors, 2),
    ]
    ours = [one for one in (output, errors, writer) if one >= 0]
    try:
        pid = start_process(argv, environment, workdir, home, actions)
    except RequestRefused:
        for one in ours:
            os.close(one)
        raise
    finally:
        for one in {theirs, their_errors, reader}:
            os.close(one)
    for one in ours:
        os.set_blocking(one, False)
    return Spawned(pid, output, writer, errors)


def start_process(
    argv: list[str], environment: dict[str, str], workdir: int, home: int, actions: Sequence[Action]
) -> int:
    """Start `argv` with these file actions and return its process id. Raises RequestRefused."""
    os.fchdir(workdir)  # posix_spawn cannot set the folder
    try:
        return os.posix_spawn(
            encoded(argv[0]),
            [encoded(word) for word in argv],
            {encoded(name): encoded(value) for name, value in environment.items()},
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            setsigdef=_DEFAULTED,
        )
    except (OSError, ValueError) as error:
        raise _refusal(error, argv) from None
    finally:
        os.fchdir(home)


def _refusal(error: OSError | ValueError, argv: list[str]) -> RequestRefused:
    if isinstance(error, OSError) and error.errno == errno.E2BIG:
        return RequestRefused(
            "invalid_args",
            f"the command is too long for the system ({len(encoded(argv[-1]))} bytes; the environment counts too): "
            "write it to a file and run that; nothing was started",
        )
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return RequestRefused("failed", f"cannot start {argv[0]!r}: {reason}; nothing was started")


def encoded(text: str) -> bytes:
    """Encode text for the system, preserving undecodable bytes."""
    return text.encode("utf-8", "surrogateescape")
