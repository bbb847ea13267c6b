"""Each part by itself behind a reverse proxy that serves the gateway under a path prefix and strips it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.console.test_prefix import PREFIX, PrefixProxy
from tests.support.browser import Open
from tests.support.harness import GatewayProcess, NodeProcess


@pytest.fixture
def proxy(shared_gateway: GatewayProcess) -> Iterator[PrefixProxy]:
    with PrefixProxy(shared_gateway.port) as opened:
        yield opened


def test_a_node_finds_the_socket_beneath_the_prefix(
    shared_gateway: GatewayProcess, proxy: PrefixProxy, tmp_path: Path
) -> None:
    """I11: `--gateway https://host/prefix` was taken for the address of the socket itself."""
    with NodeProcess(shared_gateway, tmp_path, "beneath", url=f"http://127.0.0.1:{proxy.port}{PREFIX}"):
        assert shared_gateway.invoke("beneath__Bash", {"command": "true"})["ok"] is True
    assert proxy.strays == []


def test_the_console_works_beneath_the_prefix(
    shared_gateway: GatewayProcess,
    proxy: PrefixProxy,
    visit: Open,
) -> None:
    one = visit()
    url = f"http://127.0.0.1:{proxy.port}{PREFIX}"
    one.page.goto(url + shared_gateway.request("POST", "/v1/signin", {}).json()["path"])
    one.seen(one.page.locator("#line"), "Live")
    assert proxy.strays == []


def test_the_docs_page_works_beneath_the_prefix(
    proxy: PrefixProxy,
    visit: Open,
) -> None:
    one = visit()
    one.page.goto(f"http://127.0.0.1:{proxy.port}{PREFIX}/docs")
    one.page.wait_for_selector("details", timeout=20_000)
    assert proxy.strays == []
