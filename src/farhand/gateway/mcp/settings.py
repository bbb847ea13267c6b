"""The settings of an MCP server: `[mcp.NAME]`, or the body of `POST /v1/mcp/servers`."""

from __future__ import annotations

import re
from typing import Final, Literal
from urllib.parse import urlsplit

import msgspec

from farhand.protocol.names import NATIVE, SEPARATOR
from farhand.protocol.secret_handles import MARK

_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
RESERVED: Final = frozenset({NATIVE, "local"})


class McpServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a server is reached: by its URL, or by starting a program."""

    # The address of a server with streamable HTTP.
    url: str = ""
    # Sent with each request to `url`.
    headers: dict[str, str] = {}
    # The program and its arguments; it speaks MCP on standard input and output.
    command: list[str] = []
    env: dict[str, str] = {}
    # The folder the program runs in; default: the workspace.
    cwd: str = ""
    # The node that runs the program; empty: the gateway's machine.
    node: str = ""
    enabled: bool = True
    # Patterns of tools that only read: these need the scope `tools.read` only. What the server says is not used.
    read_only: list[str] = []
    # Hold back tools that appear after the first connection until they are accepted, not only changed ones.
    hold_new: bool = False
    # Whether the server may ask the user for input: never; always answered with a refusal; or accepted with the
    # default values of the form, if all required fields have one.
    elicitation: Literal["no", "decline", "defaults"] = "no"
    # Whether the server may use the agent's model.
    sampling: Literal["no", "model"] = "no"
    # How long a call may take that has no limit of its own.
    timeout_seconds: float = 300.0
    # Where the browser returns to after a login; default: the gateway's own address on this machine.
    redirect_url: str = ""

    @property
    def kind(self) -> str:
        return "http" if self.url else "stdio"


def check_name(name: str) -> str:
    """Return the name of a server. Raises ValueError if it cannot be the first part of a tool's name."""
    if name.lower() in RESERVED:
        raise ValueError(f"{name!r} is reserved for the gateway itself; use another name for the MCP server")
    if not _NAME.fullmatch(name) or SEPARATOR in name:
        raise ValueError(
            f"{name[:100]!r} cannot be the name of an MCP server: at most 64 letters, digits and . _ - are allowed, "
            "beginning and ending with a letter or digit, without '__'"
        )
    return name


def check_settings(name: str, settings: McpServerSettings) -> None:
    """Raise ValueError for settings that contradict each other."""
    where = f"[mcp.{name}]"
    if bool(settings.url) == bool(settings.command):
        raise ValueError(f"{where} needs either url or command")
    if settings.url:
        address = urlsplit(settings.url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ValueError(f"{where} url: {settings.url!r} is not an http:// or https:// address")
        for option in ("env", "cwd", "node"):
            if getattr(settings, option):
                raise ValueError(f"{where} {option} is for a server with a command; this one has a url")
    elif settings.headers:
        raise ValueError(f"{where} headers are for a server with a url; this one has a command")
    elif not settings.command[0]:
        raise ValueError(f"{where} command is empty")
    if any("\r" in text or "\n" in text for pair in settings.headers.items() for text in pair):
        raise ValueError(f"{where} headers must not contain line breaks")
    if any(MARK.decode() in text for text in (*settings.command, settings.cwd)):
        raise ValueError(f"{where} a secret in command or cwd could be listed by others; use it in env")
    if any("\0" in text for text in (*settings.command, *settings.env, *settings.env.values(), settings.cwd)):
        raise ValueError(f"{where} command, env and cwd must not contain a null character")
    if any(not variable or "=" in variable for variable in settings.env):
        raise ValueError(f"{where} env: a variable's name must not be empty or contain '='")
    if not 0 < settings.timeout_seconds <= 86_400:
        raise ValueError(f"{where} timeout_seconds must be greater than 0 and at most 86400")
