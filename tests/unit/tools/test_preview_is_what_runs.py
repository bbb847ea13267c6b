"""A preview shows what the call does: for random arguments, the diff applied to the old content is the new content."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from farhand.gateway.workspace.files_tools import NativeFiles
from farhand.gateway.workspace.workspace import Workspace
from farhand.machine.files import steering_files as steering
from farhand.machine.files.files import Files
from farhand.machine.jobs.jobs import Jobs
from farhand.node.limits import ToolLimits
from farhand.node.previews import preview_call
from farhand.node.tools import node_tools
from farhand.protocol.errors import ToolError
from farhand.sdk.context import CancelToken, ToolContext
from farhand.store.objects.folder import FolderObjects
from farhand.tools.agent_files import AgentFileTools
from farhand.tools.http_guide import GuideTools
from farhand.tools.node_files import NodeFileTools
from farhand.tools.node_shell import NodeShellTools
from farhand.tools.preview import FileEffect, Preview, preview_or_error
from farhand.tools.tool import CallContext, Tool

HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")

LINES = st.sampled_from(["one", "two", "one two", "", "täglich", "  x", "*** End", "@@", "-", "+x", "\\ No newline"])
ENDS = st.sampled_from(["\n", "\r\n", "\n\n", ""])
TEXTS = st.lists(st.tuples(LINES, ENDS), max_size=6).map(lambda parts: "".join(line + end for line, end in parts))
PATHS = st.sampled_from(
    [
        *("a.txt", "./a.txt", "sub/../a.txt", "sub//b.txt", "sub", "sub/", "new/deep/c.txt", "a.txt/x", "link.txt"),
        *("dangling.txt", ".", "..", "A.TXT", "", "b\0d", "x\n-one\n+two", "ä b.txt"),
    ]
)
PIECES = st.one_of(TEXTS, st.sampled_from(["one", "two", "one\ntwo", "one\r\ntwo", "\n", "o"]))
FLAGS = st.one_of(st.booleans(), st.sampled_from([None, "true", 1]))


def edits(path: str, old: str, new: str, every: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({path: PATHS, old: PIECES, new: PIECES}, optional={every: FLAGS})


def patches() -> st.SearchStrategy[str]:
    body = st.lists(
        st.one_of(
            st.tuples(st.just("*** Add File: {}\n"), PATHS, TEXTS.map(lambda text: _signed("+", text))),
            st.tuples(st.just("*** Delete File: {}\n"), PATHS, st.just("")),
            st.tuples(st.just("*** Update File: {}\n"), PATHS, st.sampled_from(["-one\n+1\n", "@@\n+z\n"])),
            st.tuples(st.just("*** Update File: {}\n"), PATHS, TEXTS.map(lambda text: _signed("-", text) + "+new\n")),
            st.tuples(st.just("*** Update File: {}\n*** Move to: m.txt\n"), PATHS, st.just("-one\n+1\n")),
        ),
        max_size=3,
    )
    return body.map(lambda parts: "*** Begin Patch\n" + "".join(h.format(p) + b for h, p, b in parts) + "*** End Patch")


def _signed(sign: str, text: str) -> str:
    return "".join(f"{sign}{line}\n" for line in text.split("\n"))


@st.composite
def misspelled(
    draw: st.DrawFn, arguments: st.SearchStrategy[dict[str, Any]], aliases: dict[str, str]
) -> dict[str, Any]:
    """Some arguments, some of them under another name of the parameter, another casing, or twice."""
    meant = draw(arguments)
    given: dict[str, Any] = {}
    for name, value in meant.items():
        others = [alias for alias, parameter in aliases.items() if parameter == name]
        given[draw(st.sampled_from([name, name, name, *others, *others, name.upper()]))] = value
    if draw(st.integers(0, 5)) == 0:
        given[draw(st.sampled_from([*meant, *aliases, "oldText", "new_text", "cwd"]))] = draw(PIECES)
    return given


NODE = {
    "Write": misspelled(st.fixed_dictionaries({"path": PATHS, "content": TEXTS}), {}),
    "Edit": misspelled(edits("path", "oldString", "newString", "replaceAll"), {}),
}
PATH = {"file_path": "path"}
AGENT = {
    "write": misspelled(
        st.fixed_dictionaries({"path": PATHS, "content": TEXTS}, optional={"create_dirs": st.booleans()}), PATH
    ),
    "edit": misspelled(
        edits("path", "old_text", "new_text", "replace_all"),
        {"old_string": "old_text", "new_string": "new_text", **PATH},
    ),
    "apply_patch": misspelled(st.fixed_dictionaries({"patch": patches()}, optional={"path": PATHS}), {}),
}
GUIDE = {
    "create_file": misspelled(st.fixed_dictionaries({"path": PATHS, "content": TEXTS}), {}),
    "update_file": misspelled(
        st.fixed_dictionaries(
            {"path": PATHS, "content": TEXTS},
            optional={"mode": st.sampled_from(["append", "overwrite", " Append ", "APPEND", "x", ""])},
        ),
        {},
    ),
}
KEYS = st.sampled_from(
    ["a.txt", "sub/b.txt", "sub", "new/c.txt", "skills/s/SKILL.md", "skills/new/SKILL.md", "", "../x", "sub/", "/a.txt"]
)
NATIVE = {
    "gsv__WriteFile": misspelled(st.fixed_dictionaries({"path": KEYS, "content": TEXTS}), {}),
    "gsv__EditFile": misspelled(
        st.fixed_dictionaries({"path": KEYS, "oldString": PIECES, "newString": PIECES}, optional={"replaceAll": FLAGS}),
        {},
    ),
    "gsv__DeleteFile": misspelled(st.fixed_dictionaries({"path": KEYS}), {}),
}


def calls(tools: dict[str, Any]) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    return st.one_of([st.tuples(st.just(name), arguments) for name, arguments in tools.items()])


def content(root: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink()
    }


def patched(old: str, effect: FileEffect) -> str:
    """What a unified diff makes of a text. Raises AssertionError where it does not fit."""
    lines = effect.diff.split("\n")
    assert lines[0].startswith("--- ") and lines[1].startswith("+++ ") and lines[-1] == ""
    before = old.split("\n")
    before = [*(f"{line}\n" for line in before[:-1]), *([before[-1]] if before[-1] else [])]
    after: list[str] = []
    done = 0
    for number, line in enumerate(lines[2:-1], 2):
        end = "" if lines[number + 1] == "\\ No newline at end of file" else "\n"
        if found := HUNK.fullmatch(line):
            start = int(found[1]) - (found[2] != "0")
            after += before[done:start]
            done = start
        elif line == "\\ No newline at end of file":
            continue
        elif line[:1] == "+":
            after.append(line[1:] + end)
        else:
            assert before[done] == line[1:] + end, (before, done, line)
            if line[:1] == " ":
                after.append(before[done])
            done += 1
    return "".join([*after, *before[done:]])


class World:
    """A folder with some files, made anew for each example."""

    def __init__(self, old: str) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="preview-")).resolve()
        self.workspace = self.root / "files"
        (self.workspace / "sub").mkdir(parents=True)
        (self.workspace / "a.txt").write_bytes(old.encode())
        (self.workspace / "sub" / "b.txt").write_bytes(b"one\r\ntwo\r\n")
        (self.workspace / "link.txt").symlink_to("sub/b.txt")
        (self.workspace / "dangling.txt").symlink_to("gone/away.txt")

    def close(self) -> None:
        shutil.rmtree(self.root)


async def agree(
    root: Path, preview: Awaitable[Preview], run: Callable[[], Awaitable[Any]], *, foreseen: bool = True
) -> None:
    """Preview, then run: what was shown is what has changed, and nothing else has.

    `foreseen`: the preview knows every reason for which the call fails.
    """
    shown = await preview
    before = content(root)
    try:
        await run()
    except ToolError as error:
        assert not shown.files or not foreseen, (shown, error.message)
        assert content(root) == before
        return
    assert not shown.note, shown
    expected = dict(before)
    for effect in shown.files:
        path = effect.path if effect.path.startswith("/") else str(root / effect.path)
        if effect.note:
            assert effect.note == "the content stays the same"
            continue
        assert (effect.before is None) == (path not in before), effect
        if effect.diff.split("\n")[1] == "+++ /dev/null":
            del expected[path]
        else:
            expected[path] = patched(before.get(path, b"").decode(), effect).encode()
    assert content(root) == expected


CONTEXT = CallContext("call", agent_id="main")


def of_tool(tool: Tool, arguments: dict[str, Any]) -> tuple[Awaitable[Preview], Callable[[], Awaitable[Any]]]:
    """As the gateway does it: names are resolved once, then the tool previews and runs."""

    async def preview() -> Preview:
        assert tool.preview is not None
        return await tool.preview(tool.canonical(arguments), CONTEXT)  # type: ignore[no-any-return]

    async def run() -> Any:
        return await tool.run(tool.canonical(arguments), CONTEXT)

    return preview_or_error(preview()), run


@given(call=calls(NODE), old=TEXTS)
def test_on_a_node(call: tuple[str, dict[str, Any]], old: str) -> None:
    name, arguments = call
    world = World(old)

    async def check() -> None:
        async with Jobs(world.root / "jobs", eager=False) as jobs:
            shell = NodeShellTools(jobs, world.workspace)
            tools = node_tools((NodeFileTools(Files(world.workspace)), shell), ToolLimits())
            tool = tools.find(name)
            assert tool is not None
            raw = msgspec.Raw(msgspec.json.encode(arguments))
            question = msgspec.Raw(msgspec.json.encode({"tool": name, "args": arguments}))
            preview = preview_call(tools, ToolLimits(), question)
            await agree(world.workspace, preview, lambda: tool.run(ToolContext("1", name, None, CancelToken()), raw))

    try:
        asyncio.run(check())
    finally:
        world.close()


@given(call=calls(AGENT), old=TEXTS)
def test_previews_of_the_agent(call: tuple[str, dict[str, Any]], old: str) -> None:
    name, arguments = call
    world = World(old)
    try:
        tools = {tool.name: tool for tool in AgentFileTools(Files(world.workspace)).tools()}
        asyncio.run(agree(world.workspace, *of_tool(tools[name], arguments)))
    finally:
        world.close()


@given(call=calls(GUIDE), old=TEXTS)
def test_previews_of_agent_process(call: tuple[str, dict[str, Any]], old: str) -> None:
    name, arguments = call
    world = World(old)

    async def check() -> None:
        async with Jobs(world.root / "jobs", eager=False) as jobs:
            tools = {tool.name: tool for tool in GuideTools(Files(world.workspace, upward=False), jobs).tools()}
            await agree(world.workspace, *of_tool(tools[name], arguments))

    try:
        asyncio.run(check())
    finally:
        world.close()


@given(call=calls(NATIVE), old=TEXTS)
def test_previews_of_the_workspace(call: tuple[str, dict[str, Any]], old: str) -> None:
    name, arguments = call
    world = World(old)

    async def check() -> None:
        steering.allowed.set(True)
        root = world.root / "objects"
        for key, text in (
            ("agents/main/a.txt", old.encode()),
            ("agents/main/sub/b.txt", b"one\r\ntwo\r\n"),
            ("skills/s/SKILL.md", b"one\ntwo\n"),
        ):
            (root / key).parent.mkdir(parents=True, exist_ok=True)
            (root / key).write_bytes(text)
        objects = FolderObjects(root)
        tools = {tool.name: tool for tool in NativeFiles(Workspace(objects)).tools()}
        await agree(root, *of_tool(tools[name], arguments), foreseen=False)  # a folder may be in the way

    try:
        asyncio.run(check())
    finally:
        world.close()
