"""Paths as the rules of the policy see them: every file that a path in a call may stand for.

File tools normalise a path as text before they follow links (`machine.files.allowed_paths.absolute`), and so does the
policy. A tool of a plug-in may leave the path to the kernel, which reads it differently where it passes through a link
of a process (`/proc/self/cwd/../x`); such a path has both readings, and no `allow` fits it.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from farhand.gateway.workspace.workspace import clean
from farhand.machine.files.allowed_paths import LONGEST, absolute
from farhand.machine.search.overlap import literal_glob, overlap, route_glob
from farhand.machine.search.patterns import BadPattern
from farhand.machine.search.patterns import parse as parse_pattern
from farhand.protocol.errors import ToolError
from farhand.protocol.names import NATIVE
from farhand.protocol.version import MAX_NODE_ID_LENGTH
from farhand.store.objects.base import AGENTS

# One reading of a path in its usual spellings. An empty one matches no pattern, so no `allow` that needs all to match.
Reading = tuple[str, ...]
FITS_NOTHING: Final[Reading] = ()
# In the id of a node, which may be followed by a path.
MOST_COLONS: Final = 16
# Characters of the globs of one reach that are compared with a rule.
MOST_COMPARED: Final = 20_000
_PROCESS_LINK: Final = re.compile(
    r"/(?:proc/(?:self|thread-self|\d+)(?:/task/\d+)?/(?:cwd|root|exe|fd|map_files)|dev/(?:fd|stdin|stdout|stderr))"
)
_LINK_NAMES: Final = frozenset({"cwd", "root", "exe", "fd", "map_files", "stdin", "stdout", "stderr"})


class Reached(msgspec.Struct, frozen=True):
    """A node that a call of the gateway's own tools names in its arguments."""

    node_id: str
    tags: tuple[str, ...] = ()
    # Where relative paths begin on it.
    workspace: str | None = None


class Owner(msgspec.Struct, frozen=True):
    """The agent in whose workspace a call works; `agents` is the folder of the workspaces, where it is known."""

    agent: str
    agents: str | None = None

    def spellings(self, path: str) -> Reading:
        """Return a path of the workspace as one of all workspaces, and in full."""
        inner = f"{self.agent}/{path.lstrip('/')}"
        full = () if self.agents is None else (f"{absolute('', self.agents).rstrip('/')}/{inner}",)
        return (f"{AGENTS}/{inner}", f"/{AGENTS}/{inner}", *full)

    def reach(self, inner: Reach) -> Reach:
        """Return what is reached in the workspace under all of its names."""
        named = literal_glob(self.agent), None if self.agents is None else literal_glob(self.agents)
        found = (one for glob in inner.globs for one in Owner(*named).spellings(glob.removeprefix(RELATIVE)))
        return Reach.of([*inner.globs, *found])


class Reach(msgspec.Struct, frozen=True):
    """The paths that a call may read or write below a folder, as globs whose `*` crosses slashes.

    A glob that begins with RELATIVE matches only paths that do not begin with a slash.
    """

    globs: tuple[str, ...] = ()

    @classmethod
    def of(cls, globs: Iterable[str]) -> Reach:
        found = tuple(dict.fromkeys(globs))
        return cls(found) if sum(map(len, found)) <= MOST_COMPARED else EVERYTHING

    def meets(self, pattern: str) -> bool:
        """Return whether a loose glob may match one of the paths."""
        return any(
            overlap(glob.removeprefix(RELATIVE), pattern)
            for glob in self.globs
            if not (glob.startswith(RELATIVE) and pattern.startswith("/"))
        )

    def folded(self, fold: Callable[[str], str]) -> Reach:
        return Reach(tuple(map(fold, self.globs)))


EVERYTHING: Final = Reach(("*",))
RELATIVE: Final = "\0"


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


def agent_path(readings: Iterable[Reading], agents: str) -> list[Reading]:
    """Return the readings that the paths of the gateway's machine have as paths of the agents' workspaces, for rules
    that stop; `agents` is the folder of the workspaces."""
    top = absolute("", agents).rstrip("/") + "/"
    inner = dict.fromkeys(path[len(top) :] for reading in readings for path in reading if path.startswith(top))
    return [one for path in inner for one in workspace_path(f"{AGENTS}/{path}", stops=True)]


