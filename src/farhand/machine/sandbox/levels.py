"""The sandbox that an owner asks for, by the options of a node or by `[sandbox]`, and the best that a machine gives."""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from farhand.machine.files.confined_root import ConfinedRoot, closing_descriptor
from farhand.machine.sandbox.bubblewrap import Sandbox, identity_of
from farhand.machine.sandbox.confinement import Mount, SandboxError, Steering, changeable_folders
from farhand.machine.sandbox.egress import NetworkRule
from farhand.machine.sandbox.landlock import LandlockSandbox
from farhand.machine.sandbox.launch import Launch
from farhand.machine.sandbox.resources import AppliedLimits
from farhand.machine.sandbox.system_view import contains
from farhand.protocol.errors import Failed

BUBBLEWRAP: Final = "bubblewrap"
LANDLOCK: Final = "landlock"
NONE: Final = "none"
AUTO: Final = "auto"
LEVELS: Final = (AUTO, BUBBLEWRAP, LANDLOCK, NONE)
MOST_LINKS: Final = 40


class SandboxPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What confines commands."""

    # The folder of commands, and others that they see.
    workspace: str
    mounts: tuple[Mount, ...] = ()
    # One of `LEVELS` but `none`; `auto` takes the best that works.
    level: str = AUTO
    network: NetworkRule = NetworkRule("none")
    limits: AppliedLimits = AppliedLimits()
    # `uid`, `uid:gid` or a name; empty: that of this program.
    user: str = ""
    steering: Steering = Steering.NONE
    # Folders that appear empty, wherever they are in a mount.
    hidden: tuple[str, ...] = ()
    # The folder of the egress proxy's socket; needed for the networks `local` and `allow`.
    egress: str = ""
    # Trials count what they change themselves.
    is_trial: bool = False

    def of_trials(self, workspace: str, roots: Sequence[str] = ()) -> SandboxPlan:
        """Return the plan of trials in these folders: without network, as this program's user."""
        return msgspec.structs.replace(
            self,
            workspace=workspace,
            mounts=writable_mounts(roots, workspace),
            network=NetworkRule("none"),
            user="",
            steering=Steering.NONE,
            egress="",
            is_trial=True,
        )


