"""What takes two nodes or a person, across two gateways."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from tests.integration.fleet.conftest import Fleet
from tests.support.harness import NodeProcess, wait_until


def test_a_file_moves_between_nodes_of_two_gateways(fleet: Fleet, hands_of_one: NodeProcess, tmp_path: Path) -> None:
    one, two = fleet
    content = bytes(range(256)) * 20_000
    (hands_of_one.workspace / "sent.bin").write_bytes(content)
    with NodeProcess(two, tmp_path / "other", "other") as other:
        one.wait_for_node("other")
        for gateway, name in ((one, "a.bin"), (two, "b.bin")):
            begun = gateway.request(
                "POST", "/v1/transfers", {"source": "hands:sent.bin", "destination": f"other:{name}"}
            )
            assert begun.status in (200, 201, 202), begun
            transfer_id = begun.json().get("id") or begun.json()["transfer_id"]

            def ended(gateway: Any = gateway, transfer_id: str = transfer_id) -> Any:
                found = gateway.get(f"/v1/transfers/{transfer_id}")
                return found if found["state"] != "running" else None

            assert wait_until(ended, 60, "the transfer")["state"] == "ok"
            assert (other.workspace / name).read_bytes() == content


def test_a_call_waits_for_a_node_that_comes_back_to_the_other_gateway(fleet: Fleet, tmp_path: Path) -> None:
    one, two = fleet
    node = NodeProcess(one, tmp_path / "late", "late")
    with node:
        two.wait_for_node("late")
    for gateway in fleet:
        gateway.wait_for_node("late", online=False)
    held = one.invoke(
        "late__Bash", {"command": f"echo once >> {tmp_path / 'count'}"}, when_online=True, before="in 10 minutes"
    )
    with NodeProcess(two, tmp_path / "late", "late"):
        wait_until(lambda: one.get(f"/v1/calls/{held['request_id']}")["state"] == "ok", 60, "the call")
    assert (tmp_path / "count").read_text() == "once\n"


def test_the_end_of_a_background_call_is_awaited_on_the_other_gateway(
    fleet: Fleet, hands_of_one: NodeProcess, tmp_path: Path
) -> None:
    one, two = fleet
    begun = one.invoke(
        "hands__Bash", {"command": f"while ! test -e {tmp_path / 'go'}; do sleep 0.1; done"}, background=True
    )
    threading.Timer(0.5, (tmp_path / "go").touch).start()
    wait_until(lambda: two.get(f"/v1/calls/{begun['request_id']}")["state"] == "ok", 60, "the end")
