"""The gateway's own tools through a real gateway: files, settings, logs and skills; one test for each promise.

Those of `gsv__Transfer` have files of their own: `test_transfers.py`, `test_workspace_transfers.py`,
`test_transfer_ends.py`, and the kills in `faults/test_transfer_kills.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import urllib.request
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import FARHAND, run_process
from tests.support.harness import GatewayProcess, NodeProcess, PlainNode, Plugin, hello_frame, wait_until

SETTINGS = """
[gateway]
hosts = ["farhand.example"]
origins = ["https://example.com"]
tls_key = ""

[providers.proxy]
base_url = "https://user:hunter2@example.com/v1"

[skills.entries.forbidden]
enabled = false

[skills.entries.forced]
always = true

[models.small]
context_tokens = 1

[models."small.2"]
context_tokens = 2
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    home = tmp_path_factory.mktemp("native") / "home"
    home.mkdir()
    (home / "farhand.toml").write_text(SETTINGS)
    with GatewayProcess(home) as running:
        yield running


@pytest.fixture
def agent() -> str:
    """An agent of the test's own."""
    return f"a-{uuid.uuid4().hex[:8]}"


class Files:
    """The file tools of one agent."""

    def __init__(self, gateway: GatewayProcess, agent: str) -> None:
        self.gateway = gateway
        self.agent = agent
        self.folder = gateway.home / "agents" / agent

    def call(self, tool: str, **args: Any) -> Any:
        return self.gateway.invoke(f"gsv__{tool}", args, agent_id=self.agent)

    def ok(self, tool: str, **args: Any) -> Any:
        answer = self.call(tool, **args)
        assert answer["ok"], answer
        assert answer["route"] == {
            "kind": "native",
            **({"capability": c} if (c := answer["route"].get("capability")) else {}),
        }
        return answer["result"]

    def fails(self, tool: str, kind: str, **args: Any) -> str:
        answer = self.call(tool, **args)
        assert not answer["ok"] and answer["error"]["kind"] == kind, answer
        return str(answer["error"]["message"])


@pytest.fixture
def files(gateway: GatewayProcess, agent: str) -> Files:
    return Files(gateway, agent)


@pytest.fixture
def skill(gateway: GatewayProcess) -> Iterator[Any]:
    """Makes global skills, and removes them afterwards."""
    names: set[str] = set()

    def make(name: str, text: str = "# A skill\n\nDoes things.", path: str = "SKILL.md") -> None:
        names.add(name)
        answer = gateway.request(
            "PUT", f"/v1/skills/{name}/{path}", text.encode(), headers={"Content-Type": "text/plain"}
        )
        assert answer.status == 200, answer

    yield make
    for name in names:
        gateway.request("DELETE", f"/v1/skills/{name}")


# -- ReadFile -------------------------------------------------------------------------------------------------------


def test_the_tools_are_offered_with_their_parameters(gateway: GatewayProcess) -> None:
    offers = {offer["name"]: offer for offer in gateway.get("/v1/tools")["tools"] if offer["name"].startswith("gsv__")}
    expected = {
        "gsv__ReadFile": (["path"], []),
        "gsv__WriteFile": (["path", "content"], ["path", "content"]),
        "gsv__EditFile": (["path", "oldString", "newString", "replaceAll"], ["path", "oldString", "newString"]),
        "gsv__DeleteFile": (["path"], ["path"]),
        "gsv__ConfigGet": (["path"], []),
        "gsv__LogsGet": (["nodeId", "lines"], []),
    }
    for name, (parameters, required) in expected.items():
        schema = offers[name]["parameters"]
        assert sorted(schema["properties"]) == sorted(parameters)
        assert sorted(schema.get("required", [])) == sorted(required)
        assert offers[name]["description"] and offers[name]["host"] == "gsv"
    types = {
        name: {key: value["type"] for key, value in offers[name]["parameters"]["properties"].items()}
        for name in expected
    }
    assert types["gsv__ReadFile"] == types["gsv__ConfigGet"] == {"path": "string"}
    assert types["gsv__EditFile"]["replaceAll"] == "boolean"
    assert types["gsv__LogsGet"] == {"nodeId": "string", "lines": "number"}


def test_read_a_file(files: Files) -> None:
    files.ok("WriteFile", path="SOUL.md", content="I am ä.\n")
    result = files.ok("ReadFile", path="SOUL.md")
    modified = result.pop("lastModified")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", modified)
    assert result == {"path": "SOUL.md", "content": "I am ä.\n", "size": 9}


@pytest.mark.parametrize("args", [{}, {"path": "/"}, {"path": ""}, {"path": None}, {"path": "."}])
def test_list_the_root(files: Files, args: Any) -> None:
    files.ok("WriteFile", path="a.md", content="")
    files.ok("WriteFile", path="memory/2026-01-01.md", content="")
    result = files.ok("ReadFile", **args)
    assert result == {"path": args.get("path") or "/", "files": ["a.md"], "directories": ["memory/"]}


def test_the_root_of_a_new_agent_is_empty(files: Files) -> None:
    assert files.ok("ReadFile") == {"path": "/", "files": [], "directories": []}


@pytest.mark.parametrize("path", ["memory", "memory/", "/memory", "/memory/"])
def test_a_missing_key_that_is_a_prefix_is_a_directory(files: Files, path: str) -> None:
    files.ok("WriteFile", path="memory/a.md", content="")
    files.ok("WriteFile", path="memory/old/b.md", content="")
    result = files.ok("ReadFile", path=path)
    assert result == {"path": path, "files": ["memory/a.md"], "directories": ["memory/old/"]}


