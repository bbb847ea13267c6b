"""The node socket refuses a malformed `Host` and an `Origin` that is more than an origin, with a token that is good."""

from __future__ import annotations

import pytest

from tests.support.harness import SHARED_TOKEN, GatewayProcess

NODE = {"Authorization": f"Bearer {SHARED_TOKEN}"}


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "127.0.0.1:{port}.evil.example"},
        {"Host": "127.0.0.1:{port}@evil.example"},
        {"Host": "127.0.0.1:{port}", "Origin": "http://127.0.0.1:{port}/path"},
        {"Host": "127.0.0.1:{port}", "Origin": "http://127.0.0.1:{port}/"},
    ],
)
def test_the_node_socket_parses_strictly(shared_gateway: GatewayProcess, headers: dict[str, str]) -> None:
    """S19: these passed the guard."""
    sent = {name: value.format(port=shared_gateway.port) for name, value in headers.items()}
    assert shared_gateway.upgrade("", {**NODE, **sent}).status == 403
    assert shared_gateway.upgrade("", {**NODE, "Host": f"127.0.0.1:{shared_gateway.port}"}).status == 101
