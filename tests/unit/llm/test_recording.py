"""Recording and replaying replies."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from farhand.llm.errors import ModelError, NotConfigured
from farhand.llm.messages import Finished, Message, Retrying, StreamEvent
from farhand.llm.model import Model, ModelRequest
from farhand.llm.recording import MAX_RECORDING_BYTES, Recording, RecordingModel, ReplayModel
from farhand.llm.registry import Models
from farhand.llm.retry import RetryPolicy
from farhand.llm.settings import ProviderSettings
from tests.support.model_server import ModelServer, calls, text


def asked(*words: str) -> ModelRequest:
    return ModelRequest(tuple(Message("user", word) for word in words))


async def events_of(model: Model, request: ModelRequest) -> list[StreamEvent]:
    return [event async for event in model.stream(request)]


def record(path: Path, *requests: ModelRequest, server: ModelServer) -> list[list[StreamEvent]]:
    async def main() -> list[list[StreamEvent]]:
        models = Models(
            providers={"openai": ProviderSettings(server.url)},
            policy=lambda _: RetryPolicy(initial_delay=0.001),
        )
        with path.open("ab") as file:
            model = RecordingModel(models.named("m"), file.write)
            events = [await events_of(model, request) for request in requests]
        await models.close()
        return events

    return asyncio.run(main())


def replay(path: Path, *requests: ModelRequest) -> list[list[StreamEvent]]:
    async def main() -> list[list[StreamEvent]]:
        model = Models(environ={"FARHAND_MODEL": f"replay:{path}"}).named()
        return [await events_of(model, request) for request in requests]

    return asyncio.run(main())


def test_replies_come_again_event_by_event(tmp_path: Path) -> None:
    requests = [asked("a"), asked("a", "b")]
    with ModelServer(text("one two three", thinking="hm"), calls(("read", {"path": "x"}), ids=[None])) as server:
        first = record(tmp_path / "r.jsonl", *requests, server=server)
    assert replay(tmp_path / "r.jsonl", *requests) == first


def test_replies_are_found_by_what_was_asked_then_in_order(tmp_path: Path) -> None:
    with ModelServer(text("to a"), text("to b"), text("to c")) as server:
        to_a, to_b, to_c = record(tmp_path / "r", asked("a"), asked("b"), asked("c"), server=server)
    assert replay(tmp_path / "r", asked("b"), asked("?"), asked("b"), asked("?")) == [to_b, to_a, to_b, to_c]


def test_a_system_prompt_may_change(tmp_path: Path) -> None:
    with ModelServer(text("to a"), text("to b")) as server:
        _, to_b = record(tmp_path / "r", asked("a"), asked("b"), server=server)
    later = ModelRequest((Message("system", "it is Tuesday"), *asked("b").messages))
    assert replay(tmp_path / "r", later) == [to_b]


def test_text_of_an_interrupted_stream_is_not_recorded(tmp_path: Path) -> None:
    with ModelServer(text("half", cut=True, usage=None, finish_reason=""), text("whole")) as server:
        (events,) = record(tmp_path / "r", asked("a"), server=server)
    start = next(number for number, event in enumerate(events) if isinstance(event, Retrying)) + 1
    assert replay(tmp_path / "r", asked("a")) == [events[start:]]


def test_an_empty_recording_says_so(tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(b"\n")
    with pytest.raises(ModelError, match="has no reply left: it has 0"):
        replay(tmp_path / "r", asked("a"))


def test_an_invalid_recording_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotConfigured, match=r"gone cannot be read: No such file"):
        replay(tmp_path / "gone", asked("a"))
    (tmp_path / "r").write_text('{"type":"model","asked":"","events":[]}\nnonsense\n')
    with pytest.raises(NotConfigured, match="line 2, is not a line of a recording"):
        replay(tmp_path / "r", asked("a"))


def test_only_a_regular_file_of_bounded_size_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(MAX_RECORDING_BYTES + 1)
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(NotConfigured, match=r"not a regular file|Is a directory"):
            replay(path, asked("a"))
    with pytest.raises(NotConfigured, match=f"exceeds {MAX_RECORDING_BYTES} bytes"):
        replay(tmp_path / "huge", asked("a"))


def test_a_recording_in_memory() -> None:
    lines: list[bytes] = []

    async def main() -> Finished:
        with ModelServer(text("hi")) as server:
            models = Models(providers={"openai": ProviderSettings(server.url)})
            await events_of(RecordingModel(models.named("m"), lines.append), asked("a"))
            await models.close()
        events = await events_of(ReplayModel("replay", Recording.of(b"".join(lines), "memory")), asked("a"))
        assert isinstance(events[-1], Finished)
        return events[-1]

    assert asyncio.run(main()).message.content == "hi"
