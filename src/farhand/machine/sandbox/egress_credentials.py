"""Credentials that the egress proxy adds to requests to named hosts, so that no command ever holds them.

The proxy ends TLS for these hosts with certificates of this machine's own authority, which confined commands trust, and
checks the certificate of the real server as usual. It adds the header to each request that it passes on.
"""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import logging
import re
import ssl
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from farhand.machine.files.private_files import replace_private
from farhand.machine.sandbox.launch import CA_BUNDLE
from farhand.protocol.egress import HEADER_NAME, OF_CONNECTION

log = logging.getLogger(__name__)

AUTHORITY: Final = "egress-ca.pem"
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_REQUEST: Final = re.compile(r"([A-Z]{1,20}) (/\S*|\*) HTTP/1\.[01]")
_DAY: Final = datetime.timedelta(days=1)


class HeaderCredential(msgspec.Struct, frozen=True):
    """A header with a secret value, and the host that gets it."""

    # The name of the secret.
    name: str
    # `host`, or `host:port`; the port is 443 otherwise.
    host: str
    header: str
    value: str

    def __repr__(self) -> str:
        return f"HeaderCredential({self.name!r}, {self.host!r}, {self.header!r})"


class InvalidRequest(Exception):
    """A request that is not passed on."""


class EgressCredentials:
    """The credentials of one machine, in memory only, and the authority that signs certificates for their hosts."""

    def __init__(self, folder: Path, public: Path) -> None:
        """`folder` keeps the key of the authority. Commands see `public`, with the certificates that they trust."""
        self._folder = folder
        self._public = public
        self._all: tuple[HeaderCredential, ...] = ()
        self._authority: tuple[Any, Any] | None = None
        self._contexts: dict[str, ssl.SSLContext] = {}

    def set(self, credentials: Sequence[HeaderCredential]) -> None:
        """Replace all credentials. It blocks: call it in a thread."""
        if credentials:
            self._trust()
        else:
            (self._public / CA_BUNDLE).unlink(missing_ok=True)
        self._all = tuple(credentials)

    def of(self, host: str, port: int) -> tuple[HeaderCredential, ...]:
        """Return the credentials for a host, whose name is in small letters."""
        named = f"{host}:{port}"
        return tuple(one for one in self._all if (one.host if ":" in one.host else f"{one.host}:443") == named)

    async def server_side(
        self, host: str, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Begin TLS with the command, as `host`. Await nothing between the reply to CONNECT and this call."""
        context = self._contexts.get(host)
        if context is None:
            context = self._contexts[host] = self._context(host)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=64 * 1024)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport = await loop.start_tls(writer.transport, protocol, context, server_side=True)
        if transport is None:
            raise OSError("TLS could not be started")
        protocol.connection_made(transport)
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    # -- certificates -----------------------------------------------------------------------------------

    def _trust(self) -> None:
        """Write the certificates that commands trust: those of the system, and the authority."""
        from cryptography.hazmat.primitives.serialization import Encoding  # noqa: PLC0415 - few nodes need it

        _, certificate = self._load()
        own = certificate.public_bytes(Encoding.PEM)
        paths = ssl.get_default_verify_paths()
        system = paths.cafile or paths.openssl_cafile
        others = Path(system).read_bytes() if system and Path(system).is_file() else b""
        beside = self._public / f"{CA_BUNDLE}.new"
        beside.write_bytes(others.rstrip() + b"\n" + own if others else own)
        beside.chmod(0o644)
        beside.replace(self._public / CA_BUNDLE)

    def _load(self) -> tuple[Any, Any]:
        """Return key and certificate of the authority; they are made once and kept."""
        from cryptography import x509  # noqa: PLC0415
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415

        if self._authority is not None:
            return self._authority
        path = self._folder / AUTHORITY
        if path.exists():
            data = path.read_bytes()
            self._authority = (serialization.load_pem_private_key(data, None), x509.load_pem_x509_certificate(data))
            return self._authority
        key, certificate = _signed("Farhand egress proxy of this machine", None, 3650)
        data = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ) + certificate.public_bytes(serialization.Encoding.PEM)
        replace_private(path, data)
        self._authority = (key, certificate)
        return self._authority

    def _context(self, host: str) -> ssl.SSLContext:
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415

        key, certificate = _signed(host, self._load(), 30)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ) + certificate.public_bytes(serialization.Encoding.PEM)
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".leaf-") as file:  # mode 0600
            file.write(pem)
            file.flush()
            context.load_cert_chain(file.name)
        return context


def _signed(name: str, authority: tuple[Any, Any] | None, days: int) -> tuple[Any, Any]:
    """Return a new key and its certificate, for a host, or for the authority itself."""
    from cryptography import x509  # noqa: PLC0415
    from cryptography.hazmat.primitives import hashes  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID  # noqa: PLC0415

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    signing, issuer = (key, subject) if authority is None else (authority[0], authority[1].subject)
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + days * _DAY)
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=0 if authority is None else None), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), False)
        .add_extension(_usage(x509, authority is None), True)
    )
    if authority is not None:
        try:
            alternative: Any = x509.IPAddress(ipaddress.ip_address(name))
        except ValueError:
            alternative = x509.DNSName(name)
        builder = builder.add_extension(x509.SubjectAlternativeName([alternative]), False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
    return key, builder.sign(signing, hashes.SHA256())


def _usage(x509: Any, authority: bool) -> Any:
    unused = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    return x509.KeyUsage(digital_signature=not authority, key_cert_sign=authority, crl_sign=authority, **unused)


def with_credentials(head: str, host: str, port: int, credentials: Sequence[HeaderCredential]) -> bytes:
    """Return the head of a request as the server gets it: with the credentials, for this host and no other.

    It asks the server to close the connection, so that no unchecked request follows. Raises InvalidRequest.
    """
    lines = head.removesuffix("\r\n\r\n").split("\r\n")
    if _CONTROL.search("".join(lines)) or not (found := _REQUEST.fullmatch(lines[0])):
        raise InvalidRequest("not an HTTP/1 request")
    if found[1] in ("TRACE", "CONNECT"):
        raise InvalidRequest(f"{found[1]} is not allowed where a credential is added")
    replaced = {one.header.partition(":")[0].strip().lower() for one in credentials}
    kept = []
    for line in lines[1:]:
        name, colon, _ = line.partition(":")
        if not colon or not HEADER_NAME.fullmatch(name):
            raise InvalidRequest("a header has no valid name")
        if name.lower() not in OF_CONNECTION and name.lower() not in replaced:
            kept.append(line)
    shown = f"[{host}]" if ":" in host else host
    added = [one.header.replace("{}", one.value) for one in credentials]
    first = [lines[0], f"Host: {shown}" + ("" if port == 443 else f":{port}")]
    return ("\r\n".join([*first, *kept, *added, "Connection: close"]) + "\r\n\r\n").encode("latin-1")


def upstream_context() -> ssl.SSLContext:
    """Return the TLS settings towards servers: their certificates are checked against those of the system."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
