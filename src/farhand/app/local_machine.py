"""Open the machine that the gateway runs on, for its own tools."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from farhand.app.sandbox import LiveConfinement
from farhand.config import LiveConfig
from farhand.gateway.workspace.skill_folders import SKILL_FOLDERS
from farhand.machine.files.files import Files
from farhand.machine.files.local_paths import AGENTS_FOLDER, local_files
from farhand.machine.files.transaction_log import roll_back_unfinished
from farhand.machine.files.undo_log import MIB, UNDO_FOLDER, UndoLog
from farhand.machine.jobs.jobs import Jobs
from farhand.machine.sandbox.confinement import Steering
from farhand.machine.sandbox.egress import EgressProxy, NetworkRule
from farhand.node.queries import NodeQueries
from farhand.protocol.redaction import is_own_secret

# Variables that commands of this machine's tools do not get.
SECRET_VARIABLES = frozenset(
    {
        *("SA_NODE_TOKEN", "SA_NODE_TOKENS", "FARHAND_TOKEN", "OPENAI_API_KEY"),
        *("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"),
    }
)


@dataclass(frozen=True)
class LocalMachine:
    """The machine the gateway runs on, as its own tools use it."""

    files: Files
    jobs: Jobs
    undo_log: UndoLog
    confinement: LiveConfinement
    # Where the skills' files are found by commands.
    skill_files: Path
    # The folder of the agents' workspaces.
    agents_folder: Path
    questions: NodeQueries
    # The environment of commands.
    variables: Mapping[str, str]

    async def end_jobs(self, call_ids: Collection[str]) -> None:
        """End the commands that these calls started."""
        found = [job for call_id in call_ids if (job := await self.jobs.find_call(call_id)) is not None]
        await asyncio.gather(*(self.jobs.end(job) for job in found))


async def open_machine(
    home: Path, workspace: Path, live: LiveConfig, environ: Mapping[str, str], stack: contextlib.AsyncExitStack
) -> LocalMachine:
    """Open what the tools of this machine work with; it is closed with the stack."""
    skill_files = _make_folders(home, workspace)
    undo = live.now.undo
    undo_log = UndoLog(home / UNDO_FOLDER / "gateway", quota=undo.quota_mb * MIB, largest=undo.largest_mb * MIB)
    stack.callback(undo_log.close)
    files = local_files(workspace, home, lambda: live.now.tools.roots, undo_log, readable=skill_files)
    await asyncio.to_thread(roll_back_unfinished, files)
    variables = {n: value for n, value in environ.items() if n not in SECRET_VARIABLES and not is_own_secret(n)}
    jobs = await stack.enter_async_context(Jobs(home / "jobs", environment=variables, eager=False))
    confinement = _confinement(home, workspace, live, skill_files)
    stack.push_async_callback(confinement.close)
    agents_folder = skill_files.parent / AGENTS_FOLDER
    questions = NodeQueries(jobs, variables, home / "logs")
    return LocalMachine(files, jobs, undo_log, confinement, skill_files, agents_folder, questions, variables)


def _confinement(home: Path, workspace: Path, live: LiveConfig, skill_files: Path) -> LiveConfinement:
    made: list[LiveConfinement] = []
    # It is asked for each connection, and there is none before a command was started.
    proxy = EgressProxy(home / "egress", lambda: made[0].network() if made else NetworkRule("none"))
    made.append(
        LiveConfinement(
            lambda: live.now.sandbox,
            workspace,
            home,
            proxy,
            asyncio.get_running_loop(),
            name="gateway",
            readable=(skill_files,),
            steering=Steering.OF_CALLER,
        )
    )
    return made[0]


def _make_folders(home: Path, workspace: Path) -> Path:
    """Create the workspace and the folder of the skills' files, which is returned."""
    workspace.mkdir(parents=True, exist_ok=True)
    skill_files = home.resolve() / SKILL_FOLDERS
    skill_files.mkdir(mode=0o755, exist_ok=True)
    return skill_files
