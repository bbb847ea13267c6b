"""Each rule of the HTTP tool guide, over real HTTP."""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import Answer, GatewayProcess, wait_until
from tests.support.model_server import ModelServer, Reply, Request
from tests.support.model_server import text as says


class Door:
    """`POST /agent/process` of one gateway."""

    def __init__(self, gateway: GatewayProcess, workspace: Path) -> None:
        self.gateway = gateway
        self.workspace = workspace

    def post(self, text: str = "do it", *, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        token = fields.pop("token", "owner")
        body = {
            "input": [{"role": "user", "type": "message", "content": [{"type": "text", "text": text}]}],
            "session_id": "s1",
            "user_id": "u1",
            "channel": "console",
            "stream": False,
            **fields,
        }
        body = {name: value for name, value in body.items() if value is not ...}
        return self.gateway.request("POST", "/agent/process", body, headers=headers, token=token)

    def call(self, name: str, input_: Any = None, **fields: Any) -> Answer:
        return self.post(biz_params={"tool": {"name": name, "input": input_}}, **fields)

    def result(self, name: str, **arguments: Any) -> Any:
        """The tool's result object, checked for the shape of the answer around it."""
        answer = self.call(name, arguments)
        assert answer.status == 200, answer
        body = answer.json()
        events = body["events"]
        assert [event["type"] for event in events] == [
            "step_started",
            "tool_call",
            "tool_result",
            "assistant_delta",
            "completed",
        ]
        assert all(event["step"] == 1 for event in events)
        assert events[1]["tool_call"] == {"name": name, "input": arguments}
        assert events[2]["tool_result"]["name"] == name and events[2]["tool_result"]["ok"] is True
        assert events[3]["delta"] == events[4]["reply"] == body["reply"]
        return events[2]["meta"]["result"]

    def refused(self, name: str, arguments: Any, status: int, code: str) -> str:
        answer = self.call(name, arguments)
        assert (answer.status, answer.json()["error"]["code"]) == (status, code), answer
        return str(answer.json()["error"]["message"])

    def said(self, **key: str) -> list[tuple[str, str]]:
        """Role and text of everything said in a chat."""
        wanted = {"session_id": "s1", "user_id": "u1", "channel": "console", **key}
        query = "&".join(f"{name}={value}" for name, value in wanted.items())
        found = self.gateway.get(f"/chats?{query}")
        if not found:
            return []
        messages = self.gateway.get(f"/chats/{found[0]['id']}")["messages"]
        return [(message["role"], message["content"][0]["text"]) for message in messages]

    def settings(self, text: str) -> None:
        (self.gateway.home / "farhand.toml").write_text(text or "# nothing\n")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """A gateway for all tests here; each takes a session or a folder of its own."""
    top = tmp_path_factory.mktemp("guide")
    with GatewayProcess(top / "home") as gateway:
        yield Door(gateway, top / "home" / "agents" / "main")


@pytest.fixture
def door(house: Door) -> Iterator[Door]:
    house.post("/new")
    house.settings("")
    yield house
    house.settings("")


@pytest.fixture
def folder(door: Door, request: pytest.FixtureRequest) -> Path:
    """A folder of the test's own in the workspace."""
    path = door.workspace / request.node.name.replace("/", "-")[:60]
    path.mkdir()
    return path


def events_of(answer: Answer) -> list[Any]:
    assert answer.status == 200, answer
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = answer.body.decode().split("\n\n")
    assert blocks[-1] == "" and blocks[-2] == "data: [DONE]"
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


# -- read_file ------------------------------------------------------------------------------------------


def test_read_file_gives_the_text(door: Door, folder: Path) -> None:
    (folder / "a.txt").write_text("Grüße\n")
    path = f"{folder.name}/a.txt"
    result = door.result("read_file", path=path)
    assert result == {
        "ok": True,
        "path": path,
        "size": 8,
        "truncated": False,
        "content": "Grüße\n",
        "text": "Grüße\n",
    }
    assert door.result("read_file", path=str(folder / "a.txt"))["content"] == "Grüße\n"


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 1_000_000])
def test_read_file_stops_after_65536_bytes_and_says_so(door: Door, folder: Path, size: int) -> None:
    (folder / "a.txt").write_text("x" * size)
    result = door.result("read_file", path=f"{folder.name}/a.txt")
    assert (result["size"], result["truncated"]) == (size, size > 65_536)
    assert result["content"] == "x" * min(size, 65_536)
    if size > 65_536:
        assert f"truncated, showing first 65536 bytes of {size} bytes" in result["text"]


def test_read_file_does_not_cut_a_character_in_two(door: Door, folder: Path) -> None:
    (folder / "a.txt").write_text("x" * 65_535 + "ü" + "x")
    assert door.result("read_file", path=f"{folder.name}/a.txt")["content"] == "x" * 65_535


def test_read_file_of_bytes_that_are_not_text(door: Door, folder: Path) -> None:
    (folder / "a.bin").write_bytes(b"a\xff\x00b")
    assert door.result("read_file", path=f"{folder.name}/a.bin")["content"] == "a\ufffd\0b"


def test_read_file_of_an_empty_file(door: Door, folder: Path) -> None:
    (folder / "a.txt").touch()
    assert door.result("read_file", path=f"{folder.name}/a.txt")["content"] == ""


