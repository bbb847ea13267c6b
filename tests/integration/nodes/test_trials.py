"""A trial shows what a command changes; nothing has changed until it is kept, and then exactly that."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farhand.machine.sandbox.launcher import landlock_version
from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess, NodeProcess, wait_until

LEVELS = [
    pytest.param("bubblewrap", marks=pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap")),
    pytest.param("landlock", marks=pytest.mark.skipif(landlock_version() < 1, reason="no Landlock")),
]


class Tried:
    def __init__(self, gateway: GatewayProcess, node: NodeProcess, root: Path) -> None:
        self.gateway, self.node, self.root = gateway, node, root

    def trial(self, command: str, **more: Any) -> dict[str, Any]:
        return dict(self.node.ok("Bash", {"command": command, "trial": True, **more}))

    def end(self, trial: dict[str, Any], action: str) -> tuple[int, Any]:
        answer = self.gateway.request("POST", f"/v1/trials/{trial['trialId']}/{action}", body={})
        return answer.status, answer.json()


@pytest.fixture(scope="module")
def node(shared_gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tried]:
    folder = tmp_path_factory.mktemp("tried")
    root = folder / "root"
    root.mkdir()
    with NodeProcess(shared_gateway, folder / "node", "tried", "--root", str(root)) as running:
        yield Tried(shared_gateway, running, root)


@pytest.fixture
def tried(node: Tried) -> Tried:
    for entry in node.root.iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    (node.root / "old.txt").write_text("one\ntwo\n")
    (node.root / "gone.txt").write_text("bye\n")
    (node.root / "folder").mkdir()
    (node.root / "folder" / "inner.txt").write_text("inner\n")
    return node


def tree(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


WORK = (
    "echo three >> old.txt; rm gone.txt; rm -r folder; mkdir made; echo new > made/new.txt; ln -s old.txt link; "
    "echo bin > tool && chmod 750 tool; cat old.txt"
)


def test_a_trial_lists_changes_and_changes_nothing(tried: Tried) -> None:
    before = tree(tried.root)
    done = tried.trial(WORK)
    assert done["exitCode"] == 0 and done["output"] == "one\ntwo\nthree\n"
    kinds = {os.path.relpath(change["path"], tried.root): change["kind"] for change in done["changes"]}
    assert kinds == {
        "old.txt": "changed",
        "gone.txt": "deleted",
        "folder": "deleted",
        "folder/inner.txt": "deleted",
        "made": "added",
        "made/new.txt": "added",
        "link": "added",
        "tool": "added",
    }
    diffs = {os.path.relpath(change["path"], tried.root): change.get("diff", "") for change in done["changes"]}
    assert "+three" in diffs["old.txt"] and "-bye" in diffs["gone.txt"] and "+new" in diffs["made/new.txt"]
    assert tree(tried.root) == before
    shown = tried.gateway.get(f"/v1/trials/{done['trialId']}")
    assert shown["state"] == "ready" and shown["changes"] == done["changes"]
    assert tried.end(done, "discard")[1]["state"] == "discarded"


def test_keeping_applies_exactly_the_changes(tried: Tried) -> None:
    done = tried.trial(WORK)
    assert tried.end(done, "keep")[1]["state"] == "kept"
    assert tree(tried.root) == {
        "link": "old.txt",
        "made": None,
        "made/new.txt": b"new\n",
        "old.txt": b"one\ntwo\nthree\n",
        "tool": b"bin\n",
    }
    assert (tried.root / "tool").stat().st_mode & 0o777 == 0o750
    status, again = tried.end(done, "keep")
    assert status == 200 and again["state"] == "kept", "a second keep changes nothing"
    assert tried.end(done, "discard")[0] >= 400


def test_a_kept_trial_can_be_undone(tried: Tried) -> None:
    done = tried.trial("echo changed > old.txt; echo new > new.txt")
    status, kept = tried.end(done, "keep")
    calls = tried.gateway.get("/v1/calls?tool=tried__Trial&limit=1")["calls"]
    assert status == 200 and kept["keptBy"] == calls[0]["id"]
    assert tried.end(done, "keep")[1]["keptBy"] == calls[0]["id"], "keeping it again applies nothing"
    refused = tried.gateway.request("POST", f"/v1/calls/{done['trialId']}/undo", body={})
    assert refused.status == 404 and "was a trial" in refused.body.decode()
    undone = tried.gateway.request("POST", f"/v1/calls/{kept['keptBy']}/undo", body={}).json()
    assert undone["ok"] is True, undone
    assert (tried.root / "old.txt").read_text() == "one\ntwo\n" and not (tried.root / "new.txt").exists()


@pytest.mark.parametrize(
    ("command", "meanwhile"),
    [
        ("echo mine >> old.txt", "echo yours > old.txt"),
        ("rm old.txt", "echo yours > old.txt"),
        ("echo mine > new.txt", "echo yours > new.txt"),
        ("echo mine > old.txt; echo x > other.txt", "rm old.txt"),
        ("rm -r folder", "echo yours > folder/inner.txt"),
    ],
)
def test_a_conflict_is_409_and_nothing_is_applied(tried: Tried, command: str, meanwhile: str) -> None:
    done = tried.trial(command)
    os.system(f"cd {tried.root} && {meanwhile}")
    before = tree(tried.root)
    status, answer = tried.end(done, "keep")
    assert status == 409 and answer["error"]["code"] == "conflict", answer
    assert tree(tried.root) == before
    assert tried.end(done, "discard")[0] == 200


def test_a_trial_that_was_discarded_cannot_be_kept(tried: Tried) -> None:
    done = tried.trial("echo x > new.txt")
    assert tried.end(done, "discard")[0] == 200
    status, answer = tried.end(done, "keep")
    assert status >= 400 and "discarded" in answer["error"]["message"]
    assert not (tried.root / "new.txt").exists()


def test_a_failing_command_and_one_that_changes_nothing(tried: Tried) -> None:
    done = tried.trial("touch old.txt; cat old.txt > /dev/null; exit 3")
    assert done["exitCode"] == 3 and done["changes"] == []
    tried.end(done, "discard")


def test_a_trial_has_no_network_and_no_way_out(tried: Tried, tmp_path: Path) -> None:
    done = tried.trial(f"ls /sys/class/net 2>/dev/null; grep -vc lo: /proc/net/dev; touch {tmp_path}/out")
    assert "2\n" in done["output"] and not (tmp_path / "out").exists()
    tried.end(done, "discard")


def test_a_trial_is_refused_in_the_background(tried: Tried) -> None:
    for more in ({"background": True}, {"yieldMs": 100}):
        args = {"command": "true", "trial": True, **more}
        assert "background" in tried.node.fails("Bash", args, "invalid_args")


def test_unknown_trials_are_404(tried: Tried) -> None:
    for name in ("nothing", "..%2f..%2fetc", "01a1ea59-bcc7-732f-b2ac-5750ab23f2dd"):
        answer = tried.gateway.request("POST", f"/v1/trials/{name}/keep", body={})
        assert answer.status == 404, answer
    other = tried.gateway.invoke("tried__Bash", {"command": "true"})
    answer = tried.gateway.request("POST", f"/v1/trials/{other['request_id']}/keep", body={})
    assert answer.status == 404, answer


def test_keeping_is_refused_while_frozen(tried: Tried) -> None:
    done = tried.trial("echo x > new.txt")
    tried.gateway.request("POST", "/v1/freeze", body={"reason": "test"})
    try:
        status, _ = tried.end(done, "keep")
        assert status in (403, 423)
        assert not (tried.root / "new.txt").exists()
    finally:
        tried.gateway.request("POST", "/v1/thaw", body={})
    assert tried.end(done, "keep")[0] == 200


def test_trials_outlive_a_killed_node(tried: Tried) -> None:
    done = tried.trial("echo x > new.txt")
    tried.node.kill()
    tried.node.start()
    assert tried.end(done, "keep")[1]["state"] == "kept"
    assert (tried.root / "new.txt").read_text() == "x\n"


MANY = "for i in $(seq 1500); do echo $i > new-$i; done; echo changed > old.txt; rm gone.txt"


@pytest.mark.parametrize("killed", ["node", "gateway", "both"])
def test_a_kill_in_the_middle_of_keeping_applies_all_of_it_or_nothing(tmp_path: Path, killed: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "old.txt").write_text("old\n")
    (root / "gone.txt").write_text("bye\n")
    with (
        GatewayProcess(tmp_path / "home") as gateway,
        NodeProcess(gateway, tmp_path / "node", "tried", "--root", str(root)) as node,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        before = tree(root)
        tried = Tried(gateway, node, root)
        done = tried.trial(MANY)
        assert tree(root) == before and len(done["changes"]) == 1502
        keeping = pool.submit(tried.end, done, "keep")
        wait_until(lambda: tree(root) != before, what="the first change")
        if killed != "node":
            gateway.kill()
        if killed != "gateway":
            node.kill()
        if killed != "node":
            gateway.start()
            gateway.wait_for_node("tried") if killed == "gateway" else None
        if killed != "gateway":
            node.start()
        keeping.exception(60)  # its connection may be lost; the call goes on
        open_calls = "/v1/calls?tool=tried__Trial&state=running&limit=1"
        wait_until(lambda: not gateway.get(open_calls)["calls"], what="the end of the call that keeps it")
        status, kept = tried.end(done, "keep")
        assert status == 200 and kept["state"] == "kept", kept
        after = tree(root)
        assert len(after) == 1501 and after["new-1500"] == b"1500\n" and after["old.txt"] == b"changed\n"
        undone = gateway.request("POST", f"/v1/calls/{kept['keptBy']}/undo", body={}).json()
        assert undone["ok"] is True and tree(root) == before, undone


def test_a_kill_while_the_command_runs_loses_nothing(tried: Tried) -> None:
    started = tried.gateway.request(
        "POST",
        "/v1/tools/invoke",
        body={
            "tool": "tried__Bash",
            "args": {"command": "echo x > new.txt; sleep 1000", "trial": True, "timeout": 3000},
            "background": True,
        },
    ).json()
    tried.node.kill()
    tried.node.start()
    record = tried.node.end_of(started["request_id"])
    assert record["state"] in ("ok", "timeout"), (record["error_message"], record)
    answer = tried.gateway.request("GET", f"/v1/trials/{started['request_id']}").json()
    assert answer["state"] == "ready" and [change["kind"] for change in answer["changes"]] == ["added"], answer
    tried.gateway.request("POST", f"/v1/trials/{started['request_id']}/discard", body={})


def test_at_the_prompt(tried: Tried) -> None:
    farhand = Command(tried.gateway.home)
    answer = farhand("call", "tried__Bash", "command=echo x > new.txt", "trial=true", "--json").json()
    trial = answer["result"]["trialId"]
    shown = farhand("trial", "show", trial)
    assert "added" in shown.out and "+x" in shown.out
    assert farhand("trial", "keep", trial).status == 0
    assert (tried.root / "new.txt").exists()
    assert farhand("trial", "keep", "nothing").status != 0


@pytest.mark.parametrize("level", LEVELS)
def test_a_node_without_roots_tries_in_its_workspace(
    shared_gateway: GatewayProcess, tmp_path: Path, level: str
) -> None:
    path = os.environ["PATH"]
    if level == "landlock":  # as on a machine without bubblewrap
        bare = tmp_path / "bin"
        bare.mkdir()
        (bare / "python3").symlink_to("/usr/bin/python3")
        path = str(bare)
    with NodeProcess(shared_gateway, tmp_path, f"wide-{level}", env={"PATH": path}) as node:
        done = node.ok("Bash", {"command": "/bin/echo x > new.txt", "trial": True})
        assert [change["path"] for change in done["changes"]] == [str(node.workspace / "new.txt")]
        assert not (node.workspace / "new.txt").exists()


def test_exec_can_be_tried(shared_gateway: GatewayProcess) -> None:
    answer = shared_gateway.invoke("exec", {"command": "echo x > tried.txt", "trial": True})
    assert answer["ok"], answer
    result = answer["result"]
    assert result["changes"][0]["kind"] == "added" and result["trialId"] in result["content"]
    workspace = shared_gateway.home / "agents/main"
    assert not (workspace / "tried.txt").exists()
    kept = shared_gateway.request("POST", f"/v1/trials/{result['trialId']}/keep", body={})
    assert kept.status == 200, kept
    assert (workspace / "tried.txt").read_text() == "x\n"


def test_a_link_is_changed_itself_and_not_its_target(tried: Tried) -> None:
    (tried.root / "first").symlink_to("old.txt")
    (tried.root / "second").symlink_to("gone.txt")
    done = tried.trial("rm first; ln -sfn folder second")
    assert {change["kind"] for change in done["changes"]} == {"deleted", "changed"}
    status, answer = tried.end(done, "keep")
    assert status == 200, answer
    assert not (tried.root / "first").is_symlink() and os.readlink(tried.root / "second") == "folder"
    assert (tried.root / "old.txt").read_text() == "one\ntwo\n" and (tried.root / "gone.txt").read_text() == "bye\n"


@pytest.mark.parametrize(
    "command",
    [
        "for i in 1 2 3; do truncate -s 500M sparse$i; done",
        'python3 -c \'import os\nfor _ in range(1500): os.mkdir("d"); os.chdir("d")\'',
    ],
)
def test_what_could_not_be_kept_is_discarded(tried: Tried, command: str) -> None:
    message = tried.node.fails("Bash", {"command": command, "trial": True}, "failed")
    assert "trial discarded" in message


def test_a_kept_trial_does_not_place_a_steering_file(shared_gateway: GatewayProcess) -> None:
    made = shared_gateway.request("POST", "/v1/tokens", {"scopes": ["tools.exec"]}).json()
    answer = shared_gateway.invoke("exec", {"command": "echo x > own.txt; ln -s own.txt HEARTBEAT.md", "trial": True})
    trial = answer["result"]["trialId"]
    kept = shared_gateway.request("POST", f"/v1/trials/{trial}/keep", body={}, token=made["token"])
    assert kept.status == 403 and "HEARTBEAT.md" in kept.body.decode(), kept
    assert not (shared_gateway.home / "agents/main/own.txt").exists()


def test_a_cancelled_trial_can_be_discarded(tried: Tried) -> None:
    body = {
        "tool": "tried__Bash",
        "args": {"command": "echo x > new.txt; sleep 600", "trial": True},
        "timeout_ms": 3000,
    }
    ended = tried.gateway.request("POST", "/v1/tools/invoke", body).json()
    assert not ended["ok"], ended
    status, answer = tried.end({"trialId": ended["request_id"]}, "discard")
    assert (status, answer["state"]) == (200, "discarded"), answer
    assert not (tried.root / "new.txt").exists()


def test_a_policy_rule_makes_calls_trials(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    rules = """
[[policy.rules]]
name = "try first"
decision = "trial"
tool = ["Bash", "Write"]
node = "careful"
"""
    (home / "farhand.toml").write_text(rules)
    with GatewayProcess(home) as gateway, NodeProcess(gateway, tmp_path / "node", "careful") as node:
        for args in ({"command": "echo x > new.txt"}, {"command": "echo x > new.txt", "trial": False}):
            done = node.ok("Bash", args)
            assert [change["kind"] for change in done["changes"]] == ["added"]
            assert not (node.workspace / "new.txt").exists()
        message = node.fails("Write", {"path": "new.txt", "content": "x"}, "not_allowed")
        assert "only as a trial" in message and "try first" in message
        node.fails("Bash", {"command": "touch new.txt", "background": True}, "invalid_args")
        assert not (node.workspace / "new.txt").exists()
        explained = Command(home)("policy", "explain", "careful__Bash", "command=true", "--json").json()
        assert explained["decision"] == "trial"
        # A caller that may only run trials cannot keep one.
        made = gateway.request("POST", "/v1/tokens", {"scopes": ["tools.exec", "read"]}).json()
        keeping = {"trialId": done["trialId"], "action": "keep"}
        called = gateway.request(
            "POST", "/v1/tools/invoke", {"tool": "careful__Trial", "args": keeping}, token=made["token"]
        ).json()
        assert called["error"]["kind"] == "not_allowed" and "only as a trial" in called["error"]["message"], called
        refused = gateway.request("POST", f"/v1/trials/{done['trialId']}/keep", {}, token=made["token"])
        assert refused.status == 403 and not (node.workspace / "new.txt").exists()
        kept = gateway.request("POST", f"/v1/trials/{done['trialId']}/keep", {})
        assert kept.status == 200 and (node.workspace / "new.txt").read_text() == "x\n"


def test_an_approved_trial_is_not_an_approved_change(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    rules = """
[[policy.rules]]
decision = "allow"
tool = "box__Bash"
args = { trial = "true" }

