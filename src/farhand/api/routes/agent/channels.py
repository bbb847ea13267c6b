"""Channels: hooks, the outbox, and the people who may talk to the agent."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any, Literal

import msgspec

from farhand.api.server.http import Problem, Reply, Request, copied, invalid, json_reply, refusing
from farhand.api.server.router import Query, route
from farhand.gateway.access.credentials import Scope
from farhand.gateway.messaging.channel import Tools
from farhand.gateway.messaging.hooks import MAX_POST_BYTES, Hooks, HookSettings, Unsigned
from farhand.gateway.messaging.inbound import InboundMessages
from farhand.gateway.messaging.outbox import Messages
from farhand.gateway.sessions.keys import MAIN
from farhand.protocol.errors import ErrorKind
from farhand.store.tables.access.pairings import Pairing
from farhand.store.tables.outbox import MessageState, OutboxRecord

MAX_DELIVERY = 256
# A failure of the outbox or a channel: the client should try again.
UNAVAILABLE = {ErrorKind.FAILED: 503}
channel_route = partial(route, errors=(503,), statuses=UNAVAILABLE)


class HookRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`secret`: None generates one; with an empty one, anyone who knows the address may post."""

    secret: str | None = None
    agent: str = MAIN
    session: str = ""
    format: Literal["text", "json"] = "text"
    tools: Tools | None = None
    deliver: str = ""


ON_CHANNEL = (Query("channel", "On this channel, for a person who wrote on several."),)
MESSAGES = (
    Query("limit", "How many at most: 1 to 1000, 50 by default.", int),
    Query("channel", "To this channel."),
    Query("to", "To this peer."),
    Query("state", "Only messages in this state."),
)


