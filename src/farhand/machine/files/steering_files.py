"""Steering files: what an agent is told by its workspace. Changing one is as much as making the agent act.

The check sits where files are written, after every link is resolved, so that it holds for each family of tools and for
each door. Whether a change is allowed is a matter of who asked for it, which travels as a context variable: the gate
sets it for each call, the HTTP guard for each request. It is off by default.
"""

from __future__ import annotations

import contextvars
import os
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from farhand.machine.files.refused_paths import STEERING, ForbiddenPath

FILES: Final = (
    "SOUL.md",
    "AGENTS.md",
    "IDENTITY.md",
    "USER.md",
    "MEMORY.md",
    "HEARTBEAT.md",
    "TOOLS.md",
    "BOOTSTRAP.md",
    "BOOT.md",
)
FOLDERS: Final = ("skills",)

# Whether what is being done may change steering files.
allowed: contextvars.ContextVar[bool] = contextvars.ContextVar("steering_allowed", default=False)


def _folded(name: str) -> str:
    """A name as the most tolerant file system compares it."""
    return unicodedata.normalize("NFKC", name).casefold().rstrip(". ")


_NAMES: Final = frozenset(_folded(name) for name in (*FILES, *FOLDERS))


def is_steering(relative: str) -> bool:
    """Whether a path relative to an agent's workspace names a steering file, or something beneath one."""
    first = next((part for part in relative.replace("\\", "/").split("/") if part not in ("", ".")), "")
    return _folded(first) in _NAMES


def check(relative: str, path: str) -> None:
    """Raises ForbiddenPath for a steering file that may not be changed now."""
    if not allowed.get() and is_steering(relative):
        raise steering_refusal(path)


def steering_refusal(path: str) -> ForbiddenPath:
    return ForbiddenPath(f"'{path[:200]}' {STEERING}")


class SteeringFiles:
    """The steering files of one gateway: those of each agent beneath `home`, and of workspaces elsewhere."""

    def __init__(self, home: Path, workspaces: Iterable[Path] = ()) -> None:
        self._agents = _parts(home / "agents")
        # Skills for all agents, and the copies of skills that tools read.
        self._shared = [_parts(home / name) for name in ("skills", "skill-files")]
        self._workspaces = [_parts(workspace) for workspace in workspaces]

    def covers(self, real: str) -> bool:
        """Whether a path leads to a steering file, or beneath a steering folder; also if it changes meanwhile."""
        try:
            parts = _parts(real)
        except OSError:  # a link on the way was replaced while it was read
            return True
        if any(_beneath(parts, folder) for folder in self._shared):
            return True
        depth = len(self._agents) + 1  # the agent's own folder
        if _beneath(parts, self._agents) and len(parts) > depth and parts[depth] in _NAMES:
            return True
        return any(
            _beneath(parts, workspace) and len(parts) > len(workspace) and parts[len(workspace)] in _NAMES
            for workspace in self._workspaces
        )

    def holds(self, real: str) -> bool:
        """Whether a path leads to a folder in which there may be steering files; also if it changes meanwhile."""
        try:
            parts = _parts(real)
        except OSError:
            return True
        if _beneath(parts, self._agents) and len(parts) <= len(self._agents) + 1:
            return True
        return any(_beneath(root, parts) for root in (self._agents, *self._shared, *self._workspaces))


def _parts(path: str | os.PathLike[str]) -> list[str]:
    return [_folded(part) for part in os.path.realpath(path).split("/") if part]


def _beneath(parts: list[str], root: list[str]) -> bool:
    """Whether a path is a folder or beneath it."""
    return parts[: len(root)] == root
