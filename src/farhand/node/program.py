"""`farhand node`: the sdk client with the node family of tools."""

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
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from farhand import __version__
from farhand.machine.brake import FREEZE_FILE, FileBrake
from farhand.machine.files import Files
from farhand.machine.intents import INTENTS_FOLDER, settle
from farhand.machine.jobs import Jobs, machine_boot
from farhand.machine.kept import QUOTA, UNDO_FOLDER, KeptFiles, call_id
from farhand.machine.root import Root
from farhand.node.family import CAPABILITIES, Limits, family
from farhand.node.key import KEY_FILE, NodeKey
from farhand.node.log import kept_log
from farhand.node.questions import Questions
from farhand.node.transfers import Transfers
from farhand.protocol.errors import FarhandError
from farhand.protocol.known_secrets import KnownSecrets
from farhand.protocol.masking import own_secret
from farhand.protocol.messages import NodeInfo
from farhand.protocol.names import validate_node_id
from farhand.protocol.version import MIB
from farhand.sdk.backoff import ReconnectBackoff
from farhand.sdk.client import NodeClient
from farhand.sdk.errors import Shutdown
from farhand.sdk.ledger import FileLedger
from farhand.tools.node_files import FileTools
from farhand.tools.node_shell import ShellTools
from farhand.tools.undo import NAME as UNDO
from farhand.tools.undo import UndoTool

MAX_BYTES = 32 * MIB
"""A Farhand node and gateway agree on more than the plug-in guide's limits: whole files and images come through."""

CALLS_AT_ONCE = 16
THREADS = CALLS_AT_ONCE + 16
"""One for every call, the rest for questions and housekeeping. Each is started when it is first needed."""

SECRET_VARIABLES = frozenset({"SA_NODE_TOKEN", "SA_NODE_TOKENS", "FARHAND_TOKEN"})
SECRET_FILES = (
    "token",
    "farhand.db",
    "farhand.db-wal",
    "farhand.db-shm",
    "farhand.db-promises",
    "farhand.db-tidings",
    "memory.db",
    "memory.db-wal",
    "memory.db-shm",
    "lock",
    "farhand.toml",
    "node-token.json",
    FREEZE_FILE,
    "journal.key",
    "journal.head",
)
SECRET_FOLDERS = ("backups", "damaged", "replaced", "jobs", "nodes", UNDO_FOLDER)


ANOTHER_SECONDS = 5.0

log = logging.getLogger("farhand.node")


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    gateway_ws_url: str
    node_id: str
    token: str | None
    workspace: Path
    home: Path
    roots: tuple[Path, ...] = ()
    read_only: bool = False
    role: str = "execution"
    allowed: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    ca_file: str | None = None
    pinned_cert: str | None = None
    use_key: bool = False
    """Log in by the key in this node's folder."""
    undo_quota: int = QUOTA
    """Bytes of old content that are kept; 0: none."""


