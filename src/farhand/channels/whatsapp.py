"""WhatsApp by Meta's Cloud API: it posts to `/hooks/NAME`, signed with the app's secret; answers are posted to it."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from farhand.channels.service import Service
from farhand.gateway.channel import Attachment, ChannelSettings, DeliveryError, Incoming, Outgoing, Refused, Take
from farhand.gateway.hooks import Door, Unsigned
from farhand.protocol.errors import Failed, InvalidArgs
from farhand.store.outbox import Place

MEDIA: Final = ("image", "document", "audio", "video", "sticker")
MAX_PEERS: Final = 1000


class WhatsAppSettings(ChannelSettings, kw_only=True):
    phone_id: str
    token: str
    app_secret: str
    verify_token: str
    url: str = "https://graph.facebook.com/v23.0"


class WhatsAppChannel:
    longest_text = 4096
    files_apart = True
    repeatable = False

    def __init__(self, settings: WhatsAppSettings) -> None:
        self.settings = settings
        self._service = Service(settings.url, {"Authorization": f"Bearer {settings.token}"})
        self._take: Take | None = None
        self._order = asyncio.Lock()
        self._last: OrderedDict[str, str] = OrderedDict()
        """What each peer wrote last: Meta shows typing as part of having read a message."""

    # -- in ---------------------------------------------------------------------------------------------

    async def run(self, take: Take) -> None:
        self._take = take
        try:
            await asyncio.Event().wait()
        finally:
            self._take = None

    def door(self) -> Door:
        return Door(self.receive, 200, self.challenge)

    def challenge(self, query: Mapping[str, str]) -> str | None:
        wanted = self.settings.verify_token
        fits = hmac.compare_digest(query["hub.verify_token"].encode(), wanted.encode()) and bool(wanted)
        return query["hub.challenge"] if query["hub.mode"] == "subscribe" and fits else None

    async def receive(self, headers: Mapping[bytes, bytes], body: bytes) -> None:
        """Raises Unsigned, InvalidArgs, Failed when Meta has to bring it again."""
        given = headers.get(b"x-hub-signature-256", b"").strip().lower()
        wanted = "sha256=" + hmac.new(self.settings.app_secret.encode(), body, hashlib.sha256).hexdigest()
        if not hmac.compare_digest(given, wanted.encode()):
            raise Unsigned("X-Hub-Signature-256 does not fit the body")
        try:
            posted = msgspec.json.decode(body)
            messages = list(_messages(posted, self.settings.phone_id))
        except (msgspec.DecodeError, UnicodeError, RecursionError, AttributeError, KeyError, TypeError) as error:
            raise InvalidArgs(f"the body is no notification of WhatsApp: {error}") from None
        async with self._order:
            for message, name in messages:
                await self._take_one(message, name)

    async def _take_one(self, message: dict[str, Any], name: str) -> None:
        if self._take is None:
            raise Failed("the channel does not listen yet")
        kind, sender = str(message.get("type")), str(message["from"])
        text = (message.get("text") or {}).get("body") or (message.get(kind) or {}).get("caption") or ""
        text = text or (message.get("button") or {}).get("text") or ""
        files: tuple[Attachment, ...] = ()
        if kind in MEDIA:
            try:
                files = (await self._file(message[kind], kind),)
            except Refused as error:
                text = f"{text}\n[a file could not be fetched: {error}]".strip()
            except DeliveryError as error:
                raise Failed(f"a file could not be fetched: {error}") from None
        peer = f"+{sender.lstrip('+')}"
        self._last[peer] = message["id"]
        while len(self._last) > MAX_PEERS:
            self._last.popitem(last=False)
        await self._take(
            Incoming(
                id=message["id"], peer=peer, sender=peer, sender_name=name, text=text, attachments=files, mentioned=True
            )
        )

    async def _file(self, file: dict[str, Any], kind: str) -> Attachment:
        place = await self._service.call("GET", f"/{file['id']}")
        mime = str(file.get("mime_type") or place.get("mime_type") or "application/octet-stream").partition(";")[0]
        data = await self._service.fetch(place["url"])
        return Attachment(file.get("filename") or f"{kind}.{mime.rpartition('/')[2]}", mime, data)

    # -- out --------------------------------------------------------------------------------------------

    async def send(self, message: Outgoing) -> str | None:
        fields: dict[str, Any] = {
            "messaging_product": "whatsapp",
            "recipient_type": "individual",
            "to": message.place.peer.lstrip("+"),
        }
        if message.reply_to:
            fields["context"] = {"message_id": message.reply_to}
        if message.attachments:
            (file,) = message.attachments
            uploaded = await self._service.call(
                "POST",
                f"/{self.settings.phone_id}/media",
                data={"messaging_product": "whatsapp", "type": file.content_type},
                files={"file": (file.name, file.data, file.content_type)},
            )
            kind = file.content_type.partition("/")[0]
            kind = kind if kind in ("image", "audio", "video") else "document"
            named = {"filename": file.name} if kind == "document" else {}
            fields |= {"type": kind, kind: {"id": uploaded["id"], **named}}
        else:
            fields |= {"type": "text", "text": {"body": message.text, "preview_url": False}}
        answer = await self._service.call("POST", f"/{self.settings.phone_id}/messages", json=fields)
        try:
            return str(answer["messages"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise Refused(f"WhatsApp answered with {str(answer)[:200]}") from None

    async def typing(self, place: Place) -> None:
        last = self._last.get(place.peer)
        if last is not None:
            fields = {"messaging_product": "whatsapp", "status": "read", "message_id": last}
            await self._service.call(
                "POST", f"/{self.settings.phone_id}/messages", json={**fields, "typing_indicator": {"type": "text"}}
            )

    async def close(self) -> None:
        await self._service.close()


def _messages(posted: Any, phone_id: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The messages of a notification and their senders' names; it may be about many, or about something else."""
    for entry in posted.get("entry", []):
        for change in entry.get("changes", []):
            value = change.get("value", {})
            if (value.get("metadata") or {}).get("phone_number_id", phone_id) != phone_id:
                continue
            names = {one.get("wa_id"): (one.get("profile") or {}).get("name", "") for one in value.get("contacts", [])}
            for message in value.get("messages", []):
                yield message, names.get(message["from"], "")