class ChosenSandbox:
    """Confines commands as a plan says, by the best mechanism that works here, which `check` finds out."""

    def __init__(self, plan: SandboxPlan) -> None:
        """Raises SandboxError for a plan that no machine can follow."""
        self.plan = plan
        self.workspace = os.path.realpath(plan.workspace)
        self.mounts = plan.mounts
        # Bytes that one command may add to its folders; 0 for any.
        self.disk = plan.limits.disk
        # The level that works, and why it is not a better one.
        self.level = ""
        self.reason = ""
        self._identity = identity_of(plan.user)
        for mount in plan.mounts:
            if not mount.host.startswith("/") or not mount.container.startswith("/") or ".." in mount.container:
                raise SandboxError(f"sandbox mount {mount.host!r} on {mount.container!r}: both must be absolute paths")
        _refuse_movable(plan)
        # What a command may change, and where it sees it. A link in `[sandbox] mounts` is the owner's.
        shown = ((mount.host, mount.container) for mount in plan.mounts if mount.writable)
        self._lent = [(self.workspace, self.workspace), *(one for one in shown if os.path.realpath(one[0]) == one[0])]
        self._prefix: list[str] = []
        limits = plan.limits
        if limits.disk and not plan.is_trial:
            counted = outermost(changeable_folders(self.workspace, plan.mounts))
            self._prefix = Launch(cgroup=limits.cgroup, disk=limits.disk, counted=counted).words()
        elif limits.cgroup:
            self._prefix = Launch(cgroup=limits.cgroup).words()
        self._chosen: Sandbox | LandlockSandbox | None = None
        self._lock = threading.Lock()

    def check(self) -> None:
        """Choose the mechanism. Raises Failed with the reasons if none works; a choice is not repeated."""
        with self._lock:
            if self._chosen is not None:
                return
            self._identities()
            reasons = []
            for level in (BUBBLEWRAP, LANDLOCK) if self.plan.level == AUTO else (self.plan.level,):
                try:
                    found = self._made(level)
                    found.check()
                except (Failed, SandboxError) as error:
                    said = str(error).removeprefix("sandbox: ").removesuffix("; the command did not run")
                    reasons.append(f"{level}: {said}")
                    continue
                self.level, self.reason, self._chosen = level, "; ".join(reasons), found
                return
            raise Failed(f"sandbox: {'; '.join(reasons)}; the command did not run")

    def words(
        self,
        workdir: str,
        environment: Mapping[str, str] | None = None,
        *,
        may_steer: bool | None = None,
        inherit: bool = False,
    ) -> list[str]:
        """Return the prefix of a shell command that runs in `workdir`. Raises Failed, NotAllowed.

        `environment` is visible in the list of processes. With `inherit`, the command also gets the variables of the
        program that creates the sandbox, which are not.
        """
        self.check()
        assert self._chosen is not None
        # An overlay has another identity than the folder below it.
        expected = self._identities()
        expected = [] if self.plan.is_trial else expected
        inner = self._chosen.words(workdir, environment, may_steer=may_steer, inherit=inherit, expected=expected)
        return [*self._prefix, *inner]

    def _identities(self) -> list[tuple[str, int, int]]:
        """Return where commands see what they may change, with its device and inode. Raises Failed for a link.

        Nothing on the way was a link when this program started. Other programs may have replaced a folder since: a
        command of another node, for example, that was lent a folder above.
        """
        found = []
        for host, container in self._lent:
            folder, name = os.path.split(host)
            try:
                with closing_descriptor(ConfinedRoot("/").open_folder(folder)) as opened:
                    status = os.stat(name or ".", dir_fd=opened, follow_symlinks=False)
            except OSError as error:
                raise Failed(f"sandbox: {host}: {error.strerror}; the command did not run") from None
            if stat.S_ISLNK(status.st_mode):
                raise Failed(f"sandbox: {host} was replaced by a link; the command did not run")
            found.append((container, status.st_dev, status.st_ino))
        return found

    @property
    def levels(self) -> dict[str, str]:
        """Return how commands are confined, and how their resources are limited, for display."""
        found = {"sandbox": self.level, "limits": self.plan.limits.level}
        return {name: level for name, level in found.items() if level}

    def _made(self, level: str) -> Sandbox | LandlockSandbox:
        plan = self.plan
        same: dict[str, Any] = {
            "mounts": plan.mounts,
            "network": plan.network.kind == "host",
            "steering": plan.steering,
            "hidden": plan.hidden,
            "egress": plan.egress or None,
            "temporary": plan.limits.temporary,
        }
        if level == BUBBLEWRAP:
            return Sandbox(self.workspace, user=plan.user, launch=Launch(limits=plan.limits.each), **same)
        return LandlockSandbox(self.workspace, user=self._identity, limits=plan.limits.each, **same)


def sandbox_of_trials(plan: SandboxPlan) -> ChosenSandbox:
    """Return the sandbox of a plan of trials. Raises Failed if no machine can give it."""
    try:
        return ChosenSandbox(plan)
    except SandboxError as error:
        raise Failed(f"this machine has no sandbox for trials: {error}; the command did not run") from None


def outermost(folders: Sequence[str]) -> tuple[str, ...]:
    """Return the real paths of the folders that do not lie in another one."""
    found: list[str] = []
    for folder in sorted({os.path.realpath(folder) for folder in folders}):
        if not any(contains(outer, folder) for outer in found):
            found.append(folder)
    return tuple(found)


def writable_mounts(roots: Sequence[str], workspace: str | os.PathLike[str]) -> tuple[Mount, ...]:
    """Return the mounts of lent folders besides the workspace."""
    real = dict.fromkeys(os.path.realpath(root) for root in roots)
    return tuple(Mount(root, root, writable=True) for root in real if root != os.path.realpath(workspace))


