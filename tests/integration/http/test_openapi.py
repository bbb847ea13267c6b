"""The description of the HTTP interface is complete and true: schemathesis holds the gateway to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from playwright.sync_api import sync_playwright
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from farhand.api.server.http import Reply, Request
from farhand.api.server.openapi import document
from farhand.api.server.router import Route
from tests.support.browser import ARGUMENTS, CHROMIUM
from tests.support.harness import GatewayProcess

EXAMPLES = 40 if os.environ.get("FARHAND_SIEGE") == "long" else 4
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
METHODS = {"get", "post", "put", "patch", "delete"}
# Answers that end when their reader leaves; `test_streams_end_when_asked_to` asks them to.
ENDLESS = {"/v1/events"}
# They accept any name from any client, so no request to them is invalid.
ANYTHING = {"/hooks/{hook_id}", "/join/{code}", "/join/{code}/{file}", "/assets/{name}"}
ROOMS = [
    ("health", {"/", "/healthz", "/readyz", "/version", "/v1/health", "/signin", "/v1/signin", "/docs"}),
    ("tools", {"/v1/tools", "/v1/tools/invoke", "/v1/calls", "/v1/jobs", "/v1/nodes", "/v1/transfers"}),
    ("agent", {"/agent/process", "/chats", "/v1/chat", "/v1/responses", "/v1/models", "/v1/sessions", "/v1/runs"}),
    ("rest", set()),
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """Made-up commands are not to be run, and a session costs nothing without a model."""
    home = tmp_path_factory.mktemp("openapi") / "home"
    home.mkdir()
    (home / "farhand.toml").write_text('[tools]\ndisabled = ["shell", "exec"]\n')
    with GatewayProcess(home, env={"OPENAI_API_KEY": None, "FARHAND_MODEL": None}) as process:
        yield process


@pytest.fixture(scope="module")
def described(gateway: GatewayProcess) -> Any:
    return gateway.get("/v1/openapi.json", token=None)


def room_of(path: str) -> str:
    for name, starts in ROOMS[:-1]:
        if any(path == start or path.startswith(f"{start}/") for start in starts if start != "/") or path in starts:
            return name
    return "rest"


@pytest.mark.siege
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
@pytest.mark.parametrize("room", [name for name, _ in ROOMS])
def test_every_answer_is_described(gateway: GatewayProcess, described: Any, room: str, mode: GenerationMode) -> None:
    """Whatever is asked, rightly or wrongly: no status, type or shape that the description does not know."""
    schema: Any = schemathesis.openapi.from_dict(described)
    headers = {"Authorization": f"Bearer {gateway.token}"}
    tried = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path in ENDLESS or room_of(operation.path) != room:
            continue
        takes_something = operation.body or operation.query or operation.path_parameters
        if mode is GenerationMode.NEGATIVE and (not takes_something or operation.path in ANYTHING):
            continue

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Case) -> None:
            query = {"wait": "0"} if case.path.endswith("/output") else None
            response = case.call(gateway.url, headers=headers, params=query, allow_redirects=False, timeout=30)
            # The schema of a stream describes its text, not each of its events.
            streamed = response.headers.get("content-type", [""])[0].startswith("text/event-stream")
            case.validate_response(response, checks=CHECKS[:-1] if streamed else CHECKS)
            if response.status_code >= 500:
                assert response.json()["error"]["code"] != "internal", response.text

        ask()
        tried += 1
    assert tried


def test_every_route_that_needs_a_token_refuses_requests_without_one(gateway: GatewayProcess, described: Any) -> None:
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            assert method in METHODS
            filled = path.replace("{", "").replace("}", "")
            answer = gateway.request(method.upper(), filled, token=None)
            if operation.get("security") == []:
                assert answer.status != 401 or "401" in operation["responses"], (method, path)
            else:
                assert answer.status == 401, (method, path)


def test_streams_end_when_asked_to(gateway: GatewayProcess, described: Any) -> None:
    for path in ENDLESS:
        answer = gateway.request("GET", f"{path}?follow=0")
        media = answer.headers["content-type"].partition(";")[0]
        assert answer.status == 200 and media in described["paths"][path]["get"]["responses"]["200"]["content"]


def test_the_routes_of_the_interface_are_there(described: Any) -> None:
    wanted = {
        "GET /healthz",
        "GET /readyz",
        "GET /version",
        "GET /v1/health",
        "GET /v1/nodes",
        "GET /v1/tools",
        "POST /v1/tools/invoke",
        "GET /v1/calls",
        "GET /v1/calls/{call_id}",
        "DELETE /v1/calls/{call_id}",
        "GET /v1/calls/{call_id}/output",
        "GET /v1/events",
        "POST /agent/process",
        "POST /v1/chat/completions",
        "GET /v1/models",
        "GET /v1/openapi.json",
        "GET /docs",
    }
    there = {f"{method.upper()} {path}" for path, methods in described["paths"].items() for method in methods}
    assert wanted <= there
    identities = [one["operationId"] for methods in described["paths"].values() for one in methods.values()]
    assert len(identities) == len(set(identities))


def test_a_route_that_says_nothing_of_itself_is_not_let_pass() -> None:
    async def answer(_request: Request) -> Reply:
        return Reply()

    with pytest.raises(ValueError, match="GET /silent"):
        document([Route(method="GET", path="/silent", scope=None, summary="", handler=answer)])


def test_the_page_needs_nothing_from_elsewhere(gateway: GatewayProcess) -> None:
    page = gateway.request("GET", "/docs", token=None)
    assert page.status == 200 and b'"docs.js"' in page.body and b'"docs.css"' in page.body
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for path in ("/docs", "/docs.js", "/docs.css"):
        answer = gateway.request("GET", path, token=None)
        assert answer.status == 200
        assert b"://" not in answer.body


def test_the_page_shows_every_route(gateway: GatewayProcess, described: Any) -> None:
    if not CHROMIUM.exists():
        pytest.skip("no browser: scripts/install-test-servers installs Debian's chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        page = browser.new_page()
        page.goto(f"{gateway.url}/docs")
        page.wait_for_selector("details")
        assert page.locator("details").count() == sum(len(methods) for methods in described["paths"].values())
        page.fill("#filter", "post /agent/process")
        assert page.locator("details:visible").count() == 1
        browser.close()
