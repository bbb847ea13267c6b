"""Paths as the rules of the policy see them: every file that a path in a call may stand for.

File tools normalise a path as text before they follow links (`machine.files.allowed_paths.absolute`), and so does the
policy. A tool of a plug-in may leave the path to the kernel, which reads it differently where it passes through a link
of a process (`/proc/self/cwd/../x`); such a path has both readings, and no `allow` fits it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Final

import msgspec

from farhand.gateway.workspace.workspace import clean
from farhand.machine.files.allowed_paths import LONGEST, absolute
from farhand.machine.search.patterns import BadPattern, PatternRoute
from farhand.machine.search.patterns import parse as parse_pattern
from farhand.protocol.errors import ToolError
from farhand.protocol.names import NATIVE
from farhand.protocol.version import MAX_NODE_ID_LENGTH
from farhand.store.objects.base import AGENTS

# One reading of a path in its usual spellings. An empty one fits no pattern, so no `allow` that needs all to fit.
Reading = tuple[str, ...]
FITS_NOTHING: Final[Reading] = ()
# In the id of a node, which may be followed by a path.
MOST_COLONS: Final = 16
# Steps to compare the pattern of a search with the pattern of a rule.
MOST_COMPARED: Final = 200_000
_PROCESS_LINK: Final = re.compile(
    r"/(?:proc/(?:self|thread-self|\d+)(?:/task/\d+)?/(?:cwd|root|exe|fd|map_files)|dev/(?:fd|stdin|stdout|stderr))"
)


class Reached(msgspec.Struct, frozen=True):
    """A node that a call of the gateway's own tools names in its arguments."""

    node_id: str
    tags: tuple[str, ...] = ()
    # Where relative paths begin on it.
    workspace: str | None = None


def machine_path(text: str, workspace: str | None, *, local: bool = False) -> list[Reading]:
    """Return the readings of a path on a machine: in full, and from the workspace for a path that lies in it.

    With `local`, also where its links lead on this machine; links on a node are known to the node alone.
    """
    if not text:
        return [(text,)]
    whole = absolute(workspace or "", text)
    found = [_spellings(whole, workspace)]
    kernel = _kernel_reading(os.path.join(workspace or "", text), workspace)  # noqa: PTH118
    if kernel is not None:
        found += [_spellings(kernel, workspace), FITS_NOTHING]
    if local and (real := _real(whole, workspace)) is not None:
        found.append(_spellings(real, workspace))
    return found


def workspace_path(text: str, *, stops: bool) -> list[Reading]:
    """Return the readings of a path in the agents' workspaces, which begins at the root with or without a slash.

    `agents/ID/x` is the file of one agent. A rule that stops `x` stops it for every agent; an `allow` does not.
    """
    try:
        parts = clean(text).split("/")
    except ToolError:
        return [(text,)]  # it is refused anyway
    paths = ["/".join(parts)]
    if stops and parts[0] == AGENTS and len(parts) > 2:
        paths.append("/".join(parts[2:]))
    return [(path, f"/{path}") for path in paths]


def native_path(text: str, reached: Iterable[Reached], *, stops: bool) -> list[Reading]:
    """Return the readings of a path in a call of the gateway's own tools: in the workspace, or an end of a transfer."""
    ends = list(_ends(text, reached, stops=stops))
    if not ends:
        return workspace_path(text, stops=stops)
    return [tuple(f"{machine}:{path}" for path in reading) for machine, reading in ends]


def paths_of_end(text: str, reached: Iterable[Reached]) -> list[Reading]:
    """Return the readings of an end of a transfer without the name of its machine, for rules that stop a `path`."""
    return [reading for _, reading in _ends(text, reached, stops=True)]


