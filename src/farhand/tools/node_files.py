"""The file tools of a node: Read, Write, Edit, Glob and Grep, with the texts of GSV's node tools."""

# Tool and parameter names are those of GSV's node tools; the schema is derived from these signatures.
# ruff: noqa: N802, N803

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

from msgspec import Meta

from farhand.machine.files.allowed_paths import check_path_text, display
from farhand.machine.files.files import Files, file_errors
from farhand.machine.files.mime import HEAD, mime_type
from farhand.machine.files.text import NotText, NotUnique, plan_replacement, read_lines, replace_text
from farhand.machine.search.glob import glob_files
from farhand.machine.search.grep import grep_files
from farhand.machine.search.patterns import BadPattern
from farhand.protocol.errors import Failed, InvalidArgs
from farhand.tools.schema import encode_argument

if TYPE_CHECKING:
    from farhand.tools.preview import Preview

LARGEST_IMAGE = 10 * 1024 * 1024
MOST_MATCHES = 100

FilePath = Annotated[str, Meta(description="Path to the file. Relative paths resolve against the node workspace.")]
Folder = Annotated[
    str | None,
    Meta(description="Directory to search in. Relative paths resolve against the node workspace (the default)."),
]
Offset = Annotated[int, Meta(ge=0, description="Line number to start reading from (0-based). Ignored for image files.")]
Limit = Annotated[
    Annotated[int, Meta(ge=0)] | None,
    Meta(description="Maximum number of lines to read (default: all of them). Ignored for image files."),
]
Content = Annotated[str, Meta(description="Content to write.")]
OldString = Annotated[str, Meta(description="Exact text to find and replace.")]
NewString = Annotated[str, Meta(description="Replacement text.")]
ReplaceAll = Annotated[
    bool, Meta(description="Replace all occurrences. When false, oldString must occur exactly once.")
]
GlobPattern = Annotated[
    str,
    Meta(description='Glob pattern (e.g. "**/*.md", "src/**/*.{rs,ts}"). A trailing "/" lists directories.'),
]
RegexPattern = Annotated[str, Meta(description="Regex pattern to search for (Rust regex syntax, no look-around).")]
Include = Annotated[
    str | None,
    Meta(
        description='File name glob pattern to filter files (e.g. "*.md", "*.{rs,ts}"). '
        "Matched against file name only, not full path."
    ),
]


