"""The gateway's own certificate: made on first use, when it listens beyond this machine and has no other."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from farhand.config import GatewaySection, SettingsError
from farhand.gateway.nodes.addresses import lan_addresses
from farhand.machine.files.private_files import replace_private
from farhand.protocol.names import is_loopback

FOLDER: Final = "tls"
CERTIFICATE: Final = "cert.pem"
KEY: Final = "key.pem"
VALID_DAYS: Final = 3650


def use_own_certificate(home: Path, section: GatewaySection) -> None:
    """Let a gateway without a certificate that listens beyond this machine use its own. Raises SettingsError."""
    if section.tls_cert or section.tls_key or section.tls == "off" or is_loopback(section.host):
        return
    folder = home / FOLDER
    certificate, key = folder / CERTIFICATE, folder / KEY
    try:
        if not (certificate.exists() and key.exists()):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make(certificate, key, [section.host, *section.hosts, *lan_addresses()])
    except OSError as error:
        raise SettingsError(
            f"cannot make a certificate in {folder}: {error.strerror}; set [gateway] tls_cert"
        ) from None
    section.tls_cert, section.tls_key = str(certificate), str(key)


def _make(certificate: Path, key: Path, names: Iterable[str]) -> None:
    # Imported late: it takes some megabytes that a gateway on loopback saves.
    from cryptography import x509  # noqa: PLC0415
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    private = ec.generate_private_key(ec.SECP256R1())
    public = private.public_key()
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Farhand gateway")])
    now = datetime.datetime.now(datetime.UTC)
    known = dict.fromkeys(["localhost", "127.0.0.1", "::1", socket.gethostname(), *names])
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName(_alternatives(x509, known)), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(private, hashes.SHA256())
    )
    secret = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    replace_private(key, secret)
    replace_private(certificate, made.public_bytes(serialization.Encoding.PEM))


def _alternatives(x509: Any, names: Iterable[str]) -> list[Any]:
    """Return names and addresses as a certificate has them, without those that it cannot have."""
    found: list[Any] = []
    for name in names:
        host = name.rpartition(":")[0] if name.count(":") == 1 else name
        try:
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            with contextlib.suppress(ValueError):
                found.append(x509.DNSName(host.encode("idna").decode() if not host.isascii() else host))
            continue
        if not address.is_unspecified:
            found.append(x509.IPAddress(address))
    return found
