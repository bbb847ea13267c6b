"""The agents of a gateway: `main`, those of `[agents.NAME]`, and any other that a session key names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from farhand.gateway.sessions.keys import MAIN
from farhand.llm.model import Thinking


class AgentSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of one agent. Its files are under `agents/NAME/`."""

    # As `[agent] model`, which is the default.
    model: str = ""
    thinking: Thinking | None = None
    description: str = ""
    # Appended to its prompt.
    instructions: str = ""
    # Maximum rounds of tool calls in a run; 0: as for `[agent]`.
    max_rounds: int = 0


class Agents:
    """Finds the settings of an agent. An agent without a table has the defaults."""

    def __init__(self, settings: Callable[[], Mapping[str, AgentSettings]] = dict) -> None:
        """`settings` returns those in force."""
        self._current = settings

    @property
    def names(self) -> list[str]:
        """Return the configured names, `main` first."""
        return list({MAIN: None, **self._current()})

    def of(self, name: str) -> AgentSettings:
        return self._current().get(name) or AgentSettings()
