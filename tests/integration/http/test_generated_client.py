"""The OpenAPI description is valid, and a client generated from it works."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from openapi_spec_validator import validate

from tests.support.harness import GatewayProcess

ENDLESS = {"get_v1_events", "get_v1_nodes_ws"}
BY_CODE = {"get_signin", "get_join_code", "get_join_code_file", "get_v1_mcp_callback"}
"""Routes that check a code or state of their own: a wrong one is a 401 whatever the token."""


@pytest.fixture(scope="module")
def described(shared_gateway: GatewayProcess) -> Any:
    return shared_gateway.get("/v1/openapi.json", token=None)


@pytest.fixture(scope="module")
def generated(described: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    folder = tmp_path_factory.mktemp("client")
    (folder / "openapi.json").write_text(json.dumps(described))
    (folder / "config.yml").write_text("package_name_override: farhand_client\npost_hooks: []\n")
    command = [
        *(sys.executable, "-m", "openapi_python_client", "generate", "--meta", "none"),
        *("--path", str(folder / "openapi.json"), "--config", str(folder / "config.yml")),
        *("--output-path", str(folder / "farhand_client")),
    ]
    made = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert made.returncode == 0 and "will not be generated" not in made.stdout + made.stderr, made
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("farhand_client")
    finally:
        sys.path.remove(str(folder))


def test_the_description_is_valid(described: Any) -> None:
    validate(described)


def test_every_media_type_has_a_schema_and_every_array_items(described: Any) -> None:
    def look(part: Any, place: str) -> None:
        if isinstance(part, dict):
            assert part.get("type") != "array" or "items" in part or "prefixItems" in part, place
            for name, one in part.items():
                if name == "content" and "/paths/" in place:
                    assert all("schema" in media for media in one.values()), place
                look(one, f"{place}/{name}")
        elif isinstance(part, list):
            for number, one in enumerate(part):
                look(one, f"{place}/{number}")

    look(described, "")
    titles = [schema.get("title") for schema in described["components"]["schemas"].values()]
    assert len(titles) == len(set(titles)) and not any("." in name for name in described["components"]["schemas"])


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("get", "/v1/transfers/content", "source"),
        ("put", "/v1/transfers/content", "destination"),
        ("get", "/v1/transfers/manifest", "source"),
        ("get", "/v1/memory/search", "q"),
        ("get", "/v1/memory/get", "path"),
    ],
)
def test_needed_parameters_are_required(
    shared_gateway: GatewayProcess, described: Any, method: str, path: str, name: str
) -> None:
    [found] = [one for one in described["paths"][path][method]["parameters"] if one["name"] == name]
    assert found["required"] is True
    body = b"x" if method == "put" else None
    assert shared_gateway.request(method.upper(), path, body).status == 400


def test_a_generated_client_has_every_route_and_calls_every_get(
    shared_gateway: GatewayProcess, described: Any, generated: ModuleType
) -> None:
    client = generated.AuthenticatedClient(
        base_url=shared_gateway.url, token=shared_gateway.token, follow_redirects=False, timeout=60
    )
    folder = Path(generated.__file__ or "").parent
    modules = {path.stem: path.parent.name for path in folder.glob("api/*/*.py") if path.stem != "__init__"}
    operations = [one for methods in described["paths"].values() for one in methods.values()]
    assert len(modules) == len(operations)
    responses = {re.sub(r"\W+", "_", one["operationId"]).lower(): one["responses"] for one in operations}
    called = 0
    for name, tag in modules.items():
        if not name.startswith("get") or name in ENDLESS:
            continue
        module = importlib.import_module(f"farhand_client.api.{tag}.{name}")
        parameters = inspect.signature(module.sync_detailed).parameters
        needed = {
            key: "x" for key, one in parameters.items() if one.default is inspect.Parameter.empty and key != "client"
        }
        if "wait" in parameters:
            needed["wait"] = "0"
        answer = module.sync_detailed(client=client, **needed)
        assert str(int(answer.status_code)) in responses[name], (name, answer)
        assert answer.status_code != 401 or name in BY_CODE, (name, answer)
        called += 1
    assert called > 40
