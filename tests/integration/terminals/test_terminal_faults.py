"""Terminals survive what can happen to the programs around them."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.nodes.test_lent_folder_shell import LEVELS
from tests.support.harness import GatewayProcess, NodeProcess, Proxy, wait_until
from tests.support.terminal import TerminalViewer

PLAIN = "PS1='$ ' exec bash --norc --noprofile -i"


@pytest.fixture
def node(gateway: GatewayProcess, tmp_path: Path) -> Iterator[NodeProcess]:
    with NodeProcess(gateway, tmp_path, "hands") as process:
        yield process


def opened(gateway: GatewayProcess, command: str, **options: int) -> str:
    answer = gateway.request("POST", "/v1/terminals", {"node": "hands", "command": command, **options})
    assert answer.status == 200, answer
    return str(answer.json()["terminal_id"])


def test_vim_survives_a_kill_of_the_gateway_and_restarts_of_the_node(
    gateway: GatewayProcess, node: NodeProcess
) -> None:
    terminal = opened(gateway, "vim -u NONE -N -n -c 'set noshowcmd' notes.txt", cols=60, rows=12)
    with TerminalViewer(gateway, terminal, 0) as viewer:
        viewer.sees("notes.txt")
        viewer.type("ibefore the kill")
        viewer.sees("before the kill")
        gateway.kill()
        viewer.ended()
        reached, output = viewer.offset, viewer.output
    gateway.start()
    gateway.wait_for_node("hands")
    # The offset at which the first connection ended continues it without a gap.
    with TerminalViewer(gateway, terminal, 0) as viewer:
        assert viewer.hello["offset"] == 0 and (viewer.hello["cols"], viewer.hello["rows"]) == (60, 12)
        viewer.sees("before the kill")
        assert viewer.output.startswith(output) and len(viewer.output) >= reached
        viewer.type(", after it")
        viewer.sees("before the kill, after it")
        # The node program is killed, and started again; the viewer stays connected.
        node.stop(signal.SIGKILL)
        assert viewer.message("node") == {"type": "node", "online": False}
        node.start()
        wait_until(lambda: viewer.messages[-1] == {"type": "node", "online": True}, what="the node is back")
        viewer.resize(50, 10)
        viewer.type(", and later")
        viewer.sees("before the kill, after it, and later")
        wait_until(lambda: len(viewer.lines) == 10 and "INSERT" in viewer.lines[9], what="the smaller screen")
        node.stop()  # as a service is restarted
        node.start()
        viewer.type("\x1b:wq\r")
        assert viewer.message("exit") == {"type": "exit", "exit_code": 0, "signal": None}
    assert (node.workspace / "notes.txt").read_text() == "before the kill, after it, and later\n"


def test_a_lost_link_leaves_no_gap(gateway: GatewayProcess, tmp_path: Path) -> None:
    with (
        Proxy(gateway.port) as proxy,
        NodeProcess(gateway, tmp_path, "hands", url=f"http://127.0.0.1:{proxy.port}") as node,
    ):
        script = "stty -onlcr; for i in $(seq 1 200); do echo line $i; sleep 0.01; done; touch written; cat"
        terminal = opened(gateway, script)
        with TerminalViewer(gateway, terminal, 0) as viewer:
            wait_until(lambda: b"line 20\n" in viewer.output, what="the first lines")
            proxy.cut(refuse=True)
            wait_until((node.workspace / "written").exists, what="the end of the lines, unseen")
            proxy.admit()
            wait_until(lambda: b"line 200\n" in viewer.output, what="the last line")
            assert viewer.output == b"".join(b"line %d\n" % number for number in range(1, 201))


def test_a_frozen_gateway_has_no_terminals(gateway: GatewayProcess, node: NodeProcess) -> None:
    terminal = opened(gateway, PLAIN)
    with TerminalViewer(gateway, terminal, 0) as viewer:
        viewer.type("echo rea''dy\r")
        viewer.sees("ready")
        assert gateway.request("POST", "/v1/freeze", {}).status == 200
        assert viewer.message("exit") == {"type": "exit", "exit_code": None, "signal": "SIGKILL"}
    answer = gateway.request("POST", "/v1/terminals", {"node": "hands"})
    assert answer.status in (403, 423) and b"frozen" in answer.body.lower(), answer
    assert upgraded(gateway, terminal) == 423


def upgraded(gateway: GatewayProcess, terminal: str, **headers: str) -> int:
    """The status of an upgrade with these headers, in which `_` stands for `-`."""
    sent = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        **({} if headers else {"Authorization": f"Bearer {gateway.token}"}),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    return gateway.request("GET", f"/v1/terminals/{terminal}/ws", token=None, headers=sent).status


@pytest.mark.parametrize(
    ("limit", "reason"),
    [(("--read-only",), "read-only"), (("--deny-tool", "Bash"), "--deny-tool Bash")],
)
def test_the_limits_of_the_machine_hold(
    gateway: GatewayProcess, tmp_path: Path, limit: tuple[str, ...], reason: str
) -> None:
    with NodeProcess(gateway, tmp_path, "hands", *limit):
        answer = gateway.request("POST", "/v1/terminals", {"node": "hands", "command": "id"})
        assert answer.status == 403 and reason in answer.json()["error"]["message"], answer


@pytest.mark.parametrize("level", LEVELS)
def test_a_node_that_lends_a_folder_confines_its_terminals(gateway: GatewayProcess, tmp_path: Path, level: str) -> None:
    lent, other = tmp_path / "lent", tmp_path / "other"
    lent.mkdir()
    other.mkdir()
    with NodeProcess(gateway, tmp_path, "hands", "--root", str(lent), "--sandbox", level):
        opened = gateway.request("POST", "/v1/terminals", {"node": "hands"}).json()
        with TerminalViewer(gateway, opened["terminal_id"], 0) as viewer:
            viewer.type(f"echo x > {other}/file; echo y > in; echo tri''ed\r")
            viewer.sees("tried")
            viewer.type("sleep 1000 && echo slept\r")
            viewer.sees("sleep 1000 &&")
            viewer.type(b"\x03")
            viewer.type("cat /proc/[0-9]*/cmdline | tr '\\0' ' '; echo; echo se''en\r")
            viewer.sees("seen")
            assert str(gateway.home).encode() not in viewer.output
            viewer.type("exit 3\r")
            assert viewer.message("exit") == {"type": "exit", "exit_code": 3, "signal": None}
        assert (lent / "in").exists() and not (other / "file").exists()


def test_limits_that_came_later_hold_for_input(gateway: GatewayProcess, node: NodeProcess, tmp_path: Path) -> None:
    terminal = opened(gateway, PLAIN)
    node.stop()
    with NodeProcess(gateway, tmp_path, "hands", "--read-only"), TerminalViewer(gateway, terminal) as viewer:
        viewer.type("touch forbidden\r")
        code, reason = viewer.ended()
        assert code == 4403 and "read-only" in reason
    assert not (node.workspace / "forbidden").exists()


class TestWhoMayAttach:
    """One gateway with a policy for all of them."""

    @pytest.fixture(scope="class")
    def place(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
        folder = tmp_path_factory.mktemp("policy")
        home = folder / "home"
        home.mkdir(mode=0o700)
        (home / "farhand.toml").write_text(
            '[[policy.rules]]\nname = "no secrets"\ntool = "*__Bash"\nargs = { command = "*secret*" }\n'
            'decision = "deny"\n\n[[policy.rules]]\nname = "ask"\ntool = "*__Bash"\nargs = { command = "*ask*" }\n'
            'decision = "ask"\nseconds = 60\n'
        )
        with GatewayProcess(home) as gateway, NodeProcess(gateway, folder, "hands"):
            yield gateway

    def token(self, gateway: GatewayProcess, **options: object) -> str:
        answer = gateway.request("POST", "/v1/tokens", {"scopes": ["tools.exec"], **options})
        assert answer.status == 201, answer
        return str(answer.json()["token"])

    def test_policy_and_approvals_hold(self, place: GatewayProcess) -> None:
        answer = place.request("POST", "/v1/terminals", {"node": "hands", "command": "cat secret"})
        assert answer.status == 403 and "no secrets" in answer.json()["error"]["message"]
        token = self.token(place)

        answers: list[object] = []
        body = {"node": "hands", "command": "echo ask; cat"}
        thread = threading.Thread(
            target=lambda: answers.append(place.request("POST", "/v1/terminals", body, token=token))
        )
        thread.start()
        approval = wait_until(
            lambda: place.get("/v1/approvals?state=pending")["approvals"], what="the question to the owner"
        )[0]
        assert "terminal" in str(approval)
        decided = place.request(
            "POST", f"/v1/approvals/{approval['id']}", {"decision": "approve", "hash": approval["hash"]}
        )
        assert decided.status == 200, decided
        thread.join(60)
        terminal = answers[0].json()["terminal_id"]  # type: ignore[attr-defined]
        with TerminalViewer(place, terminal, 0, token=token) as viewer:  # approved once is enough for its opener
            viewer.sees("ask")
        with TerminalViewer(place, terminal, 0, token=self.token(place)) as viewer:
            code, reason = viewer.ended()
            assert code == 4403 and "ask" in reason

    def test_a_narrow_token_stays_where_it_is(self, place: GatewayProcess) -> None:
        terminal = place.request("POST", "/v1/terminals", {"node": "hands", "command": "cat"}).json()["terminal_id"]
        for narrow, status in (({"tools": ["hands__Read"]}, 403), ({"nodes": ["elsewhere"]}, 404)):
            token = self.token(place, **narrow)
            answer = place.request("POST", "/v1/terminals", {"node": "hands", "command": "id"}, token=token)
            assert answer.status == 403, answer
            with TerminalViewer(place, terminal, 0, token=token) as viewer:
                assert viewer.ended()[0] == 4000 + status
            assert place.request("DELETE", f"/v1/terminals/{terminal}", token=token).status == status
        bash = self.token(place, tools=["hands__Bash"])
        with TerminalViewer(place, terminal, 0, token=bash) as viewer:
            viewer.type("hello\r")
            viewer.sees("hello")
        reader = self.token(place, scopes=["read"])
        assert place.request("POST", "/v1/terminals", {"node": "hands"}, token=reader).status == 403
        assert upgraded(place, terminal, Authorization=f"Bearer {reader}") == 403

    def test_a_revoked_token_is_disconnected(self, place: GatewayProcess) -> None:
        made = place.request("POST", "/v1/tokens", {"scopes": ["tools.exec"]}).json()
        terminal = place.request("POST", "/v1/terminals", {"node": "hands", "command": "cat"}).json()["terminal_id"]
        with TerminalViewer(place, terminal, 0, token=made["token"]) as viewer:
            assert place.request("DELETE", f"/v1/tokens/{made['id']}").status == 200
            assert viewer.ended()[0] == 4401

    def test_a_page_needs_its_own_secret_and_origin(self, place: GatewayProcess) -> None:
        terminal = place.request("POST", "/v1/terminals", {"node": "hands", "command": "cat"}).json()["terminal_id"]
        page = place.sign_in()
        cookie, secret = page["Cookie"], page["X-Farhand-Page"]
        own, protocol = f"http://127.0.0.1:{place.port}", "Sec_WebSocket_Protocol"
        offered = {"Cookie": cookie, "Origin": own, protocol: f"farhand.terminal, page.{secret}"}
        assert upgraded(place, terminal, **offered) == 101
        assert upgraded(place, terminal, **{**offered, "Origin": "http://evil.example"}) == 403
        assert upgraded(place, terminal, **{**offered, "Host": "evil.example"}) == 403
        assert upgraded(place, terminal, **{**offered, protocol: "farhand.terminal"}) == 401
        assert upgraded(place, terminal, **{**offered, protocol: "farhand.terminal, page.wrong"}) == 401
        assert upgraded(place, terminal, **{"Origin": own, protocol: f"farhand.terminal, page.{secret}"}) == 401
        token = base64.urlsafe_b64encode(place.token.encode()).decode().rstrip("=")
        assert upgraded(place, terminal, **{protocol: f"farhand.terminal, bearer.{token}"}) == 101
        assert upgraded(place, terminal, **{protocol: "farhand.terminal, bearer.wrong"}) == 401

    def test_there_is_a_limit_of_viewers(self, place: GatewayProcess) -> None:
        terminal = place.request("POST", "/v1/terminals", {"node": "hands", "command": "cat"}).json()["terminal_id"]
        with contextlib.ExitStack() as stack:
            for _ in range(16):
                stack.enter_context(TerminalViewer(place, terminal, 0))
            code, reason = stack.enter_context(TerminalViewer(place, terminal, 0)).ended()
            assert code == 1011 and "16 viewers" in reason
        with TerminalViewer(place, terminal, 0) as viewer:
            assert viewer.hello


def test_the_id_of_a_process_is_not_lost(gateway: GatewayProcess, node: NodeProcess) -> None:
    answer = gateway.request("POST", "/v1/terminals", {"node": "hands", "command": "exec sleep 1000"}).json()
    program = Path(f"/proc/{answer['pid']}/cmdline")
    wait_until(lambda: program.read_bytes().startswith(b"sleep"), 20, "the program that replaces the shell")
    os.kill(answer["pid"], signal.SIGTERM)
    with TerminalViewer(gateway, answer["terminal_id"]) as viewer:
        assert viewer.message("exit") == {"type": "exit", "exit_code": None, "signal": "SIGTERM"}
