"""`examples/fix_a_repository.py` does what it says: each step is checked where it left its traces."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "examples/fix_a_repository.py"


@pytest.fixture
def example() -> Any:
    spec = importlib.util.spec_from_file_location("fix_a_repository", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_step_of_the_demonstration_happens(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps: list[str] = []

    def after(step: str, demonstration: Any) -> None:
        steps.append(step)
        source = (demonstration.repository / "calculator.py").read_text()
        changed = demonstration.changed_files()
        if step == "keep":
            assert source == example.RIGHT and set(changed) == {"calculator.py", "calculator.sig"}
            assert (demonstration.folder / "receipt.json").exists()
            call = demonstration.json("calls", "show", demonstration.trial_id)
            assert "{{secret:RELEASE_KEY}}" in call["args"]["command"] and call["args"]["trial"] is True
        elif step != "search":
            assert source == example.WRONG and changed == [], (step, changed)
        if step == "ask":
            assert len(demonstration.model.requests) == 4
            tools = [call["tool"] for call in demonstration.json("calls")["calls"]]
            assert tools.count("workshop__Bash") == 2 and "workshop__Read" in tools
            budgets = demonstration.json("budget", "--of", "agent:main")["budgets"]
            assert {one["unit"]: one["used"] for one in budgets}["calls"] == 3
            assert all(one["used"] > 0 for one in budgets)
        if step == "search":
            assert demonstration.places_of_the_secret() == []
            searched = b"".join(path.read_bytes() for path in demonstration.home.rglob("*") if path.is_file())
            assert b"{{secret:RELEASE_KEY}}" in searched, "the record has the handle"

    example.demonstrate(tmp_path, after)
    assert tuple(steps) == example.STEPS
    said = capsys.readouterr().out
    assert (
        example.SECRET not in said
        and "signed with the secret" in said
        and "The receipt of the command is valid" in said
    )
