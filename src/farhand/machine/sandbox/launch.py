"""How a sandboxed command is started: the launcher, its interpreter, and the limits it applies."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

# The name of the proxy's socket in its folder.
EGRESS_SOCKET: Final = "proxy.sock"
# The certificates that commands trust, in the same folder; only if the proxy adds credentials.
CA_BUNDLE: Final = "ca.pem"
LAUNCHER: Final = Path(__file__).with_name("launcher.py")


class Launch(msgspec.Struct, frozen=True, omit_defaults=True):
    """What `launcher.py` does before it runs the command."""

    # Folders with the upper and the work folder of an overlay over each of them.
    overlays: Sequence[tuple[str, str, str]] = ()
    # The control group to join first.
    cgroup: str = ""
    # Bytes by which the `counted` folders may grow until the command is ended; 0 for any. Not inside of a sandbox.
    disk: int = 0
    counted: Sequence[str] = ()
    # Create namespaces; not needed inside bubblewrap, which did.
    namespaces: bool = False
    # Keep the network of the host, if `namespaces` are created.
    network: bool = True
    # Paths by kind (`read`, `write`, `device`), enforced by Landlock; None for no file rules.
    rules: Mapping[str, Sequence[str]] | None = None
    # Folders that appear empty, apart from what `rules` names in them; only with `namespaces`.
    hidden: Sequence[str] = ()
    # The user and the group that commands have, which needs root; only with `namespaces`.
    user: tuple[int, int] | None = None
    # Make the devices of /dev read-only, and then drop all capabilities; not with `namespaces`, which does both.
    devices: bool = False
    # The size of /tmp, 0 for the default of the system; only with `namespaces`.
    temporary: int = 0
    # Paths inside the sandbox, with the device and the inode that each must have: another file was mounted otherwise.
    expected: Sequence[tuple[str, int, int]] = ()
    # Limits of resources for each process: `file_size`, `processes`, `memory`, `cpu_seconds`.
    limits: Mapping[str, int] = {}
    # Path of the socket of the egress proxy, inside the sandbox.
    egress: str | None = None

    def words(self, launcher: str = str(LAUNCHER)) -> list[str]:
        """Return the command prefix. `launcher`: the path of the launcher where it runs."""
        return [interpreter(), "-I", "-S", launcher, msgspec.json.encode(self).decode()]


def interpreter() -> str:
    """Return the Python program without links: a virtual environment is not visible in a sandbox."""
    return os.path.realpath(sys.executable)


def interpreter_folder() -> str:
    """Return the folder that the interpreter needs."""
    return os.path.realpath(sys.base_prefix)