[[policy.rules]]
name = "ask first"
decision = "ask"
tool = "box__Bash"
"""
    (home / "farhand.toml").write_text(rules)
    with GatewayProcess(home) as gateway, NodeProcess(gateway, tmp_path / "node", "box") as node:
        made = gateway.request("POST", "/v1/tokens", {"scopes": ["tools.exec", "approve", "read"]}).json()
        body = {"tool": "box__Bash", "args": {"command": "echo x > new.txt", "trial": True}, "background": True}
        call = gateway.request("POST", "/v1/tools/invoke", body, token=made["token"]).json()["request_id"]
        waiting = gateway.get("/v1/approvals")["approvals"]
        if waiting:  # the trial itself may be asked about
            answer = {"decision": "approve", "hash": waiting[0]["hash"]}
            assert gateway.request("POST", f"/v1/approvals/{waiting[0]['id']}", answer).status == 200
        assert node.end_of(call)["state"] == "ok"
        for keep in (
            lambda: gateway.request("POST", f"/v1/trials/{call}/keep", {}, token=made["token"]),
            lambda: gateway.request(
                "POST",
                "/v1/tools/invoke",
                {"tool": "box__Trial", "args": {"trialId": call, "action": "keep"}},
                token=made["token"],
            ),
        ):
            answer = keep()
            assert "ask first" in answer.body.decode(), answer
            assert not (node.workspace / "new.txt").exists()
        assert gateway.request("POST", f"/v1/trials/{call}/keep", {}).status == 200
        assert (node.workspace / "new.txt").read_text() == "x\n"


def test_rules_about_paths_hold_for_what_a_trial_changes(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    rule = '[[policy.rules]]\nname = "no secrets"\ndecision = "deny"\nargs = { path = "secrets/**" }\n'
    (home / "farhand.toml").write_text(rule)
    with GatewayProcess(home) as gateway, NodeProcess(gateway, tmp_path / "node", "box") as node:
        node.fails("Write", {"path": "secrets/key", "content": "x"}, "not_allowed")
        # On a node and on the gateway's own machine.
        for tool in ("box__Bash", "exec"):
            invoke = {"command": "mkdir -p secrets; echo x > secrets/key; echo y > open.txt", "trial": True}
            done = gateway.invoke(tool, invoke)["result"]
            folder = node.workspace if tool == "box__Bash" else home / "agents/main"
            for action in ("keep", "show"):
                refused = gateway.invoke("box__Trial", {"trialId": done["trialId"], "action": action})
                assert not refused["ok"], refused
            kept = gateway.request("POST", f"/v1/trials/{done['trialId']}/keep", {})
            assert kept.status == 403 and "no secrets" in kept.body.decode(), kept
            assert not (folder / "secrets").exists() and not (folder / "open.txt").exists()
            dropped = gateway.request("POST", f"/v1/trials/{done['trialId']}/discard", {})
            assert dropped.status == 200, dropped
            for command in ("echo y > open.txt", "true"):
                done = gateway.invoke(tool, {"command": command, "trial": True})["result"]
                kept = gateway.request("POST", f"/v1/trials/{done['trialId']}/keep", {})
                assert kept.status == 200, kept
            assert (folder / "open.txt").read_text() == "y\n"


def test_a_folder_that_became_a_link_shows_nothing_of_its_target(tried: Tried, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("outside the root\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "f").write_text("outside the root\n")
    for command in ("echo changed > d/f", "rm d/f", "rm -r d"):
        tried.node.ok("Bash", {"command": "mkdir -p d/sub; echo inside > d/f; echo inside > d/sub/f"})
        done = tried.trial(command)
        tried.node.ok("Bash", {"command": f"rm -r d && ln -s {tmp_path} d"})
        shown = tried.gateway.get(f"/v1/trials/{done['trialId']}")
        assert shown["changes"] == done["changes"]
        assert "inside" in str(shown) and "outside" not in str(shown).replace(str(tmp_path), "")
        status, answer = tried.end(done, "keep")
        assert status >= 400 and "outside the root" not in str(answer), answer
        assert (tmp_path / "f").read_text() == "outside the root\n"
        assert tried.end(done, "discard")[0] == 200
        tried.node.ok("Bash", {"command": "rm d"})


def test_a_name_that_is_not_utf8_ends_the_trial(tried: Tried) -> None:
    message = tried.node.fails("Bash", {"command": "touch \"$(printf '\\377')\"", "trial": True}, "failed")
    assert "not UTF-8" in message


def test_a_trial_that_writes_too_much_is_ended(tmp_path: Path, shared_gateway: GatewayProcess) -> None:
    root = tmp_path / "root"
    root.mkdir()
    options = ("--root", str(root), "--disk", "2M")
    with NodeProcess(shared_gateway, tmp_path / "node", "narrow", *options) as node:
        command = "for i in 1 2 3 4; do head -c 1000000 /dev/zero > f$i; done; sleep 1000"
        said = node.fails("Bash", {"command": command, "trial": True}, "failed")
        assert "trial discarded" in said and "at most 2097152" in said and os.listdir(root) == []


def test_trials_that_changed_nothing_take_no_place(tried: Tried) -> None:
    for _ in range(21):
        tried.trial("true")
    assert tried.end(tried.trial("echo x > new.txt"), "discard")[0] == 200
