"""The sandbox that the settings describe."""

from __future__ import annotations

from pathlib import Path

from farhand.config import SandboxSection
from farhand.machine.host_commands import HostCommands
from farhand.machine.sandbox import Mount, Sandbox


def sandbox_of(section: SandboxSection, workspace: Path, home: Path) -> tuple[Sandbox | None, HostCommands | None]:
    """The sandbox of the settings and its way to the host, as far as they ask for them. Raises SandboxError."""
    if not section.enabled:
        return None, None
    mounts = [Mount(mount.host, mount.container or mount.host, mount.mode == "rw") for mount in section.mounts]
    sandbox = Sandbox(workspace, mounts=mounts, network=section.network == "host", user=section.user)
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
