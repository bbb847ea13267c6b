"""Handle messages received on channels: check the sender, choose the session, and deliver the answer.

Each message is accepted once, even if the service repeats it. A record of the awaited answer is on disk before the run
starts, so the answer reaches the outbox after any number of restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, Literal

import msgspec

from farhand.gateway.access.credentials import Credential, Scope
from farhand.gateway.access.daily_budget import OverBudget
from farhand.gateway.calls.gate import IdempotencyConflict
from farhand.gateway.calls.refusals import ROW_BYTES
from farhand.gateway.messaging.channel import (
    Attachment,
    Channel,
    ChannelSettings,
    Incoming,
    PostedChannel,
    Tools,
    Undeliverable,
)
from farhand.gateway.messaging.outbox import Messages
from farhand.gateway.repeating import BackgroundTasks
from farhand.gateway.sessions import commands
from farhand.gateway.sessions import keys as session_keys
from farhand.gateway.sessions.keys import MAIN, DmScope, PeerKind
from farhand.gateway.sessions.runs import Run, RunOptions
from farhand.gateway.sessions.sessions import QueueFull, Sessions
from farhand.gateway.workspace.workspace import Workspace
from farhand.protocol.errors import FarhandError, InvalidArgs, NotAllowed, NotFound, ToolError
from farhand.protocol.untrusted import one_line
from farhand.store.ports import Store, StoreError, Tx
from farhand.store.tables import outbox
from farhand.store.tables.access import pairings
from farhand.store.tables.access.pairings import Pairing, PairingState
from farhand.store.tables.outbox import AwaitedReply, Place
from farhand.store.tables.sessions import RunState

log = logging.getLogger(__name__)

# Limits pending pairing requests per account, so that strangers cannot fill the store.
MAX_PENDING: Final = 20
# Nor may they keep others from asking: a request that is older than this makes room for a new one.
STALE_MS: Final = 3600 * 1000
# Limits the names of people and groups, in characters.
LONGEST_NAME: Final = 80
# The part of the daily bytes of all guests of an account that one guest may use.
GUEST_SHARE: Final = 16
TYPING_SECONDS: Final = 4.0
RESTART_SECONDS: Final = 5.0
# How often a gateway of a fleet tries to become the one that listens on a channel.
LEASE_SECONDS: Final = 2.0
Standing = Literal["named", "guest"]
_UNSAFE: Final = re.compile(r"[^\w.+-]")
# What people say of their files becomes a header when the file is downloaded.
_CONTENT_TYPE: Final = re.compile(r"[a-z]+/[a-z0-9.+-]{1,100}", re.IGNORECASE | re.ASCII)
_SCOPES: Final[Mapping[Tools, frozenset[str]]] = {
    "none": frozenset(),
    "read": frozenset({Scope.TOOLS_READ.value}),
    "write": frozenset({Scope.TOOLS_WRITE.value}),
    "all": frozenset({Scope.TOOLS_EXEC.value}),
}
# `all` is what owners grant themselves on a channel: it includes other sessions and the agent's steering files.
_PEER_SCOPES: Final[Mapping[Tools, frozenset[str]]] = {
    **_SCOPES,
    "all": frozenset({Scope.TOOLS_EXEC.value, Scope.CHAT.value, Scope.READ.value}),
}


class Binding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Define a `[[bindings]]` table: which agent answers whom. Omitted keys match anything; the first match applies."""

    agent: str
    channel: str = ""
    account: str = ""
    peer_kind: PeerKind | None = None
    peer: str = ""

    def fits(self, place: Place) -> bool:
        return (
            self.channel in ("", place.channel)
            and self.account in ("", place.account)
            and self.peer_kind in (None, place.peer_kind)
            and (not self.peer or address(self.peer) == address(place.peer))
        )


