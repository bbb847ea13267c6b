"""The sandbox that the settings describe."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from farhand.config import SandboxSection
from farhand.machine.files.files import Files
from farhand.machine.sandbox.confinement import Confinement, Mount, SandboxError, Steering, changeable_folders
from farhand.machine.sandbox.egress import EgressProxy, NetworkRule
from farhand.machine.sandbox.host_commands import HostCommands
from farhand.machine.sandbox.levels import ChosenSandbox, SandboxPlan, refuse_own_program, sandbox_of_trials
from farhand.machine.sandbox.resources import RESOURCES, AppliedLimits, apply_limits
from farhand.machine.sandbox.trials import Trials
from farhand.protocol.errors import Failed

log = logging.getLogger(__name__)


def sandbox_plan(
    section: SandboxSection,
    workspace: Path,
    home: Path,
    *,
    egress: str,
    limits: AppliedLimits | None = None,
    readable: Sequence[Path] = (),
    steering: Steering = Steering.NONE,
) -> SandboxPlan:
    """Return what the settings ask for.

    `egress`: the folder of the proxy's socket. `limits`: how the machine enforces those of resources. `readable`:
    folders that commands see in their place, to read. `steering`: whose steering files the workspace holds.
    """
    mounts = [Mount(str(folder), str(folder)) for folder in readable]
    mounts += [Mount(mount.host, mount.container or mount.host, mount.mode == "rw") for mount in section.mounts]
    network = section.network_rule
    return SandboxPlan(
        workspace=str(workspace),
        mounts=tuple(mounts),
        level=section.level,
        network=network,
        limits=limits or AppliedLimits(),
        user=section.user,
        steering=steering,
        hidden=(str(home),),
        egress=egress if network.kind in ("local", "allow") else "",
    )


def host_commands(section: SandboxSection, home: Path, changeable: tuple[str, ...] = ()) -> HostCommands | None:
    """Return the way to the host, if the settings name commands that take it.

    `changeable`: the folders that commands in the sandbox may change.
    """
    if not section.host_commands:
        return None
    return HostCommands(
        names=frozenset(section.host_commands),
        host=section.ssh_host,
        port=section.ssh_port,
        user=section.ssh_user,
        key=section.ssh_key or str(home / "keys" / "host_ed25519"),
        known_hosts=section.ssh_known_hosts or str(home / "keys" / "known_hosts"),
        changeable=changeable,
    )


class LiveConfinement:
    """The sandbox as the settings describe it at the moment; a change holds for the next command.

    The owner calls `close`, in the event loop in which it was made.
    """

    def __init__(
        self,
        section: Callable[[], SandboxSection],
        workspace: Path,
        home: Path,
        proxy: EgressProxy,
        loop: asyncio.AbstractEventLoop,
        *,
        name: str,
        readable: Sequence[Path] = (),
        steering: Steering = Steering.NONE,
    ) -> None:
        """`proxy` is started in `loop` when a network rule needs it; it asks `network` for the rule.

        `name`: of the control group of commands. `readable`, `steering`: see `sandbox_plan`. Raises SandboxError for
        settings that cannot be followed.
        """
        self._section = section
        self._workspace = workspace
        self._home = home
        self._proxy = proxy
        self._loop = loop
        self._name = name
        self._readable = tuple(folder.resolve() for folder in readable)
        self._steering = steering
        self._described = section()
        self._made: Confinement | SandboxError = self._make(self._described)
        self._trial: ChosenSandbox | None = None

    def __call__(self) -> Confinement:
        """Raises Failed while the settings describe a sandbox that is not available: nothing runs unconfined."""
        section = self._section()
        if section is not self._described:
            if section != self._described:
                self._change(section)
            self._described = section
        if isinstance(self._made, SandboxError):
            raise Failed(f"[sandbox] cannot be applied: {self._made}; the command did not run")
        return self._made

    @property
    def sandbox(self) -> ChosenSandbox | None:
        """The sandbox; None if it is switched off. Raises Failed as a call does."""
        return self()[0]

    def trial_sandbox(self) -> ChosenSandbox:
        """Return the sandbox of trials in the workspace, with the level and limits of the settings. Raises Failed."""
        sandbox = self.sandbox
        workspace = str(self._workspace)
        plan = sandbox.plan if sandbox is not None else SandboxPlan(workspace=workspace, hidden=(str(self._home),))
        wanted = plan.of_trials(workspace)
        if self._trial is None or self._trial.plan != wanted:
            self._trial = sandbox_of_trials(wanted)
        return self._trial

    def levels(self) -> dict[str, str]:
        """Return how commands are confined and limited, for display; empty without a sandbox. It blocks.

        Raises Failed if the sandbox is not available.
        """
        sandbox = self.sandbox
        if sandbox is None:
            return {}
        sandbox.check()
        section = self._described
        shown = {name: str(value) for name in RESOURCES if (value := getattr(section, name))}
        return sandbox.levels | {"network": sandbox.plan.network.text} | shown

    def network(self) -> NetworkRule:
        """Return the rule for the proxy; nothing is reached while the sandbox is off or not available."""
        sandbox = None if isinstance(self._made, SandboxError) else self._made[0]
        return NetworkRule("none") if sandbox is None else sandbox.plan.network

    async def close(self) -> None:
        await self._proxy.close()

    def _make(self, section: SandboxSection) -> Confinement:
        if not section.enabled:
            return None, None
        plan = sandbox_plan(
            section,
            self._workspace,
            self._home,
            egress=str(self._proxy.folder),
            limits=apply_limits(section.resources, self._name),
            readable=self._readable,
            steering=self._steering,
        )
        if plan.egress:
            self._proxy.listen(self._loop)
        changeable = changeable_folders(plan.workspace, plan.mounts)
        refuse_own_program(changeable)
        return ChosenSandbox(plan), host_commands(section, self._home, changeable)

    def _change(self, section: SandboxSection) -> None:
        try:
            self._made = self._make(section)
        except SandboxError as error:
            log.error("no command runs until [sandbox] is corrected: %s", error)
            self._made = error
        else:
            log.warning("[sandbox] was changed: it is %s now", "on" if section.enabled else "off")


def open_trials(home: Path, workspace: Path, files: Files, confinement: LiveConfinement) -> Trials:
    """Return the trials of `exec`, in the workspace and without network."""
    return Trials(home / "trials", files, (str(workspace),), confinement.trial_sandbox)
