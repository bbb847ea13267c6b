"""Chat services, model APIs, object stores and tools that installed packages add through entry points.

The ones that Farhand brings along are entries of the same kind. See `examples/plugin_package`.

group               name                     object
farhand.channels    `kind` of a channel      a `gateway.messaging.channel.ChannelKind`
farhand.models      `api` of a provider      a callable like the constructor of `llm.openai.OpenAIModel`
farhand.objects     scheme of `[objects] url`   a callable like the constructor of `store.objects.s3.S3Objects`
farhand.tools       any                      a callable that returns `tools.tool.Tool` objects
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from farhand.channels.registry import KINDS
from farhand.protocol.errors import FarhandError
from farhand.tools.tool import Tool

log = logging.getLogger(__name__)

CHANNELS: Final = "farhand.channels"
MODELS: Final = "farhand.models"
OBJECTS: Final = "farhand.objects"
TOOLS: Final = "farhand.tools"
BUILT_IN: Final = {
    CHANNELS: KINDS,
    MODELS: {
        "anthropic": "farhand.llm.anthropic:AnthropicModel",
        "openai": "farhand.llm.openai:OpenAIModel",
    },
    OBJECTS: {"s3": "farhand.store.objects.s3:S3Objects"},
    TOOLS: {},
}


class PluginError(FarhandError):
    """A plug-in that cannot be used."""


class Plugins:
    """The entry points that were found. A plug-in is loaded when something first asks for it."""

    def __init__(self, found: Iterable[EntryPoint] | None = None) -> None:
        """`found`: those of installed packages."""
        self._found = {
            group: {name: EntryPoint(name, value, group) for name, value in built_in.items()}
            for group, built_in in BUILT_IN.items()
        }
        for entry in installed() if found is None else found:
            known = self._found[entry.group].get(entry.name)
            if known is not None:
                log.error("%s is ignored: %s has this name", described(entry), known.value)
            else:
                self._found[entry.group][entry.name] = entry

    def load(self, group: str, name: str) -> Any:
        """Return what an entry names. Raises PluginError when it cannot be imported."""
        entry = self._found[group][name]
        try:
            return entry.load()
        except Exception as error:  # whatever its code raises while it is imported
            reason = f"{type(error).__name__}: {error}"
            raise PluginError(f"{described(entry)} cannot be loaded: {reason}; fix or uninstall it") from error

    def loaders(self, group: str) -> dict[str, Callable[[], Any]]:
        """Return a function for each name that loads it, see `load`."""
        return {name: partial(self.load, group, name) for name in self._found[group]}

    def tools(self, taken: Callable[[str], object]) -> list[Tool]:
        """Return the tools of all plug-ins. One that fails, or whose name is `taken`, is logged and left out."""
        tools: dict[str, Tool] = {}
        for name, entry in self._found[TOOLS].items():
            try:
                made: list[Tool] = list(self.load(TOOLS, name)())
                for tool in made:
                    if taken(tool.name) or tool.name in tools:
                        raise PluginError(f"{described(entry)}: there is a tool {tool.name!r} already; rename it")
                    tool.spec  # noqa: B018 (reads the signature, which may be one that no schema describes)
            except PluginError as error:
                log.error("%s", error)
            except Exception as error:
                log.error("%s failed: %s: %s", described(entry), type(error).__name__, error)
            else:
                tools |= {tool.name: tool for tool in made}
                log.info("loaded %s: %s", described(entry), ", ".join(tool.name for tool in made))
        return list(tools.values())


def installed() -> list[EntryPoint]:
    """Return the entry points of all installed packages."""
    found = entry_points()  # reads the metadata of every package: once for all groups
    return [entry for group in BUILT_IN for entry in sorted(found.select(group=group), key=lambda one: one.name)]


def described(entry: EntryPoint) -> str:
    """Name a plug-in and its package for a log or a person."""
    package = f" of {entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
    return f"plug-in {entry.name!r} ({entry.group}{package})"
