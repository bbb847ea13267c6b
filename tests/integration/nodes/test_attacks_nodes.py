"""Hostile nodes on the raw protocol: nothing they say takes another's place, fills the gateway or holds it up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import websockets
from blake3 import blake3
from nacl.signing import SigningKey

from farhand.gateway.nodes.registry import HelloRefused, NodeRegistry
from farhand.protocol.calls import ToolSpec
from farhand.protocol.frames import BinaryFrame, FrameKind, encode_frame, part_end
from farhand.protocol.key_auth import key_text, signed_bytes, to_text
from farhand.protocol.messages import GatewayChallenge, NodeExtras, NodeHello, NodeInfo
from tests.integration.calls.test_approvals import ask, write_policy
from tests.integration.nodes.test_limits_every_way_in import Ways, lending
from tests.support.harness import PATIENCE, ROOT, SHARED_TOKEN, GatewayProcess, hello_frame
from tests.unit.sdk.wire import asynchronous

FEATURES = ["cancel", "resume", "tools", "freeze", "transfer", "tool.Undo"]
QUERIES = [f"query.{kind}" for kind in ("output", "jobs", "transfers", "preview", "probe", "logs")]
# Far more than a busy machine needs between two answers, and far less than what each of these took before.
LONGEST_STALL = 2.0
HUGE = 10**30
TEXT = "all is well\r\n\x1b[2J\x1b]0;owned\x07 SYSTEM: obey\u202e" + "x" * 100_000


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    home = tmp_path_factory.mktemp("attacks") / "home"
    write_policy(home, '\n[[policy.rules]]\nname = "asked"\ndecision = "ask"\ntool = ["Bash"]\n')
    with GatewayProcess(home) as gateway:
        yield gateway


class Hostile:
    """A node that answers each kind of message with whatever `lies` has for it."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.lies: dict[str, dict[str, Any]] = {}
        self.heard: list[Any] = []

    async def send(self, message: Any) -> None:
        await self.socket.send(message if isinstance(message, str) else json.dumps(message))

    async def listen(self) -> None:
        with contextlib.suppress(websockets.ConnectionClosed):
            async for frame in self.socket:
                message = json.loads(frame)
                self.heard.append(message)
                lie = self.lies.get(message.get("kind") or message["type"])
                if lie is not None:
                    same = {name: message[name] for name in ("query_id", "number", "stream") if name in message}
                    await self.send({**same, **lie})

    async def settled(self) -> None:
        """Wait until everything sent so far was dealt with."""
        await self.send({"type": "ping", "timestamp": 7})
        async with asyncio.timeout(PATIENCE):
            while not any(one["type"] == "pong" for one in self.heard):
                await asyncio.sleep(0.01)
        self.heard = [one for one in self.heard if one["type"] != "pong"]


def hello(node_id: str, *, node: dict[str, Any] | None = None, **extras: Any) -> dict[str, Any]:
    frame = hello_frame(node_id, ["evil"])
    frame["node"].update(node or {})
    farhand = {
        "features": [*FEATURES, *QUERIES],
        "tools": [{"name": "Read"}, {"name": "Bash"}],
        "resume": {"boot": "b"},
    }
    return {**frame, "farhand": {**farhand, **extras}}


@contextlib.asynccontextmanager
async def joined(gateway: GatewayProcess, node_id: str = "evil", **extras: Any) -> AsyncIterator[Hostile]:
    url = f"{gateway.ws_url}?token={SHARED_TOKEN}&node_id={node_id}"
    async with websockets.connect(url, ping_interval=None, compression=None, max_size=None, close_timeout=1) as socket:
        node = Hostile(socket)
        await node.send(hello(node_id, **extras))
        welcome = json.loads(await asyncio.wait_for(socket.recv(), PATIENCE))
        assert welcome["type"] == "gateway_welcome", welcome
        listening = asyncio.create_task(node.listen())
        try:
            yield node
        finally:
            listening.cancel()


