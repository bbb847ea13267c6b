"""What commands in a sandbox see of the system, whichever mechanism provides it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

# Files of /etc needed for names, addresses and certificates; none contains a secret.
ETC: Final = (
    "passwd",
    "group",
    "hosts",
    "resolv.conf",
    "nsswitch.conf",
    # Not all of ssl, which has the private keys of the machine.
    "ssl/certs",
    "ssl/cert.pem",
    "ssl/openssl.cnf",
    "ca-certificates",
    "alternatives",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "services",
    "protocols",
)
_KEPT_VARIABLES: Final = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TERM", "TZ")


def variables(home: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of commands: a few variables of this program, `HOME`, and those given."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return {"PATH": os.defpath, **kept, "HOME": home, **(more or {})}


def contains(folder: str, path: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
