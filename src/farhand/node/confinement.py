"""How the commands of a node are confined, decided when it starts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from farhand.machine.sandbox.confinement import CommandSandbox, Confinement, SandboxError
from farhand.machine.sandbox.egress import EgressProxy
from farhand.machine.sandbox.egress_credentials import EgressCredentials
from farhand.machine.sandbox.lent import AUTO, NONE, lent_sandbox
from farhand.machine.sandbox.resources import LimitedSandbox, ResourceLimits, apply_limits
from farhand.node.lent_limits import LendingLimits
from farhand.node.limits import ToolLimits
from farhand.protocol.errors import Failed, FarhandError

log = logging.getLogger(__name__)


class NodeConfinement:
    """The sandbox of a node's commands, its level, and the proxy of its network. The owner calls `close`."""

    def __init__(
        self,
        level: str,
        confinement: Callable[[], Confinement],
        limits: ToolLimits,
        workspace: Path,
        home: Path,
        roots: Sequence[str] = (),
        proxy: EgressProxy | None = None,
        credentials: EgressCredentials | None = None,
        resources: tuple[str, str, dict[str, int]] = ("", "", {}),
    ) -> None:
        # `bubblewrap`, `landlock`, `none`, or empty if nothing asks for a sandbox.
        self.level = level
        self.confinement = confinement
        self.limits = limits
        self._proxy = proxy
        # How resources are limited, the control group of commands, and the limits of each process.
        self._resources = resources
        # Those that the proxy adds to requests; none without a proxy.
        self.credentials = credentials
        self._home = home
        # What commands may change, the workspace first.
        self.folders = (str(workspace), *(root for root in roots if root != str(workspace)))
        self._trial: CommandSandbox | None = None

    @property
    def levels(self) -> dict[str, str]:
        """Return how commands are confined, and how their resources are limited, for display."""
        found = {"sandbox": self.level, "limits": self._resources[0]}
        return {name: level for name, level in found.items() if level}

    def trial_sandbox(self) -> CommandSandbox:
        """Return the sandbox of trials: the lent folders, or the workspace, without network. Raises Failed."""
        if self._trial is None:
            level, sandbox, reason = lent_sandbox(
                AUTO, self.folders, self.folders[0], hidden=(self._home,), network=False, limits=self._resources[2]
            )
            if sandbox is None:
                raise Failed(f"this machine has no sandbox for trials ({level}: {reason}); the command did not run")
            self._trial = LimitedSandbox(sandbox, self._resources[1]) if self._resources[1] else sandbox
        return self._trial

    async def close(self) -> None:
        if self._proxy is not None:
            await self._proxy.close()


async def confine(
    holds: LendingLimits, workspace: Path, home: Path, folder: Path, settings: Callable[[], Confinement]
) -> NodeConfinement:
    """Confine commands to the lent folders. Without any, `settings` decides, called before each command.

    `folder`: the node's own. Raises FarhandError if a sandbox that was asked for cannot be given.
    """
    if not holds.root:
        limited = holds.resources != ResourceLimits()
        if holds.network or limited or holds.sandbox not in ("", AUTO):
            option = f"--network {holds.network}" if holds.network else f"--sandbox {holds.sandbox}"
            option = "a limit of resources" if limited else option
            raise FarhandError(f"this node cannot start: {option} needs --root, the folder to confine commands to")
        return NodeConfinement("", settings, holds.limits, workspace, home)
    if "Bash" in holds.allow_tools and holds.sandbox in ("", NONE):
        if holds.resources != ResourceLimits():
            raise FarhandError("this node cannot start: limits of resources are for confined commands, and Bash is not")
        return NodeConfinement(NONE, settings, holds.limits, workspace, home, holds.root)
    try:
        resources = apply_limits(holds.resources, folder.name)
    except SandboxError as error:
        raise FarhandError(f"this node cannot start: {error}") from None
    if holds.sandbox != NONE:
        _refuse_movable_home(holds.root, home)
    rule = holds.network_rule
    proxy, credentials = None, None
    if rule.kind in ("local", "allow"):
        credentials = EgressCredentials(folder, folder / "egress")
        proxy = EgressProxy(folder / "egress", lambda: rule, credentials)
        await proxy.start()
    try:
        level, sandbox, reason = await asyncio.to_thread(
            lent_sandbox,
            holds.sandbox or AUTO,
            holds.root,
            workspace,
            hidden=(home,),
            network=rule.kind == "host",
            egress=None if proxy is None else str(proxy.folder),
            limits=resources[2],
        )
    except SandboxError as error:
        raise FarhandError(f"this node cannot start: {error}") from None
    if sandbox is None:
        log.warning("Bash is not lent: this node lends only some folders and has no sandbox: %s", reason)
        return NodeConfinement(level, settings, holds.limits, workspace, home, holds.root, proxy)
    log.info("commands are confined to the lent folders by %s", level)
    if resources[1]:
        sandbox = LimitedSandbox(sandbox, resources[1])
    limits = msgspec.structs.replace(holds.limits, confined=False)
    return NodeConfinement(
        level, lambda: (sandbox, None), limits, workspace, home, holds.root, proxy, credentials, resources
    )


def _refuse_movable_home(roots: Sequence[str], home: Path) -> None:
    """Raise FarhandError if a command could rename a folder above the node's home, and so uncover what is in it.

    The home itself is a mount point of the sandbox, which cannot be renamed.
    """
    place = home.resolve()
    for root in roots:
        lent = Path(root).resolve()
        if place.is_relative_to(lent) and len(place.relative_to(lent).parts) > 1:
            raise FarhandError(
                f"this node cannot start: its home {place} lies within the lent folder {lent}, where a command could "
                "move it and its limits would be lost; lend other folders, or choose a home elsewhere with --home"
            )
