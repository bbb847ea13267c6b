"""Commands that a sandbox may run on the host over SSH, and the wrapper that checks them there.

The list on this side only selects the route. What may run is decided by the wrapper that the host's
`authorized_keys` puts in front of the key (`command="farhand host-wrapper …",restrict`). It uses no shell: it accepts
one command, split into words, or refuses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

import msgspec

from farhand.machine.programs import find_program
from farhand.protocol.errors import Failed, NotAllowed

_TRUSTED_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PLAIN_ONLY = frozenset(";&|<>()$`\n\r*?[]")  # special to a shell outside of quotes
_IN_DOUBLE_QUOTES = frozenset("$`")
_WORD_START = frozenset("~#")
_FIRST_WORD = re.compile(r"\s*([^\s;&|<>()$`'\"\\]+)")
_GRACE = 5.0
_PARENT_DEATH = 1  # PR_SET_PDEATHSIG


class HostCommands(msgspec.Struct, frozen=True):
    """The commands that run on the host, and how it is reached."""

    names: frozenset[str]
    host: str
    port: int
    user: str
    key: str
    known_hosts: str
    # Folders that commands in the sandbox may change.
    changeable: tuple[str, ...] = ()

    def match(self, command: str) -> bool:
        """Return whether a command's first word is one of the host commands."""
        first = _FIRST_WORD.match(command)
        return first is not None and first[1] in self.names

    def words(self) -> list[str]:
        """Return the command prefix. Raises Failed if it cannot be used."""
        program = find_program("ssh", self.changeable)
        if program is None:
            raise Failed("host command: the program 'ssh' is missing; install openssh-client; the command did not run")
        for what, path in (("key", self.key), ("known_hosts", self.known_hosts)):
            if not os.access(path, os.R_OK):
                raise Failed(f"host command: the ssh_{what} file {path!r} cannot be read; the command did not run")
        options = {
            "BatchMode": "yes",
            "StrictHostKeyChecking": "yes",
            "UserKnownHostsFile": self.known_hosts,
            "GlobalKnownHostsFile": "/dev/null",
            "IdentitiesOnly": "yes",
            "IdentityAgent": "none",
            "ConnectTimeout": "10",
            "ServerAliveInterval": "15",
            "ClearAllForwardings": "yes",
            "ControlPath": "none",
            "LogLevel": "ERROR",
        }
        words = [program, "-F", "/dev/null", "-T", "-i", self.key, "-p", str(self.port)]
        for name, value in options.items():
            words += ["-o", f"{name}={value}"]
        return [*words, "--", f"{self.user}@{self.host}" if self.user else self.host]

    def sent(self, command: str, workdir: str) -> str:
        """Return what is sent to the wrapper: the command, and the folder to run it in."""
        return f"cd {shlex.quote(workdir)} && {command}"


def read_command(text: str) -> tuple[str | None, list[str]]:
    """Return the folder and the words of a command that needs no shell features.

    Raises NotAllowed for anything that needs a shell: several commands, expansions, redirections, patterns.
    """
    folder = None
    rest = text.strip()
    if rest.startswith("cd "):
        before, found, behind = _cut_at_and(rest)
        if not found:
            raise NotAllowed("host command: 'cd' alone does nothing; write cd FOLDER && command")
        words = _words(before)
        if len(words) != 2 or not words[1].startswith("/"):
            raise NotAllowed(f"host command: {before!r} must be 'cd' and one absolute folder")
        folder, rest = words[1], behind
    return folder, _words(rest)


def _cut_at_and(text: str) -> tuple[str, bool, str]:
    """Split at the first unquoted `&&`."""
    quote = ""
    escaped = False
    for index, character in enumerate(text):
        if escaped:
            escaped = False
        elif character == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif text.startswith("&&", index):
            return text[:index].strip(), True, text[index + 2 :].strip()
    return text, False, ""


def _words(text: str) -> list[str]:
    if "\0" in text:
        raise NotAllowed("host command: it contains a NUL character")
    quote = ""
    escaped = False
    at_start = True
    for character in text:
        if escaped:
            if character in "\r\n":
                raise NotAllowed("host command: a line break cannot be escaped; send one command")
            if quote == '"' and character in _IN_DOUBLE_QUOTES:
                raise _refused(character)  # `shlex` would keep the backslash, which a shell removes
            escaped = False
        elif character == "\\" and quote != "'":
            escaped = True
        elif quote:
            if character == quote:
                quote = ""
            elif quote == '"' and character in _IN_DOUBLE_QUOTES:
                raise _refused(character)
        elif character in "'\"":
            quote = character
        elif character in _PLAIN_ONLY or (at_start and character in _WORD_START):
            raise _refused(character)
        at_start = not quote and character in " \t"
    try:
        words = shlex.split(text, comments=False, posix=True)
    except ValueError as error:
        raise NotAllowed(f"host command: {error}") from None
    if not words or not words[0]:
        raise NotAllowed("host command: there is no command")
    return words


def _refused(character: str) -> NotAllowed:
    shown = {"\n": "a line break", "\r": "a line break"}.get(character, repr(character))
    return NotAllowed(
        f"host command: {shown} is not allowed: one command, without a shell; quote it if it is only text"
    )


def allowed(words: Sequence[str], allow: Sequence[str]) -> bool:
    """Return whether a command begins with the words of an entry: `git`, or `systemctl status`."""
    return any(entry and list(words[: len(entry)]) == entry for entry in (shlex.split(text) for text in allow))


def run_host_command(text: str, allow: Sequence[str]) -> int:
    """Run one allowed command and return its exit status. It ends with the connection.

    Raises NotAllowed; nothing has run then.
    """
    folder, words = read_command(text)
    if not allowed(words, allow):
        raise NotAllowed(f'host command "{words[0]}" is not allowed')
    program = words[0] if words[0].startswith("/") else shutil.which(words[0], path=_TRUSTED_PATH)
    if program is None or (("/" in words[0]) and not words[0].startswith("/")):
        raise NotAllowed(f'host command "{words[0]}" is not installed in {_TRUSTED_PATH}')
    environment = {name: os.environ[name] for name in ("HOME", "USER", "LOGNAME", "LANG") if name in os.environ}
    try:
        process = subprocess.Popen(
            words,
            executable=program,
            cwd=folder,
            env={**environment, "PATH": _TRUSTED_PATH},
            start_new_session=True,
        )
    except OSError as error:
        raise NotAllowed(f'host command "{words[0]}" cannot be started: {error}') from None

    def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        os._exit(143)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, end)
    _end_with_parent()
    status = process.wait()
    return 128 - status if status < 0 else status


def _end_with_parent() -> None:
    """End when the process of the connection ends: a command without a terminal would not notice."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGTERM)
        if os.getppid() == 1:  # it ended before the call
            os.kill(os.getpid(), signal.SIGTERM)
