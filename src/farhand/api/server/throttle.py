"""Lock out an address for a while after too many wrong tokens."""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from farhand.api.server.http import Problem, Scope
from farhand.protocol.names import is_loopback

log = logging.getLogger(__name__)

# The journal's event type.
LOCKED_OUT = "address.locked_out"
FAILURES_ALLOWED = 10
FAILURE_WINDOW_SECONDS = 60.0
LOCK_SECONDS = 300.0
# Requests without a token are not guesses, but more than this in a minute are not legitimate.
TOKENLESS_ALLOWED = 300
TOKENLESS_LOCK_SECONDS = 60.0
# OAuth clients register before they have a token.
REGISTRATIONS_ALLOWED = 30
REGISTRATIONS_LOCK_SECONDS = 60.0
ADDRESSES_KEPT = 4096


class Throttle:
    """Counts failures by address.

    A program on this machine that connects directly is exempt, since it could read the token anyway; a page in a
    browser or a client behind a proxy is not.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        allowed: int = FAILURES_ALLOWED,
        lock_seconds: float = LOCK_SECONDS,
        what: str = "wrong tokens",
        note: Callable[[str, str, Mapping[str, Any]], None] = lambda *_: None,
    ) -> None:
        """`note` writes an event to the journal."""
        self._clock = clock
        self._allowed = allowed
        self._lock_seconds = lock_seconds
        self._what = what
        self._note = note
        self._failures: OrderedDict[str, list[float]] = OrderedDict()

    def check(self, scope: Scope) -> None:
        """Raise Problem 429 while the address is locked."""
        if not self._failures:
            return
        address = _address(scope)
        wait = self._locked_for(address)
        if wait > 0 and not _direct_loopback(scope, address):
            raise Problem(
                429,
                "too_many_failures",
                f"too many {self._what} from this address; try again in {wait:.0f} s",
                headers=[(b"retry-after", b"%d" % (int(wait) + 1))],
            )

    def failed(self, scope: Scope) -> None:
        address = _address(scope)
        if _direct_loopback(scope, address) or self._locked_for(address) > 0:
            return
        now = self._clock()
        recent = [at for at in self._failures.get(address, []) if now - at < FAILURE_WINDOW_SECONDS]
        self._failures[address] = [*recent, now]
        self._failures.move_to_end(address)
        while len(self._failures) > ADDRESSES_KEPT:
            self._failures.popitem(last=False)
        if self._locked_for(address) > 0:
            self._tell(address)

    def __len__(self) -> int:
        return len(self._failures)

    def _locked_for(self, address: str) -> float:
        """Return the remaining seconds of a lock."""
        failures = self._failures.get(address, [])
        return failures[-1] + self._lock_seconds - self._clock() if len(failures) >= self._allowed else 0.0

    def _tell(self, address: str) -> None:
        seconds = round(self._lock_seconds)
        log.warning("%s is locked out for %d s after %d %s", address, seconds, self._allowed, self._what)
        self._note(LOCKED_OUT, address, {"seconds": seconds, "tries": self._allowed, "what": self._what})


def _address(scope: Scope) -> str:
    """Normalise an address: IPv4 in either form, and the network for IPv6, since one user usually has all of it."""
    client = scope.get("client")
    if not client:
        return "unknown"
    text = str(client[0]).partition("%")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    if isinstance(address, ipaddress.IPv4Address) or address.is_loopback:
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False).network_address)


def _direct_loopback(scope: Scope, address: str) -> bool:
    if any(name in (b"origin", b"x-forwarded-for", b"forwarded") for name, _ in scope["headers"]):
        return False
    return is_loopback(address)
