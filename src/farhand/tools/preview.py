"""What a call would do to a machine, shown before it does it: the diff of each file, or the command and its folder.

It is made from the files as they are, and says from which: a digest of each, and which folder a command would run in.
The same call previewed again gives the same preview, unless something has changed.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec

from farhand.machine.files import Files, shown
from farhand.machine.patch import planned_changes
from farhand.machine.text import MOST_TEXT, NotOnce, replaced_text
from farhand.protocol.errors import Failed, InvalidArgs, NotFound, ToolError

MOST_DIFF: Final = 200_000
"""Characters of a diff; a longer one is left out, and the preview says so."""
MOST_COMPARED: Final = 1_000_000
"""Pairs of lines that are compared; more of them are shown as taken out and put in, which costs no time."""
CONTEXT: Final = 3


class FileEffect(msgspec.Struct, frozen=True, omit_defaults=True):
    """What becomes of one file."""

    path: str
    before: str | None = None
    """Digest of its content; None: there is no such file."""
    diff: str = ""
    note: str = ""
    """Why there is no diff."""


class Preview(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a call would do. A digest over it is what an approval is bound to."""

    files: tuple[FileEffect, ...] = ()
    command: str | None = None
    cwd: str | None = None
    folder: str | None = None
    """Which folder `cwd` is, whatever it is called."""
    env: dict[str, str] = {}
    """What the call adds to the environment."""
    stdin: str | None = None
    note: str = ""
    """Why it cannot be told what the call would do."""


