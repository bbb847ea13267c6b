"""Test the tools of a plug-in without a network.

`LocalGateway` sends requests to a registry through the same dispatcher and message codecs as a real connection:
arguments are validated, results are encoded, errors have their kinds.

    async with LocalGateway(registry) as gateway:
        assert await gateway.call("notes.search", {"query": "tea"}) == {"hits": []}

`call(registry, "notes.search", {"query": "tea"})` does the same from a test without an event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import msgspec
from msgspec import UNSET

from farhand.protocol.calls import ToolFailure
from farhand.protocol.errors import Failed, ToolError
from farhand.protocol.messages import ToolAck, ToolProgress, ToolRequest, ToolResponse, decode, encode
from farhand.protocol.version import MAX_PLAIN_FRAME_BYTES
from farhand.sdk.accepted_calls import AcceptedCalls
from farhand.sdk.dispatcher import Dispatcher
from farhand.sdk.registry import ToolRegistry

__all__ = ["LocalGateway", "call"]


class LocalGateway:
    """A gateway in memory for one registry.

    `progress` and `log` list what tools reported, in order: `(call id, done, total, message)` and
    `(call id, level, message)`.
    """

    def __init__(self, registry: ToolRegistry) -> None:
        self._registry = registry
        self._dispatcher: Dispatcher | None = None
        self._open: dict[str, asyncio.Future[ToolResponse]] = {}
        self._count = 0
        self.progress: list[tuple[str, float, float | None, str]] = []
        self.log: list[tuple[str, str, str]] = []

    async def __aenter__(self) -> Self:
        self._dispatcher = Dispatcher(
            self._registry,
            ledger=AcceptedCalls(),
            max_concurrent=16,
            max_request_bytes=MAX_PLAIN_FRAME_BYTES,
            max_response_bytes=MAX_PLAIN_FRAME_BYTES,
        )
        self._dispatcher.attach(
            self._receive, keeps=True, max_response_bytes=MAX_PLAIN_FRAME_BYTES, takes_progress=True
        )
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        assert self._dispatcher is not None
        await self._dispatcher.close("the test is over")
        self._dispatcher = None

    @property
    def tools(self) -> dict[str, Any]:
        """Return the announced tools by name, each with `name`, `description` and `parameters`."""
        return {spec.name: spec for spec in self._registry.specs()}

    async def call(self, tool: str, args: Mapping[str, Any] | None = None, *, session_key: str | None = None) -> Any:
        """Call a tool and return its result. Raises the ToolError of its kind if it fails.

        Cancelling this cancels the call, as a gateway would.
        """
        if self._dispatcher is None:
            raise RuntimeError("use `async with LocalGateway(registry) as gateway:`")
        self._count += 1
        call_id = f"call-{self._count}"
        request = ToolRequest(call_id, tool, msgspec.Raw(msgspec.json.encode(args or {})), session_key or UNSET)
        frame = encode(request)
        received = decode(frame)
        assert isinstance(received, ToolRequest)
        answer = self._open[call_id] = asyncio.get_running_loop().create_future()
        self._dispatcher.request(received, len(frame))
        try:
            response = await asyncio.shield(answer)
        except asyncio.CancelledError:
            self._dispatcher.cancel(call_id, "cancelled by the test")
            await asyncio.wait({answer})
            raise
        finally:
            self._open.pop(call_id, None)
        if response.ok:
            return None if response.result is UNSET else msgspec.json.decode(response.result)
        raise _error(response.error if isinstance(response.error, ToolFailure) else None)

    def _receive(self, frame: bytes) -> None:
        message = decode(frame)
        if isinstance(message, ToolResponse):
            assert self._dispatcher is not None
            self._dispatcher.acknowledge(ToolAck([message.request_id]).request_ids)
            waiting = self._open.get(message.request_id)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
        elif isinstance(message, ToolProgress) and message.level:
            self.log.append((message.request_id, message.level, message.message))
        elif isinstance(message, ToolProgress) and message.progress is not None:
            self.progress.append((message.request_id, message.progress, message.total, message.message))


def call(registry: ToolRegistry, tool: str, args: Mapping[str, Any] | None = None) -> Any:
    """Call one tool of a registry and return its result. Raises the ToolError of its kind if it fails."""

    async def once() -> Any:
        async with LocalGateway(registry) as gateway:
            return await gateway.call(tool, args)

    return asyncio.run(once())


def _error(failure: ToolFailure | None) -> ToolError:
    return Failed("the tool gave no error") if failure is None else ToolError.of(failure.kind, failure.message)
