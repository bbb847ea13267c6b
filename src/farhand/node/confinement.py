"""How the commands of a node are confined, decided when it starts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from farhand.machine.files.undo_log import UNDO_FOLDER
from farhand.machine.sandbox.confinement import Confinement, SandboxError, unconfined
from farhand.machine.sandbox.egress import EgressProxy
from farhand.machine.sandbox.egress_credentials import EgressCredentials
from farhand.machine.sandbox.levels import (
    AUTO,
    NONE,
    ChosenSandbox,
    SandboxPlan,
    places,
    refuse_own_program,
    sandbox_of_trials,
    writable_mounts,
)
from farhand.machine.sandbox.resources import ResourceLimits, apply_limits
from farhand.node.limits import ToolLimits
from farhand.node.stored_limits import LendingLimits
from farhand.protocol.errors import Failed, FarhandError

log = logging.getLogger(__name__)

# Below the home: what nodes keep of themselves, and old content of files.
STATE_FOLDERS: Final = ("nodes", UNDO_FOLDER)


class SandboxSettings(Protocol):
    """The confinement of a machine that lends no particular folders: `[sandbox]` of its home, if there is any."""

    def __call__(self) -> Confinement:
        """Return the current confinement. Raises Failed if the settings cannot be followed."""
        ...

    def levels(self) -> dict[str, str]:
        """Return how commands are confined and limited, for display. It blocks. Raises Failed."""
        ...

    def trial_sandbox(self) -> ChosenSandbox:
        """Return the sandbox of trials in the workspace. Raises Failed."""
        ...

    @property
    def credentials(self) -> EgressCredentials | None:
        """Those that the proxy adds to requests; None without a proxy."""
        ...

    async def close(self) -> None: ...


class NoSandboxSettings:
    """A machine without settings."""

    credentials = None

    def __init__(self, workspace: Path, home: Path) -> None:
        plan = SandboxPlan(workspace=str(workspace), hidden=(str(home),))
        self.trial_sandbox = _trials(plan, (str(workspace),))

    def __call__(self) -> Confinement:
        return unconfined()

    def levels(self) -> dict[str, str]:
        return {}

    async def close(self) -> None: ...


class NodeConfinement(msgspec.Struct, frozen=True):
    """The sandbox of a node's commands. The owner calls `close`."""

    # Called before each command.
    confinement: Callable[[], Confinement]
    limits: ToolLimits
    # What commands may change, the folder with the workspace first.
    folders: tuple[str, ...]
    # How commands are confined, and how their resources are limited, for display.
    levels: dict[str, str]
    # Returns the sandbox of trials: the lent folders, or the workspace, without network. Raises Failed.
    trial_sandbox: Callable[[], ChosenSandbox]
    close: Callable[[], Awaitable[None]]
    # Those that the proxy adds to requests; None without a proxy.
    credentials: EgressCredentials | None = None


async def confine(
    holds: LendingLimits, workspace: Path, home: Path, folder: Path, settings: SandboxSettings
) -> NodeConfinement:
    """Confine commands to the lent folders. Without any, `settings` decides.

    `folder`: the node's own. Raises FarhandError if a required sandbox is not available.
    """
    if not holds.root:
        return await _by_settings(holds, workspace, settings)
    folders = _folders(holds.root, workspace)
    if "Bash" in holds.allow_tools and holds.sandbox in ("", NONE):
        if holds.resources != ResourceLimits():
            raise FarhandError("this node cannot start: limits of resources are for confined commands, and Bash is not")
        plan = _plan(holds, folders, home)
        shown = {"sandbox": NONE}
        return NodeConfinement(settings, holds.limits, folders, shown, _trials(plan, folders), settings.close)
    refuse_reachable_home(holds.root, home, commands=holds.sandbox != NONE)
    if not holds.read_only:
        try:
            refuse_own_program(holds.root)
        except SandboxError as error:
            raise FarhandError(f"this node cannot start: {error}") from None
    rule = holds.network_rule
    credentials, proxy = None, None
    if rule.kind in ("local", "allow"):
        credentials = EgressCredentials(folder, folder / "egress")
        proxy = EgressProxy(folder / "egress", lambda: rule, credentials)
        proxy.listen(asyncio.get_running_loop())

    async def close() -> None:
        await settings.close()
        if proxy is not None:
            await proxy.close()

    try:
        plan = _plan(holds, folders, home, "" if proxy is None else str(proxy.folder))
        plan = msgspec.structs.replace(plan, limits=apply_limits(holds.resources, folder.name))
        if holds.sandbox == NONE:
            log.warning("Bash is not lent: this node lends only some folders, and its sandbox is off (--sandbox none)")
            return NodeConfinement(settings, holds.limits, folders, {"sandbox": NONE}, _trials(plan, folders), close)
        sandbox = ChosenSandbox(plan)
    except SandboxError as error:
        await close()
        raise FarhandError(f"this node cannot start: {error}") from None
    try:
        await asyncio.to_thread(sandbox.check)
    except Failed as error:
        reason = error.message.removeprefix("sandbox: ").removesuffix("; the command did not run")
        if plan.level != AUTO:
            await close()
            raise FarhandError(
                f"this node cannot start: the sandbox {plan.level!r} is not available: {reason}"
            ) from None
        log.warning("Bash is not lent: this node lends only some folders and has no sandbox: %s", reason)
        return NodeConfinement(settings, holds.limits, folders, {"sandbox": NONE}, _trials(plan, folders), close)
    log.info("commands are confined to the lent folders by %s", sandbox.level)
    limits = msgspec.structs.replace(holds.limits, confined=False)
    trials = _trials(plan, folders)
    return NodeConfinement(lambda: (sandbox, None), limits, folders, sandbox.levels, trials, close, credentials)


