"""Text in files: pages of lines without loading the whole, and exact replacement."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import BinaryIO

from farhand.machine.files.allowed_paths import display
from farhand.machine.files.files import Files
from farhand.protocol.errors import Failed, InvalidArgs

MOST_TEXT = 64 * 1024 * 1024  # bytes handed out or edited at once; more is a mistake and would fill the memory
_CHUNK = 256 * 1024


class NotText(Exception):
    """The bytes read are not UTF-8."""


class NotUnique(Exception):
    """The text to replace stands in the file `count` times; `windows_lines`: it would, with \\r\\n line ends."""

    def __init__(self, count: int, *, windows_lines: bool) -> None:
        super().__init__(count)
        self.count = count
        self.windows_lines = windows_lines


def read_lines(file: BinaryIO, offset: int = 0, limit: int | None = None, *, most: int = MOST_TEXT) -> list[str]:
    """Lines `offset` (from 0) and on, at most `limit`, without their line ends (`\\n` or `\\r\\n`).

    Reads no further than the page asked for, and keeps nothing but the page. Raises NotText when something
    before its end is not UTF-8, Failed when the page has more than `most` characters.
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
        whole.pop()  # what follows the last line end is no line
    return [line.removesuffix("\r") for line in whole]


def lines_from(file: BinaryIO, offset: int, longest: int, skip: int = 0) -> Iterator[tuple[str, bool]]:
    """Lines `offset` (from 0) and on, each with its line end as it is, and whether it was cut.

    A line is cut at `longest` bytes, between two characters, and is the last that is given; `skip` leaves out as many
    bytes of the first line, to go on from there. Holds one line at a time. Raises NotText for a line with a NUL or that
    is not UTF-8, InvalidArgs when the first line has no byte `skip`.
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
    """The last place up to `end` at which UTF-8 can be cut."""
    start = end
    while start > end - 4 and data[start] & 0xC0 == 0x80:
        start -= 1
    return start


def is_text(file: BinaryIO, most: int) -> bool:
    """Whether a file is UTF-8, as far as `most` bytes tell."""
    try:
        for _ in _decoded(file, most):
            pass
    except NotText:
        return False
    return True


def replace_text(
    files: Files, path: str, old: str, new: str, *, every: bool = False, any_line_end: bool = False
) -> int:
    """Replace the one place where `old` stands (or every one) and tell how many there were.

    With `any_line_end`, texts written with \\n also stand for lines that end with \\r\\n, and keep them so.

    All or nothing: NotOnce when `old` is not there, or more than once without `every`; Failed when the file is
    no text, is or would be larger than MOST_TEXT, or is changed by somebody meanwhile.
    """
    content, changed, count = plan_replacement(files, path, old, new, every=every, any_line_end=any_line_end)
    files.write(path, changed, expected=content)
    return count


def plan_replacement(
    files: Files, path: str, old: str, new: str, *, every: bool = False, any_line_end: bool = False
) -> tuple[bytes, bytes, int]:
    """What `replace_text` would make of a file: its content before and after, and how many places change."""
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
