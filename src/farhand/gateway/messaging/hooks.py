"""Hooks: addresses other programs post to. A post is on disk before its 202; posts reach the hook's session in order.

Which session that is stands in the hook's settings and nowhere else: a payload can never choose it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, Literal

import msgspec

from farhand.gateway.access.credentials import OWNER, Credential
from farhand.gateway.messaging.channel import Tools
from farhand.gateway.messaging.inbound import Reception, tool_scopes
from farhand.gateway.messaging.outbox import Messages
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
# Posts of one hook that wait for its session: anybody may post to a hook without a secret.
MAX_WAITING: Final = 1000
MAX_WAITING_BYTES: Final = 32 * 1024 * 1024
BUSY_SECONDS: Final = 0.5
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class HookSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table `[hooks.ID]`, or what `farhand channels hook add` made."""

    # Posts must be signed with it: `X-Webhook-Signature: sha256=<hex>` of the body.
    secret: str = ""
    agent: str = MAIN
    # The session its posts go to; by default one of its own.
    session: str = ""
    # `json`: the body must be JSON, and is shown to the agent indented.
    format: Literal["text", "json"] = "text"
    # What the agent may do because of a post. By default `read` with a secret, `none` without.
    tools: Tools | None = None
    # Where the agent's answers go: `telegram:123`. By default nowhere but into the transcript.
    deliver: str = ""


class Unsigned(NotAllowed):
    """A post that is not signed as its hook demands."""


# A channel's own door: it checks the post by its service's rules, and keeps it. Raises Unsigned, InvalidArgs.
Receive = Callable[[Mapping[bytes, bytes], bytes], Awaitable[None]]


class Door(msgspec.Struct, frozen=True):
    """A channel that is posted to at `/hooks/{name}`."""

    receive: Receive
    # What the service wants to be answered.
    status: int = 202
    # Answers the service's question whether this address is the right one; None when it is not.
    challenge: Callable[[Mapping[str, str]], str | None] | None = None


