"""Receive posts of other programs at hook addresses, and pass them to sessions in order.

A post is on disk before it is answered with 202. Only the hook's settings determine the session; the payload cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Final, Literal

import msgspec

from farhand.gateway.access.credentials import OWNER, Credential
from farhand.gateway.calls.refusals import ROW_BYTES
from farhand.gateway.messaging.channel import Tools
from farhand.gateway.messaging.inbound import InboundMessages, tool_scopes
from farhand.gateway.messaging.outbox import Messages
from farhand.gateway.repeating import BackgroundTasks
from farhand.gateway.sessions import keys as session_keys
from farhand.gateway.sessions.keys import MAIN
from farhand.gateway.sessions.runs import Run
from farhand.gateway.sessions.sessions import Sessions
from farhand.protocol.errors import Failed, InvalidArgs, NotAllowed, NotFound, ToolError
from farhand.protocol.json_limits import check_value_count
from farhand.store.ports import Store, Tx
from farhand.store.tables import hooks
from farhand.store.tables.hooks import HookPost
from farhand.store.tables.outbox import Place

log = logging.getLogger(__name__)

SIGNATURE: Final = b"x-webhook-signature"
MAX_POST_BYTES: Final = 1024 * 1024
# Limits how many posts of one hook may wait for its session: a hook without a secret accepts posts from anyone.
MAX_WAITING: Final = 1000
MAX_WAITING_BYTES: Final = 32 * 1024 * 1024
BUSY_SECONDS: Final = 0.5
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class HookSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Define a table `[hooks.ID]`, or a hook made by `farhand channels hook add`."""

    # Posts must be signed with it: `X-Webhook-Signature: sha256=<hex>` of the body.
    secret: str = ""
    agent: str = MAIN
    # The session that receives the posts; defaults to a session of the hook's own.
    session: str = ""
    # `json`: the body must be JSON, and is shown to the agent indented.
    format: Literal["text", "json"] = "text"
    # What the agent may do in response to a post. Defaults to `read` with a secret, `none` without.
    tools: Tools | None = None
    # Where the agent's answers go, such as `telegram:123`. By default they stay in the transcript.
    deliver: str = ""


class Unsigned(NotAllowed):
    """Report that a post lacks the signature its hook requires."""


# A channel's own handler: verifies a post by its service's rules and stores it. Raises Unsigned, InvalidArgs.
Receive = Callable[[Mapping[bytes, bytes], bytes], Awaitable[None]]


class PostHandler(msgspec.Struct, frozen=True):
    """Describe how a channel handles posts to `/hooks/{name}`."""

    receive: Receive
    # The response status that the service expects.
    status: int = 202
    # Answers the service's verification request for this address; returns None if verification fails.
    challenge: Callable[[Mapping[str, str]], str | None] | None = None


