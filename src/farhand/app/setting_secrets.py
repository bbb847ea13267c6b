"""Secrets in settings: `{{secret:NAME}}` stands for a value, which is put in where the settings are used."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from farhand.gateway.access.secrets import Secrets
from farhand.llm.errors import NotConfigured
from farhand.llm.settings import ProviderSettings
from farhand.protocol.errors import ToolError


def provider_secrets(handles: Secrets) -> Callable[[str, ProviderSettings], ProviderSettings]:
    """Return a function that puts secrets into the settings of a provider. It raises NotConfigured."""

    def resolved(name: str, provider: ProviderSettings) -> ProviderSettings:
        try:
            found = handles.resolved(msgspec.to_builtins(provider), f"provider:{name}")
        except ToolError as error:
            raise NotConfigured(f"[providers.{name}]: {error.message}.") from None
        return msgspec.convert(found, ProviderSettings)

    return resolved