def test_read_file_of_nothing_and_of_a_folder(door: Door, folder: Path) -> None:
    door.refused("read_file", {"path": f"{folder.name}/none.txt"}, 404, "tool_not_found")
    door.refused("read_file", {"path": f"{folder.name}/no/where.txt"}, 404, "tool_not_found")
    door.refused("read_file", {"path": folder.name}, 500, "tool_error")
    door.refused("read_file", {"path": "."}, 500, "tool_error")
    os.mkfifo(folder / "pipe")
    door.refused("read_file", {"path": f"{folder.name}/pipe"}, 500, "tool_error")


# -- create_file ----------------------------------------------------------------------------------------


def test_create_file_makes_a_file_and_its_folders(door: Door, folder: Path) -> None:
    path = f"{folder.name}/new/deep/a.txt"
    result = door.result("create_file", path=path, content="Grüße")
    assert result == {"ok": True, "path": path, "size": 7, "text": f"created {path} (7 bytes)"}
    assert (folder / "new/deep/a.txt").read_text() == "Grüße"
    assert door.result("create_file", path=f"{folder.name}/empty", content="")["size"] == 0


def test_create_file_succeeds_only_where_nothing_is(door: Door, folder: Path) -> None:
    (folder / "a.txt").write_text("first")
    for path in ("a.txt", "."):
        door.refused("create_file", {"path": f"{folder.name}/{path}", "content": "second"}, 409, "tool_conflict")
    assert (folder / "a.txt").read_text() == "first"


def test_create_file_makes_no_file_of_a_path_that_names_a_folder(door: Door, folder: Path) -> None:
    door.refused("create_file", {"path": f"{folder.name}/new/", "content": "x"}, 400, "invalid_tool_input")
    assert not (folder / "new").exists()


def test_only_one_of_many_that_create_a_file_succeeds(door: Door, folder: Path) -> None:
    statuses: list[int] = []

    def create(number: int) -> None:
        answer = door.call("create_file", {"path": f"{folder.name}/one", "content": str(number) * 1000})
        statuses.append(answer.status)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200] + [409] * 7
    assert len(set((folder / "one").read_text())) == 1 and os.listdir(folder) == ["one"]


# -- update_file ----------------------------------------------------------------------------------------


def test_update_file_overwrites_by_default_and_appends(door: Door, folder: Path) -> None:
    path = f"{folder.name}/a.txt"
    (folder / "a.txt").write_text("old")
    assert door.result("update_file", path=path, content="one") == {
        "ok": True,
        "path": path,
        "mode": "overwrite",
        "size": 3,
        "text": f"updated {path} with mode=overwrite",
    }
    result = door.result("update_file", path=path, content=", zwölf", mode="append")
    assert (result["mode"], result["size"]) == ("append", 11)
    assert (folder / "a.txt").read_text() == "one, zwölf"
    assert door.result("update_file", path=path, content="", mode="overwrite")["size"] == 0


@pytest.mark.parametrize("mode", ["overwrite", "append"])
def test_update_file_never_creates(door: Door, folder: Path, mode: str) -> None:
    wanted = {"path": f"{folder.name}/none/a.txt", "content": "x", "mode": mode}
    door.refused("update_file", wanted, 404, "tool_not_found")
    assert os.listdir(folder) == []


def test_update_file_knows_two_modes(door: Door, folder: Path) -> None:
    (folder / "a.txt").write_text("old")
    wanted = {"path": f"{folder.name}/a.txt", "content": "x"}
    for mode in ("replace", "", 3, ["append"]):
        door.refused("update_file", {**wanted, "mode": mode}, 400, "invalid_tool_input")
    assert (folder / "a.txt").read_text() == "old"


# -- shell ----------------------------------------------------------------------------------------------


def test_shell_runs_in_the_workspace_or_in_a_folder_of_it(door: Door, folder: Path) -> None:
    result = door.result("shell", command="pwd; echo wrong >&2")
    assert result == {
        "ok": True,
        "command": "pwd; echo wrong >&2",
        "exit_code": 0,
        "output": f"{door.workspace}\nwrong\n",
        "text": f"$ pwd; echo wrong >&2\n{door.workspace}\nwrong",
    }
    assert door.result("shell", command="pwd", cwd=folder.name)["output"] == f"{folder}\n"
    assert door.result("shell", command="pwd", cwd=str(folder), timeout_seconds=5)["output"] == f"{folder}\n"
    assert "(command completed with no output)" in door.result("shell", command="true")["text"]


def test_shell_that_fails_is_an_answer_all_the_same(door: Door) -> None:
    result = door.result("shell", command="echo half; exit 3")
    assert (result["ok"], result["exit_code"], result["output"]) == (False, 3, "half\n")
    assert result["text"] == "$ echo half; exit 3\n(command failed with exit code 3)\nhalf"
    assert door.result("shell", command="kill -9 $$")["exit_code"] == 137
    assert door.result("shell", command="no-such-program")["exit_code"] == 127


def test_shell_keeps_the_first_16384_bytes_of_output(door: Door) -> None:
    whole = door.result("shell", command="head -c 16384 /dev/zero | tr '\\0' x")
    assert whole["output"] == "x" * 16_384
    cut = door.result("shell", command="head -c 16385 /dev/zero | tr '\\0' x")
    assert cut["output"] == "x" * 16_384 + "\n... (output truncated)"


