"""Assembly of what changes the policy."""

from __future__ import annotations

import os
from pathlib import Path

from farhand.config import FILE, LiveConfig, SettingsError, parse
from farhand.gateway.calls.policy import PolicySettings
from farhand.gateway.control.policy_file import PolicyFile
from farhand.gateway.journal import EventJournal

VARIABLES = "FARHAND_POLICY_"


def policy_file(home: Path, live: LiveConfig, journal: EventJournal, *, alone: bool) -> PolicyFile:
    """`alone`: whether this gateway is the only one of its store."""

    def check(text: str) -> PolicySettings:
        try:
            return parse(text, home / FILE).policy
        except SettingsError as error:
            raise ValueError(str(error)) from None

    def obstacle() -> str:
        if not alone:
            return f"several gateways share this store, each with a {FILE} of its own; change the policy in all of them"
        if overriding := next((name for name in os.environ if name.startswith(VARIABLES)), None):
            return f"the environment variable {overriding} overrides {FILE}; remove it, and restart the gateway"
        return ""

    return PolicyFile(home / FILE, lambda: live.now.policy, check, obstacle, journal)
