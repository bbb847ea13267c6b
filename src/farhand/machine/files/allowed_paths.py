"""The path check: which files tools may use, decided by the real file and never by how its path is spelled.

HTTP routes, the agent's tools, a node with `--root`, the workspace, transfers and undo all use `AllowedPaths`:

1. `normalise` makes a path absolute and removes alternative spellings (`//etc`, `/./etc`, `..`).
2. `check` follows every link except those in a protected folder and those of a process in /proc.
3. The real file must be in an allowed root and outside the protected folders. A protected folder is recognised by its
   path and by its identity (device and inode), so a second spelling does not help: upper case on a file system that
   ignores case, another Unicode form of a name, a bind mount.

The result is opened by `ConfinedRoot`, which follows no link, so a path that changes after the check fails to open.
A file with several names (hard links) is the same file under each of them; reads cannot tell which name was meant.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence

import msgspec

from farhand.machine.files.confined_root import ConfinedRoot
from farhand.machine.files.refused_paths import KERNEL_LINK, OUTSIDE, PROTECTED, UPWARD, ForbiddenPath
from farhand.protocol.errors import InvalidArgs

# The limit of Linux.
MOST_LINKS = 40

# The longest path that Linux accepts.
LONGEST = 4096
# The longest spelling of one, before `//`, `/./` and `..` are removed.
LONGEST_SPELLING = 4 * LONGEST

Identity = tuple[int, int]
Spelling = str | os.PathLike[str]


class CheckedPath(msgspec.Struct, frozen=True):
    """A path that passed the check: the caller's spelling, the real location, and the root that allows it."""

    path: str
    real: str
    root: ConfinedRoot


class AllowedPaths:
    """Allows everything below the roots (without roots: everything) except what is hidden. Thread-safe.

    Relative paths start at the workspace; `~` is an ordinary character. `.` and `..` are removed from the text before
    links are followed; with `upward=False`, a path with a part `..` is refused instead. `exposed` folders are allowed
    although they are hidden. Changing roots are passed as a function.
    """

    def __init__(
        self,
        workspace: Spelling,
        *,
        roots: Iterable[ConfinedRoot] | Callable[[], Sequence[ConfinedRoot]] = (),
        hidden: Iterable[Spelling] = (),
        exposed: Iterable[Spelling] = (),
        upward: bool = True,
    ) -> None:
        self.workspace = absolute("", os.path.abspath(workspace))  # noqa: PTH100 (a spelling, not a file)
        fixed = () if callable(roots) else tuple(roots) or (ConfinedRoot("/"),)
        self._roots = roots if callable(roots) else lambda: fixed
        self.hidden = _outermost(os.path.realpath(path) for path in hidden)
        self._hidden = tuple(path.rstrip("/") + "/" for path in self.hidden)
        self._exposed_paths = tuple(os.path.realpath(path) for path in exposed)
        self._exposed = tuple(path.rstrip("/") + "/" for path in self._exposed_paths)
        self._upward = upward

    @property
    def roots(self) -> Sequence[ConfinedRoot]:
        return self._roots()

    def normalise(self, path: str) -> str:
        """Return the absolute path without following links.

        Raises InvalidArgs for text that cannot name a file, and ForbiddenPath.
        """
        if len(path) > LONGEST_SPELLING:
            raise InvalidArgs(f"File name too long: a path has at most {LONGEST} characters, not {len(path)}")
        check_path_text("path", path)
        if not self._upward and _UPWARD.search(path):
            raise ForbiddenPath(f"'{display(path)}' {UPWARD}")
        return absolute(self.workspace, path)

    def check(self, path: str) -> CheckedPath:
        """Return the real location of a path, which need not exist.

        Raises InvalidArgs for text that cannot name a file, ForbiddenPath, and OSError for circular links.
        """
        spelled = self.normalise(path)
        roots = self.roots
        if self.is_protected(spelled):
            raise ForbiddenPath(f"'{display(spelled)}' {PROTECTED}")
        try:
            real, identities = self._follow(spelled)
        except OSError:
            if any(root.contains(spelled) for root in roots):
                raise
            raise ForbiddenPath(_outside(spelled, roots)) from None
        if self.is_protected(real, identities):
            raise ForbiddenPath(f"'{display(spelled)}' {PROTECTED}")
        allowing = [root for root in roots if root.contains(real)]
        if not allowing:
            raise ForbiddenPath(_outside(spelled, roots))
        # Of several, a read-only one decides, else the innermost.
        return CheckedPath(spelled, real, max(allowing, key=lambda root: (not root.writable, len(root.path))))

    def is_protected(self, real: str, identities: Sequence[Identity | None] = ()) -> bool:
        """Return whether a real path is hidden, or below something that is, and not exposed.

        `identities` are those of the path and its parent folders, outermost first, as far as they exist.
        """
        # With a trailing slash, a path starts with every folder it is in, and with itself.
        path = real + "/"
        if path.startswith(self._hidden):
            return not path.startswith(self._exposed)
        if not identities or not self._hidden:
            return False
        hidden, exposed = self.protected_identities(), _identities(self._exposed_paths)
        for identity in reversed(identities):
            if identity in exposed:
                return False
            if identity in hidden:
                return True
        return False

    def is_protected_status(self, status: os.stat_result) -> bool:
        """Return whether a file or folder is itself hidden, whatever its name."""
        return _identity(status) in self.protected_identities()

    def protected_identities(self) -> frozenset[Identity]:
        """Return the identities of hidden paths, for code that walks folders by descriptor."""
        return _identities(self.hidden)

    def _follow(self, spelled: str) -> tuple[str, list[Identity | None]]:
        """Return the path without links, and the identity of each part; None for a part that does not exist."""
        names: list[str] = []
        identities: list[Identity | None] = []
        rest = _parts(spelled)[::-1]
        links = 0
        while rest:
            name = rest.pop()
            if name == "..":  # in the target of a link
                del names[-1:], identities[-1:]
                continue
            names.append(name)
            path = "/" + "/".join(names)
            if len(path) > LONGEST:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), spelled)
            try:
                status = os.lstat(path)
            except OSError:
                identities.append(None)
                continue
            if not stat.S_ISLNK(status.st_mode):
                identities.append(_identity(status))
                continue
            if _OF_A_PROCESS.match(path):
                raise ForbiddenPath(f"'{display(spelled)}' {KERNEL_LINK}")
            if self.is_protected(path, identities):
                raise ForbiddenPath(f"'{display(spelled)}' {PROTECTED}")
            links += 1
            if links > MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), spelled)
            names.pop()
            try:
                target = os.readlink(path)  # noqa: PTH115
            except OSError:  # replaced in the meantime: look again, up to the limit of links
                rest.append(name)
                continue
            if target.startswith("/"):
                names.clear()
                identities.clear()
            rest += _parts(target)[::-1]
        return "/" + "/".join(names), identities


