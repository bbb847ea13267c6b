"""Find files by pattern, newest first.

The walk opens folder after folder, never through a link it encounters, and reads the times only of matching files, so
that it cannot be redirected and a narrow pattern is cheap. `**` does not follow links; a link that the pattern names
is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator

from farhand.machine.files.allowed_paths import CheckedPath, display
from farhand.machine.files.confined_root import ConfinedRoot
from farhand.machine.files.files import Files, file_errors
from farhand.machine.search.patterns import BadPattern, PatternPart, PatternRoute, combined, parse
from farhand.protocol.errors import NotFound, Timeout, ToolError

_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHECKED_EVERY = 1000  # entries of one folder between two checks of the deadline
_DEPTH = 100  # folders held open at once; deeper ones are reopened from their root


def glob_files(files: Files, pattern: str, base: str, *, seconds: float = 30.0) -> list[str]:
    """Return absolute paths of the matching files (folders, for a pattern ending in `/`), newest first.

    Raises BadPattern; NotFound or NotAllowed for the base; Timeout if the search takes longer than `seconds`.
    """
    routes = parse(pattern)
    if not stat.S_ISDIR(files.status(base).st_mode):
        raise NotFound(f"'{display(files.resolve(base))}' is not a folder; give the folder to search in")
    walk = _Walk(files, seconds)
    with file_errors("search", files.resolve(base)):
        for start, beneath in _starts(files, base, routes).items():
            walk.run(start, beneath)
    newest_first = sorted(walk.found, key=walk.found.__getitem__, reverse=True)
    return [path if path.isascii() else display(path) for path in newest_first]


def _starts(files: Files, base: str, routes: Iterable[PatternRoute]) -> dict[str, list[PatternRoute]]:
    """Return the folder in which each route begins: the base and the literal names that begin the pattern."""
    starts: dict[str, list[PatternRoute]] = {}
    for route in routes:
        parts = list(route.parts)
        start = "/" if route.absolute else files.resolve(base)
        while len(parts) > 1 and parts[0].literal is not None:
            start = files.resolve(os.path.join(start, parts.pop(0).literal or ""))  # noqa: PTH118
        if any(part.literal == ".." for part in parts):
            raise BadPattern("'..' can only stand at its beginning, before a name")
        starts.setdefault(start, []).append(PatternRoute(False, tuple(parts), route.folders))
    return starts


class _Step:
    """What can match in one folder: the routes that lead there."""

    def __init__(self, routes: frozenset[PatternRoute]) -> None:
        opened = {inner for route in routes for inner in _without_depth(route)}
        last = [route for route in opened if len(route.parts) == 1]
        self.files = _names(route.parts[0] for route in last if not route.folders)
        self.endings = _endings(route.parts[0] for route in last if not route.folders)
        self.folders = _names(route.parts[0] for route in last if route.folders)
        self._deep = frozenset(route for route in opened if route.parts[0].expression is None)
        self._onward = [
            (re.compile(route.parts[0].expression, re.DOTALL), PatternRoute(False, route.parts[1:], route.folders))
            for route in opened
            if len(route.parts) > 1 and route.parts[0].expression is not None
        ]
        self.links = bool(self.folders or self._onward)  # whether links to folders are relevant here
        self.plain = not self.links and self._deep == frozenset(routes)

    def through(self, name: str, *, link: bool) -> frozenset[PatternRoute]:
        """Return the routes that continue in the folder of this name."""
        named = frozenset(rest for expression, rest in self._onward if expression.fullmatch(name))
        if link:
            return named
        return named | self._deep if named else self._deep


class _Walk:
    """One search; `found` maps paths to modification times. Inaccessible files are skipped."""

    def __init__(self, files: Files, seconds: float) -> None:
        self.found: dict[str, int] = {}
        self._files = files
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._steps: dict[frozenset[PatternRoute], _Step] = {}
        self._waiting: list[tuple[CheckedPath, _Step]] = []
        self._protected = files.paths.protected_identities()
        # Hidden folders are never entered, so only hidden entries of the folder itself must be checked.
        self._hidden_in: dict[str, set[str]] = {}
        for path in files.paths.hidden:
            folder, _, name = path.rpartition("/")
            self._hidden_in.setdefault(folder + "/", set()).add(name)

    def run(self, start: str, routes: Iterable[PatternRoute]) -> None:
        self._waiting.append((self._files.place(start), self._step(frozenset(routes))))
        while self._waiting:
            place, step = self._waiting.pop()
            with _passing_over():
                folder = self._files.open_folder(place)
                self._visit(
                    folder, place.path.rstrip("/") + "/", place.real.rstrip("/") + "/", place.root, step, _DEPTH
                )

    def _step(self, routes: frozenset[PatternRoute]) -> _Step:
        step = self._steps.get(routes)
        if step is None:
            step = self._steps[routes] = _Step(routes)
        return step

    def _visit(self, folder: int, path: str, real: str, root: ConfinedRoot, step: _Step, depth: int) -> None:
        """Search an open folder and those below, and close it. Both spellings of its path end with a slash."""
        try:
            self._check_deadline()
            if self._protected and _identity(folder) in self._protected:
                return  # a hidden folder under another name, or a second mount of it
            plain = step.plain  # all folders are searched for the same, and none itself matches
            for name in self._scan(folder, path, real, step):
                inner = real + name
                following = (
                    step if plain else self._enter(CheckedPath(path + name, inner, root), name, step, link=False)
                )
                if following is None:
                    continue
                if not depth:
                    self._waiting.append((CheckedPath(path + name, inner, root), following))
                    continue
                try:
                    below = os.open(name, _LIST, dir_fd=folder)
                except OSError as error:
                    _pass_over(error)
                else:
                    self._visit(below, path + name + "/", inner + "/", root, following, depth - 1)
        finally:
            os.close(folder)

    def _check_deadline(self) -> None:
        if time.monotonic() > self._deadline:
            raise Timeout(f"the search did not end in {self._seconds:g} s; search a smaller folder")

    def _scan(self, folder: int, path: str, real: str, step: _Step) -> list[str]:
        """Record the matching files of a folder; return the names of its folders."""
        found, hidden = self.found, self._hidden_in.get(real)
        endings = step.endings
        wanted = step.files.fullmatch if step.files else None
        folders: list[str] = []
        try:
            entries = os.scandir(folder)
        except OSError as error:
            _pass_over(error)
            return folders
        with entries:
            for number, entry in enumerate(entries, 1):
                if not number % _CHECKED_EVERY:
                    self._check_deadline()
                name = entry.name
                if hidden and name in hidden:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                elif name.endswith(endings) if endings else wanted and wanted(name):
                    if entry.is_file(follow_symlinks=False):
                        try:
                            found[path + name] = entry.stat(follow_symlinks=False).st_mtime_ns
                        except OSError:
                            continue
                    elif entry.is_symlink():
                        self._follow(path + name, name, step)
                elif step.links and entry.is_symlink():
                    self._follow(path + name, name, step)
        return folders

    def _enter(self, place: CheckedPath, name: str, step: _Step, *, link: bool) -> _Step | None:
        """Record a folder if it matches; return what to search for in it, or None."""
        if step.folders and step.folders.fullmatch(name):
            with contextlib.suppress(ToolError):
                self.found[place.path] = self._files.status(place.path).st_mtime_ns
        routes = step.through(name, link=link)
        return self._step(routes) if routes else None

    def _follow(self, path: str, name: str, step: _Step) -> None:
        """Treat a link as its target, if that is allowed."""
        try:
            place = self._files.place(path)
            status = self._files.status(path)
        except ToolError:
            return
        if stat.S_ISDIR(status.st_mode):
            following = self._enter(place, name, step, link=True)
            if following:
                self._waiting.append((place, following))
        elif stat.S_ISREG(status.st_mode) and step.files and step.files.fullmatch(name):
            self.found[path] = status.st_mtime_ns


def _identity(folder: int) -> tuple[int, int]:
    status = os.fstat(folder)
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def _passing_over() -> Iterator[None]:
    """Skip a folder that is gone or inaccessible, but raise if the system is out of resources."""
    try:
        yield
    except OSError as error:
        _pass_over(error)


def _pass_over(error: OSError) -> None:
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise error


def _without_depth(route: PatternRoute) -> Iterable[PatternRoute]:
    """Yield the route, and what follows its leading `**`, which may match no folder at all."""
    yield route
    while route.parts[0].expression is None and len(route.parts) > 1:
        route = PatternRoute(False, route.parts[1:], route.folders)
        yield route


def _names(parts: Iterable[PatternPart]) -> re.Pattern[str] | None:
    expressions = sorted({part.expression or ".*" for part in parts})
    return combined(expressions) if expressions else None


def _endings(parts: Iterable[PatternPart]) -> tuple[str, ...]:
    """Return the suffixes that decide a match if the patterns ask for nothing else (`*.py`); else nothing.

    A sixth less CPU than the expression in the most common case, which keeps Glob within 1.5 times ripgrep.
    """
    endings = []
    for part in parts:
        rest = (part.expression or ".*").removeprefix(".*")
        ending = re.sub(r"\\(.)", r"\1", rest)
        if not (part.expression or ".*").startswith(".*") or re.escape(ending) != rest:
            return ()
        endings.append(ending)
    return tuple(endings)
