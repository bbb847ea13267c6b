"""Transfers into and out of the agent's workspace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import GatewayProcess, NodeProcess, Proxy, wait_until

MIB = 1024 * 1024


class Bench:
    """A node behind a proxy, and the workspace of `main`."""

    def __init__(self, gateway: GatewayProcess, node: NodeProcess, proxy: Proxy) -> None:
        self.gateway = gateway
        self.node = node
        self.proxy = proxy
        self.workspace = gateway.home / "agents" / "main"

    def call(self, source: str, destination: str, **options: Any) -> Any:
        return self.gateway.invoke("gsv__Transfer", {"source": source, "destination": destination}, **options)

    def move(self, source: str, destination: str, **options: Any) -> Any:
        answer = self.call(source, destination, **options)
        assert answer["ok"] is True, answer
        return answer["result"]

    def fails(self, source: str, destination: str, kind: str, **options: Any) -> str:
        answer = self.call(source, destination, **options)
        assert answer["ok"] is False and answer["error"]["kind"] == kind, answer
        return str(answer["error"]["message"])


@pytest.fixture(scope="module")
def bench(shared_gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Proxy(shared_gateway.port) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        with NodeProcess(shared_gateway, tmp_path_factory.mktemp("box"), "box", url=url) as node:
            yield Bench(shared_gateway, node, proxy)


def test_from_a_node_into_the_workspace_and_back(bench: Bench) -> None:
    content = os.urandom(5 * MIB + 3)
    (bench.node.workspace / "data.bin").write_bytes(content)
    result = bench.move("box:data.bin", "gsv:kept/data.bin")
    assert result["bytesTransferred"] == len(content) and result["destination"] == "gsv:kept/data.bin"
    assert (bench.workspace / "kept" / "data.bin").read_bytes() == content
    result = bench.move("gsv:kept/data.bin", "box:deep/er/back.bin")
    assert result["bytesTransferred"] == len(content) and result["source"] == "gsv:kept/data.bin"
    assert (bench.node.workspace / "deep" / "er" / "back.bin").read_bytes() == content


def test_an_empty_file_both_ways(bench: Bench) -> None:
    (bench.node.workspace / "empty").touch()
    bench.move("box:empty", "gsv:empty")
    bench.move("gsv:empty", "box:empty-back")
    assert (bench.node.workspace / "empty-back").read_bytes() == b""


def test_under_its_own_name_into_a_folder(bench: Bench) -> None:
    (bench.node.workspace / "named.md").write_text("# named\n")
    bench.move("box:named.md", "gsv:inbox/")
    bench.move("box:named.md", "gsv:inbox")
    assert (bench.workspace / "inbox" / "named.md").read_text() == "# named\n"


def test_a_folder_both_ways(bench: Bench) -> None:
    tree = bench.node.workspace / "tree"
    (tree / "in").mkdir(parents=True)
    (tree / "in" / "x").write_text("x")
    (tree / "y").write_bytes(os.urandom(MIB + 1))
    bench.move("box:tree", "gsv:tree")
    bench.move("gsv:tree", "box:again")
    again = bench.node.workspace / "again"
    assert (again / "in" / "x").read_text() == "x" and (again / "y").read_bytes() == (tree / "y").read_bytes()


def test_paths_of_the_agent_and_of_no_other(bench: Bench) -> None:
    (bench.node.workspace / "p").write_text("p")
    bench.move("box:p", "gsv:agents/main/p")
    assert (bench.workspace / "p").read_text() == "p"
    bench.fails("box:p", "gsv:agents/other/p", "not_allowed")
    bench.fails("gsv:agents/other/p", "box:stolen", "not_allowed")
    bench.move("box:p", "gsv:p", agent_id="other")
    assert (bench.gateway.home / "agents" / "other" / "p").read_text() == "p"


@pytest.mark.parametrize("path", ["../token", "a/../../token", "%2e%2e/token", "..", "agents/main/../../token"])
def test_nothing_climbs(bench: Bench, path: str) -> None:
    (bench.node.workspace / "p").write_text("p")
    bench.fails(f"gsv:{path}", "box:stolen", "not_allowed")
    bench.fails("box:p", f"gsv:{path}", "not_allowed")
    assert not (bench.node.workspace / "stolen").exists()


def test_what_is_missing(bench: Bench) -> None:
    assert "missing.md" in bench.fails("gsv:missing.md", "box:x", "not_found")
    assert not (bench.node.workspace / "x").exists()
    bench.fails("box:missing.md", "gsv:x", "not_found")
    assert not (bench.workspace / "x").exists()


def test_a_cut_link_costs_nothing(bench: Bench) -> None:
    content = os.urandom(40 * MIB)
    source = bench.node.workspace / "long"
    source.write_bytes(content)
    bench.proxy.pace = 0.02
    for ends in (("box:long", "gsv:long"), ("gsv:long", "box:long-back")):
        body = {"source": ends[0], "destination": ends[1], "background": True}
        path = f"/v1/transfers/{bench.gateway.request('POST', '/v1/transfers', body).json()['id']}"
        wait_until(lambda path=path: bench.gateway.get(path)["bytesTransferred"] > 10 * MIB, 30, "10 MiB moved")
        bench.proxy.cut()
        wait_until(lambda path=path: bench.gateway.get(path)["state"] != "running", 60, "the end of the transfer")
        assert bench.gateway.get(path)["state"] == "ok", bench.gateway.get(path)
    bench.proxy.pace = 0.0
    assert (bench.workspace / "long").read_bytes() == content
    assert (bench.node.workspace / "long-back").read_bytes() == content


def test_a_gateway_that_was_killed_leaves_nothing_half_written(gateway: GatewayProcess, tmp_path: Path) -> None:
    with Proxy(gateway.port) as proxy:
        proxy.pace = 0.05
        url = f"http://127.0.0.1:{proxy.port}"
        with NodeProcess(gateway, tmp_path / "box", "box", url=url) as node:
            content = os.urandom(20 * MIB)
            (node.workspace / "long").write_bytes(content)
            body = {"source": "box:long", "destination": "gsv:new/folder/long", "background": True}
            path = f"/v1/transfers/{gateway.request('POST', '/v1/transfers', body).json()['id']}"
            wait_until(lambda: gateway.get(path)["bytesTransferred"] > MIB, 30, "a MiB moved")
            gateway.kill()
            assert left_behind(gateway.home / "agents")
            proxy.pace = 0.0
            gateway.start()
            wait_until(lambda: gateway.get(path)["state"] != "running", 60, "the end of the transfer")
            assert gateway.get(path)["state"] == "ok", gateway.get(path)
    assert (gateway.home / "agents" / "main" / "new" / "folder" / "long").read_bytes() == content
    assert left_behind(gateway.home) == []


@pytest.mark.parametrize("ends", [("box:long", "gsv:long"), ("box:long", "box:copy")])
def test_a_call_continues_after_the_gateway_was_stopped_and_started(
    gateway: GatewayProcess, tmp_path: Path, ends: tuple[str, str]
) -> None:
    with Proxy(gateway.port) as proxy:
        proxy.pace = 0.05
        url = f"http://127.0.0.1:{proxy.port}"
        with NodeProcess(gateway, tmp_path / "box", "box", url=url) as node:
            content = os.urandom(20 * MIB)
            (node.workspace / "long").write_bytes(content)
            wanted = {"source": ends[0], "destination": ends[1]}
            call = gateway.invoke("gsv__Transfer", wanted, background=True)["request_id"]

            def moved() -> bool:
                answer = gateway.request("GET", f"/v1/transfers/{call}")
                return answer.status == 200 and answer.json()["bytesTransferred"] > MIB

            wait_until(moved, 30, "a MiB moved")
            assert gateway.stop() == 0
            proxy.pace = 0.0
            gateway.start()
            wait_until(lambda: gateway.get(f"/v1/calls/{call}")["state"] != "running", 60, "the end of the call")
            ended = gateway.get(f"/v1/calls/{call}")
            assert ended["state"] == "ok" and ended["result"]["bytesTransferred"] == 20 * MIB, ended
            copy = gateway.home / "agents" / "main" / "long" if ends[1] == "gsv:long" else node.workspace / "copy"
            assert copy.read_bytes() == content


def left_behind(folder: Path) -> list[Path]:
    return list(folder.rglob(".farhand-*"))


def test_nothing_is_left_behind(bench: Bench) -> None:
    assert left_behind(bench.node.workspace) == [] and left_behind(bench.workspace) == []