def test_nothing_there(files: Files) -> None:
    assert files.fails("ReadFile", "not_found", path="none.md") == "Not found: none.md"
    files.ok("WriteFile", path="memory/a.md", content="")
    files.fails("ReadFile", "not_found", path="mem")


def test_a_very_deep_directory_works(files: Files) -> None:
    files.ok("WriteFile", path="a.md", content="")
    deep = os.open(files.folder, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=deep)
        inner = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = inner
    os.close(os.open("x", os.O_CREAT, dir_fd=deep))
    os.close(deep)
    try:
        assert files.ok("ReadFile") == {"path": "/", "files": ["a.md"], "directories": []}
        files.fails("ReadFile", "not_found", path="d/d/d")
    finally:
        subprocess.run(["rm", "-r", files.folder / "d"], check=True)


def test_a_long_directory_is_listed_whole(files: Files) -> None:
    (files.folder / "many").mkdir(parents=True)
    for number in range(1100):
        (files.folder / "many" / f"{number:04}.txt").touch()
    assert len(files.ok("ReadFile", path="many")["files"]) == 1100


def test_binary_data_is_not_changed(files: Files) -> None:
    files.folder.mkdir(parents=True)
    (files.folder / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe")
    message = files.fails("ReadFile", "failed", path="x.png")
    assert "image/png" in message and "10 bytes" in message


def test_agents_see_their_own_files_only(gateway: GatewayProcess, files: Files) -> None:
    files.ok("WriteFile", path="secret.md", content="mine")
    other = Files(gateway, files.agent + "b")
    other.fails("ReadFile", "not_found", path="secret.md")
    other.fails("ReadFile", "not_allowed", path=f"../{files.agent}/secret.md")


def test_without_an_agent_it_is_main(gateway: GatewayProcess) -> None:
    assert gateway.invoke("gsv__WriteFile", {"path": "m.md", "content": "x"})["ok"]
    assert (gateway.home / "agents" / "main" / "m.md").read_text() == "x"


def test_a_session_works_in_the_workspace_of_its_agent(gateway: GatewayProcess, files: Files) -> None:
    args = {"path": "s.md", "content": "x"}
    assert gateway.invoke("gsv__WriteFile", args, session_key=f"agent:{files.agent}:main")["ok"]
    assert files.ok("ReadFile", path="s.md")["content"] == "x"


@pytest.mark.parametrize("agent_id", ["..", "a/b", "../main", "", ".", "a\u0000b", "x" * 65, "-a", "a..b"])
def test_an_agent_id_is_not_a_path(gateway: GatewayProcess, agent_id: str) -> None:
    answer = gateway.invoke("gsv__WriteFile", {"path": "x.md", "content": "x"}, agent_id=agent_id)
    if agent_id:
        assert answer["error"]["kind"] == "invalid_args", answer
    assert sorted(path.name for path in (gateway.home / "agents").iterdir() if not path.name.startswith("a-")) in (
        ["main"],
        [],
    )


# -- paths ----------------------------------------------------------------------------------------------------------

TRAVERSALS = [
    "..",
    "../x",
    "/../x",
    "a/../x",
    "a/..",
    "a/../../x",
    "./../x",
    " ../x",
    "a/.. /x",
    "..\\x",
    "a\\..\\x",
    "%2e%2e/x",
    "%2E%2e%2Fx",
    "%252e%252e/x",
    ".%2e/x",
    ".\u200d./x",
    "\uff0e\uff0e/x",
    "\u2025/x",
    "skills/../x",
    "skills/../../token",
    "../../token",
]


@pytest.mark.parametrize("path", TRAVERSALS)
def test_traversal_is_refused_in_every_spelling(files: Files, path: str) -> None:
    assert "Path traversal not allowed" in files.fails("ReadFile", "not_allowed", path=path)
    files.fails("WriteFile", "not_allowed", path=path, content="x")
    files.fails("EditFile", "not_allowed", path=path, oldString="a", newString="b")
    files.fails("DeleteFile", "not_allowed", path=path)


def test_dots_in_a_name_are_not_traversal(files: Files) -> None:
    files.ok("WriteFile", path="v1..v2.md", content="x")
    assert files.ok("ReadFile", path="./v1..v2.md")["content"] == "x"
    assert files.ok("ReadFile", path="//v1..v2.md")["content"] == "x"


@pytest.mark.parametrize("name", ["\U0001f469\u200d\U0001f680.md", "Screenshot at 1.00.00\u202fPM.png", "a\u00a0b.md"])
def test_names_as_people_and_their_machines_make_them(files: Files, name: str) -> None:
    files.ok("WriteFile", path=f"d/{name}", content="x")
    assert files.ok("ReadFile", path="d")["files"] == [f"d/{name}"]
    assert files.ok("ReadFile", path=f"d/{name}")["content"] == "x"
    files.ok("DeleteFile", path=f"d/{name}")


def test_a_path_that_takes_long_to_look_at_is_refused_at_once(files: Files) -> None:
    path = "a" + "\u0315\u0300" * 200_000  # marks in the wrong order, which are put into the right one
    assert "at most" in files.fails("ReadFile", "invalid_args", path=path)
    assert "at most" in files.fails("WriteFile", "invalid_args", path=path, content="x")


@pytest.mark.parametrize("path", ["a\u0000b", "a\nb", "a\u2028b", "x" * 300, "d/" * 600 + "x"])
def test_names_that_are_none(files: Files, path: str) -> None:
    files.fails("ReadFile", "invalid_args", path=path)
    files.fails("WriteFile", "invalid_args", path=path, content="x")


@pytest.mark.parametrize("path", ["", "/", "skills", "skills/", "notes/", " "])
def test_a_directory_is_not_written(files: Files, path: str) -> None:
    for tool, more in (
        ("WriteFile", {"content": "x"}),
        ("EditFile", {"oldString": "a", "newString": "b"}),
        ("DeleteFile", {}),
    ):
        assert "path must reference a file" in files.fails(tool, "invalid_args", path=path, **more)


@pytest.mark.parametrize("target", ["../../token", "/etc/passwd", "../../farhand.db"])
def test_a_link_out_of_the_workspace_leads_nowhere(files: Files, target: str) -> None:
    files.folder.mkdir(parents=True)
    os.symlink(target, files.folder / "link")
    files.fails("ReadFile", "not_allowed", path="link")
    files.fails("WriteFile", "not_allowed", path="link", content="x")
    assert files.ok("ReadFile")["files"] == []


# -- WriteFile ------------------------------------------------------------------------------------------------------


def test_write_creates_and_overwrites(files: Files) -> None:
    assert files.ok("WriteFile", path="deep/down/x.md", content="grüße") == {
        "path": "deep/down/x.md",
        "size": 7,
        "written": True,
    }
    assert files.ok("WriteFile", path="deep/down/x.md", content="")["size"] == 0
    assert (files.folder / "deep" / "down" / "x.md").read_bytes() == b""
    assert os.listdir(files.folder / "deep" / "down") == ["x.md"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.md", "text/markdown"),
        ("a.json", "application/json"),
        ("a.yaml", "text/yaml"),
        ("a.yml", "text/yaml"),
        ("a.txt", "text/plain"),
        ("a.html", "text/plain"),
        ("a.png", "text/plain"),
        ("a.js", "text/plain"),
        ("noext", "text/plain"),
    ],
)
def test_the_content_type_of_what_is_written(files: Files, name: str, expected: str) -> None:
    files.ok("WriteFile", path=name, content="x")
    answer = files.gateway.request("GET", f"/v1/workspace/{files.agent}/{name}")
    assert answer.headers["content-type"].partition(";")[0] == expected


