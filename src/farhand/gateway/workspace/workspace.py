"""An agent's files: paths of its workspace over the objects, with the global skills showing through.

`skills/…` is virtual: the agent's own copy comes first, then the global one, and what is written is the agent's own.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import AsyncIterator
from typing import Final, Literal
from urllib.parse import unquote

import msgspec

from farhand.machine.files import steering_files as steering
from farhand.protocol.errors import InvalidArgs, NotAllowed
from farhand.protocol.names import MAIN_AGENT, validate_agent_id
from farhand.store.objects.base import AGENTS, MAX_KEY_BYTES, SKILLS, ObjectInfo, Objects

Source = Literal["workspace", "agent", "global"]

MOST_CHARACTERS: Final = 4 * MAX_KEY_BYTES
_SEPARATORS: Final = re.compile(r"[/\\]")


class Found(msgspec.Struct, frozen=True):
    """An object that a path of the workspace means, and whose copy it is."""

    info: ObjectInfo
    source: Source


class Folder(msgspec.Struct, frozen=True):
    """What lies at a path, named from the root of the workspace; directories end with `/`."""

    files: list[str]
    directories: list[str]


class Workspace:
    """The workspaces of all agents. Paths are checked here, once, for every door."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects

    def key(self, agent_id: str | None, path: str) -> str:
        """The key a file has, or would have, in the agent's own space. Raises InvalidArgs, NotAllowed."""
        relative = clean(path)
        if not relative or relative == SKILLS or path.rstrip().endswith("/"):
            raise InvalidArgs(f"path must reference a file, not {path[:200]!r}")
        return f"{_root(agent_id)}{relative}"

    def writable_key(self, agent_id: str | None, path: str) -> str:
        """The key of a file that is about to be written or deleted. Raises as `key`; NotAllowed for a steering file
        that may not be changed by this caller."""
        key = self.key(agent_id, path)
        steering.check(clean(path), path)
        return key

    async def find(self, agent_id: str | None, path: str) -> Found | None:
        """The object at a path: of two copies of a skill's file, the agent's own."""
        relative = clean(path)
        if not relative or relative == SKILLS:
            return None
        skill = relative.startswith(f"{SKILLS}/")
        info = await self.objects.head(f"{_root(agent_id)}{relative}")
        if info is not None:
            return Found(info, "agent" if skill else "workspace")
        if skill and (info := await self.objects.head(relative)) is not None:
            return Found(info, "global")
        return None

    async def folder(self, agent_id: str | None, path: str) -> Folder | None:
        """What lies beneath a path, or None when nothing does; the root is always there."""
        relative = clean(path)
        inner = f"{relative}/" if relative else ""
        root = _root(agent_id)
        files: set[str] = set()
        directories: set[str] = set()
        async for name in self._names(f"{root}{inner}"):
            (directories if name.endswith("/") else files).add(name.removeprefix(root))
        if relative == SKILLS or relative.startswith(f"{SKILLS}/"):
            async for name in self._names(inner):
                (directories if name.endswith("/") else files).add(name)
        elif not relative and (await self.objects.list(f"{SKILLS}/", limit=1)).objects:
            directories.add(f"{SKILLS}/")
        if relative and not files and not directories:
            return None
        return Folder(sorted(files), sorted(directories))

    async def _names(self, prefix: str) -> AsyncIterator[str]:
        after: str | None = None
        while True:
            page = await self.objects.list(prefix, delimiter=True, after=after)
            for info in page.objects:
                yield info.key
            for inner in page.prefixes:
                yield inner
            after = page.after
            if after is None:
                return


def clean(path: str) -> str:
    """A path without its outer slashes and needless parts. Raises NotAllowed for `..`, however it is spelled."""
    if len(path) > MOST_CHARACTERS:  # to look for `..` in it would take its time
        raise InvalidArgs(f"a path has at most {MOST_CHARACTERS} characters, and not {len(path)}")
    for part in _SEPARATORS.split(unicodedata.normalize("NFKC", _unquoted(path))):
        if "".join(character for character in part if unicodedata.category(character) != "Cf").strip() == "..":
            raise NotAllowed(f"Path traversal not allowed: {path[:200]!r}; paths begin at the workspace's root")
    return "/".join(part for part in path.strip().split("/") if part not in ("", "."))


def _unquoted(path: str) -> str:
    """`%2e%2e` and `%252e` as whoever decodes them later would see them."""
    for _ in range(4):
        following = unquote(path)
        if following == path:
            break
        path = following
    return path


def _root(agent_id: str | None) -> str:
    try:
        return f"{AGENTS}/{validate_agent_id(agent_id or MAIN_AGENT)}/"
    except ValueError as error:
        raise InvalidArgs(str(error)) from None