class InboundMessages:
    """Receive messages and answer them. Call `start` after the sessions have started; the owner calls `close`."""

    def __init__(
        self,
        database: Store,
        messages: Messages,
        sessions: Sessions,
        workspace: Workspace,
        *,
        clock: Callable[[], int],
        bindings: Sequence[Binding] = (),
        dm_scope: DmScope = "main",
        identity_links: Mapping[str, Sequence[str]] | None = None,
        removed: Callable[[str], None] = lambda _: None,
        intercept: Callable[[Channel, Incoming, Place], Awaitable[bool]] | None = None,
        may_listen: Callable[[str], Awaitable[bool]] | None = None,
    ) -> None:
        """Create the handler.

        `removed` is called with the credential of a person whose pairing was removed. `intercept` receives each message
        first and returns True if it was for the gateway itself, not for the agent. `may_listen` returns whether this
        gateway is the one of its fleet that listens on a channel.
        """
        self._removed = removed
        self._may_listen = may_listen
        # The runs whose answers are being waited for.
        self._answering: set[str] = set()
        known = database.query(pairings.list_pairings)
        # Approved senders: channel, account, sender.
        self._approved = {_identity(one) for one in known if one.state is PairingState.APPROVED}
        self._database = database
        self._messages = messages
        self._sessions = sessions
        self._workspace = workspace
        self._clock = clock
        self._bindings = bindings
        self._dm_scope = dm_scope
        self._links = identity_links or {}
        self._tasks = BackgroundTasks()
        self._intercept = intercept
        # Why a channel is not receiving, by table name.
        self.troubles: dict[str, str] = {}

    # -- lifecycle --------------------------------------------------------------------------------------

    async def start(self, own: Callable[[Tx], Collection[str]] | None = None) -> None:
        """Listen on all channels, and resume the answers that were outstanding when the gateway stopped."""
        await self.resume(own)
        for name, channel in self._messages.channels.items():
            self._tasks.start(self._listen(name, channel))

    async def resume(self, own: Callable[[Tx], Collection[str]] | None = None) -> None:
        """Wait for the answers that are outstanding; `own` returns those of this gateway, where several share the
        store.
        """
        found, wanted = await self._database.read(
            lambda tx: (outbox.open_awaited(tx), None if own is None else own(tx))
        )
        for awaited in found:
            if awaited.run_id in self._answering or (wanted is not None and awaited.run_id not in wanted):
                continue
            try:
                run = await self._sessions.run(awaited.run_id)
            except NotFound:  # the message was never accepted: the sender gets no answer, and the service repeats it
                await self._forget_awaited(awaited.run_id)
                continue
            self.keep(run, awaited)

    async def refresh(self) -> None:
        """Read again who may talk here: another gateway of the fleet has stored a decision."""
        known = await self._database.read(pairings.list_pairings)
        approved = {_identity(one) for one in known if one.state is PairingState.APPROVED}
        removed, self._approved = self._approved - approved, approved
        for identity in removed:
            self._removed(peer_id(*identity))

    async def close(self) -> None:
        await self._tasks.stop()
        for channel in self._messages.channels.values():
            with contextlib.suppress(Exception):
                await channel.close()

    async def _listen(self, name: str, channel: Channel) -> None:
        async def take(incoming: Incoming) -> None:
            self.troubles.pop(name, None)
            try:
                await self.take(channel, incoming)
            except (InvalidArgs, NotAllowed, OverBudget, QueueFull) as error:
                if isinstance(channel, PostedChannel):
                    raise  # the service is told, and repeats this message alone
                # Fetching it again would hold up the messages of everyone else.
                log.warning("dropped a message on %s from %r: %s", name, incoming.sender[:LONGEST_NAME], error.message)
            except FarhandError:
                raise
            except Exception:
                if isinstance(channel, PostedChannel):
                    raise
                log.exception("dropped a message on %s from %r", name, incoming.sender[:LONGEST_NAME])

        while True:
            try:
                # A service that is polled gives each message once, so one gateway of a fleet listens.
                while self._may_listen is not None and not await self._may_listen(f"channel {name}"):  # noqa: ASYNC110
                    await asyncio.sleep(LEASE_SECONDS)
                await channel.run(take)
                return
            except StoreError as error:
                self.troubles[name] = str(error)
                await asyncio.sleep(LEASE_SECONDS)
            except Exception as error:
                self.troubles[name] = f"{type(error).__name__}: {error}"
                log.exception("channel %s stopped listening; restarting in %g s", name, RESTART_SECONDS)
                await asyncio.sleep(RESTART_SECONDS)

    # -- receiving --------------------------------------------------------------------------------------

    async def take(self, channel: Channel, incoming: Incoming) -> Run | None:
        """Pass a message to its session; return None if the sender may not talk here or the message is ignored.

        Raises ToolError if the message cannot be stored now: the service has to repeat it.
        """
        settings = channel.settings
        incoming = _storable(incoming)
        place = Place(settings.kind, settings.account, incoming.peer, incoming.peer_kind)
        if _is_blank(incoming) and incoming.fetch is None:
            return None
        if self._intercept is not None and await self._intercept(channel, incoming, place):
            return None
        if incoming.peer_kind != "dm" and (
            settings.groups == "off" or (settings.groups == "mention" and not incoming.mentioned)
        ):
            return None
        standing = await self._standing(channel, incoming, place)
        if standing is None:
            return None
        if incoming.fetch is not None:
            text, files = incoming.text, tuple[Attachment, ...]()
            try:
                files = tuple(await incoming.fetch())
            except Undeliverable as error:
                text = f"{text}\n[a file could not be fetched: {error}]".strip()
            incoming = _storable(msgspec.structs.replace(incoming, text=text, attachments=files, fetch=None))
            if _is_blank(incoming):
                return None
        guest = standing == "guest"
        self._count(channel, incoming, guest=guest)
        agent = self.agent_of(place)
        if guest:
            key = session_keys.guest_key(agent, place.channel, place.account, place.peer, place.peer_kind)
        else:
            key = session_keys.peer_key(
                agent,
                place.channel,
                place.peer_kind,
                place.peer,
                account=place.account,
                scope=self._dm_scope,
                links=self._links,
            )
        text = incoming.text
        if commands.read(text) is None:
            text = await self._envelope(agent, channel, incoming)
        return await self._send(channel, incoming, place, agent, key, text, guest=guest)

    def _count(self, channel: Channel, incoming: Incoming, *, guest: bool) -> None:
        """Count what a person stores in a day, and all guests of the account together. Raises OverBudget."""
        size = ROW_BYTES + len(incoming.text) + sum(ROW_BYTES + len(file.data) for file in incoming.attachments)
        budget, now, settings = self._sessions.budget, self._clock(), channel.settings
        person = peer_id(settings.kind, settings.account, address(incoming.sender))
        budget.take_from(person, size, now, who="this person", share=GUEST_SHARE if guest else 1)
        if guest:
            budget.take_from(f"guests:{settings.kind}:{settings.account}", size, now, who="all guests")

    async def _send(
        self, channel: Channel, incoming: Incoming, place: Place, agent: str, key: str, text: str, *, guest: bool
    ) -> Run | None:
        now = self._clock()
        run_id = self._sessions.new_id()
        reply_to = incoming.answers or (incoming.id if incoming.peer_kind != "dm" else None)
        awaited = await self.promise(run_id, place, agent, reply_to)
        sent = False
        try:
            run = await self._sessions.send(
                key,
                text,
                origin=place.channel,
                credential=credential_of(channel, incoming),
                options=RunOptions(guest=guest),
                channel=msgspec.to_builtins(place),
                title=one_line(incoming.sender_name or incoming.sender, LONGEST_NAME),
                run_id=run_id,
                idempotency_key=_message_key(place, incoming),
                chosen=True,
            )
            sent = run.id == run_id
        except IdempotencyConflict:  # the service repeated it with different text
            return None
        finally:
            if not sent:
                await self._forget_awaited(run_id)
        if not sent:
            return run  # the service repeated it
        if not guest:  # the last active place is only for senders the owner named
            await self._database.write(lambda store: outbox.note_active(store, agent, place, now))
        self.keep(run, awaited)
        return run

    async def promise(self, run_id: str, place: Place, agent: str, reply_to: str | None = None) -> AwaitedReply:
        """Record where to send the result of a run that is about to start; call `keep` next."""
        awaited = AwaitedReply(
            run_id=run_id,
            channel=place.channel,
            account=place.account,
            peer=place.peer,
            peer_kind=place.peer_kind,
            reply_to=reply_to,
            agent_id=agent,
            created_at=self._clock(),
        )
        await self._database.write(lambda store: outbox.await_reply(store, awaited))
        return awaited

    async def _forget_awaited(self, run_id: str) -> None:
        await self._database.write(lambda store: outbox.forget_awaited(store, run_id))

    def keep(self, run: Run, awaited: AwaitedReply) -> None:
        """Send the answer when the run ends, even after a restart."""
        self._answering.add(run.id)
        self._tasks.start(self._answer(run, awaited))

    def agent_of(self, place: Place) -> str:
        return next((binding.agent for binding in self._bindings if binding.fits(place)), MAIN)

    async def _envelope(self, agent: str, channel: Channel, incoming: Incoming) -> str:
        """Return the text for the model: origin, sender, message, and the paths of the files."""
        who = one_line(re.sub(r"[\[\]·]", " ", incoming.sender_name or incoming.sender), LONGEST_NAME)
        lines = [f"[{channel.settings.kind} · {who}] {incoming.text}".rstrip()]
        for attachment in incoming.attachments:
            path = await self._keep(agent, incoming, attachment)
            kind = one_line(attachment.content_type, LONGEST_NAME)
            lines.append(f"[attached: {path} ({kind}, {len(attachment.data)} bytes)]")
        return "\n".join(lines)

    async def _keep(self, agent: str, incoming: Incoming, attachment: Attachment) -> str:
        """Store a file in the agent's workspace and return its path. The same message always yields the same paths."""
        day = datetime.fromtimestamp(self._clock() / 1000, UTC).strftime("%Y-%m-%d")
        name = _UNSAFE.sub("_", attachment.name.rpartition("/")[2]).lstrip(".")[-80:] or "file"
        mark = hashlib.sha256(f"{incoming.peer}\0{incoming.id}\0{attachment.name}".encode()).hexdigest()[:10]
        path = f"media/{day}/{mark}-{name}"
        kind = attachment.content_type if _CONTENT_TYPE.fullmatch(attachment.content_type) else None
        await self._workspace.objects.put(self._workspace.key(agent, path), attachment.data, content_type=kind)
        return path

    # -- answering --------------------------------------------------------------------------------------

    async def _answer(self, run: Run, awaited: AwaitedReply) -> None:
        typing = asyncio.get_running_loop().create_task(self._type(awaited.place))
        try:
            outcome = await run.reply()
        except ToolError:
            return  # the gateway is stopping; the record stays
        finally:
            typing.cancel()
            self._answering.discard(run.id)
        joined = run.joined.id if run.joined is not None else run.record.joined_to
        reply = outcome.text.strip()
        if reply and outcome.state is not RunState.STOPPED and not await self._already_sent(awaited, joined):
            try:
                await self._messages.accept(
                    awaited.place,
                    reply,
                    message_id=f"reply:{run.id}",
                    origin=f"run:{run.id}",
                    agent_id=awaited.agent_id,
                    reply_to=awaited.reply_to,
                )
            except ToolError as error:
                log.error("failed to send the reply of run %s to %s: %s", run.id, awaited.place, error.message)
        run_id, now = run.id, self._clock()
        await self._database.write(lambda store: outbox.end_awaited(store, run_id, now))

    async def _already_sent(self, awaited: AwaitedReply, joined: str | None) -> bool:
        """Return whether this person already gets the answer, because the message joined another run of theirs."""
        if joined is None:
            return False
        other = await self._database.read(lambda store: outbox.find_awaited(store, joined))
        return other is not None and other.place == awaited.place

    async def _type(self, place: Place) -> None:
        channel = self._messages.channel_of(place)
        while channel is not None:
            try:
                await channel.typing(place)
            except Exception as error:
                log.debug("typing indicator on %s failed: %s", place, error)
                return
            await asyncio.sleep(TYPING_SECONDS)

    # -- access -----------------------------------------------------------------------------------------

    async def _standing(self, channel: Channel, incoming: Incoming, place: Place) -> Standing | None:
        """Return whether a sender is named by the owner or a guest; None if they may not talk here.

        A sender whom the service does not authenticate is never treated as named.
        """
        settings = channel.settings
        sender = address(incoming.sender)
        known = await self._database.read(
            lambda store: pairings.find_pairing(store, place.channel, place.account, sender)
        )
        approved = known is not None and known.state is PairingState.APPROVED
        if settings.policy != "open" and not approved and not allowed(settings.allow, incoming):
            if settings.policy == "allowlist":
                log.info("rejected a message on %s from %s: not in the allow list", place.channel, incoming.sender)
            elif known is None and incoming.peer_kind == "dm":
                await self._ask(incoming, place, sender)
            return None
        if settings.policy == "allowlist" and not allowed(settings.allow, incoming):
            return None  # approved under earlier settings
        listed = [one for one in settings.allow if one.strip() != "*"]
        linked = session_keys.is_linked(place.channel, incoming.sender, self._links)
        if incoming.peer_kind != "dm" and settings.policy == "open":
            named = address(incoming.peer) in {address(one) for one in listed}  # everyone in the group sees the answers
        else:
            named = allowed(listed, incoming) or linked or (approved and settings.policy != "allowlist")
        return "named" if named and incoming.trusted else "guest"

    async def _ask(self, incoming: Incoming, place: Place, sender: str) -> None:
        """Send a stranger, once, the instructions for pairing."""
        known = await self._database.read(pairings.list_pairings)
        pending = [
            one
            for one in known
            if one.state is PairingState.PENDING and (one.channel, one.account) == (place.channel, place.account)
        ]
        stale = [one for one in pending if one.requested_at < self._clock() - STALE_MS]
        if len(pending) - len(stale) >= MAX_PENDING:
            log.warning(
                "%d pairing requests are pending on %s; ignored the request of %s", len(pending), place.channel, sender
            )
            return
        excess = len(pending) + 1 - MAX_PENDING
        pairing = Pairing(
            channel=place.channel,
            account=place.account,
            sender=sender,
            name=one_line(incoming.sender_name, LONGEST_NAME),
            code="".join(secrets.choice("ABCDEFGHJKLMNPQRSTUVWXYZ23456789") for _ in range(8)),
            peer=place.peer,
            first_text=one_line(incoming.text, 200),
            requested_at=self._clock(),
        )

        def save(store: Tx) -> None:
            for one in stale[-excess:] if excess > 0 else ():  # the oldest ones
                pairings.forget_pairing(store, one)
            pairings.save_pairing(store, pairing)

        await self._database.write(save)
        text = (
            "I do not know you yet. Ask my owner to let you in:\n"
            f"farhand channels pair approve {pairing.code}\nThen write again."
        )
        await self._messages.accept(place, text, message_id=f"pairing:{pairing.code}", origin="pairing")

    async def pairings(self) -> list[Pairing]:
        return await self._database.read(pairings.list_pairings)

    async def decide(self, code_or_sender: str, approve: bool, channel: str | None = None) -> Pairing:
        """Approve or deny a pairing request. Raises NotFound, or InvalidArgs if several senders have that address."""
        wanted = code_or_sender.strip()
        found = [
            one
            for one in await self.pairings()
            if (one.code == wanted.upper() or one.sender == address(wanted)) and channel in (None, one.channel)
        ]
        if not found:
            raise NotFound(
                f"there is no pairing request with the code or address {wanted!r}; "
                "`farhand channels pair` lists the requests"
            )
        if len(found) > 1:
            raise InvalidArgs(f"{wanted!r} wrote on {', '.join(one.channel for one in found)}; name the channel")
        state = PairingState.APPROVED if approve else PairingState.REJECTED
        decided = msgspec.structs.replace(found[0], state=state, decided_at=self._clock())
        await self._database.write(lambda store: pairings.save_pairing(store, decided))
        if approve:
            self._approved.add(_identity(decided))
        elif _identity(decided) in self._approved:
            self._approved.discard(_identity(decided))
            self._removed(peer_id(*_identity(decided)))
        if approve and found[0].state is not PairingState.APPROVED:
            with contextlib.suppress(ToolError):
                await self._messages.accept(
                    Place(decided.channel, decided.account, decided.peer),
                    "You can talk to me now.",
                    message_id=f"paired:{decided.code}",
                    origin="pairing",
                )
        return decided

    def scopes_of_channel(self, credential_id: str) -> frozenset[str] | None:
        """Return the current scopes of people on the accounts of a channel; None if it has no account."""
        kind = credential_id.partition(":")[2]
        found = [one.settings for one in self._messages.channels.values() if one.settings.kind == kind]
        return frozenset[str]().union(*map(_channel_scopes, found)) if found else None

    def scopes_of_peer(self, credential_id: str) -> frozenset[str] | None:
        """Return the current scopes of a person on a channel; None if they may not talk there."""
        _, kind, account, sender = credential_id.split(":", 3)
        for channel in self._messages.channels.values():
            settings = channel.settings
            if (settings.kind, settings.account) != (kind, account):
                continue
            listed = {address(one) for one in settings.allow}
            paired = settings.policy == "pairing" and (kind, account, sender) in self._approved
            if settings.policy == "open" or paired or sender in listed or "*" in listed:
                return _channel_scopes(settings)
        return None

    async def forget(self, code_or_sender: str, channel: str | None = None) -> Pairing:
        """Delete a pairing decision, so that the person has to ask again. Raises NotFound, InvalidArgs."""
        decided = await self.decide(code_or_sender, False, channel)
        await self._database.write(lambda store: pairings.forget_pairing(store, decided))
        return decided


