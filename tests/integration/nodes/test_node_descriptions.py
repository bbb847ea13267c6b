"""`PATCH /v1/nodes/{id}`: the name and the tags that the owner gives a machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.harness import GatewayProcess, NodeProcess, wait_until

RULE = '[[policy.rules]]\nname = "careful"\ndecision = "deny"\nnode = "tag:prod"\ntool = "Bash"\n'


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    home = tmp_path_factory.mktemp("described") / "home"
    home.mkdir(mode=0o700)
    (home / "farhand.toml").write_text(RULE)
    with GatewayProcess(home) as started:
        yield started


@pytest.fixture(scope="module")
def box(gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(gateway, tmp_path_factory.mktemp("box"), "box", "--tag", "said") as node:
        yield node


def shown(gateway: GatewayProcess) -> Any:
    return next(node for node in gateway.get("/v1/nodes")["nodes"] if node["node_id"] == "box")


def describe(gateway: GatewayProcess, body: Any, node: str = "box", **options: Any) -> Any:
    return gateway.request("PATCH", f"/v1/nodes/{node}", body, **options)


def test_tags_of_the_owner_replace_those_of_the_node_everywhere(gateway: GatewayProcess, box: NodeProcess) -> None:
    assert (shown(gateway)["tags"], shown(gateway)["label"]) == (["said"], "")
    answer = describe(gateway, {"label": "The  database\n", "tags": ["prod", "db", "prod"]})
    assert answer.status == 200
    assert (answer.json()["label"], answer.json()["tags"]) == ("The database", ["prod", "db"])
    assert shown(gateway)["reported_tags"] == ["said"]
    assert gateway.invoke("box__Bash", {"command": "true"})["error"]["kind"] == "not_allowed"  # the rule about prod
    wanted = {"nodes": ["tag:db"], "tool": "Read", "args": {"path": "missing"}}
    assert gateway.request("POST", "/v1/tools/fanout", wanted).status in (200, 201)
    assert gateway.request("POST", "/v1/tools/fanout", {**wanted, "nodes": ["tag:said"]}).status == 404
    [event] = gateway.get("/v1/journal?kind=node.described")["events"]
    assert event["subject"] == "box"
    assert event["data"] == {"by": "owner", "label": "The database", "tags": ["prod", "db"]}


def test_they_survive_a_restart_and_a_new_connection(gateway: GatewayProcess, box: NodeProcess) -> None:
    assert describe(gateway, {"label": "Kept", "tags": ["prod"]}).status == 200
    gateway.stop()
    gateway.start()
    assert (shown(gateway)["label"], shown(gateway)["tags"]) == ("Kept", ["prod"])
    gateway.wait_for_node("box")
    box.restart()
    assert (shown(gateway)["label"], shown(gateway)["tags"]) == ("Kept", ["prod"])
    # What is left out stays; null and "" give the node its own words back.
    assert describe(gateway, {"label": ""}).json()["tags"] == ["prod"]
    assert describe(gateway, {"tags": None}).json()["tags"] == ["said"]
    wait_until(lambda: gateway.invoke("box__Bash", {"command": "true"})["ok"])


@pytest.mark.parametrize(
    "body",
    [
        {"label": 5},
        {"label": None},
        {"tags": "prod"},
        {"tags": [""]},
        {"tags": ["x" * 65]},
        {"tags": ["a"] * 33},
        {"label": "x" * 129},
        {"name": "x"},
        [],
    ],
)
def test_other_shapes_are_refused(gateway: GatewayProcess, box: NodeProcess, body: Any) -> None:
    assert describe(gateway, body).status == 400


def test_hostile_words_are_one_printable_line(gateway: GatewayProcess, box: NodeProcess) -> None:
    answer = describe(gateway, {"label": "a\x1b[31m\u202eb<img src=x>", "tags": ["x\u200by\n"]}).json()
    assert (answer["label"], answer["tags"]) == ("a[31mb<img src=x>", ["xy"])
    describe(gateway, {"label": "", "tags": None})


def test_only_admins_describe_and_only_known_nodes(gateway: GatewayProcess, box: NodeProcess) -> None:
    reader = gateway.request("POST", "/v1/tokens", {"label": "t", "scopes": ["read"]}).json()["token"]
    assert describe(gateway, {"label": "x"}, token=reader).status == 403
    unknown = describe(gateway, {"label": "x"}, "BOX")
    assert unknown.status == 404 and "'box'" in unknown.json()["error"]["message"]
