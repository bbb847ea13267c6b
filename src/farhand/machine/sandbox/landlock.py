"""Commands under Landlock and namespaces, where bubblewrap is not installed.

A command sees the lent folders, the system's programs and an empty /tmp. It sees no other processes.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from farhand.machine.jobs.process_tree import COOKIE
from farhand.machine.sandbox.confinement import Mount, SandboxError
from farhand.machine.sandbox.launch import EGRESS_SOCKET, LAUNCHER, Launch, interpreter_folder
from farhand.machine.sandbox.launcher import landlock_version
from farhand.protocol.errors import Failed, NotAllowed

_READABLE: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/sys/devices/system/cpu")
_ETC: Final = ("passwd", "group", "hosts", "resolv.conf", "nsswitch.conf", "ssl", "ca-certificates", "alternatives")
_ETC_MORE: Final = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "services", "protocols")
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts")
_KEPT_VARIABLES: Final = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TERM", "TZ")
_PROBE_SECONDS = 20.0


class LandlockSandbox:
    """Confines commands to a workspace and mounts, which are seen where they are on the machine."""

    def __init__(
        self,
        workspace: str | os.PathLike[str],
        *,
        mounts: Sequence[Mount] = (),
        network: bool = False,
        hidden: Sequence[str] = (),
        limits: Mapping[str, int] | None = None,
        egress: str | None = None,
    ) -> None:
        """`hidden`: folders that appear empty. `egress`: the folder of a proxy's socket.

        Raises SandboxError for a mount elsewhere than on its own path.
        """
        self.workspace = os.path.realpath(workspace)
        self.mounts = tuple(mounts)
        lent = [self.workspace, *(os.path.realpath(mount.host) for mount in self.mounts)]
        for mount in self.mounts:
            if mount.host != mount.container:
                raise SandboxError(f"mount {mount.host!r} on {mount.container!r}: Landlock cannot move a folder")
        etc = [f"/etc/{name}" for name in (*_ETC, *_ETC_MORE)]
        readable = [mount.host for mount in self.mounts if not mount.writable]
        writable = [self.workspace, *(mount.host for mount in self.mounts if mount.writable), "/tmp"]  # noqa: S108 (its own)
        rules = {
            "read": [*_READABLE, interpreter_folder(), *etc, *readable, *([egress] if egress else [])],
            "write": writable,
            "device": [f"/dev/{name}" for name in _DEVICES],
        }
        covered = [real for path in hidden if os.path.isdir(real := os.path.realpath(path))]
        self._launch = Launch(
            namespaces=True,
            network=network,
            rules=rules,
            hidden=covered,
            limits=limits or {},
            egress=egress and f"{egress}/{EGRESS_SOCKET}",
        )
        self._lent = lent
        self._works = False

    def check(self) -> None:
        """Test the sandbox with a command that does nothing. Raises Failed with the reason if it does not work."""
        if self._works:
            return
        if landlock_version() < 1:
            raise Failed("sandbox: the kernel of this machine has no Landlock; the command did not run")
        try:
            done = subprocess.run(
                [*self.words(self.workspace), "true"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_PROBE_SECONDS,
                check=False,
                env={"PATH": os.defpath},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Failed(f"sandbox: it cannot be started: {error}; the command did not run") from None
        if done.returncode:
            said = done.stdout.decode("utf-8", "replace").strip() or f"exit status {done.returncode}"
            raise Failed(f"sandbox: this machine cannot give it: {said}; the command did not run")
        self._works = True

    def words(
        self,
        workdir: str,
        environment: Mapping[str, str] | None = None,
        *,
        may_steer: bool | None = None,  # noqa: ARG002 - a lent folder has no steering files
        inherit: bool = False,
    ) -> list[str]:
        """Return the prefix of a shell command that runs in `workdir`. Raises NotAllowed for a folder outside."""
        real = os.path.realpath(workdir)
        if not any(real == folder or real.startswith(folder.rstrip("/") + "/") for folder in self._lent):
            raise NotAllowed(f"working directory {workdir!r} is not in a lent folder; use {' or '.join(self._lent)}")
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        variables = {"PATH": os.defpath, **kept, "HOME": self.workspace, "PWD": real}
        words = [
            "/usr/bin/env",
            *(("-u", COOKIE) if inherit else ("-i",)),
            "-C",
            real,
            *(f"{name}={value}" for name, value in variables.items()),
        ]
        # Set inside: a variable such as `LD_PRELOAD` would run code in the launcher, before it confines itself.
        inside = [f"{name}={value}" for name, value in (environment or {}).items()]
        inside = ["/usr/bin/env", "--", *inside] if inside else []
        return [*words, *self._launch.words(str(LAUNCHER)), *inside, "/bin/sh", "-c"]
