"""Programs of others on the Responses API, unmodified: the OpenAI Agents SDK and Codex."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.agent.test_agent import House, assert_valid, open_house
from tests.support.model_server import calls, text

# The SDK needs another version of `mcp` than Farhand: scripts/install-test-clients gives it an environment of its own.
CLIENTS = Path(sys.prefix) / "clients" / "bin" / "python"
CODEX = os.environ.get("FARHAND_CODEX", "")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    yield from open_house(tmp_path_factory.mktemp("clients") / "home")


def run(arguments: list[str], cwd: Path, **env: str) -> str:
    done = subprocess.run(
        arguments,
        cwd=cwd,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


@pytest.mark.parametrize("way", ["plain", "streamed"])
def test_the_agents_sdk_runs_its_own_tools(house: House, tmp_path: Path, way: str) -> None:
    word = uuid.uuid4().hex
    house.script(word, calls(("weather", {"city": "Oslo"})), text("It rains in Oslo."))
    program = Path(__file__).with_name("openai_agents_program.py")
    said = run(
        [str(CLIENTS), str(program), f"{word} weather in Oslo?", way],
        tmp_path,
        OPENAI_BASE_URL=f"{house.gateway.url}/v1",
        OPENAI_API_KEY=house.gateway.token,
    )
    assert said.strip() == "It rains in Oslo."
    asked = house.asked(word)[-1].messages
    assert asked[-1]["content"] == "rain in Oslo"
    assert_valid(asked)


@pytest.mark.skipif(not CODEX, reason="needs the program Codex (400 MB); `make codex` installs it and runs this test")
def test_codex_works_in_a_folder(house: House, tmp_path: Path) -> None:
    word = uuid.uuid4().hex
    command = "echo made by codex > made.txt"
    house.script(word, calls(("exec_command", {"cmd": command})), text("Done."))
    provider = f'{{name="Farhand", base_url="{house.gateway.url}/v1", env_key="FARHAND_TOKEN", wire_api="responses"}}'
    work, home = tmp_path / "work", tmp_path / "codex"
    work.mkdir()
    home.mkdir()
    said = run(
        [
            CODEX,
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            "--json",
            "-c",
            f"model_providers.farhand={provider}",
            "-c",
            "model_provider=farhand",
            "-m",
            "farhand",
            f"{word}: make a file",
        ],
        work,
        FARHAND_TOKEN=house.gateway.token,
        CODEX_HOME=str(home),
    )
    assert (work / "made.txt").read_text() == "made by codex\n", said
    messages = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert any("Done." in json.dumps(message) for message in messages), said