def test_shell_that_takes_too_long_is_ended_with_all_it_started(door: Door, folder: Path) -> None:
    command = "sleep 300 & echo $! >child; echo $$ >self; wait"
    message = door.refused("shell", {"command": command, "cwd": folder.name, "timeout_seconds": 0.5}, 500, "tool_error")
    assert "0.5 s" in message
    for name in ("child", "self"):
        number = (folder / name).read_text().strip()
        wait_until(lambda number=number: not os.path.exists(f"/proc/{number}"), 5, "the command's processes are gone")


def test_shell_time_outs(door: Door) -> None:
    for seconds in (0, -1, 100_000, "5", None, 0.5):
        assert door.result("shell", command="true", timeout_seconds=seconds)["ok"]
    for wrong in ("soon", True, [], "nan"):
        door.refused("shell", {"command": "true", "timeout_seconds": wrong}, 400, "invalid_tool_input")


def test_shell_obeys_the_rules_for_paths_in_cwd(door: Door, folder: Path) -> None:
    (folder / "file").touch()
    (folder / "out").symlink_to("/")
    for cwd in ("/etc", "/", "..", f"{folder.name}/../{folder.name}", f"{folder.name}/out"):
        door.refused("shell", {"command": "pwd", "cwd": cwd}, 403, "tool_forbidden_path")
    door.refused("shell", {"command": "pwd", "cwd": f"{folder.name}/none"}, 404, "tool_not_found")
    door.refused("shell", {"command": "pwd", "cwd": f"{folder.name}/file"}, 400, "invalid_tool_input")


def test_shell_commands_are_not_given_the_gateways_secrets(tmp_path: Path) -> None:
    secrets = {"FARHAND_TOKEN": "t0", "SA_NODE_TOKENS": "a:t1", "OPENAI_API_KEY": "t2"}
    with GatewayProcess(tmp_path / "home", env=dict(secrets)) as gateway:
        door = Door(gateway, tmp_path / "home" / "agents" / "main")
        seen = door.result("shell", command="env")["output"]
    assert not any(name in seen for name in (*secrets, "SA_NODE_TOKEN"))


def test_a_client_that_hangs_up_ends_its_command(door: Door, folder: Path) -> None:
    for stream in (False, True):
        tool = {"name": "shell", "input": {"command": "echo $$ >self; exec sleep 300", "cwd": folder.name}}
        body = {"session_id": "s", "user_id": "u", "stream": stream, "biz_params": {"tool": tool}}
        connection = http.client.HTTPConnection("127.0.0.1", door.gateway.port)
        headers = {"Authorization": f"Bearer {door.gateway.token}", "Content-Type": "application/json"}
        connection.request("POST", "/agent/process", json.dumps(body), headers)
        number = wait_until(lambda: (folder / "self").exists() and (folder / "self").read_text().strip())
        connection.sock.close()
        connection.close()
        wait_until(lambda number=number: not os.path.exists(f"/proc/{number}"), 10, "the command was ended")
        newest = wait_until(
            lambda: [call for call in door.gateway.get("/v1/calls?tool=shell")["calls"][:1] if call["ended_at"]]
        )
        assert newest[0]["state"] == "cancelled"
        (folder / "self").unlink()


# -- what is asked --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tool",
    [
        "read_file",
        [],
        3,
        {},
        {"input": {"path": "a"}},
        {"name": ""},
        {"name": "  "},
        {"name": 3},
        {"name": None},
        {"name": "read_file", "input": "a"},
        {"name": "read_file", "input": ["a"]},
        {"name": "read_file"},
        {"name": "read_file", "input": None},
        {"name": "read_file", "input": {}},
        {"name": "read_file", "input": {"path": ""}},
        {"name": "read_file", "input": {"path": " "}},
        {"name": "read_file", "input": {"path": None}},
        {"name": "read_file", "input": {"path": 3}},
        {"name": "read_file", "input": {"path": "a\0b"}},
        {"name": "read_file", "input": {"path": "x" * 300}},
        {"name": "read_file", "items": []},
        {"name": "read_file", "items": ["a"]},
        {"name": "read_file", "items": {"path": "a"}},
        {"name": "read_file", "input": {"items": "a"}},
        {"name": "create_file", "input": {"path": "a"}},
        {"name": "create_file", "input": {"path": "a", "content": None}},
        {"name": "create_file", "input": {"path": "a", "content": 3}},
        {"name": "create_file", "input": {"content": "x"}},
        {"name": "update_file", "input": {"path": "a"}},
        {"name": "shell", "input": {}},
        {"name": "shell", "input": {"command": ""}},
        {"name": "shell", "input": {"command": "  "}},
        {"name": "shell", "input": {"command": ["ls"]}},
        {"name": "shell", "input": {"command": "a\0b"}},
        {"name": "shell", "input": {"command": "ls", "cwd": 3}},
        {"name": "shell", "input": {"command": "ls", "cwd": "a\0b"}},
    ],
)
def test_input_that_is_wrong_is_invalid_tool_input(door: Door, tool: Any) -> None:
    answer = door.post(biz_params={"tool": tool})
    assert (answer.status, answer.json()["error"]["code"]) == (400, "invalid_tool_input"), answer
    assert answer.json()["error"]["message"] and not (door.workspace / "a").exists()


