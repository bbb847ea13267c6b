"""Issue one-time codes with which a machine gets its own node token."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from farhand.node.stored_limits import LendingLimits
from farhand.store.ports import Store, Tx
from farhand.store.tables.access.one_time_codes import add_code, count_codes, find_code, remove_codes, use_code
from farhand.store.tables.access.tokens import token_hash

# Without characters that are easily confused.
ALPHABET = "23456789ABCDEFGHJKLMNPQRSTUVWXYZ"
CODE_LENGTH = 8
LIFE_SECONDS = 600.0
MOST_CODES = 20
# Wrong codes after which all open codes are void: too few to find one of 2^40; rate limiting stops most attempts.
MOST_GUESSES = 50
KIND: Final = "pairing"


class PairingFacts(msgspec.Struct, frozen=True):
    """What is stored of a code beside its hash."""

    # With it, the code is valid only for that node.
    node_id: str | None
    label: str
    made_by: str
    # What the machine lends at most; it stores them when it joins.
    limits: LendingLimits = LendingLimits()


class PairingCode(msgspec.Struct, frozen=True):
    """An open code."""

    hash: bytes
    facts: PairingFacts


class PairingCodes:
    """Manage the open codes, each valid for one machine. They are stored, so that any gateway of a fleet takes them."""

    def __init__(self, database: Store, clock: Callable[[], int]) -> None:
        """`clock`: milliseconds since 1970."""
        self._database = database
        self._clock = clock
        self._guesses = 0

    async def make(
        self,
        node_id: str | None,
        label: str,
        made_by: str,
        seconds: float = LIFE_SECONDS,
        limits: LendingLimits | None = None,
    ) -> str:
        """Return a new code; the oldest is dropped if there are too many."""
        code = "".join(secrets.choice(ALPHABET) for _ in range(CODE_LENGTH))
        facts = msgspec.json.encode(PairingFacts(node_id, label, made_by, limits or LendingLimits()))
        now = self._clock()

        def write(tx: Tx) -> bool:
            others = count_codes(tx, KIND, now) > 0
            add_code(tx, KIND, token_hash(code), facts, now + round(seconds * 1000), now, MOST_CODES)
            return others

        if not await self._database.write(write):
            self._guesses = 0
        return f"{code[:4]}-{code[4:]}"

    async def find(self, code: str) -> PairingCode | None:
        """Return the open code that matches; a wrong code counts as a guess. The code stays open until `use`."""
        digest, now = token_hash(plain_code(code)), self._clock()
        facts = await self._database.read(lambda tx: find_code(tx, KIND, digest, now))
        if facts is not None:
            return PairingCode(digest, msgspec.json.decode(facts, type=PairingFacts))
        self._guesses += 1
        if self._guesses >= MOST_GUESSES:
            await self._database.write(partial(remove_codes, kind=KIND))
        return None

    async def use(self, code: PairingCode) -> bool:
        """Use up a code; return False if it was used in the meantime."""
        now = self._clock()
        return await self._database.write(lambda tx: use_code(tx, KIND, code.hash, now)) is not None


def plain_code(code: str) -> str:
    """Normalize a code typed by a person."""
    return code.strip().upper().replace("-", "").replace(" ", "")
