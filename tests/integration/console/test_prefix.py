"""Behind a reverse proxy that serves the gateway under a path prefix and strips it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from farhand.cli.run.node import node_socket_url
from farhand.sdk.client import socket_url
from tests.support.browser import Open
from tests.support.harness import SHARED_TOKEN, GatewayProcess, NodeProcess, PluginProcess, Proxy, running

PREFIX = "/tools/hands"
REQUEST = re.compile(rb"(GET|HEAD|POST|PUT|DELETE|OPTIONS) (\S+) HTTP/1\.1\r\n")

PLUGIN = """
import asyncio
from farhand.sdk import NodeClient, NodeInfo, ToolContext, ToolRegistry

registry = ToolRegistry()

@registry.tool("far.echo")
async def echo(ctx: ToolContext, text: str) -> str:
    return text

asyncio.run(NodeClient(node_info=NodeInfo("far", "far", "generic", "0.1.0")).run(registry))
"""


class PrefixProxy(Proxy):
    """Strips the prefix from every request; one without it goes nowhere."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.strays: list[bytes] = []

    def spoiled(self, data: bytes) -> bytes:
        found = REQUEST.match(data)
        if found is None:
            return data
        path = found[2]
        if not path.startswith(PREFIX.encode() + b"/"):
            self.strays.append(path)
            path = PREFIX.encode() + b"/nothing"
        return data.replace(found[2], path.removeprefix(PREFIX.encode()), 1)


@pytest.fixture(scope="module")
def proxy(shared_gateway: GatewayProcess) -> Iterator[PrefixProxy]:
    with PrefixProxy(shared_gateway.port) as opened:
        yield opened
    assert opened.strays == [], "every address has the prefix"


def test_a_node_a_plug_in_and_the_console_work_under_a_prefix(
    shared_gateway: GatewayProcess, proxy: PrefixProxy, tmp_path: Path, visit: Open
) -> None:
    url = f"http://127.0.0.1:{proxy.port}{PREFIX}"
    plugin = PluginProcess(PLUGIN, tmp_path, {"SA_NODE_TOKEN": SHARED_TOKEN, "SA_GATEWAY_WS_URL": url})
    with NodeProcess(shared_gateway, tmp_path, "near", url=url), running(plugin):
        shared_gateway.wait_for_node("far")
        assert shared_gateway.invoke("far.echo", {"text": "x"})["ok"] is True
        assert shared_gateway.invoke("near__Bash", {"command": "true"})["ok"] is True
        one = visit()
        page = one.page
        page.goto(url + shared_gateway.request("POST", "/v1/signin", {}).json()["path"])
        one.seen(page.locator("#line"), "Live")
        assert page.url == f"{url}/"
        one.seen(page.locator("article").filter(has_text="near"), "online")
        call = shared_gateway.invoke("far.echo", {"text": "seen under the prefix"})
        one.go(f"calls/{call['request_id']}")
        one.seen(page.get_by_label("Result", exact=True), "seen under the prefix")
        page.reload()
        one.seen(page.locator("#line"), "Live")
        page.goto(f"{url}/docs")
        page.wait_for_selector("details")
        page.get_by_role("link", name="console").click()
        one.seen(page.locator("#line"), "Live")
        one.button("Sign out").click()
        one.seen(page.locator("#signed-out"), "farhand console")
        one.complaints.clear()


@pytest.mark.parametrize(
    ("given", "socket"),
    [
        ("gateway:3210", "ws://gateway:3210/v1/nodes/ws"),
        ("http://gateway:3210", "ws://gateway:3210/v1/nodes/ws"),
        ("https://host/prefix", "wss://host/prefix/v1/nodes/ws"),
        ("https://host/prefix/", "wss://host/prefix/v1/nodes/ws"),
        ("https://host/a/b/v1/nodes/ws", "wss://host/a/b/v1/nodes/ws"),
        ("https://host/prefix?region=eu", "wss://host/prefix/v1/nodes/ws?region=eu"),
        ("ws://host", "ws://host/v1/nodes/ws"),
        ("wss://host:1/", "wss://host:1/v1/nodes/ws"),
        ("wss://host/other/socket", "wss://host/other/socket"),
    ],
)
def test_the_socket_of_an_address(given: str, socket: str) -> None:
    assert node_socket_url(given) == socket
    if given.startswith("http"):
        assert socket_url(given) == socket


def test_sdk_addresses_of_sockets_are_left_alone() -> None:
    for url in ("ws://host", "wss://host/other", "nonsense", ""):
        assert socket_url(url) == url
