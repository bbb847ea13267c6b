"""Create the channels described by the `[channels]` tables."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from typing import Any, Final

import msgspec

from farhand.channels.console import ConsoleChannel
from farhand.channels.library import missing
from farhand.gateway.messaging.channel import Channel, ChannelKind, ChannelSettings
from farhand.gateway.sessions.keys import agent_id
from farhand.protocol.errors import FarhandError, ToolError

log = logging.getLogger(__name__)


class ChannelError(FarhandError):
    """Report an invalid `[channels]` table."""


# The library that each kind of channel needs; the extra is named after the kind.
LIBRARIES: Final = {"telegram": "telegram", "discord": "hikari", "whatsapp": "pywa_async", "email": "imap_tools"}
# The chat services included in Farhand, as entry points. Only those named in the settings are loaded.
KINDS: Final = {
    name: f"farhand.channels.{name}:CHANNEL"
    for name in ("telegram", "discord", "signal", "whatsapp", "email", "webhook")
}
CONSOLE: Final = "console"


def make_channels(
    tables: Mapping[str, Mapping[str, Any]],
    environ: Mapping[str, str],
    kinds: Mapping[str, Callable[[], ChannelKind]] | None = None,
    resolved: Callable[[Any, str], Any] = lambda settings, _: settings,
) -> dict[str, Channel]:
    """Return the configured channels by table name, and the console. Raises ChannelError.

    Each key can be set in the environment, as in `FARHAND_CHANNELS_TELEGRAM_TOKEN`. `kinds` load the known kinds; if
    one raises FarhandError, the error is logged and its channels are skipped. `resolved` puts the values of secrets in
    settings, for `channel:NAME`; a channel without its secret is skipped too, since setting one needs a gateway.
    """
    kinds = kinds or {name: EntryPoint(name, value, "farhand.channels").load for name, value in KINDS.items()}
    channels: dict[str, Channel] = {CONSOLE: ConsoleChannel()}
    taken: dict[tuple[str, str], str] = {}
    for name, table in tables.items():
        kind = str(table.get("kind", name))
        if name == CONSOLE or kind not in kinds:
            known = ", ".join(kinds)
            raise ChannelError(f"[channels.{name}]: unknown kind of channel {kind!r}; known: {known}")
        if name.lower() != agent_id(name):
            raise ChannelError(f"[channels.{name}]: a name may contain only lower-case letters, digits, _ and -")
        if kind in LIBRARIES and missing(LIBRARIES[kind]):
            raise ChannelError(f"[channels.{name}] needs the extra: pip install 'farhand[{kind}]'")
        try:
            found = kinds[kind]()
        except FarhandError as error:
            log.error("[channels.%s] is skipped: %s", name, error)
            continue
        try:
            settings = _settings(name, {"kind": kind, **table}, found.settings, environ, resolved)
        except ToolError as error:
            log.error("[channels.%s] is skipped until the gateway starts again: %s", name, error.message)
            continue
        if not settings.account:
            settings.account = "default" if name == kind else name
        settings.account = agent_id(settings.account, "default")
        key = (kind, settings.account)
        if key in taken:
            raise ChannelError(
                f"[channels.{name}] and [channels.{taken[key]}] are the same account of {kind}; give one an account"
            )
        taken[key] = name
        channels[name] = found.make(settings)
    return channels


def _settings(
    name: str,
    table: Mapping[str, Any],
    kind: type[ChannelSettings],
    environ: Mapping[str, str],
    resolved: Callable[[Any, str], Any],
) -> ChannelSettings:
    given = dict(table)
    for field in msgspec.structs.fields(kind):
        variable = f"FARHAND_CHANNELS_{name}_{field.name}".upper().replace("-", "_")
        if variable in environ and field.type in (str, int, bool, float):
            text = environ[variable]
            given[field.name] = text if field.type is str else _value(variable, text)
    try:
        return msgspec.convert(resolved(given, f"channel:{name}"), kind)
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
