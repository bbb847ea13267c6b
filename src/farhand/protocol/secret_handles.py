"""Secret handles: `{{secret:NAME}}` in arguments stands for a value that only the machine that runs the call gets.

In a shell command, a handle becomes a variable of the command's environment, quoted so that its value arrives intact.
Everywhere else it is replaced by the value.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from farhand.protocol.errors import InvalidArgs

NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
MARK: Final = b"{{secret:"
_HANDLE: Final = re.compile(r"\{\{secret:([^{}]{0,100})\}\}")
VARIABLE_PREFIX: Final = "FARHAND_SECRET_"
# Of a command with a handle. Linux gives a program no longer argument.
MOST_COMMAND: Final = 128 * 1024
# Of all values that handles in the arguments of a call stand for.
MOST_SUBSTITUTED: Final = 1024 * 1024
_HEREDOC: Final = re.compile(r"<<(-?)[ \t]*(\\?)(['\"]?)([A-Za-z0-9_]+)(['\"]?)")


def names_in(value: Any) -> frozenset[str]:
    """Return the names of the handles in arguments. Raises InvalidArgs for a name that is not one."""
    found: set[str] = set()
    _collect(value, found)
    for name in found:
        if not NAME.fullmatch(name):
            raise InvalidArgs(f"{{{{secret:{name}}}}}: a secret has a name of letters, digits and '_', at most 64")
    return frozenset(found)


def _collect(value: Any, found: set[str]) -> None:
    if isinstance(value, str):
        found.update(_HANDLE.findall(value))
    elif isinstance(value, dict):
        for key, inner in value.items():
            _collect(key, found)
            _collect(inner, found)
    elif isinstance(value, list):
        for inner in value:
            _collect(inner, found)


def substituted(value: Any, secrets: Mapping[str, str]) -> Any:
    """Return a copy of arguments with values instead of handles.

    Raises InvalidArgs for a handle without a value, and for so many handles that the values become too long together.
    """
    room = MOST_SUBSTITUTED

    def replaced(found: re.Match[str]) -> str:
        nonlocal room
        given = _value(found[1], secrets)
        room -= len(given)
        if room < 0:
            raise InvalidArgs(f"the secrets in the arguments have more than {MOST_SUBSTITUTED} characters together")
        return given

    def copied(value: Any) -> Any:
        if isinstance(value, str):
            return _HANDLE.sub(replaced, value)
        if isinstance(value, dict):
            return {key: copied(inner) for key, inner in value.items()}
        return [copied(inner) for inner in value] if isinstance(value, list) else value

    return copied(value)


def _value(name: str, secrets: Mapping[str, str]) -> str:
    if name not in secrets:
        raise InvalidArgs(f"the secret {name!r} was not sent with this call; it did not run")
    return secrets[name]


def shell_command(command: str, secrets: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return a command that reads its secrets from variables, and these variables.

    Raises InvalidArgs for a handle without a value or where a shell expands nothing, and for a command that is too
    long.
    """
    if _HANDLE.search(command) is not None and len(command) > MOST_COMMAND:
        raise InvalidArgs(
            f"a command with a secret has at most {MOST_COMMAND} characters, and this one has {len(command)}; "
            "write the text to a file first"
        )
    variables: dict[str, str] = {}
    pieces: list[str] = []
    state = _ShellState()
    position = 0
    for found in _HANDLE.finditer(command):
        before = command[position : found.start()]
        state.read(before)
        name = found[1]
        variables[VARIABLE_PREFIX + name] = _value(name, secrets)
        pieces += [before, state.quoted(VARIABLE_PREFIX + name)]
        position = found.end()
    return "".join([*pieces, command[position:]]), variables


class _ShellState:
    """Follows the quoting of a shell command up to a position."""

    def __init__(self) -> None:
        self._quote = ""
        self._escaped = False
        self._comment = False
        # Text since the last line break, and the here-documents that begin with the next line.
        self._line: list[str] = []
        self._pending: deque[tuple[str, bool, bool]] = deque()
        self._document: tuple[str, bool, bool] | None = None

    def quoted(self, variable: str) -> str:
        """Return the reference to a variable at the current position."""
        if self._document is not None:
            if self._document[1]:
                raise InvalidArgs(
                    "a secret cannot be used in a here-document with a quoted delimiter, where a shell expands nothing"
                )
            return f"${{{variable}}}"
        if self._quote == "'":
            return f"'\"${{{variable}}}\"'"
        if self._quote == '"':
            return f"${{{variable}}}"
        return f'"${{{variable}}}"'

    def read(self, text: str) -> None:
        for character in text:
            self._step(character)

    def _step(self, character: str) -> None:
        if self._document is not None:
            if character == "\n":
                word, _, tabs = self._document
                line = "".join(self._line)
                if (line.lstrip("\t") if tabs else line) == word:
                    self._document = self._pending.popleft() if self._pending else None
                self._line = []
            else:
                self._line.append(character)
            return
        if character == "\n" and not self._quote:
            if not self._escaped:
                self._begin_documents()
            self._line, self._escaped, self._comment = [], False, False
            return
        if (
            character == "#"
            and not self._quote
            and not self._escaped
            and (not self._line or self._line[-1] in " \t;&|")
        ):
            self._comment = True
        if self._comment:
            return
        self._line.append(character)
        if self._escaped:
            self._escaped = False
        elif character == "\\" and self._quote != "'":
            self._escaped = True
        elif self._quote:
            self._quote = "" if character == self._quote else self._quote
        elif character in "'\"":
            self._quote = character

    def _begin_documents(self) -> None:
        line = "".join(self._line)
        found = deque(
            (match[4], bool(match[2] or match[3]), bool(match[1]))
            for match in _HEREDOC.finditer(line)
            if match.start() == 0 or line[match.start() - 1] != "<"
        )
        if found:
            self._document, self._pending = found.popleft(), found
