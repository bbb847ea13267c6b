"""The query by which a gateway gives credentials to the egress proxy of a node."""

from __future__ import annotations

import re
from typing import Final

import msgspec

QUESTION: Final = "egress"
HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
# Headers of one connection, which the proxy sets itself.
OF_CONNECTION: Final = frozenset(
    {"host", "connection", "proxy-connection", "proxy-authorization", "keep-alive", "upgrade", "te", "expect"}
)
_OF_BODY: Final = frozenset({"content-length", "transfer-encoding"})


class EgressCredential(msgspec.Struct, frozen=True):
    """A secret for requests to some hosts."""

    name: str
    # `host` or `host:port`.
    hosts: list[str]
    # With `{}` in the place of the value: `Authorization: Bearer {}`.
    header: str
    # The value, sealed to the node's key.
    sealed: str


class EgressQuery(msgspec.Struct, frozen=True):
    """All credentials of a node; they replace those it had."""

    credentials: list[EgressCredential] = []


def check_header(header: str) -> str:
    """Return a header with its place for the value, `{}`. Raises ValueError."""
    name, colon, value = header.partition(":")
    if not colon or not HEADER_NAME.fullmatch(name.strip()) or value.count("{}") != 1 or not header.isascii():
        raise ValueError(f"the header {header[:100]!r} must be like 'Authorization: Bearer {{}}'")
    if not header.isprintable() or name.strip().lower() in OF_CONNECTION | _OF_BODY:
        raise ValueError(f"the header {name[:100]!r} cannot carry a credential")
    return f"{name.strip()}: {value.strip()}"
