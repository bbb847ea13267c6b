"""The gateway process: puts the parts together, serves, and stops cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import gc
import ipaddress
import logging
import os
import signal
import socket
import ssl
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec
import uvicorn

from farhand.agent.compaction import Compactor
from farhand.agent.loop import Limits
from farhand.agent.skills import Skill
from farhand.api.mcp.server import mcp_routes
from farhand.api.node_socket.door import node_door
from farhand.api.openai.completions import chat_routes
from farhand.api.routes.agent_process import DirectDoor, direct_routes
from farhand.api.routes.approvals import approval_routes
from farhand.api.routes.console import console_routes
from farhand.api.routes.core import routes
from farhand.api.routes.cron import cron_routes
from farhand.api.routes.fanout import fanout_routes
from farhand.api.routes.freeze import freeze_routes
from farhand.api.routes.journal import journal_routes
from farhand.api.routes.logs import log_routes
from farhand.api.routes.memory import memory_routes
from farhand.api.routes.metrics import metrics_routes
from farhand.api.routes.pairing import pairing_routes
from farhand.api.routes.policy import policy_routes
from farhand.api.routes.sessions import session_routes
from farhand.api.routes.transfers import transfer_routes
from farhand.api.routes.undo import undo_routes
from farhand.api.routes.workspace import workspace_routes
from farhand.api.server.browser_sessions import BrowserSessions, SessionLimits
from farhand.api.server.connection_limits import Lobby
from farhand.api.server.guard import Guard, GuardSettings
from farhand.api.server.http_protocol import HttpConnection
from farhand.api.server.idempotency import Repeats
from farhand.api.server.openapi import openapi_routes
from farhand.api.server.origins import parse_host
from farhand.api.server.router import Route, Router
from farhand.api.server.tls_limits import Threshold
from farhand.app.messaging import Messaging
from farhand.app.sandbox import LiveConfinement
from farhand.app.schedule import open_schedule
from farhand.channels.registry import KINDS
from farhand.config import Config, ConfigError, LiveConfig, ObjectsSection
from farhand.gateway.access.credentials import OWNER
from farhand.gateway.access.daily_budget import keyed_call_budget, message_budget
from farhand.gateway.calls.policy import Policy
from farhand.gateway.calls.refusals import RefusalBudget
from farhand.gateway.control.undo import Undo
from farhand.gateway.hub import Hub
from farhand.gateway.nodes.logs_tool import NodeLogs
from farhand.gateway.schedule.scheduler import Scheduler
from farhand.gateway.schedule.tools import cron_tools
from farhand.gateway.sessions.agent_process import Direct
from farhand.gateway.sessions.agents import Agents
from farhand.gateway.sessions.keys import MAIN
from farhand.gateway.sessions.process_agent import SessionAgent
from farhand.gateway.sessions.prompts import Prompts, StoredFiles, files_in
from farhand.gateway.sessions.runner import Turns
from farhand.gateway.sessions.sessions import Sessions as ChatSessions
from farhand.gateway.sessions.tools import SessionTools
from farhand.gateway.transfers.tool import transfer_tool
from farhand.gateway.transfers.workspace_endpoint import workspace_end
from farhand.gateway.upkeep.backups import Backups, BackupSettings
from farhand.gateway.upkeep.retention import HistoryLimits, HistoryRetention, Retention
from farhand.gateway.upkeep.token_expiry import TokenExpiry
from farhand.gateway.upkeep.token_uses import TokenUses
from farhand.gateway.workspace.files_tools import NativeFiles
from farhand.gateway.workspace.memory_sources import memory_sources
from farhand.gateway.workspace.settings_tool import Settings
from farhand.gateway.workspace.skill_folders import SKILL_FOLDERS, SkillFolders
from farhand.gateway.workspace.skills import LocalSkills, Skills
from farhand.gateway.workspace.workspace import Workspace
from farhand.llm.registry import Models
from farhand.machine.files.local_paths import AGENTS_FOLDER, local_files
from farhand.machine.files.private_files import open_private, restrict_to_owner, restrict_tree, write_private
from farhand.machine.files.transaction_log import roll_back_unfinished
from farhand.machine.files.undo_log import MIB, UNDO_FOLDER, UndoLog
from farhand.machine.jobs.jobs import Jobs
from farhand.memory.memory import Memory
from farhand.memory.registry import Provider, make_embedder
from farhand.memory.tools import memory_tools
from farhand.node.queries import NodeQueries
from farhand.protocol.errors import FarhandError
from farhand.protocol.redaction import KnownSecrets, is_own_secret
from farhand.store.objects.base import SKILLS as SKILLS_FOLDER
from farhand.store.objects.base import Objects
from farhand.store.objects.folder import FolderObjects
from farhand.tools.agent_files import AgentFileTools
from farhand.tools.agent_shell import AgentShellTools
from farhand.tools.agent_tools import main_agent_tools, sub_agent_tools
from farhand.tools.http_guide import guide_tools
from farhand.tools.skill_paths import SkillPaths
from farhand.tools.tool import Tool

log = logging.getLogger("farhand")

DRAIN_SECONDS = 10.0
# A call makes some hundred objects and leaves no cycles; the default would go looking for some every few calls.
COLLECT = (50_000, 20, 20)
GATEWAY_FILE = "gateway.json"
# What the commands of this machine's tools are not given.
SECRET_VARIABLES = frozenset({"SA_NODE_TOKEN", "SA_NODE_TOKENS", "FARHAND_TOKEN", "OPENAI_API_KEY"})
MEMORY_FILE = "memory.db"
# What is read again whenever the file changes; all else holds from the next start.
LIVE_SECTIONS = ("tools", "policy", "schedule", "heartbeat", "retention", "sandbox")


class Address(msgspec.Struct, frozen=True):
    """Where a running gateway is found; written to the home while it serves."""

    url: str
    pid: int


class Gateway:
    """One gateway on one home folder."""

    def __init__(
        self,
        home: Path,
        config: Config,
        *,
        workspace: Path | None = None,
        open: bool = False,  # noqa: A002
    ) -> None:
        """`workspace`: where the tools of this machine work. Raises ConfigError for an exposure that is never meant."""
        section = config.gateway
        if open and not _is_loopback(section.host):
            raise ConfigError(f"--open needs a loopback address: with {section.host} anybody could use the shell")
        if bool(section.tls_cert) != bool(section.tls_key):
            raise ConfigError("TLS needs both tls_cert and tls_key")
        self._home = home
        self._config = config
        self._section = section
        self.workspace = (workspace or home / AGENTS_FOLDER / "main").absolute()
        self._routes: list[Route] = []
        self._open = open
        self._hub: Hub | None = None
        self._server: _Server | None = None
        self._sessions: BrowserSessions | None = None
        self._chats: ChatSessions | None = None
        self._scheduler: Scheduler | None = None
        self._retention: Retention | None = None
        self._history: HistoryRetention | None = None
        self._messaging: Messaging | None = None
        self.url = ""
        # Told to stop; open calls may still be finishing.
        self.stopping = False
        # Told what is to be hidden, once that is known: for a log that is written elsewhere.
        self.on_secrets: Callable[[KnownSecrets], None] = lambda _: None

    async def run(self, environ: Mapping[str, str], ready: Callable[[Gateway], None]) -> None:
        """Serve until SIGTERM or SIGINT. Calls `ready` once requests are answered. Raises FarhandError.

        A signal that arrives before that ends the start: `ready` is not called.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop)
        with only_one(self._home):
            listener = _listen(self._section.host, self._section.port)
            await asyncio.to_thread(close_home, self._home, self.workspace)
            hub = self._hub = await Hub.open(self._home, environ, open=self._open)
            hub.credentials.tokens_beside_keys = self._section.tokens_beside_keys
            hub.secrets.add_settings([msgspec.to_builtins(self._config), environ])
            self.on_secrets(hub.secrets)
            try:
                async with contextlib.AsyncExitStack() as stack:
                    await self._furnish(hub, stack, environ)
                    await self.messaging.open()
                    if self.stopping:
                        return
                    await hub.start()
                    await self.chats.start()
                    await hub.freeze.resume()
                    stack.push_async_callback(self.chats.pause)
                    assert self._scheduler is not None
                    await stack.enter_async_context(self._scheduler)
                    await self.messaging.start()
                    copies = self._config.backup
                    settings = BackupSettings(copies.every_seconds, copies.keep)
                    await stack.enter_async_context(Backups(hub, self._home, settings))
                    assert self._retention is not None
                    await stack.enter_async_context(self._retention)
                    assert self._history is not None
                    await stack.enter_async_context(self._history)
                    await stack.enter_async_context(TokenUses(hub.database, hub.credentials))
                    await stack.enter_async_context(TokenExpiry(hub.credentials))
                    await self._serve(hub, listener, ready)
            finally:
                listener.close()
                (self._home / GATEWAY_FILE).unlink(missing_ok=True)
                await hub.close()

    async def _furnish(self, hub: Hub, stack: contextlib.AsyncExitStack, environ: Mapping[str, str]) -> None:
        """Give the gateway its own tools and their doors; what they hold open is closed with the stack."""
        live = LiveConfig(self._home, self._config, environ)
        hub.catalog.obey(lambda: live.now.tools.disabled)
        hub.gate.refusals = RefusalBudget(
            lambda: (live.now.retention.refused_bytes_per_credential, live.now.retention.refused_calls_per_credential)
        )
        hub.gate.keyed_calls = keyed_call_budget(lambda: live.now.retention.keyed_bytes_per_credential)

        def obey(config: Config) -> None:
            hub.gate.policy = Policy.of(config.policy, str(self.workspace))

        live.watch(obey)
        self.workspace.mkdir(parents=True, exist_ok=True)
        undo_log = UndoLog(
            self._home / UNDO_FOLDER / "gateway",
            quota=self._config.undo.quota_mb * MIB,
            largest=self._config.undo.largest_mb * MIB,
        )
        stack.callback(undo_log.close)
        skill_files = self._home.resolve() / SKILL_FOLDERS
        skill_files.mkdir(mode=0o755, exist_ok=True)
        files = local_files(self.workspace, self._home, lambda: live.now.tools.roots, undo_log, readable=skill_files)
        await asyncio.to_thread(roll_back_unfinished, files)
        commands = {n: value for n, value in environ.items() if n not in SECRET_VARIABLES and not is_own_secret(n)}
        jobs = await stack.enter_async_context(Jobs(self._home / "jobs", environment=commands, eager=False))
        questions = NodeQueries(jobs, commands, self._home / "logs")
        hub.queries.answer_own({"output": questions.output, "jobs": questions.jobs})
        hub.freeze.end_jobs = jobs.end_all
        confinement = LiveConfinement(lambda: live.now.sandbox, self.workspace, self._home, readable=(skill_files,))
        guide = guide_tools(files, jobs, confinement, hub.secrets)
        hub.catalog.serve(guide, offered=False)
        places = SkillPaths(str(self.workspace), str(skill_files))
        shell = AgentShellTools(jobs, files, confinement, hub.secrets, places)
        hands = [*AgentFileTools(files, secrets=hub.secrets, skills=places).tools(), *shell.tools()]
        objects = open_objects(self._home, self._config.objects, undo_log)
        stack.push_async_callback(objects.close)
        undo = Undo(hub, undo_log, files, objects)
        hub.catalog.serve(undo.tools(), offered=False)
        self._routes += undo_routes(hub, undo)
        workspace = Workspace(objects)
        hub.transfers.serve_workspace(partial(workspace_end, workspace))
        hub.catalog.serve([transfer_tool(hub.transfers)])
        settings = Settings(
            lambda: {
                **msgspec.to_builtins(self._config),
                **{name: msgspec.to_builtins(getattr(live.now, name)) for name in LIVE_SECTIONS},
            }
        )
        logs = NodeLogs(hub.node_registry, hub.queries)
        own_workspace = self.workspace.resolve() == (self._home / AGENTS_FOLDER / MAIN).resolve()
        skills = Skills(
            workspace,
            hub.node_registry,
            hub.probe,
            holds=settings.holds,
            folders=SkillFolders(objects, skill_files),
            local=LocalSkills(
                files,
                MAIN if own_workspace and isinstance(objects, FolderObjects) else None,
                MAIN if not own_workspace or not isinstance(objects, FolderObjects) else None,
            ),
            entries=self._config.skills.entries,
        )
        hub.catalog.serve([*NativeFiles(workspace).tools(), *settings.tools(), *logs.tools()])
        self._routes += [*workspace_routes(hub, workspace, skills), *log_routes(logs)]
        self._routes += [*approval_routes(hub), *policy_routes(hub, lambda: live.now.policy, str(self.workspace))]
        models = open_models(self._config, environ)
        stack.push_async_callback(models.close)
        memory = open_memory(self._home, self.workspace, self._config, objects, models, hub.secrets)
        stack.push_async_callback(memory.close)
        self._routes += memory_routes(memory)
        remembering = memory_tools(memory)
        talking = self._employ(hub, models, jobs, skills, objects, sub_agent_tools(hands, remembering))
        budget = self.chats.budget = message_budget(lambda: live.now.retention.message_bytes_per_credential)
        chatting = Direct(hub, guide, SessionAgent(self.chats), budget)
        direct = DirectDoor(hub, chatting, {*KINDS, *self._config.channels})
        self._routes += direct_routes(direct)
        messaging = self._messaging = Messaging(
            hub, self.chats, workspace, self._config, environ, lambda: live.now.policy.approvers
        )
        stack.push_async_callback(messaging.close)
        self._retention = Retention(hub.database, lambda: live.now.retention.keep_days, clock=hub.node_registry.clock)
        self._history = HistoryRetention(
            hub.database,
            lambda: HistoryLimits(live.now.retention.history_days, live.now.retention.history_mb),
            clock=hub.node_registry.clock,
            has_undo=lambda call: undo_log.find(call) is not None,
        )
        self._scheduler, book = await open_schedule(
            hub, lambda: live.now, environ, objects, self.chats, courier=messaging.messages
        )
        telling, scheduling = messaging.tools(), cron_tools(book, self.chats.pin_of)
        own = main_agent_tools(hands, scheduling, telling, talking.tools(), remembering)
        hub.catalog.serve(own)
        hub.catalog.serve([*talking.native_tools(), *(one for one in (*telling, *scheduling) if one not in own)])
        hub.freeze.thawed.append(self._scheduler.wake)
        self._routes += [*messaging.routes(), *cron_routes(hub, book)]

    def _employ(
        self, hub: Hub, models: Models, jobs: Jobs, known: Skills, objects: Objects, sub_agent: list[Tool]
    ) -> SessionTools:
        """Give the gateway its agents: their sessions and doors; the tools by which they talk to each other."""
        config = self._config
        agents = Agents(config.agents)
        folders = self._home / AGENTS_FOLDER

        stored = None if isinstance(objects, FolderObjects) else StoredFiles(objects)

        async def files(agent: str) -> Mapping[str, str]:
            # Plain files are read as such; with --workspace, what the agent's own folder lacks is taken from there.
            workspace = [self.workspace] if agent == MAIN else []
            found = await files_in([*([folders / agent] if stored is None else []), *workspace])
            whole = found if stored is None else {**found, **await stored.of(agent)}
            return {name: hub.secrets.redact_text(text) for name, text in whole.items()}

        async def skills(agent: str) -> tuple[Skill, ...]:
            eligible = [skill for skill in await known.eligible(agent) if skill.model_invocable]
            return tuple(Skill(skill.name, skill.description, skill.file) for skill in eligible)

        async def end_jobs(call_ids: Collection[str]) -> None:
            found = [job for call_id in call_ids if (job := await jobs.find_call(call_id)) is not None]
            await asyncio.gather(*(jobs.end(job) for job in found))

        prompts = Prompts(agents, hub.node_registry, workspace=self.workspace, files=files, skills=skills)
        turns = Turns(
            hub,
            models,
            agents,
            prompts,
            sub_agent,
            limits=Limits(max_rounds=config.agent.max_rounds),
            compactor=Compactor(config.agent.context_tokens),
            end_jobs=end_jobs,
        )
        chats = self._chats = ChatSessions(
            hub.database,
            turns,
            clock=hub.node_registry.clock,
            dm_scope=config.sessions.dm_scope,
            compact=turns.compact,
            describe_model=turns.model_name,
            check_model=turns.check_model,
            freeze=hub.freeze.asked_in_a_chat,
        )
        hub.freeze.runs = chats

        def stop_runs(token_id: str) -> None:
            chats.credential_ended(token_id, hub.credentials.ended([token_id]) or f"the token {token_id} was revoked")

        hub.credentials.on_removed.append(stop_runs)
        self._routes += [*session_routes(chats, turns, hub.ending), *chat_routes(chats, agents, hub.ending)]
        return SessionTools(chats, agents, model_of=turns.agent_model, spawn_seconds=config.agent.sub_agent_seconds)

    @property
    def hub(self) -> Hub:
        assert self._hub is not None, "the gateway is not running"
        return self._hub

    @property
    def messaging(self) -> Messaging:
        assert self._messaging is not None, "the gateway is not running"
        return self._messaging

    @property
    def chats(self) -> ChatSessions:
        assert self._chats is not None, "the gateway is not running"
        return self._chats

    def sign_in_link(self) -> str:
        """An address that signs a browser in, once."""
        assert self._sessions is not None, "the gateway is not running"
        return f"{self.url}/signin?code={self._sessions.new_code(OWNER.id)}"

    async def _serve(self, hub: Hub, listener: socket.socket, ready: Callable[[Gateway], None]) -> None:
        section = self._section
        own = [name for name in (socket.gethostname(), section.host) if _is_host_name(name)]
        try:
            settings = GuardSettings.of([*own, *section.hosts], section.origins)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        console = self._config.console
        sessions = self._sessions = BrowserSessions(
            hub.database,
            self._home,
            hub.credentials,
            SessionLimits(int(console.idle_hours * 3_600_000), int(console.max_days * 86_400_000)),
            port=listener.getsockname()[1],
            secure=bool(section.tls_cert),
            clock=hub.node_registry.clock,
            note=hub.note,
        )
        described = openapi_routes(lambda: router.routes)
        router = Router(
            [
                *routes(hub),
                *transfer_routes(hub),
                *journal_routes(hub),
                *console_routes(sessions),
                *pairing_routes(hub),
                *freeze_routes(hub),
                *mcp_routes(hub),
                *metrics_routes(hub),
                *fanout_routes(hub),
                *self._routes,
                *described,
            ]
        )
        guard = Guard(
            router, hub.credentials, sessions, settings, hub.secrets, held=lambda: hub.freeze.order, note=hub.note
        )
        guard.repeats = Repeats(hub.database, hub.node_registry.clock)
        loop = asyncio.get_running_loop()
        lobby = Lobby(loop.call_later)
        try:
            server = self._server = _Server(
                uvicorn.Config(
                    guard,
                    http=functools.partial(HttpConnection, lobby=lobby),  # type: ignore[arg-type]
                    ws=node_door(hub, guard),  # type: ignore[arg-type]
                    lifespan="off",
                    access_log=False,
                    log_config=None,
                    server_header=False,
                    proxy_headers=False,
                    timeout_graceful_shutdown=2,
                    ssl_certfile=section.tls_cert or None,
                    ssl_keyfile=section.tls_key or None,
                ),
                lambda: self._ready(listener, ready),
            )
            server.config.load()
        except (OSError, ssl.SSLError) as error:
            files = f"the TLS certificate {section.tls_cert} or its key {section.tls_key}"
            raise ConfigError(f"{files} cannot be used: {error}") from None
        _put_before(server.config, lobby)
        # A signal may have come while nothing was awaited, and is seen only in the loop's next turn.
        await asyncio.sleep(0)
        if not self.stopping:
            await server.serve(sockets=[listener])

    def _ready(self, listener: socket.socket, ready: Callable[[Gateway], None]) -> None:
        host, port = listener.getsockname()[:2]
        scheme = "https" if self._section.tls_cert else "http"
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
        self.url = f"{scheme}://{shown}:{port}"
        beside = self._home / f"{GATEWAY_FILE}.new"
        write_private(beside, msgspec.json.encode(Address(self.url, os.getpid())))
        beside.replace(self._home / GATEWAY_FILE)
        gc.collect()
        gc.freeze()  # what is there now stays; the collector need not look at it again
        gc.set_threshold(*COLLECT)
        ready(self)
        if not self._section.tls_cert and not _is_loopback(host):
            log.warning("listening on %s without TLS: tokens and results travel in the clear; see --tls-cert", host)
        if not self.hub.credentials.nodes_can_join:
            log.warning("no node can join yet: make a token with `farhand token create --node NAME`")

    def stop(self) -> None:
        """Take no new calls, let the open ones finish for a while, then close. The second time: close now."""
        server = self._server
        if server is None or not server.started:
            self.stopping = True  # `run` looks before it serves
            if server is not None:
                server.should_exit = True
            return
        if server.should_exit:
            return
        if self.hub.gate.closing:
            self._exit(server)
            return
        self.stopping = True
        self._draining = asyncio.ensure_future(self._drain(server))

    async def _drain(self, server: _Server) -> None:
        if self._scheduler is not None:
            self._scheduler.hold()
        await self.chats.pause()  # what their open calls come to is found when they are taken up again
        await self.hub.gate.drain(DRAIN_SECONDS)
        self._exit(server)

    def _exit(self, server: _Server) -> None:
        self.hub.gate.close()
        self.hub.ending.set()
        server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn, leaving signals to us and telling when it is ready."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and not self.should_exit:
            self._ready()


