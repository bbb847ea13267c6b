"""Embedders: a server with the `/v1/embeddings` interface, or the local model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

from farhand import __version__
from farhand.memory.vectors import Vector, unit_vector
from farhand.protocol.errors import FarhandError

MOST_ANSWER: Final = 64 * 1024 * 1024


class EmbeddingError(FarhandError):
    """The embedder returned no vectors."""


class Embedder(Protocol):
    # Identifies the vectors of this embedder.
    name: str
    # Display name.
    label: str
    # Preferred number of texts per call.
    batch: int
    # The similarity from which two texts are related; specific to the model.
    threshold: float

    async def embed(self, texts: Sequence[str], seconds: float) -> list[Vector]:
        """Return a vector for each text, all of the same length. Raises EmbeddingError."""

    async def close(self) -> None: ...


class _Datum(msgspec.Struct):
    embedding: list[float]
    index: int | None = None


class _Answer(msgspec.Struct):
    data: list[_Datum]


class HttpEmbedder:
    """A server with the `/v1/embeddings` interface."""

    batch = 64
    threshold = 0.35

    def __init__(self, url: str, model: str, api_key: str = "") -> None:
        """`url` is the base, such as `http://127.0.0.1:1234/v1`, or ends in `/embeddings`. Raises EmbeddingError."""
        import httpx2  # noqa: PLC0415 (50 ms, for those who use it)

        base = url.rstrip("/")
        self._address = base if base.endswith("/embeddings") else f"{base}/embeddings"
        try:
            parts = httpx2.URL(self._address)
            usable = parts.scheme in ("http", "https") and bool(parts.host)
        except (httpx2.InvalidURL, ValueError, TypeError):
            usable = False
        if not usable:
            raise EmbeddingError(f"[memory] embedding_url: {url!r} is not an address such as http://127.0.0.1:1234/v1")
        if not api_key.isascii() or not api_key.isprintable():
            raise EmbeddingError("[memory] embedding_api_key: contains characters that cannot be sent")
        headers = {"User-Agent": f"farhand/{__version__}"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._client = httpx2.AsyncClient(headers=headers)
        self._broken = httpx2.HTTPError
        self._model = model
        self.name = f"{self._address} {model}"
        self.label = model

    async def embed(self, texts: Sequence[str], seconds: float) -> list[Vector]:
        body = {"model": self._model, "input": list(texts), "encoding_format": "float"}
        try:
            async with asyncio.timeout(seconds):
                status, data = await self._post(body)
        except TimeoutError:
            raise EmbeddingError(f"{self._address} did not answer within {seconds:g} s") from None
        except self._broken as error:
            reason = str(error) or type(error).__name__
            raise EmbeddingError(f"{self._address} cannot be reached: {reason}") from None
        if status >= 300:
            raise EmbeddingError(f"embedding status {status}: {_said(data)}")
        return await asyncio.to_thread(self._read, data, len(texts))

    async def close(self) -> None:
        await self._client.aclose()

    async def _post(self, body: Any) -> tuple[int, bytes]:
        # The caller limits the total time; there is no limit per read.
        async with self._client.stream("POST", self._address, json=body, timeout=None) as response:
            data = bytearray()
            async for piece in response.aiter_bytes():
                data += piece
                if len(data) > MOST_ANSWER:
                    raise EmbeddingError(f"{self._address} answered with more than {MOST_ANSWER} bytes")
            return response.status_code, bytes(data)

    def _read(self, data: bytes, expected: int) -> list[Vector]:
        try:
            answer = msgspec.json.decode(data, type=_Answer)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise EmbeddingError(f"{self._address} returned an invalid response: {error}") from None
        if len(answer.data) != expected:
            raise EmbeddingError(f"{self._address} returned {len(answer.data)} vectors for {expected} texts")
        # Some servers omit the index.
        placed = sorted(answer.data, key=lambda datum: datum.index or 0)
        try:
            vectors = [unit_vector(datum.embedding) for datum in placed]
        except (ValueError, OverflowError) as error:
            raise EmbeddingError(f"{self._address} returned an invalid vector: {error}") from None
        if len({len(vector) for vector in vectors}) != 1:
            raise EmbeddingError(f"{self._address} returned vectors of different lengths")
        return vectors


class UnavailableEmbedder:
    """Represents a configured embedder that cannot work; every call raises the reason."""

    batch = 64
    threshold = 0.35

    def __init__(self, label: str, reason: str) -> None:
        self.name = ""
        self.label = label
        self._reason = reason

    async def embed(self, texts: Sequence[str], seconds: float) -> list[Vector]:  # noqa: ARG002
        raise EmbeddingError(self._reason)

    async def close(self) -> None:
        pass


def _said(data: bytes) -> str:
    text = " ".join(data[:2000].decode("utf-8", "replace").split())
    return text[:200] or "no reason given"
