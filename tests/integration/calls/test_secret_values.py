"""A secret reaches the process that needs it, and nothing else: not the record, the journal, the answer or a log."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess, NodeProcess, wait_until

pytestmark = pytest.mark.usefixtures("own_interpreters")

VALUE = "s3cr3t 'quo\"ted' $HOME `id` \\ *;|&\n\tsecond line of the value"


class Place:
    def __init__(self, gateway: GatewayProcess, node: NodeProcess) -> None:
        self.gateway, self.node = gateway, node

    def set(self, name: str, value: str = VALUE, **more: Any) -> None:
        answer = self.gateway.request("PUT", f"/v1/secrets/{name}", {"value": value, **more})
        assert answer.status == 200 and value not in json.dumps(answer.json()), answer


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("secrets")
    with GatewayProcess(folder / "home") as gateway, NodeProcess(gateway, folder / "node", "ci") as node:
        yield Place(gateway, node)


def digest(place: Place, command: str, **args: Any) -> str:
    """The output of a command that prints a digest, since the value itself is masked."""
    return str(place.node.ok("Bash", {"command": command, **args})["output"]).split()[0]


def sha256(text: str) -> str:
    return (
        subprocess.run(["sha256sum"], input=text.encode(), capture_output=True, check=True).stdout.decode().split()[0]
    )


@pytest.mark.parametrize(
    "command",
    [
        'printf %s "{{secret:WHOLE}}" | sha256sum',
        "printf %s '{{secret:WHOLE}}' | sha256sum",
        "printf %s {{secret:WHOLE}} | sha256sum",
        "python3 -c 'import sys, hashlib; print(hashlib.sha256(sys.argv[1].encode()).hexdigest())' {{secret:WHOLE}}",
    ],
)
def test_the_value_arrives_intact(place: Place, command: str) -> None:
    place.set("WHOLE")
    assert digest(place, command) == sha256(VALUE)


def test_the_value_is_nowhere_but_in_the_process(place: Place) -> None:
    value = "marker-7f3a9c-value-of-the-secret"
    place.set("MARKER", value)
    answer = place.gateway.invoke(
        "ci__Bash", {"command": "echo {{secret:MARKER}}; cat /proc/$$/cmdline | tr '\\0' ' '"}
    )
    assert answer["ok"] and value not in json.dumps(answer)
    assert "{{secret:MARKER}}" in place.gateway.request("GET", f"/v1/calls/{answer['request_id']}").body.decode()
    failed = place.gateway.invoke("ci__Read", {"path": "/no/{{secret:MARKER}}"})
    assert not failed["ok"] and value not in json.dumps(failed)
    for path in ("/v1/calls", "/v1/secrets", f"/v1/calls/{answer['request_id']}/output?wait=0", "/v1/nodes/ci/logs"):
        assert value not in place.gateway.request("GET", path).body.decode(errors="replace"), path
    kept = places_of(value, place.gateway.home, place.node.state)
    # The output of the command itself, on the machine that ran it, is the only place.
    assert [path for path in kept if "/jobs/" not in path] == []


def test_other_tools_get_the_value_in_place(place: Place, tmp_path: Path) -> None:
    place.set("FILED", "value for a file\n")
    target = place.node.workspace / "netrc"
    place.node.ok("Write", {"path": str(target), "content": "password {{secret:FILED}}"})
    assert target.read_text() == "password value for a file\n"


def test_exec_on_the_gateway(place: Place) -> None:
    place.set("LOCAL")
    answer = place.gateway.invoke("exec", {"command": 'printf %s "{{secret:LOCAL}}" | sha256sum'})
    assert answer["ok"] and sha256(VALUE) in answer["result"]["content"], answer
    echoed = place.gateway.invoke("exec", {"command": "echo {{secret:LOCAL}}", "env": {"X": "{{secret:LOCAL}}"}})
    assert "second line of the value" not in json.dumps(echoed), echoed


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap")
def test_a_variable_with_a_secret_acts_inside_the_sandbox_only(place: Place, tmp_path: Path) -> None:
    place.set("DEBUG", "files")
    # The loader of a program would write this file, outside of the sandbox.
    env = {"LD_DEBUG": "{{secret:DEBUG}}", "LD_DEBUG_OUTPUT": f"{tmp_path}/it's-{{{{secret:DEBUG}}}}"}
    command = 'printf %s "$LD_DEBUG_OUTPUT" | sha256sum'
    answer = place.gateway.invoke("exec", {"command": command, "env": env, "trial": True})
    assert answer["ok"] and sha256(f"{tmp_path}/it's-files") in answer["result"]["content"], answer
    assert list(tmp_path.iterdir()) == []
    refused = place.gateway.invoke("exec", {"command": "true", "env": {"A-B": "{{secret:DEBUG}}"}})
    assert refused["error"]["kind"] == "invalid_args"


def test_tools_that_store_or_send_text_keep_the_handle(place: Place) -> None:
    value = "marker-51c2-value-of-the-stored"
    place.set("STORED", value)
    spec = {"mode": "call", "tool": "ci__Bash", "args": {"command": "echo {{secret:STORED}}"}}
    job = {"action": "add", "name": "later", "schedule": "every day at 3:00", "spec": spec}
    answer = place.gateway.invoke("gsv__Cron", job)
    assert answer["ok"] and "{{secret:STORED}}" in json.dumps(answer), answer
    (place.node.workspace / "sent.txt").write_text("x")
    sent = place.gateway.invoke("gsv__Transfer", {"source": "ci:sent.txt", "destination": "gsv:{{secret:STORED}}"})
    assert value not in json.dumps(sent)
    kept = subprocess.run(["grep", "-rlaF", value, str(place.gateway.home)], capture_output=True, check=False).stdout
    assert kept == b""


def test_the_shell_of_the_guide_gets_it_in_a_variable(place: Place) -> None:
    place.set("GUIDED", "x'; echo injected; '$(id)")
    command = "printf %s '{{secret:GUIDED}}' | sha256sum; tr '\\0' ' ' < /proc/$$/cmdline"
    tool = {"name": "shell", "input": {"command": command}}
    body = {"input": [], "session_id": "s", "user_id": "u", "stream": False, "biz_params": {"tool": tool}}
    answer = place.gateway.request("POST", "/agent/process", body).body.decode()
    assert sha256("x'; echo injected; '$(id)") in answer and "FARHAND_SECRET_GUIDED" in answer, answer


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap")
def test_in_a_sandbox_and_in_a_trial(place: Place, tmp_path: Path) -> None:
    place.set("BOXED")
    root = tmp_path / "root"
    root.mkdir()
    with NodeProcess(place.gateway, tmp_path / "node", "boxed", "--root", str(root)) as node:
        command = 'printf %s "{{secret:BOXED}}" | sha256sum; tr "\\0" "\\n" < /proc/1/cmdline'
        for more in ({}, {"trial": True}):
            output = node.ok("Bash", {"command": command, **more})["output"]
            assert output.split()[0] == sha256(VALUE) and "second line" not in output
        # A diff has a mark before each line, so the value is not in it as it is.
        written = place.gateway.invoke("boxed__Bash", {"command": 'echo "{{secret:BOXED}}" > out', "trial": True})
        assert written["result"]["changes"][0]["diff"].endswith("+***\n"), written
        shown = place.gateway.request("GET", f"/v1/trials/{written['request_id']}")
        assert shown.status == 200 and b"second line" not in shown.body
        kept = places_of("second line of the value", place.gateway.home)
        assert [path for path in kept if "/jobs/" not in path] == []


@pytest.mark.parametrize("killed", ["node", "gateway"])
def test_a_kill_while_a_command_has_a_secret_spreads_nothing(tmp_path: Path, killed: str) -> None:
    value = "marker-51c0de-value-of-the-secret"
    with GatewayProcess(tmp_path / "home") as gateway, NodeProcess(gateway, tmp_path / "node", "ci") as node:
        Place(gateway, node).set("KILLED", value)
        command = 'touch began; until [ -e go ]; do sleep 0.05; done; printf %s "{{secret:KILLED}}" | sha256sum'
        call = node.begin("Bash", {"command": command})
        wait_until((node.workspace / "began").exists, what="the command")
        if killed == "node":
            node.restart()
        else:
            gateway.kill()
            gateway.start()
            gateway.wait_for_node("ci")
        (node.workspace / "go").touch()
        ended = node.end_of(call)
        assert ended["state"] == "ok" and ended["result"]["output"].split()[0] == sha256(value), ended
        assert places_of(value, tmp_path) == []


def places_of(value: str, *folders: Path) -> list[str]:
    """The files that hold a value."""
    command = ["grep", "-rlaF", value, *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()


def test_restrictions_hold(place: Place) -> None:
    place.set("NARROW", nodes=["other"], tools=["ci__Bash"])
    message = place.node.fails("Bash", {"command": "echo {{secret:NARROW}}"}, "not_allowed")
    assert "NARROW" in message and "other" in message
    place.set("NARROW", nodes=["ci"], tools=["ci__Bash"])
    place.node.ok("Bash", {"command": "true {{secret:NARROW}}"})
    message = place.node.fails("Write", {"path": "x", "content": "{{secret:NARROW}}"}, "not_allowed")
    assert "ci__Bash" in message and not (place.node.workspace / "x").exists()
    answer = place.gateway.invoke("exec", {"command": "echo {{secret:NARROW}}"})
    assert answer["error"]["kind"] == "not_allowed"


def test_unknown_and_malformed_handles_run_nothing(place: Place) -> None:
    place.set("WHOLE")
    assert "NOBODY" in place.node.fails("Bash", {"command": "touch ran; echo {{secret:NOBODY}}"}, "not_found")
    place.node.fails("Bash", {"command": "touch ran; echo {{secret:a b}}"}, "invalid_args")
    place.node.fails("Bash", {"command": "touch ran; cat <<'E'\n{{secret:WHOLE}}\nE"}, "invalid_args")
    assert not (place.node.workspace / "ran").exists()
    escaped = json.dumps({"tool": "ci__Bash", "args": {"command": "touch ran; echo {{secret:WHOLE}}"}})
    hidden = escaped.replace("{{secret", "\\u007b\\u007bsecret").encode()
    answer = place.gateway.request("POST", "/v1/tools/invoke", hidden).json()
    assert not answer["ok"] or "second line" not in json.dumps(answer)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("a-b", {"value": "x"}),
        ("1a", {"value": "x"}),
        ("X" * 65, {"value": "x"}),
        ("EMPTY", {"value": ""}),
        ("NUL", {"value": "a\0b"}),
        ("LONG", {"value": "x" * 70_000}),
        ("TYPE", {"value": 5}),
        ("MORE", {"value": "x", "scope": "all"}),
        ("NODE", {"value": "x", "nodes": ["a b"]}),
    ],
)
def test_an_invalid_secret_is_refused(place: Place, name: str, body: Any) -> None:
    assert place.gateway.request("PUT", f"/v1/secrets/{name}", body).status in (400, 404, 413)


def test_only_an_admin_manages_secrets(place: Place) -> None:
    made = place.gateway.request("POST", "/v1/tokens", {"scopes": ["tools.write", "tools.exec", "read"]}).json()
    for method, path in (("GET", "/v1/secrets"), ("PUT", "/v1/secrets/X"), ("DELETE", "/v1/secrets/X")):
        body = {"value": "x"} if method == "PUT" else None
        assert place.gateway.request(method, path, body, token=made["token"]).status == 403


def test_last_use_and_removal(place: Place) -> None:
    place.set("USED")
    done = place.gateway.invoke("ci__Bash", {"command": "true {{secret:USED}}"})
    listed = {one["name"]: one for one in place.gateway.get("/v1/secrets")["secrets"]}
    assert listed["USED"]["last_call"] == done["request_id"] and listed["USED"]["last_used_at"]
    assert place.gateway.request("DELETE", "/v1/secrets/USED").status == 200
    assert place.gateway.request("DELETE", "/v1/secrets/USED").status == 404
    place.node.fails("Bash", {"command": "echo {{secret:USED}}"}, "not_found")


def test_secrets_outlive_a_restart_and_are_encrypted(place: Place) -> None:
    place.set("KEPT")
    place.gateway.kill()
    place.gateway.start()
    place.gateway.wait_for_node("ci")
    assert digest(place, "printf %s {{secret:KEPT}} | sha256sum") == sha256(VALUE)
    key = place.gateway.home / "secrets.key"
    assert key.stat().st_mode & 0o777 == 0o600


def test_at_the_prompt(place: Place) -> None:
    farhand = Command(place.gateway.home)
    assert farhand("secret", "set", "TYPED", "--node", "ci", stdin=VALUE + "\n").status == 0
    assert digest(place, "printf %s {{secret:TYPED}} | sha256sum") == sha256(VALUE)
    listed = farhand("secret", "list")
    assert "TYPED" in listed.out and "ci" in listed.out and "second line" not in listed.out
    assert farhand("secret", "remove", "TYPED").status == 0
    assert farhand("secret", "remove", "TYPED").status != 0
    assert farhand("secret", "set", "TYPED", stdin="").status != 0
    assert os.environ.get("FARHAND_SECRET_TYPED") is None


def test_a_value_that_is_not_masked_is_named_as_such(place: Place) -> None:
    farhand = Command(place.gateway.home)
    for value in ("hunter2", "123456789012", "  short  "):
        done = farhand("secret", "set", "SHORT", stdin=value)
        assert done.status == 0 and "not masked" in done.err, done
        assert "no" in next(line for line in farhand("secret", "list").out.splitlines() if "SHORT" in line).split()
        put = place.gateway.request("PUT", "/v1/secrets/SHORT", {"value": value}).json()
        assert put["masked"] is False and "not masked" in put["warning"], put
    done = farhand("secret", "set", "SHORT", stdin=VALUE)
    assert done.status == 0 and "warning" not in done.err, done
    assert place.gateway.request("DELETE", "/v1/secrets/SHORT").status == 200
