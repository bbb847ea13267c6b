"""Long transfers use their own connections, and work without them where that is not possible."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.harness import FilesProxy, GatewayProcess, TwoNodes, behind, wait_until

MIB = 1024 * 1024
LONG = 12 * MIB


class Scene(TwoNodes):
    def begin(self, size: int) -> tuple[str, bytes]:
        content = random.Random(size).randbytes(size)
        (self.left.workspace / "source").write_bytes(content)
        (self.right.workspace / "target").unlink(missing_ok=True)
        body = {"source": "left:source", "destination": "right:target", "background": True}
        answer = self.gateway.request("POST", "/v1/transfers", body)
        assert answer.status == 202, answer
        return str(answer.json()["id"]), content

    def holds(self, transfer_id: str, content: bytes) -> None:
        end = self.end_of(transfer_id)
        assert end["state"] == "ok", end
        assert (self.right.workspace / "target").read_bytes() == content
        assert not list(self.right.workspace.rglob(".farhand-*"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with contextlib.ExitStack() as stack:
        yield Scene(tmp_path_factory.mktemp("files"), stack)


@pytest.fixture
def scene(shared: Scene) -> Iterator[Scene]:
    for proxy in shared.proxies:
        proxy.tried = proxy.moved = 0
    yield shared
    for proxy in shared.proxies:
        proxy.refusing, proxy.pace = False, 0.0


def test_a_long_file_takes_connections_of_its_own(scene: Scene) -> None:
    scene.holds(*scene.begin(LONG))
    assert [proxy.tried for proxy in scene.proxies] == [1, 1]
    assert scene.proxies[0].moved > LONG


def test_a_folder_of_that_size_does_too(scene: Scene) -> None:
    tree = scene.left.workspace / "tree"
    (tree / "sub").mkdir(parents=True)
    for number in range(40):
        (tree / "sub" / f"{number}").write_bytes(os.urandom(MIB // 4 + number))
    answer = scene.gateway.invoke("gsv__Transfer", {"source": "left:tree", "destination": "right:tree"})
    assert answer["ok"], answer
    for number in range(40):
        one = Path("sub", str(number))
        assert (scene.right.workspace / "tree" / one).read_bytes() == (tree / one).read_bytes()
    assert scene.proxies[0].moved > 10 * MIB


def test_a_short_one_takes_the_node_socket(scene: Scene) -> None:
    scene.holds(*scene.begin(3 * MIB))
    assert [proxy.tried for proxy in scene.proxies] == [0, 0]


@pytest.mark.parametrize("refused", [(True, False), (False, True), (True, True)])
def test_an_end_without_its_own_connection_uses_the_node_socket(scene: Scene, refused: tuple[bool, bool]) -> None:
    for proxy, refusing in zip(scene.proxies, refused, strict=True):
        proxy.refusing = refusing
    scene.holds(*scene.begin(LONG))
    assert scene.proxies[0].tried == 1 and scene.proxies[1].tried == (not refused[0])
    assert scene.proxies[0].moved < MIB


@pytest.mark.parametrize("end", [0, 1])
def test_one_that_breaks_is_made_good_by_the_node_socket(scene: Scene, end: int) -> None:
    scene.proxies[0].pace = 0.05
    begun, content = scene.begin(3 * LONG)
    wait_until(lambda: scene.proxies[0].moved > 8 * MIB, 30, "some of it is on its way")
    scene.proxies[end].cut_files()
    scene.holds(begun, content)
    assert scene.gateway.get("/v1/nodes")["nodes"][0]["online"]
    assert scene.proxies[0].tried == 1, "between these two connections it broke once, and is not tried again"
    assert scene.proxies[0].moved < 3 * LONG


def test_on_the_node_socket_a_suspended_receiver_delays_no_call(scene: Scene) -> None:
    """More is under way than the sockets hold, so the gateway has to keep some of it, and to send it in parts."""
    scene.proxies[0].refusing = True
    content = os.urandom(MIB) * 64
    (scene.left.workspace / "small").write_text("small\n")
    begun: list[str] = []
    for name in ("still-1", "still-2"):
        (scene.left.workspace / name).write_bytes(content)
        body = {"source": f"left:{name}", "destination": f"right:{name}", "background": True}
        begun.append(scene.gateway.request("POST", "/v1/transfers", body).json()["id"])
    for each in begun:
        path = f"/v1/transfers/{each}"
        wait_until(partial(lambda path: scene.gateway.get(path)["bytesTransferred"], path), 20, "it moves")
    assert scene.right.process is not None
    scene.right.process.send_signal(signal.SIGSTOP)
    try:
        for _ in range(20):
            assert scene.gateway.invoke("left__Read", {"path": "small"})["ok"]
    finally:
        scene.right.process.send_signal(signal.SIGCONT)
    for each in begun:
        assert scene.end_of(each)["state"] == "ok"
    for name in ("still-1", "still-2"):
        assert (scene.right.workspace / name).read_bytes() == content


def test_a_cancelled_one_ends_its_connections(scene: Scene) -> None:
    scene.proxies[0].pace = 0.2
    (scene.right.workspace / "target").unlink(missing_ok=True)
    begun, _ = scene.begin(3 * LONG)
    wait_until(lambda: scene.proxies[0].moved > MIB, 30, "some of it is on its way")
    assert scene.gateway.request("DELETE", f"/v1/transfers/{begun}").json()["state"] == "cancelled"
    wait_until(lambda: not list(scene.right.workspace.rglob(".farhand-*")), 20, "nothing left behind")
    assert not (scene.right.workspace / "target").exists()
    sent = scene.proxies[0].moved
    time.sleep(0.3)  # the sender has stopped when nothing more comes
    assert scene.proxies[0].moved <= sent + MIB
    scene.proxies[0].pace = 0.0
    scene.holds(*scene.begin(LONG))


def test_many_at_once_arrive(scene: Scene) -> None:
    contents = {f"many-{number}": os.urandom(5 * MIB + number) for number in range(12)}
    for name, content in contents.items():
        (scene.left.workspace / name).write_bytes(content)
    begun: list[str] = []
    for name in contents:
        body = {"source": f"left:{name}", "destination": f"right:{name}", "background": True}
        begun.append(scene.gateway.request("POST", "/v1/transfers", body).json()["id"])
    for each in begun:
        assert scene.end_of(each)["state"] == "ok"
    for name, content in contents.items():
        assert (scene.right.workspace / name).read_bytes() == content
    assert scene.proxies[0].tried == len(contents)


def test_from_a_node_to_itself(scene: Scene) -> None:
    content = os.urandom(LONG)
    (scene.left.workspace / "here").write_bytes(content)
    answer = scene.gateway.invoke("gsv__Transfer", {"source": "left:here", "destination": "left:there"})
    assert answer["ok"], answer
    assert (scene.left.workspace / "there").read_bytes() == content
    assert scene.proxies[0].tried == 2


def test_a_failing_disk_is_reported_and_not_taken_for_a_lost_link(scene: Scene) -> None:
    (scene.right.workspace / "folder").mkdir(exist_ok=True)
    (scene.right.workspace / "folder" / "in").write_text("the way")
    (scene.left.workspace / "source").write_bytes(os.urandom(LONG))
    body = {"source": "left:source", "destination": "right:folder/in/deeper"}
    answer = scene.gateway.invoke("gsv__Transfer", body)
    assert answer["ok"] is False and "folder/in" in answer["error"]["message"], answer


def test_one_that_carries_nothing_any_more_is_given_up_and_the_transfer_continues(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        gateway = GatewayProcess(tmp_path / "home")
        hurry = "import farhand.gateway.transfers.transfers as t; t.IDLE_SECONDS = 2.0"
        hurry += "; from farhand.cli.main import main; main()"
        gateway._command[1:3] = ["-c", hurry]
        stack.enter_context(gateway)
        proxy = stack.enter_context(FilesProxy(gateway.port))
        node = stack.enter_context(behind(proxy, gateway, tmp_path / "node", "node"))
        (node.workspace / "source").write_bytes(os.urandom(3 * LONG))
        proxy.pace = 0.05
        body = {"source": "node:source", "destination": "node:target", "background": True}
        path = f"/v1/transfers/{gateway.request('POST', '/v1/transfers', body).json()['id']}"
        wait_until(lambda: proxy.moved > 4 * MIB, 20, "some of it is on its way")
        proxy.swallowing = True
        wait_until(lambda: gateway.get(path)["state"] != "running", 60, "the end")
        assert gateway.get(path)["state"] == "ok", gateway.get(path)
        assert (node.workspace / "target").read_bytes() == (node.workspace / "source").read_bytes()


# -- strangers ------------------------------------------------------------------------------------------------


def upgrade(gateway: GatewayProcess, *more: str, source: str = "127.0.0.1") -> bytes:
    """The first line of the answer, and how the connection ended."""
    port = gateway.port
    lines = [
        "GET /v1/nodes/files HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        *more,
        "",
        "",
    ]
    with socket.create_connection(("127.0.0.1", port), 10, source_address=(source, 0)) as connection:
        connection.sendall("\r\n".join(lines).encode())
        return connection.recv(4096).partition(b"\r\n")[0]


@pytest.mark.parametrize("more", [(), ("Authorization: Bearer nonsense",), ("Authorization: Basic abc",)])
def test_a_connection_without_a_ticket_is_refused(tmp_path: Path, more: tuple[str, ...]) -> None:
    with contextlib.ExitStack() as stack:
        scene = Scene(tmp_path, stack)
        assert upgrade(scene.gateway, *more).startswith(b"HTTP/1.1 401 ")
        assert upgrade(scene.gateway, f"Authorization: Bearer {scene.gateway.token}").startswith(b"HTTP/1.1 401 ")


def test_a_page_of_another_origin_does_not_get_that_far(scene: Scene) -> None:
    assert upgrade(scene.gateway, "Origin: https://evil.example").startswith(b"HTTP/1.1 403 ")


class Listening(FilesProxy):
    """Keeps the tickets that pass."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.tickets: list[str] = []

    def asked(self, head: bytes) -> None:
        self.tickets.append(head.partition(b"Bearer ")[2].partition(b"\r")[0].decode())


