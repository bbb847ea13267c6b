"""Find files by pattern, newest first.

The walk goes from opened folder to opened folder, never through a link it meets on the way, and asks only for the
times of what matches; so nothing can lead it astray and a narrow pattern costs little.  `**` passes links by; a link
the pattern itself names is followed.
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
_CHECKED_EVERY = 1000  # entries of one folder between two looks at the clock
_DEPTH = 100  # folders held open at once; deeper ones are opened anew from their root


def glob_files(files: Files, pattern: str, base: str, *, seconds: float = 30.0) -> list[str]:
    """Absolute paths of the files (for a pattern ending in `/`: folders) that match, newest first.

    Raises BadPattern; NotFound or NotAllowed for the base; Timeout when the tree is too large for `seconds`.
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
    """The folder each route begins in: the base and the plain names that lead the pattern."""
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
    """What may match in one folder: a set of routes that have come this far."""

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
        self.links = bool(self.folders or self._onward)  # whether a link to a folder could matter here
        self.plain = not self.links and self._deep == frozenset(routes)

    def through(self, name: str, *, link: bool) -> frozenset[PatternRoute]:
        """The routes that go on in the folder of this name."""
        named = frozenset(rest for expression, rest in self._onward if expression.fullmatch(name))
        if link:
            return named
        return named | self._deep if named else self._deep


class _Walk:
    """One search; `found` maps paths to modification times. What may not be seen is passed over."""

    def __init__(self, files: Files, seconds: float) -> None:
        self.found: dict[str, int] = {}
        self._files = files
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._steps: dict[frozenset[PatternRoute], _Step] = {}
        self._waiting: list[tuple[CheckedPath, _Step]] = []
        self._protected = files.paths.protected_identities()
        # A hidden folder is never entered, so all that can still be met is what is hidden in the folder itself.
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
        """Search an opened folder and those beneath, and close it. Both spellings of it end with a slash."""
        try:
            self._check_deadline()
            if self._protected and _identity(folder) in self._protected:
                return  # a hidden folder under another spelling, or a second mount of it
            plain = step.plain  # every folder is searched for the same, and none is itself a match
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
        """Note the files that match in a folder; tells the names of the folders in it."""
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
        """Note a folder if it matches itself; tells what to look for in it, if anything."""
        if step.folders and step.folders.fullmatch(name):
            with contextlib.suppress(ToolError):
                self.found[place.path] = self._files.status(place.path).st_mtime_ns
        routes = step.through(name, link=link)
        return self._step(routes) if routes else None

    def _follow(self, path: str, name: str, step: _Step) -> None:
        """A link counts as what it leads to, if that may be seen."""
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
    """A folder that is gone or closed to us is left out; a system at its limits must not look like an empty one."""
    try:
        yield
    except OSError as error:
        _pass_over(error)


def _pass_over(error: OSError) -> None:
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise error


def _without_depth(route: PatternRoute) -> Iterable[PatternRoute]:
    """The route, and what follows its leading `**`, which may stand for no folder at all."""
    yield route
    while route.parts[0].expression is None and len(route.parts) > 1:
        route = PatternRoute(False, route.parts[1:], route.folders)
        yield route


def _names(parts: Iterable[PatternPart]) -> re.Pattern[str] | None:
    expressions = sorted({part.expression or ".*" for part in parts})
    return combined(expressions) if expressions else None


def _endings(parts: Iterable[PatternPart]) -> tuple[str, ...]:
    """The endings that decide whether a name fits, where that is all the patterns ask (`*.py`); else nothing.

    A third faster than the expression, and what most searches ask for.
    """
    endings = []
    for part in parts:
        rest = (part.expression or ".*").removeprefix(".*")
        ending = re.sub(r"\\(.)", r"\1", rest)
        if not (part.expression or ".*").startswith(".*") or re.escape(ending) != rest:
            return ()
        endings.append(ending)
    return tuple(endings)
