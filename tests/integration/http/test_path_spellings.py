"""Every spelling of a forbidden path, at every family of tools, through a real gateway and a real node.

The whole machine is allowed (`[tools] roots = ["/"]`), so only the protected folders stand between a caller and the
system's files or the gateway's own secrets.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.harness import Answer, GatewayProcess, NodeProcess

SECRETS = ("root:x:0:0", "root:*:0:0")

# `{home}` is the gateway's, `{work}` the workspace of the tools, `{root}` the folder the node lends.
FORBIDDEN = [
    "/etc/passwd",
    "//etc/passwd",
    "///etc/passwd",
    "/./etc/passwd",
    "//./etc/passwd",
    "/etc//passwd",
    "/etc/./passwd",
    "/etc/passwd/",
    "/etc/passwd/.",
    "//proc/self/environ",
    "/proc/self/root/etc/passwd",
    "/proc/1/root/etc/passwd",
    "/proc/thread-self/root/etc/passwd",
    "/proc/self/root{work}/note.txt",
    "/proc/self/root{root}/note.txt",
    "/proc/self/cwd/x",
    "/proc/self/fd/0",
    "/proc/1/fd/0",
    "/proc/1/environ",
    "/dev/fd/0",
    "/dev/stdin",
    "//dev/stdin",
    "{home}/token",
    "/{home}/token",
    "/.{home}/token",
    "{home}//token",
    "{home}/./agents/./../token",
    "{home}/farhand.db",
    "{home}/farhand.toml",
    "/proc/self/root{home}/token",
    "{work}/to-etc/passwd",
    "{work}/to-token",
    "{work}/chain",
    "{work}/to-root/etc/passwd",
    "{work}/to-process/etc/passwd",
    "{work}/to-process{work}/note.txt",
    "{work}/to-init/etc/passwd",
    "{work}/to-stdin",
    "{work}/new-in-home/new.txt",
    "{root}/to-etc/passwd",
    "{root}/to-process{root}/note.txt",
    "{root}/to-init/etc/passwd",
    "{root}/to-token",
]


class Ground:
    def __init__(self, gateway: GatewayProcess, node: NodeProcess, work: Path, root: Path) -> None:
        self.gateway = gateway
        self.node = node
        self.work = work
        self.root = root

    def spelled(self, path: str) -> str:
        return path.format(home=self.gateway.home, work=self.work, root=self.root)

    def direct(self, tool: str, arguments: dict[str, Any]) -> Answer:
        body = {
            "input": [{"role": "user", "type": "message", "content": [{"type": "text", "text": "x"}]}],
            "session_id": "s1",
            "user_id": "u1",
            "channel": "console",
            "stream": False,
            "biz_params": {"tool": {"name": tool, "input": arguments}},
        }
        return self.gateway.request("POST", "/agent/process", body)

    def kind(self, tool: str, arguments: dict[str, Any]) -> str:
        """The kind of error of a call, or what it gave."""
        answer = self.gateway.invoke(tool, arguments)
        return str(answer["error"]["kind"]) if not answer["ok"] else f"ok: {answer['result']}"


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    folder = tmp_path_factory.mktemp("paths")
    home, work, root = folder / "home", folder / "work", folder / "lent"
    for made in (home, work, root):
        made.mkdir()
    (home / "farhand.toml").write_text('[tools]\nroots = ["/"]\n')
    for place in (work, root):
        (place / "note.txt").write_text("fine\n")
        (place / "inside").symlink_to("note.txt")
        (place / "to-etc").symlink_to("/etc")
        (place / "to-root").symlink_to("/")
        (place / "to-token").symlink_to(home / "token")
        (place / "chain").symlink_to("to-token")
        (place / "to-process").symlink_to("/proc/self/root")
        (place / "to-init").symlink_to("/proc/1/root")
        (place / "to-stdin").symlink_to("/dev/stdin")
        (place / "new-in-home").symlink_to(home)
    with (
        GatewayProcess(home, "--workspace", str(work)) as gateway,
        NodeProcess(gateway, folder / "box", "box", "--root", str(root)) as node,
    ):
        yield Ground(gateway, node, work, root)


@pytest.mark.parametrize("path", FORBIDDEN)
def test_agent_process_refuses_every_spelling_of_a_forbidden_path(ground: Ground, path: str) -> None:
    spelled = ground.spelled(path)
    for tool, more in (
        ("read_file", {}),
        ("read_file", {}),  # once more: what was read before may be answered in another way
        ("create_file", {"content": "x"}),
        ("update_file", {"content": "x"}),
        ("update_file", {"content": "x", "mode": "append"}),
    ):
        answer = ground.direct(tool, {"path": spelled, **more})
        assert answer.status == 403, (tool, answer)
        assert answer.json()["error"]["code"] == "tool_forbidden_path"
    answer = ground.direct("shell", {"command": "pwd", "cwd": spelled})
    assert (answer.status, answer.json()["error"]["code"]) == (403, "tool_forbidden_path"), answer


@pytest.mark.parametrize("path", FORBIDDEN)
def test_the_agents_tools_refuse_every_spelling_of_a_forbidden_path(ground: Ground, path: str) -> None:
    spelled = ground.spelled(path)
    for tool, arguments in (
        ("read", {"path": spelled}),
        ("write", {"path": spelled, "content": "x"}),
        ("edit", {"path": spelled, "old_text": "root", "new_text": "x"}),
        ("apply_patch", {"patch": f"*** Begin Patch\n*** Add File: {spelled}\n+x\n*** End Patch"}),
        ("apply_patch", {"patch": f"*** Begin Patch\n*** Delete File: {spelled}\n*** End Patch"}),
        ("grep", {"pattern": "root", "path": spelled}),
        ("glob", {"pattern": "*", "path": spelled}),
        ("ls", {"path": spelled}),
        ("exec", {"command": "pwd", "workdir": spelled}),
    ):
        assert ground.kind(tool, arguments) == "not_allowed", (tool, spelled)
    assert "ok" in ground.kind("glob", {"pattern": f"{ground.work}/*.txt"})


@pytest.mark.parametrize("path", FORBIDDEN)
def test_a_node_with_a_root_refuses_every_spelling_of_a_forbidden_path(ground: Ground, path: str) -> None:
    spelled = ground.spelled(path)
    for tool, arguments in (
        ("Read", {"path": spelled}),
        ("Read", {"path": spelled}),
        ("Write", {"path": spelled, "content": "x"}),
        ("Edit", {"path": spelled, "oldString": "root", "newString": "x"}),
        ("Glob", {"pattern": "*", "path": spelled}),
        ("Grep", {"pattern": "root", "path": spelled}),
    ):
        assert ground.kind(f"box__{tool}", arguments) == "not_allowed", (tool, spelled)


@pytest.mark.parametrize("path", FORBIDDEN)
def test_transfers_refuse_every_spelling_of_a_forbidden_path(ground: Ground, path: str) -> None:
    spelled = ground.spelled(path)
    assert ground.kind("gsv__Transfer", {"source": f"box:{spelled}", "destination": "gsv:x"}) == "not_allowed"
    assert ground.kind("gsv__Transfer", {"source": "box:note.txt", "destination": f"box:{spelled}"}) == "not_allowed"


@pytest.mark.parametrize("path", FORBIDDEN)
def test_the_workspace_knows_no_absolute_paths(ground: Ground, path: str) -> None:
    """A path of the workspace begins at its root, however it is spelled: nothing of the machine is ever found."""
    spelled = ground.spelled(path)
    expected = {"not_allowed"} if ".." in spelled else {"not_found", "not_allowed"}
    assert ground.kind("gsv__ReadFile", {"path": spelled}) in {*expected, "failed"}
    answer = ground.gateway.request("GET", f"/v1/workspace/main/{quote(spelled)}")
    assert answer.status in (400, 403, 404), answer
    assert not any(secret in answer.body.decode(errors="replace") for secret in SECRETS)


@pytest.mark.parametrize("target", ["/etc/passwd", "{home}/token", "/proc/self/root/etc/passwd", "/dev/stdin", "/"])
def test_links_in_the_workspace_of_an_agent_do_not_lead_out_of_it(ground: Ground, target: str) -> None:
    folder = ground.gateway.home / "agents" / "linked"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "way").unlink(missing_ok=True)
    (folder / "way").symlink_to(ground.spelled(target))
    for path in ("way", "way/etc/passwd"):
        call = ground.gateway.invoke("gsv__ReadFile", {"path": path}, agent_id="linked")
        assert call["ok"] is False and call["error"]["kind"] == "not_allowed", call
        assert ground.gateway.request("GET", f"/v1/workspace/linked/{path}").status == 403
        call = ground.gateway.invoke("gsv__WriteFile", {"path": path, "content": "x"}, agent_id="linked")
        assert call["ok"] is False and call["error"]["kind"] == "not_allowed", call
        assert ground.gateway.request("PUT", f"/v1/workspace/linked/{path}", b"x").status == 403
    listed = ground.gateway.invoke("gsv__ListFiles", {"path": "/"}, agent_id="linked")
    assert "way" not in str(listed.get("result")), listed


@pytest.mark.parametrize(
    "path",
    ["note.txt", "./note.txt", ".//note.txt", "{work}/note.txt", "/{work}/note.txt", "/.{work}//note.txt", "inside"],
)
def test_other_spellings_of_an_allowed_path_are_allowed(ground: Ground, path: str) -> None:
    spelled = ground.spelled(path)
    for _ in range(2):
        answer = ground.direct("read_file", {"path": spelled})
        assert answer.status == 200 and answer.json()["events"][2]["meta"]["result"]["content"] == "fine\n"
    assert "fine" in ground.kind("read", {"path": spelled})
    lent = path.replace("{work}", "{root}")
    assert "fine" in ground.kind("box__Read", {"path": ground.spelled(lent)})


def test_nothing_was_changed_by_all_that(ground: Ground) -> None:
    home = ground.gateway.home
    assert not (home / "new.txt").exists()
    assert ground.gateway.request("GET", "/v1/nodes").status == 200, "the token is still the token"
    for place in (ground.work, ground.root):
        assert (place / "note.txt").read_text() == "fine\n"


# -- a node that lends everything ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def open_node(ground: Ground, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node without `--root` that shares the gateway's home, as the one of `farhand up` does."""
    folder = tmp_path_factory.mktemp("open")
    with NodeProcess(ground.gateway, folder, "open", state=ground.gateway.home) as node:
        yield node


