"""What models behind an HTTP API have in common: one request, and a reply that is streamed or whole."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import importlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Final, Protocol

import msgspec

from farhand.llm.errors import ModelError, ModelRefused, Unavailable
from farhand.llm.messages import Finished, StreamEvent, Usage
from farhand.llm.model import ModelRequest
from farhand.llm.openai_stream import error_of
from farhand.llm.openai_wire import names_of
from farhand.llm.settings import ModelSettings, ProviderSettings, context_of, prices_of
from farhand.llm.sse import EventLines
from farhand.llm.tool_names import ToolNames

LONGEST_ERROR: Final = 16 * 1024
LARGEST_REPLY: Final = 64 * 1024 * 1024
USAGE_SECONDS: Final = 5.0
DRAIN_SECONDS: Final = 0.2
DONE: Final = b"[DONE]"


class Connections:
    """The HTTP client shared by all models, loaded at the first request to keep the start of the gateway fast."""

    def __init__(self) -> None:
        self._client: Any = None
        self._opening = asyncio.Lock()

    async def client(self) -> Any:
        async with self._opening:
            if self._client is None:
                # Loading it and the certificates takes about 100 ms, which would block the event loop.
                self._client = await asyncio.to_thread(_open_client)
        return self._client

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


def _open_client() -> Any:
    httpx = importlib.import_module("httpx2")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=60)
    # A redirect would send the key to an address that is not configured.
    return httpx.AsyncClient(timeout=None, limits=limits, follow_redirects=False)


class Builder(Protocol):
    @property
    def finished(self) -> bool:
        """Return whether the model has finished its reply."""

    def add(self, chunk: Any) -> list[StreamEvent]:
        """Process a chunk and return its deltas. Raises ModelError for an error in the stream."""

    def finish(self, cost: Callable[[Usage], float]) -> Finished:
        """Return the whole reply; `cost` computes the price of a Usage if the provider sent none."""


class HttpModel:
    """One model of one provider. It makes each request once; `retry.py` repeats it. Subclasses know the API."""

    # Where the API takes requests, below the provider's base URL.
    PATH = ""

    def __init__(
        self,
        name: str,
        model: str,
        provider: ProviderSettings,
        settings: ModelSettings,
        api_key: str,
        connections: Connections,
    ) -> None:
        self._name = name
        self._model = model
        self._settings = settings
        self._url = provider.base_url.rstrip("/") + self.PATH
        self._api_key = api_key
        own = {"Content-Type": "application/json", "User-Agent": "farhand", **self._api_headers(api_key)}
        self._headers = {**own, **provider.headers}
        self._connections = connections
        self._prices = prices_of(settings, model)
        # Parameters that this server has rejected.
        self._refused: set[str] = set()

    @property
    def name(self) -> str:
        return self._name

    @property
    def context_tokens(self) -> int:
        return context_of(self._settings, self._model)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamEvent, None]:
        names = names_of(request.messages, request.tools)
        builder = self._builder(names)
        async with contextlib.AsyncExitStack() as stack:
            response = await self._ask(request, names, stack)
            done = False
            async with contextlib.aclosing(self._payloads(response, builder)) as payloads:
                async for payload in payloads:
                    done = payload == DONE
                    for event in () if done else self._added(builder, payload):
                        yield event
            if not done and not builder.finished:
                raise Unavailable(f"the stream of {self._name} ended before the reply was complete")
        yield msgspec.structs.replace(builder.finish(self._prices.cost), model=self._name)

    def _added(self, builder: Builder, payload: bytes) -> list[StreamEvent]:
        try:
            return builder.add(msgspec.json.decode(payload))
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return []
        except ModelError as error:
            raise self._named(error) from None

    def _api_headers(self, api_key: str) -> dict[str, str]:
        """Return the headers of the API, with the key if there is one."""
        raise NotImplementedError

    def _body(self, request: ModelRequest, names: ToolNames) -> dict[str, Any]:
        raise NotImplementedError

    def _builder(self, names: ToolNames) -> Builder:
        raise NotImplementedError

    def _newly_refused(self, status: int, text: str, body: dict[str, Any]) -> str | None:  # noqa: ARG002
        """Return the optional parameter that the server rejects, if its error names one."""
        return None

    async def _ask(self, request: ModelRequest, names: ToolNames, stack: contextlib.AsyncExitStack) -> Any:
        """Send the request and return the response with its headers read. Raises ModelError unless it succeeds."""
        while True:
            body = self._body(request, names)
            response = await self._send(msgspec.json.encode(body), stack)
            if response.status_code < 300:
                return response
            text = await self._error_text(response)
            refused = self._newly_refused(response.status_code, text, body)
            if refused is None:
                raise self._error(response, text)
            self._refused.add(refused)

    async def _send(self, content: bytes, stack: contextlib.AsyncExitStack) -> Any:
        client = await self._connections.client()
        settings = self._settings
        timeout = {"connect": settings.connect_seconds, "read": None, "write": settings.idle_seconds, "pool": None}
        built = client.build_request(
            "POST", self._url, content=content, headers=self._headers, extensions={"timeout": timeout}
        )
        try:
            async with asyncio.timeout(settings.connect_seconds + settings.first_token_seconds):
                response = await client.send(built, stream=True)
        except TimeoutError:
            raise Unavailable(f"{self._name} did not answer within {settings.first_token_seconds:g} s") from None
        except Exception as error:
            raise self._broken(error) from None
        stack.push_async_callback(response.aclose)
        return response

    async def _payloads(self, response: Any, builder: Builder) -> AsyncGenerator[bytes, None]:
        """Yield the JSON text of each chunk, or the whole body of a server that does not stream."""
        streamed = response.headers.get("content-type", "").startswith("text/event-stream")
        lines = EventLines()
        body = bytearray()
        try:
            async with contextlib.aclosing(self._pieces(response, builder)) as pieces:
                async for piece in pieces:
                    if streamed:
                        for payload in lines.feed(piece):
                            yield payload
                            if payload == DONE:
                                await _drain(pieces)
                                return
                    elif len(body) + len(piece) <= LARGEST_REPLY:
                        body += piece
                    else:
                        raise Unavailable(f"{self._name} sent more than {LARGEST_REPLY} bytes")
        except Unavailable:
            # The reply is complete; only the end of the stream was lost.
            if not builder.finished:
                raise
        if streamed:
            for payload in lines.end():
                yield payload
            return
        # Some servers stream without the matching content type.
        found = [] if body.lstrip().startswith(b"{") else lines.feed(bytes(body)) + lines.end()
        for payload in found or [bytes(body)]:
            yield payload

    async def _pieces(self, response: Any, builder: Builder | None = None) -> AsyncGenerator[bytes, None]:
        source: AsyncIterator[bytes] = response.aiter_bytes()
        limit = self._settings.first_token_seconds
        while True:
            try:
                async with asyncio.timeout(limit):
                    piece = await anext(source)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise Unavailable(f"{self._name} sent nothing for {limit:g} s") from None
            except Exception as error:
                raise self._broken(error) from None
            yield piece
            # After the reply, only the usage is still to come.
            limit = USAGE_SECONDS if builder is not None and builder.finished else self._settings.idle_seconds

    async def _error_text(self, response: Any) -> str:
        body = b""
        with contextlib.suppress(ModelError):
            async with contextlib.aclosing(self._pieces(response)) as pieces:
                async for piece in pieces:
                    body += piece
                    if len(body) > LONGEST_ERROR:
                        break
        await response.aclose()
        return body[:LONGEST_ERROR].decode(errors="replace").strip()

    def _error(self, response: Any, text: str) -> ModelError:
        error: Any = text or "no explanation"
        with contextlib.suppress(msgspec.DecodeError, UnicodeError, RecursionError):
            error = msgspec.json.decode(text) if text.startswith(("{", "[")) else error
        retry_after = _seconds_of(response.headers.get("retry-after"))
        return self._named(error_of(error, response.status_code, who=self._name, retry_after=retry_after))

    def _named(self, error: ModelError) -> ModelError:
        """Return the error with the key removed, in case the server repeated it."""
        message = error.message.replace("the model ", f"{self._name} ", 1)
        if self._api_key:
            message = message.replace(self._api_key, "***")
        error.message = message
        error.args = (message,)
        return error

    def _broken(self, error: Exception) -> ModelError:
        kind = type(error).__name__
        if kind in ("InvalidURL", "UnsupportedProtocol", "LocalProtocolError"):
            return ModelRefused(f"{self._name} cannot be asked at {self._url!r}: {error}")
        if kind in ("ConnectError", "ConnectTimeout"):
            return Unavailable(f"{self._name} cannot be reached at {self._url}: {error or kind}", unreachable=True)
        return Unavailable(f"the connection to {self._name} broke: {error or kind}")


async def _drain(pieces: AsyncGenerator[bytes, None]) -> None:
    """Read a stream to its end, so that its connection can be reused: a new one costs several round trips."""
    with contextlib.suppress(TimeoutError, Unavailable):
        async with asyncio.timeout(DRAIN_SECONDS):
            async for _ in pieces:
                pass


def _seconds_of(value: str | None) -> float | None:
    """Parse either form of `Retry-After`."""
    if not value:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None
