"""Sessions of MCP clients that use `initialize`.

A session id is self-verifying: it contains a digest of its credential and gateway. So only the open calls and streams
of a session are stored, and a client keeps its session across restarts of the gateway. Gateways of a fleet tell each
other what a client says about its session, since any of them may have the call that it is about.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from farhand.api.mcp.messages import INVALID_REQUEST, Id, RpcError

MOST_SESSIONS: Final = 10_000
MOST_ENDED: Final = 10_000
MOST_STREAMS: Final = 1024
# At the end of a session's name; not a hexadecimal digit.
ELICITS: Final = "x"


class Listener:
    """A subscriber to changes; `wake` is set for each change, and at the end."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self.over = False

    def end(self) -> None:
        self.over = True
        self.wake.set()


@dataclasses.dataclass(eq=False)
class ServedCall:
    """A call that serves a request; `given_up` once its client has stopped waiting."""

    call_id: str
    given_up: bool = False


class Session:
    """The open calls and streams of one session."""

    def __init__(self, session_id: str) -> None:
        self.id = session_id
        # Open requests, and the calls that serve them.
        self.calls: dict[Id, ServedCall] = {}
        self.streams: set[Listener] = set()
        # Whether the client can ask its user.
        self.elicits = False
        # The least level of log messages that the client wants; empty: none.
        self.log_level = ""
        # Approvals that the client was asked about, by the id of the request.
        self.questions: dict[Id, str] = {}


class SessionNotice(msgspec.Struct, frozen=True):
    """What a client said about its session, for the other gateways of a fleet."""

    session_id: str
    credential: str
    ended: bool = False
    log_level: str | None = None
    # The request that the client gave up, and why.
    cancelled: Id | None = None
    reason: str = ""


class McpSessions:
    """The sessions of one gateway."""

    def __init__(self, gateway_id: str, tell: Callable[[SessionNotice], None] = lambda _: None) -> None:
        """`tell` passes what a client said to the other gateways of the fleet."""
        self.tell = tell
        self._gateway_id = gateway_id
        self._known: OrderedDict[str, Session] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()

    def begin(self, credential_id: str, *, elicits: bool) -> Session:
        """Return a new session; its id also tells whether the client can ask its user."""
        name = secrets.token_hex(16) + ELICITS * elicits
        return self._admit(f"{name}-{self._proof(name, credential_id)}")

    def find(self, session_id: str | None, credential_id: str) -> Session:
        """Return a session. Raises RpcError: 400 without an id, 404 if it is another credential's or has ended."""
        if session_id is None:
            raise RpcError(INVALID_REQUEST, "a request after initialize has the header Mcp-Session-Id", status=400)
        known = self._known.get(session_id)
        name, _, proof = session_id.partition("-")
        genuine = secrets.compare_digest(proof.encode(), self._proof(name, credential_id).encode())
        if not genuine or session_id in self._ended:
            raise RpcError(INVALID_REQUEST, "there is no such session; initialize a new one", status=404)
        if known is None:
            return self._admit(session_id)
        self._known.move_to_end(session_id)
        return known

    def end(self, session: Session) -> None:
        """Invalidate the id and end its streams."""
        self._known.pop(session.id, None)
        self._ended[session.id] = None
        if len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)
        for stream in session.streams:
            stream.end()

    def __len__(self) -> int:
        return len(self._known)

    def _admit(self, session_id: str) -> Session:
        session = self._known[session_id] = Session(session_id)
        session.elicits = session_id.partition("-")[0].endswith(ELICITS)
        if len(self._known) > MOST_SESSIONS:
            idle = next((one for one in self._known.values() if not one.calls and not one.streams), session)
            del self._known[idle.id]
        return session

    def _proof(self, name: str, credential_id: str) -> str:
        text = f"{self._gateway_id}\0{credential_id}\0{name}"
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]
