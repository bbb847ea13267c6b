"""Which adapter a table of `[channels]` means."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from farhand.channels.console import ConsoleChannel
from farhand.channels.library import missing
from farhand.gateway.messaging.channel import Channel, ChannelSettings
from farhand.gateway.sessions.keys import agent_id
from farhand.protocol.errors import FarhandError


class ChannelError(FarhandError):
    """A table of `[channels]` that cannot be used."""


Make = Callable[[Any], Channel]

# What a kind of channel needs; the extra of the package has the kind's name.
LIBRARIES: Final = {"telegram": "telegram", "discord": "hikari", "whatsapp": "pywa_async", "email": "imap_tools"}
# By the name of their module here, how their classes begin. Only what the settings name is loaded.
KINDS: Final = {
    "telegram": "Telegram",
    "discord": "Discord",
    "signal": "Signal",
    "whatsapp": "WhatsApp",
    "email": "Email",
    "webhook": "Webhook",
}
CONSOLE: Final = "console"


def make_channels(tables: Mapping[str, Mapping[str, Any]], environ: Mapping[str, str]) -> dict[str, Channel]:
    """The channels of the settings, by the names of their tables, and the console. Raises ChannelError.

    Each key can come from the environment: `FARHAND_CHANNELS_TELEGRAM_TOKEN`.
    """
    channels: dict[str, Channel] = {CONSOLE: ConsoleChannel()}
    taken: dict[tuple[str, str], str] = {}
    for name, table in tables.items():
        kind = str(table.get("kind", name))
        if name == CONSOLE or kind not in KINDS:
            known = ", ".join(KINDS)
            raise ChannelError(f"[channels.{name}]: there is no channel of the kind {kind!r}; known: {known}")
        if name.lower() != agent_id(name):
            raise ChannelError(f"[channels.{name}]: a channel's name has small letters, digits, _ and - only")
        if kind in LIBRARIES and missing(LIBRARIES[kind]):
            raise ChannelError(f"[channels.{name}] needs the extra: pip install 'farhand[{kind}]'")
        settings_type, make = _adapter(kind)
        settings = _settings(name, {"kind": kind, **table}, settings_type, environ)
        if not settings.account:
            settings.account = "default" if name == kind else name
        settings.account = agent_id(settings.account, "default")
        key = (kind, settings.account)
        if key in taken:
            raise ChannelError(
                f"[channels.{name}] and [channels.{taken[key]}] are the same account of {kind}; give one an account"
            )
        taken[key] = name
        channels[name] = make(settings)
    return channels


def _adapter(kind: str) -> tuple[type[ChannelSettings], Make]:
    module = importlib.import_module(f"farhand.channels.{kind}")
    return getattr(module, f"{KINDS[kind]}Settings"), getattr(module, f"{KINDS[kind]}Channel")


def _settings(
    name: str, table: Mapping[str, Any], kind: type[ChannelSettings], environ: Mapping[str, str]
) -> ChannelSettings:
    given = dict(table)
    for field in msgspec.structs.fields(kind):
        variable = f"FARHAND_CHANNELS_{name}_{field.name}".upper().replace("-", "_")
        if variable in environ and field.type in (str, int, bool, float):
            text = environ[variable]
            given[field.name] = text if field.type is str else _value(variable, text)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).replace("`", "'").partition(" - at ")
        key = place.strip("'").removeprefix("$.")
        known = ", ".join(field.name for field in msgspec.structs.fields(kind))
        hint = f"; known: {known}" if "unknown field" in reason else ""
        raise ChannelError(f"[channels.{name}] {key}{': ' if key else ''}{reason}{hint}") from None


def _value(variable: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        raise ChannelError(f"{variable}={text!r} is not a value") from None