def workspace_path(text: str, *, stops: bool, owner: Owner | None = None) -> list[Reading]:
    """Return the readings of a path in the agents' workspaces, which begins at the root with or without a slash.

    `agents/ID/x` is the file of one agent. A rule that stops `x` stops it for every agent; an `allow` does not.
    `owner`: the agent whose file it is, if that is not said by the path.
    """
    try:
        parts = clean(text).split("/")
    except ToolError:
        return [(text,)]  # it is refused anyway
    paths = ["/".join(parts)]
    if stops and parts[0] == AGENTS and len(parts) > 2:
        paths.append("/".join(parts[2:]))
    found: list[Reading] = [(path, f"/{path}") for path in paths]
    return found if owner is None else [*found, owner.spellings("/".join(parts))]


def native_path(text: str, reached: Iterable[Reached], *, stops: bool, owner: Owner | None = None) -> list[Reading]:
    """Return the readings of a path in a call of the gateway's own tools: in the workspace, or an end of a transfer."""
    ends = list(_ends(text, reached, stops=stops, owner=owner))
    if not ends:
        return workspace_path(text, stops=stops, owner=owner)
    return [tuple(f"{machine}:{path}" for path in reading) for machine, reading in ends]


def paths_of_end(text: str, reached: Iterable[Reached], owner: Owner | None = None) -> list[Reading]:
    """Return the readings of an end of a transfer without the name of its machine, for rules that stop a `path`."""
    return [reading for _, reading in _ends(text, reached, stops=True, owner=owner)]


def _ends(text: str, reached: Iterable[Reached], *, stops: bool, owner: Owner | None) -> Iterator[tuple[str, Reading]]:
    for machine, path, workspace in _machines(text, reached):
        readings = (
            workspace_path(path, stops=stops, owner=owner) if machine == NATIVE else machine_path(path, workspace)
        )
        yield from ((machine, reading) for reading in readings)


def _machines(text: str, reached: Iterable[Reached]) -> Iterator[tuple[str, str, str | None]]:
    """The path of an end stands behind the name of a machine, which may contain colons. Yield each way to read it: the
    machine, the path, and where relative paths begin."""
    workspaces = {one.node_id: one.workspace for one in reached}
    colons = [at for at, character in enumerate(text[: MAX_NODE_ID_LENGTH + 1]) if character == ":"]
    for at in colons[:MOST_COLONS]:
        machine = text[:at]
        yield machine, text[at + 1 :], workspaces.get(machine)


def _spellings(whole: str, workspace: str | None) -> Reading:
    top = absolute("", workspace).rstrip("/") if workspace else ""
    return (whole, whole[len(top) + 1 :]) if top and whole.startswith(f"{top}/") else (whole,)


def _kernel_reading(text: str, workspace: str | None) -> str | None:
    """Return where a path through a link of a process leads, as far as that is known; None for any other path.

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
        if part in _LINK_NAMES and _PROCESS_LINK.fullmatch("/" + "/".join(parts[:6])):
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


@functools.lru_cache(maxsize=64)
def found_by(pattern: str, folder: str, workspace: str | None, agents: str | None = None) -> Reach:
    """Return what a search for file names may find."""
    try:
        routes = parse_pattern(pattern)
    except BadPattern:
        return Reach()  # the search fails
    start = absolute(workspace or "", folder)
    if len(start) * len(routes) > MOST_COMPARED:
        return EVERYTHING
    found: list[str] = []
    for route in routes:
        base = "/" if route.absolute else start
        names = route_glob(route)
        if any(part.literal == ".." for part in route.parts):
            whole = absolute(base, names)  # as the search reads it
        else:
            whole = f"{literal_glob(base).rstrip('/')}/{names}"
        found += _globs(whole, workspace, agents)
    return Reach.of(found)


def below_path(
    text: str,
    workspace: str | None,
    *,
    local: bool = False,
    agents: str | None = None,
    names: str | None = None,
) -> Reach:
    """Return everything below a folder on a machine; `names` is a pattern for the names of the files that count."""
    if workspace is None and not text.startswith("/"):
        return EVERYTHING  # it may begin anywhere
    inner = _names_below(names)
    readings = machine_path(text or ".", workspace, local=local)
    wholes = dict.fromkeys(reading[0].rstrip("/") for reading in readings if reading)
    if len(inner) * sum(map(len, wholes)) > MOST_COMPARED:
        inner = ["*"]
    return Reach.of(
        glob
        for whole in wholes
        for name in inner
        for glob in _globs(f"{literal_glob(whole)}/{name}", workspace, agents)
    )


def at_path(text: str) -> Reach:
    """Return a file of the agent's workspace."""
    return Reach.of(literal_glob(path) for reading in workspace_path(text, stops=True) for path in reading)


