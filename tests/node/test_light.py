"""A machine that is lent pays for nothing of the gateway's, and neither does a command that only asks it."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("farhand.gateway", "farhand.store", "farhand.llm", "farhand.api", "apsw", "uvicorn", "httpx", "rich")


@pytest.mark.parametrize("module", ["farhand.cli.lend", "farhand.cli.calls", "farhand.cli.listing"])
def test_the_program_does_not_load_the_gateway(module: str) -> None:
    code = f"import sys, {module}; print([name for name in sys.modules if name.startswith({HEAVY!r})])"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "[]"