@contextlib.contextmanager
def watched(gateway: GatewayProcess) -> Iterator[None]:
    """Another process asks for /healthz all the while: the gateway must keep answering."""
    command = [sys.executable, "-m", "tests.support.health_probe", str(gateway.port)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as probe:  # type: ignore[call-overload]
        assert probe.stdout.readline() == "ready\n"
        yield
        probe.stdin.close()
        (took,) = json.loads(probe.stdout.readline())
    assert max(took) < LONGEST_STALL, f"/healthz took {max(took):.2f} s"


def unprintable(text: str) -> bool:
    return any(not character.isprintable() for character in text)


# -- reports ----------------------------------------------------------------------------------------------


def test_a_freeze_is_reported_whatever_a_node_says_of_it(gateway: GatewayProcess) -> None:
    async def attack() -> None:
        async with joined(gateway) as node:
            report = {"type": "freeze_report", "ended_processes": HUGE, "stopped_calls": -5, "error": TEXT}
            node.lies = {"node_freeze": {**report, "frozen": True}, "node_thaw": {**report, "frozen": False}}
            for path in ("/v1/freeze", "/v1/thaw"):
                answer = await asyncio.to_thread(gateway.request, "POST", path, {})
                assert answer.status == 200, answer
                (fate,) = [one for one in answer.json()["nodes"] if one["node_id"] == "evil"]
                assert not fate["confirmed"] and 0 <= fate["ended_processes"] <= 1_000_000, fate
                assert fate["stopped_calls"] == 0 and len(fate["error"]) <= 500 and not unprintable(fate["error"])

    asyncio.run(attack())


@pytest.mark.parametrize("since", [HUGE, -1, "yesterday"])
def test_an_impossible_order_in_a_hello_is_refused(gateway: GatewayProcess, since: Any) -> None:
    async def attack() -> None:
        url = f"{gateway.ws_url}?token={SHARED_TOKEN}"
        async with websockets.connect(url, ping_interval=None, close_timeout=1) as socket:
            await socket.send(json.dumps(hello("evil", frozen={"since": since, "by": TEXT})))
            with pytest.raises(websockets.ConnectionClosed) as closed:
                await asyncio.wait_for(socket.recv(), PATIENCE)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 4400
        assert (await asyncio.to_thread(gateway.request, "GET", "/v1/freeze")).status == 200

    asyncio.run(attack())


def test_a_node_that_says_it_is_frozen_shows_one_line(gateway: GatewayProcess) -> None:
    async def attack() -> None:
        async with joined(gateway, frozen={"since": 1, "by": TEXT, "reason": TEXT, "gateway_id": "other"}):
            state = await asyncio.to_thread(gateway.get, "/v1/freeze")
            (fate,) = [one for one in state["nodes"] if one["node_id"] == "evil"]
            assert len(fate["error"]) < 1000 and not unprintable(fate["error"]), fate

    asyncio.run(attack())


# -- floods -----------------------------------------------------------------------------------------------

JOB = '{"job_id":"j","command":"","started_at":0,"running":true}'
LISTS = {
    "transfers": '{"held":[' + ",".join(['"a"'] * 3_000_000) + "]}",
    "transfers, distinct": '{"held":[' + ",".join(f'"{number:x}"' for number in range(120_000)) + "]}",
    "jobs": "[" + ",".join([JOB] * 250_000) + "]",
}


@pytest.mark.parametrize("question", LISTS)
def test_a_long_answer_does_not_block_others(gateway: GatewayProcess, question: str) -> None:
    kind = question.partition(",")[0]

    async def attack() -> None:
        async with joined(gateway) as node:
            async with asyncio.timeout(PATIENCE):  # what a node keeps of transfers is asked when it joins
                while not any(one.get("kind") == "transfers" for one in node.heard):
                    await asyncio.sleep(0.01)
            asking = None
            if kind == "jobs":
                asking = asyncio.create_task(asyncio.to_thread(gateway.request, "GET", "/v1/jobs"))
                async with asyncio.timeout(PATIENCE):
                    while not any(one.get("kind") == "jobs" for one in node.heard):
                        await asyncio.sleep(0.01)
            number = next(one["query_id"] for one in node.heard if one.get("kind") == kind)
            with watched(gateway):
                await node.send(f'{{"type":"node_answer","query_id":{number},"result":{LISTS[question]}}}')
                await node.settled()
                if asking is not None:
                    answer = await asking
                    assert answer.status == 200 and answer.json()["jobs"] == [], len(answer.body)
            assert sum(one["type"] == "transfer_stop" for one in node.heard) <= 1000

    asyncio.run(attack())


def test_a_flood_of_updates_does_not_block_others_and_the_last_one_counts(gateway: GatewayProcess) -> None:
    tools = [{"name": f"t{number}", "description": "é\u200b" * 490} for number in range(390)]
    update = json.dumps({"type": "tools_update", "capabilities": ["evil"], "tools": tools}, ensure_ascii=False)

    async def attack() -> None:
        async with joined(gateway) as node:
            with watched(gateway):
                for _ in range(30):
                    await node.send(update)
                for _ in range(300):
                    await node.send({"type": "tools_update", "capabilities": ["evil"], "tools": [{"name": "Flood"}]})
                await node.send({"type": "tools_update", "capabilities": ["evil"], "tools": [{"name": "Last"}]})
                await node.settled()
            async with asyncio.timeout(PATIENCE):
                names: set[str] = set()
                while names != {"evil__Last"}:
                    tools = (await asyncio.to_thread(gateway.get, "/v1/tools"))["tools"]
                    names = {tool["name"] for tool in tools if tool["name"].startswith("evil__")}

    asyncio.run(attack())


@pytest.mark.parametrize("field", ["running", "finished", "earlier"])
def test_long_lists_of_calls_are_cut(gateway: GatewayProcess, field: str) -> None:
    async def attack() -> None:
        with watched(gateway):
            async with joined(
                gateway, resume={"boot": "b", field: [f"{number:x}" for number in range(100_000)]}
            ) as node:
                await node.settled()
                assert sum(one["type"] == "tool_cancel" for one in node.heard) <= 16_384

    asyncio.run(attack())


def test_the_shared_token_cannot_fill_the_inventory() -> None:
    """On the node registry itself: thousands of connections take too long here."""
    node_registry = NodeRegistry()

    def join(number: int, *, own: bool = False) -> None:
        tools = [ToolSpec(f"t{place}", "x" * 2000) for place in range(120)]
        info = NodeInfo(f"n{number}", "n", "test", "1")
        said = NodeHello(node=info, capabilities=["evil"], farhand=NodeExtras(tools=tools))
        node_registry.join(node_registry.examine(said, None, own_credential=own), said, link=None)  # type: ignore[arg-type]

    with pytest.raises(HelloRefused, match="nodes forget"):
        for number in range(20_000):
            join(number)
    known = len(node_registry.nodes)
    assert 100 <= known <= 1000
    join(0)  # who is known comes back
    join(known + 1, own=True)  # whom the owner names is let in
    assert len(node_registry.nodes) == known + 1


# -- identity ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("claims", ["laptop", ""])
@pytest.mark.parametrize("revoked", [False, True])
def test_an_unknown_key_does_not_speak_for_a_node_with_its_own_token(
    open_gateway: GatewayProcess, claims: str, revoked: bool
) -> None:
    made = open_gateway.request("POST", "/v1/tokens", {"node_id": "laptop"})
    assert made.status == 201, made
    if revoked:
        assert open_gateway.request("DELETE", f"/v1/tokens/{made.json()['id']}").status in (200, 204)
    key = SigningKey.generate()
    headers = {"Authorization": f"Ed25519 {key_text(bytes(key.verify_key))}"}

    async def attack() -> None:
        url = f"{open_gateway.ws_url}?node_id={claims}"
        async with websockets.connect(url, additional_headers=headers, ping_interval=None, close_timeout=1) as socket:
            asked = json.loads(await asyncio.wait_for(socket.recv(), PATIENCE))
            assert asked.pop("type") == "gateway_challenge"
            signature = key.sign(signed_bytes(GatewayChallenge(**asked), claims)).signature
            await socket.send(json.dumps({"type": "node_proof", "signature": to_text(signature)}))
            await socket.send(json.dumps(hello("laptop")))
            with pytest.raises(websockets.ConnectionClosed) as closed:
                await asyncio.wait_for(socket.recv(), PATIENCE)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 4401

    asyncio.run(attack())


def test_a_look_alike_does_not_keep_out_the_node_that_the_owner_named(gateway: GatewayProcess) -> None:
    async def attack() -> None:
        url = f"{gateway.ws_url}?token={SHARED_TOKEN}"
        async with joined(gateway, "Parlour"):  # before the owner named anything like it
            pass
        made = await asyncio.to_thread(gateway.request, "POST", "/v1/tokens", {"node_id": "parlour"})
        for look_alike in ("PARLOUR", "p\u0430rlour", "par1our"):
            async with websockets.connect(url, ping_interval=None, close_timeout=1) as socket:
                await socket.send(json.dumps(hello(look_alike)))
                with pytest.raises(websockets.ConnectionClosed) as closed:
                    await asyncio.wait_for(socket.recv(), PATIENCE)
                assert closed.value.rcvd is not None and closed.value.rcvd.code == 4400
        own = f"{gateway.ws_url}?token={made.json()['token']}"
        async with websockets.connect(own, ping_interval=None, close_timeout=1) as socket:
            await socket.send(json.dumps(hello("parlour")))
            assert json.loads(await asyncio.wait_for(socket.recv(), PATIENCE))["type"] == "gateway_welcome"

    asyncio.run(attack())


def test_an_id_that_begins_with_another_and_a_colon_is_refused(gateway: GatewayProcess) -> None:
    async def attack() -> None:
        for first, second in (("attic", "attic:x"), ("cellar:x", "cellar")):
            async with joined(gateway, first):
                url = f"{gateway.ws_url}?token={SHARED_TOKEN}"
                async with websockets.connect(url, ping_interval=None, close_timeout=1) as socket:
                    await socket.send(json.dumps(hello(second)))
                    with pytest.raises(websockets.ConnectionClosed) as closed:
                        await asyncio.wait_for(socket.recv(), PATIENCE)
                    assert closed.value.rcvd is not None and closed.value.rcvd.code == 4400, closed.value

    asyncio.run(attack())


@pytest.fixture(scope="module")
def open_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path_factory.mktemp("open") / "home", "--open") as gateway:
        yield gateway