@pytest.mark.parametrize("name", ["read", "exec", "gsv__ReadFile", "view"])
def test_there_are_four_tools_and_no_more(door: Door, name: str) -> None:
    assert "read_file" in door.refused(name, {"path": "a"}, 404, "tool_not_found")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"session_id": ...}, "session_id"),
        ({"user_id": ...}, "user_id"),
        ({"session_id": ""}, "session_id"),
        ({"user_id": " "}, "user_id"),
        ({"session_id": 3}, "session_id"),
        ({"session_id": "x" * 257}, "session_id"),
        ({"input": "text"}, "input"),
        ({"input": [{"role": "nobody"}]}, "role"),
        ({"stream": "yes"}, "stream"),
        ({"biz_params": []}, "biz_params"),
    ],
)
def test_an_invalid_request_names_the_field_at_fault(door: Door, fields: dict[str, Any], said: str) -> None:
    answer = door.post(**fields)
    assert (answer.status, answer.json()["error"]["code"]) == (400, "invalid_request"), answer
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"{]", b'{"session_id":"\xff"}', b'{"session_id":"\\ud800","user_id":"u"}']
)
def test_a_body_that_is_not_json_is_refused(door: Door, body: bytes) -> None:
    answer = door.gateway.request("POST", "/agent/process", body)
    assert (answer.status, answer.json()["error"]["code"]) == (400, "invalid_json"), answer
    other = door.gateway.request("POST", "/v1/tools/invoke", body)
    assert (other.status, other.json()["error"]["code"]) == (400, "invalid_request"), "only this route has the code"


@pytest.mark.parametrize("name", ["READ_FILE", " read_file ", "Read_File\n"])
def test_the_name_of_a_tool_is_trimmed_and_lower_cased(door: Door, name: str) -> None:
    (door.workspace / "named.txt").write_text("found")
    answer = door.call(name, {"path": "named.txt"})
    assert answer.status == 200, answer
    assert answer.json()["events"][1]["tool_call"]["name"] == "read_file"


def test_a_channel_that_does_not_exist_is_not_supported(door: Door) -> None:
    for channel in ("sms", "con sole", "console2"):
        answer = door.call("read_file", {"path": "x"}, channel=channel)
        error = answer.json()["error"]
        assert (answer.status, error["code"]) == (400, "channel_not_supported"), answer
        assert f"channel '{channel}' is not supported" in error["message"]
    (door.workspace / "named.txt").write_text("found")
    for channel in ("console", " Console", "WEBHOOK", "qq", "telegram", None):
        assert door.call("read_file", {"path": "named.txt"}, channel=channel, session_id="channels").status == 200, (
            channel
        )


def test_a_stranger_is_not_served(door: Door) -> None:
    for token in (None, "wrong"):
        assert door.post(token=token).status == 401


def test_scopes_bound_what_a_token_may_ask(door: Door, folder: Path) -> None:
    def token(*scopes: str) -> str:
        made = door.gateway.request("POST", "/v1/tokens", {"label": "test", "scopes": list(scopes)})
        return str(made.json()["token"])

    (folder / "a").write_text("a")
    reads = {"path": f"{folder.name}/a"}
    writes = {"path": f"{folder.name}/b", "content": "b"}
    reader, writer, chatter = token("tools.read"), token("tools.write"), token("chat")
    assert door.call("read_file", reads, token=reader).status == 200
    for name, arguments, key in (
        ("create_file", writes, reader),
        ("shell", {"command": "touch c"}, writer),
        ("read_file", reads, chatter),
    ):
        answer = door.call(name, arguments, token=key)
        assert (answer.status, answer.json()["error"]["code"]) == (403, "forbidden")
    assert door.call("create_file", writes, token=writer).status == 200
    assert door.post(token=chatter).status == 503
    assert door.post(token=reader).status == 403


# -- paths ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "../main/note.txt",
        "folder/../note.txt",
        "..",
        "..%2fnote.txt",
        "..\\note.txt",
        "/etc/passwd",
        "//etc/passwd",
        "/etc/../etc/passwd",
        "/bin/sh",
        "/usr/bin/env",
        "/lib64/x",
        "/proc/self/environ",
        "/proc/self/root/etc/passwd",
        "/proc/self/cwd/x",
        "/sys/kernel",
        "/dev/null",
        "/boot/x",
        "/run/x",
        "/var/run/x",
        "/",
        "/root/.bashrc",
        "{home}/token",
        "{home}/farhand.db",
        "{home}/farhand.toml",
        "{home}",
        "{home}/agents",
    ],
)
def test_forbidden_paths_are_forbidden_to_every_tool(door: Door, path: str) -> None:
    path = path.format(home=door.gateway.home)
    (door.gateway.home / "farhand.toml").touch()
    for name, more in (
        ("read_file", {}),
        ("create_file", {"content": "x"}),
        ("update_file", {"content": "x"}),
        ("update_file", {"content": "x", "mode": "append"}),
    ):
        message = door.refused(name, {"path": path, **more}, 403, "tool_forbidden_path")
        assert "passwd:" not in message


