"""The files that tools may use on the gateway's machine, and which part of a home they may use.

A path is relative to the workspace, or absolute in an allowed folder; it has no part `..`; and the real file lies in
an allowed folder and neither in a system folder nor among the gateway's own keys and records.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from farhand.machine.files.confined_root import ConfinedRoot
from farhand.machine.files.files import Files
from farhand.machine.files.steering_files import SteeringFiles
from farhand.machine.files.transaction_log import TRANSACTIONS_FOLDER
from farhand.machine.files.undo_log import UndoLog
from farhand.protocol.errors import NotFound

log = logging.getLogger(__name__)

# Folders that no tool on this machine may use, whatever the settings allow.
SYSTEM_FOLDERS = (
    "/bin",
    "/sbin",
    "/usr",
    "/lib",
    "/lib64",
    "/etc",
    "/proc",
    "/sys",
    "/dev",
    "/boot",
    "/run",
    "/var/run",
)

# The workspaces in the gateway's home. Everything else in it belongs to the gateway.
AGENTS_FOLDER = "agents"


def local_files(
    workspace: Path,
    home: Path,
    allowed: Callable[[], Sequence[str]],
    undo_log: UndoLog | None = None,
    *,
    readable: Path | None = None,
) -> Files:
    """Return the files of the workspace and of the currently `allowed` folders.

    `readable`: a read-only folder of the home.
    """
    also = [] if readable is None else [readable]
    return Files(
        workspace,
        roots=_Roots(workspace, allowed, tuple(ConfinedRoot(folder, writable=False) for folder in also)),
        hidden=[*SYSTEM_FOLDERS, home],
        exposed=exposed_in_home(home, workspace, *also),
        upward=False,
        transaction_folder=home.resolve() / TRANSACTIONS_FOLDER,
        undo_log=undo_log,
        steering=SteeringFiles(home, [workspace]),
    )


def exposed_in_home(home: Path, *folders: Path) -> list[Path]:
    """Return what tools may use in a home: the agents' workspaces, and those of the folders that lie in it."""
    own = home.resolve()
    return [own / AGENTS_FOLDER, *(folder for folder in folders if own in folder.resolve().parents)]


class _Roots:
    """The roots of the current settings."""

    def __init__(self, workspace: Path, allowed: Callable[[], Sequence[str]], readable: Sequence[ConfinedRoot]) -> None:
        self._fixed = [*readable, ConfinedRoot(workspace)]
        self._allowed = allowed
        self._known: tuple[Sequence[str], tuple[ConfinedRoot, ...]] | None = None
        self._missed: Sequence[str] = ()

    def __call__(self) -> Sequence[ConfinedRoot]:
        allowed = self._allowed()
        known = self._known
        if known is not None and known[0] is allowed:
            return known[1]
        roots, missing = list(self._fixed), []
        for path in allowed:
            try:
                roots.append(ConfinedRoot(Path(path).expanduser()))
            except (NotFound, RuntimeError):
                missing.append(path)
        if not missing:
            self._known = (allowed, tuple(roots))
        elif self._missed is not allowed:  # searched again at each use, but logged once
            self._missed = allowed
            log.warning("[tools] roots: %s not found; ignored", ", ".join(missing))
        return tuple(roots)