class Hooks:
    """Manage hooks and their posts. Call `start` after the sessions have started; the owner calls `close`."""

    def __init__(
        self,
        database: Store,
        sessions: Sessions,
        messages: Messages,
        inbound: InboundMessages,
        configured: Mapping[str, HookSettings],
        *,
        clock: Callable[[], int],
        learn: Callable[[str], None] = lambda _: None,
        invalid: Callable[[Iterable[str]], str | None] = lambda _: None,
        frozen: Callable[[], str | None] = lambda: None,
        removed: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Create the hooks.

        `learn` is called with the secret of each hook. `invalid` returns why one of the given credentials is not valid,
        `frozen` why nothing may start now. `removed` is called with the credential of each removed hook.
        """
        self._frozen = frozen
        self._removed = removed
        self._invalid = invalid
        self._learn = learn
        self._database = database
        self._sessions = sessions
        self._messages = messages
        self._inbound = inbound
        self._clock = clock
        self._configured = configured
        self._made: dict[str, HookSettings] = {}
        self._makers: dict[str, str] = {}
        self._load(database.query(hooks.all_hooks))
        self._post_handlers: dict[str, PostHandler] = {}
        self._waiting: dict[str, deque[HookPost]] = {}
        self._tasks = BackgroundTasks()

    def _load(self, stored: Mapping[str, tuple[bytes, str]]) -> None:
        self._made = {name: msgspec.json.decode(one, type=HookSettings) for name, (one, _) in stored.items()}
        self._makers = {name: made_by for name, (_, made_by) in stored.items()}
        for settings in self._made.values():
            self._learn(settings.secret)

    async def refresh(self) -> None:
        """Read the hooks again: another gateway of the fleet has made or removed one."""
        before = set(self._made)
        self._load(await self._database.read(hooks.all_hooks))
        for hook_id in before - self._made.keys():
            self._removed(f"hook:{hook_id}")

    # -- definitions ------------------------------------------------------------------------------------

    def add_post_handler(self, name: str, handler: PostHandler) -> None:
        """Register a channel that receives posts."""
        self._post_handlers[name] = handler

    def post_handler(self, hook_id: str) -> PostHandler | None:
        return self._post_handlers.get(hook_id)

    @property
    def known(self) -> dict[str, HookSettings]:
        return {**self._made, **self._configured}

    def find(self, hook_id: str) -> HookSettings:
        """Return a hook's settings. Raises NotFound."""
        found = self.known.get(hook_id)
        if found is None:
            raise NotFound(f"there is no hook {hook_id[:64]!r}")
        return found

    def credential_of(self, hook_id: str, settings: HookSettings) -> Credential:
        """Return the credential with which the agent handles a hook's posts.

        It expires with the token that made the hook.
        """
        tools: Tools = settings.tools or ("read" if settings.secret else "none")
        maker = self.maker(hook_id)
        return Credential(f"hook:{hook_id}", tool_scopes(tools), issuer="" if maker == OWNER.id else maker)

    def scopes_of(self, credential_id: str) -> frozenset[str] | None:
        """Return the current scopes of a hook's credential; None if the hook does not exist."""
        hook_id = credential_id.partition(":")[2]
        settings = self.known.get(hook_id)
        return None if settings is None else self.credential_of(hook_id, settings).scopes

    def maker(self, hook_id: str) -> str:
        """Return the credential that made a hook; hooks in the settings file belong to the owner."""
        return OWNER.id if hook_id in self._configured else self._makers.get(hook_id, OWNER.id)

    def ended(self, hook_id: str) -> str | None:
        """Return why a hook no longer accepts posts: the token that made it is not valid."""
        return self._invalid([self.maker(hook_id)])

    async def make(self, hook_id: str, settings: HookSettings, maker: str) -> None:
        """Make a hook on behalf of the credential `maker`.

        Raises InvalidArgs if the id is malformed, or used by the settings file or a channel.
        """
        if not _ID.fullmatch(hook_id):
            raise InvalidArgs(f"{hook_id[:80]!r} is not an id for a hook: use at most 64 letters, digits, _ and -")
        if hook_id in self._configured or hook_id in self._post_handlers:
            raise InvalidArgs(f"the hook {hook_id!r} is in farhand.toml; change it there")
        self.session_of(hook_id, settings)
        encoded, now = msgspec.json.encode(settings), self._clock()
        await self._database.write(lambda store: hooks.save_hook(store, hook_id, encoded, maker, now))
        self._made[hook_id] = settings
        self._makers[hook_id] = maker
        self._learn(settings.secret)

    async def remove(self, hook_id: str) -> None:
        """Remove a hook. Raises NotFound, or InvalidArgs for a hook in the settings file."""
        if hook_id in self._configured:
            raise InvalidArgs(f"the hook {hook_id!r} is in farhand.toml; remove it there")
        self.find(hook_id)
        now = self._clock()
        await self._database.write(lambda store: hooks.remove_hook(store, hook_id, now))
        self._made.pop(hook_id, None)
        self._makers.pop(hook_id, None)
        self._removed(f"hook:{hook_id}")

    def session_of(self, hook_id: str, settings: HookSettings) -> str:
        return self._sessions.canonical(
            settings.session or f"agent:{session_keys.agent_id(settings.agent)}:hook:{session_keys.token(hook_id)}"
        )

    # -- posts ------------------------------------------------------------------------------------------

    async def post(self, hook_id: str, headers: Mapping[bytes, bytes], body: bytes, delivery: str | None) -> None:
        """Accept a post; return once it is on disk.

        A post that arrives while the gateway is frozen is recorded as refused and is not processed after the thaw.
        Raises NotFound, Unsigned, InvalidArgs, OverBudget, or Failed if too many posts are waiting.
        """
        settings = self.find(hook_id)
        if settings.secret:
            check_signature(settings.secret, headers.get(SIGNATURE), body)
        if (reason := self.ended(hook_id)) is not None:
            raise NotAllowed(f"the hook {hook_id!r} is no longer valid: {reason}")
        if len(body) > MAX_POST_BYTES:
            raise InvalidArgs(f"a post has at most {MAX_POST_BYTES} bytes, this one has {len(body)}")
        if settings.format == "json":
            try:
                check_value_count(body)
                msgspec.json.decode(body)
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                raise InvalidArgs(f"the body is not JSON: {error}") from None
        waiting = self._waiting.get(hook_id, ())
        if len(waiting) >= MAX_WAITING or sum(len(one.body) for one in waiting) + len(body) > MAX_WAITING_BYTES:
            raise Failed(f"{len(waiting)} posts to the hook {hook_id!r} wait for its session; post again later")
        now = self._clock()
        self._sessions.budget.take_from(f"hook:{hook_id}", ROW_BYTES + len(body), now, who="this hook")
        post = HookPost(hook=hook_id, delivery=delivery, body=body, at=now)
        refusal = self._frozen()

        def keep(store: Tx) -> HookPost | None:
            kept = hooks.add_post(store, post)
            if kept is not None and refusal is not None:
                hooks.end_post(store, kept.seq, post.at, run_id=None, error=refusal)
            return kept

        kept = await self._database.write(keep)
        if kept is not None and refusal is None:
            self._enqueue(kept)

    async def start(self, own: Callable[[Tx], Collection[str]] | None = None) -> None:
        """Resume posts that have not reached their sessions yet.

        `own` returns those that belong to this gateway, where several share the store.
        """
        posts, wanted = await self._database.read(lambda tx: (hooks.open_posts(tx), None if own is None else own(tx)))
        busy = {post.seq for waiting in self._waiting.values() for post in waiting}
        for post in posts:
            if post.seq not in busy and (wanted is None or str(post.seq) in wanted):
                self._enqueue(post)

    async def close(self) -> None:
        await self._tasks.stop()

    def _enqueue(self, post: HookPost) -> None:
        waiting = self._waiting.get(post.hook)
        if waiting is not None:
            waiting.append(post)
            return
        self._waiting[post.hook] = deque([post])
        self._tasks.start(self._serve(post.hook))

    async def _serve(self, hook_id: str) -> None:
        waiting = self._waiting[hook_id]
        try:
            while waiting:
                await self._give(waiting[0])
                waiting.popleft()
        finally:
            del self._waiting[hook_id]

    async def _give(self, post: HookPost) -> None:
        """Pass a post to its session, waiting as long as necessary."""
        while True:
            try:
                settings = self.find(post.hook)
                run = await self._send(post, settings)
            except (NotFound, InvalidArgs) as error:  # the hook was removed, or the session rejects the text
                await self._end(post, None, error.message)
                return
            except ToolError as error:  # the session's queue is full
                if self._sessions.paused:
                    raise asyncio.CancelledError from None
                log.debug("hook %s is waiting: %s", post.hook, error.message)
                await asyncio.sleep(BUSY_SECONDS)
                continue
            await self._end(post, run.id, None)
            return

    async def _end(self, post: HookPost, run_id: str | None, error: str | None) -> None:
        now = self._clock()
        await self._database.write(lambda store: hooks.end_post(store, post.seq, now, run_id=run_id, error=error))

    async def _send(self, post: HookPost, settings: HookSettings) -> Run:
        text = post.body.decode("utf-8", "replace")
        if settings.format == "json":
            text = msgspec.json.format(post.body, indent=2).decode()
        run_id = f"hook-{post.hook}-{post.seq}"
        with contextlib.suppress(NotFound):
            return await self._sessions.run(run_id)  # passed on before the gateway stopped, but not recorded as such
        answer = None
        if settings.deliver:
            channel, _, peer = settings.deliver.partition(":")
            place = Place(*self._messages.resolve(channel), peer)
            answer = await self._inbound.promise(run_id, place, session_keys.agent_id(settings.agent))
        run = await self._sessions.send(
            self.session_of(post.hook, settings),
            f"[webhook:{post.hook}] {text}",
            origin=f"hook:{post.hook}",
            credential=self.credential_of(post.hook, settings),
            title=f"hook {post.hook}",
            run_id=run_id,
            commands_too=False,
            chosen=True,
        )
        if answer is not None:
            self._inbound.keep(run, answer)
        return run


def check_signature(secret: str, given: bytes | None, body: bytes) -> None:
    """Verify that the body was signed with the secret. Raises Unsigned."""
    if given is None:
        raise Unsigned("X-Webhook-Signature is missing")
    wanted = signature(secret, body).encode()
    if not hmac.compare_digest(given.strip().lower(), wanted):
        raise Unsigned("X-Webhook-Signature does not match the body")


def signature(secret: str, body: bytes) -> str:
    return "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