class ChannelRoutes:
    def __init__(self, messages: Messages, inbound: InboundMessages, hooks: Hooks) -> None:
        self._messages = messages
        self._inbound = inbound
        self._hooks = hooks

    # -- hooks ------------------------------------------------------------------------------------------

    @route(
        "POST /hooks/{hook_id}",
        None,
        "Receive a post of another program; signed with `X-Webhook-Signature` if the hook has a secret.",
        takes="*/*",
        status=202,
        also={200: "Accepted; the status that some services expect."},
        errors=(401, 413, 503),
        statuses=UNAVAILABLE,
        idempotent=True,
    )
    async def post(self, request: Request) -> Reply:
        hook_id = request.params["hook_id"]
        handler = self._hooks.post_handler(hook_id)
        if handler is None:
            self._hooks.find(hook_id)
        body = await request.body()
        with refusing(Unsigned, status=401, code="unauthorized"):
            if handler is not None:
                await handler.receive(request.headers, body)
                return json_reply({"accepted": True}, handler.status)
            if len(body) > MAX_POST_BYTES:
                raise Problem(413, "too_large", f"a post has at most {MAX_POST_BYTES} bytes")
            delivery = request.header(b"idempotency-key") or request.header(b"x-webhook-id")
            if delivery is not None and not 1 <= len(delivery) <= MAX_DELIVERY:
                raise invalid(f"Idempotency-Key has 1 to {MAX_DELIVERY} characters")
            await self._hooks.post(hook_id, request.headers, body, delivery)
        return json_reply({"accepted": True}, 202)

    @route(
        "GET /hooks/{hook_id}",
        None,
        "Verify the address for a service that asks for it.",
        media=("text/plain",),
        errors=(403, 405),
    )
    async def challenge(self, request: Request) -> Reply:
        handler = self._hooks.post_handler(request.params["hook_id"])
        if handler is None or handler.challenge is None:
            raise Problem(405, "method_not_allowed", "use POST for a hook", headers=[(b"allow", b"POST")])
        names = ("hub.mode", "hub.verify_token", "hub.challenge")
        answer = handler.challenge({name: request.query(name) or "" for name in names})
        if answer is None:
            raise Problem(403, "forbidden", "the verify token does not match the settings")
        return Reply(answer.encode(), content_type=b"text/plain")

    @route("GET /v1/hooks", Scope.ADMIN, "The hooks.")
    async def hooks(self, _request: Request) -> dict[str, Any]:
        shown = [self._hook_view(hook_id, settings) for hook_id, settings in sorted(self._hooks.known.items())]
        return {"hooks": shown, "count": len(shown)}

    def _hook_view(self, hook_id: str, settings: HookSettings) -> dict[str, Any]:
        reason = self._hooks.ended(hook_id)
        return {
            "id": hook_id,
            "path": f"/hooks/{hook_id}",
            "signed": bool(settings.secret),
            "agent": settings.agent,
            "session": settings.session or None,
            "format": settings.format,
            "tools": settings.tools or ("read" if settings.secret else "none"),
            "deliver": settings.deliver or None,
            "made_by": self._hooks.maker(hook_id),
            **({} if reason is None else {"ended_reason": reason}),
        }

    @channel_route(
        "PUT /v1/hooks/{hook_id}", Scope.ADMIN, "Make or change a hook; its secret is shown this once.", status=201
    )
    async def make_hook(self, request: Request, wanted: HookRequest) -> Reply:
        secret = secrets.token_urlsafe(32) if wanted.secret is None else wanted.secret
        hook_id = request.params["hook_id"]
        settings = copied(HookSettings, wanted, secret=secret)
        await self._hooks.make(hook_id, settings, request.credential.id)
        return json_reply({**self._hook_view(hook_id, settings), "secret": secret}, 201, bare=True)

    @channel_route("DELETE /v1/hooks/{hook_id}", Scope.ADMIN, "Remove a hook.")
    async def remove_hook(self, request: Request) -> dict[str, str]:
        await self._hooks.remove(request.params["hook_id"])
        return {"removed": request.params["hook_id"]}

    # -- channels and people ----------------------------------------------------------------------------

    @route("GET /v1/channels", Scope.READ, "The channels and their status.")
    async def channels(self, _request: Request) -> dict[str, Any]:
        waiting = await self._messages.waiting()
        shown = [
            {
                "name": name,
                "channel": channel.settings.kind,
                "accountId": channel.settings.account,
                "policy": channel.settings.policy,
                "waiting": waiting.get((channel.settings.kind, channel.settings.account), 0),
                "trouble": self._inbound.troubles.get(name) or channel.trouble or None,
            }
            for name, channel in self._messages.channels.items()
        ]
        return {"channels": shown, "count": len(shown)}

    @route(
        "GET /v1/channels/pairings", (Scope.PAIR, Scope.READ), "Who asked to talk to the agent, and what was decided."
    )
    async def pairings(self, _request: Request) -> dict[str, Any]:
        found = await self._inbound.pairings()
        return {"pairings": found, "count": len(found)}

    @channel_route(
        "POST /v1/channels/pairings/{who}/approve",
        Scope.PAIR,
        "Approve a person, by code or address.",
        query=ON_CHANNEL,
    )
    async def approve(self, request: Request) -> Pairing:
        return await self._inbound.decide(request.params["who"], True, request.query("channel"))

    @channel_route("POST /v1/channels/pairings/{who}/reject", Scope.PAIR, "Reject a person.", query=ON_CHANNEL)
    async def reject(self, request: Request) -> Pairing:
        return await self._inbound.decide(request.params["who"], False, request.query("channel"))

    @channel_route("DELETE /v1/channels/pairings/{who}", Scope.PAIR, "Withdraw a decision.", query=ON_CHANNEL)
    async def forget(self, request: Request) -> dict[str, str]:
        gone = await self._inbound.forget(request.params["who"], request.query("channel"))
        return {"removed": gone.sender, "channel": gone.channel}

    # -- messages ---------------------------------------------------------------------------------------

    @route("GET /v1/messages", Scope.READ, "Messages to people, newest first.", query=MESSAGES)
    async def messages(self, request: Request) -> dict[str, Any]:
        state = request.query("state")
        if state is not None and state not in [one.value for one in MessageState]:
            raise invalid(f"state must be one of {', '.join(one.value for one in MessageState)}")
        found = await self._messages.listed(
            request.query_int("limit", 50, 1, 1000),
            channel=request.query("channel"),
            peer=request.query("to"),
            state=state,
        )
        return {"messages": [_message_view(record) for record in found], "count": len(found)}

    @route("GET /v1/messages/{message_id}", Scope.READ, "One message, and why it waits.", statuses=UNAVAILABLE)
    async def message(self, request: Request) -> dict[str, Any]:
        return _message_view(await self._messages.find(0, request.params["message_id"]))

    @channel_route(
        "POST /v1/messages/{message_id}/retry",
        Scope.TOOLS_EXEC,
        "Resend a message that failed or whose outcome is unknown.",
        status=202,
        acts=True,
    )
    async def retry(self, request: Request) -> dict[str, Any]:
        record = await self._messages.retry(request.params["message_id"])
        if request.credential.may(Scope.READ):
            return _message_view(record)
        return {"id": record.id, "state": record.state}  # a message of another caller, perhaps


def _message_view(record: OutboxRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "channel": record.channel,
        "accountId": record.account,
        "to": record.peer,
        "peerKind": record.peer_kind,
        "text": "\n".join(record.parts),
        "parts": len(record.parts),
        "parts_sent": record.parts_sent,
        "media": record.media,
        "replyToId": record.reply_to,
        "agent_id": record.agent_id,
        "origin": record.origin,
        "state": record.state,
        "attempts": record.attempts,
        "next_at": record.next_at or None,
        "error": record.error,
        "messageId": record.remote_id,
        "created_at": record.created_at,
        "ended_at": record.ended_at,
    }
