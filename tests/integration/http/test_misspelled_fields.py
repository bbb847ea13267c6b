"""A misspelled field of a body is refused: ignoring it would widen a token, or do for real what was to be tried."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.harness import GatewayProcess


@pytest.mark.parametrize(
    ("operation", "body", "wrong", "meant"),
    [
        ("POST /v1/tokens", {"scopes": ["tools.exec"], "node": ["alpha"]}, "node", "nodes"),
        ("POST /v1/tokens", {"scopes": ["tools.exec"], "tool": ["alpha__Read"]}, "tool", "tools"),
        ("POST /v1/pairings", {"limit": {"root": ["/srv"]}}, "limit", "limits"),
        ("PUT /v1/hooks/h1", {"tool": "none"}, "tool", "tools"),
        ("POST /v1/calls/01a1eafc-7cd2-7156-b548-550a5a75d176/undo", {"dryRun": True}, "dryRun", "dry_run"),
        ("POST /v1/tools/invoke", {"tool": "exec", "args": {}, "backgroud": True}, "backgroud", "background"),
        ("POST /v1/tools/fanout", {"tool": "Bash", "nodes": [], "canry": 1}, "canry", "canary"),
        ("POST /v1/terminals", {"node": "alpha", "comand": "true"}, "comand", "command"),
        ("POST /v1/policy/explain", {"tool": "exec", "arg": {}}, "arg", "args"),
        ("POST /v1/sessions/main/messages", {"message": "hi", "timeout": 1}, "timeout", "timeout_seconds"),
    ],
)
def test_the_closest_field_is_named(
    shared_gateway: GatewayProcess, operation: str, body: dict[str, Any], wrong: str, meant: str
) -> None:
    method, _, path = operation.partition(" ")
    answer = shared_gateway.request(method, path, body)
    assert answer.status == 400, answer
    error = answer.json()["error"]
    assert f"unknown field '{wrong}'" in error["message"] and f"did you mean '{meant}'" in error["message"], error


def test_a_freeze_is_never_refused_for_its_spelling(shared_gateway: GatewayProcess) -> None:
    try:
        assert shared_gateway.request("POST", "/v1/freeze", {"reson": "fire"}).status == 200
    finally:
        assert shared_gateway.request("POST", "/v1/thaw", {}).status == 200
