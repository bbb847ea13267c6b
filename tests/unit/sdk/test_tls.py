"""wss://: a certificate must be trusted and must name the gateway."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from farhand.sdk import NodeClient, ReconnectBackoff, ReconnectExhausted, Refused, ToolContext, ToolRegistry
from farhand.sdk.client import _tls_context
from tests.unit.sdk.wire import FakeGateway, RawGateway, asynchronous, serving


async def echo(ctx: ToolContext, args: Any) -> Any:
    return args


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> Iterator[str]:
    with authority.cert_pem.tempfile(dir=str(tmp_path)) as path:
        yield path


def served_by(authority: trustme.CA, name: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(name).configure_cert(context)
    return context


@asynchronous
async def test_a_gateway_of_a_trusted_authority(authority: trustme.CA, ca_file: str) -> None:
    registry = ToolRegistry().register("test.echo", echo)
    async with (
        FakeGateway(served_by(authority, "127.0.0.1")) as gateway,
        serving(gateway.url, registry, ca_file=ca_file, token="secret"),
    ):
        assert gateway.url.startswith("wss://")
        for number in range(2):
            peer = await gateway.accept()
            assert peer.headers["Authorization"] == "Bearer secret"
            assert (await peer.call("test.echo", "ü" * 30_000, f"r{number}"))["result"] == "ü" * 30_000
            peer.cut()
        await gateway.accept()


@asynchronous
async def test_an_untrusted_certificate_is_refused_before_the_token_is_sent(authority: trustme.CA) -> None:
    async with FakeGateway(served_by(authority, "127.0.0.1")) as gateway:
        with pytest.raises(Refused, match="certificate"):
            await NodeClient(gateway.url, "secret").run(ToolRegistry().register("test.echo", echo))
        assert gateway.upgrades == 0


@asynchronous
async def test_another_authority_does_not_help(authority: trustme.CA, tmp_path: Path) -> None:
    with trustme.CA().cert_pem.tempfile(dir=str(tmp_path)) as other:
        async with FakeGateway(served_by(authority, "127.0.0.1")) as gateway:
            with pytest.raises(Refused, match="certificate"):
                await NodeClient(gateway.url, "secret", ca_file=other).run(ToolRegistry())
            assert gateway.upgrades == 0


@asynchronous
async def test_a_certificate_for_another_name_is_refused(authority: trustme.CA, ca_file: str) -> None:
    async with FakeGateway(served_by(authority, "gateway.example")) as gateway:
        with pytest.raises(Refused, match="certificate"):
            await NodeClient(gateway.url, "secret", ca_file=ca_file).run(ToolRegistry())
        assert gateway.upgrades == 0


@asynchronous
async def test_the_scheme_in_capitals_does_not_bypass_it(authority: trustme.CA) -> None:
    async with FakeGateway(served_by(authority, "127.0.0.1")) as gateway:
        with pytest.raises(Refused, match="certificate"):
            await NodeClient(gateway.url.replace("wss", "WSS"), "secret").run(ToolRegistry())
        assert gateway.upgrades == 0


@asynchronous
async def test_nothing_is_sent_unencrypted_to_a_gateway_without_tls() -> None:
    heard = b""
    async with RawGateway() as gateway:
        client = NodeClient(
            gateway.url.replace("ws:", "wss:"), "secret", reconnect_backoff=ReconnectBackoff(0.01, 0.01, 1, 1)
        )
        task = client.spawn(ToolRegistry())
        for _ in range(2):
            peer = await gateway.accept()
            heard += await peer.reader.read(4096)
            peer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            peer.writer.close()
        with pytest.raises(ReconnectExhausted):
            await task
    assert heard
    assert b"secret" not in heard
    assert b"GET" not in heard


def test_the_system_certificates_stay_trusted_beside_a_ca_file(ca_file: str) -> None:
    with_file, without = _tls_context(ca_file, None), _tls_context(None, None)
    assert with_file.cert_store_stats()["x509_ca"] == without.cert_store_stats()["x509_ca"] + 1
    assert without.verify_mode is ssl.CERT_REQUIRED
    assert without.check_hostname