@pytest.mark.parametrize(
    "path",
    [
        "{home}/token",
        "/{home}/token",
        "///{home}/token",
        "/.{home}/token",
        "{home}/agents/../token",
        "{home}//farhand.db",
        "/{home}/farhand.toml",
        "/proc/self/root{home}/token",
        "/proc/self/cwd/x",
        "/proc/1/root/etc/passwd",
        "/dev/stdin",
        "{work}/to-token",
        "{work}/to-process{home}/token",
    ],
)
def test_a_node_that_lends_everything_keeps_its_own_home_to_itself(
    ground: Ground, open_node: NodeProcess, path: str
) -> None:
    spelled = ground.spelled(path)
    for _ in range(2):
        open_node.fails("Read", {"path": spelled}, "not_allowed")
    open_node.fails("Write", {"path": spelled, "content": "x"}, "not_allowed")
    answer = ground.kind("gsv__Transfer", {"source": f"open:{spelled}", "destination": "gsv:x"})
    assert answer == "not_allowed"


def test_a_node_that_lends_everything_shows_none_of_the_gateways_files(ground: Ground, open_node: NodeProcess) -> None:
    home = ground.gateway.home
    shown = [
        str(path.relative_to(home))
        for path in home.rglob("*")
        if path.is_file() and path.relative_to(home).parts[0] not in ("agents", "skills")
    ]
    assert {"token", "farhand.db"} <= set(shown)
    seen = [name for name in shown if ground.kind("open__Read", {"path": str(home / name)}) != "not_allowed"]
    assert seen == []
    open_node.fails("Glob", {"pattern": f"/{home}/**/*"}, "not_allowed")
    found = open_node.ok("Glob", {"pattern": "**/*", "path": str(home.parent)})["matches"]
    assert found and [path for path in found if path.startswith(f"{home}/")] == []