def _is_blank(incoming: Incoming) -> bool:
    return not incoming.text.strip() and not incoming.attachments


def _storable(incoming: Incoming) -> Incoming:
    """Return a message without characters that cannot be encoded: services pass on bytes that are no text."""
    fields = ("id", "peer", "sender", "sender_name", "text")
    changed = {name: _encodable(getattr(incoming, name)) for name in fields}
    answers = None if incoming.answers is None else _encodable(incoming.answers)
    files = tuple(msgspec.structs.replace(one, name=_encodable(one.name)) for one in incoming.attachments)
    return msgspec.structs.replace(incoming, **changed, answers=answers, attachments=files)


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()


def credential_of(channel: Channel, incoming: Incoming) -> Credential:
    """Return the credential with which the agent handles a message: the rights in the channel's settings.

    In a direct conversation it names the person too, so that it ends when the owner removes their pairing.
    """
    settings = channel.settings
    scopes = _channel_scopes(settings) if incoming.trusted else frozenset()
    person = peer_id(settings.kind, settings.account, address(incoming.sender)) if incoming.peer_kind == "dm" else ""
    return Credential(f"channel:{settings.kind}", scopes, issuer=person)


def _channel_scopes(settings: ChannelSettings) -> frozenset[str]:
    tools: Tools = settings.tools or ("none" if settings.policy == "open" else "all")
    return _PEER_SCOPES[tools]


