"""OAuth clients: redirect addresses, and metadata documents fetched from a real TLS server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from typing import Any

import pytest
import trustme

from farhand.gateway.access.oauth_clients import (
    ClientDocuments,
    OAuthError,
    display_name,
    is_public_address,
    matches_redirect_uri,
)


@pytest.mark.parametrize(
    ("asked", "registered", "same"),
    [
        ("https://a.example/cb", "https://a.example/cb", True),
        ("https://a.example:444/cb", "https://a.example/cb", False),
        ("https://a.example/cb/", "https://a.example/cb", False),
        ("https://a.example/cb?x", "https://a.example/cb", False),
        ("http://127.0.0.1:1/cb", "http://127.0.0.1/cb", True),
        ("http://[::1]:1/cb", "http://[::1]:2/cb", True),
        ("http://localhost:1/cb", "http://127.0.0.1:1/cb", False),
        ("http://localhost:1/cb", "http://localhost:2/cb", True),
        ("http://x@localhost:1/cb", "http://localhost:2/cb", False),
        ("http://127.0.0.1:1/cb#f", "http://127.0.0.1:2/cb", False),
        ("app.example:/cb", "app.example:/cb", True),
        ("app.example:/cb2", "app.example:/cb", False),
    ],
)
def test_redirect_addresses_match_exactly_but_for_local_ports(asked: str, registered: str, same: bool) -> None:
    assert matches_redirect_uri(asked, [registered]) is same


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public_address(address) is public


def test_names_are_one_printable_line() -> None:
    assert display_name("a\r\nb\x1b[31m\u202ec", "x") == "a b [31m c"
    assert display_name("  ", "fallback") == "fallback" and len(display_name("x" * 1000, "")) == 100


def http(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


async def fetched(answer: Any, *, name: str = "localhost", **changes: Any) -> Any:
    """Fetch a document from a server whose certificate is for `localhost`."""
    authority = trustme.CA()
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    url = ""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        document = {"client_id": url, "redirect_uris": ["https://client.example/cb"], "client_name": "Doc", **changes}
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer(json.dumps(document).encode()))
            await writer.drain()
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        url = f"https://{name}:{server.sockets[0].getsockname()[1]}/client.json"
        return await ClientDocuments(permitted=lambda _: True, tls=trusted).fetch(url)


def test_a_document_describes_its_client() -> None:
    found = asyncio.run(fetched(http))
    assert (found.client_name, found.redirect_uris) == ("Doc", ["https://client.example/cb"])


@pytest.mark.parametrize(
    ("answer", "changes", "reason"),
    [
        (http, {"client_id": "https://other.example/x"}, "another client_id"),
        (http, {"redirect_uris": ["http://evil.example"]}, "not a redirect address"),
        (http, {"token_endpoint_auth_method": "client_secret_post"}, "token_endpoint_auth_method"),
        (http, {"redirect_uris": "x"}, "not client metadata"),
        (http, {"padding": "x" * 20_000}, "more than 16384 bytes"),
        (lambda body: http(body, "404 Not Found"), {}, "answered 404"),
        (lambda body: http(body, "302 Found", "location: http://127.0.0.1/"), {}, "answered 302"),
        (lambda _: b"garbage", {}, "cannot be fetched"),
    ],
    ids=range(8),
)
def test_documents_that_cannot_be_used(answer: Any, changes: Any, reason: str) -> None:
    with pytest.raises(OAuthError, match=reason):
        asyncio.run(fetched(answer, **changes))


def test_a_certificate_for_another_name_is_refused() -> None:
    with pytest.raises(OAuthError, match="cannot be fetched"):
        asyncio.run(fetched(http, name="127.0.0.1"))


@pytest.mark.parametrize(
    "url",
    [
        "https://client.example",
        "https://client.example/",
        "https://user@client.example/x",
        "https://client.example/x#y",
        "https://client.example/a/../b",
        "https://localhost/x",
        "https://127.0.0.1/x",
        "https://[::1]/x",
        "https://0x7f000001/x",
        "https://2130706433/x",
        "https://127.1/x",
        "https://" + "x" * 3000,
    ],
    ids=lambda url: url[:40],
)
def test_urls_that_are_not_fetched(url: str) -> None:
    with pytest.raises(OAuthError, match="cannot be used"):
        asyncio.run(ClientDocuments().fetch(url))
