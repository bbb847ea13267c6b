"""Text files: pages of lines without loading the whole file, and exact replacement."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import BinaryIO

from farhand.machine.files.allowed_paths import display
from farhand.machine.files.files import Files
from farhand.protocol.errors import Failed, InvalidArgs

MOST_TEXT = 64 * 1024 * 1024  # bytes returned or edited at once
_CHUNK = 256 * 1024


class NotText(Exception):
    """The bytes read are not UTF-8."""


class NotUnique(Exception):
    """The text to replace occurs `count` times; `windows_lines`: it would occur with \\r\\n line ends."""

    def __init__(self, count: int, *, windows_lines: bool) -> None:
        super().__init__(count)
        self.count = count
        self.windows_lines = windows_lines


def read_lines(file: BinaryIO, offset: int = 0, limit: int | None = None, *, most: int = MOST_TEXT) -> list[str]:
    """Return lines from `offset` (counted from 0) on, at most `limit`, without line ends (`\\n` or `\\r\\n`).

    Reads no further than that page and keeps only the page in memory. Raises NotText if something before its end is not
    UTF-8, Failed if the page has more than `most` characters.
    """
    assert offset >= 0
    assert limit is None or limit >= 0
    page: list[str] = []
    skip, lines, size = offset, 0, 0
    for text in _decoded(file):
        breaks = text.count("\n")
        if breaks < skip:
            skip -= breaks
            continue
        rest = text.split("\n", skip)[-1]
        breaks -= skip
        skip = 0
        page.append(rest)
        lines += breaks
        size += len(rest)
        if limit is not None and lines >= limit:
            break
        if size > most:
            raise Failed(
                f"the text asked for is longer than {most} characters; "
                "read it in pages with offset and limit, or search it with Grep"
            )
    whole = "".join(page).split("\n", -1 if limit is None else limit)
    if limit is not None:
        del whole[limit:]
    if whole and not whole[-1] and (limit is None or lines < limit):
        whole.pop()  # nothing follows the last line end
    return [line.removesuffix("\r") for line in whole]


def lines_from(file: BinaryIO, offset: int, longest: int, skip: int = 0) -> Iterator[tuple[str, bool]]:
    """Yield lines from `offset` (counted from 0) on, each with its line end, and whether it was truncated.

    A line is truncated at `longest` bytes, between two characters, and is then the last one; `skip` omits bytes of the
    first line, to continue from there. Holds one line at a time. Raises NotText for a line with a NUL or invalid UTF-8,
    InvalidArgs if the first line is shorter than `skip`.
    """
    passed = 0
    while passed < offset:
        line = file.readline(_CHUNK)
        if not line:
            return
        passed += line.endswith(b"\n")
    left = skip
    while left:
        line = file.readline(min(left, _CHUNK))
        left -= len(line)
        if not line or line.endswith(b"\n"):
            raise InvalidArgs(f"line {offset + 1} has no more than {skip - left} bytes, so {skip} cannot be skipped")
    while line := file.readline(longest + 2):
        cut = len(line) > longest and not line.endswith(b"\n")
        if cut:
            line = line[: _character_start(line, longest)]
        try:
            text = line.decode()
        except UnicodeDecodeError:
            raise NotText from None
        if "\0" in text:
            raise NotText
        yield text, cut
        if cut:
            return


def _character_start(data: bytes, end: int) -> int:
    """Return the last position up to `end` at which UTF-8 can be split."""
    start = end
    while start > end - 4 and data[start] & 0xC0 == 0x80:
        start -= 1
    return start


def is_text(file: BinaryIO, most: int) -> bool:
    """Return whether the first `most` bytes of a file are UTF-8."""
    try:
        for _ in _decoded(file, most):
            pass
    except NotText:
        return False
    return True


def replace_text(
    files: Files, path: str, old: str, new: str, *, every: bool = False, any_line_end: bool = False
) -> int:
    """Replace the only occurrence of `old` (or every one) and return how many were replaced.

    With `any_line_end`, \\n in the texts also matches lines that end with \\r\\n, which are preserved.

    Raises NotUnique if `old` does not occur, or occurs several times without `every`; Failed if the file is not text,
    is or would be larger than MOST_TEXT, or is changed concurrently. Nothing is changed then.
    """
    content, changed, count = plan_replacement(files, path, old, new, every=every, any_line_end=any_line_end)
    files.write(path, changed, expected=content)
    return count


def plan_replacement(
    files: Files, path: str, old: str, new: str, *, every: bool = False, any_line_end: bool = False
) -> tuple[bytes, bytes, int]:
    """Return the content of a file before and after `replace_text`, and the number of replacements."""
    name = display(files.resolve(path))
    before = old.encode()
    with files.open(path) as file:
        content = file.read(MOST_TEXT + 1)
    if len(content) > MOST_TEXT:
        raise Failed(f"Failed to edit '{name}': it is larger than {MOST_TEXT} bytes; use a command for this file")
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise Failed(f"Failed to edit '{name}': it is not UTF-8 text (byte {error.start})") from None
    count = content.count(before)
    after = new.encode()
    windows = _windows(before)
    if any_line_end and not count and windows != before and windows in content:
        before, after = windows, _windows(after)
        count = content.count(before)
    if count == 0 or (count > 1 and not every):
        raise NotUnique(count, windows_lines=windows != before and windows in content)
    size = len(content) + count * (len(after) - len(before))
    if size > MOST_TEXT:
        raise Failed(f"Failed to edit '{name}': it would have {size} bytes, more than {MOST_TEXT}; nothing was changed")
    return content, content.replace(before, after), count


def _windows(text: bytes) -> bytes:
    return text.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")


def _decoded(file: BinaryIO, most: int | None = None) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0
    try:
        while chunk := file.read(_CHUNK):
            yield decoder.decode(chunk)
            read += len(chunk)
            if most is not None and read >= most:
                return
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise NotText from None
