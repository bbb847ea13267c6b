"""`node`: connect this machine to a gateway. Loads nothing of the gateway."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import click

from farhand import __version__
from farhand.cli.json_output import json_option, print_only
from farhand.cli.run.runtime import run_loop, set_up_logging
from farhand.machine import tracing
from farhand.machine.files.undo_log import MIB, QUOTA
from farhand.machine.home import DEFAULT_PORT, home_folder, make_home
from farhand.machine.sandbox.confinement import Confinement, Steering
from farhand.machine.sandbox.egress import EgressProxy, NetworkRule
from farhand.machine.sandbox.egress_credentials import EgressCredentials
from farhand.machine.sandbox.levels import LEVELS, ChosenSandbox
from farhand.node.confinement import NoSandboxSettings
from farhand.node.identity import KEY_FILE
from farhand.node.names import default_node_id
from farhand.node.program import NodeOptions, node_folder, run_node
from farhand.node.stored_limits import LendingLimits
from farhand.protocol.errors import Failed, FarhandError
from farhand.protocol.redaction import KnownSecrets
from farhand.sdk import client as sdk_client
from farhand.sdk.client import socket_url
from farhand.sdk.errors import Refused

if TYPE_CHECKING:
    from farhand.app.sandbox import LiveConfinement

# What `farhand join` stores: the gateway, this node's id and token, and the certificates to trust.
NODE_TOKEN_FILE = "node-token.json"  # noqa: S105
TRUST = ("ca_file", "pinned_cert")
DEFAULT_GATEWAY = f"http://127.0.0.1:{DEFAULT_PORT}"

Command = TypeVar("Command", bound=Callable[..., Any])


FOLDER = click.Path(file_okay=False)
FILE = click.Path(exists=True, dir_okay=False)
NODE_OPTIONS = (
    click.option("--id", "node_id", help="Name of this node.  [default: the host name]"),
    click.option("--workspace", type=FOLDER, help="Folder where relative paths start.  [the current one]"),
    click.option("--root", multiple=True, type=FOLDER, help="Share only this folder. Repeatable."),
    click.option("--read-only", is_flag=True, help="Share no tool that changes this machine."),
    click.option("--role", type=click.Choice(["execution", "specialized"]), default="execution", show_default=True),
    click.option("--allow-tool", "allow_tools", multiple=True, help="Share this tool despite --root. Repeatable."),
    click.option("--deny-tool", "deny_tools", multiple=True, help="Do not share this tool. Repeatable."),
    click.option(
        "--sandbox",
        type=click.Choice(LEVELS),
        help="How commands are confined to --root.  [default: auto, the best that works here]",
    ),
    click.option(
        "--network",
        metavar="RULE",
        help="What confined commands reach: host, none, local, or allow:HOST,...  [default: host]",
    ),
    click.option("--memory", metavar="SIZE", default="", help="Memory for confined commands, such as 2G."),
    click.option("--cpus", metavar="N", default="", help="CPUs for confined commands, such as 1.5."),
    click.option("--processes", metavar="N", default="", help="How many processes confined commands may have."),
    click.option(
        "--disk", metavar="SIZE", default="", help="How much a confined command may add to --root, such as 10G."
    ),
    click.option(
        "--undo-quota",
        type=click.IntRange(min=0),
        default=QUOTA // MIB,
        show_default=True,
        metavar="MB",
        help="Space for old contents of changed files, for undo; 0 disables undo.",
    ),
    click.option("--tag", "tags", multiple=True, help="Tag for grouping nodes. Repeatable."),
    click.option("--reset-limits", is_flag=True, help="Replace the stored limits and tags with those given now."),
    click.option("--ca-file", type=FILE, help="Certificate authority for wss://."),
    click.option("--home", type=FOLDER, help="State of this node.  [~/.farhand]"),
    click.option("--log-level", default="info", help="debug, info, warning or error."),
    click.option("--pinned-cert", type=FILE, help="Trust only this certificate."),
)


def node_options(command: Command) -> Command:
    """Add the options for what a node shares and how it connects.

    Limits (--root, --read-only, --allow-tool, --deny-tool) and tags are stored and apply to later starts.
    """
    for option in reversed(NODE_OPTIONS):
        command = option(command)
    return command


def given_limits(options: dict[str, Any]) -> LendingLimits:
    """Return the limits and tags that the options of a command name."""
    given = {name: value for name in LendingLimits.__struct_fields__ if (value := options[name])}
    return LendingLimits(**{**given, "root": tuple(str(Path(root).absolute()) for root in options["root"])})


class NodeCommands(click.Group):
    """Loads the subcommands only when they are used."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # these commands end, and fail when interrupted
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for module in ("join", "pair"):
            importlib.import_module(f"farhand.cli.run.{module}")
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return ["bundle", "key", "pair"]