@pytest.mark.parametrize(
    ("tool", "args", "parameter"),
    [
        ("WriteFile", {"content": "x"}, "path"),
        ("WriteFile", {"path": "x"}, "content"),
        ("EditFile", {"oldString": "a", "newString": "b"}, "path"),
        ("EditFile", {"path": "x", "newString": "b"}, "oldString"),
        ("EditFile", {"path": "x", "oldString": "b"}, "newString"),
        ("DeleteFile", {}, "path"),
    ],
)
def test_a_missing_parameter_is_named(files: Files, tool: str, args: Any, parameter: str) -> None:
    assert f"{parameter} is required" in files.fails(tool, "invalid_args", **args)


@pytest.mark.parametrize(
    ("tool", "args", "parameter"),
    [
        ("ReadFile", {"path": 1}, "path"),
        ("WriteFile", {"path": "x", "content": {}}, "content"),
        ("EditFile", {"path": "x", "oldString": "a", "newString": "b", "replaceAll": "yes"}, "replaceAll"),
        ("LogsGet", {"lines": "ten"}, "lines"),
        ("ConfigGet", {"path": ["a"]}, "path"),
    ],
)
def test_a_mistyped_parameter_is_named(files: Files, tool: str, args: Any, parameter: str) -> None:
    assert parameter in files.fails(tool, "invalid_args", **args)


def test_the_call_is_in_the_record(files: Files) -> None:
    answer = files.call("WriteFile", path="x.md", content="x")
    record = files.gateway.get(f"/v1/calls/{answer['request_id']}")
    assert (record["state"], record["tool"], record["agent_id"]) == ("ok", "gsv__WriteFile", files.agent)


def test_scopes_hold(files: Files) -> None:
    files.ok("WriteFile", path="x.md", content="x")
    made = files.gateway.request("POST", "/v1/tokens", {"label": "r", "scopes": ["tools.read"]}).json()

    def call(tool: str, args: Any) -> Any:
        body = {"tool": tool, "args": args, "agent_id": files.agent}
        return files.gateway.request("POST", "/v1/tools/invoke", body, token=made["token"]).json()

    assert call("gsv__ReadFile", {"path": "x.md"})["ok"]
    assert call("gsv__WriteFile", {"path": "x.md", "content": "y"})["error"]["kind"] == "not_allowed"
    assert call("gsv__DeleteFile", {"path": "x.md"})["error"]["kind"] == "not_allowed"
    path = f"/v1/workspace/{files.agent}/x.md"
    assert files.gateway.request("GET", path, token=made["token"]).status == 200
    assert files.gateway.request("PUT", path, b"y", token=made["token"]).status == 403
    assert files.gateway.request("DELETE", path, token=made["token"]).status == 403
    assert files.gateway.request("GET", path, token=None).status == 401


# -- EditFile -------------------------------------------------------------------------------------------------------


def test_edit_once(files: Files) -> None:
    files.ok("WriteFile", path="x.md", content="one two three")
    result = files.ok("EditFile", path="x.md", oldString="two", newString="$& 2 \\1")
    assert result == {
        "path": "x.md",
        "replacements": 1,
        "edited": True,
        "resolvedSource": "workspace",
        "resolvedPath": f"agents/{files.agent}/x.md",
    }
    assert files.ok("ReadFile", path="x.md")["content"] == "one $& 2 \\1 three"