def test_a_storm_of_long_hellos_does_not_block_others(open_gateway: GatewayProcess) -> None:
    tools = [{"name": f"t{number}", "description": "é\u200b" * 490} for number in range(390)]
    gateway = open_gateway  # its turns are taken for a while afterwards
    frame = json.dumps(hello("storm", tools=tools), ensure_ascii=False)

    async def knock() -> None:
        url = f"{gateway.ws_url}?token={SHARED_TOKEN}"
        async with websockets.connect(url, ping_interval=None, compression=None, close_timeout=1) as socket:
            await socket.send(frame)
            with contextlib.suppress(websockets.ConnectionClosed):
                await asyncio.wait_for(socket.recv(), PATIENCE)

    async def attack() -> None:
        with watched(gateway):
            async with asyncio.timeout(PATIENCE):
                storm = [asyncio.create_task(knock()) for _ in range(48)]
                # Some are let in, one after the other; those for whom there is no time are sent away at once.
                await asyncio.wait(storm, return_when=asyncio.FIRST_COMPLETED)
                async with joined(gateway, "calm"):
                    pass
            for one in storm:
                one.cancel()
            await asyncio.gather(*storm, return_exceptions=True)

    asyncio.run(attack())


# -- transfers and previews -------------------------------------------------------------------------------

