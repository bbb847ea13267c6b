"""What HTTP clients expect of a server: conditional and partial requests, compression, request ids, CORS, 404s."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import GatewayProcess, NodeProcess

FILE = "/v1/workspace/main/features/data.bin"
DATA = bytes(range(256)) * 40
PAGE = "https://page.example"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    home = tmp_path_factory.mktemp("features") / "home"
    with GatewayProcess(home, env={"FARHAND_GATEWAY_ORIGINS": PAGE}) as process:
        assert process.request("PUT", FILE, DATA, headers={"Content-Type": "application/octet-stream"}).status == 200
        yield process


def test_a_file_that_is_known_is_not_sent_again(gateway: GatewayProcess) -> None:
    first = gateway.request("GET", FILE)
    etag = first.headers["etag"]
    assert first.body == DATA and first.headers["accept-ranges"] == "bytes"
    for tags in (etag, f"W/{etag}", f'"x", {etag}', "*"):
        again = gateway.request("GET", FILE, headers={"If-None-Match": tags})
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", etag), tags
        assert "content-length" not in again.headers
    assert gateway.request("HEAD", FILE, headers={"If-None-Match": etag}).status == 304
    for tags in ('"other"', etag.strip('"'), ""):
        assert gateway.request("GET", FILE, headers={"If-None-Match": tags}).status == 200, tags


@pytest.mark.parametrize(
    ("header", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=0-9", 0, 10),
        ("bytes=100-", 100, len(DATA)),
        ("bytes=-10", len(DATA) - 10, len(DATA)),
        ("bytes=-99999999", 0, len(DATA)),
        ("bytes=10200-99999999", 10200, len(DATA)),
        ("BYTES=5-6", 5, 7),
    ],
)
def test_a_part_of_a_file(gateway: GatewayProcess, header: str, start: int, end: int) -> None:
    answer = gateway.request("GET", FILE, headers={"Range": header})
    assert (answer.status, answer.body) == (206, DATA[start:end])
    assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/{len(DATA)}"
    assert answer.headers["content-length"] == str(end - start)


def test_ranges_that_cannot_be_served(gateway: GatewayProcess) -> None:
    for header in ("bytes=99999-", f"bytes={len(DATA)}-", "bytes=-0"):
        answer = gateway.request("GET", FILE, headers={"Range": header})
        assert (answer.status, answer.headers["content-range"]) == (416, f"bytes */{len(DATA)}"), header
    for header in (
        "bytes=5-3",
        "bytes=a-b",
        "lines=1-2",
        "bytes=0-1,4-5",
        "bytes=",
        "bytes=-",
        "bytes=" + "9" * 40 + "-",
    ):
        answer = gateway.request("GET", FILE, headers={"Range": header})
        assert (answer.status, answer.body) == (200, DATA), header
    etag = gateway.request("HEAD", FILE).headers["etag"]
    assert gateway.request("GET", FILE, headers={"Range": "bytes=0-0", "If-Range": etag}).status == 206
    assert gateway.request("GET", FILE, headers={"Range": "bytes=0-0", "If-Range": '"old"'}).status == 200


def test_a_part_of_the_output_of_a_call(gateway: GatewayProcess, tmp_path: Path) -> None:
    with NodeProcess(gateway, tmp_path, "hands"):
        call = gateway.invoke("hands__Bash", {"command": "printf 0123456789"})
        path = f"/v1/calls/{call['request_id']}/output"
        whole = gateway.request("GET", f"{path}?wait=0")
        assert (whole.status, whole.body) == (200, b"0123456789")
        etag = whole.headers["etag"]
        assert gateway.request("GET", f"{path}?wait=0", headers={"If-None-Match": etag}).status == 304
        for header, part in (("bytes=2-4", b"234"), ("bytes=8-", b"89"), ("bytes=0-99", b"0123456789")):
            answer = gateway.request("GET", path, headers={"Range": header})
            assert (answer.status, answer.body) == (206, part), header
            assert answer.headers["content-range"].endswith("/10")
        assert gateway.request("GET", path, headers={"Range": "bytes=10-"}).status == 416
        assert gateway.request("GET", path).body == b"0123456789"


def test_large_text_is_compressed_for_those_who_take_it(gateway: GatewayProcess) -> None:
    plain = gateway.request("GET", "/v1/openapi.json")
    assert "content-encoding" not in plain.headers and "Accept-Encoding" in plain.headers["vary"]
    for accepted in ("gzip", "br;q=1.0, gzip;q=0.5, *;q=0", "GZIP", "*"):
        small = gateway.request("GET", "/v1/openapi.json", headers={"Accept-Encoding": accepted})
        assert small.headers["content-encoding"] == "gzip" and len(small.body) < len(plain.body) / 4
        assert gzip.decompress(small.body) == plain.body
    for accepted in ("identity", "gzip;q=0", "gzip; q=0.000", "br"):
        same = gateway.request("GET", "/v1/openapi.json", headers={"Accept-Encoding": accepted})
        assert "content-encoding" not in same.headers and same.body == plain.body
    taken = {"Accept-Encoding": "gzip"}
    assert gzip.decompress(gateway.request("GET", "/docs.js", token=None, headers=taken).body).startswith(b"//")
    for method, path, body in (
        ("GET", FILE, None),
        ("POST", "/v1/tokens", {"label": "x" * 100}),
        ("GET", "/healthz", None),
    ):
        assert "content-encoding" not in gateway.request(method, path, body, headers=taken).headers, path


def test_the_request_id_of_a_client_is_echoed(gateway: GatewayProcess) -> None:
    call: dict[str, Any] = {"tool": "no.such"}
    for given in ("abc", "req-1_2.3:4", "7f9c2ba4e88f827d61604507605853ed", "x" * 128):
        for method, path, body in (
            ("GET", "/v1/nodes", None),
            ("GET", "/nothing", None),
            ("POST", "/v1/tools/invoke", call),
        ):
            answer = gateway.request(method, path, body, headers={"X-Request-Id": given})
            assert answer.headers["x-request-id"] == given, path
        assert (
            gateway.request("GET", "/v1/nodes", token=None, headers={"X-Request-Id": given}).headers["x-request-id"]
            == given
        )
    for given in ("", "x" * 129, "a b", "<script>", "a\tb", "\xe9", "-x", "a,b", "a;b"):
        echoed = gateway.request("GET", "/v1/nodes", headers={"X-Request-Id": given}).headers["x-request-id"]
        assert echoed and echoed != given
    answer = gateway.request("POST", "/v1/tools/invoke", call)
    assert answer.headers["x-request-id"] == answer.json()["request_id"]


def test_pages_of_listed_origins_may_call(gateway: GatewayProcess) -> None:
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = gateway.request("OPTIONS", "/v1/tools/invoke", token=None, headers=asked)
    assert (preflight.status, preflight.body) == (204, b"")
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "Authorization" in preflight.headers["access-control-allow-headers"]
    asked["Access-Control-Request-Headers"] = "authorization,x-stainless-lang,x-farhand-page,cookie"
    allowed = gateway.request("OPTIONS", "/v1/responses", token=None, headers=asked)
    assert allowed.headers["access-control-allow-headers"].endswith(", x-stainless-lang")
    for answer in (
        gateway.request("GET", "/v1/nodes", headers={"Origin": PAGE}),
        gateway.request("GET", "/v1/nodes", token=None, headers={"Origin": PAGE}),
        gateway.request("GET", "/nothing", headers={"Origin": PAGE}),
        preflight,
    ):
        assert answer.headers["access-control-allow-origin"] == PAGE and "Origin" in answer.headers["vary"]
        assert "access-control-allow-credentials" not in answer.headers
    for origin in ("https://other.example", "http://page.example", "https://page.example:8443", "null", "*"):
        for method in ("OPTIONS", "GET"):
            answer = gateway.request(method, "/v1/nodes", headers={**asked, "Origin": origin})
            assert answer.status == 403 and not any(name.startswith("access-control") for name in answer.headers), (
                origin
            )
    same = gateway.request("GET", "/v1/nodes", headers={"Origin": gateway.url})
    assert same.status == 200 and not any(name.startswith("access-control") for name in same.headers)
    session = gateway.sign_in()
    assert (
        gateway.request("GET", "/v1/nodes", token=None, headers={"Cookie": session["Cookie"], "Origin": PAGE}).status
        == 401
    )


def test_errors_of_the_openai_routes_have_their_shape(gateway: GatewayProcess) -> None:
    body = {"model": "farhand", "messages": [{"role": "user", "content": "x"}]}
    path = "/v1/chat/completions"
    for answer, kind, param in (
        (gateway.request("POST", path, body, token=None), "authentication_error", None),
        (gateway.request("POST", path, {"model": "farhand"}), "invalid_request_error", "messages"),
        (gateway.request("POST", path, {**body, "model": "no-such"}), "invalid_request_error", "model"),
        (gateway.request("GET", "/v1/models/no-such"), "invalid_request_error", "model"),
    ):
        error = answer.json()["error"]
        assert {"message", "type", "param", "code"} <= set(error) and error["type"] == kind, error
        assert error["param"] == param
    assert set(gateway.request("GET", "/nothing").json()["error"]) == {"code", "message"}


def test_unknown_places_where_clients_look_for_metadata_do_not_exist(gateway: GatewayProcess) -> None:
    for path in (
        "/.well-known/openid-configuration",
        "/.well-known/oauth-authorization-server/mcp",
        "/.well-known/nothing",
    ):
        assert gateway.request("GET", path, token=None).status == 404, path
    assert gateway.request("POST", "/register", {}, token=None).status == 404
    assert gateway.request("GET", "/nothing", token=None).status == 401