def test_edit_all(files: Files) -> None:
    files.ok("WriteFile", path="x.md", content="a b a b a")
    message = files.fails("EditFile", "failed", path="x.md", oldString="a", newString="c")
    assert message == ("oldString found 3 times in 'x.md'. Use replaceAll: true or provide a more specific oldString.")
    assert files.ok("EditFile", path="x.md", oldString="a", newString="c", replaceAll=True)["replacements"] == 3
    assert files.ok("ReadFile", path="x.md")["content"] == "c b c b c"


def test_edit_that_cannot_be(files: Files) -> None:
    files.ok("WriteFile", path="x.md", content="abc")
    assert files.fails("EditFile", "failed", path="x.md", oldString="z", newString="") == (
        "oldString not found in 'x.md'"
    )
    assert "oldString must not be empty" in files.fails(
        "EditFile", "invalid_args", path="x.md", oldString="", newString="y"
    )
    assert files.fails("EditFile", "not_found", path="n.md", oldString="z", newString="") == "File not found: n.md"
    assert files.ok("ReadFile", path="x.md")["content"] == "abc"


def test_an_edit_does_not_make_more_than_can_be_read(files: Files) -> None:
    files.ok("WriteFile", path="x.md", content="a" * 3000)
    message = files.fails("EditFile", "failed", path="x.md", oldString="a", newString="b" * 30_000, replaceAll=True)
    assert "would have 90000000 bytes" in message
    assert files.ok("ReadFile", path="x.md")["content"] == "a" * 3000


def test_two_edits_at_once_lose_nothing(files: Files) -> None:
    files.ok("WriteFile", path="x.md", content=" ".join(f"<{number}>" for number in range(20)))

    def edit(number: int) -> Any:
        while True:
            answer = files.call("EditFile", path="x.md", oldString=f"<{number}>", newString=f"[{number}]")
            if answer["ok"] or "someone else" not in answer["error"]["message"]:
                return answer

    with ThreadPoolExecutor(5) as pool:
        assert all(answer["ok"] for answer in pool.map(edit, range(20)))
    assert files.ok("ReadFile", path="x.md")["content"] == " ".join(f"[{number}]" for number in range(20))


# -- DeleteFile -----------------------------------------------------------------------------------------------------


def test_delete(files: Files) -> None:
    files.ok("WriteFile", path="d/x.md", content="x")
    assert files.ok("DeleteFile", path="d/x.md") == {"path": "d/x.md", "deleted": True}
    assert files.fails("DeleteFile", "not_found", path="d/x.md") == "File not found: d/x.md"
    assert files.ok("ReadFile")["directories"] == []


def test_a_directory_is_not_deleted(files: Files) -> None:
    files.ok("WriteFile", path="d/x.md", content="x")
    files.fails("DeleteFile", "not_found", path="d")
    assert files.ok("ReadFile", path="d/x.md")["content"] == "x"


# -- skills, as files -----------------------------------------------------------------------------------------------


def test_a_global_skill_shows_through(files: Files, skill: Any) -> None:
    skill("sums", "global")
    result = files.ok("ReadFile", path="skills/sums/SKILL.md")
    assert (result["path"], result["content"]) == ("skills/sums/SKILL.md", "global")
    assert (result["resolvedPath"], result["resolvedSource"]) == ("skills/sums/SKILL.md", "global")


def test_an_agents_copy_comes_first_and_only_it_is_written(files: Files, skill: Any) -> None:
    skill("sums", "global")
    files.ok("WriteFile", path="skills/sums/SKILL.md", content="own")
    result = files.ok("ReadFile", path="skills/sums/SKILL.md")
    own = f"agents/{files.agent}/skills/sums/SKILL.md"
    assert (result["content"], result["resolvedPath"], result["resolvedSource"]) == ("own", own, "agent")
    assert (files.gateway.home / "skills" / "sums" / "SKILL.md").read_text() == "global"
    files.ok("DeleteFile", path="skills/sums/SKILL.md")
    assert files.ok("ReadFile", path="skills/sums/SKILL.md")["content"] == "global"
    assert files.fails("DeleteFile", "not_found", path="skills/sums/SKILL.md")
    assert (files.gateway.home / "skills" / "sums" / "SKILL.md").read_text() == "global"


def test_an_edit_of_a_global_skill_makes_an_own_copy(files: Files, skill: Any) -> None:
    skill("sums", "one two")
    result = files.ok("EditFile", path="skills/sums/SKILL.md", oldString="two", newString="three")
    assert (result["resolvedSource"], result["resolvedPath"]) == ("global", "skills/sums/SKILL.md")
    assert files.ok("ReadFile", path="skills/sums/SKILL.md")["content"] == "one three"
    assert (files.gateway.home / "skills" / "sums" / "SKILL.md").read_text() == "one two"
    result = files.ok("EditFile", path="skills/sums/SKILL.md", oldString="one", newString="1")
    assert result["resolvedSource"] == "agent"


def test_listings_of_skills_are_merged(files: Files, skill: Any) -> None:
    skill("sums")
    skill("sums", "x", "notes.md")
    skill("other")
    files.ok("WriteFile", path="skills/sums/SKILL.md", content="own")
    files.ok("WriteFile", path="skills/mine/SKILL.md", content="own")
    assert files.ok("ReadFile", path="skills/") == {
        "path": "skills/",
        "files": [],
        "directories": ["skills/mine/", "skills/other/", "skills/sums/"],
    }
    listed = files.ok("ReadFile", path="skills/sums")
    assert listed["files"] == ["skills/sums/SKILL.md", "skills/sums/notes.md"]
    assert "skills/" in files.ok("ReadFile")["directories"]


# -- ConfigGet ------------------------------------------------------------------------------------------------------