def _refuse_movable(plan: SandboxPlan) -> None:
    """Raise SandboxError if a command could rename a hidden folder, or one above it, and so uncover what is in it; or
    if it could put a link in the place of a folder that later commands get.

    Directly in a folder that commands may write, the hidden one is a mount point of the sandbox, which cannot be
    renamed. A link to it could be.
    """
    for folder in (plan.workspace, *(mount.host for mount in plan.mounts)):
        outer = _leads_through(folder, changeable_folders(plan.workspace, plan.mounts), plan.hidden)
        if outer is not None:
            raise SandboxError(
                f"{folder} lies within {outer}, where a command could replace it by a link to any other folder; leave "
                "one of them out"
            )
    for hidden in map(Path, plan.hidden):
        for lent in (Path(folder).resolve() for folder in changeable_folders(plan.workspace, plan.mounts)):
            for place in places(hidden):
                depth = len(place.relative_to(lent).parts) if place.is_relative_to(lent) else 0
                if depth and not (depth == 1 and place == hidden.resolve()):
                    raise SandboxError(
                        f"the home {hidden} lies within {lent}, where a command could move it, and its limits would be "
                        "lost; use other folders, or choose a home elsewhere with --home"
                    )


def separate_folders(folders: Sequence[str], hidden: Sequence[str]) -> tuple[str, ...]:
    """Return folders that commands may change without those that lie in another one, which need no mount of their own.

    Raises SandboxError for a link in one of them that leads elsewhere: a command could replace it.
    """
    kept: list[str] = []
    for folder in dict.fromkeys(folders):
        outer = _leads_through(folder, folders, hidden)
        if outer is None:
            kept.append(folder)
        elif not contains(outer, os.path.realpath(folder)):
            raise SandboxError(
                f"{folder} leads out of {outer}, where a command could replace it by a link to any other folder; name "
                "the folder that it leads to"
            )
    return tuple(kept)


def _leads_through(folder: str, others: Sequence[str], hidden: Sequence[str]) -> str | None:
    """Return the real path of one of the others in which a folder, or a link on the way to it, lies; None if none.

    What is in a hidden folder does not count: commands cannot reach it.
    """
    covered = [Path(path).resolve() for path in hidden]
    way = [at for at in places(Path(folder)) if not any(at.is_relative_to(path) for path in covered)]
    for other in others:
        real = Path(other).resolve()
        if any(real in at.parents for at in way):
            return str(real)
    return None


def refuse_own_program(folders: Sequence[str]) -> None:
    """Raise SandboxError if this program lies in one of the folders: a command could change what it runs.

    That includes the folders in which Python looks for modules, and links on the way to them.
    """
    lent = [Path(folder).resolve() for folder in folders]
    parts = (sys.executable, sys.prefix, sys.base_prefix, __file__, *(entry for entry in sys.path if entry))
    for part in dict.fromkeys(parts):
        found = next((folder for folder in lent if any(at.is_relative_to(folder) for at in places(Path(part)))), None)
        if found is not None:
            raise SandboxError(
                f"Farhand itself would run from {part} in {found}, where a command could replace it and leave the "
                "sandbox; use another folder, or start a `farhand` that is installed elsewhere"
            )


def places(path: Path) -> Iterator[Path]:
    """Yield every folder and link through which a path leads, each at its own place."""
    at, left, links = Path("/"), list(reversed(path.absolute().parts[1:])), 0
    while left:
        name = left.pop()
        if name == "..":
            at = at.parent
            continue
        here = at / name
        yield here
        if here.is_symlink() and links < MOST_LINKS:
            links += 1
            target = here.readlink()
            at = Path("/") if target.is_absolute() else at
            left += [part for part in reversed(target.parts) if part != "/"]
        else:
            at = here