def peer_id(channel: str, account: str, sender: str) -> str:
    return f"peer:{channel}:{account}:{sender}"


def _identity(pairing: Pairing) -> tuple[str, str, str]:
    return pairing.channel, pairing.account, pairing.sender


def tool_scopes(tools: Tools) -> frozenset[str]:
    return _SCOPES[tools]


def allowed(allow: Sequence[str], incoming: Incoming) -> bool:
    """Return whether the sender's or the group's address is in the list."""
    known = {address(one) for one in allow}
    return (
        "*" in known
        or address(incoming.sender) in known
        or (incoming.peer_kind != "dm" and address(incoming.peer) in known)
    )


def address(text: str) -> str:
    """Normalize an address: `+49 170 …` and `0049…` are equal, and case is ignored."""
    plain = text.strip().lower()
    if re.fullmatch(r"\+?[\d\s()./-]{10,}", plain) and not plain.startswith("-"):
        digits = re.sub(r"\D", "", plain)
        return "+" + (digits.removeprefix("00") if plain.startswith("00") else digits)
    return plain


def _message_key(place: Place, incoming: Incoming) -> str:
    """Return a key for a service's message that fits the limits of idempotency keys."""
    whole = "\0".join((place.channel, place.account, place.peer, incoming.id))
    return f"in:{hashlib.sha256(whole.encode()).hexdigest()}"
