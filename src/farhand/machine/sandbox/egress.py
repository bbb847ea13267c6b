"""The network of a sandbox: `none`, `host`, `local` or `allow:HOST,...`, and the proxy that enforces the last two.

Commands have no network of their own; programs inside use the proxy through the usual variables (`https_proxy` and
so on). The proxy resolves names itself, connects only to what the owner allowed, and logs every request.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from farhand.machine.sandbox.launch import EGRESS_SOCKET

log = logging.getLogger(__name__)

NETWORKS: Final = ("host", "none", "local", "allow:HOST,...")
_HOST: Final = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(:\d{1,5})?|\[[0-9a-f:.]+\](:\d{1,5})?")
_MOST_HEAD: Final = 64 * 1024
_CONNECT_SECONDS: Final = 15.0
_HEAD_SECONDS: Final = 30.0
_BUFFER: Final = 64 * 1024
_HOP_HEADERS: Final = frozenset(
    {"proxy-connection", "proxy-authorization", "connection", "keep-alive", "upgrade", "te"}
)


class NetworkRule(msgspec.Struct, frozen=True):
    """What commands may connect to."""

    # `host`: everything; `none`: nothing; `local`: private addresses; `allow`: the named hosts.
    kind: str = "host"
    hosts: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str) -> NetworkRule:
        """Read a setting. Raises ValueError, naming the values it could have."""
        if text in ("", "host"):
            return cls()
        if text in ("none", "local"):
            return cls(text)
        kind, _, names = text.partition(":")
        hosts = tuple(name.strip().lower().rstrip(".") for name in names.split(",") if name.strip())
        wrong = next((host for host in hosts if not _HOST.fullmatch(host)), None)
        if kind != "allow" or not hosts:
            raise ValueError(f"network {text!r} is not one of {', '.join(NETWORKS)}")
        if wrong is not None:
            raise ValueError(
                f"network {text!r}: {wrong!r} is not a host name; use example.com, *.example.com, host:443"
            )
        return cls("allow", hosts)

    @property
    def text(self) -> str:
        return f"allow:{','.join(self.hosts)}" if self.kind == "allow" else self.kind

    def is_within(self, other: NetworkRule) -> bool:
        """Return whether this rule allows nothing that `other` does not."""
        if self.kind == "none" or other.kind == "host" or self == other:
            return True
        return self.kind == other.kind == "allow" and set(self.hosts) <= set(other.hosts)

    def names(self, host: str, port: int) -> bool:
        """Return whether a host is allowed by name."""
        for allowed in self.hosts:
            name, _, wanted = allowed.rpartition(":") if _has_port(allowed) else (allowed, "", "")
            if wanted and int(wanted) != port:
                continue
            name = name.strip("[]")
            if host == name or (name.startswith("*.") and host.endswith(name[1:])):
                return True
        return False


class Refused(Exception):
    """A connection that the rule does not allow, or that failed; `status` is the HTTP status of the answer."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class EgressProxy:
    """An HTTP proxy (CONNECT, and plain requests) on a socket in a private folder."""

    def __init__(self, folder: Path, rule: Callable[[], NetworkRule]) -> None:
        """`rule` is asked for every connection."""
        self.folder = folder
        self._rule = rule
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. Commands that run already reach the new socket, since they see the folder. The caller closes it."""
        self.folder.mkdir(mode=0o755, exist_ok=True)
        path = self.folder / EGRESS_SOCKET
        path.unlink(missing_ok=True)
        folder = os.open(self.folder, os.O_PATH)
        try:  # through the open folder, since the path of a socket has at most 107 bytes
            short = f"/proc/self/fd/{folder}/{EGRESS_SOCKET}"
            self._server = await asyncio.start_unix_server(self._serve, short, limit=_MOST_HEAD)
        finally:
            os.close(folder)
        path.chmod(0o666)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        (self.folder / EGRESS_SOCKET).unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = "?"
        try:
            async with asyncio.timeout(_HEAD_SECONDS):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            method, target, first = _read_head(head)
            host, port = _address(method, target)
            upstream_reader, upstream = await self._connect(host, port)
            log.info("egress to %s:%d allowed", host, port, extra={"event": "egress.allowed"})
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                upstream.write(first.encode("latin-1"))
            await _both(reader, writer, upstream_reader, upstream)
        except Refused as error:
            log.warning("egress to %s refused: %s", target[:200], error, extra={"event": "egress.refused"})
            body = f"farhand: {error}\n".encode()
            writer.write(b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\n" % error.status.encode())
            writer.write(b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            with contextlib.suppress(OSError):
                await writer.drain()
            writer.close()

    async def _connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        rule = self._rule()
        named = rule.kind == "allow" and rule.names(host, port)
        if rule.kind == "none" or (rule.kind == "allow" and not named):
            raise Refused("403 Forbidden", f"{host}:{port} is not allowed by --network {rule.text}")
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError, UnicodeError):
            raise Refused("502 Bad Gateway", f"{host} cannot be resolved") from None
        problem: Exception | None = None
        for _, _, _, _, address in found:
            if rule.kind == "local" and not _is_local(str(address[0])):
                raise Refused("403 Forbidden", f"{host} ({address[0]}) is not a private address (--network local)")
            try:
                # The address that was checked, not the name, which could resolve to another one now.
                async with asyncio.timeout(_CONNECT_SECONDS):
                    return await asyncio.open_connection(str(address[0]), port, limit=_BUFFER)
            except (OSError, TimeoutError) as error:
                problem = error
        raise Refused("502 Bad Gateway", f"cannot connect to {host}:{port}: {problem}")


def _read_head(head: str) -> tuple[str, str, str]:
    """Return method, target and the request as the server gets it, which is asked to close the connection."""
    lines = head.rstrip("\r\n").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3:
        raise Refused("400 Bad Request", "not an HTTP request")
    method, target, version = words
    if method == "CONNECT":
        return method, target, ""
    parts = urlsplit(target)
    if parts.scheme != "http" or not parts.netloc:
        raise Refused("400 Bad Request", "use CONNECT, or a request with a full http:// address")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    kept = [line for line in lines[1:] if line.split(":", 1)[0].strip().lower() not in (*_HOP_HEADERS, "host")]
    return (
        method,
        target,
        "\r\n".join([f"{method} {path} {version}", f"Host: {parts.netloc.rpartition('@')[2]}", *kept])
        + ("\r\nConnection: close\r\n\r\n"),
    )


def _address(method: str, target: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        host, port = None, 0
    if not host or (method == "CONNECT" and ":" not in target):
        raise Refused("400 Bad Request", f"invalid target {target[:200]!r}")
    return host.lower().rstrip("."), port


def _is_local(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    return found.is_private or found.is_loopback or found.is_link_local


def _has_port(host: str) -> bool:
    return host.rpartition(":")[2].isdecimal() and (host.count(":") == 1 or host.startswith("["))


async def _both(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    upstream_reader: asyncio.StreamReader,
    upstream: asyncio.StreamWriter,
) -> None:
    try:
        await asyncio.gather(_pass(reader, upstream), _pass(upstream_reader, writer))
    finally:
        upstream.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_BUFFER):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