def test_a_ticket_admits_once(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        gateway = stack.enter_context(GatewayProcess(tmp_path / "home"))
        proxy = Listening(gateway.port)
        stack.enter_context(proxy)
        node = stack.enter_context(behind(proxy, gateway, tmp_path / "node", "node"))
        (node.workspace / "source").write_bytes(os.urandom(3 * LONG))
        proxy.pace = 0.05
        body = {"source": "node:source", "destination": "node:target", "background": True}
        begun = gateway.request("POST", "/v1/transfers", body).json()
        wait_until(lambda: len(proxy.tickets) == 2, 20, "both tickets are used")
        for ticket in proxy.tickets:
            assert upgrade(gateway, f"Authorization: Bearer {ticket}").startswith(b"HTTP/1.1 401 ")
        path = f"/v1/transfers/{begun['id']}"
        wait_until(lambda: gateway.get(path)["state"] == "ok", 60, "the transfer does not mind")
        assert (node.workspace / "target").read_bytes() == (node.workspace / "source").read_bytes()


def test_a_ticket_is_good_from_where_its_node_is(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        gateway = stack.enter_context(GatewayProcess(tmp_path / "home"))
        proxy = Listening(gateway.port)
        stack.enter_context(proxy)
        proxy.refusing, proxy.pace = True, 0.05
        node = stack.enter_context(behind(proxy, gateway, tmp_path / "node", "node"))
        (node.workspace / "source").write_bytes(os.urandom(3 * LONG))
        body = {"source": "node:source", "destination": "node:target", "background": True}
        begun = gateway.request("POST", "/v1/transfers", body).json()
        wait_until(lambda: proxy.tickets, 20, "an unusable ticket")
        mine = f"Authorization: Bearer {proxy.tickets[0]}"
        assert upgrade(gateway, mine, source="127.0.0.2").startswith(b"HTTP/1.1 401 ")
        assert upgrade(gateway, mine).startswith(b"HTTP/1.1 101 ")
        wait_until(
            lambda: gateway.get(f"/v1/transfers/{begun['id']}")["state"] == "ok", 60, "the transfer does not mind"
        )
        assert (node.workspace / "target").read_bytes() == (node.workspace / "source").read_bytes()