def test_the_full_config_is_masked(gateway: GatewayProcess) -> None:
    answer = gateway.invoke("gsv__ConfigGet", {})
    assert answer["ok"] and list(answer["result"]) == ["config"]
    config = answer["result"]["config"]
    assert config["gateway"]["port"] == 3210 or config["gateway"]["port"] == gateway.port
    assert config["gateway"]["hosts"] == ["farhand.example"]
    assert "hunter2" not in json.dumps(answer)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("gateway.hosts", ["farhand.example"]),
        ("gateway.hosts.0", "farhand.example"),
        ("gateway.origins.0", "https://example.com"),
        ("gateway.origins", ["https://example.com"]),
        ("providers.proxy.baseUrl", "https://user:***@example.com/v1"),
        ("log.level", "info"),
        ("log", {"level": "info"}),
        ("skills.entries.forbidden.enabled", False),
        ("gateway.tlsKey", ""),
        ("session.dmScope", "main"),
        ("models.small.context_tokens", 1),
        ("models.small.2.contextTokens", 2),
        ("gateway.hosts.7", None),
        ("gateway.nothing.at.all", None),
        ("nothing", None),
    ],
)
def test_config_by_path(gateway: GatewayProcess, path: str, value: Any) -> None:
    assert gateway.invoke("gsv__ConfigGet", {"path": path})["result"] == {"path": path, "value": value}


def test_a_path_of_very_many_parts_does_not_block_others(gateway: GatewayProcess) -> None:
    path = "a." * 40_000
    assert gateway.invoke("gsv__ConfigGet", {"path": path})["result"] == {"path": path, "value": None}


@pytest.mark.parametrize("path", ["", " ", None])
def test_no_path_is_the_full_config(gateway: GatewayProcess, path: str | None) -> None:
    assert list(gateway.invoke("gsv__ConfigGet", {"path": path})["result"]) == ["config"]


def test_the_config_command(gateway: GatewayProcess) -> None:
    assert json.loads(cli(gateway, "config", "--json"))["config"]["log"] == {"level": "info"}
    assert cli(gateway, "config", "get", "gateway.hosts.0").strip() == "farhand.example"
    assert json.loads(cli(gateway, "config", "get", "log", "--json")) == {"path": "log", "value": {"level": "info"}}
    assert cli(gateway, "config", "get", "nothing", status=1) == ""


def cli(gateway: GatewayProcess, *arguments: str, status: int = 0) -> str:
    env = {**os.environ, "FARHAND_HOME": str(gateway.home)}
    done = run_process([*FARHAND, *arguments], env=env)
    assert done.returncode == status, done
    return done.stdout


# -- LogsGet --------------------------------------------------------------------------------------------------------


def test_no_node_no_log(gateway: GatewayProcess) -> None:
    answer = gateway.invoke("gsv__LogsGet", {})
    assert answer["error"] == {"kind": "not_found", "message": "No nodes connected"}


def test_logs_of_nodes(gateway: GatewayProcess, tmp_path: Path) -> None:
    with NodeProcess(gateway, tmp_path, "logger") as node:
        for number in range(5):
            gateway.invoke("logger__Read", {"path": f"none-{number}"})
        secret = "fhn_" + "s" * 30
        gateway.invoke("logger__Read", {"path": f"token={secret}"})
        answer = gateway.invoke("gsv__LogsGet", {})
        assert answer["ok"] and answer["route"] == {"kind": "native"}, answer
        page = answer["result"]
        assert page["nodeId"] == "logger" and page["count"] == len(page["lines"]) and page["truncated"] is False
        lines = [json.loads(line) for line in page["lines"]]
        assert lines[0]["event"] == "node.start"
        assert {"connect.ok", "tool.execute.error"} <= {line["event"] for line in lines}
        for line in lines:
            assert {"ts", "level", "event", "component", "nodeId", "workspace"} <= line.keys()
            assert (line["component"], line["nodeId"]) == ("node", "logger")
        assert secret not in json.dumps(page)

        newest = gateway.invoke("gsv__LogsGet", {"nodeId": "logger", "lines": 2.9})["result"]
        assert newest["lines"] == page["lines"][-2:] and newest["truncated"] is True
        assert gateway.invoke("gsv__LogsGet", {"lines": 100_000})["ok"]
        for bad in (0, -1, 0.5):
            error = gateway.invoke("gsv__LogsGet", {"lines": bad})["error"]
            assert error["kind"] == "invalid_args" and "lines must be a positive number" in error["message"]

        assert gateway.get("/v1/nodes/logger/logs?lines=2")["lines"] == page["lines"][-2:]
        assert gateway.request("GET", "/v1/nodes/logger/logs?lines=0").status == 400
        assert gateway.request("GET", "/v1/nodes/nobody/logs").status == 404
        assert "node.start" in cli(gateway, "logs", "logger")
        assert json.loads(cli(gateway, "logs", "logger", "-n", "1", "--json"))["lines"] == page["lines"][-1:]

        with Plugin(gateway, tmp_path, "plugin"):
            error = gateway.invoke("gsv__LogsGet", {})["error"]
            assert error["kind"] == "invalid_args"
            assert "nodeId required when multiple nodes are connected" in error["message"]
            assert gateway.invoke("gsv__LogsGet", {"nodeId": "logger"})["ok"]
            error = gateway.invoke("gsv__LogsGet", {"nodeId": "plugin"})["error"]
            assert error["kind"] == "not_found" and "keeps no log" in error["message"]
            error = gateway.invoke("gsv__LogsGet", {"nodeId": "nobody"})["error"]
            assert error["kind"] == "not_found" and "nobody" in error["message"]
        assert node.process is not None


