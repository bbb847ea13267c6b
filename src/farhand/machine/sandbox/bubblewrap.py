"""Commands under bubblewrap: separate processes that see only what is mounted.

If this machine cannot create the requested sandbox, an error is raised and the command does not run.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path

import msgspec

from farhand.machine.files import steering_files
from farhand.machine.jobs.process_tree import COOKIE
from farhand.machine.sandbox.confinement import Mount, SandboxError
from farhand.machine.sandbox.launch import EGRESS_SOCKET, LAUNCHER, Launch, interpreter_folder
from farhand.protocol.errors import Failed, NotAllowed

# Files of /etc needed for names, addresses and certificates; none contains a secret.
_ETC = (
    "passwd",
    "group",
    "hosts",
    "resolv.conf",
    "nsswitch.conf",
    "ssl",
    "ca-certificates",
    "alternatives",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "services",
    "protocols",
)
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TERM", "TZ")
_SHELL = ("/bin/sh", "-c")
_PROBE_SECONDS = 20.0
# Where commands see the launcher and the socket of the egress proxy.
_LAUNCHER_INSIDE = "/run/farhand/launcher.py"
_EGRESS_INSIDE = "/run/farhand/egress"
# Entries of a workspace that are mounted one by one; the others are read-only.
_MAX_ENTRIES = 500


class Steering(Enum):
    """Whether the workspace of a sandbox holds the files that steer an agent, and which commands may change them."""

    NONE = "no steering files"
    # Only commands that are known to run for a caller that may change them.
    OF_CALLER = "of the caller"


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
        launch: Launch | None = None,
        egress: str | None = None,
    ) -> None:
        """`user`: `uid`, `uid:gid` or a name; defaults to the user of this program.

        `steering`: whether the workspace holds steering files. `hidden`: folders that appear empty, wherever they are
        in a mount. `launch`: applied inside, before the shell starts. `egress`: the folder of a proxy's socket, for
        commands without another network. Raises SandboxError.
        """
        self.workspace = os.path.realpath(workspace)
        self.mounts = tuple(mounts)
        self.network = network
        self.steering = steering
        self.hidden = tuple(os.path.realpath(path) for path in hidden)
        self._egress = egress
        self._launch = launch
        if egress is not None:
            self._launch = msgspec.structs.replace(launch or Launch(), egress=f"{_EGRESS_INSIDE}/{EGRESS_SOCKET}")
        self.identity = _identity(user)
        for mount in self.mounts:
            if not mount.host.startswith("/") or not mount.container.startswith("/") or ".." in mount.container:
                raise SandboxError(f"sandbox mount {mount.host!r} on {mount.container!r}: both must be absolute paths")
        if self.identity is not None and self.identity[0] != os.geteuid() and os.geteuid() != 0:
            raise SandboxError(
                f"sandbox user {user!r}: only a gateway that runs as root can give commands another user; "
                "leave user out, or start the gateway as root"
            )
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
        command = 'test -w "$PWD" || { echo "the workspace $PWD is not writable for user $(id -u)"; exit 1; }'
        try:
            done = subprocess.run(
                [*self.words(self.workspace, may_steer=True), command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_PROBE_SECONDS,
                check=False,
                env={"PATH": os.defpath},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Failed(f"sandbox: bubblewrap cannot be started: {error}; the command did not run") from None
        if done.returncode:
            said = done.stdout.decode("utf-8", "replace").strip() or f"exit status {done.returncode}"
            raise Failed(f"sandbox: this machine cannot give it: {said}; the command did not run")
        self._works = True

    def words(
        self,
        workdir: str,
        environment: Mapping[str, str] | None = None,
        *,
        may_steer: bool | None = None,
        inherit: bool = False,
    ) -> list[str]:
        """Return the prefix of a shell command that runs in `workdir`, with these variables and a few of the system's.

        `may_steer`: whether the command may change steering files; defaults to what the calling context may do.
        `inherit`: see `CommandSandbox.words`. Raises Failed if bubblewrap is not installed, NotAllowed for a folder
        outside of the sandbox.
        """
        if may_steer is None:
            may_steer = steering_files.allowed.get()
        program = shutil.which("bwrap")
        if program is None:
            raise Failed("sandbox: the program 'bwrap' is missing; install bubblewrap; the command did not run")
        as_other = self.identity is not None and self.identity[0] != os.geteuid()
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
        words += [] if as_other else ["--unshare-user"]
        words += ["--cap-drop", "ALL", "--hostname", "sandbox"]
        if as_other:
            words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
        words += self._mounting()
        top_level = not may_steer and self.steering is Steering.OF_CALLER
        if top_level:
            words += self._read_only_top_level()
        words += ["--chdir", self._inside(workdir), *(("--unsetenv", COOKIE) if inherit else ("--clearenv",))]
        home = "/tmp" if top_level else self.workspace  # noqa: S108 (the sandbox's)
        for name, value in self._variables(environment or {}, home).items():
            words += ["--setenv", name, value]
        words.append("--")
        if as_other:
            assert self.identity is not None
            uid, gid = self.identity
            words += ["/usr/bin/setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]
            words += ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
        if self._launch is not None:
            words += self._launch.words(_LAUNCHER_INSIDE)
        return [*words, *_SHELL]

    def _mounting(self) -> list[str]:
        words = ["--ro-bind", "/usr", "/usr"]
        for path in _SYSTEM:
            if Path(path).is_symlink():
                words += ["--symlink", str(Path(path).readlink()), path]
            elif Path(path).is_dir():
                words += ["--ro-bind", path, path]
        for name in _ETC:
            words += ["--ro-bind-try", os.path.realpath(f"/etc/{name}"), f"/etc/{name}"]
        words += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--tmpfs", "/tmp"]  # noqa: S108 (the sandbox's)
        mounts = (Mount(self.workspace, self.workspace, writable=True), *self.mounts)
        for mount in mounts:
            words += _mounted(mount)
        for hidden in self.hidden:
            if any(_contains(mount.host, hidden) for mount in mounts) and Path(hidden).is_dir():
                words += ["--tmpfs", hidden]
                for mount in mounts:
                    words += _mounted(mount) if _contains(hidden, mount.container) else []
        if self._launch is not None:
            words += ["--ro-bind", str(LAUNCHER), _LAUNCHER_INSIDE]
            folder = interpreter_folder()
            words += [] if _contains("/usr", folder) else _mounted(Mount(folder, folder))
        if self._egress is not None:
            words += ["--ro-bind", self._egress, _EGRESS_INSIDE]
        return words

    def _read_only_top_level(self) -> list[str]:
        """Mount the workspace read-only, and what is in it writable, apart from steering files.

        A read-only mount of each steering file would not do: one that does not exist yet could be created, and a mount
        is lost when the file is replaced outside of the sandbox.
        """
        words = ["--remount-ro", self.workspace]
        entries = sorted(os.scandir(self.workspace), key=lambda entry: (not entry.is_dir(), entry.name))
        for entry in entries[:_MAX_ENTRIES]:
            covered = any(f"{mount.container}/".startswith(f"{entry.path}/") for mount in self.mounts)
            if not steering_files.is_steering(entry.name) and _is_plain(entry) and not covered:
                words += ["--bind", entry.path, entry.path]
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

    @staticmethod
    def _variables(environment: Mapping[str, str], home: str) -> dict[str, str]:
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        return {"PATH": os.defpath, **kept, "HOME": home, **environment}


def _mounted(mount: Mount) -> list[str]:
    words = []
    # Otherwise parent folders would be accessible to the gateway's user only.
    for folder in reversed(Path(mount.container).parents[:-1]):
        words += ["--perms", "0755", "--dir", str(folder)]
    return [*words, "--bind" if mount.writable else "--ro-bind", mount.host, mount.container]


def _contains(folder: str, path: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _is_plain(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False)


def _identity(user: str) -> tuple[int, int] | None:
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
    return uid, gid
