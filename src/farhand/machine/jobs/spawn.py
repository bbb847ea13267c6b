"""Start a command for the keeper: the shell, its working directory and its pipes.

Standard library only: the keeper imports this file.
"""

from __future__ import annotations

import errno
import os
import signal
from typing import NamedTuple

_DEFAULTED = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGHUP, signal.SIGINT)


class RequestRefused(Exception):
    """A request that cannot be fulfilled: an error kind and a message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Spawned(NamedTuple):
    """A running shell and our ends of its pipes, both non-blocking; `stdin` is -1 if it has no input."""

    pid: int
    output: int
    stdin: int


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


def spawn(argv: list[str], environment: dict[str, str], workdir: int, home: int, stdin: bool) -> Spawned:
    """Run `argv` in a new session in the folder `workdir`; the caller's working directory is `home` afterwards.

    Raises Refused when it could not be started.
    """
    output, theirs = os.pipe()
    reader, writer = os.pipe() if stdin else (os.open("/dev/null", os.O_RDONLY), -1)
    actions = [(os.POSIX_SPAWN_DUP2, reader, 0), (os.POSIX_SPAWN_DUP2, theirs, 1), (os.POSIX_SPAWN_DUP2, theirs, 2)]
    os.fchdir(workdir)  # posix_spawn cannot set the folder
    try:
        pid = os.posix_spawn(
            encoded(argv[0]),
            [encoded(word) for word in argv],
            {encoded(name): encoded(value) for name, value in environment.items()},
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            setsigdef=_DEFAULTED,
        )
    except (OSError, ValueError) as error:
        os.close(output)
        if writer >= 0:
            os.close(writer)
        raise _refusal(error, argv) from None
    finally:
        os.fchdir(home)
        os.close(theirs)
        os.close(reader)
    os.set_blocking(output, False)
    if writer >= 0:
        os.set_blocking(writer, False)
    return Spawned(pid, output, writer)


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
