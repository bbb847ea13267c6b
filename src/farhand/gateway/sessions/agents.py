"""The agents of a gateway: `main`, those of `[agents.NAME]`, and any other that a session key names."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from farhand.gateway.sessions.keys import MAIN
from farhand.llm.model import Thinking


class AgentSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What sets an agent apart. Its files lie under `agents/NAME/`."""

    # As for `[agent] model`; by default the same.
    model: str = ""
    thinking: Thinking | None = None
    description: str = ""
    # Added to its prompt.
    instructions: str = ""
    # Rounds of tool calls after which a run ends; 0: as for `[agent]`.
    max_rounds: int = 0


class Agents:
    """Finds the settings of an agent. One without a table has none that differ."""

    def __init__(self, settings: Mapping[str, AgentSettings] | None = None) -> None:
        self._settings = {MAIN: AgentSettings(), **(settings or {})}

    @property
    def names(self) -> list[str]:
        """Those that were set up, `main` first."""
        return list(self._settings)

    def of(self, name: str) -> AgentSettings:
        return self._settings.get(name) or AgentSettings()
