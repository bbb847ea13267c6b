"""Locate an agent's memory: the local workspace, and the agent's objects."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from farhand.memory.memory import Sources
from farhand.memory.sources import FOLDER, MAIN_FILE, FolderSource, Source, is_memory_path
from farhand.protocol.errors import InvalidArgs
from farhand.protocol.names import MAIN_AGENT, validate_agent_id
from farhand.store.objects.base import AGENTS, Objects, pages
from farhand.store.objects.folder import FolderObjects


class ObjectsSource:
    """Read memory files from an agent's objects, in any object store."""

    def __init__(self, objects: Objects, agent: str, prefix: str) -> None:
        self._objects = objects
        self._root = f"{AGENTS}/{agent}/"
        self.name = f"objects:{self._root}"
        self.prefix = prefix

    async def listing(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        main = await self._objects.head(self._root + MAIN_FILE)
        if main is not None:
            found[MAIN_FILE] = main.etag
        async for page in pages(self._objects, f"{self._root}{FOLDER}/", delimiter=True):
            for info in page.objects:
                path = info.key.removeprefix(self._root)
                if is_memory_path(path):
                    found[path] = info.etag
        return found

    async def read(self, path: str) -> bytes:
        _, data = await self._objects.get(self._root + path)
        return data

    def close(self) -> None:
        """Do nothing: no resources are held."""


def memory_sources(home: Path, workspace: Path, objects: Objects) -> Sources:
    """Return the memory sources of each agent.

    The local workspace comes first and uses plain paths; objects use their keys, unless they are the only source. The
    default workspace is the main agent's folder and is not a source for other agents.
    """
    folder = isinstance(objects, FolderObjects)
    local = os.path.realpath(workspace)
    mains = os.path.realpath(home / AGENTS / MAIN_AGENT)

    def own(agent: str, prefix: str) -> Source:
        return FolderSource(home / AGENTS / agent, prefix) if folder else ObjectsSource(objects, agent, prefix)

    def sources(agent: str) -> Sequence[Source]:
        try:
            validate_agent_id(agent)
        except ValueError as error:
            raise InvalidArgs(str(error)) from None
        if folder and local == os.path.realpath(home / AGENTS / agent):
            return (FolderSource(workspace),)
        if local == mains and agent != MAIN_AGENT:
            return (own(agent, ""),)
        return (FolderSource(workspace), own(agent, f"{AGENTS}/{agent}/"))

    return sources
