"""Steering files: the files of a workspace that instruct its agent. Changing one amounts to instructing the agent.

The check is made where files are written, after links are resolved, so it applies to every tool and interface. Whether
a change is allowed depends on the caller and is passed as a context variable: the gate sets it for each call, the HTTP
guard for each request. It is off by default.
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

# Whether the current call may change steering files.
allowed: contextvars.ContextVar[bool] = contextvars.ContextVar("steering_allowed", default=False)


def _folded(name: str) -> str:
    """Return a name as the most tolerant file system compares it."""
    return unicodedata.normalize("NFKC", name).casefold().rstrip(". ")


_NAMES: Final = frozenset(_folded(name) for name in (*FILES, *FOLDERS))


def is_steering(relative: str) -> bool:
    """Return whether a path relative to an agent's workspace is a steering file, or below a steering folder."""
    first = next((part for part in relative.replace("\\", "/").split("/") if part not in ("", ".")), "")
    return _folded(first) in _NAMES


def check(relative: str, path: str) -> None:
    """Raise ForbiddenPath for a steering file that may not be changed now."""
    if not allowed.get() and is_steering(relative):
        raise steering_refusal(path)


def steering_refusal(path: str) -> ForbiddenPath:
    return ForbiddenPath(f"'{path[:200]}' {STEERING}")


class SteeringFiles:
    """The steering files of one gateway: those of each agent in `home`, and of workspaces elsewhere."""

    def __init__(self, home: Path, workspaces: Iterable[Path] = ()) -> None:
        self._agents = _parts(home / "agents")
        # Skills for all agents, and the copies of skills for tools.
        self._shared = [_parts(home / name) for name in ("skills", "skill-files")]
        self._workspaces = [_parts(workspace) for workspace in workspaces]

    def covers(self, real: str) -> bool:
        """Return whether a path is a steering file or in a steering folder; true if it changes concurrently."""
        try:
            parts = _parts(real)
        except OSError:  # a link in the path was replaced while it was read
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
        """Return whether a folder may contain steering files; true if it changes concurrently."""
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
    """Return whether a path is `root` or below it."""
    return parts[: len(root)] == root