class NodeFileTools:
    """The five tools over one machine's files. Each method blocks; run it in a thread."""

    def __init__(self, files: Files, *, search_seconds: float = 30.0) -> None:
        self._files = files
        self._search_seconds = search_seconds

    def Read(self, *, path: FilePath, offset: Offset = 0, limit: Limit = None) -> dict[str, Any]:
        """Read file contents from the node's filesystem.

        Text files come with 1-based line numbers; read large ones in pages with offset and limit.
        Image files (up to 10 MB) come as an image.
        """
        resolved = self._files.resolve(path)
        with self._files.open(path) as file, file_errors("read", resolved):
            head = file.read(HEAD)
            # Text has no NUL, but a small image may be valid UTF-8.
            if b"\0" in head and mime_type(head).startswith("image/"):
                return _image_or_refusal(file, head, resolved)
            file.seek(0)
            try:
                lines = read_lines(file, offset, limit)
            except NotText:
                return _image_or_refusal(file, head, resolved)
        return _numbered(resolved, lines, offset)

    def Write(self, *, path: FilePath, content: Content) -> dict[str, Any]:
        """Write content to a file on the node's filesystem.

        Creates parent directories if they do not exist and overwrites the file if it does.
        """
        data = encode_argument("content", content)
        return {"path": display(self._files.write(path, data)), "bytes": len(data)}

    def preview_Write(self, *, path: str, content: str) -> Preview:
        from farhand.tools.preview import file_preview  # noqa: PLC0415 - memory of an idle node

        return file_preview(self._files, path, encode_argument("content", content))

    def Edit(
        self, *, path: FilePath, oldString: OldString, newString: NewString, replaceAll: ReplaceAll = False
    ) -> dict[str, Any]:
        """Edit a file by replacing exact text matches on the node's filesystem.

        oldString must match the file exactly (without line numbers) and only once, unless replaceAll is true.
        """
        with self._editing(path, oldString, newString):
            count = replace_text(self._files, path, oldString, newString, every=replaceAll)
        return {"path": display(self._files.resolve(path)), "replacements": count}

    def preview_Edit(self, *, path: str, oldString: str, newString: str, replaceAll: bool) -> Preview:
        from farhand.tools.preview import change_preview  # noqa: PLC0415

        with self._editing(path, oldString, newString):
            before, after, _ = plan_replacement(self._files, path, oldString, newString, every=replaceAll)
        return change_preview(self._files, path, before, after)

    @contextlib.contextmanager
    def _editing(self, path: str, oldString: str, newString: str) -> Iterator[None]:
        """Check the texts of an edit, and translate its errors."""
        if not oldString:
            raise InvalidArgs("parameter 'oldString': must not be empty; give the exact text to replace")
        encode_argument("oldString", oldString)
        encode_argument("newString", newString)
        resolved = display(self._files.resolve(path))
        try:
            yield
        except NotUnique as found:
            if found.count:
                raise Failed(
                    f"oldString found {found.count} times in '{resolved}'. "
                    "Use replaceAll: true or provide more context to make it unique."
                ) from None
            advice = ": its lines end with \\r\\n, so write line breaks that way" if found.windows_lines else ""
            raise Failed(f"oldString not found in '{resolved}'{advice}") from None

    def Glob(self, *, pattern: GlobPattern, path: Folder = None) -> dict[str, Any]:
        """Find files matching a glob pattern on the node's filesystem.

        Results are sorted by modification time, newest first. Hidden and git-ignored files are included.
        """
        check_path_text("pattern", pattern)
        base = "/" if pattern.startswith("/") else path or "."
        try:
            matches = glob_files(self._files, pattern, base, seconds=self._search_seconds)
        except BadPattern as error:
            raise InvalidArgs(f"parameter 'pattern': Invalid pattern {pattern!r}: {error}") from None
        return {
            "pattern": pattern,
            "basePath": display(self._files.resolve(base)),
            "matches": matches,
            "count": len(matches),
        }

    def Grep(self, *, pattern: RegexPattern, path: Folder = None, include: Include = None) -> dict[str, Any]:
        """Search file contents using regular expressions on the node's filesystem.

        Searches hidden and git-ignored files too, follows symbolic links, skips binary files, and returns at most
        100 matching lines of at most 200 characters.
        """
        base = path or "."
        try:
            matches, more = grep_files(
                self._files, pattern, base, include=include, most=MOST_MATCHES, seconds=self._search_seconds
            )
        except BadPattern as error:
            raise InvalidArgs(f"parameter 'pattern': Invalid regex pattern: {error}") from None
        result: dict[str, Any] = {
            "pattern": pattern,
            "basePath": display(self._files.resolve(base)),
            "matches": [{"path": match.path, "line": match.line, "content": match.content} for match in matches],
        }
        return {**result, "truncated": True} if more else {**result, "count": len(matches)}


def _image_or_refusal(file: BinaryIO, head: bytes, path: str) -> dict[str, Any]:
    """Return a file that is not text as an image. Raises Failed if it is none."""
    kind = mime_type(head)
    name = display(os.path.basename(path))  # noqa: PTH119
    size = os.fstat(file.fileno()).st_size
    if not kind.startswith("image/"):
        raise Failed(f"Binary file: {name} ({kind}, {size} bytes) — not a text or image file")
    if size <= LARGEST_IMAGE:
        file.seek(0)
        data = file.read(LARGEST_IMAGE + 1)  # it may have grown
        size = len(data)
    if size > LARGEST_IMAGE:
        raise Failed(f"Image file too large: {name} ({kind}, {size} bytes, max {LARGEST_IMAGE} bytes)")
    return {
        "content": [
            {"type": "text", "text": f"Image file: {name} ({kind}, {size} bytes)"},
            {"type": "image", "data": base64.b64encode(data).decode("ascii"), "mimeType": kind},
        ]
    }


def _numbered(resolved: str, lines: list[str], offset: int) -> dict[str, Any]:
    numbered = (f"{number}\t{line}" for number, line in enumerate(lines, offset + 1))
    return {"path": display(resolved), "content": "\n".join(numbered), "lines": len(lines)}
