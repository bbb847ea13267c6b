"""Few tools in the prompt, all of them callable; outcomes; recordings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from farhand.agent.events import Completed
from farhand.agent.loop import run
from farhand.agent.tool_outcome import MAX_IMAGE_CHARS, Outcome
from farhand.agent.tool_recording import recording, replaying
from farhand.agent.tool_search import CORE, MOST_OFFERED, NAME, ToolShelf, overview, search
from farhand.agent.tools import Call
from farhand.llm.messages import Image, Message, Text, ToolUse
from farhand.llm.recording import Recording, RecordingModel, ReplayModel
from farhand.protocol.calls import ToolResult, ToolSpec
from tests.unit.agent.doubles import ScriptedModel, end, says, uses

# The first bytes of an image.
PNG = "iVBORw0KGgoAAAAN"
NODE = ("Bash", "Process", "Read", "Write", "Edit", "Glob", "Grep")
SPECS = [
    *(ToolSpec(name, f"The agent's own {name}.") for name in CORE),
    *(ToolSpec(f"{node}__{tool}", f"{tool} on {node}.") for node in ("laptop", "server") for tool in NODE),
    ToolSpec("gsv__Cron", "Schedule a task to run later or again and again."),
    ToolSpec("gsv__Transfer", "Copy a file from one machine to another."),
    ToolSpec("macos.notes.search", "Search the notes of this machine."),
]


async def echo(use: ToolUse) -> Outcome:
    return Outcome(f"{use.name} ran")


def shelf(specs: Sequence[ToolSpec] = SPECS, call: Call = echo) -> ToolShelf:
    return ToolShelf(lambda: specs, call)


def called(name: str, arguments: dict[str, Any]) -> Outcome:
    return asyncio.run(shelf().call(ToolUse("1", name, msgspec.json.encode(arguments).decode())))


def names(specs: Sequence[ToolSpec]) -> list[str]:
    return [spec.name for spec in specs]


def test_the_core_and_the_search_are_offered() -> None:
    assert names(shelf().offered(())) == [*CORE, NAME]


def test_without_further_tools_there_is_no_search() -> None:
    assert names(shelf(SPECS[:20]).offered(())) == list(CORE)


def test_a_query_finds_by_meaning_and_by_name() -> None:
    assert names(search("schedule something", SPECS))[0] == "gsv__Cron"
    assert names(search("copy a file to another machine", SPECS))[0] == "gsv__Transfer"
    assert names(search("laptop__Read", SPECS))[0] == "laptop__Read"
    assert names(search("gsv__Cron, laptop__Bash", SPECS))[:2] == ["gsv__Cron", "laptop__Bash"]
    assert set(names(search("laptop", SPECS))) == {f"laptop__{tool}" for tool in NODE}
    assert names(search("notes", SPECS)) == ["macos.notes.search"]
    assert search("zebra", SPECS) == []


def test_what_was_found_is_offered_from_then_on_in_a_stable_order() -> None:
    found = called(NAME, {"query": "laptop__Read"})
    use = ToolUse("1", NAME, '{"query":"laptop__Read"}')
    talk = [Message("user", "x"), Message("assistant", tool_calls=(use,)), found.message(use)]
    offered = names(shelf().offered(talk))
    assert offered[:22] == [*CORE, NAME, "laptop__Read"]
    later = [*talk, Message("assistant", tool_calls=(ToolUse("2", "gsv__Cron", "{}"),))]
    assert names(shelf().offered(later))[: len(offered)] == offered


def test_what_is_offered_has_an_end() -> None:
    many = [ToolSpec(f"node__t{n}") for n in range(99)]
    talk = [Message("assistant", tool_calls=tuple(ToolUse(str(n), f"node__t{n}") for n in range(99)))]
    assert len(shelf(many).offered(talk)) == MOST_OFFERED + 1


def test_a_tool_is_called_by_name_without_a_search() -> None:
    assert called("server__Grep", {}).content == "server__Grep ran"
    assert called("macos.notes.search", {}).content == "macos.notes.search ran"


def test_a_tool_that_is_not_there() -> None:
    outcome = called("server__Grepp", {})
    assert (outcome.kind, outcome.is_error) == ("not_found", True)
    assert str(outcome.content).startswith("tool not found: server__Grepp (did you mean server__Grep")


def test_a_family_stands_for_unlisted_tools() -> None:
    specs = [*SPECS, ToolSpec("pi.camera.*", "On pi."), ToolSpec("ls.*", "On a node that wants to be the agent's own.")]
    known = shelf(specs)

    def called(use: ToolUse) -> Outcome:
        return asyncio.run(known.call(use))

    for name in ("pi.camera.shoot", "pi.camera", "PI.Camera.shoot"):
        assert called(ToolUse("1", name, "{}")).content == f"{name} ran"
    for name in ("pi.cameras", "pi.camera.*", "pi"):
        assert f"tool not found: {name}" in str(called(ToolUse("1", name, "{}")).content)
    assert names(search("camera", specs)) == ["pi.camera.*"]
    use = ToolUse("1", NAME, '{"query":"pi.camera.shoot, camera"}')
    talk = [Message("assistant", tool_calls=(use,)), called(use).message(use)]
    assert names(known.offered(talk)) == [*CORE, NAME, "pi.camera.shoot"]
    talk = [Message("assistant", tool_calls=(ToolUse("1", "ls", "{}"), ToolUse("2", "pi.camera.look", "{}")))]
    assert names(known.offered(talk)) == [*CORE, NAME, "pi.camera.look"]
    assert "pi.camera.*" in overview(specs)


def test_a_bad_search_says_what_is_missing() -> None:
    assert called(NAME, {}).content == "tool_search parameter query is required"
    assert called(NAME, {"query": "x", "limit": "many"}).kind == "invalid_args"
    assert str(called(NAME, {"query": "zebra"}).content).startswith("No tool fits 'zebra'. There are: laptop__Bash")


def test_the_overview_names_every_further_tool_once() -> None:
    assert overview(SPECS).splitlines() == [
        "- others: macos.notes.search",
        "- gsv__Cron, Transfer",
        "- laptop__Bash, Edit, Glob, Grep, Process, Read, Write",
        "- server__Bash, Edit, Glob, Grep, Process, Read, Write",
    ]


def test_costs_are_listed_for_every_tool() -> None:
    costs = shelf().costs()
    assert {cost.name for cost in costs} == {NAME, *names(SPECS)}
    assert [cost.name for cost in costs if cost.offered] == [*CORE, NAME]
    assert all(cost.tokens > 0 for cost in costs)


def outcome_of(value: Any) -> Outcome:
    return Outcome.of_result(ToolResult(True, msgspec.Raw(msgspec.json.encode(value))))


def test_results_become_what_the_model_reads() -> None:
    assert outcome_of({"content": "plain text"}).content == "plain text"
    assert (
        outcome_of({"path": "/a", "content": "1\tx", "lines": 1}).content == '{"path":"/a","content":"1\\tx","lines":1}'
    )
    picture = [{"type": "text", "text": "Image file"}, {"type": "image", "data": PNG, "mimeType": "image/png"}]
    assert outcome_of({"content": picture}).content == (Text("Image file"), Image(f"data:image/png;base64,{PNG}"))
    assert outcome_of({"content": [{"type": "video"}]}).content == '{"content":[{"type":"video"}]}'
    assert outcome_of(None).content == "null"
    failed = Outcome.of_result(ToolResult.failed("not_found", "no such file"))
    assert (failed.content, failed.is_error, failed.kind) == ("no such file", True, "not_found")


@pytest.mark.parametrize(
    ("data", "mime_type"),
    [
        ("PHN2Zy8+", "image/svg+xml"),
        ("JVBERi0xLjc=", "application/pdf"),
        ("PGh0bWw+PC9odG1sPg==", "image/png"),
        (PNG[:-1], "image/png"),
        (f"{PNG}\n", "image/png"),
        (PNG[:8] + "A" * MAX_IMAGE_CHARS, "image/png"),
        ("", "image/png"),
        (PNG, "image/png;base64,AAAA,"),
        (PNG, "image/png\x1b]0;x\x07"),
    ],
)
def test_an_image_that_models_refuse_is_shown_as_text(data: str, mime_type: str) -> None:
    """It stays in the conversation: every later request would be refused, too."""
    (shown,) = outcome_of({"content": [{"type": "image", "data": data, "mimeType": mime_type}]}).content
    assert isinstance(shown, Text) and "cannot be shown" in shown.text and shown.text.isprintable()


def test_a_run_is_repeated_from_its_recording_byte_for_byte() -> None:
    async def real(use: ToolUse) -> Outcome:
        return Outcome((Text("a picture"), Image("data:image/png;base64,AA")), result=msgspec.Raw(b'{"n":1.50}'))

    async def both() -> None:
        lines: list[bytes] = []
        start = [Message("system", "s"), Message("user", "go")]
        script = (uses(("a", "read", {"path": "x"}), ("b", "read", {"path": "y"})), says("done"))
        model = RecordingModel(ScriptedModel(*script), lines.append)
        first = [event async for event in run(model, start, shelf(call=recording(real, lines.append)))]
        kept = Recording.of(b"".join(lines), "kept")
        replay = ReplayModel("test/scripted", kept)
        second = [event async for event in run(replay, start, shelf(call=replaying(kept)))]

        def reported(events: Sequence[Any]) -> list[bytes]:
            return [
                msgspec.json.encode(msgspec.structs.replace(event, seconds=0) if hasattr(event, "seconds") else event)
                for event in events
            ]

        assert reported(second) == reported(first)
        assert isinstance(end(second), Completed)

    asyncio.run(both())


def test_a_call_that_was_not_recorded_says_so() -> None:
    outcome = asyncio.run(replaying(Recording([], "kept"))(ToolUse("1", "read", "{}")))
    assert outcome == Outcome.failed("not_found", "kept has no call of read with these arguments")
