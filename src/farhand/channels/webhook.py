"""Connect a custom program as a channel: it posts messages to `/hooks/NAME` and receives the agent's messages by POST.

Both directions carry `X-Webhook-Signature: sha256=<hex>`, the HMAC of the body with the shared secret. Each message of
the agent is posted until the receiver answers 2xx, always with the same `id`, by which the receiver drops repetitions.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from typing import Any

import msgspec

from farhand.channels.http_client import Service
from farhand.gateway.messaging.channel import (
    Attachment,
    ChannelKind,
    ChannelSettings,
    Incoming,
    Outgoing,
    Take,
    TryLater,
    Undeliverable,
)
from farhand.gateway.messaging.hooks import SIGNATURE, PostHandler, check_signature, signature
from farhand.gateway.sessions.keys import PeerKind
from farhand.protocol.errors import Failed, InvalidArgs
from farhand.store.tables.outbox import Place


class WebhookSettings(ChannelSettings, kw_only=True):
    # Signs messages in both directions.
    secret: str
    # The address to which the agent's messages are posted.
    url: str = ""


class PostedFile(msgspec.Struct):
    name: str
    # base64
    data: str
    content_type: str = msgspec.field(default="application/octet-stream", name="contentType")


class Posted(msgspec.Struct):
    """Define what the program posts."""

    id: str
    sender: str
    text: str
    # Where to send the answer; defaults to the sender.
    peer: str = ""
    peer_kind: PeerKind = msgspec.field(default="dm", name="peerKind")
    sender_name: str = msgspec.field(default="", name="senderName")
    mentioned: bool = True
    media: list[PostedFile] = []


class WebhookChannel:
    longest_text = 100_000
    files_apart = False
    repeatable = True
    trouble = ""

    def __init__(self, settings: WebhookSettings) -> None:
        self.settings = settings
        self._service = Service(settings.url)
        self._take: Take | None = None
        self._order = asyncio.Lock()

    async def run(self, take: Take) -> None:
        self._take = take
        try:
            await asyncio.Event().wait()
        finally:
            self._take = None

    def post_handler(self) -> PostHandler:
        return PostHandler(self.receive)

    async def receive(self, headers: Mapping[bytes, bytes], body: bytes) -> None:
        """Handle a post; posts are handled in order of arrival. Raises Unsigned, InvalidArgs, Failed."""
        check_signature(self.settings.secret, headers.get(SIGNATURE), body)
        try:
            posted = msgspec.json.decode(body, type=Posted)
            files = tuple(
                Attachment(file.name, file.content_type, base64.b64decode(file.data, validate=True))
                for file in posted.media
            )
        except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
            raise InvalidArgs(f"the body is not a message: {str(error).replace('`', chr(39))}") from None
        async with self._order:
            if self._take is None:
                raise Failed("the channel is not ready yet; post again")
            await self._take(
                Incoming(
                    id=posted.id,
                    peer=posted.peer or posted.sender,
                    peer_kind=posted.peer_kind,
                    sender=posted.sender,
                    sender_name=posted.sender_name,
                    text=posted.text,
                    attachments=files,
                    mentioned=posted.mentioned,
                )
            )

    async def send(self, message: Outgoing) -> str | None:
        if not self.settings.url:
            raise Undeliverable(f"[channels] {self.settings.account}: there is no url to post to")
        place = message.place
        body = msgspec.json.encode(
            {
                "id": message.id,
                "channel": place.channel,
                "accountId": place.account,
                "to": place.peer,
                "peerKind": place.peer_kind,
                "text": message.text,
                "replyToId": message.reply_to,
                "media": [
                    {
                        "name": file.name,
                        "contentType": file.content_type,
                        "data": base64.b64encode(file.data).decode(),
                    }
                    for file in message.attachments
                ],
            }
        )
        headers = {
            "Content-Type": "application/json",
            "X-Webhook-Signature": signature(self.settings.secret, body),
            "X-Webhook-Id": message.id,
            "Idempotency-Key": message.id,
        }
        try:
            answer: Any = await self._service.call("POST", self.settings.url, content=body, headers=headers)
        except Undeliverable as error:  # the receiver may be corrected, so retry until the message expires
            raise TryLater(str(error)) from None
        remote = answer.get("id") if isinstance(answer, dict) else None
        return remote if isinstance(remote, str) else None

    async def typing(self, place: Place) -> None:  # noqa: ARG002
        return None

    async def close(self) -> None:
        await self._service.close()


CHANNEL = ChannelKind(WebhookSettings, WebhookChannel)