@click.group(cls=NodeCommands, invoke_without_command=True, subcommand_metavar="[bundle|key|pair]")
@click.option(
    "--gateway",
    "gateway_urls",
    multiple=True,
    help=f"ws(s):// or http(s)://; repeat it for gateways that serve together.  [default: {DEFAULT_GATEWAY}]",
)
@click.option("--token", help="Token of this node.  [default: SA_NODE_TOKEN, then the one from `farhand join`]")
@click.option("--token-stdin", is_flag=True, help="Read the token from standard input.")
@click.option("--with-parent", type=int, hidden=True)
@json_option("Print one JSON document on standard output once connected.")
@node_options
def node(
    gateway_urls: tuple[str, ...], with_parent: int | None, token_stdin: bool, as_json: bool, **options: Any
) -> None:
    """Share this machine's shell, files and search with a gateway."""
    if click.get_current_context().invoked_subcommand is not None:
        return
    gateway_url, *others = gateway_urls or (None,)
    if token_stdin:
        options["token"] = sys.stdin.readline().strip()
    else:
        options["token"] = options["token"] or _environment_token()
    if not options["token"]:
        gateway_url = _stored_login(home_folder(options["home"]), gateway_url, options)
    wanted = [gateway_url or DEFAULT_GATEWAY, *(other for other in others if other is not None)]
    run_until_stopped(wanted[0], options, with_parent, as_json=as_json, others=wanted[1:])


def run_until_stopped(
    gateway_url: str,
    options: dict[str, Any],
    with_parent: int | None = None,
    *,
    as_json: bool = False,
    others: Sequence[str] = (),
) -> None:
    """Run a node until SIGTERM or SIGINT. `as_json` prints one document once connected, or at the end.

    `others`: gateways that serve together with the first.
    """
    set_up_logging(options["log_level"]).know(KnownSecrets([options["token"] or ""]))
    home = home_folder(options["home"])
    make_home(home)
    node_id = options["node_id"] or default_node_id()
    tracing.set_up("farhand-node", node_id, os.environ)
    chosen = NodeOptions(
        gateway_ws_url=node_socket_url(gateway_url),
        other_gateways=tuple(map(node_socket_url, others)),
        node_id=node_id,
        token=options["token"],
        workspace=Path(options["workspace"] or Path.cwd()).absolute(),
        role=options["role"],
        limits=given_limits(options),
        reset_limits=options["reset_limits"],
        ca_file=options["ca_file"],
        pinned_cert=options["pinned_cert"],
        undo_quota=options["undo_quota"] * MIB,
        agent_workspace=with_parent is not None,
        home=home,
        use_key=not options["token"] and (node_folder(home, node_id) / KEY_FILE).exists(),
        sandbox_settings=lambda workspace, home, folder: _SandboxSettings(
            home, workspace, folder, agent_workspace=with_parent is not None
        ),
    )

    async def serve() -> None:
        shutdown = asyncio.Event()
        leave = True

        def end() -> None:
            nonlocal leave
            leave = with_parent is None  # `farhand up` sends SIGINT when it stops as a whole
            shutdown.set()

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, shutdown.set)
        loop.add_signal_handler(signal.SIGINT, end)
        if with_parent is not None:
            loop.create_task(_stop_with_parent(with_parent, shutdown))  # noqa: RUF006
        await run_node(chosen, shutdown, lambda: leave)

    facts = {"node_id": node_id, "gateway": gateway_url, "workspace": str(chosen.workspace), "home": str(home)}
    facts |= {"version": __version__, "pid": os.getpid()}
    connected = _FirstConnection(lambda: print_only({"ready": True, **facts}))
    if as_json:
        connected.listen()
    try:
        run_loop(serve())
    except Refused as error:
        with_nothing = not chosen.token and not chosen.use_key
        hint = "; this node has neither a token nor a key: run `farhand node pair` on the gateway"
        raise FarhandError(f"{gateway_url}: {error}{hint if with_nothing else ''}") from None
    if as_json and not connected.seen:
        print_only({"ready": False, **facts})


