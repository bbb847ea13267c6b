"""Transfers between two real nodes through a real gateway."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from farhand.protocol.frames import BinaryFrame, FrameKind, encode_frame, part_end
from tests.support.harness import GatewayProcess, NodeProcess, PlainNode, hello_frame, wait_until

MIB = 1024 * 1024


class Pair:
    """Two nodes, `left` and `right`, and their workspaces."""

    def __init__(self, gateway: GatewayProcess, left: NodeProcess, right: NodeProcess) -> None:
        self.gateway = gateway
        self.left = left
        self.right = right

    def move(self, source: str, destination: str, **options: Any) -> Any:
        answer = self.gateway.invoke("gsv__Transfer", {"source": source, "destination": destination}, **options)
        assert answer["ok"] is True, answer
        return answer["result"]

    def fails(self, source: str, destination: str, kind: str) -> str:
        answer = self.gateway.invoke("gsv__Transfer", {"source": source, "destination": destination})
        assert answer["ok"] is False, answer
        assert answer["error"]["kind"] == kind, answer
        return str(answer["error"]["message"])


@pytest.fixture(scope="module")
def pair(shared_gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    with (
        NodeProcess(shared_gateway, folder / "left", "left") as left,
        NodeProcess(shared_gateway, folder / "right", "type:right") as right,
    ):
        yield Pair(shared_gateway, left, right)


def left_behind(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob(".farhand-*")]


def test_a_file_arrives_whole_and_the_answer_is_the_seeds(pair: Pair) -> None:
    content = os.urandom(3 * MIB + 17)
    (pair.left.workspace / "data.bin").write_bytes(content)
    target = pair.right.workspace / "deep" / "er" / "copy.bin"
    source, destination = f"left:{pair.left.workspace}/data.bin", f"type:right:{target}"
    result = pair.move(source, destination)
    assert result["source"] == source and result["destination"] == destination
    assert result["bytesTransferred"] == len(content)
    assert set(result) <= {"source", "destination", "bytesTransferred", "mime"}
    assert target.read_bytes() == content
    assert left_behind(pair.right.workspace) == []


def test_relative_paths_start_at_the_workspaces(pair: Pair) -> None:
    (pair.left.workspace / "small.md").write_text("# hello\n")
    pair.move("left:small.md", "type:right:notes/small.md")
    assert (pair.right.workspace / "notes" / "small.md").read_text() == "# hello\n"


def test_a_mime_type_is_reported(pair: Pair) -> None:
    (pair.left.workspace / "dot.png").write_bytes(
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\2\0\0\0\x90wS\xde"
    )
    assert pair.move("left:dot.png", "type:right:dot.png")["mime"] == "image/png"


def test_an_empty_file_is_a_file(pair: Pair) -> None:
    (pair.left.workspace / "empty").write_bytes(b"")
    assert pair.move("left:empty", "type:right:empty")["bytesTransferred"] == 0
    assert (pair.right.workspace / "empty").read_bytes() == b""


def test_a_node_can_copy_to_itself(pair: Pair) -> None:
    (pair.left.workspace / "self").write_bytes(b"x" * 100_000)
    pair.move("left:self", "left:other/self")
    assert (pair.left.workspace / "other" / "self").read_bytes() == b"x" * 100_000


def test_into_a_folder_under_its_own_name(pair: Pair) -> None:
    (pair.left.workspace / "named.txt").write_text("n")
    (pair.right.workspace / "there").mkdir()
    pair.move("left:named.txt", "type:right:there")
    pair.move("left:named.txt", "type:right:new/")
    assert (pair.right.workspace / "there" / "named.txt").read_text() == "n"
    assert (pair.right.workspace / "new" / "named.txt").read_text() == "n"


def test_modes_of_old_files_stay_and_programs_can_be_run(pair: Pair) -> None:
    script = pair.left.workspace / "run.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    old = pair.right.workspace / "old.sh"
    old.write_text("old")
    old.chmod(0o640)
    pair.move("left:run.sh", "type:right:old.sh")
    pair.move("left:run.sh", "type:right:fresh.sh")
    assert old.read_text() == "#!/bin/sh\n" and old.stat().st_mode & 0o777 == 0o640
    assert (pair.right.workspace / "fresh.sh").stat().st_mode & 0o111


def test_private_files_stay_private(pair: Pair) -> None:
    key = pair.left.workspace / "id_ed25519"
    key.write_text("private")
    key.chmod(0o600)
    folder = pair.left.workspace / ".keys"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "key").write_text("private")
    folder.chmod(0o700)
    pair.move("left:id_ed25519", "type:right:id_ed25519")
    pair.move("left:.keys", "type:right:.keys")
    for name, mode in (("id_ed25519", 0o600), (".keys", 0o700), (".keys/deep", 0o700), (".keys/deep/key", 0o600)):
        assert (pair.right.workspace / name).stat().st_mode & 0o777 == mode, name
    (pair.right.workspace / "public").mkdir(mode=0o755)
    pair.move("left:.keys", "type:right:public/")
    pair.move("left:.keys/deep/key", "type:right:public/.keys/open")
    assert (pair.right.workspace / "public" / ".keys" / "deep" / "key").stat().st_mode & 0o777 == 0o600
    assert (pair.right.workspace / "public" / ".keys" / "open").stat().st_mode & 0o077, "it was for all at its source"
    project = pair.left.workspace / "project"
    for name, mode in (("in", 0o755), ("in/keys", 0o700)):
        (project / name).mkdir(mode, parents=True)
    for name, mode in ((".env", 0o600), ("run", 0o700), ("in/page", 0o644), ("in/keys/open", 0o644)):
        (project / name).write_text(name)
        (project / name).chmod(mode)
    pair.move("left:project", "type:right:project")
    arrived = pair.right.workspace / "project"
    modes = {str(path.relative_to(arrived)): path.stat().st_mode & 0o777 for path in arrived.rglob("*")}
    assert (modes[".env"], modes["run"], modes["in/keys"]) == (0o600, 0o700, 0o700)
    assert modes["in/page"] & 0o044 and modes["in"] & 0o055


def test_a_folder_with_everything_in_it(pair: Pair) -> None:
    tree = pair.left.workspace / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "nothing").mkdir()
    for number in range(300):
        (tree / "a" / f"{number:03}.txt").write_text(str(number) * number)
    (tree / "a" / "b" / "big").write_bytes(os.urandom(2 * MIB))
    (tree / "a" / "empty").touch()
    (tree / "link").symlink_to("a/b/big")
    result = pair.move("left:tree", "type:right:landed")
    landed = pair.right.workspace / "landed"
    assert result["bytesTransferred"] == sum(
        p.stat().st_size for p in tree.rglob("*") if p.is_file() and not p.is_symlink()
    )
    assert fingerprint(landed) == fingerprint(tree)
    assert left_behind(pair.right.workspace) == []


def test_a_folder_is_merged_into_one_that_is_there(pair: Pair) -> None:
    tree = pair.left.workspace / "update"
    (tree / "in").mkdir(parents=True)
    (tree / "in" / "changed").write_text("new")
    target = pair.right.workspace / "place" / "update"
    (target / "in").mkdir(parents=True)
    (target / "in" / "changed").write_text("old")
    (target / "in" / "stays").write_text("stays")
    pair.move("left:update", "type:right:place")
    assert (target / "in" / "changed").read_text() == "new"
    assert (target / "in" / "stays").read_text() == "stays"
    assert left_behind(pair.right.workspace) == []


def test_files_that_a_folder_replaces_keep_their_modes(pair: Pair) -> None:
    (pair.left.workspace / "modes").mkdir()
    target = pair.right.workspace / "modes"
    target.mkdir()
    for name, mode in (("private", 0o600), ("shared", 0o664), ("script", 0o755)):
        (pair.left.workspace / "modes" / name).write_text("new")
        (target / name).write_text("old")
        (target / name).chmod(mode)
    pair.move("left:modes", "type:right:./")
    assert {path.name: path.stat().st_mode & 0o777 for path in target.iterdir()} == {
        "private": 0o600,
        "shared": 0o664,
        "script": 0o755,
    }
    assert {path.read_text() for path in target.iterdir()} == {"new"}


def test_a_folder_does_not_replace_a_file_nor_the_other_way_round(pair: Pair) -> None:
    (pair.left.workspace / "folder").mkdir()
    (pair.left.workspace / "folder" / "x").write_text("x")
    (pair.right.workspace / "afile").write_text("keep")
    pair.fails("left:folder", "type:right:afile", "failed")
    assert (pair.right.workspace / "afile").read_text() == "keep"


@pytest.mark.parametrize(
    ("source", "destination", "kind", "words"),
    [
        ("nonsense", "left:x", "invalid_args", 'Invalid transfer endpoint "nonsense"'),
        ("left:", "left:x", "invalid_args", "path cannot be empty"),
        ("", "left:x", "invalid_args", "Invalid transfer endpoint"),
        (":/x", "left:x", "invalid_args", "Invalid transfer endpoint"),
        ("ghost:/x", "left:x", "not_found", "Source node not connected: ghost"),
        ("left:x", "ghost:/x", "not_found", "Destination node not connected: ghost"),
        ("gsv:a", "gsv:b", "invalid_args", "Cannot transfer from gsv to gsv"),
        ("left:missing.txt", "type:right:x", "not_found", "missing.txt"),
        ("left:/dev/zero", "type:right:x", "failed", "device"),
        ("left:/proc/self/status", "type:right:x", "failed", "its size is not known"),
        ("left:small", "type:right:/proc/nothing/x", "not_found", ""),
    ],
)
def test_what_cannot_be(pair: Pair, source: str, destination: str, kind: str, words: str) -> None:
    assert words in pair.fails(source, destination, kind)


def test_parameters_are_named(pair: Pair) -> None:
    answer = pair.gateway.invoke("gsv__Transfer", {"source": "left:x"})
    assert answer["error"]["kind"] == "invalid_args" and "destination" in answer["error"]["message"]


def test_the_tool_is_listed_and_native(pair: Pair) -> None:
    tools = {tool["name"]: tool for tool in pair.gateway.get("/v1/tools")["tools"]}
    assert tools["gsv__Transfer"]["parameters"]["required"] == ["source", "destination"]
    (pair.left.workspace / "r").write_text("r")
    answer = pair.gateway.invoke("gsv__Transfer", {"source": "left:r", "destination": "type:right:r"})
    assert answer["route"]["kind"] == "native"


def test_a_plugin_cannot_transfer(pair: Pair) -> None:
    import asyncio

    async def scene() -> None:
        async with PlainNode.connect(pair.gateway, "plain"):
            message = await asyncio.to_thread(pair.fails, "plain:/x", "left:y", "failed")
            assert "plug-in" in message

    asyncio.run(scene())


def test_a_full_disk_is_reported_and_nothing_changes(pair: Pair, mounted: Any) -> None:
    place = mounted("size=1m")
    (place / "kept").write_text("kept")
    (pair.left.workspace / "large").write_bytes(os.urandom(3 * MIB))
    message = pair.fails("left:large", f"type:right:{place}/kept", "failed")
    assert "No space left" in message
    assert (place / "kept").read_text() == "kept"
    assert left_behind(place) == []


def test_confined_and_read_only_nodes_keep_to_their_limits(
    shared_gateway: GatewayProcess, pair: Pair, tmp_path: Path
) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "out").symlink_to(tmp_path)
    (tmp_path / "secret").write_text("secret")
    (pair.left.workspace / "r").write_text("r")
    with NodeProcess(shared_gateway, tmp_path / "confined", "confined", "--root", str(inside)):
        pair.fails("left:r", f"confined:{tmp_path}/escaped", "not_allowed")
        pair.fails("left:r", "confined:out/escaped", "not_allowed")
        pair.fails(f"confined:{tmp_path}/secret", "left:stolen", "not_allowed")
        pair.fails("confined:out/secret", "left:stolen", "not_allowed")
        pair.move("left:r", "confined:fine")
    assert (inside / "fine").read_text() == "r" and not (tmp_path / "escaped").exists()
    with NodeProcess(shared_gateway, tmp_path / "readonly", "readonly", "--read-only") as node:
        (node.workspace / "x").write_text("x")
        assert "read-only" in pair.fails("left:r", "readonly:x", "not_allowed")
        assert (node.workspace / "x").read_text() == "x"
        pair.move("readonly:x", "left:fetched")


def test_the_nodes_secrets_stay(shared_gateway: GatewayProcess, pair: Pair, tmp_path: Path) -> None:
    with NodeProcess(shared_gateway, tmp_path / "keeper", "keeper") as node:
        (node.state / "token").write_text("secret")
        (node.state / "other").write_text("other")
        (pair.left.workspace / "r").write_text("r")
        for name in ("token", "farhand.db-promises", "farhand.db-tidings", "memory.db", "lock", "nodes", "jobs/x"):
            pair.fails(f"keeper:{node.state}/{name}", "left:stolen", "not_allowed")
            pair.fails("left:r", f"keeper:{node.state}/{name}", "not_allowed")
        pair.fails("left:r", f"keeper:{node.state}/farhand.db", "not_allowed")
        pair.fails(f"keeper:{node.state}", "left:stolen", "not_allowed")
        (node.workspace / "plain").write_text("plain")
        pair.move(f"keeper:{node.state.parent}", "left:around")
    copied = {path.name for path in (pair.left.workspace / "around").rglob("*")}
    assert "plain" in copied and not copied & {"token", "other", node.state.name}


def test_a_folder_brings_nothing_to_where_the_nodes_secrets_are(
    shared_gateway: GatewayProcess, pair: Pair, tmp_path: Path
) -> None:
    with NodeProcess(shared_gateway, tmp_path / "guarded", "guarded") as node:
        (node.state / "token").write_text("secret")
        tree = pair.left.workspace / node.state.name
        tree.mkdir(exist_ok=True)
        (tree / "token").write_text("mine")
        (tree / "harmless").write_text("harmless")
        message = pair.fails(f"left:{tree.name}", f"guarded:{node.state.parent}", "not_allowed")
        assert f"'{node.state}' is in a protected folder" in message
        assert (node.state / "token").read_text() == "secret" and not (node.state / "harmless").exists()
        wait_until(lambda: not left_behind(node.state.parent), 10, "no partial file left")


def test_several_at_once(pair: Pair) -> None:
    contents = {f"many-{n}": os.urandom(MIB + n) for n in range(12)}
    for name, content in contents.items():
        (pair.left.workspace / name).write_bytes(content)
    threads = [threading.Thread(target=pair.move, args=(f"left:{n}", f"type:right:many/{n}")) for n in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for name, content in contents.items():
        assert (pair.right.workspace / "many" / name).read_bytes() == content


def test_a_suspended_receiver_delays_no_call_and_loses_nothing(pair: Pair) -> None:
    """More is under way than the sockets hold, so the gateway has to keep some of it, and to send it in parts."""
    content = os.urandom(MIB) * 64
    names = [f"still-{number}" for number in range(4)]
    (pair.left.workspace / "small").write_text("small\n")
    for name in names:
        (pair.left.workspace / name).write_bytes(content)
    paths = []
    for name in names:
        body = {"source": f"left:{name}", "destination": f"type:right:{name}", "background": True}
        paths.append(f"/v1/transfers/{pair.gateway.request('POST', '/v1/transfers', body).json()['id']}")
    wait_until(lambda: all(pair.gateway.get(path)["bytesTransferred"] for path in paths), 20, "all of them move")
    assert pair.right.process is not None
    pair.right.process.send_signal(signal.SIGSTOP)
    try:
        for _ in range(20):
            assert pair.gateway.invoke("left__Read", {"path": "small"})["ok"]
    finally:
        pair.right.process.send_signal(signal.SIGCONT)
    wait_until(lambda: all(pair.gateway.get(path)["state"] == "ok" for path in paths), 60, "all of them are there")
    for name in names:
        assert (pair.right.workspace / name).read_bytes() == content


def make_huge(path: Path) -> None:
    """A file that is a while on its way, also where this test is kept waiting."""
    with path.open("wb") as file:
        file.truncate(1024 * MIB)


def test_a_cancelled_call_leaves_the_destination_alone(pair: Pair, tmp_path: Path) -> None:
    make_huge(pair.left.workspace / "huge")
    (pair.right.workspace / "huge").write_text("as it was")
    begun = pair.gateway.invoke(
        "gsv__Transfer", {"source": "left:huge", "destination": "type:right:huge"}, background=True
    )
    path = f"/v1/transfers/{begun['request_id']}"
    wait_until(lambda: pair.gateway.request("GET", path).status == 200, 10, "the transfer has begun")
    ended = pair.gateway.request("DELETE", f"/v1/calls/{begun['request_id']}").json()
    assert ended["state"] == "cancelled", ended
    assert pair.gateway.get(path)["state"] == "cancelled"
    assert (pair.right.workspace / "huge").read_text() == "as it was"
    wait_until(lambda: not left_behind(pair.right.workspace), 10, "no partial file left")


def test_a_transfer_that_takes_too_long_ends_in_time(pair: Pair) -> None:
    make_huge(pair.left.workspace / "huge")
    body = {"source": "left:huge", "destination": "type:right:late"}
    answer = pair.gateway.invoke("gsv__Transfer", body, timeout_ms=20)
    assert answer["ok"] is False and answer["error"]["kind"] == "timeout", answer
    wait_until(lambda: not left_behind(pair.right.workspace), 10, "no partial file left")
    assert not (pair.right.workspace / "late").exists()


@pytest.mark.parametrize("to", ["type:right:raced", "gsv:raced"])
def test_whatever_a_cancelled_transfer_says_of_its_destination_is_so(pair: Pair, to: str) -> None:
    """Cancelled at every moment of its life, the last ones above all."""
    old, new = b"as it was", os.urandom(3 * MIB)
    (pair.left.workspace / "raced").write_bytes(new)
    (pair.left.workspace / "before").write_bytes(old)
    began = time.monotonic()
    pair.move("left:raced", to)
    undisturbed = time.monotonic() - began
    for attempt in range(60):
        pair.move("left:before", to)
        body = {"source": "left:raced", "destination": to, "background": True}
        transfer = pair.gateway.request("POST", "/v1/transfers", body).json()["id"]
        time.sleep(undisturbed * attempt / 50)
        ended = pair.gateway.request("DELETE", f"/v1/transfers/{transfer}").json()
        if to.startswith("gsv"):
            there = pair.gateway.request("GET", "/v1/workspace/main/raced").body
        else:
            there = (pair.right.workspace / "raced").read_bytes()
        if ended["state"] == "cancelled":
            assert ended["error"]["message"] == "cancelled on request; the destination is as it was"
            assert there == old
        else:
            assert ended["state"] == "ok" and ended["bytesTransferred"] == len(new) and there == new


@contextlib.contextmanager
def stopped_midway(pair: Pair, name: str, destination: str) -> Iterator[str]:
    """A transfer whose sender stands still, and goes on afterwards; the path of its record."""
    with (pair.left.workspace / name).open("wb") as file:
        file.truncate(512 * MIB)
    body = {"source": f"left:{name}", "destination": f"type:right:{destination}", "background": True}
    path = f"/v1/transfers/{pair.gateway.request('POST', '/v1/transfers', body).json()['id']}"
    wait_until(lambda: pair.gateway.get(path)["bytesTransferred"], 20, "it moves")
    assert pair.left.process is not None
    pair.left.process.send_signal(signal.SIGSTOP)
    try:
        assert pair.gateway.get(path)["state"] == "running", "it was too quick"
        yield path
    finally:
        pair.left.process.send_signal(signal.SIGCONT)


def test_a_copy_that_is_removed_meanwhile_is_not_reported_as_complete(pair: Pair) -> None:
    (pair.right.workspace / "taken").write_text("as it was")
    with stopped_midway(pair, "taken", "taken") as path:
        for part in left_behind(pair.right.workspace):
            Path(part).unlink()
    wait_until(lambda: pair.gateway.get(path)["state"] != "running", 60, "its end")
    ended = pair.gateway.get(path)
    assert ended["state"] == "error" and "another program removed what was received" in ended["error"]["message"], ended
    assert (pair.right.workspace / "taken").read_text() == "as it was"


def test_a_folder_that_is_moved_meanwhile_gets_no_file(pair: Pair) -> None:
    (pair.right.workspace / "here").mkdir()
    with stopped_midway(pair, "moved", "here/moved") as path:
        (pair.right.workspace / "here").rename(pair.right.workspace / "elsewhere")
    wait_until(lambda: pair.gateway.get(path)["state"] != "running", 60, "its end")
    ended = pair.gateway.get(path)
    assert ended["state"] == "error" and "Failed to write" in ended["error"]["message"], ended
    assert not (pair.right.workspace / "elsewhere" / "moved").exists()


def test_a_node_that_does_nothing_holds_up_only_itself(pair: Pair) -> None:
    async def run() -> None:
        features = {"features": ["transfer", "resume"], "resume": {"boot": "idle"}}
        async with PlainNode.connect(pair.gateway, "idle", hello=False) as node:
            await node.send(hello_frame("idle", ["test"], farhand=features))
            await node.receive("gateway_welcome")
            ids = []
            for number in range(8):
                body = {"source": f"idle:{number}", "destination": "left:x", "background": True}
                answer = await asyncio.to_thread(pair.gateway.request, "POST", "/v1/transfers", body)
                ids.append(answer.json()["id"])
            await node.receive("transfer_open")
            (pair.right.workspace / "quick").write_text("quick")
            await asyncio.to_thread(pair.move, "type:right:quick", "gsv:quick")
            for transfer in ids:
                ended = await asyncio.to_thread(pair.gateway.request, "DELETE", f"/v1/transfers/{transfer}")
                assert ended.json()["state"] == "cancelled"

    asyncio.run(run())


# -- over HTTP ----------------------------------------------------------------------------------------------


def test_a_download_that_is_not_read_to_its_end_is_not_ok(pair: Pair) -> None:
    (pair.left.workspace / "unread").write_bytes(bytes(64 * MIB))
    with socket.create_connection(("127.0.0.1", pair.gateway.port), timeout=20) as client:
        client.sendall(
            f"GET /v1/transfers/content?source=left:unread HTTP/1.1\r\nHost: 127.0.0.1:{pair.gateway.port}\r\n"
            f"Authorization: Bearer {pair.gateway.token}\r\n\r\n".encode()
        )
        assert client.recv(65536).startswith(b"HTTP/1.1 200")

    def ended() -> Any:
        newest = pair.gateway.get("/v1/transfers?limit=1")["transfers"][0]
        return newest["state"] != "running" and newest

    record = wait_until(ended, 20, "its end")
    assert record["source"] == "left:unread" and record["state"] == "cancelled", record
    assert record["bytesTransferred"] < 64 * MIB


def test_a_list_that_cannot_be_read_is_an_error_at_once(pair: Pair) -> None:
    async def run() -> None:
        manifest = b'[["../esc.txt","file",3,false,0,""]]'
        features = {"features": ["transfer", "resume"], "resume": {"boot": "evil"}}
        async with PlainNode.connect(pair.gateway, "evil", hello=False) as node:
            await node.send(hello_frame("evil", ["test"], farhand=features))
            await node.receive("gateway_welcome")
            path = "/v1/transfers/manifest?source=evil:/d"
            asking = asyncio.create_task(asyncio.to_thread(pair.gateway.request, "GET", path))
            stream = (await node.receive("transfer_open"))["stream"]
            offer = {"name": "d", "folder": True, "files": 1, "size": 3, "manifest_bytes": len(manifest)}
            offer["manifest_digest"] = blake3(manifest).hexdigest()
            await node.send({"type": "transfer_ready", "stream": stream, "offer": offer})
            await node.receive("transfer_credit")
            await node.send(encode_frame(BinaryFrame(FrameKind.DATA, stream, 0, manifest)))
            await node.send(part_end(stream, len(manifest), 0, blake3(manifest).digest()))
            answer = await asking
            assert answer.status == 502 and "not a manifest" in answer.json()["error"]["message"]
            newest = pair.gateway.get("/v1/transfers?limit=1")["transfers"][0]
            assert newest["state"] == "error"

    asyncio.run(run())


def test_the_route_answers_as_the_tool_does(pair: Pair) -> None:
    (pair.left.workspace / "http").write_bytes(b"h" * 5000)
    body = {"source": "left:http", "destination": "type:right:http"}
    answer = pair.gateway.request("POST", "/v1/transfers", body)
    assert answer.status == 200, answer
    shown = answer.json()
    assert shown["bytesTransferred"] == 5000 and shown["source"] == "left:http" and shown["state"] == "ok"
    assert pair.gateway.get(f"/v1/transfers/{shown['id']}") == shown
    assert shown in pair.gateway.get("/v1/transfers")["transfers"]


@pytest.mark.parametrize(
    ("source", "status", "code"),
    [("left:nothing-here", 404, "not_found"), ("what", 400, "invalid_args"), ("ghost:/x", 404, "not_found")],
)
def test_the_routes_errors(pair: Pair, source: str, status: int, code: str) -> None:
    answer = pair.gateway.request("POST", "/v1/transfers", {"source": source, "destination": "left:never"})
    assert answer.status == status and answer.json()["error"]["code"] == code
    assert pair.gateway.request("GET", "/v1/transfers/nope").status == 404
    assert pair.gateway.request("POST", "/v1/transfers", {"source": 1}).status == 400


def test_an_idempotency_key_moves_once(pair: Pair) -> None:
    (pair.left.workspace / "once").write_text("once")
    body = {"source": "left:once", "destination": "type:right:once"}
    headers = {"Idempotency-Key": "move-once"}
    first = pair.gateway.request("POST", "/v1/transfers", body, headers=headers).json()
    (pair.right.workspace / "once").write_text("mine now")
    assert pair.gateway.request("POST", "/v1/transfers", body, headers=headers).json() == first
    assert (pair.right.workspace / "once").read_text() == "mine now"
    other = {**body, "destination": "type:right:twice"}
    assert pair.gateway.request("POST", "/v1/transfers", other, headers=headers).status == 409


def test_an_idempotency_key_finds_its_transfer_when_the_node_is_gone(
    shared_gateway: GatewayProcess, pair: Pair, tmp_path: Path
) -> None:
    headers = {"Idempotency-Key": "move-and-leave"}
    body = {"source": "leaves:x", "destination": "left:from-leaves"}
    with NodeProcess(shared_gateway, tmp_path / "leaves", "leaves") as node:
        (node.workspace / "x").write_text("x")
        first = pair.gateway.request("POST", "/v1/transfers", body, headers=headers).json()
        assert first["state"] == "ok"
    shared_gateway.wait_for_node("leaves", online=False)
    assert pair.gateway.request("POST", "/v1/transfers", body, headers=headers).json() == first
    assert pair.gateway.request("POST", "/v1/transfers", body).status == 404


def test_the_journal_tells(pair: Pair) -> None:
    (pair.left.workspace / "told").write_text("told")
    body = {"source": "left:told", "destination": "type:right:told"}
    moved = pair.gateway.request("POST", "/v1/transfers", body).json()
    answer = pair.gateway.request("GET", "/v1/events?follow=0", headers={"Last-Event-ID": "0"})
    kinds = [line for line in answer.body.decode().split("\n\n") if moved["id"] in line]
    assert "event: transfer.started" in kinds[0] and "event: transfer.ended" in kinds[-1]


def fingerprint(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_dir():
            found[name] = "folder"
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