def test_links_are_followed_to_the_real_file_and_judged_there(door: Door, folder: Path) -> None:
    (folder / "a.txt").write_text("fine")
    (folder / "in").symlink_to("a.txt")
    (folder / "out").symlink_to("/etc/passwd")
    (folder / "up").symlink_to("..")
    (folder / "top").symlink_to("/")
    (folder / "secret").symlink_to(door.gateway.home / "token")
    (folder / "round").symlink_to("round")
    assert door.result("read_file", path=f"{folder.name}/in")["content"] == "fine"
    assert door.result("read_file", path=f"{folder.name}/up/{folder.name}/a.txt")["content"] == "fine"
    for way in ("out", "top/etc/passwd", "secret", "up/../../token", "top/proc/self/environ"):
        door.refused("read_file", {"path": f"{folder.name}/{way}"}, 403, "tool_forbidden_path")
    door.refused("read_file", {"path": f"{folder.name}/round"}, 500, "tool_error")


# -- settings -------------------------------------------------------------------------------------------


def test_roots_are_read_again_without_a_restart(door: Door, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("there")
    wanted = {"path": str(tmp_path / "a.txt")}
    door.refused("read_file", wanted, 403, "tool_forbidden_path")
    door.settings(f'[tools]\nroots = ["{tmp_path}"]\n')
    assert door.result("read_file", **wanted)["content"] == "there"
    assert door.result("shell", command="pwd", cwd=str(tmp_path))["output"] == f"{tmp_path}\n"
    door.settings("[tools\n")
    assert door.result("read_file", **wanted)["content"] == "there"
    door.settings("")
    door.refused("read_file", wanted, 403, "tool_forbidden_path")


def test_the_system_folders_and_the_home_are_closed_even_when_everything_is_allowed(door: Door) -> None:
    door.settings('[tools]\nroots = ["/"]\n')
    for path in ("/etc/passwd", "/proc/self/environ", "/usr/bin/env", str(door.gateway.home / "token")):
        door.refused("read_file", {"path": path}, 403, "tool_forbidden_path")


def test_a_tool_can_be_switched_off_and_on_without_a_restart(door: Door) -> None:
    door.settings('[tools]\ndisabled = ["shell", "nothing"]\n')
    assert "disabled" in door.refused("shell", {"command": "true"}, 403, "tool_disabled")
    assert "disabled" in door.refused("shell", {}, 403, "tool_disabled")
    door.refused("nothing", {}, 403, "tool_disabled")
    door.refused("read_file", {"path": "none"}, 404, "tool_not_found")
    door.settings("[tools]\ndisabled = []\n")
    assert door.result("shell", command="true")["ok"]


def test_a_workspace_of_ones_own(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    with GatewayProcess(tmp_path / "home", "--workspace", str(mine)) as gateway:
        door = Door(gateway, mine)
        door.result("create_file", path="a.txt", content="x")
        assert (mine / "a.txt").read_text() == "x"
        agents = gateway.home / "agents" / "main" / "a.txt"
        door.refused("read_file", {"path": str(agents)}, 403, "tool_forbidden_path")


# -- streams --------------------------------------------------------------------------------------------


def test_a_stream_has_the_same_events(door: Door, folder: Path) -> None:
    (folder / "a.txt").write_text("streamed")
    wanted = {"path": f"{folder.name}/a.txt"}
    plain = door.call("read_file", wanted).json()["events"]
    assert events_of(door.call("read_file", wanted, stream=True)) == plain


def test_events_come_while_they_happen(door: Door, folder: Path) -> None:
    """The call is reported before the tool has ended: the tool waits for something that only its reader does later."""
    command = "for i in $(seq 200); do [ -e go ] && break; sleep 0.05; done; echo gone"
    tool = {"name": "shell", "input": {"command": command, "cwd": folder.name}}
    body = {"session_id": "s", "user_id": "u", "stream": True, "biz_params": {"tool": tool}}
    connection = http.client.HTTPConnection("127.0.0.1", door.gateway.port, timeout=20)
    headers = {"Authorization": f"Bearer {door.gateway.token}", "Content-Type": "application/json"}
    connection.request("POST", "/agent/process", json.dumps(body), headers)
    response = connection.getresponse()
    lines = [response.readline() for _ in range(4)]
    assert b"step_started" in lines[0] and b"tool_call" in lines[2]
    (folder / "go").touch()
    assert b"gone" in response.read()
    connection.close()


def test_a_failure_after_the_first_event_is_an_event(door: Door) -> None:
    events = events_of(door.call("read_file", {"path": "../x"}, stream=True))
    assert [event["type"] for event in events] == ["step_started", "tool_call", "error"]
    assert events[-1]["meta"]["code"] == "tool_forbidden_path" and ".." in events[-1]["meta"]["message"]


def test_a_failure_before_the_first_event_is_the_answer(door: Door) -> None:
    door.settings('[tools]\ndisabled = ["shell"]\n')
    for tool, status, code in (
        ({"name": "none"}, 404, "tool_not_found"),
        ({"name": "shell"}, 403, "tool_disabled"),
        ({"name": "read_file", "input": 3}, 400, "invalid_tool_input"),
    ):
        answer = door.post(biz_params={"tool": tool}, stream=True)
        assert (answer.status, answer.json()["error"]["code"]) == (status, code)


# -- the same client again and again ------------------------------------------------------------------------


def test_a_client_that_keeps_its_connection_gets_the_same_answers(door: Door, folder: Path) -> None:
    """Repeated requests on one connection are answered alike."""
    (folder / "a.txt").write_text("first")
    (folder / "b.txt").symlink_to("a.txt")
    (folder / "c.txt").symlink_to("/etc/passwd")
    connection = http.client.HTTPConnection("127.0.0.1", door.gateway.port, timeout=20)
    headers = {"Authorization": f"Bearer {door.gateway.token}", "Content-Type": "application/json"}

    def ask(name: str) -> tuple[int, Any, str]:
        tool = {"name": "read_file", "input": {"path": f"{folder.name}/{name}"}}
        said = [{"content": [{"type": "text", "text": f"read {name}"}]}]
        body = {"session_id": "s1", "user_id": "u1", "input": said, "biz_params": {"tool": tool}}
        connection.request("POST", "/agent/process", json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read()), str(response.getheader("x-request-id"))

    whole = [ask("a.txt") for _ in range(5)]
    assert {status for status, _, _ in whole} == {200} and all(body == whole[0][1] for _, body, _ in whole)
    assert len({call for _, _, call in whole}) == 5
    for _, _, call in whole:
        assert door.gateway.get(f"/v1/calls/{call}")["result"]["content"] == "first"
    assert door.said() == [("user", "read a.txt"), ("assistant", "first")] * 5
    assert ask("b.txt")[1]["reply"] == "first"
    for name, status, code in (("c.txt", 403, "tool_forbidden_path"), ("d.txt", 404, "tool_not_found")):
        refused, body, call = ask(name)
        assert (refused, body["error"]["code"]) == (status, code)
        assert door.gateway.get(f"/v1/calls/{call}")["state"] == "error"
    (folder / "a.txt").write_text("later")
    assert ask("a.txt")[1]["reply"] == "later"
    door.settings('[tools]\ndisabled = ["read_file"]\n')
    wait_until(lambda: ask("a.txt")[1].get("error", {}).get("code") == "tool_disabled")
    connection.close()


# -- several at once ------------------------------------------------------------------------------------


@pytest.mark.parametrize("beside", [True, False])
def test_items_run_one_after_the_other(door: Door, folder: Path, beside: bool) -> None:
    items = [{"path": f"{folder.name}/{name}", "content": name} for name in ("a", "b", "c")]
    tool = {"name": "create_file", **({"items": items} if beside else {"input": {"items": items}})}
    body = door.post(biz_params={"tool": tool}).json()
    types = [event["type"] for event in body["events"]]
    assert types == ["step_started"] + ["tool_call", "tool_result"] * 3 + ["assistant_delta", "completed"]
    assert sorted(os.listdir(folder)) == ["a", "b", "c"]
    assert body["reply"].count("created ") == 3


def test_items_end_at_the_first_failure_and_tell_what_was_done(door: Door, folder: Path) -> None:
    (folder / "b").touch()
    items = [{"path": f"{folder.name}/{name}", "content": name} for name in ("a", "b", "c")]
    answer = door.post(biz_params={"tool": {"name": "create_file", "items": items}})
    error = answer.json()["error"]
    assert (answer.status, error["code"], error["details"]["item"]) == (409, "tool_conflict", 1)
    assert [done["path"] for done in error["details"]["done"]] == [f"{folder.name}/a"]
    assert sorted(os.listdir(folder)) == ["a", "b"]


# -- chats ----------------------------------------------------------------------------------------------


def test_a_chat_keeps_what_was_said(door: Door, folder: Path) -> None:
    (folder / "a.txt").write_text("content")
    door.call("read_file", {"path": f"{folder.name}/a.txt"}, text="Please read the file a.txt")
    assert door.said() == [("user", "Please read the file a.txt"), ("assistant", "content")]
    (chat,) = door.gateway.get("/chats?session_id=s1&user_id=u1&channel=console")
    assert chat["name"] == "Please read the file"[:20]
    assert chat["updated_at"] >= chat["created_at"]


def test_the_users_message_is_kept_when_the_tool_fails(door: Door) -> None:
    door.call("read_file", {"path": "none"}, text="one")
    door.call("none", {}, text="two")
    door.post("three", biz_params={"tool": 3})
    door.post("four")
    assert door.said() == [("user", "one"), ("user", "two"), ("user", "three"), ("user", "four")]


def test_the_users_message_is_stored_before_the_tool_has_ended(door: Door, folder: Path) -> None:
    command = "for i in $(seq 200); do [ -e go ] && break; sleep 0.05; done"
    call = threading.Thread(target=door.call, args=("shell", {"command": command, "cwd": folder.name}))
    call.start()
    wait_until(lambda: door.said() == [("user", "do it")])
    (folder / "go").touch()
    call.join()
    assert len(door.said()) == 2


def test_chats_are_identified_by_session_user_and_channel(door: Door) -> None:
    keys: list[dict[str, str]] = [{}, {"session_id": "s2"}, {"user_id": "u2"}, {"channel": "webhook"}]
    for number, key in enumerate(keys):
        door.post("/new", **key)
        door.call("shell", {"command": "true"}, text=f"text {number}", **key)
    for number, key in enumerate(keys):
        assert door.said(**key)[0] == ("user", f"text {number}")
    assert len(door.gateway.get("/chats?user_id=u1&session_id=s1")) == 2


def test_the_channel_is_console_by_default(door: Door) -> None:
    door.call("shell", {"command": "true"}, text="no channel", channel=...)
    door.call("shell", {"command": "true"}, text="none", channel=None)
    door.call("shell", {"command": "true"}, text="loud", channel="CONSOLE")
    assert [text for role, text in door.said() if role == "user"] == ["no channel", "none", "loud"]


def test_new_starts_the_chat_afresh(door: Door) -> None:
    door.call("shell", {"command": "true"}, text="before")
    (old,) = door.gateway.get("/chats?session_id=s1&user_id=u1&channel=console")
    for text in ("/new", "  /NEW\n"):
        answer = door.post(text, biz_params={"tool": {"name": "shell", "input": {"command": "touch made"}}})
        assert answer.status == 200 and answer.json()["reply"]
        types = [event["type"] for event in answer.json()["events"]]
        assert types == ["step_started", "assistant_delta", "completed"]
    assert door.said() == [] and not (door.workspace / "made").exists()
    door.call("shell", {"command": "true"}, text="say /new please")
    (new,) = door.gateway.get("/chats?session_id=s1&user_id=u1&channel=console")
    assert new["id"] != old["id"] and len(door.said()) == 2
    assert [event["type"] for event in events_of(door.post("/new", stream=True))] == types


def test_chats_can_be_removed(door: Door) -> None:
    door.call("shell", {"command": "true"})
    (chat,) = door.gateway.get("/chats?session_id=s1&user_id=u1&channel=console")
    assert door.gateway.request("DELETE", f"/chats/{chat['id']}").json() == {"deleted": True}
    for method in ("GET", "DELETE"):
        assert door.gateway.request(method, f"/chats/{chat['id']}").status == 404


def test_chats_outlive_a_crash(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home") as gateway:
        door = Door(gateway, tmp_path / "home" / "agents" / "main")
        door.call("shell", {"command": "true"}, text="kept")
        gateway.kill()
        gateway.start()
        assert door.said() == [("user", "kept"), ("assistant", "$ true\n(command completed with no output)")]


def test_what_was_read_and_said_on_one_line_outlives_a_kill_once(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home") as gateway:
        door = Door(gateway, tmp_path / "home" / "agents" / "main")
        door.workspace.mkdir(parents=True, exist_ok=True)
        (door.workspace / "note").write_text("read me")
        said: list[tuple[str, str]] = []
        ids: list[str] = []
        shapes: list[Any] = []
        for life in range(4):
            line = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=20)
            for number in range(5 + life):
                text = f"life {life}, number {number}"
                body = json.dumps(
                    {
                        "input": [{"role": "user", "content": text}],
                        "session_id": "s1",
                        "user_id": "u1",
                        "channel": "console",
                        "biz_params": {"tool": {"name": "read_file", "input": {"path": "note"}}},
                    }
                )
                line.request("POST", "/agent/process", body, {"Authorization": f"Bearer {gateway.token}"})
                answer = line.getresponse()
                whole = json.loads(answer.read())
                reply = whole["reply"]
                assert "read me" in reply
                shapes.append(whole)
                said += [("user", text), ("assistant", reply)]
                ids.append(answer.headers["x-request-id"])
            gateway.kill()
            line.close()
            gateway.start()
            assert door.said() == said
        assert all(shape == shapes[0] for shape in shapes), "the first of each line takes the longer way"
        assert sorted(call["id"] for call in gateway.get("/v1/calls?limit=1000")["calls"]) == sorted(ids)
        gateway.kill()  # nothing is taken up twice
        gateway.start()
        assert door.said() == said


def test_a_message_may_be_plain_text_and_parts_of_other_kinds_are_passed_over(door: Door) -> None:
    parts = [{"type": "image", "url": "x"}, {"type": "text", "text": "part"}]
    said = [{"role": "user", "content": "plain"}, {"role": "assistant", "content": parts}]
    door.call("shell", {"command": "true"}, input=said)
    assert door.said()[:2] == [("user", "plain"), ("assistant", "part")]
    door.call("shell", {"command": "true"}, input=[])


# -- records --------------------------------------------------------------------------------------------


def test_every_run_is_a_call_record(door: Door, folder: Path) -> None:
    answer = door.call("create_file", {"path": f"{folder.name}/a", "content": "x"})
    record = door.gateway.get(f"/v1/calls/{answer.headers['x-request-id']}")
    assert (record["tool"], record["state"], record["route"]["kind"]) == ("create_file", "ok", "local")
    assert record["result"]["text"] == answer.json()["reply"] and record["session_key"] == "s1"
    assert record["args"] == {"path": f"{folder.name}/a", "content": "x"}
    failed = door.call("read_file", {"path": "../x"})
    record = door.gateway.get(f"/v1/calls/{failed.headers['x-request-id']}")
    assert (record["state"], record["error"]["kind"]) == ("error", "not_allowed")


def test_the_four_are_not_among_the_agents_tools(door: Door) -> None:
    names = {tool["name"] for tool in door.gateway.get("/v1/tools")["tools"]}
    assert names.isdisjoint({"read_file", "create_file", "update_file", "shell"})
    assert door.gateway.invoke("shell", {"command": "true"})["error"]["kind"] == "not_found"


def test_an_idempotency_key_runs_a_request_once(door: Door, folder: Path) -> None:
    wanted = {"command": "echo x >>log; cat log", "cwd": folder.name}
    first, second = (door.call("shell", wanted, headers={"Idempotency-Key": "k-1"}) for _ in range(2))
    assert first.json() == second.json()
    assert first.headers["x-request-id"] == second.headers["x-request-id"]
    assert (folder / "log").read_text() == "x\n" and len(door.said()) == 2
    other = door.call("shell", {"command": "true"}, headers={"Idempotency-Key": "k-1"})
    assert (other.status, other.json()["error"]["code"]) == (409, "idempotency_conflict")
    assert len(door.said()) == 2


@pytest.mark.parametrize(
    ("tool", "wanted", "status", "code"),
    [
        ("create_file", {"path": "there", "content": "x"}, 409, "tool_conflict"),
        ("create_file", {"path": "../x", "content": "x"}, 403, "tool_forbidden_path"),
        ("create_file", {"path": "/etc/x", "content": "x"}, 403, "tool_forbidden_path"),
        ("update_file", {"path": "missing", "content": "x"}, 404, "tool_not_found"),
        ("update_file", {"path": "folder", "content": "x"}, 500, "tool_error"),
        ("create_file", {"path": "x"}, 400, "invalid_tool_input"),
    ],
)
def test_a_repeated_request_gets_the_same_failure(
    door: Door, tool: str, wanted: dict[str, Any], status: int, code: str
) -> None:
    (door.workspace / "there").write_text("before\n")
    (door.workspace / "folder").mkdir(exist_ok=True)
    for whole in (wanted, {"items": [wanted]}):
        key = {"Idempotency-Key": f"{tool}-{sorted(whole)}-{wanted['path']}-{code}"}
        first, second = (door.call(tool, whole, headers=key) for _ in range(2))
        assert (first.status, first.json()["error"]["code"]) == (status, code)
        assert (second.status, second.json()["error"]) == (first.status, first.json()["error"])
    assert (door.workspace / "there").read_text() == "before\n"


def test_a_repeated_request_gets_the_same_failure_after_a_restart(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home") as gateway:
        door = Door(gateway, tmp_path / "home" / "agents" / "main")
        wanted, key = {"path": "a", "content": "x"}, {"Idempotency-Key": "k-again"}
        door.call("create_file", wanted)
        first = door.call("create_file", wanted, headers=key)
        (door.workspace / "a").unlink()
        gateway.kill()
        gateway.start()
        second = door.call("create_file", wanted, headers=key)
        assert (first.status, first.json()["error"]["code"]) == (409, "tool_conflict")
        assert (second.status, second.json()["error"]) == (409, first.json()["error"])
        assert not (door.workspace / "a").exists()


def test_a_command_that_ran_when_the_gateway_was_killed_is_in_the_record(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home") as gateway:
        door = Door(gateway, tmp_path / "home" / "agents" / "main")
        command = "echo begun >begun; for i in $(seq 200); do [ -e go ] && break; sleep 0.05; done; echo done"

        def call() -> None:
            with pytest.raises((http.client.HTTPException, OSError)):
                door.call("shell", {"command": command})

        caller = threading.Thread(target=call)
        caller.start()
        wait_until((door.workspace / "begun").exists)
        gateway.kill()
        caller.join()
        gateway.start()
        (door.workspace / "go").touch()
        ended = wait_until(
            lambda: [one for one in gateway.get("/v1/calls?tool=shell")["calls"] if one["ended_at"] is not None]
        )
        assert (ended[0]["state"], ended[0]["result"]["output"]) == ("ok", "done\n")


# -- without a tool -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"biz_params": {}}, {"biz_params": None}, {"biz_params": {"tool": None}}])
def test_without_a_model_the_answer_says_what_to_set(door: Door, fields: dict[str, Any]) -> None:
    for stream in (False, True):
        answer = door.post(**fields, stream=stream)
        error = answer.json()["error"]
        assert (answer.status, error["code"]) == (503, "model_not_configured")
        assert all(name in error["message"] for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "FARHAND_MODEL"))


def test_with_a_model_the_agent_answers_in_a_session_of_the_chat(tmp_path: Path) -> None:
    replies = [says("Hello."), says("You said hi."), says("Afresh.")]

    def answer(_request: Request) -> Reply | None:
        return replies.pop(0)

    with ModelServer(answer=answer) as model, GatewayProcess(tmp_path / "home", env=model.environment) as gateway:
        door = Door(gateway, tmp_path / "home" / "agents" / "main")
        first = door.post("hi")
        assert (first.status, first.json()["reply"]) == (200, "Hello."), first
        events = events_of(door.post("what did I say?", stream=True))
        assert events[-1]["type"] == "completed" and events[-1]["reply"] == "You said hi."
        assert "".join(event["delta"] for event in events if event["type"] == "assistant_delta") == "You said hi."
        assert door.said() == [
            ("user", "hi"),
            ("assistant", "Hello."),
            ("user", "what did I say?"),
            ("assistant", "You said hi."),
        ]
        assert b"Hello." in model.requests[-1].body
        door.post("/new")
        assert door.post("again").json()["reply"] == "Afresh."
        assert b"Hello." not in model.requests[-1].body