class Hooks:
    """`start` after the sessions have started; whoever made it calls `close`."""

    def __init__(
        self,
        database: Store,
        sessions: Sessions,
        messages: Messages,
        reception: Reception,
        configured: Mapping[str, HookSettings],
        *,
        clock: Callable[[], int],
        learn: Callable[[str], None] = lambda _: None,
        invalid: Callable[[Iterable[str]], str | None] = lambda _: None,
        frozen: Callable[[], str | None] = lambda: None,
        removed: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`learn` is called with the secret of each hook. `invalid` returns why one of some credentials is not valid,
        `frozen` why nothing may start now. `removed` is called with the credential of each hook that is removed.
        """
        self._frozen = frozen
        self._removed = removed
        self._invalid = invalid
        self._learn = learn
        self._database = database
        self._sessions = sessions
        self._messages = messages
        self._reception = reception
        self._clock = clock
        self._configured = configured
        stored = database.query(hooks.all_hooks)
        self._made = {name: msgspec.json.decode(one, type=HookSettings) for name, (one, _) in stored.items()}
        self._makers = {name: made_by for name, (_, made_by) in stored.items()}
        for settings in self._made.values():
            learn(settings.secret)
        self._doors: dict[str, Door] = {}
        self._waiting: dict[str, deque[HookPost]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # -- which there are --------------------------------------------------------------------------------

    def open_door(self, name: str, door: Door) -> None:
        """Let a channel be posted to."""
        self._doors[name] = door

    def door(self, hook_id: str) -> Door | None:
        return self._doors.get(hook_id)

    @property
    def known(self) -> dict[str, HookSettings]:
        return {**self._made, **self._configured}

    def find(self, hook_id: str) -> HookSettings:
        """Raises NotFound."""
        found = self.known.get(hook_id)
        if found is None:
            raise NotFound(f"there is no hook {hook_id[:64]!r}")
        return found

    def credential_of(self, hook_id: str, settings: HookSettings) -> Credential:
        """The credential on whose behalf the agent works on a hook's posts. It ends with the token that made it."""
        tools: Tools = settings.tools or ("read" if settings.secret else "none")
        maker = self.maker(hook_id)
        return Credential(f"hook:{hook_id}", tool_scopes(tools), issuer="" if maker == OWNER.id else maker)

    def scopes_of(self, credential_id: str) -> frozenset[str] | None:
        """Return the scopes that a hook's credential has now; None where there is no such hook."""
        hook_id = credential_id.partition(":")[2]
        settings = self.known.get(hook_id)
        return None if settings is None else self.credential_of(hook_id, settings).scopes

    def maker(self, hook_id: str) -> str:
        """The credential that made a hook; those of the settings file are the owner's."""
        return OWNER.id if hook_id in self._configured else self._makers.get(hook_id, OWNER.id)

    def ended(self, hook_id: str) -> str | None:
        """Why a hook accepts nothing any more: the token that made it is not valid."""
        return self._invalid([self.maker(hook_id)])

    async def make(self, hook_id: str, settings: HookSettings, maker: str) -> None:
        """Make a hook on behalf of the credential `maker`.

        Raises InvalidArgs for an id that is none, or that the settings file or a channel has."""
        if not _ID.fullmatch(hook_id):
            raise InvalidArgs(f"{hook_id[:80]!r} is no id for a hook: letters, digits, _ and -, at most 64")
        if hook_id in self._configured or hook_id in self._doors:
            raise InvalidArgs(f"the hook {hook_id!r} is in farhand.toml; change it there")
        self.session_of(hook_id, settings)
        encoded, now = msgspec.json.encode(settings), self._clock()
        await self._database.write(lambda store: hooks.save_hook(store, hook_id, encoded, maker, now))
        self._made[hook_id] = settings
        self._makers[hook_id] = maker
        self._learn(settings.secret)

    async def remove(self, hook_id: str) -> None:
        """Raises NotFound, InvalidArgs for one of the settings file."""
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
        """Accept a post; returns once it is on disk. Raises NotFound, Unsigned, InvalidArgs, Failed when too many wait.

        A post that arrives while the gateway is frozen is recorded as refused, and is not worked on after the thaw.
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
        post = HookPost(hook=hook_id, delivery=delivery, body=body, at=self._clock())
        refusal = self._frozen()

        def keep(store: Tx) -> HookPost | None:
            kept = hooks.add_post(store, post)
            if kept is not None and refusal is not None:
                hooks.end_post(store, kept.seq, post.at, run_id=None, error=refusal)
            return kept

        kept = await self._database.write(keep)
        if kept is not None and refusal is None:
            self._enqueue(kept)

    async def start(self) -> None:
        """Go on with the posts that were not given to their sessions yet."""
        for post in await self._database.read(hooks.open_posts):
            self._enqueue(post)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _enqueue(self, post: HookPost) -> None:
        waiting = self._waiting.get(post.hook)
        if waiting is not None:
            waiting.append(post)
            return
        self._waiting[post.hook] = deque([post])
        task = asyncio.get_running_loop().create_task(self._serve(post.hook))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, hook_id: str) -> None:
        waiting = self._waiting[hook_id]
        try:
            while waiting:
                await self._give(waiting[0])
                waiting.popleft()
        finally:
            del self._waiting[hook_id]

    async def _give(self, post: HookPost) -> None:
        """Give a post to its session, however long that has to be waited for."""
        while True:
            try:
                settings = self.find(post.hook)
                run = await self._send(post, settings)
            except (NotFound, InvalidArgs) as error:  # the hook is gone, or the session takes no such text
                await self._end(post, None, error.message)
                return
            except ToolError as error:  # too many wait in the session
                if self._sessions.paused:
                    raise asyncio.CancelledError from None
                log.debug("hook %s waits: %s", post.hook, error.message)
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
            return await self._sessions.run(run_id)  # given before the gateway stopped, and not noted any more
        answer = None
        if settings.deliver:
            channel, _, peer = settings.deliver.partition(":")
            place = Place(*self._messages.resolve(channel), peer)
            answer = await self._reception.promise(run_id, place, session_keys.agent_id(settings.agent))
        run = await self._sessions.send(
            self.session_of(post.hook, settings),
            f"[webhook:{post.hook}] {text}",
            origin=f"hook:{post.hook}",
            credential=self.credential_of(post.hook, settings),
            title=f"hook {post.hook}",
            run_id=run_id,
            commands_too=False,
        )
        if answer is not None:
            self._reception.keep(run, answer)
        return run


def check_signature(secret: str, given: bytes | None, body: bytes) -> None:
    """Raises Unsigned unless the body was signed by somebody who knows the secret."""
    if given is None:
        raise Unsigned("X-Webhook-Signature is missing")
    wanted = signature(secret, body).encode()
    if not hmac.compare_digest(given.strip().lower(), wanted):
        raise Unsigned("X-Webhook-Signature does not fit the body")


def signature(secret: str, body: bytes) -> str:
    return "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