def test_a_node_that_says_nothing_or_nonsense_of_its_log(gateway: GatewayProcess) -> None:
    async def main() -> None:
        async with PlainNode.connect(gateway, "odd", hello=False) as node:
            extras = {"features": ["query.logs"]}
            await node.send(hello_frame("odd", ["odd"], farhand=extras))
            await node.receive("gateway_welcome")
            asked = asyncio.ensure_future(gateway.ainvoke("gsv__LogsGet", {"nodeId": "odd"}))
            query = await node.receive("node_query")
            assert (query["kind"], query["params"]) == ("logs", {"lines": 100})
            await node.send({"type": "node_answer", "query_id": query["query_id"], "result": {"lines": [1]}})
            error = (await asked)["error"]
            assert error["kind"] == "failed" and "cannot be read" in error["message"]

            asked = asyncio.ensure_future(gateway.ainvoke("gsv__LogsGet", {"lines": 2}))
            query = await node.receive("node_query")
            lines = ["first", "GET /?token=hunter2", "last"]
            await node.send({"type": "node_answer", "query_id": query["query_id"], "result": {"lines": lines}})
            assert (await asked)["result"] == {
                "nodeId": "odd",
                "lines": ["GET /?token=***", "last"],
                "count": 2,
                "truncated": True,
            }

            answer = await gateway.ainvoke("gsv__LogsGet", {})
            assert answer["error"] == {"kind": "timeout", "message": "logs.get timed out for node odd after 20000ms"}

    asyncio.run(main())


# -- skills, as an agent sees them ----------------------------------------------------------------------------------


def skills_of(gateway: GatewayProcess, agent: str) -> dict[str, Any]:
    return {skill["name"]: skill for skill in gateway.get(f"/v1/skills?agent={agent}")["skills"]}


def test_what_a_skill_says_of_itself(gateway: GatewayProcess, files: Files, skill: Any) -> None:
    skill("plain", "# Title\n\nFirst paragraph\nof two lines.\n\nMore.")
    skill("marked", "\ufeff# Title\n\nFirst paragraph.")
    skill("headed", '---\nname: Headed\ndescription: "Use it: always"\n---\nBody')
    skill("sloppy", "---\nname: sloppy\ndescription: Use when: it rains\nalways: true\n---\nBody")
    found = skills_of(gateway, files.agent)
    assert found["plain"]["description"] == "First paragraph of two lines."
    assert found["plain"]["path"] == found["plain"]["location"] == "skills/plain/SKILL.md"
    assert found["marked"]["description"] == "First paragraph."
    assert found["plain"]["eligible"] is True and found["plain"]["reasons"] == []
    assert found["Headed"]["description"] == "Use it: always"
    assert found["sloppy"]["description"] == "Use when: it rains" and found["sloppy"]["always"] is True


def test_an_agents_skill_hides_the_global_one(gateway: GatewayProcess, files: Files, skill: Any) -> None:
    skill("sums", "---\ndescription: global\n---")
    files.ok("WriteFile", path="skills/sums/SKILL.md", content="---\ndescription: own\n---")
    assert skills_of(gateway, files.agent)["sums"]["description"] == "own"
    assert skills_of(gateway, files.agent)["sums"]["source"] == "agent"
    assert skills_of(gateway, "main")["sums"]["description"] == "global"


def test_a_skill_that_cannot_be_read_is_listed_with_the_reason(gateway: GatewayProcess, files: Files) -> None:
    files.ok("WriteFile", path="skills/good/SKILL.md", content="---\ndescription: fine\n---")
    files.ok("WriteFile", path="skills/linked/notes.md", content="x")
    os.symlink("/etc/hostname", files.folder / "skills" / "linked" / "SKILL.md")
    files.ok("WriteFile", path="skills/large/SKILL.md", content="x" * (1024 * 1024 + 1))
    found = skills_of(gateway, files.agent)
    assert found["good"]["eligible"] and found["good"]["description"] == "fine"
    assert not found["linked"]["eligible"] and not found["large"]["eligible"]
    assert found["linked"]["reasons"][0].startswith("cannot be read: ")
    assert found["large"]["reasons"] == ["cannot be read: it has 1048577 bytes, more than 1048576"]


def test_a_skill_that_needs_a_machine_waits_for_one(
    gateway: GatewayProcess, files: Files, skill: Any, tmp_path: Path
) -> None:
    skill("shell", "---\nrequires:\n  bins: [sh]\n  capabilities: [shell.exec]\n---")
    skill("exotic", '---\nmetadata: {"gsv": {"requires": {"bins": ["sh", "no-such-program"],}}}\n---')
    skill("either", "---\nrequires:\n  anyBins:\n    - no-such-program\n    - sh\n---")
    skill("role", "---\nrequires: {hostRoles: [specialized]}\n---")
    skill("system", "---\nrequires: {os: [linux, macos]}\n---")
    skill("amiga", "---\nrequires: {os: amiga}\n---")
    skill("env", "---\nrequires: {env: [FARHAND_NO_SUCH_THING]}\n---")
    skill("set", "---\nrequires: {config: [gateway.hosts, log.level]}\n---")
    skill("unset", "---\nrequires: {config: [gateway.tls_cert]}\n---")
    skill("broken", "---\nrequires: {bins: ['rm -rf /']}\n---")
    skill("unknown", "---\nrequires: {moon: full}\n---")
    skill("forbidden", "x")
    skill("forced", "---\nrequires: {bins: [no-such-program]}\n---")
    found = skills_of(gateway, files.agent)
    assert found["shell"]["eligible"] is False and found["shell"]["reasons"] == ["no connected hosts"]
    with NodeProcess(gateway, tmp_path, "maker"):
        found = skills_of(gateway, files.agent)
        assert found["shell"]["eligible"] and found["shell"]["hosts"] == ["maker"], found["shell"]
        assert found["shell"]["requirements"] == {"bins": ["sh"], "capabilities": ["shell.exec"]}
        assert found["either"]["eligible"] and found["system"]["eligible"] and found["set"]["eligible"]
        reasons = {name: skill["reasons"] for name, skill in found.items() if not skill["eligible"]}
        assert reasons == {
            "exotic": ["requires bins: no-such-program"],
            "role": ["requires hostRoles: specialized"],
            "amiga": ["requires os: amiga"],
            "env": ["requires env: FARHAND_NO_SUCH_THING"],
            "unset": ["requires config: gateway.tls_cert"],
            "broken": ["invalid requirement identifiers"],
            "unknown": ["invalid requirement identifiers"],
            "forbidden": ["disabled by skills.entries policy"],
        }
        assert found["forced"]["eligible"] is True