def at_or_below(text: str, workspace: str | None) -> Reach:
    """Return a file or folder of the agent's workspace, and everything below it. `workspace`: its folder, if known."""
    readings = [*workspace_path(text, stops=True), *(machine_path(text, workspace, local=True) if workspace else ())]
    inner = below_path(text, workspace, local=True) if workspace else below_workspace_path(text)
    return Reach.of([*(literal_glob(path) for reading in readings for path in reading), *inner.globs])


def below_workspace_path(text: str) -> Reach:
    """Return everything below a folder of the agents' workspaces."""
    readings = workspace_path(text, stops=True)
    folders = [path.strip("/") for reading in readings for path in reading[:1]]
    if "" in folders or any(len(folder.split("/")) == 2 and folder.startswith(f"{AGENTS}/") for folder in folders):
        return EVERYTHING
    return Reach.of(glob for folder in folders for glob in (f"{literal_glob(folder)}/*", f"/{literal_glob(folder)}/*"))


def below_end(text: str, reached: Iterable[Reached], owner: Owner) -> tuple[Reach, Reach]:
    """Return everything below an end of a transfer: with the name of its machine, and without."""
    named: list[str] = []
    bare: list[str] = []
    for machine, path, workspace in _machines(text, reached):
        reach = owner.reach(below_workspace_path(path)) if machine == NATIVE else below_path(path, workspace)
        named += [f"{literal_glob(machine)}:{glob.removeprefix(RELATIVE)}" for glob in reach.globs]
        bare += reach.globs
    return Reach.of(named), Reach.of(bare)


@functools.lru_cache(maxsize=64)
def leads_out(pattern: str) -> bool:
    """Return whether a search may find files outside its folder."""
    try:
        routes = parse_pattern(pattern)
    except BadPattern:
        return False  # the search fails
    return any(route.absolute or any(part.literal == ".." for part in route.parts) for route in routes)


def _globs(whole: str, workspace: str | None, agents: str | None) -> Iterator[str]:
    """Yield the spellings of a glob of whole paths: in full, and from a workspace where it may lie in one."""
    yield whole
    for folder in (workspace, agents):
        top = absolute("", folder).rstrip("/") if folder else ""
        if not top:
            continue
        if whole.startswith(f"{top}/"):
            inner = whole[len(top) + 1 :]
            yield RELATIVE + (inner if folder is workspace else f"{AGENTS}/{inner}")
            if folder is agents:
                yield RELATIVE + (inner.partition("/")[2] or "*")
        elif overlap(whole, f"{literal_glob(top)}/*"):
            yield f"{RELATIVE}*"


def _names_below(pattern: str | None) -> list[str]:
    """Return globs of the paths below a folder whose names match a pattern; of all paths without one."""
    if not pattern or not pattern.strip():
        return ["*"]
    try:
        # Nodes of earlier versions leave out blanks at the end.
        routes = [route for one in (pattern, pattern.rstrip()) for route in parse_pattern(one)]
    except BadPattern:
        return ["*"]
    globs = {route_glob(route) for route in routes}
    return [glob for one in sorted(globs) for glob in (one, f"*/{one}")]
