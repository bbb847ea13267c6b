"""Console sessions: browsers that signed in with a one-time code.

A session has two secrets. The cookie is sent by the browser, but to every server on the host, since cookies ignore
ports. The page secret is given to the console page once, in the fragment of the redirect after signing in; the page
keeps it in `sessionStorage`, which other ports cannot read, and sends it as the `X-Farhand-Page` header. Only both
together authenticate a request.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from farhand.gateway.access.credentials import Credential, Credentials
from farhand.store.journal.events import append_event
from farhand.store.ports import Store, Tx, log_failure
from farhand.store.sqlite.snapshots import note_revoked, revoked_tokens
from farhand.store.tables.access.browser_sessions import (
    BrowserSession,
    add_session,
    all_sessions,
    remove_sessions,
    sessions_used,
)
from farhand.store.tables.access.one_time_codes import add_code, find_code, use_code
from farhand.store.tables.access.tokens import token_hash

log = logging.getLogger(__name__)

CODE = "sign-in"
CODE_SECONDS = 600.0
MAX_CODES = 1000
MAX_SESSIONS = 64
# A use is written to the store at most this often.
USED_MS = 60_000
MAX_USER_AGENT = 200


class SessionLimits(msgspec.Struct, frozen=True):
    """How long a session lasts without a request, and at most."""

    idle_ms: int
    total_ms: int


class SignedIn(msgspec.Struct, frozen=True):
    """A new session: the `Set-Cookie` header, and the secret for its page."""

    cookie: str
    page_secret: str


class BrowserSessions:
    """The sessions of one gateway. They are kept in the store and survive a restart.

    A session acts as the credential that made its sign-in link, and ends with it.

    The cookie's name contains the port, so that two gateways on one host do not sign each other out; gateways of a
    fleet, which share the sessions, have one name.
    """

    def __init__(
        self,
        database: Store,
        home: Path,
        credentials: Credentials,
        limits: SessionLimits,
        *,
        name: str,
        secure: bool,
        clock: Callable[[], int],
        note: Callable[[str, str, Mapping[str, Any]], None] = lambda *_: None,
    ) -> None:
        """`name`: part of the name of the cookie. `clock`: milliseconds since 1970. `note` writes to the journal."""
        self.cookie = f"farhand_session_{name}"
        self._on_ended: list[Callable[[str], None]] = []
        self._database = database
        self._home = home
        self._credentials = credentials
        credentials.subscribe(self._maker_ended)
        self._limits = limits
        self._secure = secure
        self._clock = clock
        self._note = note
        # Uses that are newer than the store's, and when they were last written.
        self._uses: dict[str, int] = {}
        self._written: dict[str, int] = {}
        self._sessions: dict[bytes, BrowserSession] = {}
        self._load(database)

    def _load(self, database: Store) -> None:
        ended = revoked_tokens(self._home)  # an older copy of the store may still have them
        stale = []
        for session in database.query(all_sessions):
            same_owner = hmac.compare_digest(session.owner_hash, self._credentials.owner_hash)
            valid = same_owner and self._credentials.ended([session.made_by]) is None and not self._over(session)
            if session.id in ended or not valid:
                stale.append(session.id)
            else:
                self._sessions[session.cookie_hash] = session
        if stale:
            database.query(lambda store: remove_sessions(store, stale))

    # -- signing in and out -------------------------------------------------------------------------------

    def subscribe(self, ended: Callable[[str], None]) -> None:
        """Have `ended` called with the id of each session that ends."""
        self._on_ended.append(ended)

    def new_code(self, made_by: str) -> str:
        """Return a code for a sign-in link, valid for one sign-in within ten minutes while its maker is valid."""
        code, stored = self._make_code(made_by)
        log_failure(stored, log, "store a sign-in code")
        return code

    async def stored_code(self, made_by: str) -> str:
        """Return such a code once it is stored, so that other gateways of a fleet know it too."""
        code, stored = self._make_code(made_by)
        await stored
        return code

    def _make_code(self, made_by: str) -> tuple[str, asyncio.Future[None]]:
        code, now = secrets.token_urlsafe(24), self._clock()
        add = partial(
            add_code,
            kind=CODE,
            code_hash=token_hash(code),
            facts=made_by.encode(),
            expires_at=now + round(CODE_SECONDS * 1000),
            now=now,
            most=MAX_CODES,
        )
        return code, self._database.write(add, durable=False)

    async def refresh(self) -> None:
        """Read the sessions again: another gateway of the fleet has begun or ended one."""
        stored = {session.cookie_hash: session for session in await self._database.read(all_sessions)}
        for session in [one for one in self._sessions.values() if one.cookie_hash not in stored]:
            self._forget(session)
        for session in stored.values():
            if hmac.compare_digest(session.owner_hash, self._credentials.owner_hash):
                self._sessions.setdefault(session.cookie_hash, session)

    async def redeem(self, code: str, address: str, user_agent: str) -> SignedIn | None:
        """Start a session; return None if the code is unknown, used or expired."""
        digest, moment = token_hash(code), self._clock()
        maker = await self._database.read(lambda store: find_code(store, CODE, digest, moment))
        if maker is not None:
            maker = await self._database.write(lambda store: use_code(store, CODE, digest, moment))
        if maker is None or self._credentials.ended([maker.decode()]) is not None:
            return None
        made_by = maker.decode()
        cookie, page_secret = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        now = self._clock()
        session = BrowserSession(
            f"console-{secrets.token_hex(4)}",
            token_hash(cookie),
            token_hash(page_secret),
            self._credentials.owner_hash,
            now,
            now,
            address,
            "".join(character for character in user_agent if character.isprintable())[:MAX_USER_AGENT],
            made_by,
        )
        self._sessions[session.cookie_hash] = session
        facts = {"address": address, "credential": made_by}

        def write(store: Tx) -> None:
            add_session(store, session)
            append_event(store, now, "console.signed_in", session.id, facts)

        await self._database.write(write)
        self._remove_expired()
        while len(self._sessions) > MAX_SESSIONS:
            await self.end(min(self._sessions.values(), key=self._last_used).id)
        return SignedIn(self._set_cookie(cookie), page_secret)

    async def end(self, session_id: str) -> bool:
        """End a session; return False if there is none with this id."""
        session = next((one for one in self._sessions.values() if one.id == session_id), None)
        if session is None:
            return False
        self._forget(session)
        await asyncio.to_thread(note_revoked, self._home, session_id)
        now = self._clock()

        def write(store: Tx) -> None:
            remove_sessions(store, [session_id])
            append_event(store, now, "console.signed_out", session_id, {})

        await self._database.write(write)
        return True

    @property
    def expired_cookie(self) -> str:
        """Return a `Set-Cookie` header that removes the cookie."""
        return self._set_cookie("") + "; Max-Age=0"

    def _set_cookie(self, value: str) -> str:
        return f"{self.cookie}={value}; Path=/; HttpOnly; SameSite=Strict" + ("; Secure" if self._secure else "")

    # -- authentication -----------------------------------------------------------------------------------

    def recognise(self, cookie: str, page_secret: str) -> tuple[str, Credential] | None:
        """Return the id of the session with these two secrets and the credential it acts as. Counts as a use."""
        session = self._sessions.get(token_hash(cookie))
        if session is None or not hmac.compare_digest(session.page_hash, token_hash(page_secret)):
            return None
        if self._over(session) or self._credentials.ended([session.made_by]) is not None:
            self._remove_expired()
            return None
        self._use(session)
        return session.id, self._credentials.named(session.made_by)

    def seconds_left(self, session_id: str) -> float:
        """Return the seconds until a session ends if it is not used again; 0 once it has ended."""
        session = next((one for one in self._sessions.values() if one.id == session_id), None)
        if session is None:
            return 0.0
        return max(0.0, (self._ends_at(session) - self._clock()) / 1000)

    def listed(self) -> list[tuple[BrowserSession, int, int]]:
        """Return each session with the times of its last use and of its end, last used first."""
        self._remove_expired()
        found = sorted(self._sessions.values(), key=self._last_used, reverse=True)
        return [(session, self._last_used(session), self._ends_at(session)) for session in found]

    def _last_used(self, session: BrowserSession) -> int:
        return self._uses.get(session.id, session.last_used_at)

    def _ends_at(self, session: BrowserSession) -> int:
        return min(self._last_used(session) + self._limits.idle_ms, session.created_at + self._limits.total_ms)

    def _over(self, session: BrowserSession) -> bool:
        return self._clock() >= self._ends_at(session)

    def _use(self, session: BrowserSession) -> None:
        now = self._clock()
        self._uses[session.id] = now
        if now - self._written.get(session.id, session.last_used_at) >= min(USED_MS, self._limits.idle_ms // 2):
            self._written[session.id] = now
            used = {session.id: now}
            written = self._database.write(lambda store: sessions_used(store, used), durable=False)
            log_failure(written, log, "store the last use of a console session")

    def _remove_expired(self) -> None:
        expired = [session for session in self._sessions.values() if self._over(session)]
        for session in expired:
            self._forget(session)
        self._remove_later(expired)

    def _maker_ended(self, name: str) -> None:
        ended = [session for session in self._sessions.values() if session.made_by == name]
        for session in ended:
            self._forget(session)
            self._note("console.signed_out", session.id, {"with": name})
        self._remove_later(ended)

    def _remove_later(self, sessions: list[BrowserSession]) -> None:
        if sessions:
            ids = [session.id for session in sessions]
            removed = self._database.write(lambda store: remove_sessions(store, ids), durable=False)
            log_failure(removed, log, "remove ended console sessions")

    def _forget(self, session: BrowserSession) -> None:
        del self._sessions[session.cookie_hash]
        self._uses.pop(session.id, None)
        self._written.pop(session.id, None)
        for ended in self._on_ended:
            ended(session.id)
