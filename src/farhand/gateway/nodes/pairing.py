"""One-time codes with which a machine gets a node token of its own."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable

import msgspec

from farhand.store.tables.tokens import token_hash

# Nothing that is mistaken for something else when it is read aloud.
ALPHABET = "23456789ABCDEFGHJKLMNPQRSTUVWXYZ"
CODE_LENGTH = 8
LIFE_SECONDS = 600.0
MOST_CODES = 20
# Wrong codes after which the open ones are void: of 2^40, too few to find one; the throttle stops most before.
MOST_GUESSES = 50


class PairingCode(msgspec.Struct, frozen=True):
    """An open code, by its hash; with `node_id`, for that node alone."""

    hash: bytes
    node_id: str | None
    label: str
    made_by: str
    ends: float


class Pairing:
    """The codes of this run of the gateway: none outlives it, each is good for one machine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._codes: list[PairingCode] = []
        self._guesses = 0

    def make(self, node_id: str | None, label: str, made_by: str, seconds: float = LIFE_SECONDS) -> str:
        """A new code; the oldest makes room for it."""
        code = "".join(secrets.choice(ALPHABET) for _ in range(CODE_LENGTH))
        self._expire()
        if not self._codes:
            self._guesses = 0
        made = PairingCode(token_hash(code), node_id, label, made_by, self._clock() + seconds)
        self._codes = [*self._codes[-MOST_CODES + 1 :], made]
        return f"{code[:4]}-{code[4:]}"

    def find(self, code: str) -> PairingCode | None:
        """The open code that was said; a wrong one counts as a guess. It stays open until `use`."""
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
        """False when somebody else was quicker."""
        if code not in self._codes:
            return False
        self._codes.remove(code)
        return True

    def _expire(self) -> None:
        now = self._clock()
        self._codes = [code for code in self._codes if code.ends > now]


def plain_code(code: str) -> str:
    """As a person may type it."""
    return code.strip().upper().replace("-", "").replace(" ", "")
