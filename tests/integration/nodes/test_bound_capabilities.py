"""A node that joins later does not take the calls of one that the owner admitted by name."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.support.harness import GatewayProcess, PlainNode

NAMES = itertools.count(1)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    home = tmp_path_factory.mktemp("bound") / "home"
    with GatewayProcess(home, env={"SA_NODE_CAPS": "granted:plug+other"}) as gateway:
        yield gateway


def own_token(gateway: GatewayProcess, node_id: str) -> str:
    return str(gateway.request("POST", "/v1/tokens", {"node_id": node_id}).json()["token"])


def listed(gateway: GatewayProcess, node_id: str) -> Any:
    return next(one for one in gateway.get("/v1/nodes")["nodes"] if one["node_id"] == node_id)


@contextlib.asynccontextmanager
async def serving(
    gateway: GatewayProcess, node_id: str, capabilities: list[str], *, own: bool
) -> AsyncIterator[PlainNode]:
    """A node that answers every call with its id."""
    options = {"token": await asyncio.to_thread(own_token, gateway, node_id)} if own else {}
    async with PlainNode.connect(gateway, node_id, capabilities, **options) as node:

        async def work() -> None:
            while True:
                request = await node.receive("tool_request", 60)
                await node.answer(request, node_id)

        task = asyncio.ensure_future(work())
        try:
            yield node
        finally:
            task.cancel()


def name() -> str:
    return f"plug{next(NAMES)}"


@pytest.mark.parametrize("own", [False, True], ids=["shared token", "token of its own"])
@pytest.mark.parametrize("suffix", ["", ".search", ".search.deep"])
def test_a_later_node_does_not_take_the_calls_of_one_with_its_own_token(
    gateway: GatewayProcess, own: bool, suffix: str
) -> None:
    plug = name()

    async def run() -> None:
        later = [f"{plug}{suffix}", f"later.{plug}"]
        async with (
            serving(gateway, f"first-{plug}", [plug], own=True),
            serving(gateway, f"later-{plug}", later, own=own),
        ):
            for _ in range(4):
                assert (await gateway.ainvoke(f"{plug}.search.deep"))["result"] == f"first-{plug}"
            assert (await gateway.ainvoke(f"later.{plug}"))["result"] == f"later-{plug}"
            node = await asyncio.to_thread(listed, gateway, f"later-{plug}")
            assert node["refused_capabilities"] == [f"{plug}{suffix}"] and node["capabilities"] == [f"later.{plug}"]
        # Nor while the first is offline.
        await asyncio.to_thread(gateway.wait_for_node, f"first-{plug}", online=False)
        async with serving(gateway, f"later-{plug}-2", [later[0], f"more.{plug}"], own=own):
            assert not (await gateway.ainvoke(f"{plug}.search.deep"))["ok"]

    asyncio.run(run())


def test_nodes_with_the_shared_token_serve_as_the_guide_says(gateway: GatewayProcess) -> None:
    plug = name()

    async def run() -> None:
        async with (
            serving(gateway, f"b-{plug}", [plug], own=False),
            serving(gateway, f"a-{plug}", [plug], own=False),
            serving(gateway, f"c-{plug}", [f"{plug}.search"], own=False),
        ):
            assert (await gateway.ainvoke(f"{plug}.other"))["result"] == f"a-{plug}"
            assert (await gateway.ainvoke(f"{plug}.search.x"))["result"] == f"c-{plug}"

    asyncio.run(run())


def test_a_node_that_served_it_before_continues(gateway: GatewayProcess) -> None:
    plug = name()

    async def run() -> None:
        async with serving(gateway, f"old-{plug}", [f"{plug}.search"], own=False):
            pass
        async with (
            serving(gateway, f"new-{plug}", [plug], own=True),
            serving(gateway, f"old-{plug}", [f"{plug}.search"], own=False),
        ):
            assert (await gateway.ainvoke(f"{plug}.search.x"))["result"] == f"old-{plug}"

    asyncio.run(run())


def test_the_owner_can_grant_it(gateway: GatewayProcess) -> None:
    async def run() -> None:
        async with (
            serving(gateway, "holder", ["plug"], own=True),
            serving(gateway, "granted", ["plug.search"], own=False),
        ):
            assert (await gateway.ainvoke("plug.search"))["result"] == "granted"

    asyncio.run(run())


def test_an_update_does_not_take_more(gateway: GatewayProcess) -> None:
    plug = name()

    async def run() -> None:
        async with (
            serving(gateway, f"first-{plug}", [plug], own=True),
            serving(gateway, f"sly-{plug}", [f"sly.{plug}"], own=False) as sly,
        ):
            await sly.send({"type": "tools_update", "capabilities": [f"sly.{plug}", f"{plug}.search"], "tools": []})
            assert (await gateway.ainvoke(f"sly.{plug}"))["ok"]  # the update was read before
            assert (await gateway.ainvoke(f"{plug}.search"))["result"] == f"first-{plug}"

    asyncio.run(run())


def test_it_is_bound_after_a_restart(gateway: GatewayProcess) -> None:
    plug = name()

    async def first() -> None:
        async with serving(gateway, f"first-{plug}", [plug], own=True):
            pass

    async def later() -> Any:
        async with serving(gateway, f"later-{plug}", [f"{plug}.search", f"more.{plug}"], own=False):
            return await asyncio.to_thread(listed, gateway, f"later-{plug}")

    asyncio.run(first())
    gateway.stop()
    gateway.start()
    assert asyncio.run(later())["refused_capabilities"] == [f"{plug}.search"]
