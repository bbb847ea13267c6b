from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import GatewayProcess
from tests.support.model_server import ModelServer, text


def last_said(request: Any) -> str:
    content = [message for message in request.messages if message["role"] == "user"][-1]["content"]
    return content if isinstance(content, str) else content[0]["text"]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[Callable[[str], GatewayProcess]]:
    """`house(toml)` is a gateway with these settings, whose agent repeats each message, after `echo: `."""
    with contextlib.ExitStack() as stack:

        def start(settings: str) -> GatewayProcess:
            home = tmp_path / "home"
            home.mkdir()
            (home / "farhand.toml").write_text(f'[sessions]\ndm_scope = "per-peer"\n{settings}')
            model = stack.enter_context(ModelServer(answer=lambda request: text("echo: " + last_said(request))))
            env = {"OPENAI_BASE_URL": model.url, "OPENAI_API_KEY": "k", "FARHAND_MODEL": "scripted"}
            return stack.enter_context(GatewayProcess(home, env=env))

        yield start
