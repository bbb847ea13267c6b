"""The node client: connects to a gateway, serves a registry, and reconnects when the link breaks."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol
from urllib.parse import SplitResult, quote, urlsplit

import msgspec
from msgspec import UNSET, Raw

from farhand.protocol.calls import ToolFailure
from farhand.protocol.errors import Failed, NotFound, ProtocolError, ToolError
from farhand.protocol.freeze import FreezeState
from farhand.protocol.key_auth import SCHEME
from farhand.protocol.messages import (
    FEATURE_FLEET,
    FEATURE_PROGRESS,
    FEATURE_QUERY,
    FEATURE_RECEIPTS,
    FEATURE_RESUME,
    FEATURE_TOOLS,
    FEATURE_UNLISTED,
    FEATURES,
    GatewayChallenge,
    GatewayExtras,
    GatewayWelcome,
    Message,
    NodeAnswer,
    NodeExtras,
    NodeFreeze,
    NodeHello,
    NodeInfo,
    NodeQuery,
    NodeThaw,
    Ping,
    Pong,
    ToolAck,
    ToolCancel,
    ToolRequest,
    ToolsUpdate,
    decode,
    encode,
)
from farhand.protocol.names import is_loopback
from farhand.protocol.pinned_tls import pinned_context
from farhand.protocol.version import (
    HELLO_SECONDS,
    MAX_REQUEST_BYTES,
    MAX_RESPONSE_BYTES,
    PROTOCOL_VERSION,
)
from farhand.sdk.accepted_calls import AcceptedCalls
from farhand.sdk.backoff import ReconnectBackoff
from farhand.sdk.connection import GatewayLink, LinkLost, TokenHeaderIgnored
from farhand.sdk.context import CancelToken
from farhand.sdk.dispatcher import Dispatcher, EndCall
from farhand.sdk.errors import ConfigError, ReconnectExhausted, Refused, Shutdown
from farhand.sdk.freeze import EndAll, FreezeHandler
from farhand.sdk.heap import trim_heap
from farhand.sdk.key_auth import LoginKey, prove
from farhand.sdk.receipts import ReceiptKey, Signer

if TYPE_CHECKING:
    from farhand.protocol.sealing import SealingKey
    from farhand.sdk.registry import ToolRegistry

log = logging.getLogger(__name__)

SOCKET_PATH = "/v1/nodes/ws"
DEFAULT_URL = f"ws://localhost:3210{SOCKET_PATH}"
MAX_QUERIES = 64
REFUSALS_BELIEVED = 5
SHUTTING_DOWN = "the node is shutting down"
# Any traffic within this time answers a ping; otherwise the link is half-open.
PONG_SECONDS = 15.0
# With a gateway of a fleet: if it does not respond, the node is with another one in less than 15 seconds.
FLEET_PING_SECONDS = 4.0
FLEET_PONG_SECONDS = 9.0


Query = Callable[[Raw], Awaitable[Any]]


class Extension(Protocol):
    """Additional messages and binary frames, of features that the node announces."""

    features: tuple[str, ...]
    # Announced as well, but not required of the gateway.
    also: tuple[str, ...]

    def attach(self, link: GatewayLink) -> None:
        """Start using a link to a gateway that has all `features`."""
        ...

    def detach(self) -> None:
        """Stop using the link: it is lost."""
        ...

    def on_message(self, message: Message) -> None: ...

    def on_frame(self, frame: memoryview) -> None:
        """Handle a binary frame; `frame` is valid until this returns."""
        ...


# A node with several gateways tries the next one after this time.
NEXT_GATEWAY_SECONDS = 0.2


class _Gateway(msgspec.Struct):
    """The address of a gateway, and how it is reached."""

    url: str
    # Used once a gateway turns out to read the token only there.
    url_with_token: str | None
    in_clear: bool
    # Without a token.
    shown: str
    tls: ssl.SSLContext | None

    @classmethod
    def of(
        cls,
        url: str,
        token: str | None,
        node_id: str,
        token_in_query: bool | None,
        ca_file: str | None,
        pinned_cert: str | None,
    ) -> _Gateway:
        """Raises ConfigError for an invalid address."""
        url = socket_url(url)
        address = _address(url)
        return cls(
            build_url(url, token if token_in_query else None, node_id),
            build_url(url, token, node_id) if token_in_query is None and token else None,
            address.scheme == "ws" and not is_loopback(address.hostname or ""),
            f"{address.scheme}://{address.netloc.rpartition('@')[2]}{address.path}",
            _tls_context(ca_file, pinned_cert) if address.scheme == "wss" else None,
        )


class NodeClient:
    """Serves one registry to one gateway. Every argument has the name and default of the plug-in guide."""

    def __init__(
        self,
        gateway_ws_url: str | None = None,
        token: str | None = None,
        *,
        node_info: NodeInfo | None = None,
        node_id: str = "unnamed-node",
        name: str = "unnamed-node",
        node_type: str = "generic",
        version: str = "0.1.0",
        tags: list[str] | None = None,
        heartbeat_interval: float = 30.0,
        reconnect_backoff: ReconnectBackoff | None = None,
        max_concurrent_tools: int = 16,
        max_request_bytes: int = MAX_REQUEST_BYTES,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        role: str = "specialized",
        runtime: Mapping[str, Any] | None = None,
        sealing: SealingKey | None = None,
        receipt_key: ReceiptKey | None = None,
        ca_file: str | None = None,
        pinned_cert: str | None = None,
        token_in_query: bool | None = True,
        ledger: AcceptedCalls | None = None,
        queries: Mapping[str, Query] | None = None,
        extension: Extension | None = None,
        key: LoginKey | None = None,
        freeze_state: FreezeState | None = None,
        end_all: EndAll | None = None,
        end_call: EndCall | None = None,
        leave: Callable[[], bool] = lambda: False,
        other_gateways: Sequence[str] = (),
    ) -> None:
        """Create a client. Raises ConfigError for invalid settings.

        - `token` defaults to `SA_NODE_TOKEN`, the address to `SA_GATEWAY_WS_URL`.
        - `ca_file` is trusted for `wss://` in addition to the system's authorities; with `pinned_cert` the gateway
            (default: `FARHAND_PINNED_CERT`) must present exactly that certificate, whatever its name.
        - `token_in_query=False` sends the token in the `Authorization` header only, which a SerialAgent gateway does
            not read. With None, it is added to the URL after such a gateway, recognized by its response, refused it.
        - `ledger` stores accepted calls (default: in memory). `queries` answer a gateway's questions beside tool calls.
          `extension` handles all other messages.
        - With `key`, the node logs in by signing a challenge, and the token is not sent.
        - `freeze_state` stores a freeze (default: in memory). `end_all` ends the processes that calls left running,
          `end_call` those of one call.
        - `sealing` opens the secrets of calls; without it, calls with secret handles are refused.
        - `receipt_key` signs answers, so that the gateway can export receipts; by default `key` does, if there is one.
        - `other_gateways` serve together with the first: when one is lost, the next is tried.
        - `leave` is called at shutdown: if it returns true, calls that the next run of the program can continue go on.
        """
        if gateway_ws_url is None:
            gateway_ws_url = os.environ.get("SA_GATEWAY_WS_URL") or DEFAULT_URL
        if not gateway_ws_url:
            raise ConfigError("gateway_ws_url is required")
        for setting, value in {
            "heartbeat_interval": heartbeat_interval,
            "max_concurrent_tools": max_concurrent_tools,
            "max_request_bytes": max_request_bytes,
            "max_response_bytes": max_response_bytes,
        }.items():
            if not value > 0:
                raise ConfigError(f"{setting} must be greater than 0, not {value!r}")
        self.node_info = node_info or NodeInfo(node_id, name, node_type, version, list(tags or []))
        self.key = key
        self._token = None if key else os.environ.get("SA_NODE_TOKEN") if token is None else token
        if self._token and not self._token.isprintable():
            raise ConfigError("token contains a character that cannot be sent, perhaps a line break")
        self.heartbeat_interval = heartbeat_interval
        self._backoff = reconnect_backoff or ReconnectBackoff()
        self._max_concurrent = max_concurrent_tools
        self._max_request_bytes = max_request_bytes
        self._max_response_bytes = max_response_bytes
        self._role = role
        self._runtime = dict(runtime or {})
        self._sealing = sealing
        signing = receipt_key or key
        self._signer = None if signing is None else Signer(signing, self.node_info.id)
        self._ledger = ledger
        self.queries = dict(queries or {})
        self.extension = extension
        self.freezing = FreezeHandler(freeze_state or FreezeState(), end_all)
        self._end_call = end_call
        self.leave = leave
        # The gateways in the order in which they are tried; the first is the present one.
        pinned_cert = pinned_cert or os.environ.get("FARHAND_PINNED_CERT")
        self._gateways = deque(
            _Gateway.of(url, self._token, self.node_info.id, token_in_query, ca_file, pinned_cert)
            for url in (gateway_ws_url, *other_gateways)
        )

    @property
    def shown_url(self) -> str:
        """The address of the present gateway, without a token."""
        return self._gateways[0].shown

    async def run(self, registry: ToolRegistry, shutdown: asyncio.Event | CancelToken | None = None) -> NoReturn:
        """Serve until `shutdown`.

        Raises Shutdown once the event is set or the token is cancelled, ReconnectExhausted after `max_attempts`
        failures in a row, and Refused when the gateway rejects this node permanently. In every case, tools are
        cancelled and the socket is closed.
        """
        dispatcher = Dispatcher(
            registry,
            ledger=self._ledger or AcceptedCalls(),
            max_concurrent=self._max_concurrent,
            max_request_bytes=self._max_request_bytes,
            max_response_bytes=self._max_response_bytes,
            freeze_state=self.freezing.freeze_state,
            end_call=self._end_call,
            sealing=self._sealing,
            signer=self._signer,
        )
        shutdown = CancelToken() if shutdown is None else shutdown
        stopped = shutdown.cancelled() if isinstance(shutdown, CancelToken) else shutdown.wait()
        stop: asyncio.Future[object] = asyncio.ensure_future(stopped)
        attempt = refusals = 0
        served = False
        try:
            while True:
                connection = _Connection(self, registry, dispatcher)
                try:
                    try:
                        await connection.serve(stop)
                    except Refused as refused:
                        # A node that was welcome before may be refused by a corrupted connection, or by something that
                        # replaces the gateway while it restarts. Only repeated refusals are final.
                        refusals += 1
                        if not served or connection.welcomed or refusals >= REFUSALS_BELIEVED:
                            raise
                        raise LinkLost(str(refused)) from None
                except LinkLost as lost:
                    if connection.welcomed:
                        served, refusals = True, 0
                    if connection.welcomed and not lost.replaced:
                        attempt = 0
                    if self._backoff.exhausted(attempt):
                        raise ReconnectExhausted(attempt, str(lost)) from None
                    delay = self._backoff.delay(attempt)
                    if attempt < len(self._gateways) - 1:  # another one may answer at once
                        delay = min(delay, NEXT_GATEWAY_SECONDS)
                    attempt += 1
                    log.warning(
                        "%s: %s; connecting again in %.1f s",
                        self.shown_url,
                        lost,
                        delay,
                        extra={"event": "connect.lost"},
                    )
                    self._gateways.rotate(-1)
                    await asyncio.wait({stop}, timeout=delay)
                if stop.done():
                    raise Shutdown()
        finally:
            leave = stop.done() and self.leave()
            stop.cancel()
            await dispatcher.close(SHUTTING_DOWN, leave=leave)

    def spawn(
        self, registry: ToolRegistry, shutdown: asyncio.Event | CancelToken | None = None
    ) -> asyncio.Task[NoReturn]:
        """Start `run` as a task of the current loop."""
        return asyncio.get_running_loop().create_task(self.run(registry, shutdown))

    def hello(self, registry: ToolRegistry, dispatcher: Dispatcher) -> NodeHello:
        return NodeHello(
            node=self.node_info,
            capabilities=registry.capabilities(),
            farhand=NodeExtras(
                features=[
                    *FEATURES,
                    *((*self.extension.features, *self.extension.also) if self.extension else ()),
                    *(f"{FEATURE_QUERY}{kind}" for kind in self.queries),
                    *(f"{FEATURE_UNLISTED}{name}" for name in registry.unlisted()),
                ],
                tools=registry.specs(),
                runtime=self._runtime,
                role=self._role,
                max_request_bytes=self._max_request_bytes,
                resume=dispatcher.resume(),
                frozen=self.freezing.freeze_state.order,
                sealing_key=self._sealing.public if self._sealing is not None else "",
                receipt_key=self._signer.public if self._signer is not None else "",
            ),
        )

    async def connect(self, connection: _Connection) -> GatewayLink:
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        if self.key is not None:
            headers = {"Authorization": f"{SCHEME} {self.key.public}"}
        to = self._gateways[0]
        try:
            return await GatewayLink.connect(to.url, headers, to.tls, connection.on_text, connection.on_frame)
        except TokenHeaderIgnored:
            if to.url_with_token is None:
                raise
        to.url, to.url_with_token = to.url_with_token, None
        clear = "; it is sent unencrypted, use wss://" if to.in_clear else ""
        log.log(
            logging.WARNING if to.in_clear else logging.INFO,
            "%s reads node tokens only from the URL; sending the token there%s",
            self.shown_url,
            clear,
        )
        return await GatewayLink.connect(to.url, headers, to.tls, connection.on_text, connection.on_frame)


class _Connection:
    """One connection, from the hello to its end."""

    def __init__(self, client: NodeClient, registry: ToolRegistry, dispatcher: Dispatcher) -> None:
        self._client = client
        self._registry = registry
        self._dispatcher = dispatcher
        loop = asyncio.get_running_loop()
        self._welcome: asyncio.Future[GatewayWelcome] = loop.create_future()
        self._challenge: asyncio.Future[GatewayChallenge] = loop.create_future()
        self._extras = GatewayExtras()
        self._link: GatewayLink | None = None
        self._announced: NodeHello | None = None
        self._asked: set[asyncio.Task[None]] = set()
        self._extension: Extension | None = None
        self.welcomed = False

    async def serve(self, stop: asyncio.Future[Any]) -> None:
        """Serve the connection; return when `stop` is done. Raises LinkLost or Refused if the link ends first."""
        connecting = asyncio.ensure_future(self._client.connect(self))
        try:
            await asyncio.wait({connecting, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                return
            link = self._link = connecting.result()
            await self._handshake(link, stop)
            if self.welcomed:
                await self._converse(link, stop)
        finally:
            connecting.cancel()
            await asyncio.wait({connecting})
            if stop.done():
                await self._dispatcher.close(SHUTTING_DOWN, leave=self._client.leave())
            self._dispatcher.detach("the link to the gateway was lost")
            if self._extension is not None:
                self._extension.detach()
            if not connecting.cancelled() and connecting.exception() is None:
                await connecting.result().close()

    async def _handshake(self, link: GatewayLink, stop: asyncio.Future[Any]) -> None:
        client = self._client
        if client.key is not None:
            if not await self._said(self._challenge, "ask for a proof of the key", link, stop):
                return
            link.send(encode(prove(client.key, self._challenge.result(), client.node_info.id)))
        self._announced = client.hello(self._registry, self._dispatcher)
        link.send(encode(self._announced))
        if not await self._said(self._welcome, "say welcome", link, stop):
            return
        welcome = self._welcome.result()
        if welcome.protocol_version != PROTOCOL_VERSION:
            raise Refused(
                f"the gateway uses protocol version {welcome.protocol_version}, this node supports {PROTOCOL_VERSION}"
            )
        log.info("connected to %s as %s", client.shown_url, client.node_info.id, extra={"event": "connect.ok"})
        trim_heap()

    @staticmethod
    async def _said(awaited: asyncio.Future[Any], what: str, link: GatewayLink, stop: asyncio.Future[Any]) -> bool:
        """Wait for the gateway's next handshake message; return False once `stop` is done. Raises LinkLost, Refused."""
        waits = {awaited, link.ended, stop}
        await asyncio.wait(waits, timeout=HELLO_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            return False
        if link.ended.done():
            raise link.ended.result()
        if not awaited.done():
            raise LinkLost(f"the gateway did not {what} within {HELLO_SECONDS:.0f} s")
        return True

    def _welcomed(self, link: GatewayLink, welcome: GatewayWelcome) -> None:
        """Get ready immediately: the next frame, possibly already received, may be a request."""
        if welcome.protocol_version == PROTOCOL_VERSION:
            if welcome.farhand is not UNSET:
                self._extras = welcome.farhand
            self.welcomed = link.welcomed = True
            self._dispatcher.attach(
                link.send,
                keeps=FEATURE_RESUME in self._extras.features,
                max_response_bytes=self._extras.max_response_bytes,
                takes_progress=FEATURE_PROGRESS in self._extras.features,
                takes_receipts=FEATURE_RECEIPTS in self._extras.features,
            )
            extension = self._client.extension
            if extension is not None and set(extension.features) <= set(self._extras.features):
                self._extension = extension
                extension.attach(link)
        self._welcome.set_result(welcome)

    async def _converse(self, link: GatewayLink, stop: asyncio.Future[Any]) -> None:
        unsubscribe = self._registry.on_change(self._announce)
        if self._outdated():
            self._announce()
        heart = asyncio.ensure_future(self._beat(link))
        try:
            await asyncio.wait({link.ended, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            unsubscribe()
            heart.cancel()
            for asked in self._asked:
                asked.cancel()
        if not stop.done():
            raise link.ended.result()

    async def _beat(self, link: GatewayLink) -> None:
        """Ping now and at every interval; drop a link on which a ping stays unanswered."""
        loop = asyncio.get_running_loop()
        interval, longest = self._client.heartbeat_interval, PONG_SECONDS
        if FEATURE_FLEET in self._extras.features:
            interval, longest = min(interval, FLEET_PING_SECONDS), min(longest, FLEET_PONG_SECONDS)
        next_ping = loop.time()
        unanswered: float | None = None
        while True:
            now = loop.time()
            if unanswered is not None and link.heard_at >= unanswered:
                unanswered = None
            if unanswered is not None and now - unanswered >= longest:
                link.drop(f"no answer to a ping within {longest:.0f} s")
                return
            if now >= next_ping:
                link.send(encode(Ping(time.time_ns() // 1_000_000)))
                unanswered = now if unanswered is None else unanswered
                next_ping = now + interval
            await asyncio.sleep(min(next_ping - now, longest) if unanswered is None else min(interval, 1.0))

    def _outdated(self) -> bool:
        """Return whether the registry changed since the hello was sent."""
        announced = self._announced
        return announced is not None and (
            announced.capabilities != self._registry.capabilities()
            or (announced.farhand is not UNSET and announced.farhand.tools != self._registry.specs())
        )

    def _announce(self) -> None:
        if self._link is not None and FEATURE_TOOLS in self._extras.features:
            self._link.send(encode(ToolsUpdate(self._registry.capabilities(), self._registry.specs())))

    def on_text(self, link: GatewayLink, frame: bytes) -> None:
        try:
            message = decode(frame)
        except ProtocolError as error:
            log.debug("ignored a frame of %d bytes: %s", len(frame), error)
            return
        if not self.welcomed:
            if isinstance(message, GatewayWelcome) and not self._welcome.done():
                self._welcomed(link, message)
            elif isinstance(message, GatewayChallenge) and not self._challenge.done():
                self._challenge.set_result(message)
            return
        match message:
            case ToolRequest():
                self._dispatcher.request(message, len(frame))
            case Ping(timestamp):
                link.send(encode(Pong(timestamp)))
            case ToolCancel(request_id, reason, everything):
                reason = reason or "cancelled by the gateway"
                self._dispatcher.end(request_id, reason, everything=everything)
            case ToolAck(request_ids):
                self._dispatcher.acknowledge(request_ids)
            case NodeFreeze():
                self._client.freezing.freeze(message, self._dispatcher, link.send)
            case NodeThaw():
                self._client.freezing.thaw(message, link.send)
            case NodeQuery():
                if len(self._asked) >= MAX_QUERIES:
                    busy = ToolFailure("failed", f"busy: {MAX_QUERIES} queries are open; try again later")
                    link.send(encode(NodeAnswer(message.query_id, error=busy)))
                else:
                    self._do(self._answer(link, message))
            case _ if self._extension is not None:
                self._extension.on_message(message)
            case _:
                log.debug("ignored an unexpected %s", type(message).__name__)

    def on_frame(self, frame: memoryview) -> None:
        if self._extension is not None:
            self._extension.on_frame(frame)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)

    async def _answer(self, link: GatewayLink, query: NodeQuery) -> None:
        handler = self._client.queries.get(query.kind)
        try:
            if handler is None:
                raise NotFound(f"this node does not answer {query.kind!r}")
            answer = NodeAnswer(query.query_id, result=Raw(msgspec.json.encode(await handler(query.params))))
        except ToolError as error:
            answer = NodeAnswer(query.query_id, error=ToolFailure.of(error))
        except Exception as error:
            log.exception("query %s failed", query.kind)
            answer = NodeAnswer(query.query_id, error=ToolFailure.of(Failed(f"{type(error).__name__}: {error}")))
        link.send(encode(answer))


def socket_url(url: str) -> str:
    """Return the address of the node socket.

    `http(s)://host[/prefix]`, the address of a gateway or of a proxy in front of it, gets the socket's path;
    `ws(s)://` addresses stay unchanged.
    """
    scheme, separator, rest = url.partition("://")
    if separator != "://" or scheme.lower() not in ("http", "https"):
        return url
    place, question, query = rest.partition("?")
    place = place.rstrip("/")
    path = "" if place.endswith(SOCKET_PATH) else SOCKET_PATH
    return f"{'wss' if scheme.lower() == 'https' else 'ws'}://{place}{path}{question}{query}"


def _address(url: str) -> SplitResult:
    try:
        address = urlsplit(url)
        usable = address.scheme in ("ws", "wss") and address.hostname and not address.fragment and address.port != 0
    except ValueError as error:
        raise ConfigError(f"gateway_ws_url is not an address: {error}") from None
    if not usable:
        shown = url.partition("?")[0]
        raise ConfigError(
            f"gateway_ws_url must be ws://host[:port]/path, wss://… or http(s)://…, without a #, not {shown!r}"
        )
    return address


def build_url(url: str, token: str | None, node_id: str) -> str:
    """Return the address with `token` and `node_id` as percent-encoded query values."""
    query = f"token={quote(token, safe=':@')}&" if token else ""
    return f"{url}{'&' if '?' in url else '?'}{query}node_id={quote(node_id, safe=':@')}"


def _tls_context(ca_file: str | None, pinned_cert: str | None) -> ssl.SSLContext:
    if pinned_cert:
        try:
            return pinned_context(pinned_cert)
        except OSError as error:
            raise ConfigError(f"pinned_cert {pinned_cert!r} cannot be read: {error}") from None
    context = ssl.create_default_context()
    if ca_file:
        try:
            context.load_verify_locations(ca_file)
        except OSError as error:
            raise ConfigError(f"ca_file {ca_file!r} cannot be read: {error}") from None
    return context