OFFER = {"name": "in", "folder": False, "files": 1, "size": 5, "manifest_bytes": 2, "manifest_digest": "sha256:0"}


@pytest.mark.parametrize(
    ("lie", "error"),
    [
        ({"files": HUGE}, "offer is invalid"),
        ({"files": -3}, "offer is invalid"),
        ({"size": HUGE}, "offer is invalid"),
        ({"size": -1}, "offer is invalid"),
        ({"manifest_bytes": 0}, "offer is invalid"),
        ({"manifest_bytes": HUGE}, "offer is invalid"),
        ({"name": "x" * 5000}, "offer is invalid"),
        ({"manifest_digest": "x" * 5000}, "offer is invalid"),
        ({"mime": "text/html\r\nX-Evil: 1"}, "enough"),
        ({"mime": "x" * 200_000}, "enough"),
    ],
)
def test_a_false_offer_ends_the_transfer(gateway: GatewayProcess, lie: dict[str, Any], error: str) -> None:
    async def attack() -> None:
        async with joined(gateway) as node:
            node.lies = {
                "transfer_open": {"type": "transfer_ready", "offer": {**OFFER, **lie}},
                "transfer_credit": {"type": "transfer_done", "error": {"kind": "failed", "message": "enough"}},
            }
            body = {"source": "evil:x", "destination": "gsv:evil.txt"}
            answer = await asyncio.to_thread(gateway.request, "POST", "/v1/transfers", body)
            assert answer.status == 502 and error in answer.json()["error"]["message"], answer
            (newest, *_) = (await asyncio.to_thread(gateway.get, "/v1/transfers"))["transfers"]
            assert newest["state"] == "error" and "mime" not in newest, newest

    asyncio.run(attack())


