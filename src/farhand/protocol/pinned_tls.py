"""TLS with a server that is known by its certificate."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

_END: Final = "-----END CERTIFICATE-----"


def pinned_context(file: str) -> ssl.SSLContext:
    """Return a context that accepts only the first certificate of a PEM file, whatever its name. Raises OSError.

    The certificates after it are of authorities. Trusting these too would accept every server that they certify.
    """
    first, end, _ = Path(file).read_text("latin-1").partition(_END)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    start = first.find("-----BEGIN CERTIFICATE-----")
    if start < 0 or not end:
        raise OSError("it has no certificate")
    context.load_verify_locations(cadata=first[start:] + end)
    return context