class MachinePreviews:
    """Previews for the tools over one machine's files: a node's, or those of the gateway's own. They block."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._known: dict[str, Callable[[Mapping[str, Any]], Preview]] = {
            "Write": self._write,
            "write": self._write,
            "create_file": self._create,
            "update_file": self._update,
            "Edit": self._edit,
            "edit": self._edit,
            "apply_patch": self._patch,
            "Bash": self._command,
            "exec": self._command,
            "shell": self._command,
        }

    def knows(self, tool: str) -> bool:
        return tool in self._known

    def preview(self, tool: str, arguments: Mapping[str, Any]) -> Preview:
        """Never raises ToolError: what cannot be shown is said in a note."""
        try:
            return self._known[tool](arguments)
        except KeyError as missing:
            return Preview(note=f"the call lacks {missing}, so it will fail")
        except NotOnce as found:
            return Preview(note=f"the text to replace stands in the file {found.count} times, so the call will fail")
        except UnicodeEncodeError as error:
            return Preview(note=f"the text is not valid Unicode at character {error.start}, so the call will fail")
        except ToolError as error:
            return Preview(note=f"it cannot be shown what would change: {error.message}")

    def _write(self, arguments: Mapping[str, Any]) -> Preview:
        path = _text(arguments, "path")
        return self._change(path, self._content(path), _text(arguments, "content").encode())

    def _create(self, arguments: Mapping[str, Any]) -> Preview:
        path = _text(arguments, "path")
        if self._content(path) is not None:
            raise Failed(f"'{shown(path)}' is there already, so the call will fail")
        return self._change(path, None, _text(arguments, "content").encode())

    def _update(self, arguments: Mapping[str, Any]) -> Preview:
        path = _text(arguments, "path")
        old = self._content(path)
        if old is None:
            raise NotFound(f"'{shown(path)}' is not there, so the call will fail")
        added = _text(arguments, "content").encode()
        appends = str(arguments.get("mode") or "").strip().lower() == "append"
        return self._change(path, old, old + added if appends else added)

    def _edit(self, arguments: Mapping[str, Any]) -> Preview:
        path = _text(arguments, "path")
        of_agent = "old_text" in arguments
        old, new, every = (
            ("old_text", "new_text", "replace_all") if of_agent else ("oldString", "newString", "replaceAll")
        )
        before, after, _ = replaced_text(
            self._files,
            path,
            _text(arguments, old),
            _text(arguments, new),
            every=bool(arguments.get(every)),
            any_line_end=of_agent,
        )
        return self._change(path, before, after)

    def _patch(self, arguments: Mapping[str, Any]) -> Preview:
        path = arguments.get("path")
        changes, _ = planned_changes(
            self._files, _text(arguments, "patch"), path=path if isinstance(path, str) else None
        )
        return Preview(files=tuple(file_effect(change.path, change.old, change.new) for change in changes))

    def _command(self, arguments: Mapping[str, Any]) -> Preview:
        workdir = arguments.get("workdir") or arguments.get("cwd") or "."
        place = os.path.join(self._files.workspace, str(workdir))  # noqa: PTH118
        env, stdin = arguments.get("env"), arguments.get("input")
        try:
            real = os.path.realpath(place, strict=True)
            status = os.stat(real)  # noqa: PTH116
        except (OSError, ValueError):
            raise NotFound(f"the folder {shown(place)} is not there") from None
        return Preview(
            command=_text(arguments, "command"),
            cwd=shown(real),
            folder=f"{status.st_dev}:{status.st_ino}",
            env={str(name): str(value) for name, value in env.items()} if isinstance(env, Mapping) else {},
            stdin=None if stdin is None else str(stdin),
        )

    def _change(self, path: str, old: bytes | None, new: bytes | None) -> Preview:
        return Preview(files=(file_effect(self._files.place(path).real, old, new),))

    def _content(self, path: str) -> bytes | None:
        try:
            with self._files.open(path) as file:
                content = file.read(MOST_TEXT + 1)
        except NotFound:
            return None
        if len(content) > MOST_TEXT:
            raise Failed(f"'{shown(path)}' has more than {MOST_TEXT} bytes")
        return content


def file_effect(path: str, old: bytes | None, new: bytes | None) -> FileEffect:
    """The change of one file as a unified diff; None: there is no file."""
    name = shown(path)
    before = None if old is None else digest(old)
    try:
        texts = [("" if content is None else content.decode()) for content in (old, new)]
    except UnicodeDecodeError:
        sizes = [("no file" if content is None else f"{len(content)} bytes") for content in (old, new)]
        return FileEffect(name, before, note=f"not text: {sizes[0]} before, {sizes[1]} after")
    if old == new:
        return FileEffect(name, before, note="the content stays the same")
    lines = _unified(_lines(texts[0]), _lines(texts[1]))
    names = ["/dev/null" if content is None else name for content in (old, new)]
    diff = f"--- {names[0]}\n+++ {names[1]}\n" + "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
    if len(diff) > MOST_DIFF:
        lengths = f"{len(texts[0])} characters before, {len(texts[1])} after"
        return FileEffect(name, before, note=f"the diff is too long to show: {lengths}")
    return FileEffect(name, before, diff)


def _unified(old: list[str], new: list[str]) -> Iterator[str]:
    """The hunks of a diff. Where there is too much to compare, all lines between the first change and the last."""
    head = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    shortest = min(len(old), len(new)) - head
    tail = next((i for i in range(shortest) if old[-1 - i] != new[-1 - i]), shortest)
    gone, come = old[head : len(old) - tail], new[head : len(new) - tail]
    if len(gone) * len(come) <= MOST_COMPARED:
        hunks = difflib.unified_diff(old, new, n=CONTEXT)
        next(hunks, None), next(hunks, None)  # the names are the caller's
        yield from hunks
        return
    first = max(0, head - CONTEXT)
    after = old[len(old) - tail :][:CONTEXT]
    around = head - first + len(after)
    yield f"@@ -{first + 1},{len(gone) + around} +{first + 1},{len(come) + around} @@\n"
    yield from (f" {line}" for line in old[first:head])
    yield from (f"-{line}" for line in gone)
    yield from (f"+{line}" for line in come)
    yield from (f" {line}" for line in after)


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _lines(text: str) -> list[str]:
    """Lines with their ends: only \\n ends one, as everywhere here."""
    parts = text.split("\n")
    return [*(f"{part}\n" for part in parts[:-1]), *([parts[-1]] if parts[-1] else [])]


def _text(arguments: Mapping[str, Any], name: str) -> str:
    value = arguments[name]
    if not isinstance(value, str):
        raise InvalidArgs(f"{name!r} must be text")
    return value