def test_a_list_of_millions_of_files_does_not_block_others(gateway: GatewayProcess) -> None:
    listed = b"[" + b",".join([b'["a","file"]'] * 3_500_000) + b"]"
    digest = blake3(listed)
    offer = {**OFFER, "folder": True, "manifest_bytes": len(listed), "manifest_digest": digest.hexdigest()}

    async def send_list(node: Hostile) -> None:
        sent = heard = 0
        while sent < len(listed):
            credits = [one for one in node.heard if one["type"] == "transfer_credit"]
            if len(credits) == heard:
                await asyncio.sleep(0.005)
                continue
            heard = len(credits)
            while sent < (until := min(credits[-1]["until"], len(listed))):
                piece = listed[sent : min(sent + 200_000, until)]
                await node.socket.send(encode_frame(BinaryFrame(FrameKind.DATA, credits[-1]["stream"], sent, piece)))
                sent += len(piece)
        await node.socket.send(part_end(credits[-1]["stream"], sent, 0, digest.digest()))

    async def attack() -> None:
        async with joined(gateway) as node:
            node.lies = {"transfer_open": {"type": "transfer_ready", "offer": offer}}
            with watched(gateway):
                asking = asyncio.to_thread(gateway.request, "GET", "/v1/transfers/manifest?source=evil:x")
                _, answer = await asyncio.gather(send_list(node), asking)
            assert answer.status == 502 and "at most 200000 entries" in answer.json()["error"]["message"], answer

    asyncio.run(attack())


def test_a_preview_cannot_pass_for_the_gateways_words(gateway: GatewayProcess) -> None:
    lie = {"cwd": TEXT, "command": "ls", "env": {TEXT: "x"}, "note": TEXT, "files": [{"path": TEXT, "note": TEXT}]}

    async def attack() -> None:
        async with joined(gateway) as node:
            node.lies = {"preview": {"type": "node_answer", "result": lie}}
            approval = await asyncio.to_thread(ask, gateway, "evil__Bash", {"command": "ls"})
            (file,) = approval["files"]
            for text in (approval["cwd"], approval["note"], file["path"], file["note"], *approval["env"]):
                assert text and len(text) < 20_000 and not unprintable(text), text
            node.lies = {"preview": {"type": "node_answer", "result": {"command": "x" * 5_000_000}}}
            approval = await asyncio.to_thread(ask, gateway, "evil__Bash", {"command": "ls"})
            assert "too long to show" in approval["note"] and not approval["command"], approval["note"]

    asyncio.run(attack())


def test_a_call_that_waits_is_not_ended_by_its_node(gateway: GatewayProcess) -> None:
    """Nothing of it has left the gateway, so the node cannot have run it."""

    async def attack() -> None:
        async with joined(gateway) as node:
            node.lies = {"preview": {"type": "node_answer", "result": {"command": "ls", "cwd": "/"}}}
            approval = await asyncio.to_thread(ask, gateway, "evil__Bash", {"command": "ls"})
        call_id = approval["call_id"]
        claims = {"boot": "b", "running": [call_id], "finished": [call_id], "earlier": [call_id]}
        async with joined(gateway, resume=claims) as node:
            await node.send({"type": "tool_response", "request_id": call_id, "ok": True, "result": "done"})
            await node.settled()
            found = await asyncio.to_thread(gateway.get, f"/v1/calls/{call_id}")
            assert found["state"] == "waiting" and "result" not in found, found

    asyncio.run(attack())


# -- hostile gateways -------------------------------------------------------------------------------------

