"""Call a chat service over HTTP with one client, loaded on first use, and report every failure as a DeliveryError."""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from farhand.gateway.messaging.channel import DeliveryError, TryLater, Undeliverable, Unsure

SECONDS: Final = 30.0
LONGEST_ERROR: Final = 300


class Service:
    """Send requests to one base address. The owner calls `close`."""

    def __init__(self, base: str) -> None:
        self._base = base.rstrip("/")
        self._client: Any = None
        self._httpx: Any = None
        self._opening = asyncio.Lock()

    async def call(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        seconds: float = SECONDS,
    ) -> Any:
        """Return the response's JSON, or None if it has none. Raises DeliveryError."""
        client = await self._open()
        httpx = self._httpx
        if json is not None:
            content = msgspec.json.encode(json)
            headers = {"Content-Type": "application/json", **(headers or {})}
        try:
            response = await client.request(
                method,
                path if "://" in path else self._base + path,
                content=content,
                headers=headers,
                timeout=httpx.Timeout(seconds, connect=10.0),
            )
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise TryLater(f"the service cannot be reached: {error}") from None
        except httpx.HTTPError as error:
            raise Unsure(f"the connection broke: {type(error).__name__} {error}") from None
        except (httpx.InvalidURL, ValueError) as error:
            raise Undeliverable(f"the address cannot be used: {error}") from None
        status = response.status_code
        body: bytes = response.content
        if 200 <= status < 300:
            return _json(body)
        said = f"{status}: {body[:LONGEST_ERROR].decode('utf-8', 'replace').strip()}"
        raise read_failure(status, said, _wait_asked(response.headers, _json(body)))

    async def fetch(self, url: str, *, largest: int) -> bytes:
        """Download a file. Raises DeliveryError, also if the file is too large."""
        client = await self._open()
        parts: list[bytes] = []
        size = 0
        try:
            async with client.stream("GET", url, timeout=SECONDS) as response:
                if response.status_code != 200:
                    gone = 400 <= response.status_code < 500 and response.status_code != 429
                    raise (Undeliverable if gone else TryLater)(
                        f"the file could not be fetched: {response.status_code}"
                    )
                async for part in response.aiter_bytes():
                    size += len(part)
                    if size > largest:
                        raise Undeliverable(f"the file has more than {largest} bytes")
                    parts.append(part)
        except self._httpx.HTTPError as error:
            raise TryLater(f"the file could not be fetched: {error}") from None
        return b"".join(parts)

    async def stream(self, path: str) -> Any:
        """Open a response to read line by line: `async with await service.stream(path) as response`."""
        client = await self._open()
        return client.stream("GET", self._base + path, timeout=self._httpx.Timeout(None, connect=10.0))

    @property
    def broken(self) -> type[Exception]:
        """Return the exception type that reading a stream raises when the connection is lost."""
        kind: type[Exception] = self._httpx.HTTPError
        return kind

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _open(self) -> Any:
        async with self._opening:
            if self._client is None:
                # Importing it and loading the certificates takes about 0.1 s, which would block the event loop.
                self._httpx = await asyncio.to_thread(importlib.import_module, "httpx2")
                logging.getLogger("httpx2").setLevel(logging.WARNING)  # it would log each URL, tokens included
                self._client = self._httpx.AsyncClient(headers={"User-Agent": "farhand"}, follow_redirects=False)
        return self._client


def read_failure(status: int, said: str, after: float | None = None) -> DeliveryError:
    """Convert an error response to a DeliveryError; `after` is how long the service asked us to wait."""
    if status == 504:
        return Unsure(said)
    if status == 429:
        return TryLater(said, after)
    if status >= 500 or status in (401, 408, 409, 423, 425):  # 401: the owner can correct the token
        return TryLater(said)
    return Undeliverable(said)


def _json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _wait_asked(headers: Mapping[str, str], body: Any) -> float | None:
    """Return how long the service asked us to wait, from a header or from the body (Telegram, Discord)."""
    seconds: Any = headers.get("retry-after")
    if isinstance(body, dict):
        parameters = body.get("parameters")
        seconds = (
            (parameters.get("retry_after") if isinstance(parameters, dict) else None)
            or body.get("retry_after")
            or seconds
        )
    try:
        return min(max(float(seconds), 0.0), 3600.0)
    except (TypeError, ValueError):
        return None
