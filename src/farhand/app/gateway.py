"""The gateway process: opens a home folder, serves, and stops cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import gc
import logging
import os
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import uvicorn

from farhand.api.node_socket.services import node_socket_factory
from farhand.api.oauth.consent import ConsentRoutes
from farhand.api.oauth.endpoints import EndpointRoutes
from farhand.api.routes.console import ConsoleRoutes, page_routes
from farhand.api.server.browser_sessions import BrowserSessions, SessionLimits
from farhand.api.server.connection_limits import ConnectionLimits
from farhand.api.server.guard import Guard, GuardSettings
from farhand.api.server.http_protocol import HttpConnection
from farhand.api.server.id_prefixes import IdPrefixes
from farhand.api.server.idempotency import Repeats
from farhand.api.server.openapi import openapi_routes
from farhand.api.server.origins import parse_host
from farhand.api.server.public_url import PublicUrl
from farhand.api.server.router import Router, routes_of
from farhand.api.server.tls_limits import TlsConnection
from farhand.api.terminals.upgrade import TERMINALS, TerminalSockets
from farhand.app.home import OpenedStore, open_home
from farhand.app.wiring import Parts, build
from farhand.config import Config, SettingsError
from farhand.gateway.access.credentials import OWNER
from farhand.gateway.nodes.addresses import GatewayAddress, pins_of
from farhand.gateway.sessions.old_chats import move_old_chats
from farhand.gateway.workspace.skill_folders import SKILL_FOLDERS
from farhand.machine.files.local_paths import AGENTS_FOLDER
from farhand.machine.files.private_files import open_private, restrict_to_owner, restrict_tree, write_private
from farhand.protocol.errors import FarhandError
from farhand.protocol.names import is_loopback
from farhand.protocol.redaction import KnownSecrets
from farhand.store.objects.base import SKILLS as SKILLS_FOLDER
from farhand.store.ports import StoreError
from farhand.store.tables.access.tokens import Token, token_hash

log = logging.getLogger("farhand")

DRAIN_SECONDS = 10.0
# A call makes some hundred objects and leaves no cycles; the default would collect every few calls.
COLLECT = (50_000, 20, 20)
GATEWAY_FILE = "gateway.json"


class RunningGateway(msgspec.Struct, frozen=True):
    """Where a running gateway is found; written to the home while it serves."""

    url: str
    pid: int
    # The certificate that it shows, by which commands on this machine recognise it.
    certificate: str | None = None


class Gateway:
    """One gateway on one home folder."""

    def __init__(
        self,
        home: Path,
        config: Config,
        *,
        workspace: Path | None = None,
        open: bool = False,  # noqa: A002
        on_secrets: Callable[[KnownSecrets], None] = lambda _: None,
    ) -> None:
        """`workspace`: where the tools of this machine work. `on_secrets` gets what a log must hide, once it is known.

        Raises SettingsError for settings that would expose the gateway.
        """
        section = config.gateway
        if open and not is_loopback(section.host):
            raise SettingsError(f"--open needs a loopback address: with {section.host} anyone could use the shell")
        if bool(section.tls_cert) != bool(section.tls_key):
            raise SettingsError("TLS needs both tls_cert and tls_key")
        self._home = home
        self._config = config
        self._section = section
        self.workspace = (workspace or home / AGENTS_FOLDER / "main").absolute()
        self._open = open
        self._on_secrets = on_secrets
        self._parts: Parts | None = None
        self._server: _Server | None = None
        self._sessions: BrowserSessions | None = None
        self._draining: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()
        self.url = ""
        # Others have taken over the work of this gateway, which was silent for too long.
        self.superseded = False
        self._told_to_stop = False
        # Set once the gateway was asked to stop; open calls may still be finishing.
        self.stopping = False

    async def run(self, environ: Mapping[str, str], ready: Callable[[Gateway], None]) -> None:
        """Serve until SIGTERM or SIGINT. Calls `ready` once requests are answered. Raises FarhandError.

        A signal that arrives before that ends the start: `ready` is not called.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop)
        with only_one(self._home), contextlib.closing(_listen(self._section.host, self._section.port)) as listener:
            await asyncio.to_thread(close_home, self._home, self.workspace)
            async with contextlib.AsyncExitStack() as outer:
                store = await open_home(self._home, self._config, environ, outer)
                try:
                    await self._run(environ, store, listener, outer, ready)
                except StoreError:
                    if store.member is None or not store.member.superseded():
                        raise
                    self._supersede()

    async def _run(
        self,
        environ: Mapping[str, str],
        store: OpenedStore,
        listener: socket.socket,
        outer: contextlib.AsyncExitStack,
        ready: Callable[[Gateway], None],
    ) -> None:
        async with contextlib.AsyncExitStack() as stack:
            parts = self._parts = await build(
                self._home,
                self.workspace,
                self._config,
                environ,
                store,
                stack,
                ending=self._ending,
                address=self._address(listener),
                open=self._open,
            )
            outer.push_async_callback(parts.close)
            outer.callback((self._home / GATEWAY_FILE).unlink, missing_ok=True)
            outer.callback(listener.close)
            self._on_secrets(parts.secrets)
            await parts.messaging.open()
            if self.stopping:
                return
            await self._start(parts, stack)
            await self._serve(parts, listener, ready)

    def _address(self, listener: socket.socket) -> GatewayAddress:
        section = self._section
        pins = pins_of(Path(section.tls_cert)) if section.tls_cert else None
        port: int = listener.getsockname()[1]
        return GatewayAddress(section.host, port, tuple(section.hosts), bool(section.tls_cert), pins)

    async def _start(self, parts: Parts, stack: contextlib.AsyncExitStack) -> None:
        """Take up what was open when the gateway last stopped, and start what runs by itself."""
        member = parts.store.member
        await parts.transfers.recover(None if member is None else member.owned("transfers"))
        waiting = await parts.gate.recover(None if member is None else member.owned("calls"))
        if waiting:
            log.info("%d calls were open when the gateway stopped; waiting for their nodes", waiting)
        await parts.sessions.start(None if member is None else member.owned("runs"))
        await move_old_chats(parts.store.database)
        await parts.freeze.resume()
        stack.push_async_callback(parts.sessions.pause)
        await stack.enter_async_context(parts.scheduler)
        await parts.messaging.start()
        for task in parts.periodic:
            await stack.enter_async_context(task)
        if parts.fleet is not None:
            await parts.fleet.start(stack, self._supersede)

    @property
    def _running(self) -> Parts:
        assert self._parts is not None, "the gateway is not running"
        return self._parts

    def sign_in_link(self) -> str:
        """Return an address that signs a browser in, once."""
        assert self._sessions is not None, "the gateway is not running"
        return f"{self.url}/signin?code={self._sessions.new_code(OWNER.id)}"

    def admit_node(self, node_id: str, secret: str) -> None:
        """Accept a token for a node until the gateway stops."""
        clock = self._running.store.node_registry.clock
        token = Token("local-node", token_hash(secret), "node", node_id, "this machine", clock())
        self._running.credentials.add(token)

    async def _serve(self, parts: Parts, listener: socket.socket, ready: Callable[[Gateway], None]) -> None:
        section = self._section
        own = [name for name in (socket.gethostname(), section.host) if _is_host_name(name)]
        try:
            settings = GuardSettings.of([*own, *section.hosts], section.origins)
            public_url = PublicUrl(section.public_url)
        except ValueError as error:
            raise SettingsError(str(error)) from None
        console = self._config.console
        database, clock, note = parts.store.database, parts.store.node_registry.clock, parts.store.journal.note
        sessions = self._sessions = BrowserSessions(
            database,
            self._home,
            parts.credentials,
            SessionLimits(int(console.idle_hours * 3_600_000), int(console.max_days * 86_400_000)),
            name=str(listener.getsockname()[1]) if parts.fleet is None else parts.store.gateway_id[:12],
            secure=bool(section.tls_cert),
            clock=clock,
            note=note,
        )
        if parts.fleet is not None:
            parts.fleet.follow("console.", sessions.refresh)
        consent = ConsentRoutes(parts.oauth, parts.store.node_registry, public_url)
        oauth = routes_of(EndpointRoutes(parts.oauth, public_url), consent)
        routes = [*parts.routes, *routes_of(ConsoleRoutes(sessions)), *page_routes(), *oauth]
        guard = Guard(
            Router([*routes, *openapi_routes(routes)]),
            parts.credentials,
            sessions,
            settings,
            parts.secrets,
            Repeats(database, clock),
            parts.oauth.recognise,
            public_url,
            id_prefixes=IdPrefixes(database),
            held=lambda: parts.freeze.order,
            note=note,
            catch_up=None if parts.fleet is None else parts.fleet.catch_up,
        )
        limits = ConnectionLimits(asyncio.get_running_loop().call_later)
        try:
            server = self._server = _Server(
                uvicorn.Config(
                    guard,
                    interface="asgi3",
                    http=functools.partial(HttpConnection, limits=limits),  # type: ignore[arg-type]
                    ws=node_socket_factory(  # type: ignore[arg-type]
                        parts.node_services, guard, {TERMINALS: TerminalSockets(parts.terminals, guard)}
                    ),
                    lifespan="off",
                    access_log=False,
                    log_config=None,
                    server_header=False,
                    proxy_headers=False,
                    timeout_graceful_shutdown=2,
                    ssl_certfile=section.tls_cert or None,
                    ssl_keyfile=section.tls_key or None,
                ),
                lambda: self._ready(parts, listener, ready),
            )
            server.config.load()
        except (OSError, ssl.SSLError) as error:
            files = f"the TLS certificate {section.tls_cert} or its key {section.tls_key}"
            raise SettingsError(f"{files} cannot be used: {error}") from None
        _limit_handshakes(server.config, limits)
        # A signal may have come while nothing was awaited, and is seen only in the loop's next turn.
        await asyncio.sleep(0)
        if not self.stopping:
            await server.serve(sockets=[listener])

    def _ready(self, parts: Parts, listener: socket.socket, ready: Callable[[Gateway], None]) -> None:
        host, port = listener.getsockname()[:2]
        scheme = "https" if self._section.tls_cert else "http"
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
        self.url = f"{scheme}://{shown}:{port}"
        beside = self._home / f"{GATEWAY_FILE}.new"
        certificate = str(Path(self._section.tls_cert).absolute()) if self._section.tls_cert else None
        write_private(beside, msgspec.json.encode(RunningGateway(self.url, os.getpid(), certificate)))
        beside.replace(self._home / GATEWAY_FILE)
        gc.collect()
        gc.freeze()  # what exists now stays; the collector need not look at it again
        gc.set_threshold(*COLLECT)
        ready(self)
        if not self._section.tls_cert and not is_loopback(host):
            log.warning("listening on %s without TLS: tokens and results travel in the clear; see [gateway] tls", host)
        if not parts.credentials.nodes_can_join:
            log.warning("no node can join yet: make a token with `farhand token create --node NAME`")

    def _supersede(self) -> None:
        """Stop at once: others do the work of this gateway. The caller of `run` may start another one."""
        self.superseded, self.stopping = not self._told_to_stop, True
        if self._server is not None:
            self._exit(self._server)

    def stop(self) -> None:
        """Accept no new calls, let the open ones finish for a while, then close. The second time: close now."""
        self._told_to_stop, self.superseded = True, False
        server = self._server
        if server is None or not server.started:
            self.stopping = True  # `run` looks before it serves
            if server is not None:
                server.should_exit = True
            return
        if server.should_exit:
            return
        if self._running.gate.closing:
            self._exit(server)
            return
        self.stopping = True
        self._draining = asyncio.ensure_future(self._drain(server))

    async def _drain(self, server: _Server) -> None:
        if self._running.fleet is not None:
            self._running.inventory.send_away()
        self._running.scheduler.hold()
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                await self._running.sessions.pause()  # their open calls are found again when the runs are taken up
            await self._running.gate.drain(DRAIN_SECONDS)
        except (StoreError, TimeoutError) as error:  # what is open is in the store, and is taken up at the next start
            log.warning("stopping without waiting for open calls: %s", error or "the store does not answer")
        finally:
            self._exit(server)

    def _exit(self, server: _Server) -> None:
        self._running.gate.close()
        self._ending.set()
        server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn, without its signal handlers; calls `ready` once it serves."""

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


def _limit_handshakes(config: uvicorn.Config, limits: ConnectionLimits) -> None:
    """Count connections before their TLS handshake."""
    context, inside = config.ssl, config.http_protocol_class
    if context is not None:
        config.ssl = None
        config.http_protocol_class = lambda **options: TlsConnection(  # type: ignore[assignment]
            context, limits, lambda: inside(**options)
        )


def close_home(home: Path, workspace: Path) -> None:
    """Remove the access of other users to the gateway's own files: earlier versions left some modes to the umask.

    Files in workspaces and skills keep their modes, since a sandbox may run as another user; the folders around them
    are closed.
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
            reason = f"a gateway is already running on {home}; stop it first, or use another --home"
            raise FarhandError(reason) from None
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
