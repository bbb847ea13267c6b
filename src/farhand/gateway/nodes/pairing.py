"""Issue one-time codes with which a machine gets its own node token."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable

import msgspec

from farhand.node.lent_limits import LendingLimits
from farhand.store.tables.tokens import token_hash

# Without characters that are easily confused.
ALPHABET = "23456789ABCDEFGHJKLMNPQRSTUVWXYZ"
CODE_LENGTH = 8
LIFE_SECONDS = 600.0
MOST_CODES = 20
# Wrong codes after which all open codes are void: too few to find one of 2^40; rate limiting stops most attempts.
MOST_GUESSES = 50


class PairingCode(msgspec.Struct, frozen=True):
    """Hold the hash of an open code; with `node_id`, it is valid only for that node."""

    hash: bytes
    node_id: str | None
    label: str
    made_by: str
    ends: float
    # What the machine lends at most; it stores them when it joins.
    limits: LendingLimits = LendingLimits()


class Pairing:
    """Manage the codes of this gateway process: they do not survive a restart, and each is valid for one machine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._codes: list[PairingCode] = []
        self._guesses = 0

    def make(
        self,
        node_id: str | None,
        label: str,
        made_by: str,
        seconds: float = LIFE_SECONDS,
        limits: LendingLimits | None = None,
    ) -> str:
        """Return a new code; the oldest is dropped if there are too many."""
        code = "".join(secrets.choice(ALPHABET) for _ in range(CODE_LENGTH))
        self._expire()
        if not self._codes:
            self._guesses = 0
        made = PairingCode(
            token_hash(code), node_id, label, made_by, self._clock() + seconds, limits or LendingLimits()
        )
        self._codes = [*self._codes[-MOST_CODES + 1 :], made]
        return f"{code[:4]}-{code[4:]}"

    def find(self, code: str) -> PairingCode | None:
        """Return the open code that matches; a wrong code counts as a guess. The code stays open until `use`."""
        self._expire()
        digest = token_hash(plain_code(code))
        for known in self._codes:
            if hmac.compare_digest(digest, known.hash):
                return known
        self._guesses += 1
        if self._guesses >= MOST_GUESSES:
            self._codes = []
        return None

    def use(self, code: PairingCode) -> bool:
        """Use up a code; return False if it was used in the meantime."""
        if code not in self._codes:
            return False
        self._codes.remove(code)
        return True

    def _expire(self) -> None:
        now = self._clock()
        self._codes = [code for code in self._codes if code.ends > now]


def plain_code(code: str) -> str:
    """Normalize a code typed by a person."""
    return code.strip().upper().replace("-", "").replace(" ", "")
