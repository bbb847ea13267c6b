"""Where other machines reach this gateway, and the certificate by which they recognise it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import ipaddress
import socket
from pathlib import Path
from typing import Final

import msgspec

from farhand.protocol.join_codes import certificate_pin
from farhand.protocol.names import is_loopback

# Addresses of the networks that containers and virtual machines have among themselves, by name of the interface.
VIRTUAL: Final = ("docker", "br-", "veth", "virbr", "cni", "flannel", "podman", "lxc", "vmnet")
# Reserved for documentation: asking for the route to it sends nothing.
ELSEWHERE: Final = "192.0.2.1"


class Pins(msgspec.Struct, frozen=True):
    """Digests of a self-signed certificate; without them, a client checks the certificate as usual."""

    # SHA-256 of the certificate, as codes contain it.
    certificate: str
    # SHA-256 of its public key, as `curl --pinnedpubkey` takes it.
    public_key: str


class GatewayAddress(msgspec.Struct, frozen=True):
    """The address on which a gateway listens."""

    host: str
    port: int
    # Names from the settings; each may have a port of its own.
    hosts: tuple[str, ...] = ()
    tls: bool = False
    pins: Pins | None = None

    def urls(self) -> list[str]:
        """Return the addresses for other machines, the best first; the loopback address if there is no other."""
        found = [name for name in self.hosts if not is_loopback(_without_port(name))]
        if _is_unspecified(self.host):
            found += lan_addresses()
        else:
            found.append(self.host)
        scheme = "https" if self.tls else "http"
        return [f"{scheme}://{self._with_port(name)}" for name in dict.fromkeys(found or ["127.0.0.1"])]

    def _with_port(self, name: str) -> str:
        if name.startswith("["):
            return name if "]:" in name else f"{name}:{self.port}"
        if name.count(":") > 1:
            return f"[{name}]:{self.port}"
        return name if ":" in name else f"{name}:{self.port}"


def lan_addresses() -> list[str]:
    """Return this machine's addresses for others, the one of the default route first."""
    import psutil  # noqa: PLC0415 - needed only when a machine is added

    found: list[str] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((ELSEWHERE, 9))
        found.append(str(probe.getsockname()[0]))
    with contextlib.suppress(OSError):
        for name, addresses in psutil.net_if_addrs().items():
            if not name.startswith(VIRTUAL):
                found += [one.address for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6)]
    return [one for one in dict.fromkeys(found) if _is_usable(one)]


def pins_of(certificate: Path) -> Pins | None:
    """Return the pins of a self-signed certificate; None for any other, which is renewed now and then."""
    from cryptography import x509  # noqa: PLC0415 - needed only with TLS
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat  # noqa: PLC0415

    try:
        known = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (OSError, ValueError):
        return None
    if known.issuer != known.subject:
        return None
    public = known.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return Pins(
        certificate_pin(known.public_bytes(Encoding.DER)), base64.b64encode(hashlib.sha256(public).digest()).decode()
    )


def _is_usable(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return not (address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast)


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def _without_port(name: str) -> str:
    return name.rpartition(":")[0] if name.count(":") == 1 else name
