"""Secrets, taken out of what is shown: of log lines by their looks, of settings by their names too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

MASK: Final = "***"

_IN_TEXT: Final = re.compile(
    r"""
    ( (?:token|code)=
    | (?:token|api_?key|secret|password|passwd|authorization)["']\s*[:=]\s*["']
    | (?:api_?key|secret|password|passwd)=["']?
    | \bbearer[.\s]
    | \bauthorization:\s*basic\s
    | \bfh[onck]_ | \bsk- | \bgh[pousr]_ | \bgithub_pat_ | \bxox[abprs]- | \bglpat- )
    [\w.~%+/=-]+
    """,
    re.IGNORECASE | re.VERBOSE,
)
# The scheme is left to itself: looking for one takes a search from every dot of a long name to its end.
_IN_URL: Final = re.compile(r"(://[^\s/:@]*:)[^\s/@]+(@)", re.IGNORECASE)
_IN_SETTING: Final = re.compile(
    r"""
    ( :// ) [^\s/:@?#]+ (?=@)                                  # whoever asks, in a URL
    | ( [?&][\w.-]*(?:key|sig|signature|code|auth|pass|token|secret)= ) [^\s&#]+   # what it asks with
    | ( ://hooks\.slack\.com/\w+/ | /api/webhooks/ ) \S+                          # a place whoever knows may write to
    """,
    re.IGNORECASE | re.VERBOSE,
)
_SECRET_NAME: Final = re.compile(
    r"(?:^|_)(?:tokens?|secrets?|passwords?|passwd|passphrase|(?:api|access|private|secret|signing|encryption|auth|subscription|account|shared|master)_?keys?"
    r"|apikeys?|credentials?|authorization|cookies?|dsn|webhook_url)$|^key$"
)
_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def masked_text(text: str) -> str:
    """The text with everything that looks like a secret replaced by `***`; what it is a secret of stays."""
    return _IN_URL.sub(rf"\1{MASK}\2", _IN_TEXT.sub(rf"\1{MASK}", text))


def masked(value: Any, *, secret: bool = False) -> Any:
    """A copy of settings in which no secret is left: beneath a name that says so, and wherever a text looks like one.

    Numbers and switches stay: `context_tokens = 128000` tells nobody anything. So does an empty text: not set.
    """
    if isinstance(value, Mapping):
        return {name: masked(inner, secret=secret or _holds_secrets(str(name))) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner, secret=secret) for inner in value]
    if isinstance(value, str):
        return MASK if secret and value else _IN_SETTING.sub(_shown, masked_text(value))
    return value


def _shown(found: re.Match[str]) -> str:
    return f"{next(filter(None, found.groups()))}{MASK}"


def _holds_secrets(name: str) -> bool:
    """Headers are sent to prove something, whatever they are called."""
    return names_a_secret(name) or snake_case(name) == "headers"


def names_a_secret(name: str) -> bool:
    """`token`, `apiKeys`, `bot_token`, `SMTP_PASSWORD`, but not `context_tokens_used` nor `session_key`."""
    return _SECRET_NAME.search(snake_case(name)) is not None


def own_secret(variable: str) -> bool:
    """Whether a variable of the environment carries a secret of Farhand's own: no command is to inherit it."""
    return variable.startswith("FARHAND_") and names_a_secret(variable)


def snake_case(name: str) -> str:
    return _HUMP.sub("_", name).replace("-", "_").lower()
