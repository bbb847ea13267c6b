"""Telegram: the Bot API by long polling. An update is confirmed only when its message is on disk."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from farhand.channels.service import Service
from farhand.gateway.channel import Attachment, ChannelSettings, DeliveryError, Incoming, Outgoing, Refused, Take
from farhand.gateway.session_keys import PeerKind
from farhand.protocol.errors import ToolError
from farhand.store.outbox import Place

log = logging.getLogger("farhand.channels.telegram")

POLL_SECONDS: Final = 25
LARGEST_FILE: Final = 20 * 1024 * 1024
"""What the Bot API lets a bot fetch."""
LONGEST_WAIT: Final = 30.0
_FILES: Final = ("document", "audio", "voice", "video", "video_note", "animation", "sticker")


class TelegramSettings(ChannelSettings, kw_only=True):
    token: str
    url: str = "https://api.telegram.org"


class TelegramChannel:
    longest_text = 4096
    files_apart = True
    repeatable = False

    def __init__(self, settings: TelegramSettings) -> None:
        self.settings = settings
        self._service = Service(settings.url, secret=settings.token)
        self._me: dict[str, Any] = {}

    # -- in ---------------------------------------------------------------------------------------------

    async def run(self, take: Take) -> None:
        offset, wait = 0, 1.0
        while True:
            try:
                if not self._me:
                    self._me = await self._call("getMe")
                asked = {"offset": offset, "timeout": POLL_SECONDS, "allowed_updates": ["message"]}
                for update in await self._call("getUpdates", asked, seconds=POLL_SECONDS + 15.0):
                    try:
                        await self._take(take, update)
                    except (AttributeError, KeyError, TypeError) as error:
                        log.warning("an update of Telegram was left out: %r", error)
                    offset = update["update_id"] + 1
                wait = 1.0
            except (DeliveryError, ToolError) as error:
                log.warning("Telegram cannot be read (again in %g s): %s", wait, error)
                await asyncio.sleep(wait)
                wait = min(LONGEST_WAIT, wait * 2)

    async def _take(self, take: Take, update: dict[str, Any]) -> None:
        message = update.get("message")
        if not isinstance(message, dict) or message.get("from", {}).get("is_bot", True):
            return
        chat, sender = message["chat"], message["from"]
        kind: PeerKind = "dm" if chat["type"] == "private" else "group"
        peer = str(chat["id"])
        if message.get("is_topic_message"):
            kind, peer = "thread", f"{peer}/{message['message_thread_id']}"
        text = message.get("text") or message.get("caption") or ""
        name = f"@{self._me.get('username', '')}"
        replied = message.get("reply_to_message", {}).get("from", {}).get("id") == self._me.get("id")
        await take(
            Incoming(
                id=f"{chat['id']}/{message['message_id']}",
                peer=peer,
                peer_kind=kind,
                sender=str(sender["id"]),
                sender_name=" ".join(part for part in (sender.get("first_name"), sender.get("last_name")) if part),
                text=text.replace(name, "").strip() if len(name) > 1 else text,
                attachments=tuple(await self._files(message)),
                mentioned=replied or (len(name) > 1 and name.lower() in text.lower()),
            )
        )

    async def _files(self, message: dict[str, Any]) -> list[Attachment]:
        found = [(message[kind], kind) for kind in _FILES if isinstance(message.get(kind), dict)]
        if message.get("photo"):
            found.append((message["photo"][-1], "photo.jpg"))
        files = []
        for file, kind in found:
            if file.get("file_size", 0) > LARGEST_FILE:
                log.warning("a file of %s bytes was left with Telegram: too large", file["file_size"])
                continue
            try:
                path = (await self._call("getFile", {"file_id": file["file_id"]}))["file_path"]
                data = await self._service.fetch(f"/file/bot{self.settings.token}/{path}", largest=LARGEST_FILE)
            except Refused as error:
                log.warning("a file was left with Telegram: %s", error)
                continue
            name = file.get("file_name") or (kind if "." in kind else path.rpartition("/")[2])
            mime = file.get("mime_type") or ("image/jpeg" if kind == "photo.jpg" else "application/octet-stream")
            files.append(Attachment(name, mime, data))
        return files

    # -- out --------------------------------------------------------------------------------------------

    async def send(self, message: Outgoing) -> str | None:
        fields = self._place(message.place)
        if message.reply_to:
            fields["reply_parameters"] = {
                "message_id": _number(message.reply_to.rpartition("/")[2]),
                "allow_sending_without_reply": True,
            }
        if not message.attachments:
            answer = await self._call("sendMessage", {**fields, "text": message.text})
        else:
            (file,) = message.attachments
            method, part = ("sendPhoto", "photo") if file.content_type in _PHOTOS else ("sendDocument", "document")
            answer = await self._service_answer(
                method,
                data={"chat_id": str(fields["chat_id"])},
                files={part: (file.name, file.data, file.content_type)},
            )
        return f"{answer['chat']['id']}/{answer['message_id']}"

    async def typing(self, place: Place) -> None:
        await self._call("sendChatAction", {**self._place(place), "action": "typing"})

    def _place(self, place: Place) -> dict[str, Any]:
        chat, _, thread = place.peer.partition("/")
        fields: dict[str, Any] = {"chat_id": chat if chat.startswith("@") else _number(chat)}
        if thread:
            fields["message_thread_id"] = _number(thread)
        return fields

    async def _call(self, method: str, fields: Any = None, seconds: float = 30.0) -> Any:
        return await self._service_answer(method, json=fields or {}, seconds=seconds)

    async def _service_answer(self, method: str, **options: Any) -> Any:
        answer = await self._service.call("POST", f"/bot{self.settings.token}/{method}", **options)
        if not isinstance(answer, dict) or not answer.get("ok") or "result" not in answer:
            raise Refused(f"Telegram answered {method} with {str(answer)[:200]}")
        return answer["result"]

    async def close(self) -> None:
        await self._service.close()


_PHOTOS: Final = ("image/jpeg", "image/png", "image/webp")


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise Refused(f"{text!r} is not an id of Telegram: a number, or @name for a channel") from None