class _SandboxSettings:
    """Confines commands as `[sandbox]` of this home says, with the same code as the agent's `exec`.

    Reading the settings needs several megabytes of memory, so a home without settings does not load that code.
    """

    def __init__(self, home: Path, workspace: Path, folder: Path, *, agent_workspace: bool) -> None:
        """Made in the event loop of the node, whose own folder is `folder`.

        `agent_workspace`: the folder is that of an agent, whose steering files no command of a node may change.
        """
        self._home = home
        self._agent_workspace = agent_workspace
        self._workspace = workspace
        self._loop = asyncio.get_running_loop()
        self._added = EgressCredentials(folder, folder / "egress")
        self._proxy = EgressProxy(folder / "egress", self._rule, self._added)
        self._name = folder.name
        self._live: LiveConfinement | None = None
        self._unconfined = NoSandboxSettings(workspace, home)

    def __call__(self) -> Confinement:
        """Return the current confinement. Raises Failed if the settings are invalid."""
        live = self._load()
        return self._unconfined() if live is None else live()

    def levels(self) -> dict[str, str]:
        live = self._load()
        return self._unconfined.levels() if live is None else live.levels()

    def trial_sandbox(self) -> ChosenSandbox:
        live = self._load()
        return self._unconfined.trial_sandbox() if live is None else live.trial_sandbox()

    @property
    def credentials(self) -> EgressCredentials | None:
        """Those of the proxy, if it is needed when the node starts."""
        return self._added if self._rule().kind in ("local", "allow") else None

    async def close(self) -> None:
        await self._proxy.close()

    def _rule(self) -> NetworkRule:
        return NetworkRule("none") if self._live is None else self._live.network()

    def _load(self) -> LiveConfinement | None:
        """Return the settings; None if there are none. Raises Failed."""
        if self._live is None:
            settings = (self._home / "farhand.toml").exists()
            if not settings and not any(name.startswith("FARHAND_SANDBOX_") for name in os.environ):
                return None
            self._live = self._read()
        return self._live

    def _read(self) -> LiveConfinement:
        from farhand import config  # noqa: PLC0415
        from farhand.app.sandbox import LiveConfinement  # noqa: PLC0415

        try:
            live = config.LiveConfig(self._home, config.load(self._home))
            # A node does not know for which caller a command runs, and others can type into it: none may change them.
            steering = Steering.OF_CALLER if self._agent_workspace else Steering.NONE
            return LiveConfinement(
                lambda: live.now.sandbox,
                self._workspace,
                self._home,
                self._proxy,
                self._loop,
                name=self._name,
                steering=steering,
            )
        except FarhandError as error:
            raise Failed(f"cannot use the settings in {self._home}: {error}; the command did not run") from None


class _FirstConnection(logging.Filter):
    """Calls a function when the node connects for the first time, which the client logs at level INFO."""

    def __init__(self, notify: Callable[[], None]) -> None:
        super().__init__()
        self._notify = notify
        self.seen = False

    def listen(self) -> None:
        logger = logging.getLogger(sdk_client.__name__)
        self._level = logger.getEffectiveLevel()
        logger.setLevel(min(self._level, logging.INFO))
        logger.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        if not self.seen and getattr(record, "event", "") == "connect.ok":
            self.seen = True
            self._notify()
        return record.levelno >= self._level


def _stored_login(home: Path, gateway_url: str | None, options: dict[str, Any]) -> str | None:
    """Use what `farhand join` stored, unless another gateway or node is given; return the gateway."""
    try:
        stored = json.loads((home / NODE_TOKEN_FILE).read_text())
        known, node_id, token = str(stored["gateway"]), str(stored["node_id"]), str(stored.get("token", ""))
    except FileNotFoundError:
        return gateway_url
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FarhandError(f"cannot read {home / NODE_TOKEN_FILE}: {error}; run `farhand join` again") from None
    same = gateway_url is None or node_socket_url(gateway_url) == node_socket_url(known)
    if same and options["node_id"] in (None, node_id):
        options["node_id"], options["token"] = node_id, token or None
        if not any(options[name] for name in TRUST):
            options.update({name: stored.get(name) for name in TRUST})
        return known
    return gateway_url


def _environment_token() -> str | None:
    """Return the token and remove it from the environment, so that neither commands nor `/proc` show it."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    address, token = libc.getenv(b"SA_NODE_TOKEN"), os.environ.get("SA_NODE_TOKEN")
    if token and address:
        ctypes.memset(address, ord("*"), len(os.fsencode(token)))
    os.environ.pop("SA_NODE_TOKEN", None)
    return token


async def _stop_with_parent(parent: int, shutdown: asyncio.Event) -> None:
    """Stop a node that a gateway started when the gateway is gone."""
    while os.getppid() == parent:  # noqa: ASYNC110
        await asyncio.sleep(0.5)
    shutdown.set()


def node_socket_url(url: str) -> str:
    """Return the socket of `http(s)://host:port[/prefix]` or `ws(s)://host:port[/path]`. Raises FarhandError."""
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(full)
        usable = bool(parts.scheme in ("http", "https", "ws", "wss") and parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise FarhandError(f"invalid gateway {url!r}; use http(s)://host:port or ws(s)://host:port/v1/nodes/ws")
    if parts.scheme in ("ws", "wss") and parts.path in ("", "/"):
        full = parts._replace(scheme="https" if parts.scheme == "wss" else "http").geturl()
    return socket_url(full)
