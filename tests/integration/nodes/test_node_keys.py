"""Nodes that log in with a key: the login, and everything an attacker might try with what is visible of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import websockets
from nacl.signing import SigningKey

from farhand.protocol.key_auth import key_text, signed_bytes, to_text
from farhand.protocol.messages import GatewayChallenge
from tests.integration.cli.conftest import Command
from tests.support.fork_server import FARHAND, ForkedProcess, start_process
from tests.support.harness import SHARED_TOKEN, GatewayProcess, NodeProcess, hello_frame, wait_until

UNAUTHORIZED = 4401


def registered(gateway: GatewayProcess, node_id: str, **more: Any) -> tuple[SigningKey, Any]:
    """A key that the gateway knows as that of a node."""
    key = SigningKey.generate()
    body = {"node_id": node_id, "public_key": key_text(bytes(key.verify_key)), **more}
    answer = gateway.request("POST", "/v1/tokens", body)
    assert answer.status == 201 and answer.json()["token"] == "", answer
    return key, answer.json()


@contextlib.asynccontextmanager
async def knocking(gateway: GatewayProcess, key: SigningKey, node_id: str) -> AsyncIterator[Any]:
    """A socket on which the gateway has asked for a proof, and what it asked."""
    headers = {"Authorization": f"Ed25519 {key_text(bytes(key.verify_key))}"}
    url = f"{gateway.ws_url}?node_id={node_id}"
    async with websockets.connect(url, additional_headers=headers, ping_interval=None, close_timeout=2) as socket:
        asked = json.loads(await asyncio.wait_for(socket.recv(), 10))
        assert asked.pop("type") == "gateway_challenge"
        yield socket, GatewayChallenge(**asked)


def proof(key: SigningKey, challenge: GatewayChallenge, node_id: str) -> str:
    signature = key.sign(signed_bytes(challenge, node_id)).signature
    return json.dumps({"type": "node_proof", "signature": to_text(signature)})


async def says(socket: Any, *frames: str) -> str:
    """What the gateway says to these: `welcome`, or the code it closes with."""
    with contextlib.suppress(websockets.ConnectionClosed):
        for frame in frames:
            await socket.send(frame)
    try:
        answer = json.loads(await asyncio.wait_for(socket.recv(), 15))
        return str(answer["type"]).removeprefix("gateway_")
    except websockets.ConnectionClosed as closed:
        assert closed.rcvd is not None
        return str(closed.rcvd.code)


HELLO = json.dumps(hello_frame("keyed", ["keyed"]))


def test_the_key_lets_its_node_in(shared_gateway: GatewayProcess) -> None:
    key, _ = registered(shared_gateway, "keyed")

    async def login() -> str:
        async with knocking(shared_gateway, key, "keyed") as (socket, challenge):
            return await says(socket, proof(key, challenge, "keyed"), HELLO)

    assert asyncio.run(login()) == "welcome"


def test_a_recorded_login_cannot_be_replayed(shared_gateway: GatewayProcess) -> None:
    """An old proof on a new connection, and proofs that name another gateway, node, number or time."""
    key, _ = registered(shared_gateway, "keyed")
    stranger = SigningKey.generate()

    async def attacks() -> list[str]:
        async with knocking(shared_gateway, key, "keyed") as (socket, challenge):
            seen = proof(key, challenge, "keyed")
            assert await says(socket, seen, HELLO) == "welcome"
        old = challenge
        forged: list[Any] = [
            lambda asked: seen,
            lambda asked: proof(key, GatewayChallenge("another-gateway", asked.nonce, asked.time), "keyed"),
            lambda asked: proof(key, GatewayChallenge(asked.gateway_id, old.nonce, asked.time), "keyed"),
            lambda asked: proof(key, GatewayChallenge(asked.gateway_id, asked.nonce, asked.time + 1), "keyed"),
            lambda asked: proof(key, asked, "another-node"),
            lambda asked: proof(stranger, asked, "keyed"),
            lambda asked: json.dumps({"type": "node_proof", "signature": ""}),
            lambda asked: json.dumps({"type": "node_proof", "signature": "AAAA" * 5000}),
            lambda asked: json.dumps({"type": "node_proof", "signature": "\u00e9" * 86}),
            lambda asked: HELLO,
        ]
        answers = []
        for forge in forged:
            async with knocking(shared_gateway, key, "keyed") as (socket, asked):
                assert asked.nonce != old.nonce
                answers.append(await says(socket, forge(asked), HELLO))
        return answers

    answers = asyncio.run(attacks())
    print(f"logins with something else than the right signature: {len(answers)} tried, {answers.count('4401')} held")
    assert answers == ["4401"] * len(answers)


def test_a_wrong_proof_has_one_try(shared_gateway: GatewayProcess) -> None:
    key, _ = registered(shared_gateway, "keyed")

    async def attack() -> str:
        async with knocking(shared_gateway, key, "keyed") as (socket, challenge):
            wrong = json.dumps({"type": "node_proof", "signature": to_text(bytes(64))})
            return await says(socket, wrong, proof(key, challenge, "keyed"), HELLO)

    assert asyncio.run(attack()) == "4401"


def test_a_key_is_not_a_token_and_tokens_are_no_longer_accepted(tmp_path: Path) -> None:
    env: dict[str, str | None] = {"SA_NODE_TOKENS": "keyed:token-in-the-environment,other:token-of-another-node"}
    home = tmp_path / "home"
    with GatewayProcess(home, env=env) as gateway:
        token = gateway.request("POST", "/v1/tokens", {"node_id": "keyed"}).json()["token"]
        assert gateway.upgrade(f"node_id=keyed&token={token}").status == 101
        _, made = registered(gateway, "keyed")
        public = made["public_key"]
        secrets = (token, "token-in-the-environment", public, public.removeprefix("ed25519:"), SHARED_TOKEN, "")
        for secret in secrets:
            assert gateway.upgrade(f"node_id=keyed&token={secret}").status == 401, secret
            assert gateway.upgrade(f"token={secret}").status == 401, secret
            assert gateway.request("GET", "/v1/health", token=secret or None).status == 401
        assert gateway.upgrade("node_id=other&token=token-of-another-node").status == 101
        bad = gateway.upgrade("node_id=keyed", headers={"Authorization": "Ed25519 nonsense"})
        assert bad.status == 400 and b"public key" in bad.body
        unknown = key_text(bytes(SigningKey.generate().verify_key))
        assert gateway.upgrade("node_id=keyed", headers={"Authorization": f"Ed25519 {unknown}"}).status == 401
        assert gateway.upgrade("node_id=other", headers={"Authorization": f"Ed25519 {public}"}).status == 401
    (home / "farhand.toml").write_text("[gateway]\ntokens_beside_keys = true\n")
    with GatewayProcess(home, env=env) as gateway:
        assert gateway.upgrade(f"node_id=keyed&token={token}").status == 101, "the owner allowed it"


def test_a_shared_token_does_not_speak_for_a_node_with_a_key(shared_gateway: GatewayProcess) -> None:
    registered(shared_gateway, "keyed")

    async def attack() -> str:
        async with websockets.connect(f"{shared_gateway.ws_url}?token={SHARED_TOKEN}&node_id=keyed") as socket:
            return await says(socket, HELLO)

    assert asyncio.run(attack()) == "4401"


def test_a_revoked_node_is_disconnected_at_once_and_an_expired_one_at_its_expiry(
    shared_gateway: GatewayProcess,
) -> None:
    revoked, made = registered(shared_gateway, "keyed")

    async def out(key: SigningKey, end: Any) -> tuple[int, str]:
        async with knocking(shared_gateway, key, "keyed") as (socket, challenge):
            assert await says(socket, proof(key, challenge, "keyed"), HELLO) == "welcome"
            await asyncio.to_thread(end)
            await asyncio.wait_for(socket.wait_closed(), 20)
            return socket.close_code, socket.close_reason

    def revoke() -> None:
        assert shared_gateway.request("DELETE", f"/v1/tokens/{made['id']}").status == 200

    assert asyncio.run(out(revoked, revoke)) == (UNAUTHORIZED, "this node's token was revoked")
    public = key_text(bytes(revoked.verify_key))
    again = shared_gateway.upgrade("node_id=keyed", headers={"Authorization": f"Ed25519 {public}"})
    assert again.status == 401
    brief, _ = registered(shared_gateway, "keyed", expires_seconds=3)
    assert asyncio.run(out(brief, lambda: None)) == (UNAUTHORIZED, "this node's token has expired")


def test_a_token_that_ends_between_the_upgrade_and_the_hello_admits_no_caller(shared_gateway: GatewayProcess) -> None:
    made = shared_gateway.request("POST", "/v1/tokens", {"node_id": "late"}).json()

    async def attack() -> str:
        async with websockets.connect(f"{shared_gateway.ws_url}?token={made['token']}&node_id=late") as socket:
            await asyncio.to_thread(shared_gateway.request, "DELETE", f"/v1/tokens/{made['id']}")
            return await says(socket, json.dumps(hello_frame("late", ["late"])))

    assert asyncio.run(attack()) == "4401"


def test_connections_that_never_prove_a_key_make_room_for_those_that_do(shared_gateway: GatewayProcess) -> None:
    key, _ = registered(shared_gateway, "keyed")

    async def crowd() -> tuple[int, str]:
        async with contextlib.AsyncExitStack() as stack:
            silent = [(await stack.enter_async_context(knocking(shared_gateway, key, "keyed")))[0] for _ in range(12)]
            async with knocking(shared_gateway, key, "keyed") as (socket, challenge):
                answer = await says(socket, proof(key, challenge, "keyed"), HELLO)
            return sum(one.state is websockets.protocol.State.OPEN for one in silent), answer

    still_there, answer = asyncio.run(crowd())
    assert still_there <= 4 and answer == "welcome"


def farhand(*words: str, log: Path) -> subprocess.Popen[bytes] | ForkedProcess:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SA_", "FARHAND_"))}
    with log.open("ab") as file:
        return start_process([*FARHAND, *words], env, stdout=file, stderr=file)


def test_a_key_that_was_carried_over_by_hand(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    there = Command(tmp_path / "there")
    public = there("node", "key", "--id", "carried", "--json").json()["public_key"]
    assert there("node", "key", "--id", "carried").out.startswith(public), "made once"
    here = Command(shared_gateway.home)
    made = here("token", "create", "--node", "carried", "--public-key", public, "--json").json()
    assert made["token"] == "" and made["public_key"] == public and "TOKEN" not in made["command"]
    assert here("token", "create", "--node", "again", "--public-key", public).status == 1, "a key is one node's"
    assert here("token", "create", "--public-key", public).status == 2
    node = NodeProcess(
        shared_gateway, tmp_path / "node", "carried", state=tmp_path / "there", env={"SA_NODE_TOKEN": None}
    )
    with node:
        assert node.ok("Bash", {"command": "echo hi"})["output"].strip() == "hi"
        kept = next((tmp_path / "there" / "nodes").glob("carried-*/key.json"))
        assert kept.stat().st_mode & 0o777 == 0o600
        node.fails("Read", {"path": str(kept)}, "not_allowed")
        seed = json.loads(kept.read_text())["seed"]
        assert here("token", "revoke", made["id"]).status == 0
        wait_until(lambda: node.process is not None and node.process.poll() is not None, 15, "the end of the node")
    assert "revoked" in node.log.read_text() and seed not in node.log.read_text()


def test_a_node_does_not_sign_for_another_gateway(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    """A gateway to which a node is led astray could hand the question of the true one on, and use the answer there."""
    code = shared_gateway.request("POST", "/v1/pairings", {}).json()["code"]
    home = tmp_path / "state"
    done = Command(home)("join", f"{code}@127.0.0.1:{shared_gateway.port}", "--id", "led", "--no-run", "--json")
    assert done.json()["key"] is True, done
    kept = json.loads(next((home / "nodes").glob("led-*/key.json")).read_text())
    with GatewayProcess(tmp_path / "evil") as evil:
        # It even knows the node's key.
        made = evil.request("POST", "/v1/tokens", {"node_id": "led", "public_key": kept["public"]})
        assert made.status == 201
        log = tmp_path / "log"
        process = farhand("node", "--gateway", evil.url, "--id", "led", "--home", str(home), log=log)
        try:
            assert process.wait(60) == 1
        finally:
            process.kill()
        assert "is not the one this node joined" in log.read_text()
        assert not evil.get("/v1/nodes")["nodes"]


@pytest.mark.parametrize("key", ["", "ed25519:", "ed25519:AAAA", "rsa:AAAA", "ed25519:" + "é" * 43])
def test_an_invalid_key_is_refused(shared_gateway: GatewayProcess, key: str) -> None:
    answer = shared_gateway.request("POST", "/v1/tokens", {"node_id": "n", "public_key": key})
    assert answer.status == 400 and "public key" in answer.json()["error"]["message"]
