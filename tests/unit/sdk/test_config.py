"""Settings of the client: the guide's names and defaults, the address it connects to, and what is refused."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand.protocol.version import HELLO_SECONDS
from farhand.sdk import ConfigError, NodeClient, NodeInfo
from farhand.sdk.client import PONG_SECONDS, build_url
from farhand.sdk.connection import CONNECT_SECONDS

URL = "ws://localhost:3210/v1/nodes/ws"


def test_the_names_and_defaults_of_the_guide() -> None:
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(NodeClient).parameters.items()
        if parameter.default is not parameter.empty
    }
    assert {
        "node_id": "unnamed-node",
        "name": "unnamed-node",
        "node_type": "generic",
        "version": "0.1.0",
        "heartbeat_interval": 30.0,
        "max_concurrent_tools": 16,
        "max_request_bytes": 256 * 1024,
        "max_response_bytes": 1024 * 1024,
    }.items() <= defaults.items()
    assert {"gateway_ws_url", "token", "node_info", "tags", "reconnect_backoff"} <= set(defaults)
    assert NodeClient(URL).node_info == NodeInfo("unnamed-node", "unnamed-node", "generic", "0.1.0")


def test_the_time_limits() -> None:
    assert HELLO_SECONDS == 10, "the guide's time-out of the handshake"
    assert CONNECT_SECONDS == 10
    assert 30 + PONG_SECONDS <= 45, "a half-open link is found in 45 s at the default interval"


def test_the_default_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SA_GATEWAY_WS_URL", raising=False)
    assert NodeClient().shown_url == URL
    monkeypatch.setenv("SA_GATEWAY_WS_URL", "ws://elsewhere:1/v1/nodes/ws")
    assert NodeClient().shown_url == "ws://elsewhere:1/v1/nodes/ws"
    assert NodeClient(URL).shown_url == URL


def test_identity_as_one_object_or_in_parts() -> None:
    info = NodeInfo("i", "n", "t", "v", ["x"])
    assert NodeClient(URL, node_info=info).node_info is info
    assert NodeClient(URL, node_id="i", name="n", node_type="t", version="v", tags=["x"]).node_info == info


@pytest.mark.parametrize(
    ("token", "node_id", "url", "expected"),
    [
        ("secret", "mac-01", "ws://gateway:3210/v1/nodes/ws", "?token=secret&node_id=mac-01"),
        (None, "mac-01", "ws://gateway:3210/v1/nodes/ws", "?node_id=mac-01"),
        ("", "mac-01", "ws://gateway:3210/v1/nodes/ws", "?node_id=mac-01"),
        ("secret", "mac-01", "ws://gateway:3210/ws?region=eu", "&token=secret&node_id=mac-01"),
        ("a b&c=d#e+f%", "macos:studio", "ws://g/ws", "?token=a%20b%26c%3Dd%23e%2Bf%25&node_id=macos:studio"),
        ("ü/?", "a b", "ws://g/ws", "?token=%C3%BC%2F%3F&node_id=a%20b"),
    ],
)
def test_the_address_with_its_query(token: str | None, node_id: str, url: str, expected: str) -> None:
    assert build_url(url, token, node_id) == url + expected


@given(st.text(min_size=1), st.text(min_size=1), st.sampled_from(["ws://g/ws", "ws://g/ws?a=b", "wss://g:1/?x"]))
def test_any_token_and_id_come_out_of_the_query_as_they_went_in(token: str, node_id: str, url: str) -> None:
    built = build_url(url, token, node_id)
    assert built.isascii()
    query = dict(parse_qsl(urlsplit(built).query, strict_parsing=False, keep_blank_values=True))
    assert query["token"] == token
    assert query["node_id"] == node_id


@pytest.mark.parametrize(
    "options",
    [
        {"heartbeat_interval": 0},
        {"heartbeat_interval": -1},
        {"heartbeat_interval": float("nan")},
        {"max_concurrent_tools": 0},
        {"max_concurrent_tools": -5},
        {"max_request_bytes": 0},
        {"max_response_bytes": -1},
    ],
    ids=str,
)
def test_a_limit_that_lets_nothing_through_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        NodeClient(URL, **options)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:3210",
        "http://",
        "https:///v1/nodes/ws",
        "ftp://x",
        "ws://",
        "ws:///v1/nodes/ws",
        "ws://host:port/ws",
        "ws://host:99999/ws",
        "ws://host/ws#part",
        "ws://[::1/ws",
    ],
)
def test_an_address_that_cannot_work_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="gateway_ws_url"):
        NodeClient(url)


@pytest.mark.parametrize("token", ["line\nbreak", "carriage\rreturn", "null\x00"])
def test_a_token_that_no_header_can_carry_is_refused_without_being_shown(token: str) -> None:
    with pytest.raises(ConfigError, match="token") as caught:
        NodeClient(URL, token)
    assert token not in str(caught.value)


def test_a_missing_or_broken_ca_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ca_file"):
        NodeClient("wss://h/ws", ca_file=str(tmp_path / "missing.pem"))
    broken = tmp_path / "broken.pem"
    broken.write_text("not a certificate")
    with pytest.raises(ConfigError, match="ca_file"):
        NodeClient("wss://h/ws", ca_file=str(broken))


def test_the_shown_address_has_no_secret() -> None:
    client = NodeClient("ws://h:1/ws?token=secret", "secret")
    assert "secret" not in client.shown_url
    assert "secret" not in repr(client)
    assert "secret" not in NodeClient("ws://user:secret@h:1/ws").shown_url
