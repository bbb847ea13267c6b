"""One-time codes: one machine, one use, a short life, and no way to guess."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
import trustme

from farhand.api.server.router import Route, Router
from farhand.gateway.nodes.pairing import MOST_GUESSES, PairingCodes
from farhand.protocol.errors import FarhandError
from farhand.store.sqlite.store import SqliteStore
from tests.integration.cli.conftest import Command
from tests.support.fork_server import FARHAND, run_process, start_process
from tests.support.harness import GatewayProcess, PlainNode, wait_until


def code_of(gateway: GatewayProcess, **wanted: Any) -> str:
    answer = gateway.request("POST", "/v1/pairings", wanted)
    assert answer.status == 201, answer
    return str(answer.json()["code"])


def pair(gateway: GatewayProcess, code: str, node_id: str, **options: Any) -> Any:
    return gateway.request("POST", "/v1/pair", {"code": code, "node_id": node_id}, token=None, **options)


def test_the_printed_command_joins_and_the_node_comes_back_without_it(
    shared_gateway: GatewayProcess, tmp_path: Path
) -> None:
    out = Command(shared_gateway.home)("node", "pair", "--json").json()
    home = tmp_path / "other"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SA_", "FARHAND_"))}
    arguments = ["join", out["code"], "--id", "paired", "--home", str(home), "--workspace", str(tmp_path)]
    for words in (arguments, ["node", "--home", str(home), "--workspace", str(tmp_path)]):
        with (tmp_path / "log").open("ab") as log:
            process = start_process([*FARHAND, *words], env, stdout=log, stderr=log)
        try:
            shared_gateway.wait_for_node("paired")
            assert shared_gateway.invoke("paired__Bash", {"command": "echo hi"})["ok"] is True
        finally:
            process.terminate()
            process.wait(60)
        shared_gateway.wait_for_node("paired", online=False)
    kept = home / "node-token.json"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert json.loads(kept.read_text())["token"] == "", "it logs in by its key"
    key = next((home / "nodes").glob("paired-*/key.json"))
    assert key.stat().st_mode & 0o777 == 0o600
    seed = json.loads(key.read_text())["seed"]
    assert seed not in (tmp_path / "log").read_text() and seed not in shared_gateway.log.read_text()
    again = Command(tmp_path / "third")("join", out["code"], "--id", "more", "--json")
    assert again.status == 1 and again.json()["error"]["code"] == "unauthorized", "a code is good once"


@pytest.mark.parametrize(("option", "file"), [("--ca-file", "ca.pem"), ("--pinned-cert", "cert.pem")])
def test_by_what_a_gateway_was_known_is_kept(tmp_path: Path, option: str, file: str) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    (tmp_path / "cert.pem").write_bytes(issued.cert_chain_pems[0].bytes() + authority.cert_pem.bytes())
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    tls = ["--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem")]
    trusting = {"FARHAND_CA_FILE": str(tmp_path / "ca.pem")}
    with GatewayProcess(tmp_path / "home", *tls) as gateway:
        owner = Command(gateway.home, **trusting)
        code = owner("node", "pair", "--json").json()["code"]
        command = Command(tmp_path / "other")
        refused = command("join", code, "--id", "paired", "--no-run")
        assert refused.status == 1 and "--ca-file" in refused.err and "--pinned-cert" in refused.err
        joined = run_process(
            [*FARHAND, "join", code, "--id", "paired", "--no-run", option, file], env=command.env, cwd=tmp_path
        )
        assert joined.returncode == 0, joined.stderr
        node = command.start("node")
        try:
            wait_until(
                lambda: any(one["online"] for one in owner("nodes", "--json").json()["nodes"]), 20, "the node to join"
            )
        finally:
            node.terminate()
            node.communicate(timeout=60)


def test_only_one_of_many_that_use_a_code_at_once_gets_a_token(shared_gateway: GatewayProcess) -> None:
    code = code_of(shared_gateway)

    async def race() -> list[int]:
        tries = (asyncio.to_thread(pair, shared_gateway, code, f"racer{number}") for number in range(12))
        return [answer.status for answer in await asyncio.gather(*tries)]

    statuses = asyncio.run(race())
    assert sorted(statuses) == [201, *[401] * 11]


def test_a_code_is_for_its_node_and_never_for_one_that_is_known(shared_gateway: GatewayProcess) -> None:
    bound = code_of(shared_gateway, node_id="mine")
    assert pair(shared_gateway, bound, "yours").status == 401
    made = pair(shared_gateway, bound.lower().replace("-", " "), "mine")
    assert made.status == 201, "written as a person would"
    assert pair(shared_gateway, code_of(shared_gateway), "mine").status == 409
    assert pair(shared_gateway, code_of(shared_gateway), "gsv").status == 400

    async def join(node_id: str) -> None:
        async with PlainNode.connect(shared_gateway, node_id, token=made.json()["token"]):
            pass

    asyncio.run(join("mine"))
    with pytest.raises(Exception, match="401"):
        asyncio.run(join("yours"))


def test_who_may_pair_may_not_take_the_place_of_a_machine(shared_gateway: GatewayProcess) -> None:
    def token(*scopes: str) -> str:
        return str(shared_gateway.request("POST", "/v1/tokens", {"scopes": scopes}).json()["token"])

    pairer, reader = token("pair"), token("read", "chat", "tools.exec")
    assert shared_gateway.request("POST", "/v1/pairings", {}, token=reader).status == 403
    assert shared_gateway.request("POST", "/v1/pairings", {}, token=None).status == 401
    assert shared_gateway.request("POST", "/v1/pairings", {}, token=pairer).status == 201
    assert pair(shared_gateway, code_of(shared_gateway, node_id="taken"), "taken").status == 201
    assert shared_gateway.request("POST", "/v1/pairings", {"node_id": "taken"}, token=pairer).status == 403


def test_a_code_made_in_advance_does_not_take_the_place_of_a_machine(shared_gateway: GatewayProcess) -> None:
    pairer = shared_gateway.request("POST", "/v1/tokens", {"scopes": ["pair"]}).json()["token"]
    early = shared_gateway.request("POST", "/v1/pairings", {"node_id": "later"}, token=pairer).json()["code"]
    assert shared_gateway.request("POST", "/v1/tokens", {"node_id": "later"}).status == 201
    refused = pair(shared_gateway, early, "later")
    assert refused.status == 409 and "'later' is known here" in refused.json()["error"]["message"]
    assert pair(shared_gateway, code_of(shared_gateway, node_id="later"), "later").status == 201, "by the owner's wish"


@pytest.mark.parametrize("node_id", ["CELLAR", "\uff43ellar", "c\u0435llar"])
def test_no_code_admits_a_look_alike(shared_gateway: GatewayProcess, node_id: str) -> None:
    shared_gateway.request("POST", "/v1/tokens", {"node_id": "cellar"})
    pairer = shared_gateway.request("POST", "/v1/tokens", {"scopes": ["pair"]}).json()["token"]
    assert shared_gateway.request("POST", "/v1/pairings", {"node_id": node_id}, token=pairer).status == 403
    refused = pair(shared_gateway, code_of(shared_gateway), node_id)
    assert refused.status == 409 and "looks like 'cellar'" in refused.json()["error"]["message"]


def test_a_code_ends_with_the_token_that_made_it(shared_gateway: GatewayProcess) -> None:
    pairer = shared_gateway.request("POST", "/v1/tokens", {"scopes": ["pair"]}).json()
    code = shared_gateway.request("POST", "/v1/pairings", {}, token=pairer["token"]).json()["code"]
    assert shared_gateway.request("DELETE", f"/v1/tokens/{pairer['id']}").status == 200
    assert pair(shared_gateway, code, "orphan").status == 401


def test_only_one_of_many_codes_for_one_id_works(shared_gateway: GatewayProcess) -> None:
    codes = [code_of(shared_gateway) for _ in range(8)]

    async def race() -> list[int]:
        tries = (asyncio.to_thread(pair, shared_gateway, code, "contested") for code in codes)
        return [answer.status for answer in await asyncio.gather(*tries)]

    assert sorted(asyncio.run(race())) == [201, *[409] * 7]


def test_guessing_is_throttled(gateway: GatewayProcess) -> None:
    code = code_of(gateway)
    behind = {"X-Forwarded-For": "203.0.113.9"}
    statuses = [pair(gateway, f"AAAA-AA{number:02}", "x", headers=behind).status for number in range(20)]
    assert statuses[:10] == [401] * 10 and set(statuses[10:]) == {429}
    assert pair(gateway, code, "x", headers=behind).status == 429, "not even the right one, while locked"


def test_codes_end_by_time_and_by_wrong_guesses(tmp_path: Path) -> None:
    async def run() -> None:
        store = SqliteStore.open(tmp_path / "x.db")
        now = [0]
        pairing = PairingCodes(store, lambda: now[0])
        code = await pairing.make(None, "", "owner", 60)
        now[0] = 59_900
        assert await pairing.find(code) is not None
        now[0] = 60_000
        assert await pairing.find(code) is None
        code = await pairing.make(None, "", "owner", 60)
        for _ in range(MOST_GUESSES):
            assert await pairing.find("WRONGONE") is None
        assert await pairing.find(code) is None, "void after too many guesses"
        found = await pairing.find(await pairing.make(None, "", "owner", 60))
        assert found is not None, "and the next one is not"
        assert await pairing.use(found) and not await pairing.use(found)
        await store.close()

    asyncio.run(run())


def test_a_route_without_a_scope_stops_the_start() -> None:
    async def handler(_: Any) -> Any:
        raise AssertionError

    with pytest.raises(FarhandError, match="declares no scope"):
        Router([Route(method="GET", path="/v1/secrets", scope=None, summary="List secrets.", handler=handler)])
    with pytest.raises(FarhandError, match="declares no scope"):
        Router([Route(method="GET", path="/v1/secrets", scope=(), summary="List secrets.", handler=handler)])
