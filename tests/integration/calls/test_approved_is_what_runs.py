"""What a person approves is what runs: a call with a second spelling of a parameter is refused, or shown as it runs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.calls.test_approvals import answer, asked, end_of, write_policy
from tests.support.harness import Answer, GatewayProcess, NodeProcess, wait_until

RULES = """
[[policy.rules]]
name = "changes are asked about"
decision = "ask"
tool = ["Edit", "Bash", "edit", "exec", "shell"]
"""


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    home = tmp_path_factory.mktemp("approved") / "home"
    write_policy(home, RULES)
    with GatewayProcess(home) as gateway, NodeProcess(gateway, tmp_path_factory.mktemp("laptop"), "laptop") as node:
        for folder in (node.workspace, home / "agents" / "main"):
            for name in ("shown", "meant"):
                (folder / name).mkdir(parents=True)
        yield node


def approved(gateway: GatewayProcess, tool: str, args: dict[str, Any]) -> tuple[Any, Any] | None:
    """What was shown and how the call ended, once it was approved; None for a call that was refused."""
    made = gateway.invoke(tool, args, background=True)
    if not made["ok"]:
        assert made["error"]["kind"] == "invalid_args", made
        return None
    shown = asked(gateway, made["request_id"])
    assert answer(gateway, shown).status == 200
    return shown, end_of(gateway, shown)


def test_the_approved_diff_is_the_edit_that_is_made(laptop: NodeProcess) -> None:
    """S2: one pair of texts was shown, the other one applied."""
    file = laptop.workspace / "two.txt"
    file.write_text("harmless\nprecious\n")
    texts = {"oldString": "precious", "newString": "ruined", "old_text": "harmless", "new_text": "harmless indeed"}
    done = approved(laptop.gateway, "laptop__Edit", {"path": "two.txt", **texts})
    if done is None:
        assert file.read_text() == "harmless\nprecious\n"
        return
    removed = [line[1:] for line in done[0]["diff"].splitlines() if line.startswith("-") and not line.startswith("---")]
    before, after = ["harmless", "precious"], file.read_text().splitlines()
    assert [line for line in before if line not in after] == removed


@pytest.mark.parametrize(
    ("tool", "args"),
    [
        ("laptop__Bash", {"cwd": "shown"}),
        ("laptop__Bash", {"working_dir": "meant", "cwd": "shown"}),
        ("exec", {"cwd": "shown"}),
    ],
)
def test_the_approved_folder_is_the_folder_of_the_command(laptop: NodeProcess, tool: str, args: dict[str, str]) -> None:
    done = approved(laptop.gateway, tool, {"command": "pwd", **args})
    if done is None:
        return
    shown, record = done
    result = record["result"]
    assert shown["cwd"] in (result.get("output") or result.get("content")), (shown["cwd"], result)


def test_the_approved_folder_is_that_of_the_shell_of_agent_process(laptop: NodeProcess) -> None:
    gateway = laptop.gateway
    work = gateway.home / "agents" / "main"
    args = {"command": "touch here", "workdir": "shown", "cwd": "meant"}

    def call() -> Answer:
        body: dict[str, Any] = {"session_id": "s", "user_id": "u", "stream": False}
        body["input"] = [{"role": "user", "content": "go"}]
        body["biz_params"] = {"tool": {"name": "shell", "input": args}}
        return gateway.request("POST", "/agent/process", body)

    with ThreadPoolExecutor(1) as pool:
        reported = pool.submit(call)
        shown = wait_until(
            lambda: reported.done() or gateway.get("/v1/approvals")["approvals"], what="a question or an end"
        )
        if shown is not True:
            assert answer(gateway, shown[0]).status == 200
        said = reported.result(60)
    if shown is True:
        assert said.status == 400, said
        assert not list(work.rglob("here"))
    else:
        assert [path.parent for path in work.rglob("here")] == [Path(shown[0]["cwd"])]
