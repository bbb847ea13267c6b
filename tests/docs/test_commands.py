"""Every command of the documentation is run, page by page, on a gateway with nodes and a model double."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from pathlib import Path

import pytest

from farhand.node.names import default_node_id
from tests.support.doc_blocks import Reader, blocks
from tests.support.harness import ROOT, GatewayProcess, NodeProcess, free_port
from tests.support.model_server import ModelServer, Reply, Request, calls, text

PAGES = {
    str(page.relative_to(ROOT)): page.read_text()
    for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
    if any(block.kind in {"console", "sh"} for block in blocks(page.read_text()))
}


@dataclasses.dataclass(frozen=True)
class Place:
    """What a page finds: the nodes by name, with options; None if the page starts the gateway itself."""

    nodes: dict[str, tuple[str, ...]] | None = dataclasses.field(default_factory=lambda: {"laptop": ()})


PLACES = {
    "README.md": Place({"laptop": (), "server": ()}),
    "docs/how-to/move-files.md": Place({"laptop": (), "server": ()}),
    "docs/how-to/schedule-work.md": Place({"laptop": (), "nas": ()}),
    "docs/how-to/stop-everything.md": Place({"db1": (), "web1": ()}),
    "docs/reference/cli.md": Place({"laptop": (), "server": (), "nas": ()}),
    "docs/tutorial/getting-started.md": Place(None),
    "docs/how-to/call-many-machines.md": Place({"web1": ("--tag", "web"), "web2": ("--tag", "web"), "db1": ()}),
}
# What the model answers, by the text of the question: its replies, one after the other.
ANSWERS: dict[str, list[Reply]] = {
    "How many CPUs does my laptop have?": [
        calls(("laptop__Bash", {"command": "nproc"})),
        text("Your laptop has 4 CPUs."),
    ],
    "And how much memory?": [calls(("laptop__Bash", {"command": "free -h"})), text("It has 16 GB of memory.")],
    "Write a short report about free disk space.": [
        calls(("laptop__Bash", {"command": "df /"})),
        text("The root file system of laptop is 35 % full."),
    ],
    "What is in hello.txt?": [calls(("read", {"path": "hello.txt"})), text("It says hello.")],
    "Which system is this?": [calls(("exec", {"command": "uname"})), text("It is Linux.")],
}


def answer(request: Request) -> Reply:
    messages = request.messages
    last = max(index for index, message in enumerate(messages) if message["role"] == "user")
    question = str(messages[last]["content"])
    step = sum(message["role"] == "tool" for message in messages[last:])
    replies = next((replies for asked, replies in ANSWERS.items() if asked in question), [text("Done.")])
    return replies[min(step, len(replies) - 1)]


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_page(name: str, tmp_path: Path) -> None:
    page = PAGES[name]
    runnable = [b for b in blocks(page) if b.kind in {"console", "sh"} and "not run" not in b.marks]
    if not runnable:
        pytest.skip("no block of this page can run in a test")
    place = PLACES.get(name, Place())
    port = free_port()
    replaced = {"127.0.0.1:3210": f"127.0.0.1:{port}", "sk-…": "sk-0123456789"}
    with ModelServer(answer=answer) as model, contextlib.ExitStack() as stack:
        environment = {**model.environment, "FARHAND_GATEWAY_PORT": str(port)}
        if place.nodes is None:
            # The node of `farhand up` has the name of this host.
            replaced |= {"make run": "farhand up", "laptop": default_node_id()}
        reader = Reader(tmp_path / "page", environment, replaced)
        stack.callback(reader.close)
        if place.nodes is not None:
            home = reader.home / ".farhand"
            search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            environ: dict[str, str | None] = {**model.environment, "HOME": str(reader.home), "PATH": search}
            gateway = GatewayProcess(home, port=port, env=environ)
            stack.enter_context(gateway)
            for node, options in place.nodes.items():
                where = reader.home_of("" if node == "laptop" else node)
                # As with `farhand up`, relative paths of the gateway's own machine start in the agent's folder.
                workspace = home / "agents" / "main" if node == "laptop" else where
                arguments = ("--workspace", str(workspace), *options)
                stack.enter_context(NodeProcess(gateway, tmp_path / node, node, *arguments, env={"HOME": str(where)}))
        reader.follow(page)


def test_a_block_that_is_not_run_says_why() -> None:
    left_out = [
        (f"{name}:{block.line}", block.marks["not run"])
        for name, page in PAGES.items()
        for block in blocks(page)
        if "not run" in block.marks
    ]
    for where, reason in left_out:
        print(f"not run: {where}: {reason}")
    print(f"{len(left_out)} blocks are not run")
    assert [where for where, reason in left_out if len(reason) < 10] == []
