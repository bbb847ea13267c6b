"""The agent's file tools on the gateway's machine: read, write, edit, apply_patch, grep, glob and ls."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, BinaryIO, Final

from msgspec import Meta

from farhand.machine.files.allowed_paths import check_path_text, display
from farhand.machine.files.files import Files, file_errors
from farhand.machine.files.listing import FolderEntry, list_folder
from farhand.machine.files.text import NotText, NotUnique, lines_from, plan_replacement, replace_text
from farhand.machine.patch.apply import apply_patch, planned_changes
from farhand.machine.search.glob import glob_files
from farhand.machine.search.grep import Match, grep_files
from farhand.machine.search.patterns import BadPattern
from farhand.protocol.errors import Failed, InvalidArgs, NotFound, Timeout, ToolError
from farhand.protocol.redaction import KnownSecrets
from farhand.tools.preview import Preview, change_preview, file_preview, planned_effect
from farhand.tools.schema import encode_argument
from farhand.tools.skill_paths import BASE, SkillPaths
from farhand.tools.tool import Tool, tool

PAGE: Final = 50 * 1024
LARGEST_PAGE: Final = 512 * 1024
MOST_MATCHES: Final = 100
MOST_FILES: Final = 1000
MOST_GREP_CHARS: Final = 500_000
MOST_READ_AT_ONCE: Final = 1 << 20
LINE_WIDTH: Final = 1000
SHOWN_EDIT: Final = 1000
DEEPEST: Final = 5
_NOTICE_ROOM: Final = 200

FilePath = Annotated[str, Meta(description="File path; relative paths start at the workspace.")]
Folder = Annotated[str | None, Meta(description="Folder to search (default: the workspace).")]


class AgentFileTools:
    """The seven tools over the files the agent may use. Each method blocks; tools run it in a thread."""

    def __init__(
        self,
        files: Files,
        *,
        search_seconds: float = 30.0,
        secrets: KnownSecrets | None = None,
        skills: SkillPaths | None = None,
    ) -> None:
        """`secrets` are redacted, even if a line is cut within one. `skills`: skills outside the workspace."""
        self._skills = skills
        self._secrets = secrets or KnownSecrets()
        self._files = files
        self._search_seconds = search_seconds

    def tools(self) -> list[Tool]:
        path = {"file_path": "path"}
        texts = {"old_string": "old_text", "new_string": "new_text", **path}
        return [
            tool(self.read, aliases=path, unlisted=("skip_bytes",), read_only=True, capability="filesystem.read"),
            tool(
                self.write,
                aliases=path,
                unlisted=("create_dirs",),
                capability="filesystem.write",
                preview=self.preview_write,
            ),
            tool(
                self.edit,
                aliases=texts,
                unlisted=("replace_all",),
                capability="filesystem.edit",
                preview=self.preview_edit,
            ),
            tool(self.apply_patch, unlisted=("path",), capability="filesystem.edit", preview=self.preview_patch),
            tool(
                self.grep,
                unlisted=("exclude", "context_lines", "max_results"),
                read_only=True,
                capability="text.search",
            ),
            tool(self.glob, read_only=True, capability="filesystem.list"),
            tool(self.ls, unlisted=("depth", "show_hidden"), read_only=True, capability="filesystem.list"),
        ]

    def read(
        self,
        path: FilePath,
        offset: Annotated[int, Meta(ge=0, description="First line, counted from 0.")] = 0,
        limit: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="Most lines to read.")] = None,
        skip_bytes: Annotated[int, Meta(ge=0)] = 0,
    ) -> str:
        """Read a text file with line numbers, in pages: a notice at the end of a page says how to continue."""
        _required("read", "path", path)
        path = self._located(path)
        base = self._base(path)
        largest = PAGE if limit is None else LARGEST_PAGE
        room = largest - _NOTICE_ROOM
        page: list[str] = []
        size = 0
        with self._files.open(path) as file, file_errors("read", self._files.resolve(path)):
            lines = lines_from(file, offset, LARGEST_PAGE - 2 * _NOTICE_ROOM, skip_bytes)
            try:
                for number, (text, cut) in enumerate(lines, offset + 1):
                    if limit is not None and number > offset + limit:
                        break
                    # Line ends, and a missing last one, are preserved: the pages together are the file.
                    shown_text = self._cut(text, number == offset + 1 and skip_bytes > 0, cut)
                    line = f"{number:6d}\t{shown_text if base is None else shown_text.replace(BASE, base)}"
                    size += len(line.encode())
                    # A line longer than a page is shown up to the largest page size.
                    if (size > room or cut) and page:
                        return "".join(page) + _truncated(largest, f"offset={number - 1}")
                    page.append(line)
                    if cut:
                        rest = skip_bytes * (number == offset + 1) + len(text.encode())
                        where = f"offset={number - 1} skip_bytes={rest}, inside of line {number}"
                        return f"{line}\n{_truncated(LARGEST_PAGE, where)}"
            except NotText:
                raise Failed(f"binary file: '{path}' is not UTF-8 text; use a command to look into it") from None
        return "".join(page)

    def write(
        self,
        path: FilePath,
        content: Annotated[str, Meta(description="The whole new content.")],
        create_dirs: bool = True,
    ) -> str:
        """Create or overwrite a file, and the folders it needs."""
        data = self._to_write(path, content, create_dirs)
        self._files.write(path, data)
        return f"wrote {len(data)} bytes to {path}"

    def preview_write(self, path: str, content: str, create_dirs: bool) -> Preview:
        return file_preview(self._files, path, self._to_write(path, content, create_dirs))

    def _to_write(self, path: str, content: str, create_dirs: bool) -> bytes:
        _required("write", "path", path)
        data = encode_argument("content", content)
        parent = os.path.dirname(self._files.resolve(path))  # noqa: PTH120
        if not create_dirs:
            try:
                self._files.status(parent)
            except NotFound:
                raise NotFound(f'parent directory "{display(parent)}": no such file or directory') from None
        return data

    def edit(
        self,
        path: FilePath,
        old_text: Annotated[str, Meta(description="Text to replace; it must stand in the file exactly once.")],
        new_text: Annotated[str, Meta(description="Replacement.")],
        replace_all: bool = False,
    ) -> str:
        """Replace one exact piece of text in a file (without line numbers)."""
        with self._editing(path, old_text, new_text):
            count = replace_text(self._files, path, old_text, new_text, every=replace_all, any_line_end=True)
        changed = f"-{self._one_line(old_text)}\n+{self._one_line(new_text)}"
        return f"--- {path}\n+++ {path}\n@@ replaced {count} occurrence(s) @@\n{changed}"

    def preview_edit(self, path: str, old_text: str, new_text: str, replace_all: bool) -> Preview:
        with self._editing(path, old_text, new_text):
            before, after, _ = plan_replacement(
                self._files, path, old_text, new_text, every=replace_all, any_line_end=True
            )
        return change_preview(self._files, path, before, after)

    @contextlib.contextmanager
    def _editing(self, path: str, old_text: str, new_text: str) -> Iterator[None]:
        """Check the texts of an edit, and translate its errors."""
        _required("edit", "path", path)
        _required("edit", "old_text", old_text)
        encode_argument("old_text", old_text)
        encode_argument("new_text", new_text)
        try:
            yield
        except NotUnique as found:
            if found.count:
                raise Failed(f'old_text must be unique in "{path}" (found {found.count} matches)') from None
            raise Failed(f'old_text not found in "{path}"') from None

    def apply_patch(
        self,
        patch: Annotated[
            str,
            Meta(
                description="*** Begin Patch / *** Add File: p (+lines) / *** Update File: p (@@ line before @@, then "
                "' ', '-', '+' lines) / *** Delete File: p / *** End Patch"
            ),
        ],
        path: str | None = None,
    ) -> str:
        """Change several files with one patch: all of it is applied, or nothing."""
        _refuse_no_patch(patch)
        return apply_patch(self._files, patch, path=path)

    def preview_patch(self, patch: str, path: str | None) -> Preview:
        _refuse_no_patch(patch)
        changes, _ = planned_changes(self._files, patch, path=path)
        return Preview(
            files=tuple(planned_effect(self._files, change.path, change.old, change.new) for change in changes)
        )

    def grep(
        self,
        pattern: Annotated[str, Meta(description="Regular expression (Rust syntax).")],
        path: Folder = None,
        include: Annotated[str | None, Meta(description='Files to search, e.g. "*.go".')] = None,
        exclude: str | None = None,
        context_lines: Annotated[int, Meta(ge=0, le=100)] = 0,
        max_results: Annotated[int, Meta(ge=1, le=10_000)] = MOST_MATCHES,
    ) -> str:
        """Search file contents; gives path:line:text. Skips binary files and those that .gitignore names."""
        _required("grep", "pattern", pattern)
        try:
            matches, more = grep_files(
                self._files,
                pattern,
                self._located(path or "."),
                include=include,
                exclude=exclude,
                most=max_results,
                seconds=self._search_seconds,
                width=LINE_WIDTH,
                ignored=False,
                by_path=True,
            )
        except BadPattern as error:
            raise InvalidArgs(f"grep parameter pattern: invalid regular expression: {error}") from None
        shown: list[str] = []
        size = 0
        for line in self._matching(matches, context_lines):
            size += len(line)
            if size > MOST_GREP_CHARS:
                shown.append(f"[grep output truncated at {MOST_GREP_CHARS} characters; narrow the pattern or path]")
                break
            shown.append(line)
        else:
            if more:
                shown.append(f"[grep output truncated at {max_results} matches; narrow the pattern, path or include]")
        return "\n".join(shown)

    def glob(
        self,
        pattern: Annotated[str, Meta(description='Glob pattern, e.g. "**/*.go".')],
        path: Folder = None,
    ) -> str:
        """Find files by name; ** is any depth of folders. Gives one path a line, sorted."""
        _required("glob", "pattern", pattern)
        check_path_text("pattern", pattern)
        self._files.resolve(pattern)  # patterns obey the rules of paths
        try:
            found = glob_files(
                self._files,
                pattern,
                "/" if pattern.startswith("/") else self._located(path or "."),
                seconds=self._search_seconds,
            )
        except BadPattern as error:
            raise InvalidArgs(f"glob parameter pattern: invalid pattern {pattern!r}: {error}") from None
        names = sorted(self._relative(name) for name in found)
        if len(names) > MOST_FILES:
            names = [*names[:MOST_FILES], f"[glob output truncated at {MOST_FILES} of {len(names)} files]"]
        return "\n".join(names)

    def ls(
        self,
        path: Annotated[str, Meta(description='Folder; "." is the workspace.')],
        depth: int = 1,
        show_hidden: bool = False,
    ) -> str:
        """List a folder: name, type (file, dir, symlink) and size in bytes; without names that begin with a dot."""
        _required("ls", "path", path)
        path = self._located(path)
        if not 1 <= depth <= DEEPEST:
            raise InvalidArgs(f"ls depth must be between 1 and {DEEPEST}")
        if depth == 1:
            return "\n".join(_described(entry) for entry in list_folder(self._files, path, hidden=show_hidden))
        return "\n".join(self._tree(path, depth, show_hidden, ""))

    def _tree(self, path: str, depth: int, hidden: bool, indent: str) -> Iterator[str]:
        entries = list_folder(self._files, path, hidden=hidden)
        for entry in entries:
            last = entry is entries[-1]
            yield f"{indent}{'└── ' if last else '├── '}{_described(entry)}"
            if entry.kind == "dir" and depth > 1:
                below = indent + ("    " if last else "│   ")
                try:
                    yield from self._tree(f"{path}/{entry.name}", depth - 1, hidden, below)
                except ToolError as error:
                    yield f"{below}({error.message})"

    def _located(self, path: str) -> str:
        return path if self._skills is None else self._skills.locate(path)

    def _base(self, path: str) -> str | None:
        """Return the folder that `{baseDir}` denotes in a text of a skill."""
        if self._skills is None or not path.endswith(".md"):
            return None
        return self._skills.base(self._files.resolve(path))

    def _matching(self, matches: list[Match], around: int) -> Iterator[str]:
        """The lines that match, with those around them; each line once, each file read once. Raises Timeout."""
        deadline = time.monotonic() + self._search_seconds
        for path, found in groupby(matches, key=lambda match: match.path):
            name = self._relative(path)
            lines = [(match.line, match.content) for match in found]
            file = None
            with contextlib.suppress(ToolError):  # gone since
                file = self._files.open(path) if around else None
            if file is not None:
                with file:
                    lines = list(_around(file, [number for number, _ in lines], around, deadline))
            for number, content in lines:
                yield f"{name}:{number}:{self._line(content)}"

    def _line(self, text: str) -> str:
        """Return the displayed part of a matching line or its context."""
        return self._cut(text[:LINE_WIDTH], False, len(text) >= LINE_WIDTH)

    def _one_line(self, text: str) -> str:
        cut = text if len(text) <= SHOWN_EDIT else self._cut(text[:SHOWN_EDIT], False, True) + "…"
        return cut.replace("\n", "\\n")

    def _cut(self, text: str, before: bool, after: bool) -> str:
        return self._secrets.redact_excerpt(text, before=before, after=after) if before or after else text

    def _relative(self, path: str) -> str:
        """Return the shortest form of a path that the other tools accept."""
        return path.removeprefix(self._files.workspace.rstrip("/") + "/")


def _around(file: BinaryIO, matching: list[int], around: int, deadline: float) -> Iterator[tuple[int, str]]:
    """The lines of a file that are at most so far from one that matches. Raises Timeout."""
    wanted = iter(matching)
    following = next(wanted, None)
    last, number = 0, 0
    while following is not None or number < last:
        number += 1
        line = file.readline(4 * LINE_WIDTH + 2)
        if not line:
            return
        part = line
        while part and not part.endswith(b"\n"):
            part = file.readline(MOST_READ_AT_ONCE)
        while following is not None and following <= number + around:
            last, following = following + around, next(wanted, None)
        if number <= last:
            yield number, line.rstrip(b"\r\n").decode("utf-8", "replace")
        if number % 10_000 == 0 and time.monotonic() > deadline:
            raise Timeout("reading the lines around the matches took too long; ask for fewer, or without context")


def _described(entry: FolderEntry) -> str:
    return f"{display(entry.name)} ({entry.kind}, {entry.size})"


def _truncated(largest: int, where: str) -> str:
    return f"[read output truncated at {largest // 1024}KB] continue with {where}"


def _refuse_no_patch(patch: str) -> None:
    _required("apply_patch", "patch", patch)
    encode_argument("patch", patch)


def _required(name: str, parameter: str, value: str) -> None:
    if not value:
        raise InvalidArgs(f"{name} parameter {parameter} is required")