def _put_before(config: uvicorn.Config, lobby: Lobby) -> None:
    """Have the lobby see who comes before TLS does."""
    context, inside = config.ssl, config.http_protocol_class
    if context is not None:
        config.ssl = None
        config.http_protocol_class = lambda **options: Threshold(  # type: ignore[assignment]
            context, lobby, lambda: inside(**options)
        )


def open_models(config: Config, environ: Mapping[str, str]) -> Models:
    return Models(
        providers=config.providers,
        models=config.models,
        default=config.agent.model,
        others=[agent.model for agent in config.agents.values()],
        environ=environ,
    )


def open_memory(
    home: Path, workspace: Path, config: Config, objects: Objects, models: Models, secrets: KnownSecrets
) -> Memory:
    """The agents' memory. Raises ConfigError for a setting that cannot be meant."""
    settings = config.memory
    if settings.min_score is not None and not 0 <= settings.min_score <= 1:
        raise ConfigError(f"memory.min_score must be between 0 and 1, not {settings.min_score:g}")
    embedder = make_embedder(settings, Provider(*models.server()))
    sources = memory_sources(home, workspace, objects)
    return Memory(home / MEMORY_FILE, sources, embedder, min_score=settings.min_score, secrets=secrets)


def open_objects(home: Path, section: ObjectsSection, undo_log: UndoLog | None = None) -> Objects:
    """The engine the settings name. Raises ConfigError when it cannot be had."""
    if not section.url:
        return FolderObjects(home, undo_log)
    try:
        from farhand.store.objects.s3 import S3Objects  # noqa: PLC0415
    except ImportError:
        raise ConfigError("[objects] url needs the extra: pip install 'farhand[s3]'") from None
    try:
        return S3Objects(**msgspec.structs.asdict(section))
    except ValueError as error:
        raise ConfigError(f"[objects] {error}") from None


def close_home(home: Path, workspace: Path) -> None:
    """Take every right to the gateway's own files from others: earlier versions left some to the umask.

    What the workspaces and skills hold keeps its modes, since a sandbox may run as another user; the folders around
    them are closed.
    """
    own = (AGENTS_FOLDER, SKILLS_FOLDER)
    inner = workspace.relative_to(home).parts[:1] if workspace.is_relative_to(home) else ()
    restrict_tree(home, apart_from=(*own, SKILL_FOLDERS, *inner))
    for name in own:
        (home / name).mkdir(mode=0o700, exist_ok=True)
        restrict_to_owner(home / name)


@contextlib.contextmanager
def only_one(home: Path) -> Iterator[None]:
    """Hold the home folder. Raises FarhandError while another gateway does."""
    with open_private(home / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FarhandError(f"a gateway is already running on {home}; `farhand doctor` shows it") from None
        yield


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        listener.setblocking(False)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        wrong = "port" if isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES) else "host"
        raise FarhandError(f"cannot listen on {host}:{port}: {reason}; choose another --{wrong}") from None
    return listener


def _is_host_name(name: str) -> bool:
    try:
        parse_host(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