# The separator of paths, including URL-encoded and Windows forms.
_SLASH = r"(?:[/\\]|%(?:25)*(?:2f|5c))"
_UPWARD = re.compile(rf"(?:^|{_SLASH})(?:\.|%(?:25)*2e){{2}}(?:$|{_SLASH})", re.IGNORECASE)
# `/proc/PID/root`, `cwd`, `exe`, `fd/N`, …: their targets have no path, or one in another mount namespace.
_OF_A_PROCESS = re.compile(r"/proc/[0-9]+/")


def display(path: str) -> str:
    """Return a path as valid text: bytes that are not UTF-8 become U+FFFD."""
    return path if path.isascii() else os.fsencode(path).decode("utf-8", "replace")


def check_path_text(parameter: str, text: str) -> None:
    """Raise InvalidArgs naming the parameter if the text cannot be passed to the system."""
    if "\0" in text:
        raise InvalidArgs(f"parameter '{parameter}': {text!r} contains a NUL character; remove it")
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise InvalidArgs(f"parameter '{parameter}': not valid Unicode at character {error.start}") from None


def absolute(folder: str, path: str) -> str:
    """Return the absolute form of a path relative to `folder`, without following links.

    File tools and the policy both interpret paths this way.
    """
    normal = os.path.normpath(os.path.join(folder, path))  # noqa: PTH118
    # POSIX allows a leading `//` to be special, so `normpath` keeps it; here it means `/`.
    return normal[1:] if normal.startswith("//") else normal


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the paths that are not below another of them."""
    kept: list[str] = []
    for path in sorted(set(paths)):
        if not any(path.startswith(above.rstrip("/") + "/") for above in kept):
            kept.append(path)
    return tuple(kept)


def _outside(spelled: str, roots: Sequence[ConfinedRoot]) -> str:
    return f"'{display(spelled)}' {OUTSIDE} {', '.join(root.path for root in roots)}"


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


def _identities(paths: Iterable[str]) -> frozenset[Identity]:
    found = set()
    for path in paths:
        try:
            found.add(_identity(os.lstat(path)))
        except OSError:
            continue
    return frozenset(found)
