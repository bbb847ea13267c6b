"""Locations of skills on the gateway's machine, for the tools that open files there."""

from __future__ import annotations

import os
from pathlib import PurePosixPath

SKILLS = "skills"
BASE = "{baseDir}"


class SkillPaths:
    """`folder` holds copies of skills: `all/{name}` and `agents/{id}/{name}`. The workspace has its own in `skills`."""

    def __init__(self, workspace: str, folder: str) -> None:
        self._own = os.path.join(workspace, SKILLS)  # noqa: PTH118
        self._all = os.path.join(folder, "all")  # noqa: PTH118
        self._agents = os.path.join(folder, "agents")  # noqa: PTH118

    def locate(self, path: str) -> str:
        """Return `skills/{name}/…` of the workspace, or of the shared skills if the workspace has no such skill."""
        parts = PurePosixPath(path).parts
        if len(parts) < 2 or parts[0] != SKILLS or ".." in parts or "\0" in path:
            return path
        if os.path.lexists(os.path.join(self._own, parts[1])):  # noqa: PTH118
            return path
        elsewhere = os.path.join(self._all, *parts[1:])  # noqa: PTH118
        return elsewhere if os.path.exists(elsewhere) else path  # noqa: PTH110

    def base(self, path: str) -> str | None:
        """Return the folder of the skill that contains an absolute path, or None."""
        for top, depth in ((self._own, 1), (self._all, 1), (self._agents, 2)):
            if path.startswith(f"{top}/"):
                parts = path[len(top) + 1 :].split("/")
                return "/".join([top, *parts[:depth]]) if len(parts) > depth else None
        return None
