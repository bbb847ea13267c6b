"""`farhand setup`: what is written was tested; comments stay; a running gateway uses the new model at once."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cli.conftest import Command
from tests.integration.cli.test_approval_prompt import Terminal
from tests.support.harness import GatewayProcess, free_port
from tests.support.model_server import ModelServer, Reply, Request, error, text

SETTINGS = """# my gateway
[policy]
default = "allow"  # for now

[agent]
# the old one
max_rounds = 7
"""


@pytest.fixture(scope="module")
def model() -> Iterator[ModelServer]:
    with ModelServer(answer=lambda _: text("ok")) as server:
        yield server


def clean(home: Path, **env: str) -> Command:
    command = Command(home, **env)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        command.env.pop(name, None)
    return command


def written(home: Path) -> dict[str, object]:
    return tomllib.loads((home / "farhand.toml").read_text())


def test_a_model_is_tested_written_and_used_without_a_restart(model: ModelServer, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "farhand.toml").write_text(SETTINGS)
    command = clean(home, OFFICE_KEY="sk-office-0123456789")
    with GatewayProcess(home, env={"OFFICE_KEY": "sk-office-0123456789", "OPENAI_API_KEY": None}):
        assert command("chat", "-m", "hello").status == 1
        done = command("setup", "--model", "qwen3", "--base-url", model.url, "--api-key-env", "OFFICE_KEY", "--yes")
        assert done.status == 0 and "custom/qwen3 answered" in done.out and "the running gateway uses it" in done.err
        assert model.requests[-1].headers["authorization"] == "Bearer sk-office-0123456789"
        assert command("chat", "-m", "hello").out.strip() == "ok"
        checks = {one["name"]: one for one in command("doctor", "--json").json()["checks"]}
        assert checks["model"]["status"] == "ok" and "custom/qwen3" in checks["model"]["message"]
        assert checks["restart"]["status"] == "ok"
        # A setting that is read at the start is named until then.
        path = home / "farhand.toml"
        path.write_text(path.read_text().replace("max_rounds = 7", "max_rounds = 8"))
        checks = {one["name"]: one for one in command("doctor", "--json").json()["checks"]}
        assert checks["restart"]["status"] == "warning" and "agent.max_rounds" in checks["restart"]["message"]
        assert "agent.max_rounds" in command("config").err
    kept = (home / "farhand.toml").read_text()
    for line in ("# my gateway", "# for now", "# the old one"):
        assert line in kept
    assert written(home)["providers"] == {"custom": {"base_url": model.url, "api_key_env": "OFFICE_KEY"}}
    assert (home / "farhand.toml").stat().st_mode & 0o777 == 0o600


def test_a_gateway_without_the_key_is_named(tmp_path: Path) -> None:
    command = clean(tmp_path / "home", OFFICE_KEY="sk-office-0123456789")

    def answer(asked: Request) -> Reply:
        return text("ok") if "sk-office" in asked.headers.get("authorization", "") else error(401, "no key")

    with ModelServer(answer=answer) as model, GatewayProcess(tmp_path / "home", env={"OPENAI_API_KEY": None}):
        done = command("setup", "--model", "qwen3", "--base-url", model.url, "--api-key-env", "OFFICE_KEY", "--yes")
        assert done.status == 0 and "the running gateway cannot use it yet" in done.err, done


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "m", "--base-url", "http://127.0.0.1:1/v1"], "does not answer"),
        (["--model", "m", "--base-url", "ftp://x"], "is not an address"),
        (["--model", " "], "blank"),
        (["--model", "m", "--api-key-env", "sk-not-a-name"], "not the key itself"),
        (["--model", "m", "--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE is not set"),
        (["--model", "gpt-5-mini"], "needs a key"),
        (["--base-url", "http://127.0.0.1:1/v1"], "require --model"),
        ([], "give at least --model"),
        (["--yes"], "give at least --model"),
    ],
)
def test_what_does_not_work_is_an_error_and_nothing_is_written(tmp_path: Path, options: list[str], said: str) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "farhand.toml").write_text(SETTINGS)
    done = clean(home)("setup", *options)
    assert done.status in (1, 2) and said in done.err, done
    assert "sk-not-a-name" not in done.err
    assert (home / "farhand.toml").read_text() == SETTINGS


def test_a_refused_key_is_named_and_a_broken_file_is_left_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "farhand.toml").write_text("[agent\n")
    done = clean(home)("setup", "--model", "m", "--base-url", f"http://127.0.0.1:{free_port()}/v1")
    assert done.status == 1 and "not valid TOML" in done.err
    assert (home / "farhand.toml").read_text() == "[agent\n"


def test_it_asks_on_a_terminal(model: ModelServer, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with Terminal(clean(home), "setup") as terminal:
        terminal.expect("1. A model")
        terminal.expect("3) anthropic")
        terminal.expect("7) other")
        terminal.expect("Number, or Enter to skip")
        terminal.type("99\n")
        terminal.expect("is not one of these")
        terminal.type("7\n")
        terminal.expect("Address")
        terminal.type("http://127.0.0.1:1/v1\n")
        terminal.expect("Model")
        terminal.type("m\n")
        terminal.expect("Key")
        terminal.type("\n")
        terminal.expect("does not answer")
        terminal.expect("Number, or Enter to skip")
        terminal.type("7\n")
        terminal.expect("Address")
        terminal.type(f"{model.url}\n")
        terminal.expect("Model")
        terminal.type("m\n")
        terminal.expect("Key")
        terminal.type("sk-typed-0123456789\n")
        terminal.expect("custom/m answered")
        terminal.expect("2. Machines")
        terminal.expect("3. A chat channel")
        terminal.expect("Token, or Enter to skip")  # a hidden prompt discards what was typed before it
        terminal.type("\n")
        terminal.expect("4. An MCP client")
        terminal.type("\n")
        terminal.expect("Done.")
        assert terminal.end() == 0
        assert "sk-typed" not in terminal.shown
    assert written(home)["providers"] == {"custom": {"base_url": model.url, "api_key": "sk-typed-0123456789"}}
    assert clean(home)("config", "--url", "http://127.0.0.1:1").status == 1
