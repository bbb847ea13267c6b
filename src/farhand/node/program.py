"""`farhand node`: the SDK client with the tools of a node."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from farhand import __version__
from farhand.machine.files.confined_root import ConfinedRoot
from farhand.machine.files.files import Files
from farhand.machine.files.local_paths import exposed_in_home
from farhand.machine.files.private_files import open_private, restrict_to_owner, restrict_tree
from farhand.machine.files.steering_files import SteeringFiles
from farhand.machine.files.transaction_log import TRANSACTIONS_FOLDER, roll_back_unfinished
from farhand.machine.files.undo_log import QUOTA, UNDO_FOLDER, UndoLog, call_id
from farhand.machine.freeze_file import FREEZE_FILE, FreezeFile
from farhand.machine.jobs.jobs import Jobs, machine_boot
from farhand.machine.load import MachineLoad
from farhand.machine.sandbox.confinement import Confinement, SandboxError
from farhand.machine.sandbox.levels import separate_folders
from farhand.machine.sandbox.trials import Trials
from farhand.node.confinement import NodeConfinement, NoSandboxSettings, SandboxSettings, confine
from farhand.node.egress_queries import egress_queries
from farhand.node.identity import NodeKey, load_receipt_key, load_sealing_key
from farhand.node.log import logging_to_file
from farhand.node.mcp_servers import ServerHost
from farhand.node.queries import NodeQueries
from farhand.node.stored_limits import LendingError, LendingLimits, effective_limits, store_limits
from farhand.node.tools import node_tools
from farhand.node.transfers.manager import NodeTransfers
from farhand.protocol.errors import Failed, FarhandError
from farhand.protocol.messages import NodeInfo
from farhand.protocol.names import validate_node_id
from farhand.protocol.redaction import KnownSecrets, is_own_secret
from farhand.protocol.version import MIB
from farhand.sdk.accepted_calls import AcceptedCallsFile
from farhand.sdk.backoff import ReconnectBackoff
from farhand.sdk.client import NodeClient
from farhand.sdk.errors import Shutdown
from farhand.tools.node_files import NodeFileTools
from farhand.tools.node_shell import NodeShellTools
from farhand.tools.trial import TrialTool
from farhand.tools.undo import UndoTool

# Between a Farhand node and gateway, larger than the plug-in guide's limits: whole files and images fit.
MAX_BYTES = 32 * MIB

CALLS_AT_ONCE = 16
# One for every call, the rest for queries and housekeeping. Each is started on demand.
THREADS = CALLS_AT_ONCE + 16

SECRET_VARIABLES = frozenset({"SA_NODE_TOKEN", "SA_NODE_TOKENS", "FARHAND_TOKEN"})
ANOTHER_SECONDS = 5.0

log = logging.getLogger(__name__)


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    gateway_ws_url: str
    # Gateways that serve together with the first.
    other_gateways: tuple[str, ...] = ()
    node_id: str
    token: str | None
    workspace: Path
    home: Path
    role: str = "execution"
    # The limits and tags of this start, in addition to the stored ones.
    limits: LendingLimits = LendingLimits()
    # Ignore stored limits and tags; only those given here apply.
    reset_limits: bool = False
    ca_file: str | None = None
    pinned_cert: str | None = None
    # Log in with the key in this node's folder.
    use_key: bool = False
    # Given the workspace, the home and the node's folder, returns how commands are confined if no folders are lent.
    sandbox_settings: Callable[[Path, Path, Path], SandboxSettings] = lambda workspace, home, _: NoSandboxSettings(
        workspace, home
    )
    # The workspace is shared with the agent of a gateway on this machine.
    agent_workspace: bool = False
    # Bytes of old content stored for undo; 0 disables it.
    undo_quota: int = QUOTA


async def run_node(options: NodeOptions, shutdown: asyncio.Event, leave: Callable[[], bool] = lambda: True) -> None:
    """Serve until `shutdown`. Raises FarhandError if this node cannot start, or is refused permanently.

    `leave` is called then: if it returns true, commands that a caller waits for continue until the next start.
    """
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, "farhand-node"))
    try:
        validate_node_id(options.node_id)
    except ValueError as error:
        raise FarhandError(f"this node cannot start: {error}") from None
    environment = {n: value for n, value in os.environ.items() if n not in SECRET_VARIABLES and not is_own_secret(n)}
    folder = node_folder(options.home, options.node_id)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    restrict_to_owner(folder.parent)
    for own in (folder, options.home / UNDO_FOLDER):
        await asyncio.to_thread(restrict_tree, own)
    async with _held(folder, options.node_id):
        holds = _lent(options, folder)
        try:
            roots = [ConfinedRoot(root) for root in holds.root]
        except (ValueError, OSError) as error:
            raise FarhandError(f"this node cannot start: {error}") from None
        workspace = _workspace(options.workspace, [Path(root) for root in holds.root])
        settings = options.sandbox_settings(workspace, options.home, folder)
        confined = await confine(holds, workspace, options.home, folder, settings)
        roots = roots or _sandbox_roots(confined.confinement, workspace)
        store_limits(folder, options.limits, reset=options.reset_limits)
        log.info("lending this machine %s", f"with {holds.described()}" if holds.described() else "without limits")
        with logging_to_file(folder / "logs", options.node_id, workspace, KnownSecrets([options.token or ""])):
            try:
                await _serve(options, shutdown, folder, workspace, roots, holds, confined, environment, leave)
            finally:
                await confined.close()


async def _serve(
    options: NodeOptions,
    shutdown: asyncio.Event,
    folder: Path,
    workspace: Path,
    roots: list[ConfinedRoot],
    holds: LendingLimits,
    confined: NodeConfinement,
    environment: dict[str, str],
    leave: Callable[[], bool],
) -> None:
    key = NodeKey.load(folder) if options.use_key else None
    ledger = AcceptedCallsFile(folder / "ledger", machine_boot())
    freeze_state = FreezeFile(folder / FREEZE_FILE)
    undo_log = UndoLog(options.home / UNDO_FOLDER / folder.name, quota=options.undo_quota)
    try:
        # A frozen node starts no process, not even the keeper; the first command after a thaw does.
        async with Jobs(folder / "jobs", environment=environment, eager=freeze_state.order is None) as jobs:
            transaction_folder = folder / TRANSACTIONS_FOLDER
            files = Files(
                workspace,
                roots=roots,
                hidden=[options.home],
                exposed=exposed_in_home(options.home, workspace, *(Path(root.path) for root in roots)),
                read_only=holds.read_only,
                undo_log=undo_log,
                transaction_folder=transaction_folder,
                # A node does not know for which caller it works, so it never changes the gateway's steering files.
                steering=SteeringFiles(options.home, [workspace] if options.agent_workspace else []),
            )
            await asyncio.to_thread(roll_back_unfinished, files)
            trials = Trials(folder / "trials", files, confined.folders, confined.trial_sandbox)
            shell = NodeShellTools(
                jobs, workspace, call_id=call_id.get, confinement=confined.confinement, trials=trials
            )
            limits = confined.limits
            tools = node_tools((NodeFileTools(files), shell, UndoTool(files, undo_log), TrialTool(trials)), limits)
            transfers = NodeTransfers(files, folder / "transfers", freeze_state, limits)
            sealing = load_sealing_key(folder / "sealing.key")
            mcp_servers = ServerHost(
                workspace, environment, limits, lambda: freeze_state.order, confined.confinement, sealing
            )

            async def preview(params: msgspec.Raw) -> Any:
                from farhand.node.previews import preview_call  # noqa: PLC0415 - memory of an idle node

                return await preview_call(tools, limits, params)

            async def end_all() -> tuple[int, str | None]:
                transfers.stop_all()
                servers = await mcp_servers.end_all()
                ending = await jobs.end_all()
                left = ", ".join(f"{process.name} {process.pid}" for process in ending.survivors)
                return len(ending.ended) + servers, f"still running, not ours to end: {left}" if left else None

            async def end_call(name: str) -> str:
                job = await jobs.find_call(name)
                return "" if job is None else (await jobs.end(job)).describe("ended when the node was back")

            if freeze_state.order is not None:  # an earlier freeze may have been interrupted
                log.warning(
                    "this node is %s; it accepts no calls until its gateway lifts the freeze",
                    freeze_state.order.summary,
                )
                await end_all()
            client = NodeClient(
                options.gateway_ws_url,
                options.token,
                node_info=NodeInfo(options.node_id, options.node_id, host_os(), __version__, list(holds.tags)),
                max_concurrent_tools=CALLS_AT_ONCE,
                max_request_bytes=MAX_BYTES,
                max_response_bytes=MAX_BYTES,
                reconnect_backoff=ReconnectBackoff(initial_delay=0.5, max_delay=30.0),
                role=options.role,
                runtime={
                    "hostOs": host_os(),
                    "hostEnv": sorted(environment),
                    "workspace": str(workspace),
                    "limits": holds.announced() | confined.levels,
                },
                sealing=sealing,
                receipt_key=key or load_receipt_key(folder / "receipt.key"),
                ca_file=options.ca_file,
                pinned_cert=options.pinned_cert,
                token_in_query=None,
                ledger=ledger,
                queries={
                    **NodeQueries(
                        jobs, environment, folder / "logs", limits, freeze_state, MachineLoad(workspace)
                    ).handlers(),
                    "transfers": transfers.held,
                    "preview": preview,
                    "mcp": mcp_servers.query,
                    **egress_queries(confined.credentials, sealing),
                },
                extension=transfers,
                key=key,
                freeze_state=freeze_state,
                end_all=end_all,
                end_call=end_call,
                other_gateways=options.other_gateways,
                leave=leave,
            )
            try:
                with contextlib.suppress(Shutdown):
                    await client.run(tools, shutdown)
            finally:
                await mcp_servers.close()
                await transfers.close()
    finally:
        ledger.close()
        undo_log.close()


def _lent(options: NodeOptions, folder: Path) -> LendingLimits:
    try:
        holds = effective_limits(options.home, folder, options.limits, reset=options.reset_limits)
        return msgspec.structs.replace(holds, root=separate_folders(holds.root, [str(options.home)]))
    except (LendingError, SandboxError) as error:
        raise FarhandError(f"this node cannot start: {error}") from None


@contextlib.asynccontextmanager
async def _held(folder: Path, node_id: str) -> AsyncIterator[None]:
    """Lock a node's folder: two programs that accept the same calls would run them twice.

    Waits for one that is just ending. Raises FarhandError while another runs.
    """
    with open_private(folder / "lock", "w") as file:
        deadline = time.monotonic() + ANOTHER_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    running = f"node {node_id!r} already runs on this machine, with {folder}"
                    raise FarhandError(f"{running}; stop it first, or use another --id") from None
            await asyncio.sleep(0.1)
        yield


def _sandbox_roots(confinement: Callable[[], Confinement], workspace: Path) -> list[ConfinedRoot]:
    """Return the folders that sandboxed commands can write, for the file tools; none without a sandbox.

    A file tool that wrote elsewhere could plant a program that later runs outside of the sandbox.
    """
    try:
        sandbox, _ = confinement()
    except Failed as error:
        log.error("no command runs on this node: %s", error)
        return [ConfinedRoot(workspace)]
    if sandbox is None:
        return []
    return [ConfinedRoot(sandbox.workspace), *(ConfinedRoot(mount.host) for mount in sandbox.mounts if mount.writable)]


def _workspace(workspace: Path, roots: list[Path]) -> Path:
    """Return the base of relative paths: with roots, the first of them unless the workspace is in one."""
    if roots and not any(workspace.resolve().is_relative_to(root.resolve()) for root in roots):
        workspace = roots[0]
    if not workspace.is_dir():
        raise FarhandError(f"the workspace {workspace} is not a folder")
    return workspace


def node_folder(home: Path, node_id: str) -> Path:
    """Return the folder with a node's state."""
    return home / "nodes" / _folder_name(node_id)


def _folder_name(node_id: str) -> str:
    """Return a folder name for a node id, unique also on file systems that ignore case."""
    return f"{re.sub(r'[^a-z0-9.-]', '-', node_id.lower())[:40]}-{hashlib.sha256(node_id.encode()).hexdigest()[:8]}"


def host_os() -> str:
    return {"linux": "linux", "darwin": "darwin", "win32": "windows"}.get(sys.platform, sys.platform)
