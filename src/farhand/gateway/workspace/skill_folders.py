"""Copy skills from objects to folders that the file and shell tools on the gateway's machine can open.

`{folder}/all/{name}` is a skill for all agents, `{folder}/agents/{id}/{name}` an agent's own copy of a skill. The tools
may only read the folders; the objects are authoritative, and a copy that differs is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Final

from farhand.protocol.errors import Failed, NotFound
from farhand.store.objects.base import AGENTS, SKILLS, ObjectInfo, Objects, pages

SKILL_FOLDERS: Final = "skill-files"
SKILL_FILE: Final = "SKILL.md"
ALL: Final = "all"
MOST_FILES: Final = 2000
LARGEST: Final = 256 * 1024 * 1024
# Objects have no mode: scripts and programs are detected by their first bytes.
_RUNNABLE: Final = (b"#!", b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")

# An object's etag, and the size and modification time of its copy.
Copied = tuple[str, int, int]


class SkillFolders:
    """Keep the copies in `folder` up to date. Only one task works on a skill at a time."""

    def __init__(self, objects: Objects, folder: Path) -> None:
        self._objects = objects
        self._folder = folder
        self._copied: dict[Path, dict[str, Copied]] = {}
        self._locks: defaultdict[Path, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def copy(self, name: str, agent: str | None = None) -> Path:
        """Update the folder of a skill and return it: the one for all agents, or the one with the agent's own files.

        Raises ToolError if it cannot be copied, NotFound if the skill does not exist.
        """
        target = self._folder / ALL / name if agent is None else self._folder / AGENTS / agent / name
        async with self._locks[target]:
            wanted = await self._listed(f"{SKILLS}/{name}/")
            if agent is not None:
                wanted |= await self._listed(f"{AGENTS}/{agent}/{SKILLS}/{name}/")
            try:
                await asyncio.to_thread(_clear, target, wanted.keys())
                if not wanted:
                    raise NotFound(f"there is no skill {name!r}")
                known = self._copied.setdefault(target, {})
                for inner in known.keys() - wanted.keys():
                    del known[inner]
                for inner, info in wanted.items():
                    if not await asyncio.to_thread(_is_copied, target / inner, info, known.get(inner)):
                        known[inner] = await self._fetch(info, target / inner)
            except OSError as error:
                raise Failed(f"the skill {name!r} could not be copied to {target}: {error.strerror or error}") from None
        return target

    async def prune(self, agent: str, names: Collection[str]) -> None:
        """Remove the copies of skills that no longer exist; `names` are those that the agent can see."""
        for folder in (self._folder / ALL, self._folder / AGENTS / agent):
            for name in await asyncio.to_thread(_others, folder, names):
                async with self._locks[folder / name]:
                    await asyncio.to_thread(_clear, folder / name, ())

    async def _listed(self, prefix: str) -> dict[str, ObjectInfo]:
        found: dict[str, ObjectInfo] = {}
        async for page in pages(self._objects, prefix):
            found |= {info.key.removeprefix(prefix): info for info in page.objects}
            if len(found) > MOST_FILES or sum(info.size for info in found.values()) > LARGEST:
                raise Failed(f"a skill has at most {MOST_FILES} files and {LARGEST // 1024**2} MiB")
        return found

    async def _fetch(self, info: ObjectInfo, target: Path) -> Copied:
        reader = await self._objects.open_read(info.key)
        beside = target.parent / f".farhand-{secrets.token_hex(8)}.tmp"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            size, runnable = 0, False
            with beside.open("xb") as file:
                while piece := await reader.read():
                    runnable = runnable or (size == 0 and piece.startswith(_RUNNABLE))
                    size += len(piece)
                    if size > LARGEST:
                        raise Failed(f"{info.key} has more than {LARGEST // 1024**2} MiB")
                    await asyncio.to_thread(file.write, piece)
            return await asyncio.to_thread(_put_in_place, beside, target, reader.info.etag, runnable)
        finally:
            beside.unlink(missing_ok=True)
            await reader.close()


def _put_in_place(beside: Path, target: Path, etag: str, runnable: bool) -> Copied:
    beside.chmod(0o555 if runnable else 0o444)
    beside.replace(target)
    status = target.stat()
    return etag, status.st_size, status.st_mtime_ns


def _others(folder: Path, names: Collection[str]) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(folder) if entry.name not in names]
    except FileNotFoundError:
        return []


def _is_copied(path: Path, info: ObjectInfo, known: Copied | None) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return known == (info.etag, status.st_size, status.st_mtime_ns)


def _clear(folder: Path, wanted: Collection[str]) -> None:
    """Remove everything that is not part of the skill: old files, links, and folders left empty."""
    names = {str(folder / inner) for inner in wanted}
    if folder.is_symlink():
        folder.unlink()
    for top, folders, files in os.walk(folder, topdown=False):
        for name in (*files, *folders):
            path = Path(top) / name
            if path.is_symlink() or (name in files and str(path) not in names):
                path.unlink()
            elif name in folders:
                with contextlib.suppress(OSError):  # not empty
                    path.rmdir()
    if not names:
        with contextlib.suppress(OSError):
            folder.rmdir()
