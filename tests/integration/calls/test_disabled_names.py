"""A tool that the settings switch off is off in every spelling of its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.harness import GatewayProcess, NodeProcess

NAMES = ["laptop__Bash", "laptop__bash", "laptop__BASH"]


@pytest.mark.parametrize("disabled", NAMES)
def test_a_disabled_tool_is_off_in_every_casing(tmp_path: Path, disabled: str) -> None:
    """S13: the list of disabled tools knew one casing, the lookup of tools all of them."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "farhand.toml").write_text(f'[tools]\ndisabled = ["{disabled}"]\n')
    with GatewayProcess(home) as gateway, NodeProcess(gateway, tmp_path, "laptop") as node:
        for name in NAMES:
            answer = gateway.invoke(name, {"command": "touch ran"})
            assert answer["ok"] is False and answer["error"]["kind"] == "not_allowed", (name, answer)
        assert not (node.workspace / "ran").exists()
        assert not any(tool["name"] in NAMES for tool in gateway.get("/v1/tools")["tools"])
