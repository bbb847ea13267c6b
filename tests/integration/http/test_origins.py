"""`Host` and `Origin` are parsed strictly, at every door."""

from __future__ import annotations

from pathlib import Path

import pytest

from farhand.api.server.origins import Host, Origin, parse_host, parse_origin
from tests.support.harness import SHARED_TOKEN, GatewayProcess

MALFORMED = [
    "127.0.0.1:{port}.evil.example",
    "127.0.0.1:{port}@evil.example",
    "user@127.0.0.1:{port}",
    "127.0.0.1:{port}/",
    "127.0.0.1:{port}/path",
    "127.0.0.1:{port}?x",
    "127.0.0.1:{port}#x",
    "127.0.0.1:{port} evil.example",
    "127.0.0.1:{port},evil.example",
    "127.0.0.1.:{port}",
    "localhost.:{port}",
    "localhost.",
    ".localhost",
    "local..host",
    "127.0.0.1:",
    "127.0.0.1:0",
    "127.0.0.1:00080",
    "127.0.0.1:65536",
    "127.0.0.1:+80",
    "127.0.0.1:80x",
    "127.0.0.1::{port}",
    "127.1:{port}",
    "127.0.0.256",
    "0x7f000001",
    "0177.0.0.1",
    "2130706433",
    "::1",
    "[::1",
    "::1]",
    "[::1]{port}",
    "[::1]:",
    "[::1]:0",
    "[::1].evil.example",
    "[::1]:{port}.evil.example",
    "[::1%eth0]",
    "[127.0.0.1]",
    "[localhost]",
    "loc%61lhost",
    "localhost\\evil.example",
    "l\xf6calhost",
    "-localhost",
    "a" * 300,
]
FOREIGN = ["null", "https://{place}", "HTTP://{place}", "http:{place}", "//{place}", "http://{place}/", "file://", "x"]


@pytest.mark.parametrize("host", MALFORMED)
def test_a_malformed_host_is_refused_by_http_mcp_events_and_the_node_socket(
    shared_gateway: GatewayProcess, host: str
) -> None:
    sent = {"Host": host.format(port=shared_gateway.port)}
    for method, path in (("GET", "/v1/nodes"), ("GET", "/v1/events"), ("POST", "/mcp"), ("GET", "/healthz")):
        answer = shared_gateway.request(method, path, headers=sent)
        assert (answer.status, answer.json()["error"]["code"]) == (403, "host_not_allowed"), path
    node = {"Authorization": f"Bearer {SHARED_TOKEN}"}
    assert shared_gateway.upgrade("", {**node, **sent}).status == 403


@pytest.mark.parametrize("origin", [*(f"http://{host}" for host in MALFORMED), *FOREIGN])
def test_a_malformed_or_foreign_origin_is_refused_everywhere(shared_gateway: GatewayProcess, origin: str) -> None:
    place = f"127.0.0.1:{shared_gateway.port}"
    sent = {"Host": place, "Origin": origin.format(port=shared_gateway.port, place=place)}
    for method, path in (("GET", "/v1/nodes"), ("GET", "/v1/events"), ("POST", "/mcp"), ("GET", "/healthz")):
        answer = shared_gateway.request(method, path, headers=sent)
        assert (answer.status, answer.json()["error"]["code"]) == (403, "origin_not_allowed"), path
    node = {"Authorization": f"Bearer {SHARED_TOKEN}"}
    assert shared_gateway.upgrade("", {**node, **sent}).status == 403


def test_spellings_of_one_name_are_the_same(tmp_path: Path) -> None:
    env: dict[str, str | None] = {
        "FARHAND_GATEWAY_HOSTS": "Hands.Example,b\u00fccher.example",
        "FARHAND_GATEWAY_ORIGINS": "https://App.example/,https://page.example:8443",
    }
    with GatewayProcess(tmp_path / "home", env=env) as gateway:
        for host in ("HANDS.example", "hands.example:443", "xn--bcher-kva.example", "[0:0::1]:80", "[::1]"):
            assert gateway.request("GET", "/v1/nodes", headers={"Host": host}).status == 200, host
        for origin in ("https://app.example", "https://app.example:443", "https://page.example:8443"):
            assert gateway.request("GET", "/v1/nodes", headers={"Origin": origin}).status == 200, origin
        for origin in (
            "http://app.example",
            "https://app.example:8443",
            "https://page.example",
            "https://x.app.example",
        ):
            assert gateway.request("GET", "/v1/nodes", headers={"Origin": origin}).status == 403, origin
        same = {"Host": "[0:0::1]:80", "Origin": "http://[::1]"}
        assert gateway.request("GET", "/v1/nodes", headers=same).status == 200


@pytest.mark.parametrize(
    ("name", "value"), [("HOSTS", "https://hands.example"), ("ORIGINS", "hands.example"), ("ORIGINS", "*")]
)
def test_invalid_names_in_settings_stop_the_start(tmp_path: Path, name: str, value: str) -> None:
    gateway = GatewayProcess(tmp_path / "home", env={f"FARHAND_GATEWAY_{name}": value})
    gateway.start(wait=False)
    assert gateway.process is not None
    try:
        assert gateway.process.wait(60) == 1
    finally:
        gateway.stop()
    assert f"[gateway] {name.lower()}: '{value}' is not" in gateway.log.read_text()


def test_parsed_values() -> None:
    assert parse_host("LocalHost:3210") == Host("localhost", 3210, is_address=False)
    assert parse_host("[2001:DB8::0:1]") == Host("2001:db8::1", None, is_address=True)
    assert parse_host("my_host.lan") == Host("my_host.lan", None, is_address=False)
    assert parse_origin("http://a.example") == parse_origin("http://a.example:80") == Origin("http", "a.example", 80)
