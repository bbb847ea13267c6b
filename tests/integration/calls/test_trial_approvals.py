"""`ask` rules with `preview = "trial"`: the owner sees what the command did, and approving it keeps exactly that."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farhand.machine.sandbox.launcher import landlock_version
from tests.integration.calls.test_approvals import answer, ask, asked, end_of, made, write_policy
from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess, NodeProcess, wait_until

pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None and landlock_version() < 1, reason="this machine has neither bubblewrap nor Landlock"
)

TRY = """
[[policy.rules]]
name = "commands are tried"
decision = "ask"
preview = "trial"
tool = ["Bash", "exec", "Write"]
"""


class Lent:
    def __init__(self, gateway: GatewayProcess, node: NodeProcess, root: Path) -> None:
        self.gateway, self.node, self.root = gateway, node, root

    def ask(self, command: str, **more: Any) -> Any:
        return ask(self.gateway, f"{self.node.node_id}__Bash", {"command": command, **more})

    def trial_of(self, approval: Any) -> Any:
        return self.gateway.get(f"/v1/trials/{approval['trial_id']}")

    def state_is(self, approval: Any, state: str) -> None:
        wait_until(lambda: self.trial_of(approval)["state"] == state, 30, f"the trial is {state}")


@pytest.fixture(scope="module")
def lent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lent]:
    home = tmp_path_factory.mktemp("trying") / "home"
    write_policy(home, TRY)
    folder = tmp_path_factory.mktemp("tried")
    root = folder / "root"
    root.mkdir()
    with (
        GatewayProcess(home) as gateway,
        NodeProcess(gateway, folder / "node", "lent", "--root", str(root)) as node,
    ):
        yield Lent(gateway, node, root)


COUNT = 'echo ran; n=$(cat runs 2>/dev/null || echo 0); echo $((n+1)) > runs; echo "$RANDOM$(date +%N)" > once'


def test_the_approver_sees_the_changes_and_approving_keeps_exactly_them(lent: Lent) -> None:
    (lent.root / "old.txt").write_text("one\n")
    (lent.root / "gone.txt").write_text("bye\n")
    (lent.root / "runs").unlink(missing_ok=True)
    approval = lent.ask(COUNT + "; echo two >> old.txt; rm gone.txt; mkdir made")
    assert "+two\n" in approval["diff"] and "-bye\n" in approval["diff"], approval
    assert {Path(one["path"]).name for one in approval["files"]} == {"runs", "once", "old.txt", "gone.txt", "made"}
    assert f"{lent.root}/made: added" in approval["note"]
    assert approval["output"] == "ran\n" and "exit code 0" in approval["summary"]
    assert (lent.root / "old.txt").read_text() == "one\n" and not (lent.root / "runs").exists()
    once = next(one for one in approval["files"] if one["path"].endswith("once"))["diff"]
    printed = Command(lent.gateway.home)("approvals", "show", approval["id"]).out
    assert "+two" in printed and "output of the trial" in printed.lower(), printed
    assert answer(lent.gateway, approval).status == 200
    end = end_of(lent.gateway, approval)
    assert end["state"] == "ok" and end["tool"] == "lent__Bash", end
    assert end["result"]["output"] == "ran\n" and end["result"]["exitCode"] == 0 and end["result"]["state"] == "kept"
    assert (lent.root / "runs").read_text() == "1\n", "it did not run a second time"
    assert f"+{(lent.root / 'once').read_text()}" in once, "what was kept is what was shown"
    assert not (lent.root / "gone.txt").exists() and (lent.root / "made").is_dir()
    undone = lent.gateway.request("POST", f"/v1/calls/{approval['call_id']}/undo", body={}).json()
    assert undone["ok"] is True and (lent.root / "gone.txt").read_text() == "bye\n"


def test_denying_discards_the_trial(lent: Lent) -> None:
    approval = lent.ask("echo no > denied.txt")
    answer(lent.gateway, approval, "deny")
    assert end_of(lent.gateway, approval)["state"] == "denied"
    lent.state_is(approval, "discarded")
    assert not (lent.root / "denied.txt").exists()


def test_a_change_meanwhile_applies_nothing(lent: Lent) -> None:
    (lent.root / "raced.txt").write_text("a\n")
    approval = lent.ask("echo b >> raced.txt; echo c > beside.txt")
    (lent.root / "raced.txt").write_text("mine\n")
    answer(lent.gateway, approval)
    end = end_of(lent.gateway, approval)
    assert end["state"] == "error" and "conflict" in end["error"]["message"], end
    assert (lent.root / "raced.txt").read_text() == "mine\n" and not (lent.root / "beside.txt").exists()
    lent.state_is(approval, "discarded")


def test_a_call_that_cannot_be_tried_is_asked_about_with_the_reason(lent: Lent) -> None:
    approval = lent.ask("true", background=True)
    assert approval["trial_id"] is None and "could not be tried" in approval["note"], approval
    assert "Approving runs it for real" in approval["note"]
    answer(lent.gateway, approval, "deny")
    written = ask(lent.gateway, "lent__Write", {"path": str(lent.root / "w.txt"), "content": "x\n"})
    assert "cannot run as a trial" in written["note"] and "+x" in written["diff"]
    answer(lent.gateway, written)
    assert end_of(lent.gateway, written)["state"] == "ok" and (lent.root / "w.txt").exists()


def test_the_caller_neither_sees_nor_keeps_the_trial(lent: Lent) -> None:
    token = made(lent.gateway, "tools.exec", "read")
    call = {"tool": "lent__Bash", "args": {"command": "echo mine > caller.txt"}, "background": True}
    begun = lent.gateway.request("POST", "/v1/tools/invoke", call, token=token).json()
    approval = asked(lent.gateway, begun["request_id"])
    for action in ("keep", "discard"):
        refused = lent.gateway.request("POST", f"/v1/trials/{approval['trial_id']}/{action}", {}, token=token)
        assert refused.status == 403, refused.json()
    for spelled in (action, action.upper()):
        direct = {"tool": "lent__Trial", "args": {"trialId": approval["trial_id"], "action": spelled}}
        assert lent.gateway.request("POST", "/v1/tools/invoke", direct, token=token).json()["ok"] is False
    assert lent.gateway.request("GET", f"/v1/trials/{approval['trial_id']}", token=token).status == 403
    assert not (lent.root / "caller.txt").exists() and lent.trial_of(approval)["state"] == "ready"
    assert lent.gateway.request("DELETE", f"/v1/calls/{approval['call_id']}", token=token).status < 500
    lent.gateway.request("POST", f"/v1/calls/{approval['call_id']}/cancel", {}, token=token)
    answer(lent.gateway, approval, "deny")
    lent.state_is(approval, "discarded")


def test_the_gateways_own_machine_tries_too(lent: Lent) -> None:
    workspace = lent.gateway.home / "agents" / "main"
    approval = ask(lent.gateway, "exec", {"command": "echo own > own.txt; echo said"})
    assert approval["trial_id"] and "+own" in approval["diff"] and "said" in approval["output"], approval
    assert not (workspace / "own.txt").exists()
    answer(lent.gateway, approval)
    end = end_of(lent.gateway, approval)
    assert end["state"] == "ok" and "said" in end["result"]["content"], end
    assert (workspace / "own.txt").read_text() == "own\n"


def test_a_trial_survives_restarts_of_gateway_and_node(tmp_path: Path) -> None:
    home, root = tmp_path / "home", tmp_path / "root"
    root.mkdir()
    write_policy(home, TRY)
    go = root / "go"
    with (
        GatewayProcess(home) as gateway,
        NodeProcess(gateway, tmp_path / "node", "lent", "--root", str(root)) as node,
    ):
        lent = Lent(gateway, node, root)
        # Asked about before everything restarts, and answered after.
        early = lent.ask("echo early >> early.txt")
        # Still trying when everything restarts.
        slow = gateway.invoke(
            "lent__Bash", {"command": "until [ -e go ]; do sleep 0.1; done; echo slow > slow.txt"}, background=True
        )
        running = wait_until(
            lambda: [one for one in gateway.get("/v1/calls?state=running")["calls"] if one["tool"] == "lent__Bash"],
            30,
            "the trial runs",
        )
        assert gateway.request("GET", f"/v1/approvals/{slow['request_id']}").status == 404
        gateway.stop(9)
        node.kill()
        go.touch()
        gateway.start()
        node.start()
        answer(gateway, early)
        assert end_of(gateway, early)["state"] == "ok" and (root / "early.txt").read_text() == "early\n"
        late = asked(gateway, slow["request_id"])
        assert late["trial_id"] == running[0]["id"] and "+slow" in late["diff"], late
        assert not (root / "slow.txt").exists()
        node.stop()
        answer(gateway, late)
        assert gateway.get(f"/v1/calls/{slow['request_id']}")["state"] == "waiting"
        node.start()
        assert end_of(gateway, late)["state"] == "ok" and (root / "slow.txt").read_text() == "slow\n"


def test_no_answer_discards_the_trial(tmp_path: Path) -> None:
    home, root = tmp_path / "home", tmp_path / "root"
    root.mkdir()
    write_policy(home, TRY + "seconds = 3\n")
    with (
        GatewayProcess(home) as gateway,
        NodeProcess(gateway, tmp_path / "node", "lent", "--root", str(root)) as node,
    ):
        lent = Lent(gateway, node, root)
        approval = lent.ask("echo x > x.txt")
        assert end_of(gateway, approval)["state"] == "denied"
        lent.state_is(approval, "discarded")
        assert not (root / "x.txt").exists()


def test_a_node_without_a_sandbox_says_so(tmp_path: Path) -> None:
    home = tmp_path / "home"
    write_policy(home, TRY)
    with (
        GatewayProcess(home) as gateway,
        # Neither bubblewrap nor namespaces: what trials need is denied.
        NodeProcess(gateway, tmp_path / "node", "bare", "--deny-tool", "Trial") as node,
    ):
        approval = ask(gateway, f"{node.node_id}__Bash", {"command": "echo real > real.txt"})
        assert approval["trial_id"] is None and "could not be tried" in approval["note"], approval
        answer(gateway, approval)
        assert end_of(gateway, approval)["state"] == "ok" and (node.workspace / "real.txt").exists()