def test_the_skills_command(gateway: GatewayProcess, files: Files, tmp_path: Path, skill: Any) -> None:
    folder = tmp_path / "packed"
    (folder / "scripts").mkdir(parents=True)
    (folder / "SKILL.md").write_text("---\nname: packed\ndescription: From a folder\n---\n")
    (folder / "scripts" / "run.bin").write_bytes(b"\x00\x01")
    cli(gateway, "skills", "add", str(folder), "--agent", files.agent)
    assert (files.folder / "skills" / "packed" / "scripts" / "run.bin").read_bytes() == b"\x00\x01"
    assert "packed" in skills_of(gateway, files.agent) and "packed" not in skills_of(gateway, "main")
    skill("packed")  # so that it is removed again
    cli(gateway, "skills", "add", str(folder))
    assert skills_of(gateway, "main")["packed"]["description"] == "From a folder"
    assert "packed" in cli(gateway, "skills")
    listed = json.loads(cli(gateway, "skills", "--json"))
    assert listed["count"] == len(listed["skills"])
    (tmp_path / "bare").mkdir()
    cli(gateway, "skills", "add", str(tmp_path / "bare"), status=1)


# -- the workspace over HTTP ----------------------------------------------------------------------------------------


def test_bytes_in_bytes_out(files: Files) -> None:
    data = bytes(range(256)) * 5000
    path = f"/v1/workspace/{files.agent}/pictures/ä.bin"
    url = path.replace("ä", "%C3%A4")
    put = files.gateway.request("PUT", url, data, headers={"Content-Type": "image/x-test"})
    assert put.status == 200, put
    assert {k: put.json()[k] for k in ("path", "size", "written")} == {
        "path": "pictures/ä.bin",
        "size": len(data),
        "written": True,
    }
    got = files.gateway.request("GET", url)
    assert (got.status, got.headers["content-type"], got.body) == (200, "image/x-test", data)
    assert got.headers["content-length"] == str(len(data)) and "last-modified" in got.headers
    assert "sandbox" in got.headers["content-security-policy"]
    head = files.gateway.request("HEAD", url)
    assert (head.status, head.body, head.headers["content-length"]) == (200, b"", str(len(data)))
    assert files.gateway.get(f"/v1/workspace/{files.agent}/pictures") == {
        "path": "pictures",
        "files": ["pictures/ä.bin"],
        "directories": [],
    }
    assert files.gateway.get(f"/v1/workspace/{files.agent}/")["directories"] == ["pictures/"]
    assert files.gateway.get(f"/v1/workspace/{files.agent}")["directories"] == ["pictures/"]
    assert files.gateway.request("DELETE", url).json() == {"path": "pictures/ä.bin", "deleted": True}
    assert files.gateway.request("DELETE", url).status == 404
    assert files.gateway.request("GET", url).status == 404


def test_a_file_larger_than_a_request_may_be_is_streamed_in(files: Files) -> None:
    data = os.urandom(1024) * 1024 * 20
    url = f"/v1/workspace/{files.agent}/big.bin"
    assert files.gateway.request("PUT", url, data).json()["size"] == len(data)
    assert files.gateway.request("GET", url).body == data


@pytest.mark.parametrize("path", ["there", "there/file/more"])
def test_what_is_in_the_way_is_a_conflict(files: Files, path: str) -> None:
    files.ok("WriteFile", path="there/file", content="x")
    answer = files.gateway.request("PUT", f"/v1/workspace/{files.agent}/{path}", b"y")
    assert answer.status == 409 and answer.json()["error"]["code"] == "conflict"
    files.fails("WriteFile", "failed", path=path, content="y")
    assert files.ok("ReadFile", path="there/file")["content"] == "x"


def test_conditions(files: Files) -> None:
    url = f"/v1/workspace/{files.agent}/x.md"
    assert files.gateway.request("PUT", url, b"1", headers={"If-None-Match": "*"}).status == 200
    assert files.gateway.request("PUT", url, b"2", headers={"If-None-Match": "*"}).status == 412
    etag = files.gateway.request("GET", url).headers["etag"]
    assert files.gateway.request("PUT", url, b"3", headers={"If-Match": etag}).status == 200
    assert files.gateway.request("PUT", url, b"4", headers={"If-Match": etag}).status == 412
    assert files.gateway.request("DELETE", url, headers={"If-Match": etag}).status == 412
    assert files.gateway.request("GET", url).body == b"3"
    assert files.gateway.request("PUT", url, b"5", headers={"If-Match": "*"}).status == 200
    etag = files.gateway.request("GET", url).headers["etag"]
    assert files.gateway.request("DELETE", url, headers={"If-Match": etag}).status == 200
    for method, body in (("PUT", b"6"), ("DELETE", None)):
        assert files.gateway.request(method, url, body, headers={"If-Match": "*"}).status == 412
    assert files.gateway.request("GET", url).status == 404