# -- hard links: one file with several names ------------------------------------------------------------


def test_an_append_leaves_the_other_names_of_a_file_alone(ground: Ground, tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("outside\n")
    outside.chmod(0o640)
    os.link(outside, ground.work / "hard.txt")
    answer = ground.direct("update_file", {"path": "hard.txt", "content": "more\n", "mode": "append"})
    assert answer.status == 200, answer
    assert answer.json()["events"][2]["meta"]["result"]["size"] == len("outside\nmore\n")
    assert (ground.work / "hard.txt").read_text() == "outside\nmore\n"
    assert (ground.work / "hard.txt").stat().st_mode & 0o777 == 0o640
    assert outside.read_text() == "outside\n"
    answer = ground.direct("update_file", {"path": "hard.txt", "content": "again\n", "mode": "append"})
    assert answer.status == 200 and (ground.work / "hard.txt").read_text() == "outside\nmore\nagain\n"


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("write", {"content": "x"}),
        ("edit", {"old_text": "outside", "new_text": "x"}),
        ("apply_patch", {"patch": "*** Begin Patch\n*** Update File: {path}\n@@\n-outside\n+x\n*** End Patch"}),
        ("box__Write", {"content": "x"}),
        ("box__Edit", {"oldString": "outside", "newString": "x"}),
        ("gsv__Transfer", {}),
    ],
)
def test_no_write_reaches_the_other_names_of_a_file(
    ground: Ground, tmp_path: Path, tool: str, arguments: dict[str, str]
) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("outside\n")
    at_node = tool.startswith(("box", "gsv"))
    path = (ground.root if at_node else ground.work) / f"hard-{tmp_path.name}.txt"
    os.link(outside, path)
    if tool == "gsv__Transfer":
        wanted = {"source": "box:note.txt", "destination": f"box:{path}"}
    elif "patch" in arguments:
        wanted = {"patch": arguments["patch"].format(path=path)}
    else:
        wanted = {"path": str(path), **arguments}
    assert ground.kind(tool, wanted).startswith("ok")
    assert path.read_text() != "outside\n" and outside.read_text() == "outside\n"
