"""Record the requests of a run to its model, so that it can be replayed (`replay.py`)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from farhand.agent.compaction import Compactor
from farhand.agent.loop import Limits
from farhand.agent.prompt import Prompted
from farhand.llm.errors import BudgetSpent, ContextOverflow, ModelError, ModelRefused, NotConfigured, Unavailable
from farhand.llm.messages import Finished, Message, StreamEvent
from farhand.llm.model import Model, ModelRequest, ModelWrapper, Thinking
from farhand.protocol.calls import ToolSpec
from farhand.store.ports import Store, Tx, log_failure
from farhand.store.tables import recordings as replays
from farhand.store.tables.recordings import ModelExchange, digest

ERRORS: dict[str, type[ModelError]] = {
    error.__name__: error
    for error in (ModelError, NotConfigured, ModelRefused, ContextOverflow, BudgetSpent, Unavailable)
}
ERRORS["Refused"] = ModelRefused  # in recordings of earlier versions

log = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode


class RunSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """The settings with which a run was made."""

    model: str
    context_tokens: int
    # With digests of the files instead of their texts.
    prompt: Prompted
    limits: Limits
    compactor: Compactor
    thinking: Thinking | None = None
    max_tokens: int | None = None
    child: bool = False
    # Tools that are always offered, if not the default ones.
    core: tuple[str, ...] | None = None
    judges: bool = False


class Replied(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a request: a reply, or an error."""

    finished: Finished | None = None
    error: str | None = None
    message: str = ""


def plain_digest(messages: Sequence[Message]) -> bytes:
    """Return the digest of a conversation without its system prompt."""
    return digest(_encode([message for message in messages if message.role != "system"]))


def spec_list(specs: Sequence[ToolSpec]) -> tuple[list[bytes], bytes]:
    """Return the descriptions of tools, and the list of their digests."""
    contents = [_encode(spec) for spec in specs]
    return contents, b"".join(digest(content) for content in contents)


class Asking:
    """Records the requests of one run without delaying it: they are written with the run's own data."""

    def __init__(self, database: Store, run_id: str, specs: Callable[[], Sequence[ToolSpec]]) -> None:
        self._database = database
        self._run_id = run_id
        self._specs = specs
        self._last: tuple[Sequence[ToolSpec], bytes] | None = None
        self._kept: set[bytes] = set()

    def begin(self, settings: RunSettings, now: int, last_entry: int) -> None:
        files = {name: text.encode() for name, text in settings.prompt.parts.files.items()}
        named = {name: digest(data).hex() for name, data in files.items()}
        parts = msgspec.structs.replace(settings.prompt.parts, files=named)
        prompt = msgspec.structs.replace(settings.prompt, parts=parts)
        data = _encode(msgspec.structs.replace(settings, prompt=prompt))

        run_id, contents = self._run_id, list(files.values())

        def write(store: Tx) -> None:
            replays.keep_contents(store, contents)
            replays.add_attempt(store, run_id, now, last_entry, data)

        self._write(write)

    def asked(self, request: ModelRequest, reply: Replied | None) -> None:
        contents: list[bytes] = []
        specs = self._specs()
        if self._last is None or self._last[0] != specs:
            described, listed = spec_list(specs)
            contents += [*described, listed]
            self._last = (specs, digest(listed))
        offered, listed = spec_list(request.tools)
        prompt = "".join(message.text for message in request.messages if message.role == "system").encode()
        contents += [*offered, listed, prompt]
        row = ModelExchange(
            self._run_id,
            0,
            0,
            digest(prompt),
            sum(message.role != "system" for message in request.messages),
            plain_digest(request.messages),
            digest(listed),
            self._last[1],
            None if reply is None else msgspec.Raw(_encode(reply)),
        )
        new = [data for data in contents if data not in self._kept]
        self._kept.update(new)

        def write(store: Tx) -> None:
            replays.keep_contents(store, new)
            replays.add_asked(store, row)

        self._write(write)

    def _write(self, operation: Callable[[Tx], None]) -> None:
        log_failure(self._database.write(operation, durable=False), log, f"record a request of run {self._run_id}")


class AskedModel(ModelWrapper):
    """A model whose requests and replies are recorded."""

    def __init__(self, model: Model, asking: Asking) -> None:
        super().__init__(model)
        self._asking = asking

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamEvent, None]:
        reply: Replied | None = None
        recorded = False
        try:
            async with contextlib.aclosing(self._model.stream(request)) as stream:
                async for event in stream:
                    if isinstance(event, Finished):
                        reply = Replied(finished=event)
                        self._asking.asked(request, reply)  # before the reply is used
                        recorded = True
                    yield event
        except ModelError as error:
            reply = Replied(error=type(error).__name__, message=error.message)
            raise
        finally:
            if not recorded:
                self._asking.asked(request, reply)
