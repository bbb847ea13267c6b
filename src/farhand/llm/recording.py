"""Record replies and replay them without a network.

A recording is a file of JSON lines. A line of type `model` holds the events of one reply and a digest of the request;
a line of type `tool` (see `agent/tool_recording.py`) holds a tool call and its outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import stat
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from farhand.llm.errors import ModelError, NotConfigured
from farhand.llm.messages import Finished, Message, Retrying, StreamEvent
from farhand.llm.model import Model, ModelRequest, ModelWrapper

# A recorded conversation always fits: it did when it was recorded.
REPLAY_CONTEXT_TOKENS = 1_000_000

MAX_RECORDING_BYTES = 64 * 1024 * 1024

# Takes one line, including its newline.
Write = Callable[[bytes], None]


class RecordedReply(msgspec.Struct, frozen=True, tag="model"):
    # Digest of the conversation that the reply answers.
    asked: str
    events: tuple[StreamEvent, ...]


class RecordedCall(msgspec.Struct, frozen=True, tag="tool"):
    id: str
    name: str
    arguments: str
    outcome: msgspec.Raw


Line = RecordedReply | RecordedCall

_DECODER = msgspec.json.Decoder(Line)


def digest(messages: Sequence[Message]) -> str:
    """Return the digest of a conversation without its system prompt, which may change with the machines online."""
    said = [message for message in messages if message.role != "system"]
    return hashlib.blake2b(msgspec.json.encode(said), digest_size=16).hexdigest()


class Recording:
    """The contents of a recording.

    A matching entry is returned as often as it is requested; if none matches, the unused entries are returned in order.
    """

    def __init__(self, lines: Sequence[Line], name: str) -> None:
        self.name = name
        self._replies = [line for line in lines if isinstance(line, RecordedReply)]
        self._calls = [line for line in lines if isinstance(line, RecordedCall)]
        self._replies_left = list(self._replies)
        self._calls_left = list(self._calls)

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Read a file. Raises NotConfigured if it is unreadable, not a regular file or exceeds MAX_RECORDING_BYTES.

        Blocks while it reads; on an event loop, use a thread.
        """
        try:
            # Without O_NONBLOCK, opening a named pipe waits for a writer.
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise NotConfigured(f"The recording {path} cannot be read: it is not a regular file.")
                text = file.read(MAX_RECORDING_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise NotConfigured(f"The recording {path} cannot be read: {reason}.") from None
        if len(text) > MAX_RECORDING_BYTES:
            raise NotConfigured(f"The recording {path} cannot be read: it exceeds {MAX_RECORDING_BYTES} bytes.")
        return cls.of(text, str(path))

    @classmethod
    def of(cls, text: bytes, name: str) -> Recording:
        """Parse a recording. Raises NotConfigured for an invalid line."""
        lines: list[Line] = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    lines.append(_DECODER.decode(line))
                except (msgspec.MsgspecError, UnicodeError) as error:
                    raise NotConfigured(f"{name}, line {number}, is not a line of a recording: {error}") from None
        return cls(lines, name)

    def reply(self, messages: Sequence[Message]) -> RecordedReply:
        """Return the reply recorded for this conversation, or else the next one. Raises ModelError if none is left."""
        asked = digest(messages)
        left, used = self._replies_left, self._replies
        found = next((reply for reply in [*left, *used] if reply.asked == asked), left[0] if left else None)
        if found is None:
            raise ModelError(f"{self.name} has no reply left: it has {len(used)}, and none matches the request.")
        if found in left:
            left.remove(found)
        return found

    def call(self, identity: str, name: str, arguments: str) -> msgspec.Raw | None:
        """Return the outcome recorded for this call, by its id or else by its tool and arguments."""
        ordered = [*self._calls_left, *self._calls]
        same = [call for call in ordered if (call.name, call.arguments) == (name, arguments)]
        found = next((call for call in same if call.id == identity), same[0] if same else None)
        if found is None:
            return None
        if found in self._calls_left:
            self._calls_left.remove(found)
        return found.outcome


class ReplayModel:
    """A model that replays recorded replies, event by event. A file is read in a thread at the first use."""

    def __init__(self, name: str, source: Recording | Path) -> None:
        self._name = name
        self._source = source
        self._reading = asyncio.Lock()

    async def recording(self) -> Recording:
        """Return the recording. Raises NotConfigured if the file is invalid."""
        async with self._reading:
            if isinstance(self._source, Path):
                self._source = await asyncio.to_thread(Recording.read, self._source)
            return self._source

    @property
    def name(self) -> str:
        return self._name

    @property
    def context_tokens(self) -> int:
        return REPLAY_CONTEXT_TOKENS

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamEvent, None]:
        recording = await self.recording()
        for event in recording.reply(request.messages).events:
            yield event


class RecordingModel(ModelWrapper):
    """A model that records its replies once they are complete, without waits and discarded deltas."""

    def __init__(self, model: Model, write: Write) -> None:
        super().__init__(model)
        self._write = write

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamEvent, None]:
        events: list[StreamEvent] = []
        async with contextlib.aclosing(self._model.stream(request)) as stream:
            async for event in stream:
                if isinstance(event, Retrying):
                    events = [] if event.void else events
                else:
                    events.append(event)
                if isinstance(event, Finished):
                    write_line(self._write, RecordedReply(digest(request.messages), tuple(events)))
                yield event


def write_line(write: Write, line: Any) -> None:
    write(msgspec.json.encode(line) + b"\n")
