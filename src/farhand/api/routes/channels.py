"""Channels over HTTP: the door for hooks, the outbox, who may talk, and which hooks there are."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from farhand.api.server.http import Problem, Reply, Request, json_reply, tool_problem
from farhand.api.server.route_docs import About, Query
from farhand.api.server.router import Route
from farhand.gateway.access.credentials import Scope
from farhand.gateway.messaging.channel import Tools
from farhand.gateway.messaging.hooks import MAX_POST_BYTES, Hooks, HookSettings, Unsigned
from farhand.gateway.messaging.inbound import Reception
from farhand.gateway.messaging.outbox import Messages
from farhand.gateway.sessions.keys import MAIN
from farhand.protocol.errors import ErrorKind, ToolError
from farhand.store.ports import StoreError
from farhand.store.tables.outbox import MessageState, OutboxRecord
from farhand.store.tables.pairings import Pairing

MAX_DELIVERY = 256


class HookRequest(msgspec.Struct):
    """`secret`: None makes one up; empty means that anybody who knows the address may post."""

    secret: str | None = None
    agent: str = MAIN
    session: str = ""
    format: Literal["text", "json"] = "text"
    tools: Tools | None = None
    deliver: str = ""


_hook_decoder = msgspec.json.Decoder(HookRequest)
MESSAGES = (
    Query("limit", "At most so many, 1 to 1000; 50 if not said.", int),
    Query("channel", "To this channel."),
    Query("to", "To this peer."),
    Query("state", "In this state."),
)


def channel_routes(messages: Messages, reception: Reception, hooks: Hooks) -> list[Route]:
    doors = ChannelDoors(messages, reception, hooks)
    on_channel = (Query("channel", "On this channel, when somebody wrote on several."),)
    return [
        Route(
            "POST",
            "/hooks/{hook_id}",
            None,
            doors.post,
            about=About(
                "Where another program posts; signed with `X-Webhook-Signature` when the hook has a secret.",
                takes="*/*",
                status=202,
                also={200: "Accepted; what some services want to hear."},
                errors=(401, 413, 503),
                idempotent=True,
            ),
        ),
        Route(
            "GET",
            "/hooks/{hook_id}",
            None,
            doors.challenge,
            about=About(
                "A service asks whether this address is the right one.", media=("text/plain",), errors=(403, 405)
            ),
        ),
        Route("GET", "/v1/hooks", Scope.ADMIN, doors.hooks, about=About("The hooks there are.")),
        Route(
            "PUT",
            "/v1/hooks/{hook_id}",
            Scope.ADMIN,
            doors.make_hook,
            about=About(
                "Make or change a hook; its secret is told this once.", body=HookRequest, status=201, errors=(503,)
            ),
        ),
        Route(
            "DELETE",
            "/v1/hooks/{hook_id}",
            Scope.ADMIN,
            doors.remove_hook,
            about=About("Remove a hook.", errors=(503,)),
        ),
        Route("GET", "/v1/channels", Scope.READ, doors.channels, about=About("The channels and how they are.")),
        Route(
            "GET",
            "/v1/channels/pairings",
            (Scope.PAIR, Scope.READ),
            doors.pairings,
            about=About("Who asked to talk to the agent, and what was decided."),
        ),
        Route(
            "POST",
            "/v1/channels/pairings/{who}/approve",
            Scope.PAIR,
            doors.approve,
            about=About("Let somebody in, by code or address.", query=on_channel, answer=Pairing, errors=(503,)),
        ),
        Route(
            "POST",
            "/v1/channels/pairings/{who}/reject",
            Scope.PAIR,
            doors.reject,
            about=About("Do not let somebody in.", query=on_channel, answer=Pairing, errors=(503,)),
        ),
        Route(
            "DELETE",
            "/v1/channels/pairings/{who}",
            Scope.PAIR,
            doors.forget,
            about=About("Take a decision back.", query=on_channel, errors=(503,)),
        ),
        Route(
            "GET",
            "/v1/messages",
            Scope.READ,
            doors.messages,
            about=About("Messages to people, newest first.", query=MESSAGES),
        ),
        Route(
            "GET",
            "/v1/messages/{message_id}",
            Scope.READ,
            doors.message,
            about=About("One message, and why it waits."),
        ),
        Route(
            "POST",
            "/v1/messages/{message_id}/retry",
            Scope.TOOLS_EXEC,
            doors.retry,
            acts=True,
            about=About("Send a message again that failed or is unknown.", status=202, errors=(503,)),
        ),
    ]


class ChannelDoors:
    """One method for each route."""

    def __init__(self, messages: Messages, reception: Reception, hooks: Hooks) -> None:
        self._messages = messages
        self._reception = reception
        self._hooks = hooks

    # -- what other programs post -----------------------------------------------------------------------

    async def post(self, request: Request) -> Reply:
        hook_id = request.params["hook_id"]
        with _problems():
            door = self._hooks.door(hook_id)
            if door is None:
                self._hooks.find(hook_id)
            body = await request.body()
            if door is not None:
                await door.receive(request.headers, body)
                return json_reply({"accepted": True}, door.status)
            if len(body) > MAX_POST_BYTES:
                raise Problem(413, "too_large", f"a post has at most {MAX_POST_BYTES} bytes")
            delivery = request.header(b"idempotency-key") or request.header(b"x-webhook-id")
            if delivery is not None and not 1 <= len(delivery) <= MAX_DELIVERY:
                raise Problem(400, "invalid_request", f"Idempotency-Key has 1 to {MAX_DELIVERY} characters")
            await self._hooks.post(hook_id, request.headers, body, delivery)
        return json_reply({"accepted": True}, 202)

    async def challenge(self, request: Request) -> Reply:
        door = self._hooks.door(request.params["hook_id"])
        if door is None or door.challenge is None:
            raise Problem(405, "method_not_allowed", "a hook is posted to", headers=[(b"allow", b"POST")])
        names = ("hub.mode", "hub.verify_token", "hub.challenge")
        answer = door.challenge({name: request.query(name) or "" for name in names})
        if answer is None:
            raise Problem(403, "forbidden", "this is not the token of the settings")
        return Reply(answer.encode(), content_type=b"text/plain")

    async def hooks(self, request: Request) -> Reply:  # noqa: ARG002
        shown = [self._hook_view(hook_id, settings) for hook_id, settings in sorted(self._hooks.known.items())]
        return json_reply({"hooks": shown, "count": len(shown)})

    def _hook_view(self, hook_id: str, settings: HookSettings) -> dict[str, Any]:
        view = {**_hook_view(hook_id, settings), "made_by": self._hooks.maker(hook_id)}
        reason = self._hooks.ended(hook_id)
        return view if reason is None else {**view, "ended_reason": reason}

    async def make_hook(self, request: Request) -> Reply:
        wanted: HookRequest = await request.json(_hook_decoder)
        secret = secrets.token_urlsafe(32) if wanted.secret is None else wanted.secret
        hook_id = request.params["hook_id"]
        settings = HookSettings(
            secret=secret,
            agent=wanted.agent,
            session=wanted.session,
            format=wanted.format,
            tools=wanted.tools,
            deliver=wanted.deliver,
        )
        with _problems():
            await self._hooks.make(hook_id, settings, request.credential.id)
        return json_reply({**self._hook_view(hook_id, settings), "secret": secret}, 201, bare=True)

    async def remove_hook(self, request: Request) -> Reply:
        with _problems():
            await self._hooks.remove(request.params["hook_id"])
        return json_reply({"removed": request.params["hook_id"]})

    # -- channels and people ----------------------------------------------------------------------------

    async def channels(self, request: Request) -> Reply:  # noqa: ARG002
        waiting = await self._messages.waiting()
        shown = [
            {
                "name": name,
                "channel": channel.settings.kind,
                "accountId": channel.settings.account,
                "policy": channel.settings.policy,
                "waiting": waiting.get((channel.settings.kind, channel.settings.account), 0),
                "trouble": self._reception.troubles.get(name) or channel.trouble or None,
            }
            for name, channel in self._messages.channels.items()
        ]
        return json_reply({"channels": shown, "count": len(shown)})

    async def pairings(self, request: Request) -> Reply:  # noqa: ARG002
        found = await self._reception.pairings()
        return json_reply({"pairings": found, "count": len(found)})

    async def approve(self, request: Request) -> Reply:
        return await self._decide(request, True)

    async def reject(self, request: Request) -> Reply:
        return await self._decide(request, False)

    async def _decide(self, request: Request, approve: bool) -> Reply:
        with _problems():
            decided = await self._reception.decide(request.params["who"], approve, request.query("channel"))
        return json_reply(decided)

    async def forget(self, request: Request) -> Reply:
        with _problems():
            gone = await self._reception.forget(request.params["who"], request.query("channel"))
        return json_reply({"removed": gone.sender, "channel": gone.channel})

    # -- messages ---------------------------------------------------------------------------------------

    async def messages(self, request: Request) -> Reply:
        state = request.query("state")
        if state is not None and state not in [one.value for one in MessageState]:
            raise Problem(
                400, "invalid_request", f"state must be one of {', '.join(one.value for one in MessageState)}"
            )
        found = await self._messages.listed(
            request.query_int("limit", 50, 1, 1000),
            channel=request.query("channel"),
            peer=request.query("to"),
            state=state,
        )
        return json_reply({"messages": [_message_view(record) for record in found], "count": len(found)})

    async def message(self, request: Request) -> Reply:
        with _problems():
            return json_reply(_message_view(await self._messages.find(0, request.params["message_id"])))

    async def retry(self, request: Request) -> Reply:
        with _problems():
            return json_reply(_message_view(await self._messages.retry(request.params["message_id"])), 202)


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


def _hook_view(hook_id: str, settings: HookSettings) -> dict[str, Any]:
    return {
        "id": hook_id,
        "path": f"/hooks/{hook_id}",
        "signed": bool(settings.secret),
        "agent": settings.agent,
        "session": settings.session or None,
        "format": settings.format,
        "tools": settings.tools or ("read" if settings.secret else "none"),
        "deliver": settings.deliver or None,
    }


@contextlib.contextmanager
def _problems() -> Iterator[None]:
    try:
        yield
    except Unsigned as error:
        raise Problem(401, "unauthorized", error.message) from None
    except ToolError as error:
        if error.kind is ErrorKind.FAILED:
            raise Problem(503, "unavailable", error.message, headers=[(b"retry-after", b"1")]) from None
        raise tool_problem(error) from None
    except StoreError as error:
        raise Problem(503, "not_recorded", str(error)) from None
