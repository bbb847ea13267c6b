"""Commands under Landlock and namespaces, where bubblewrap is not installed.

A command sees the workspace, its mounts, the system's programs and an empty /tmp. It sees no other processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from farhand.machine.files import steering_files
from farhand.machine.jobs.process_tree import COOKIE
from farhand.machine.sandbox.confinement import Mount, SandboxError, Steering, probe, writable_entries
from farhand.machine.sandbox.launch import EGRESS_SOCKET, LAUNCHER, Launch, interpreter_folder
from farhand.machine.sandbox.launcher import landlock_version
from farhand.machine.sandbox.system_view import ETC, contains, variables
from farhand.protocol.errors import Failed, NotAllowed

_READABLE: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/sys/devices/system/cpu")
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts")
_TEMPORARY: Final = "/tmp"  # noqa: S108 (the sandbox's own)


class LandlockSandbox:
    """Confines commands to a workspace and mounts, which are seen where they are on the machine."""

    def __init__(
        self,
        workspace: str | os.PathLike[str],
        *,
        mounts: Sequence[Mount] = (),
        network: bool = False,
        user: tuple[int, int] | None = None,
        steering: Steering = Steering.NONE,
        hidden: Sequence[str] = (),
        limits: Mapping[str, int] | None = None,
        egress: str | None = None,
        temporary: int = 0,
    ) -> None:
        """The parameters are those of `bubblewrap.Sandbox`.

        Raises SandboxError for a mount elsewhere than on its own path.
        """
        self.workspace = os.path.realpath(workspace)
        self.mounts = tuple(mounts)
        for mount in self.mounts:
            if os.path.realpath(mount.host) != mount.container:
                raise SandboxError(
                    f"mount {mount.host!r} on {mount.container!r}: only bubblewrap can show a folder elsewhere than on "
                    "its own path; leave container out, or install bubblewrap"
                )
        self._steering = steering
        self._egress = egress
        self._launch = Launch(
            namespaces=True,
            network=network,
            user=None if user is None or user[0] == os.geteuid() else user,
            hidden=[real for path in hidden if os.path.isdir(real := os.path.realpath(path))],
            temporary=temporary,
            limits=limits or {},
            egress=egress and f"{egress}/{EGRESS_SOCKET}",
        )
        self._works = False

    def check(self) -> None:
        """Test the sandbox with a command that does nothing. Raises Failed with the reason if it does not work.

        A successful test is not repeated.
        """
        if self._works:
            return
        if landlock_version() < 1:
            raise Failed("sandbox: the kernel of this machine has no Landlock; the command did not run")
        for mount in self.mounts:
            if not os.path.exists(mount.host):
                raise Failed(f"sandbox: the mount {mount.host!r} does not exist; the command did not run")
        probe(self.words(self.workspace, may_steer=True))
        self._works = True

    def words(
        self,
        workdir: str,
        environment: Mapping[str, str] | None = None,
        *,
        may_steer: bool | None = None,
        inherit: bool = False,
        expected: Sequence[tuple[str, int, int]] = (),
    ) -> list[str]:
        """Return the prefix of a shell command that runs in `workdir`. Raises NotAllowed for a folder outside."""
        real = os.path.realpath(workdir)
        lent = [self.workspace, *(mount.container for mount in self.mounts)]
        if not any(contains(folder, real) for folder in lent):
            raise NotAllowed(f"working directory {workdir!r} is not in the sandbox; use {' or '.join(lent)}")
        if may_steer is None:
            may_steer = steering_files.allowed.get()
        top_level = not may_steer and self._steering is Steering.OF_CALLER
        home = _TEMPORARY if top_level else self.workspace
        words = [
            "/usr/bin/env",
            *(("-u", COOKIE) if inherit else ("-i",)),
            "-C",
            real,
            *(f"{name}={value}" for name, value in variables(home, {"PWD": real}).items()),
        ]
        # Set inside: a variable such as `LD_PRELOAD` would run code in the launcher, before it confines itself.
        inside = [f"{name}={value}" for name, value in (environment or {}).items()]
        inside = ["/usr/bin/env", "--", *inside] if inside else []
        launch = msgspec.structs.replace(self._launch, rules=self._rules(top_level), expected=expected)
        return [*words, *launch.words(str(LAUNCHER)), *inside, "/bin/sh", "-c"]

    def _rules(self, top_level: bool) -> dict[str, list[str]]:
        """Return the paths that a command may read, write and use as devices.

        `top_level`: in the workspace, only what is in it can be changed, apart from steering files.
        """
        own = writable_entries(self.workspace, self.mounts) if top_level else [self.workspace]
        etc = [f"/etc/{name}" for name in ETC]
        shown = [mount.container for mount in self.mounts if not mount.writable]
        shown += [self._egress] if self._egress else []
        return {
            "read": [*_READABLE, interpreter_folder(), *etc, *([self.workspace] if top_level else []), *shown],
            "write": [*own, *(mount.container for mount in self.mounts if mount.writable), _TEMPORARY],
            "device": [f"/dev/{name}" for name in _DEVICES],
        }