def _folders(roots: Sequence[str], workspace: Path) -> tuple[str, ...]:
    """Return the lent folders, the one with the workspace first.

    The workspace itself is not among them: it may lie in a lent folder, where a command could replace it by a link.
    """
    place = workspace.resolve()
    return tuple(sorted(roots, key=lambda root: not place.is_relative_to(Path(root).resolve())))


async def _by_settings(holds: LendingLimits, workspace: Path, settings: SandboxSettings) -> NodeConfinement:
    limited = holds.resources != ResourceLimits()
    if holds.network or limited or holds.sandbox not in ("", AUTO):
        option = f"--network {holds.network}" if holds.network else f"--sandbox {holds.sandbox}"
        option = "a limit of resources" if limited else option
        raise FarhandError(
            f"this node cannot start: {option} needs --root, the folder to confine commands to; without --root, use "
            "[sandbox] in the settings"
        )
    try:
        levels = await asyncio.to_thread(settings.levels)
        if levels:
            log.info("commands are confined to the workspace by %s ([sandbox])", levels["sandbox"])
    except Failed as error:
        log.error("no command runs on this node: %s", error)
        levels = {"sandbox": "refused"}
    folders = (str(workspace),)
    return NodeConfinement(
        settings, holds.limits, folders, levels, settings.trial_sandbox, settings.close, settings.credentials
    )


def _plan(holds: LendingLimits, folders: Sequence[str], home: Path, egress: str = "") -> SandboxPlan:
    return SandboxPlan(
        workspace=folders[0],
        mounts=writable_mounts(folders, folders[0]),
        level=AUTO if holds.sandbox in ("", NONE) else holds.sandbox,
        network=holds.network_rule,
        hidden=(str(home),),
        egress=egress,
    )


def _trials(plan: SandboxPlan, folders: Sequence[str]) -> Callable[[], ChosenSandbox]:
    """Return the sandbox of trials, when it is asked for: a plan may be one that no machine can follow.

    Its folders are resolved now: later, one may have been replaced by a link.
    """
    try:
        sandbox = sandbox_of_trials(plan.of_trials(folders[0], folders))
    except Failed as error:
        reason = error.message

        def refused() -> ChosenSandbox:
            raise Failed(reason)

        return refused
    return lambda: sandbox


def refuse_reachable_home(roots: Sequence[str], home: Path, *, commands: bool) -> None:
    """Raise FarhandError if a lent folder gives access to the state of the node, or lets a command replace it.

    With `commands`, the home may lie directly in a lent folder, and nowhere else in one: there it is a mount point of
    the sandbox, which cannot be renamed. A link to it, or a folder above it, could be.
    """
    place = home.resolve()
    for root in roots:
        lent = Path(root).resolve()
        for state in (place, *(place / name for name in STATE_FOLDERS)):
            if lent == state or (state != place and lent.is_relative_to(state)):
                raise FarhandError(
                    f"this node cannot start: the lent folder {lent} has the state of this node, with its keys and "
                    "limits; lend another folder, or choose a home elsewhere with --home"
                )
        for passed in places(home) if commands else ():
            depth = len(passed.relative_to(lent).parts) if passed.is_relative_to(lent) else 0
            if depth and not (depth == 1 and passed == place):
                raise FarhandError(
                    f"this node cannot start: its home {home} lies within the lent folder {lent}, where a command "
                    "could move it and its limits would be lost; lend other folders, or choose a home elsewhere with "
                    "--home"
                )
