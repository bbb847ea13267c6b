"""Connect to WhatsApp through Meta's Cloud API; messages are sent with pywa (the extra `whatsapp`).

Meta posts to `/hooks/NAME`, signed with the app's secret. Posts are parsed here rather than by the library: one post
may carry several messages, and it is answered only after all of them are on disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from farhand.channels.http_client import SECONDS, read_failure
from farhand.channels.library import load
from farhand.gateway.messaging.channel import (
    Attachment,
    ChannelKind,
    ChannelSettings,
    DeliveryError,
    Incoming,
    Outgoing,
    Take,
    TryLater,
    Undeliverable,
    Unsure,
)
from farhand.gateway.messaging.hooks import PostHandler, Unsigned
from farhand.protocol.errors import Failed, InvalidArgs
from farhand.store.tables.outbox import Place

MEDIA: Final = ("image", "document", "audio", "video", "sticker")
MAX_PEERS: Final = 1000


class WhatsAppSettings(ChannelSettings, kw_only=True):
    phone_id: str
    token: str
    app_secret: str
    verify_token: str
    # Defaults to Meta's address, in the API version of the library.
    url: str = ""


class WhatsAppChannel:
    longest_text = 4096
    files_apart = True
    repeatable = False
    trouble = ""

    def __init__(self, settings: WhatsAppSettings) -> None:
        self.settings = settings
        self._pywa: Any = None
        self._client: Any = None
        self._session: Any = None
        self._opening = asyncio.Lock()
        self._take: Take | None = None
        self._order = asyncio.Lock()
        # The last message of each peer: Meta shows typing as part of a read receipt.
        self._last: OrderedDict[str, str] = OrderedDict()

    async def _open(self) -> Any:
        async with self._opening:
            if self._client is None:
                self._pywa = await load("pywa_async", "pywa_async.errors")
                httpx = await load("httpx")
                self._session = httpx.AsyncClient(timeout=httpx.Timeout(SECONDS, connect=10.0))
                self._client = self._pywa.WhatsApp(self.settings.phone_id, self.settings.token, session=self._session)
                if self.settings.url:
                    self._session.base_url = self.settings.url
        return self._client

    # -- in ---------------------------------------------------------------------------------------------

    async def run(self, take: Take) -> None:
        self._take = take
        try:
            await self._open()
            await asyncio.Event().wait()
        finally:
            self._take = None

    def post_handler(self) -> PostHandler:
        return PostHandler(self.receive, 200, self.challenge)

    def challenge(self, query: Mapping[str, str]) -> str | None:
        wanted = self.settings.verify_token
        fits = hmac.compare_digest(query["hub.verify_token"].encode(), wanted.encode()) and bool(wanted)
        return query["hub.challenge"] if query["hub.mode"] == "subscribe" and fits else None

    async def receive(self, headers: Mapping[bytes, bytes], body: bytes) -> None:
        """Handle a post of Meta. Raises Unsigned, InvalidArgs, or Failed if Meta has to post it again."""
        given = headers.get(b"x-hub-signature-256", b"").strip().lower()
        wanted = "sha256=" + hmac.new(self.settings.app_secret.encode(), body, hashlib.sha256).hexdigest()
        if not hmac.compare_digest(given, wanted.encode()):
            raise Unsigned("X-Hub-Signature-256 does not match the body")
        try:
            posted = msgspec.json.decode(body)
            messages = list(_messages(posted, self.settings.phone_id))
        except (msgspec.DecodeError, UnicodeError, RecursionError, AttributeError, KeyError, TypeError) as error:
            raise InvalidArgs(f"the body is not a WhatsApp notification: {error}") from None
        async with self._order:
            for message, name in messages:
                await self._take_one(message, name)

    async def _take_one(self, message: dict[str, Any], name: str) -> None:
        if self._take is None:
            raise Failed("the channel is not ready yet")
        kind, sender = str(message.get("type")), str(message["from"])
        text = (message.get("text") or {}).get("body") or (message.get(kind) or {}).get("caption") or ""
        text = text or (message.get("button") or {}).get("text") or ""
        fetch = partial(self._files, message[kind], kind) if kind in MEDIA else None
        peer = f"+{sender.lstrip('+')}"
        self._last[peer] = message["id"]
        while len(self._last) > MAX_PEERS:
            self._last.popitem(last=False)
        await self._take(
            Incoming(id=message["id"], peer=peer, sender=peer, sender_name=name, text=text, fetch=fetch, mentioned=True)
        )

    async def _files(self, file: dict[str, Any], kind: str) -> list[Attachment]:
        try:
            return [await self._file(file, kind)]
        except Undeliverable:
            raise
        except DeliveryError as error:
            raise Failed(f"a file could not be fetched: {error}") from None

    async def _file(self, file: dict[str, Any], kind: str) -> Attachment:
        client = await self._open()
        try:
            place = await self._asked(client.get_media_url(file["id"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Undeliverable(f"Meta sent an invalid response: {error!r}") from None
        mime = str(file.get("mime_type") or place.mime_type or "application/octet-stream").partition(";")[0]
        data = await self._asked(client.get_media_bytes(place.url))
        return Attachment(file.get("filename") or f"{kind}.{mime.rpartition('/')[2]}", mime, data)

    # -- out --------------------------------------------------------------------------------------------

    async def send(self, message: Outgoing) -> str | None:
        client = await self._open()
        to, more = message.place.peer.lstrip("+"), {"reply_to_message_id": message.reply_to or None}
        if not message.attachments:
            sent = await self._asked(client.send_message(to, message.text, **more))
            return str(sent.id)
        (file,) = message.attachments
        try:
            media = await self._asked(client.upload_media(file.data, mime_type=file.content_type, filename=file.name))
        except Unsure as error:  # nothing was sent to the recipient yet, so a retry is safe
            raise TryLater(str(error)) from None
        match file.content_type.partition("/")[0]:
            case "image":
                sending = client.send_image(to, media, **more)
            case "audio":
                sending = client.send_audio(to, media, **more)
            case "video":
                sending = client.send_video(to, media, **more)
            case _:
                sending = client.send_document(to, media, filename=file.name, **more)
        return str((await self._asked(sending)).id)

    async def typing(self, place: Place) -> None:
        last = self._last.get(place.peer)
        if last is not None:
            client = await self._open()
            await self._asked(client.indicate_typing(last))

    async def _asked(self, request: Any) -> Any:
        """Return Meta's response to a request; the library does not retry. Raises DeliveryError."""
        httpx = await load("httpx")
        try:
            return await request
        except self._pywa.errors.WhatsAppError as error:
            status = error.raw_response.status_code if error.raw_response is not None else 400
            said = f"{status}: {error.message} {error.details or ''}".strip()
            raise (TryLater(said) if error.is_transient else read_failure(status, said)) from None
        except httpx.HTTPStatusError as error:
            raise read_failure(error.response.status_code, str(error)) from None
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise TryLater(f"the service cannot be reached: {error}") from None
        except httpx.HTTPError as error:
            raise Unsure(f"the connection broke: {type(error).__name__} {error}") from None

    async def close(self) -> None:
        session, self._client, self._session = self._session, None, None
        if session is not None:
            await session.aclose()


def _messages(posted: Any, phone_id: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the messages of a notification with their senders' names; a notification may hold any number, or none."""
    for entry in posted.get("entry", []):
        for change in entry.get("changes", []):
            value = change.get("value", {})
            if (value.get("metadata") or {}).get("phone_number_id", phone_id) != phone_id:
                continue
            names = {one.get("wa_id"): (one.get("profile") or {}).get("name", "") for one in value.get("contacts", [])}
            for message in value.get("messages", []):
                yield message, names.get(message["from"], "")


CHANNEL = ChannelKind(WhatsAppSettings, WhatsAppChannel)