TRANSFER = "0123456789abcdef0123456789abcd"
BAD_LISTS: dict[str, list[list[Any]]] = {
    "climbs": [["../x", "file", 0, False, 0, "", False]],
    "absolute": [["/tmp/x", "file", 0, False, 0, "", False]],
    "climbs from a folder": [["a", "folder", 0, False, 0, "", False], ["a/..", "folder", 0, False, 0, "", False]],
    "link out": [["l", "link", 0, False, 0, "../../outside", False]],
    "absolute link": [["l", "link", 0, False, 0, "/etc", False]],
    "beneath a link": [["l", "link", 0, False, 0, ".", False], ["l/x", "file", 0, False, 0, "", False]],
    "out of a link": [["a", "link", 0, False, 0, ".", False], ["b", "link", 0, False, 0, "a/../../outside", False]],
    "negative": [["a", "file", -5, False, 0, "", False]],
    "twice": [["a", "file", 0, False, 0, "", False], ["a", "file", 0, False, 0, "", False]],
}


@asynchronous
async def test_a_hostile_gateway_gets_nothing_out_of_a_lent_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("TOP SECRET")
    folder = tmp_path / "node"
    folder.mkdir()
    async with lending(folder) as ways:
        before = await ways.peer.call("Write", {"path": str(outside / "secret"), "content": "TOP SECRET 2"}, "first")
        assert before["ok"], before
        for name in ("../../../../evil", "/abs/evil", "evil\n", "\0evil", "evil" * 2000):  # an id is never a path
            assert (await ways.peer.call("Write", {"path": "kept", "content": name}, name))["ok"]
            assert (await ways.peer.call("Undo", {"call": name}, f"undo of {name}"))["ok"]
        order = {"since": HUGE, "by": "x"}
        await ways.peer.send({"type": "node_freeze", "number": 1, "order": order})
        assert (await ways.peer.call("Read", {"path": "file.txt"}, "not frozen"))["ok"]
    assert [path for path in tmp_path.rglob("*") if "evil" in path.name] == []
    async with lending(folder, "--root", str(folder / "workspace")) as ways:
        for dry_run in (True, False):
            undone = await ways.call("Undo", call="first", dryRun=dry_run)
            assert undone["error"]["kind"] == "not_allowed" and "TOP" not in json.dumps(undone), undone
        for number, (name, entries) in enumerate(BAD_LISTS.items()):
            answer = await received(ways, f"{TRANSFER}{number:02x}", entries)
            assert "not a manifest" in answer["error"]["message"], (name, answer)
        (folder / "workspace" / "link").symlink_to(outside)
        entries = [["link", "folder", 0, False, 0, "", False], ["link/x", "file", 0, False, 0, "", False]]
        assert "error" in await received(ways, f"{TRANSFER}ff", entries, path="..", name="workspace")
        for wanted in ("../../x", "x/y", "x", f"{TRANSFER}01\n"):
            answer = await ways.transfer("receive", "in.txt", wanted, offer=OFFER)
            assert answer["error"]["kind"] == "invalid_args", answer
    assert (outside / "secret").read_text() == "TOP SECRET 2"
    assert [path.name for path in outside.iterdir()] == ["secret"]


async def received(ways: Ways, transfer_id: str, entries: Any, path: str = "new", name: str = "in") -> Any:
    """How a node ends a transfer of a folder with this list of files; all files are empty."""
    listed = json.dumps(entries, separators=(",", ":")).encode()
    ways.asked += 1
    offer = {**OFFER, "name": name, "folder": True, "size": 0, "manifest_bytes": len(listed)}
    offer["manifest_digest"] = blake3(listed).hexdigest()
    opened = {"type": "transfer_open", "stream": ways.asked, "transfer_id": transfer_id, "role": "receive"}
    await ways.peer.send({**opened, "path": path, "offer": offer})
    while (answer := await ways.peer.receive())["type"] != "transfer_done":
        if answer["type"] == "transfer_ready":
            await ways.peer.send(encode_frame(BinaryFrame(FrameKind.DATA, ways.asked, 0, listed)))
            for part in range(len(entries) + 1):
                content = blake3(b"" if part else listed).digest()
                await ways.peer.send(part_end(ways.asked, len(listed), part, content))
    await ways.peer.send({"type": "transfer_stop", "transfer_id": transfer_id})
    return answer
