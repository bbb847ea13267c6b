"""The network of a sandbox: `none`, `host`, `local` or `allow:HOST,...`, and the proxy that enforces the last two.

Commands have no network of their own; programs inside use the proxy through the usual variables (`https_proxy` and
so on). The proxy resolves names itself, connects only to what the owner allowed, and logs every request.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ipaddress
import logging
import os
import re
import socket
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from farhand.machine.sandbox.egress_credentials import (
    EgressCredentials,
    HeaderCredential,
    InvalidRequest,
    upstream_context,
    with_credentials,
)
from farhand.machine.sandbox.launch import EGRESS_SOCKET

log = logging.getLogger(__name__)

NETWORKS: Final = ("host", "none", "local", "allow:HOST,...")
_HOST: Final = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(:\d{1,5})?|\[[0-9a-f:.]+\](:\d{1,5})?")
# The host of a request. Anything else could mean another name to the resolver, which stops at a NUL character.
_REQUESTED: Final = re.compile(r"[a-z0-9_]([a-z0-9._-]{0,251}[a-z0-9_])?|[0-9a-f:.]*:[0-9a-f:.]*")
# Among the hosts of `allow`: private addresses, too.
LOCAL: Final = "local"
_LOCAL: Final = tuple(
    ipaddress.ip_network(network)
    for network in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8", "fc00::/7", "::1/128")
)
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
# Gives cloud machines their credentials.
_METADATA: Final = ipaddress.ip_address("fd00:ec2::254")
_MOST_HEAD: Final = 64 * 1024
_CONNECT_SECONDS: Final = 15.0
_HEAD_SECONDS: Final = 30.0
_BUFFER: Final = 64 * 1024
_BACKLOG: Final = 128
# Connections at once. Each takes two open files, and commands must not use up those of this program.
MOST_CONNECTIONS: Final = 200
_HOP_HEADERS: Final = frozenset(
    {"proxy-connection", "proxy-authorization", "connection", "keep-alive", "upgrade", "te"}
)


class NetworkRule(msgspec.Struct, frozen=True):
    """What commands may connect to."""

    # `host`: everything; `none`: nothing; `local`: private addresses; `allow`: the named hosts, at public addresses
    # unless `local` or the address itself is among them.
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

    def reaches(self, host: str, port: int, address: str) -> bool:
        """Return whether a host may be reached at an address that its name has.

        The owner of a name can give it any address, so an allowed name does not lead to private addresses.
        """
        if self.kind == "local":
            return _is_local(address)
        if self.kind != "allow":
            return self.kind == "host"
        if LOCAL in self.hosts and _is_local(address):
            return True
        if not self.names(host, port):
            return False
        return _is_public(address) or host == address or self.names(address, port) or _is_localhost(host, address)


class EgressRefused(Exception):
    """A connection that the rule does not allow, or that failed; `status` is the HTTP status of the answer."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class EgressProxy:
    """An HTTP proxy (CONNECT, and plain requests) on a socket in a private folder."""

    def __init__(
        self, folder: Path, rule: Callable[[], NetworkRule], credentials: EgressCredentials | None = None
    ) -> None:
        """`rule` is asked for every connection. `credentials` are added to requests to their hosts."""
        self.folder = folder
        self._credentials = credentials
        self._rule = rule
        self._listener: socket.socket | None = None
        self._starting: concurrent.futures.Future[None] | None = None
        self._server: asyncio.Server | None = None
        self._open = 0

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Listen, from any thread, and serve in `loop`. It does nothing if it listens already. The caller closes it.

        Commands that run already reach the new socket, since they see the folder.
        """
        if self._listener is not None:
            return
        self.folder.mkdir(mode=0o755, exist_ok=True)
        path = self.folder / EGRESS_SOCKET
        path.unlink(missing_ok=True)
        folder = os.open(self.folder, os.O_PATH)
        self._listener = socket.socket(socket.AF_UNIX)
        try:  # through the open folder, since the path of a socket has at most 107 bytes
            self._listener.bind(f"/proc/self/fd/{folder}/{EGRESS_SOCKET}")
            self._listener.listen(_BACKLOG)
        finally:
            os.close(folder)
        path.chmod(0o666)
        self._starting = asyncio.run_coroutine_threadsafe(self._start(self._listener), loop)

    async def close(self) -> None:
        """Stop listening; it can listen again."""
        if self._starting is not None:
            await asyncio.wrap_future(self._starting)
        if self._server is not None:
            self._server.close()
        self._listener = self._server = self._starting = None
        (self.folder / EGRESS_SOCKET).unlink(missing_ok=True)

    async def _start(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=_MOST_HEAD)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = "?"
        self._open += 1
        try:
            if self._open > MOST_CONNECTIONS:
                raise EgressRefused("503 Service Unavailable", f"commands have {MOST_CONNECTIONS} connections already")
            async with asyncio.timeout(_HEAD_SECONDS):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            method, target, first = _read_head(head)
            host, port = _address(method, target)
            added = self._credentials.of(host, port) if self._credentials and method == "CONNECT" else ()
            if added:
                writer = await self._serve_with(added, host, port, reader, writer)
                return
            upstream_reader, upstream = await self._connect(host, port)
            log.info("egress to %s:%d allowed", host, port, extra={"event": "egress.allowed"})
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                upstream.write(first.encode("latin-1"))
            await _both(reader, writer, upstream_reader, upstream)
        except EgressRefused as error:
            log.warning("egress to %s refused: %s", target[:200], error, extra={"event": "egress.refused"})
            body = f"farhand: {error}\n".encode()
            writer.write(b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\n" % error.status.encode())
            writer.write(b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            try:
                with contextlib.suppress(OSError):
                    await writer.drain()
            finally:
                self._open -= 1
                writer.close()

    async def _serve_with(
        self,
        added: Sequence[HeaderCredential],
        host: str,
        port: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> asyncio.StreamWriter:
        """Pass one request on with credentials; return the writer to close. Raises Refused before TLS has begun."""
        assert self._credentials is not None
        upstream_reader, upstream = await self._connect(host, port, upstream_context())
        try:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            async with asyncio.timeout(_HEAD_SECONDS):
                reader, writer = await self._credentials.server_side(host, writer)
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            upstream.write(with_credentials(head, host, port, added))
            names = ", ".join(one.name for one in added)
            log.info("egress to %s:%d with %s", host, port, names, extra={"event": "egress.credential"})
            await _both(reader, writer, upstream_reader, upstream)
        except InvalidRequest as error:
            log.warning("egress to %s refused: %s", host, error, extra={"event": "egress.refused"})
            body = f"farhand: {error}\n".encode()
            writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n" % len(body))
            writer.write(b"connection: close\r\n\r\n%b" % body)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            upstream.close()
        return writer

    async def _connect(
        self, host: str, port: int, tls: ssl.SSLContext | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        rule = self._rule()
        named = rule.names(host, port) or LOCAL in rule.hosts
        if rule.kind == "none" or (rule.kind == "allow" and not named):
            raise EgressRefused("403 Forbidden", f"{host}:{port} is not allowed by the network rule {rule.text}")
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError, UnicodeError):
            raise EgressRefused("502 Bad Gateway", f"{host} cannot be resolved") from None
        addresses = [str(address[0]) for _, _, _, _, address in found]
        allowed = [address for address in addresses if rule.reaches(host, port, address)]
        if not allowed:
            raise EgressRefused("403 Forbidden", _not_allowed(rule, host, addresses))
        problem: Exception | None = None
        for address in allowed:
            try:
                # The address that was checked, not the name, which could resolve to another one now.
                async with asyncio.timeout(_CONNECT_SECONDS):
                    return await asyncio.open_connection(
                        address, port, limit=_BUFFER, ssl=tls, server_hostname=None if tls is None else host
                    )
            except (OSError, TimeoutError) as error:
                problem = error
        raise EgressRefused("502 Bad Gateway", f"cannot connect to {host}:{port}: {problem}")


def _read_head(head: str) -> tuple[str, str, str]:
    """Return method, target and the request as the server gets it, which is asked to close the connection."""
    lines = head.rstrip("\r\n").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3:
        raise EgressRefused("400 Bad Request", "not an HTTP request")
    method, target, version = words
    if method == "CONNECT":
        return method, target, ""
    parts = urlsplit(target)
    if parts.scheme != "http" or not parts.netloc:
        raise EgressRefused("400 Bad Request", "use CONNECT, or a request with a full http:// address")
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
    host = (host or "").lower().rstrip(".")
    if not _REQUESTED.fullmatch(host) or (method == "CONNECT" and ":" not in target):
        raise EgressRefused("400 Bad Request", f"invalid target {target[:200]!r}")
    return host, port


def _not_allowed(rule: NetworkRule, host: str, addresses: list[str]) -> str:
    shown = ", ".join(addresses[:3])
    if rule.kind == "local":
        return f"{host} ({shown}) is not a private address (network rule local)"
    return (
        f"{host} ({shown}) is not at a public address, and the network rule {rule.text} does not name that address or "
        f"{LOCAL!r}"
    )


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address; an IPv4 address in the form of an IPv6 one as what it is."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found in _NAT64:
            return ipaddress.IPv4Address(found.packed[-4:])
        return found.ipv4_mapped or found.sixtofour or found
    return found


def _is_local(address: str) -> bool:
    """Whether an address is one of a private network or of this machine. Link-local ones are not: cloud machines get
    their credentials from such an address."""
    found = _plain(address)
    return found != _METADATA and any(found in network for network in _LOCAL if network.version == found.version)


def _is_public(address: str) -> bool:
    found = _plain(address)
    return found.is_global and not found.is_multicast


def _is_localhost(host: str, address: str) -> bool:
    return (host == "localhost" or host.endswith(".localhost")) and _plain(address).is_loopback


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
