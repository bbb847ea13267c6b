"""Implement `gsv__ConfigGet`: the gateway's settings, without secrets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from msgspec import Meta

from farhand.protocol.redaction import mask_settings, snake_case
from farhand.tools.tool import Tool, tool

ConfigPath = Annotated[
    str | None,
    Meta(
        description='Dotted path to a specific config value (e.g. "gateway.port"); numbers index lists. '
        "Omit it for the full config. Sensitive values are masked."
    ),
]


class Settings:
    """Return settings to callers. Secrets are masked first, so that no path reaches one."""

    def __init__(self, values: Callable[[], Mapping[str, Any]]) -> None:
        self._values = values

    def tools(self) -> list[Tool]:
        return [tool(self.config_get, name="gsv__ConfigGet", read_only=True)]

    async def config_get(self, path: ConfigPath = None) -> dict[str, Any]:
        """Inspect the Gateway configuration. Sensitive values are masked."""
        shown = mask_settings(self._values())
        return {"path": path, "value": find(shown, path)} if path and path.strip() else {"config": shown}

    def holds(self, path: str) -> bool:
        """Return whether a value is set at a dotted path."""
        return bool(find(self._values(), path))


def find(values: Any, path: str) -> Any:
    """Return the value at a dotted path, or None.

    Names may contain dots, and `session.dmScope` finds `sessions.dm_scope`.
    """
    parts = [part for part in path.strip().split(".") if part]
    return _find(values, parts)


def _find(value: Any, parts: list[str]) -> Any:
    if not parts:
        return value
    if isinstance(value, list):
        index = parts[0]
        known = index.isdecimal() and len(index) < 10 and int(index) < len(value)
        return _find(value[int(index)], parts[1:]) if known else None
    if isinstance(value, Mapping):
        # Limited by the longest name here: otherwise a path of many parts would take quadratic time.
        most = max((str(name).count(".") + 1 for name in value), default=0)
        for count in range(1, min(most, len(parts)) + 1):
            name = ".".join(parts[:count])
            for spelling in (name, snake_case(name), f"{snake_case(name)}s"):
                # There may be a `gpt-4.1` next to `gpt-4`.
                if spelling in value and (found := _find(value[spelling], parts[count:])) is not None:
                    return found
    return None