@pytest.mark.parametrize("path", ["../../token", "%2e%2e/%2e%2e/token", "a/..%2f..%2ftoken", "%252e%252e/x", "..%5cx"])
def test_no_way_out_over_http(files: Files, path: str) -> None:
    for method, body in (("GET", None), ("PUT", b"x"), ("DELETE", None)):
        answer = files.gateway.request(method, f"/v1/workspace/{files.agent}/{path}", body)
        assert answer.status in (400, 403), answer


def test_a_write_that_is_refused_leaves_the_content_type(files: Files) -> None:
    url = f"/v1/workspace/{files.agent}/page"
    put = files.gateway.request("PUT", url, b"<p>", headers={"Content-Type": "text/html"})
    refused = files.gateway.request("PUT", url, b"x", headers={"Content-Type": "text/css", "If-None-Match": "*"})
    assert (put.status, refused.status) == (200, 412)
    got = files.gateway.request("GET", url)
    assert (got.body, got.headers["content-type"]) == (b"<p>", "text/html; charset=utf-8")


def test_an_upload_that_breaks_off_changes_nothing(files: Files) -> None:
    url = f"/v1/workspace/{files.agent}/x.bin"
    files.gateway.request("PUT", url, b"old")
    with socket.create_connection(("127.0.0.1", files.gateway.port)) as link:
        link.sendall(
            f"PUT {url} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {files.gateway.token}\r\n"
            f"Content-Length: 1000000\r\n\r\n".encode()
            + b"x" * 500_000
        )
        wait_until(lambda: any(name.endswith(".tmp") for name in os.listdir(files.folder)), what="the upload to begin")
    wait_until(lambda: os.listdir(files.folder) == ["x.bin"], what="the upload to be undone")
    assert files.gateway.request("GET", url).body == b"old"


# -- the same, with the objects in S3 -------------------------------------------------------------------------------


def test_workspaces_in_s3(bucket: tuple[str, str], tmp_path: Path) -> None:
    url, endpoint = bucket
    place = f"{url}/{uuid.uuid4().hex}"
    env: dict[str, str | None] = {
        "FARHAND_OBJECTS_URL": place,
        "FARHAND_OBJECTS_ENDPOINT": endpoint,
        "FARHAND_OBJECTS_ACCESS_KEY_ID": "AKIDEXAMPLE",
        "FARHAND_OBJECTS_SECRET_ACCESS_KEY": "hunter2hunter2",
    }
    with GatewayProcess(tmp_path / "home", env=env) as gateway:
        files = Files(gateway, "main")
        files.ok("WriteFile", path="notes/a.json", content="{}")
        assert not (gateway.home / "agents" / "main" / "notes").exists()
        assert files.ok("EditFile", path="notes/a.json", oldString="{", newString="{ ")["replacements"] == 1
        result = files.ok("ReadFile", path="notes/a.json")
        assert (result["content"], result["size"]) == ("{ }", 3)
        assert files.ok("ReadFile")["directories"] == ["notes/"]
        data = os.urandom(1024 * 1024) * 20
        assert gateway.request("PUT", "/v1/workspace/main/big.bin", data).json()["size"] == len(data)
        got = gateway.request("GET", "/v1/workspace/main/big.bin")
        assert got.body == data and got.headers["content-type"] == "application/json"
        gateway.request("PUT", "/v1/skills/sums/SKILL.md", b"global")
        assert files.ok("ReadFile", path="skills/sums/SKILL.md")["resolvedSource"] == "global"
        assert [skill["name"] for skill in gateway.get("/v1/skills")["skills"]] == ["sums"]
        files.ok("DeleteFile", path="notes/a.json")
        files.fails("ReadFile", "not_found", path="notes")
        # As the pages of storage providers make a folder; the skill in it is removed all the same.
        marker = f"{endpoint}/{place.removeprefix('s3://')}/skills/sums/"
        urllib.request.urlopen(urllib.request.Request(marker, b"", method="PUT"), timeout=30).close()
        assert files.ok("ReadFile", path="skills/sums")["files"] == ["skills/sums/SKILL.md"]
        assert gateway.request("DELETE", "/v1/skills/sums").json()["objects"] == 1
        for path in (None, "objects", "objects.secret_access_key", "objects.secretAccessKey"):
            shown = json.dumps(gateway.invoke("gsv__ConfigGet", {"path": path}))
            assert "hunter2" not in shown and "***" in shown
        assert "hunter2" not in json.dumps(gateway.invoke("exec", {"command": "env"}))
        # A file, and a folder, from a machine into the bucket and back.
        with NodeProcess(gateway, tmp_path / "box", "box") as node:
            (node.workspace / "tree" / "deep").mkdir(parents=True)
            contents = {"tree/a": b"a", "tree/empty": b"", "tree/deep/large": os.urandom(9 * 1024 * 1024 + 1)}
            for name, content in contents.items():
                (node.workspace / name).write_bytes(content)
            for source, destination in (
                ("box:tree/deep/large", "gsv:one"),
                ("gsv:one", "box:one"),
                ("box:tree", "gsv:kept/"),
                ("gsv:kept/tree", "box:back"),
            ):
                answer = gateway.invoke("gsv__Transfer", {"source": source, "destination": destination})
                assert answer["ok"] is True, answer
            assert (node.workspace / "one").read_bytes() == contents["tree/deep/large"]
            for name, content in contents.items():
                assert (node.workspace / "back" / name.removeprefix("tree/")).read_bytes() == content
