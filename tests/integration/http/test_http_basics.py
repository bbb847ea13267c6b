"""A file that a client has is not sent again, and large text is sent compressed: each by itself."""

from __future__ import annotations

import gzip

from tests.support.harness import GatewayProcess

FILE = "/v1/workspace/main/basics/data.txt"


def test_a_client_that_has_the_file_is_answered_304(shared_gateway: GatewayProcess) -> None:
    """I9: `If-None-Match` was ignored."""
    assert shared_gateway.request("PUT", FILE, b"some text").status == 200
    first = shared_gateway.request("GET", FILE)
    assert (first.status, first.body) == (200, b"some text")
    again = shared_gateway.request("GET", FILE, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status, again.body) == (304, b"")


def test_large_text_is_sent_compressed(shared_gateway: GatewayProcess) -> None:
    whole = shared_gateway.request("GET", "/v1/openapi.json").body
    assert len(whole) > 10_000
    answer = shared_gateway.request("GET", "/v1/openapi.json", headers={"Accept-Encoding": "gzip"})
    assert answer.headers.get("content-encoding") == "gzip"
    assert gzip.decompress(answer.body) == whole