async def run_node(options: NodeOptions, shutdown: asyncio.Event) -> None:
    """Serve until `shutdown`. Raises FarhandError when this node cannot be, or is refused for good."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, "farhand-node"))
    try:
        validate_node_id(options.node_id)
        _refuse_unknown_tools(options)
        roots = [Root(root) for root in options.roots]
    except (ValueError, OSError) as error:
        raise FarhandError(f"this node cannot start: {error}") from None
    workspace = _workspace(options)
    environment = {n: value for n, value in os.environ.items() if n not in SECRET_VARIABLES and not own_secret(n)}
    folder = node_folder(options.home, options.node_id)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with _held(folder, options.node_id):
        with kept_log(folder / "logs", options.node_id, workspace, KnownSecrets([options.token or ""])):
            await _serve(options, shutdown, folder, workspace, roots, environment)


async def _serve(
    options: NodeOptions,
    shutdown: asyncio.Event,
    folder: Path,
    workspace: Path,
    roots: list[Root],
    environment: dict[str, str],
) -> None:
    key = NodeKey.load(folder) if options.use_key else None
    ledger = FileLedger(folder / "ledger", machine_boot())
    brake = FileBrake(folder / FREEZE_FILE)
    kept = KeptFiles(options.home / UNDO_FOLDER / folder.name, quota=options.undo_quota)
    try:
        async with Jobs(folder / "jobs", environment=environment) as jobs:
            intents = folder / INTENTS_FOLDER
            files = Files(
                workspace,
                roots=roots,
                hidden=[
                    *(options.home / name for name in (*SECRET_FILES, *SECRET_FOLDERS)),
                    folder / KEY_FILE,
                    intents,
                ],
                read_only=options.read_only,
                kept=kept,
                intents=intents,
            )
            await asyncio.to_thread(settle, files)
            shell = ShellTools(jobs, workspace, call_id=call_id.get)
            limits = Limits(options.read_only, bool(roots), options.allowed, options.denied)
            transfers = Transfers(files, folder / "transfers", brake)

            async def preview(params: msgspec.Raw) -> Any:
                from farhand.node.previews import Previews  # noqa: PLC0415 - much that a node at rest does without

                return await Previews(files, limits).preview(params)

            async def end_all() -> tuple[int, str | None]:
                transfers.stop_all()
                ending = await jobs.end_all()
                left = ", ".join(f"{process.name} {process.pid}" for process in ending.survivors)
                return len(ending.ended), f"still running, not ours to end: {left}" if left else None

            if brake.order is not None:  # whatever is left of an ending that was cut short
                log.warning("this node is %s; it takes no call until its gateway lifts that", brake.order.told)
                await end_all()
            client = NodeClient(
                options.gateway_ws_url,
                options.token,
                node_info=NodeInfo(options.node_id, options.node_id, host_os(), __version__, list(options.tags)),
                max_concurrent_tools=CALLS_AT_ONCE,
                max_request_bytes=MAX_BYTES,
                max_response_bytes=MAX_BYTES,
                reconnect_backoff=ReconnectBackoff(initial_delay=0.5, max_delay=30.0),
                role=options.role,
                runtime={"hostOs": host_os(), "hostEnv": sorted(environment), "workspace": str(workspace)},
                ca_file=options.ca_file,
                pinned_cert=options.pinned_cert,
                token_in_query=False,
                ledger=ledger,
                queries={
                    **Questions(jobs, environment, folder / "logs").handlers(),
                    "transfers": transfers.held,
                    "preview": preview,
                },
                extension=transfers,
                key=key,
                brake=brake,
                end_all=end_all,
            )
            try:
                with contextlib.suppress(Shutdown):
                    await client.run(family(FileTools(files), shell, limits, UndoTool(files, kept)), shutdown)
            finally:
                await transfers.close()
    finally:
        ledger.close()
        kept.close()


def _refuse_unknown_tools(options: NodeOptions) -> None:
    """A slip in the name of a tool must not lend what its owner meant to keep."""
    for name in (*options.allowed, *options.denied):
        if name not in (*CAPABILITIES, UNDO):
            known = ", ".join((*CAPABILITIES, UNDO))
            raise ValueError(f"there is no tool {name!r} to allow or deny; there are {known}")


@contextlib.asynccontextmanager
async def _held(folder: Path, node_id: str) -> AsyncIterator[None]:
    """Hold a node's folder: two programs that take the same calls would run them twice.

    One that is just ending is waited for. Raises FarhandError while another runs.
    """
    with (folder / "lock").open("w") as file:
        deadline = time.monotonic() + ANOTHER_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise FarhandError(f"node {node_id!r} already runs on this machine, with {folder}") from None
            await asyncio.sleep(0.1)
        yield


def _workspace(options: NodeOptions) -> Path:
    """Where relative paths begin: with roots, the first of them unless the workspace lies in one."""
    workspace = options.workspace
    if options.roots and not any(workspace.resolve().is_relative_to(root.resolve()) for root in options.roots):
        workspace = options.roots[0]
    if not workspace.is_dir():
        raise FarhandError(f"the workspace {workspace} is not a folder")
    return workspace


def node_folder(home: Path, node_id: str) -> Path:
    """Where a node keeps what it must not forget."""
    return home / "nodes" / _folder_name(node_id)


def _folder_name(node_id: str) -> str:
    """A node id as the name of a folder: two ids never share one, whatever the file system thinks of their letters."""
    return f"{re.sub(r'[^a-z0-9.-]', '-', node_id.lower())[:40]}-{hashlib.sha256(node_id.encode()).hexdigest()[:8]}"


def host_os() -> str:
    return {"linux": "linux", "darwin": "darwin", "win32": "windows"}.get(sys.platform, sys.platform)
