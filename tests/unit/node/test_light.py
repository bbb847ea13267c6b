"""A machine that is lent pays for nothing of the gateway's, and neither does a command that only asks it."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("farhand.gateway", "farhand.store", "farhand.llm", "farhand.api", "apsw", "uvicorn", "httpx", "rich")

FOR_TRANSFERS = ("farhand.node.transfers.endpoint", "farhand.node.transfers.receiver", "blake3")
FOR_APPROVALS = ("farhand.tools.preview", "farhand.machine.patch.apply", "difflib")


@pytest.mark.parametrize("module", ["farhand.cli.run.node", "farhand.cli.calls.calls", "farhand.cli.admin.listing"])
def test_the_program_does_not_load_the_gateway(module: str) -> None:
    code = f"import sys, {module}; print([name for name in sys.modules if name.startswith({HEAVY!r})])"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "[]"


def test_a_node_at_rest_does_without_what_few_calls_need() -> None:
    rarely = (
        *FOR_TRANSFERS,
        *FOR_APPROVALS,
        "farhand.machine.files.undo",
        "farhand.machine.jobs.worker",
        "logging.handlers",
    )
    code = f"import sys, farhand.node.program; print([name for name in {rarely!r} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "[]"
