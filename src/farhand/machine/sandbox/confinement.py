"""What the shell tools need of a sandbox, whichever mechanism provides it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from farhand.machine.sandbox.host_commands import HostCommands
from farhand.protocol.errors import FarhandError


class SandboxError(FarhandError):
    """An invalid sandbox configuration."""


class Mount(msgspec.Struct, frozen=True):
    """A folder or file of the machine, and where commands see it."""

    host: str
    container: str
    writable: bool = False


class CommandSandbox(Protocol):
    """Confines commands. The workspace and the writable mounts are what they can change."""

    @property
    def workspace(self) -> str: ...

    @property
    def mounts(self) -> Sequence[Mount]: ...

    def check(self) -> None:
        """Test the sandbox with a command that does nothing. Raises Failed with the reason if it does not work."""
        ...

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
        ...


# The sandbox of commands, if any, and the commands that run on the host nevertheless.
Confinement = tuple[CommandSandbox | None, HostCommands | None]


def unconfined() -> Confinement:
    return None, None
