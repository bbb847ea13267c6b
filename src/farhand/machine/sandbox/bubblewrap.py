"""Commands under bubblewrap: separate processes that see only what is mounted.

If this machine cannot create the requested sandbox, an error is raised and the command does not run.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from farhand.machine.files import steering_files
from farhand.machine.jobs.process_tree import COOKIE
from farhand.machine.programs import find_program
from farhand.machine.sandbox.confinement import (
    Mount,
    SandboxError,
    Steering,
    changeable_folders,
    probe,
    writable_entries,
)
from farhand.machine.sandbox.launch import EGRESS_SOCKET, LAUNCHER, Launch, interpreter_folder
from farhand.machine.sandbox.system_view import ETC, contains, variables
from farhand.protocol.errors import Failed, NotAllowed

_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SHELL = ("/bin/sh", "-c")
# Where commands see the launcher and the socket of the egress proxy.
_LAUNCHER_INSIDE = "/run/farhand/launcher.py"
_EGRESS_INSIDE = "/run/farhand/egress"
_TO_BECOME_ANOTHER = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
_TO_PROTECT_DEVICES = ("CAP_SYS_ADMIN", "CAP_SETPCAP")


class Sandbox:
    """The confinement of commands. `words` is the command prefix; `check` tests whether it works here."""

    def __init__(
        self,
        workspace: str | os.PathLike[str],
        *,
        mounts: Sequence[Mount] = (),
        network: bool = False,
        user: str = "",
        steering: Steering = Steering.NONE,
        hidden: Sequence[str] = (),
        launch: Launch = Launch(),  # noqa: B008 (immutable)
        egress: str | None = None,
        temporary: int = 0,
    ) -> None:
        """`user`: `uid`, `uid:gid` or a name; defaults to the user of this program.

        `steering`: whether the workspace holds steering files. `hidden`: folders that appear empty, wherever they are
        in a mount. `launch`: applied inside, before the shell starts. `egress`: the folder of a proxy's socket, for
        commands without another network. `temporary`: the size of /tmp; 0 for the default of the system. Raises
        SandboxError.
        """
        self.workspace = os.path.realpath(workspace)
        self.mounts = tuple(mounts)
        self.network = network
        self.steering = steering
        self.hidden = tuple(os.path.realpath(path) for path in hidden)
        self._egress = egress
        self._temporary = temporary
        self.identity = identity_of(user)
        inside = None if egress is None else f"{_EGRESS_INSIDE}/{EGRESS_SOCKET}"
        self._launch = msgspec.structs.replace(launch, egress=inside)
        for mount in self.mounts:
            if not mount.host.startswith("/") or not mount.container.startswith("/") or ".." in mount.container:
                raise SandboxError(f"sandbox mount {mount.host!r} on {mount.container!r}: both must be absolute paths")
        self._works = False

    def check(self) -> None:
        """Test the sandbox with a command that does nothing. Raises Failed with the reason if it does not work.

        A successful test is not repeated.
        """
        if self._works:
            return
        for mount in self.mounts:
            if not Path(mount.host).exists():
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
        """Return the prefix of a shell command that runs in `workdir`, with these variables and a few of the system's.

        `may_steer`: whether the command may change steering files; defaults to what the calling context may do.
        `inherit`: see `ChosenSandbox.words`. `expected`: see `Launch`. Raises Failed if bubblewrap is not installed,
        NotAllowed for a folder outside of the sandbox.
        """
        if may_steer is None:
            may_steer = steering_files.allowed.get()
        program = find_program("bwrap", changeable_folders(self.workspace, self.mounts))
        if program is None:
            raise Failed("sandbox: the program 'bwrap' is missing; install bubblewrap; the command did not run")
        other = self.identity if self.identity is not None and self.identity[0] != os.geteuid() else None
        # Root owns the devices of the machine, which bubblewrap mounts writable, and could change their modes.
        protect = other is None and os.geteuid() == 0
        words = [
            program,
            "--die-with-parent",
            "--unshare-ipc",
            "--unshare-pid",
            "--unshare-uts",
            "--unshare-cgroup-try",
        ]
        words += [] if self.network else ["--unshare-net"]
        # Root can mount first and change the user later; other users need a user namespace.
        words += ["--unshare-user"] if other is None else []
        words += ["--cap-drop", "ALL", "--hostname", "sandbox"]
        # `setpriv` and the launcher drop them before the command starts.
        for capability in _TO_BECOME_ANOTHER if other else _TO_PROTECT_DEVICES if protect else ():
            words += ["--cap-add", capability]
        words += self._mounting()
        top_level = not may_steer and self.steering is Steering.OF_CALLER
        if top_level:
            words += self._read_only_top_level()
        folder = self._inside(workdir)
        # The folder of another user may be closed to root without capabilities.
        words += ["--chdir", "/" if other else folder]
        words += ["--unsetenv", COOKIE] if inherit else ["--clearenv"]
        home = "/tmp" if top_level else self.workspace  # noqa: S108 (the sandbox's)
        for name, value in variables(home).items():
            words += ["--setenv", name, value]
        words.append("--")
        if other:
            words += ["/usr/bin/setpriv", f"--reuid={other[0]}", f"--regid={other[1]}", "--clear-groups"]
            words += ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
            words += ["/usr/bin/env", "-C", folder, f"PWD={folder}"]
        words += msgspec.structs.replace(self._launch, devices=protect, expected=expected).words(_LAUNCHER_INSIDE)
        # Set by the last program: a variable such as `LD_PRELOAD` would run code in the launcher.
        inside = [f"{name}={value}" for name, value in (environment or {}).items()]
        words += ["/usr/bin/env", "--", *inside] if inside else []
        return [*words, *_SHELL]

    def _mounting(self) -> list[str]:
        words = ["--ro-bind", "/usr", "/usr"]
        for path in _SYSTEM:
            if Path(path).is_symlink():
                words += ["--symlink", str(Path(path).readlink()), path]
            elif Path(path).is_dir():
                words += ["--ro-bind", path, path]
        for folder in ("/etc", "/etc/ssl"):
            words += ["--perms", "0755", "--dir", folder]
        for name in ETC:
            words += ["--ro-bind-try", os.path.realpath(f"/etc/{name}"), f"/etc/{name}"]
        words += ["--proc", "/proc", "--dev", "/dev"]
        for folder in ("/dev/shm", "/tmp"):  # noqa: S108 (the sandbox's)
            words += ["--size", str(self._temporary)] if self._temporary else []
            words += ["--perms", "1777", "--tmpfs", folder]
        mounts = (Mount(self.workspace, self.workspace, writable=True), *self.mounts)
        for mount in mounts:
            words += _mounted(mount)
        empty = ["/dev", "/"]
        for hidden in self.hidden:
            if any(contains(mount.host, hidden) for mount in mounts) and Path(hidden).is_dir():
                words += ["--tmpfs", hidden]
                empty.append(hidden)
                for mount in mounts:
                    words += _mounted(mount) if contains(hidden, mount.container) else []
        words += _mounted(Mount(str(LAUNCHER), _LAUNCHER_INSIDE))
        base = interpreter_folder()
        words += [] if contains("/usr", base) else _mounted(Mount(base, base))
        if self._egress is not None:
            words += ["--ro-bind", self._egress, _EGRESS_INSIDE]
        # They are in memory, which a command could fill, and their mount points exist now.
        for path in empty:
            words += ["--remount-ro", path]
        return words

    def _read_only_top_level(self) -> list[str]:
        """Mount the workspace read-only, and what is in it writable, apart from steering files.

        A read-only mount of each steering file would not do: one that does not exist yet could be created, and a mount
        is lost when the file is replaced outside of the sandbox.
        """
        words = ["--remount-ro", self.workspace]
        for path in writable_entries(self.workspace, self.mounts):
            words += ["--bind", path, path]
        return words

    def _inside(self, workdir: str) -> str:
        """Return the path of a folder inside the sandbox."""
        real = os.path.realpath(workdir)
        seen = [(self.workspace, self.workspace)]
        for mount in self.mounts:
            seen += [(os.path.realpath(mount.host), mount.container), (mount.container, mount.container)]
        for outside, inside in seen:
            if real == outside or real.startswith(outside.rstrip("/") + "/"):
                return inside + real[len(outside) :]
        raise NotAllowed(f"working directory {workdir!r} is not in the sandbox; use the workspace or one of its mounts")


def _mounted(mount: Mount) -> list[str]:
    words = []
    # Otherwise parent folders would be accessible to the gateway's user only.
    for folder in reversed(Path(mount.container).parents[:-1]):
        words += ["--perms", "0755", "--dir", str(folder)]
    return [*words, "--bind" if mount.writable else "--ro-bind", mount.host, mount.container]


def identity_of(user: str) -> tuple[int, int] | None:
    """Return user and group of `uid`, `uid:gid` or a name; None for no user. Raises SandboxError."""
    if not user:
        return None
    name, _, group = user.partition(":")
    try:
        if name.isdecimal():
            uid = int(name)
            gid = int(group) if group else uid
        else:
            entry = pwd.getpwnam(name)
            uid, gid = entry.pw_uid, int(group) if group else entry.pw_gid
    except (KeyError, ValueError):
        raise SandboxError(f"sandbox user {user!r} is neither a known name nor uid or uid:gid") from None
    if uid != os.geteuid() and os.geteuid() != 0:
        raise SandboxError(
            f"sandbox user {user!r}: only a gateway that runs as root can give commands another user; "
            "leave user out, or start the gateway as root"
        )
    return uid, gid
