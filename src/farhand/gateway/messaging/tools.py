"""Implement `gsv__Message` and `message`, two interfaces to the outbox.

Both default to the place from which the session was last addressed.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, get_args

import msgspec
from msgspec import Meta

from farhand.gateway.access.principal import principal_of
from farhand.gateway.messaging.outbox import Messages, sent
from farhand.gateway.sessions import keys as session_keys
from farhand.gateway.sessions.keys import MAIN, PeerKind
from farhand.gateway.sessions.sessions import Sessions
from farhand.protocol.errors import InvalidArgs, NotAllowed, NotFound
from farhand.store.tables.outbox import OutboxRecord, Place
from farhand.tools.preview import Preview
from farhand.tools.tool import CallContext, Tool, tool

# How long a caller waits for the outcome; delivery continues after that.
WAIT_SECONDS: Final = 5.0
KINDS: Final[tuple[str, ...]] = get_args(PeerKind)


def _sends(place: Place) -> str:
    return f"sends a message to {place.peer} ({place.peer_kind}) on {place.channel}, account {place.account}:"


class MessageTools:
    def __init__(self, messages: Messages, sessions: Sessions) -> None:
        self._messages = messages
        self._sessions = sessions

    def tools(self) -> list[Tool]:
        return [
            tool(
                self.send,
                name="gsv__Message",
                unlisted=("media",),
                continues=True,
                preview=self.preview_send,
                files=("media",),
                takes_handles=True,
            ),
            tool(
                self.message,
                aliases={"target": "to", "text": "content"},
                continues=True,
                preview=self.preview_message,
                takes_handles=True,
            ),
        ]

    async def send(
        self,
        context: CallContext,
        text: Annotated[str, Meta(description="Message text to send.")],
        channel: Annotated[
            str | None,
            Meta(description='Channel to send to (e.g. "whatsapp", "discord"). Default: the user\'s current channel.'),
        ] = None,
        to: Annotated[
            str | None,
            Meta(description="Peer ID: phone number, user ID, channel ID. Default: the user's current peer."),
        ] = None,
        peerKind: Annotated[  # noqa: N803
            str | None,
            Meta(
                description='Type of conversation. Default: the current peer\'s, or "dm".',
                extra_json_schema={"enum": ["dm", "group", "channel", "thread"]},
            ),
        ] = None,
        accountId: Annotated[  # noqa: N803
            str | None, Meta(description="Account of a channel that has several. Default: the current one.")
        ] = None,
        replyToId: Annotated[str | None, Meta(description="Message ID to reply to.")] = None,  # noqa: N803
        media: list[str] | None = None,
    ) -> dict[str, Any]:
        """Send a message to a channel or user. Workspace files go along as media: ["path", …]."""
        place = await self._chosen(context, text, media, channel=channel, to=to, peer_kind=peerKind, account=accountId)
        return sent(await self._accept(context, place, text, replyToId, media or []))

    async def message(
        self,
        context: CallContext,
        to: Annotated[str, Meta(description='Target, e.g. "signal:+15551234567" or "telegram:group:-100123".')],
        content: Annotated[str, Meta(description="Message text.")],
    ) -> str:
        """Send a message to a person on an external channel."""
        place = await self._meant(context, to, content)
        sending = sent(await self._accept(context, place, content, None, []))
        return f"message sent to {to}" if sending["sent"] else f"message to {to} {sending['note']}"

    # previews: the same arguments, parsed by the same code

    async def preview_send(
        self,
        context: CallContext,
        text: str,
        channel: str | None,
        to: str | None,
        peerKind: str | None,  # noqa: N803
        accountId: str | None,  # noqa: N803
        replyToId: str | None,  # noqa: N803
        media: list[str] | None,
    ) -> Preview:
        place = await self._chosen(context, text, media, channel=channel, to=to, peer_kind=peerKind, account=accountId)
        reply = f"\nin reply to {replyToId}" if replyToId else ""
        files = "".join(f"\nwith the file {path}" for path in media or ())
        return Preview(summary=f"{_sends(place)}{reply}{files}\n{text}")

    async def preview_message(self, context: CallContext, to: str, content: str) -> Preview:
        return Preview(summary=f"{_sends(await self._meant(context, to, content))}\n{content}")

    async def _chosen(self, context: CallContext, text: str, media: list[str] | None, **where: str | None) -> Place:
        place = await self.place(context.session_key, context.agent_id, **where)
        if not text.strip() and not media:
            raise InvalidArgs("text is required")
        return place

    async def _meant(self, context: CallContext, to: str, content: str) -> Place:
        if not to.strip():
            raise InvalidArgs("message parameter to is required")
        if not content.strip():
            raise InvalidArgs("message parameter content is required")
        return await self.target(context.session_key, context.agent_id, to)

    async def _accept(
        self, context: CallContext, place: Place, text: str, reply_to: str | None, media: list[str]
    ) -> OutboxRecord:
        await self._check_guest(context, place)
        record = await self._messages.accept(
            place,
            text,
            message_id=context.call_id,
            origin=f"session:{session_keys.short(context.session_key)}" if context.session_key else context.credential,
            agent_id=self._agent(context.session_key, context.agent_id),
            reply_to=reply_to or None,
            media=media,
        )
        return await self._messages.outcome(record, WAIT_SECONDS)

    async def _check_guest(self, context: CallContext, place: Place) -> None:
        """Raise NotAllowed if a guest's request would make the agent write to someone else."""
        run = self._sessions.current(self._sessions.canonical(context.session_key)) if context.session_key else None
        if run is None or not run.options.guest or principal_of(context).on_behalf_of is None:
            return
        if place != await self.current(context.session_key, context.agent_id):
            raise NotAllowed(
                f"a message to {place.peer!r} on {place.channel} is not for people whom the owner has not named; "
                "the agent may answer them where they wrote"
            )

    # -- destinations -----------------------------------------------------------------------------------

    async def place(
        self,
        session_key: str | None,
        agent_id: str | None,
        *,
        channel: str | None = None,
        to: str | None = None,
        peer_kind: str | None = None,
        account: str | None = None,
    ) -> Place:
        """Return the destination of a message; missing parts come from the current conversation. Raises ToolError."""
        if peer_kind and peer_kind not in KINDS:
            raise InvalidArgs(f"Invalid peerKind: {peer_kind}. Must be dm, group, channel, or thread.")
        current = await self.current(session_key, agent_id)
        if channel and channel.strip():
            kind, chosen = self._messages.resolve(channel, account or None)
            if (
                current is not None
                and current.channel == kind
                and not account
                and "default" != chosen != current.account
            ):
                current = None
            elif current is not None and current.channel == kind and not account:
                chosen = current.account
        elif current is None:
            raise InvalidArgs("channel is required (no current channel context available)")
        else:
            kind, chosen = self._messages.resolve(current.channel, account or current.account)
        same = current if current is not None and (current.channel, current.account) == (kind, chosen) else None
        if not (to and to.strip()) and same is None:
            raise InvalidArgs("to (peer ID) is required (no current peer context available)")
        peer = to.strip() if to and to.strip() else same.peer if same else ""
        return Place(kind, chosen, peer, peer_kind or (same.peer_kind if same else "dm"))

    async def target(self, session_key: str | None, agent_id: str | None, to: str) -> Place:
        """Parse `channel:peer`, `channel:kind:peer`, or a bare peer of the current channel."""
        head, colon, rest = to.strip().partition(":")
        if not colon:
            if await self.current(session_key, agent_id) is None:
                raise InvalidArgs("target must include channel and address, e.g. signal:+15551234567")
            return await self.place(session_key, agent_id, to=to)
        kind, second, peer = rest.partition(":")
        if second and kind in KINDS:
            return await self.place(session_key, agent_id, channel=head, to=peer, peer_kind=kind)
        current = await self.current(session_key, agent_id)
        known = current is not None and current.peer == rest
        return await self.place(session_key, agent_id, channel=head, to=rest, peer_kind=None if known else "dm")

    async def current(self, session_key: str | None, agent_id: str | None) -> Place | None:
        """Return the place from which the session, or else the agent, was last addressed."""
        if session_key:
            try:
                record = await self._sessions.find(session_key)
            except NotFound:
                record = None
            if record is not None and record.channel is not None:
                return msgspec.json.decode(record.channel, type=Place)
        return await self._messages.last_active(self._agent(session_key, agent_id))

    def _agent(self, session_key: str | None, agent_id: str | None) -> str:
        return agent_id or (session_keys.agent_of(self._sessions.canonical(session_key)) if session_key else MAIN)