def _ends(text: str, reached: Iterable[Reached], *, stops: bool) -> Iterator[tuple[str, Reading]]:
    """The path of an end stands behind the name of a machine, which may contain colons."""
    workspaces = {one.node_id: one.workspace for one in reached}
    colons = [at for at, character in enumerate(text[: MAX_NODE_ID_LENGTH + 1]) if character == ":"]
    for at in colons[:MOST_COLONS]:
        machine, path = text[:at], text[at + 1 :]
        readings = (
            workspace_path(path, stops=stops) if machine == NATIVE else machine_path(path, workspaces.get(machine))
        )
        yield from ((machine, reading) for reading in readings)


def _spellings(whole: str, workspace: str | None) -> Reading:
    top = absolute("", workspace).rstrip("/") if workspace else ""
    return (whole, whole[len(top) + 1 :]) if top and whole.startswith(f"{top}/") else (whole,)


def _kernel_reading(text: str, workspace: str | None) -> str | None:
    """Return where a path through a link of a process leads, as far as that can be told; None for any other path.

    `/proc/PID/root` is the root; `/proc/PID/cwd` is taken for the workspace; other links remain as they are.
    """
    if not text.startswith("/"):
        return None
    parts: list[str] = []
    through = False
    for part in text.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
        if _PROCESS_LINK.fullmatch("/" + "/".join(parts[:6])):
            through = True
            if part in ("root", "cwd"):
                parts = [] if part == "root" else [one for one in (workspace or "").split("/") if one]
    return f"/{'/'.join(parts)}" if through else None


def _real(path: str, workspace: str | None) -> str | None:
    """Where the links of a path on this machine lead, in the spelling of the workspace if that is where."""
    if len(path) > LONGEST:
        return None
    try:
        real = os.path.realpath(path)
        top = None if workspace is None else os.path.realpath(workspace)
    except (OSError, ValueError):
        return None  # no tool may use it
    if workspace is None or top is None or (real != top and not real.startswith(f"{top}/")):
        return real
    return f"{workspace}{real[len(top) :]}"


def search_reaches(pattern: str, folder: str, workspace: str | None, rule: str) -> bool:
    """Return whether a search may find files outside its folder that fit a rule's glob; in doubt, True.

    A relative pattern finds files of the folder, which the rule is compared with by itself.
    """
    texts = {_as_glob(route, folder, workspace) for route in _outward(pattern)}
    rule = re.sub(r"\[[^]]*\]", "?", rule)
    if sum(map(len, texts)) * len(rule) > MOST_COMPARED:
        return True
    return any(fnmatchcase(text, rule) or _intersect(text, rule) for text in texts)


def leads_out(pattern: str) -> bool:
    """Return whether a search may find files outside its folder."""
    return bool(_outward(pattern))


def _outward(pattern: str) -> list[PatternRoute]:
    try:
        routes = parse_pattern(pattern)
    except BadPattern:
        return []  # the search fails
    return [route for route in routes if route.absolute or any(part.literal == ".." for part in route.parts)]


def _as_glob(route: PatternRoute, folder: str, workspace: str | None) -> str:
    """Return a glob, whose `*` crosses slashes, that fits all that a route does."""
    parts = ["*" if part.literal is None else re.sub(r"[*?\[]", "?", part.literal) for part in route.parts]
    base = "/" if route.absolute else absolute(workspace or "", folder)
    return absolute(base, "/".join(parts))


def _intersect(one: str, other: str) -> bool:
    """Return whether some text fits two globs of `*`, `?` and plain characters."""
    reachable = {0}
    for character in one:
        reachable = _after_stars(reachable, other)
        following: set[int] = set()
        for at in reachable:
            if character == "*":
                following.update(range(at, len(other) + 1))
            elif at < len(other):
                if other[at] == "*":
                    following.add(at)
                if other[at] in ("*", "?", character) or character == "?":
                    following.add(at + 1)
        reachable = following
    return len(other) in _after_stars(reachable, other)


def _after_stars(positions: set[int], glob: str) -> set[int]:
    found = set(positions)
    for at in range(len(glob)):
        if at in found and glob[at] == "*":
            found.add(at + 1)
    return found
