"""Strict parsing of `Host` and `Origin` headers: names are compared as parsed values, never as text."""

from __future__ import annotations

import functools
import ipaddress
import re
from typing import Final, NamedTuple

MAX_NAME: Final = 253
_LABEL: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
# The WHATWG URL standard reads a name as an IPv4 address if its last label looks like a number.
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT: Final = re.compile(r"[1-9][0-9]{0,4}")
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]{0,30}")
DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class Host(NamedTuple):
    """A host name in lower case, or an IP address in its canonical form; None for no port."""

    name: str
    port: int | None
    is_address: bool


class Origin(NamedTuple):
    scheme: str
    name: str
    # The scheme's default port if the origin has none.
    port: int | None


@functools.lru_cache(maxsize=256)
def parse_host(text: str) -> Host:
    """Parse `name`, `name:port`, `1.2.3.4:port` or `[::1]:port`. Raises ValueError for anything else."""
    if not text.isascii() or len(text) > MAX_NAME + 6:
        raise ValueError("not a host name")
    lowered = text.lower()
    if lowered.startswith("["):
        address, closed, rest = lowered[1:].partition("]")
        if not closed or "%" in address or (rest and not rest.startswith(":")):
            raise ValueError("not a bracketed IPv6 address")
        return Host(str(ipaddress.IPv6Address(address)), _port(rest[1:]) if rest else None, is_address=True)
    name, colon, port = lowered.partition(":")
    number = _port(port) if colon else None
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        return Host(str(ipaddress.IPv4Address(name)), number, is_address=True)
    if len(name) > MAX_NAME or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("not a host name")
    return Host(name, number, is_address=False)


@functools.lru_cache(maxsize=256)
def parse_origin(text: str) -> Origin:
    """Parse `scheme://host` or `scheme://host:port`. Raises ValueError for anything else, `null` included."""
    scheme, separator, rest = text.partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        raise ValueError("not an origin")
    host = parse_host(rest)
    return Origin(scheme, host.name, host.port or DEFAULT_PORTS.get(scheme))


def _port(text: str) -> int:
    if not _PORT.fullmatch(text) or int(text) > 65535:
        raise ValueError("not a port")
    return int(text)
