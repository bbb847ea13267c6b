"""The sandbox that the settings describe."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from farhand.config import SandboxSection
from farhand.machine.files.files import Files
from farhand.machine.sandbox.bubblewrap import Sandbox, Steering
from farhand.machine.sandbox.confinement import CommandSandbox, Confinement, Mount, SandboxError
from farhand.machine.sandbox.host_commands import HostCommands
from farhand.machine.sandbox.lent import AUTO, lent_sandbox
from farhand.machine.sandbox.trials import Trials
from farhand.protocol.errors import Failed

log = logging.getLogger(__name__)


def sandbox_of(
    section: SandboxSection,
    workspace: Path,
    home: Path,
    readable: Sequence[Path] = (),
    steering: Steering = Steering.NONE,
) -> Confinement:
    """The sandbox of the settings and its way to the host, as far as they ask for them. Raises SandboxError.

    `readable`: folders that commands see in their place, to read. `steering`: whose steering files the workspace holds.
    """
    if not section.enabled:
        return None, None
    mounts = [Mount(str(folder), str(folder)) for folder in readable]
    mounts += [Mount(mount.host, mount.container or mount.host, mount.mode == "rw") for mount in section.mounts]
    sandbox = Sandbox(workspace, mounts=mounts, network=section.network == "host", user=section.user, steering=steering)
    if not section.host_commands:
        return sandbox, None
    return sandbox, HostCommands(
        names=frozenset(section.host_commands),
        host=section.ssh_host,
        port=section.ssh_port,
        user=section.ssh_user,
        key=section.ssh_key or str(home / "keys" / "host_ed25519"),
        known_hosts=section.ssh_known_hosts or str(home / "keys" / "known_hosts"),
    )


class LiveConfinement:
    """The sandbox as the settings describe it at the moment; a change holds for the next command."""

    def __init__(
        self,
        section: Callable[[], SandboxSection],
        workspace: Path,
        home: Path,
        *,
        readable: Sequence[Path] = (),
        steering: Steering = Steering.NONE,
    ) -> None:
        """Raises SandboxError for settings that cannot be followed. `readable`, `steering`: see `sandbox_of`."""
        self._steering = steering
        self._readable = tuple(folder.resolve() for folder in readable)
        self._section = section
        self._workspace = workspace
        self._home = home
        self._described = section()
        self._made: Confinement | SandboxError = sandbox_of(self._described, workspace, home, self._readable, steering)

    def __call__(self) -> Confinement:
        """Raises Failed while the settings describe a sandbox that cannot be: nothing runs lower in silence."""
        section = self._section()
        if section is not self._described:
            if section != self._described:
                self._change(section)
            self._described = section
        if isinstance(self._made, SandboxError):
            raise Failed(f"[sandbox] cannot be as it is set: {self._made}; the command did not run")
        return self._made

    def _change(self, section: SandboxSection) -> None:
        try:
            self._made = sandbox_of(section, self._workspace, self._home, self._readable, self._steering)
        except SandboxError as error:
            log.error("no command runs until [sandbox] is put right: %s", error)
            self._made = error
        else:
            log.warning("[sandbox] was changed: it is %s now", "on" if section.enabled else "off")


def open_trials(home: Path, workspace: Path, files: Files) -> Trials:
    """Return the trials of `exec`, in the workspace and without network."""
    made: list[CommandSandbox] = []

    def sandbox() -> CommandSandbox:
        if not made:
            level, found, reason = lent_sandbox(AUTO, (str(workspace),), workspace, hidden=(home,), network=False)
            if found is None:
                raise Failed(f"this machine has no sandbox for trials ({level}: {reason}); the command did not run")
            made.append(found)
        return made[0]

    return Trials(home / "trials", files, (str(workspace),), sandbox)
