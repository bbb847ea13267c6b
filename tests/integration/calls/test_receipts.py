"""Receipts: a node signs its answers, the gateway signs the record, and anyone verifies both offline."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farhand.cli.calls.receipt import MOST_BYTES
from farhand.protocol.receipts import Receipt, check, fingerprint
from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess, NodeProcess, PlainNode


def receipt_of(gateway: GatewayProcess, call_id: str, query: str = "") -> dict[str, Any]:
    found: dict[str, Any] = gateway.get(f"/v1/calls/{call_id}/receipt{query}")
    return found


def verdicts(receipt: dict[str, Any], **pinned: str) -> dict[str, str]:
    found = check(msgspec.convert(receipt, Receipt), pinned)
    return {finding.part: finding.verdict for finding in found}


def test_a_receipt_is_exported_and_verified_offline(hands: NodeProcess, tmp_path: Path) -> None:
    gateway, farhand = hands.gateway, Command(hands.gateway.home)
    done = gateway.invoke("hands__Bash", {"command": "echo hello"})
    file = tmp_path / "receipt.json"
    farhand("receipt", done["request_id"], "--content", "-o", str(file))
    receipt = json.loads(file.read_text())
    args = '{"command": "echo hello"}'
    assert receipt["call"]["args_sha256"] == hashlib.sha256(receipt["content"]["args"].encode()).hexdigest()
    assert json.loads(receipt["content"]["args"]) == json.loads(args)
    assert receipt["call"]["state"] == "ok" and receipt["call"]["credential"] == "owner"
    key = farhand("receipt", "key", "--json").json()
    node_key = fingerprint(receipt["node"]["key"])
    offline = Command(tmp_path / "nowhere")
    verified = offline("receipt", "verify", str(file), "--gateway-key", key["fingerprint"], "--node-key", node_key)
    assert verified.status == 0 and verified.out.rstrip().endswith("\nvalid"), verified
    wrong = offline("receipt", "verify", str(file), "--gateway-key", node_key)
    assert wrong.status == 1 and "gateway key" in wrong.out and "NOT VALID" in wrong.out
    assert offline("receipt", "verify", str(tmp_path / "none.json")).status == 1
    unpinned = offline("receipt", "verify", str(file))
    assert unpinned.status == 0 and "valid, if this gateway key is yours" in unpinned.out, unpinned
    assert "hands__Bash on hands by owner, ended as ok" in unpinned.out
    for text in ("[1]", "", file.read_text()[:200], file.read_text().replace('"call"', '"extra": 1, "call"', 1)):
        (tmp_path / "text").write_text(text)
        refused = offline("receipt", "verify", str(tmp_path / "text"))
        assert refused.status == 1 and "not a receipt" in refused.err and "Traceback" not in refused.err
    with (tmp_path / "large").open("wb") as large:
        large.truncate(MOST_BYTES + 1)
    assert "more than" in offline("receipt", "verify", str(tmp_path / "large")).err
    assert "no call" in farhand("receipt", "0123456789").err


def test_every_changed_part_is_named(hands: NodeProcess) -> None:
    gateway = hands.gateway
    done = gateway.invoke("hands__Bash", {"command": "true"})
    receipt = receipt_of(gateway, done["request_id"], "?content=1")
    assert "mismatch" not in verdicts(receipt).values()

    def changed(*path: str, value: Any) -> dict[str, str]:
        other = copy.deepcopy(receipt)
        place = other
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        found = verdicts(other)
        assert "mismatch" in found.values(), path
        return found

    assert changed("content", "args", value='{"command":"false"}')["content: arguments"] == "mismatch"
    assert changed("content", "result", value="null")["content: result"] == "mismatch"
    for name in ("tool", "credential", "state", "session_key"):
        assert changed("call", name, value="x")["gateway signature"] == "mismatch"
    for name in ("created_at", "ended_at"):
        assert changed("call", name, value=1)["gateway signature"] == "mismatch"
    found = changed("call", "args_sha256", value="0" * 64)
    assert found["arguments"] == "mismatch" and found["node signature"] == "ok"
    assert changed("call", "result_sha256", value="0" * 64)["result"] == "mismatch"
    assert changed("call", "id", value="x")["call id"] == "mismatch"
    statement = receipt["node"]["statement"].replace('"ok":true', '"ok":false')
    found = changed("node", "statement", value=statement)
    assert found["node signature"] == "mismatch" and found["outcome"] == "mismatch"
    assert changed("signature", value="AAAA")["gateway signature"] == "mismatch"
    assert changed("gateway", "key", value=receipt["node"]["key"])["gateway signature"] == "mismatch"
    assert changed("node", "key", value="ed25519:x")["node key"] == "mismatch"
    dropped = copy.deepcopy(receipt)
    dropped["node"] = {"note": "nothing to see"}
    assert verdicts(dropped)["gateway signature"] == "mismatch"
    assert verdicts(dropped, node=receipt["node"]["key"])["node signature"] == "mismatch"


def leaves(part: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in part.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name), value


def test_no_field_can_be_changed_or_added(hands: NodeProcess) -> None:
    gateway = hands.gateway
    done = gateway.invoke("hands__Bash", {"command": "true"})
    receipt = receipt_of(gateway, done["request_id"], "?content=1")
    changed = {bool: lambda old: not old, int: lambda old: old + 1, str: lambda old: old + "x"}
    for path, value in leaves(receipt):
        other = copy.deepcopy(receipt)
        place = other
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = "x" if value is None else changed[type(value)](value)
        assert "mismatch" in verdicts(other).values(), path
        place["unsigned"] = "approved"
        with pytest.raises(msgspec.ValidationError, match="unsigned"):
            verdicts(other)


def test_a_receipt_of_another_gateway_or_call_is_detected(hands: NodeProcess, tmp_path: Path) -> None:
    gateway = hands.gateway
    key = gateway.get("/v1/receipts/key")["fingerprint"]
    one, two = (receipt_of(gateway, gateway.invoke("hands__Bash", {"command": "id"})["request_id"]) for _ in range(2))
    mixed = verdicts({**one, "node": two["node"]}, gateway=key)
    assert mixed["gateway signature"] == mixed["call id"] == "mismatch"
    with GatewayProcess(tmp_path / "other") as other:
        theirs = receipt_of(other, other.invoke("gsv__ListFiles", {})["request_id"])
        assert verdicts(theirs, gateway=key) == {
            "gateway key": "mismatch",
            "gateway signature": "ok",
            "node signature": "absent",
        }
        forged = verdicts({**one, "gateway": theirs["gateway"], "signature": theirs["signature"]}, gateway=key)
        assert forged["gateway key"] == forged["gateway signature"] == "mismatch"


def test_refusals_and_errors_have_receipts_too(hands: NodeProcess) -> None:
    gateway = hands.gateway
    failed = gateway.invoke("hands__Read", {"path": "no-such-file"})
    receipt = receipt_of(gateway, failed["request_id"])
    assert receipt["call"]["state"] == "error" and verdicts(receipt)["result"] == "ok"
    own = gateway.invoke("gsv__ListFiles", {})
    receipt = receipt_of(gateway, own["request_id"])
    assert "no node ran this call" in receipt["node"]["note"] and verdicts(receipt)["node signature"] == "absent"
    refused = gateway.invoke("hands__Bash", {"comand": "x"})
    assert "mismatch" not in verdicts(receipt_of(gateway, refused["request_id"])).values()
    tried = gateway.invoke("hands__Bash", {"command": "echo x > tried", "trial": True})
    receipt = receipt_of(gateway, tried["request_id"])
    assert verdicts(receipt)["arguments"] == verdicts(receipt)["result"] == verdicts(receipt)["node signature"] == "ok"
    limited = Command(gateway.home)("token", "create", "--budget", "calls=0/day", "--json").json()["token"]
    body = {"tool": "hands__Bash", "args": {"command": "true"}}
    denied = gateway.request("POST", "/v1/tools/invoke", body, token=limited).json()
    receipt = receipt_of(gateway, denied["request_id"])
    assert receipt["call"]["state"] == "denied" and "the gateway denied it" in receipt["node"]["note"]


def test_a_call_with_an_unknown_outcome_has_an_honest_receipt(shared_gateway: GatewayProcess) -> None:
    async def scenario() -> Any:
        async with PlainNode.connect(shared_gateway, "lost", ["lost"]) as node:
            calling = asyncio.create_task(shared_gateway.ainvoke("lost.act", {}))
            await node.receive("tool_request")
        return await calling

    receipt = receipt_of(shared_gateway, asyncio.run(scenario())["request_id"])
    assert receipt["call"]["state"] == "unknown" and "did not arrive" in receipt["node"]["note"]
    assert "mismatch" not in verdicts(receipt).values()


def test_a_token_gets_receipts_of_its_own_calls_only(hands: NodeProcess) -> None:
    gateway = hands.gateway
    token = Command(gateway.home)("token", "create", "--tool", "hands__*", "--json").json()["token"]
    theirs = gateway.invoke("hands__Bash", {"command": "true"})["request_id"]
    body = {"tool": "hands__Bash", "args": {"command": "true"}}
    own = gateway.request("POST", "/v1/tools/invoke", body, token=token).json()["request_id"]
    assert gateway.request("GET", f"/v1/calls/{own}/receipt", token=token).status == 200
    assert gateway.request("GET", f"/v1/calls/{theirs}/receipt", token=token).status == 404
    waits = gateway.invoke("hands__Bash", {"command": "cat"}, background=True)["request_id"]
    assert gateway.request("GET", f"/v1/calls/{waits}/receipt").status in (200, 409)
    gateway.request("DELETE", f"/v1/calls/{waits}")


def test_a_secret_is_in_no_receipt(hands: NodeProcess) -> None:
    gateway, value = hands.gateway, "receipt-secret-value-1937"
    gateway.request("PUT", "/v1/secrets/RECEIPT_TEST", {"value": value})
    done = gateway.invoke("hands__Bash", {"command": 'echo "{{secret:RECEIPT_TEST}}"'})
    answer = gateway.request("GET", f"/v1/calls/{done['request_id']}/receipt?content=1")
    assert value.encode() not in answer.body and "mismatch" not in verdicts(answer.json()).values()
    assert "{{secret:RECEIPT_TEST}}" in answer.json()["content"]["args"]


def test_an_old_node_leaves_an_honest_receipt(shared_gateway: GatewayProcess) -> None:
    async def scenario() -> Any:
        async with PlainNode.connect(shared_gateway, "old", ["old"]) as node:
            calling = asyncio.create_task(shared_gateway.ainvoke("old.echo", {"x": 1}))
            await node.answer(await node.receive("tool_request"), {"x": 1})
            return await calling

    receipt = receipt_of(shared_gateway, asyncio.run(scenario())["request_id"])
    assert "did not sign" in receipt["node"]["note"] and verdicts(receipt)["node signature"] == "absent"


def test_a_signed_answer_survives_a_kill_before_the_export(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home") as gateway, NodeProcess(gateway, tmp_path, "hands"):
        done = gateway.invoke("hands__Bash", {"command": "echo kept"})
        before = receipt_of(gateway, done["request_id"])
        gateway.kill()
        gateway.start()
        after = receipt_of(gateway, done["request_id"])
        assert after["node"] == before["node"] and after["call"] == before["call"]
        assert after["gateway"]["key"] == before["gateway"]["key"] and "mismatch" not in verdicts(after).values()
