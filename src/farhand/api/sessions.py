"""Browsers that signed in with a one-time code."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

CODE_SECONDS = 600.0
MOST_SESSIONS = 64


class Sessions:
    """They live as long as the gateway runs. The cookie's name carries the port: browsers share cookies across ports,
    and two gateways on one machine must not sign each other out."""

    def __init__(self, port: int, *, secure: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.cookie = f"farhand_session_{port}"
        self._secure = secure
        self._clock = clock
        self._codes: dict[str, float] = {}
        self._sessions: OrderedDict[str, None] = OrderedDict()

    def new_code(self) -> str:
        now = self._clock()
        self._codes = {code: expires for code, expires in self._codes.items() if expires >= now}
        code = secrets.token_urlsafe(24)
        self._codes[code] = now + CODE_SECONDS
        return code

    def redeem(self, code: str) -> str | None:
        """The `Set-Cookie` header for a code that is fresh and unused."""
        expires = self._codes.pop(code, None)
        if expires is None or expires < self._clock():
            return None
        session = secrets.token_urlsafe(32)
        self._sessions[session] = None
        while len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return f"{self.cookie}={session}; Path=/; HttpOnly; SameSite=Strict" + ("; Secure" if self._secure else "")

    def __contains__(self, session: str) -> bool:
        return session in self._sessions
