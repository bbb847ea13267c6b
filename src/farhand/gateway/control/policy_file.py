"""Change the policy in `farhand.toml` and keep everything else in the file, comments included."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import tomlkit
import tomlkit.exceptions
from tomlkit.items import AoT, Table

from farhand.gateway.calls.policy import PolicyRule, PolicySettings
from farhand.gateway.journal import EventJournal
from farhand.machine.files.private_files import replace_private
from farhand.protocol.errors import FarhandError

RULES = "rules"


class PolicyConflict(FarhandError):
    """The policy in force is not the one that the change was made from, or the file cannot be changed here."""


class PolicyFile:
    """Write the policy that the owner edited elsewhere, such as in the console."""

    def __init__(
        self,
        path: Path,
        settings: Callable[[], PolicySettings],
        check: Callable[[str], PolicySettings],
        obstacle: Callable[[], str],
        journal: EventJournal,
    ) -> None:
        """`settings` returns those in force. `check` returns what the text of a settings file would put in force, and
        raises ValueError. `obstacle` returns why the file cannot be changed, or nothing."""
        self._path = path
        self._settings = settings
        self._check = check
        self._obstacle = obstacle
        self._journal = journal

    async def save(self, wanted: PolicySettings, version: str, by: str) -> None:
        """Put a policy in force, if the one in force still is `version`. Raises PolicyConflict and ValueError."""
        if reason := self._obstacle():
            raise PolicyConflict(reason)
        before = self._settings()
        if version != version_of(before):
            raise PolicyConflict("the policy has changed since you read it; nothing was saved")
        path = self._path.resolve()
        try:
            text = with_policy(path.read_text() if path.exists() else "", wanted)
            # What is in force afterwards is what was wanted, or nothing is written.
            if self._check(text) != wanted:
                raise ValueError("the settings file would not have this policy in force")
            replace_private(path, text.encode())
        except (OSError, UnicodeDecodeError) as error:
            raise PolicyConflict(f"{path} cannot be changed: {error}") from None
        data = {"by": by, "before": version, "version": version_of(wanted), "policy": msgspec.to_builtins(wanted)}
        await self._journal.record(lambda _: None, "policy.saved", path.name, data)


def version_of(policy: PolicySettings) -> str:
    """Return an entity tag for a policy: equal policies have equal ones."""
    return hashlib.sha256(msgspec.json.encode(policy)).hexdigest()[:32]


def with_policy(text: str, policy: PolicySettings) -> str:
    """Return a settings file with another policy. Rules that stay keep their comments. Raises ValueError."""
    try:
        document = tomlkit.parse(text)
    except tomlkit.exceptions.TOMLKitError as error:
        raise ValueError(f"the settings file is not valid TOML: {error}") from None
    table = document.get("policy")
    if not isinstance(table, Table):
        document.pop("policy", None)  # dotted or inline
        table = tomlkit.table()
        document["policy"] = table
    for name in ("default", "approval_seconds", "approvers"):
        value, usual = getattr(policy, name), getattr(PolicySettings(), name)
        if name in table and table[name] == value:
            continue
        if name in table or value != usual:
            table[name] = value
    before = table.pop(RULES, None)
    known = list(before) if isinstance(before, AoT) else []
    rules = tomlkit.aot()
    for rule in policy.rules:
        same = next((item for item in known if _read(item) == rule), None)
        if same is not None:
            known.remove(same)
        rules.append(_table(rule) if same is None else same)
    if policy.rules:
        table[RULES] = rules
    return tomlkit.dumps(document)


def _read(item: Any) -> PolicyRule | None:
    try:
        return msgspec.convert(item.unwrap(), PolicyRule)
    except msgspec.ValidationError:
        return None


def _table(rule: PolicyRule) -> Table:
    table = tomlkit.table()
    usual = msgspec.to_builtins(PolicyRule(decision="allow"))
    for name, value in msgspec.to_builtins(rule).items():
        if name == "decision" or value != usual[name]:
            table[name] = value
    return table
