"""What the shell tools need of a sandbox, and what its mechanisms share."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from farhand.machine.files import steering_files
from farhand.machine.sandbox.host_commands import HostCommands
from farhand.protocol.errors import Failed, FarhandError

if TYPE_CHECKING:
    from farhand.machine.sandbox.levels import ChosenSandbox

_PROBE_SECONDS: Final = 20.0
_PROBE: Final = 'test -w "$PWD" || { echo "the workspace $PWD is not writable for user $(id -u)"; exit 1; }'
# Entries of a workspace that are mounted one by one; the others are read-only.
_MAX_ENTRIES: Final = 500


class SandboxError(FarhandError):
    """An invalid sandbox configuration."""


class Mount(msgspec.Struct, frozen=True):
    """A folder or file of the machine, and where commands see it."""

    host: str
    container: str
    writable: bool = False


class Steering(Enum):
    """Whether the workspace of a sandbox holds the files that steer an agent, and which commands may change them."""

    NONE = "no steering files"
    # Only commands that are known to run for a caller that may change them.
    OF_CALLER = "of the caller"


# The sandbox of commands, if any, and the commands that run on the host nevertheless.
Confinement: TypeAlias = "tuple[ChosenSandbox | None, HostCommands | None]"


def unconfined() -> Confinement:
    return None, None


def probe(words: Sequence[str]) -> None:
    """Run a command that changes nothing, after these words. Raises Failed with the reason if it does not work."""
    try:
        done = subprocess.run(
            [*words, _PROBE],
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
        said = said.removeprefix("sandbox: ").removesuffix("; the command did not run")
        raise Failed(f"sandbox: it does not work on this machine: {said}; the command did not run")


def changeable_folders(workspace: str, mounts: Sequence[Mount]) -> tuple[str, ...]:
    """Return the folders of the machine that commands may change."""
    return (workspace, *(mount.host for mount in mounts if mount.writable))


def writable_entries(workspace: str, mounts: Sequence[Mount]) -> list[str]:
    """Return the paths in a workspace that a command may change which may not steer the agent."""
    entries = sorted(os.scandir(workspace), key=lambda entry: (not entry.is_dir(), entry.name))
    found = []
    for entry in entries[:_MAX_ENTRIES]:
        covered = any(f"{mount.container}/".startswith(f"{entry.path}/") for mount in mounts)
        is_plain = entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False)
        if is_plain and not covered and not steering_files.is_steering(entry.name):
            found.append(entry.path)
    return found
