"""Connect to Telegram's Bot API by long polling, with python-telegram-bot (the extra `telegram`).

An update is confirmed only after its message is on disk. The library's own polling loop confirms first, so updates are
requested here, one request at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import Any, Final

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
from farhand.gateway.sessions.keys import PeerKind
from farhand.protocol.errors import ToolError
from farhand.store.tables.outbox import Place

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 25
SECONDS: Final = 30.0
# The Bot API's download limit.
LARGEST_FILE: Final = 20 * 1024 * 1024
LONGEST_WAIT: Final = 30.0
_FILES: Final = ("document", "audio", "voice", "video", "video_note", "animation", "sticker")
_PHOTOS: Final = ("image/jpeg", "image/png", "image/webp")


class TelegramSettings(ChannelSettings, kw_only=True):
    token: str
    url: str = "https://api.telegram.org"


class TelegramChannel:
    longest_text = 4096
    files_apart = True
    repeatable = False
    trouble = ""

    def __init__(self, settings: TelegramSettings) -> None:
        self.settings = settings
        self._telegram: Any = None
        self._bot: Any = None
        self._me: Any = None
        self._opening = asyncio.Lock()

    async def _open(self) -> Any:
        """Return the library's bot, without calling Telegram."""
        async with self._opening:
            if self._bot is None:
                self._telegram = await load("telegram", "telegram.request", "telegram.error")
                base = self.settings.url.rstrip("/")
                self._bot = self._telegram.Bot(
                    self.settings.token,
                    base_url=f"{base}/bot",
                    base_file_url=f"{base}/file/bot",
                    request=self._request(SECONDS),
                    get_updates_request=self._request(POLL_SECONDS + 15.0),
                )
        return self._bot

    def _request(self, seconds: float) -> Any:
        return self._telegram.request.HTTPXRequest(
            connection_pool_size=16,
            read_timeout=seconds,
            write_timeout=SECONDS,
            media_write_timeout=2 * SECONDS,
            connect_timeout=10.0,
            pool_timeout=10.0,
        )

    # -- in ---------------------------------------------------------------------------------------------

    async def run(self, take: Take) -> None:
        bot = await self._open()
        offset, wait = 0, 1.0
        while True:
            try:
                if self._me is None:
                    self._me = await self._asked(bot.get_me())
                fields = {"offset": offset, "timeout": POLL_SECONDS, "allowed_updates": ["message"]}
                for update in await self._asked(bot.do_api_request("getUpdates", fields)):
                    try:
                        await self._take(take, self._telegram.Update.de_json(update, bot))
                    except (AttributeError, KeyError, TypeError, ValueError) as error:
                        log.warning("skipped a malformed Telegram update: %r", error)
                    offset = update["update_id"] + 1
                wait, self.trouble = 1.0, ""
            except (DeliveryError, ToolError) as error:
                self.trouble = str(error)
                log.warning("failed to read from Telegram; retrying in %g s: %s", wait, error)
                await asyncio.sleep(wait)
                wait = min(LONGEST_WAIT, wait * 2)

    async def _take(self, take: Take, update: Any) -> None:
        message = update.message
        if message is None or message.from_user is None or message.from_user.is_bot:
            return
        chat, sender = message.chat, message.from_user
        kind: PeerKind = "dm" if chat.type == "private" else "group"
        peer = str(chat.id)
        if message.is_topic_message:
            kind, peer = "thread", f"{peer}/{message.message_thread_id}"
        text = message.text or message.caption or ""
        name = f"@{self._me.username or ''}"
        answered = message.reply_to_message.from_user if message.reply_to_message else None
        replied = answered is not None and answered.id == self._me.id
        await take(
            Incoming(
                id=f"{chat.id}/{message.message_id}",
                peer=peer,
                peer_kind=kind,
                sender=str(sender.id),
                sender_name=sender.full_name,
                text=text.replace(name, "").strip() if len(name) > 1 else text,
                fetch=partial(self._files, message),
                mentioned=replied or (len(name) > 1 and name.lower() in text.lower()),
            )
        )

    async def _files(self, message: Any) -> list[Attachment]:
        found = [(file, kind) for kind in _FILES if (file := getattr(message, kind)) is not None]
        if message.photo:
            found.append((message.photo[-1], "photo.jpg"))
        files = []
        for file, kind in found:
            if (file.file_size or 0) > LARGEST_FILE:
                log.warning("skipped a Telegram attachment of %s bytes: too large", file.file_size)
                continue
            try:
                place = await self._asked(file.get_file())
                data = bytes(await self._asked(place.download_as_bytearray(), gone=True))
            except Undeliverable as error:
                log.warning("skipped a Telegram attachment: %s", error)
                continue
            name = getattr(file, "file_name", None) or (kind if "." in kind else place.file_path.rpartition("/")[2])
            mime = getattr(file, "mime_type", None) or ("image/jpeg" if kind == "photo.jpg" else None)
            files.append(Attachment(name, mime or "application/octet-stream", data))
        return files

    # -- out --------------------------------------------------------------------------------------------

    async def send(self, message: Outgoing) -> str | None:
        bot = await self._open()
        fields = self._place(message.place)
        if message.reply_to:
            fields["reply_parameters"] = self._telegram.ReplyParameters(
                _number(message.reply_to.rpartition("/")[2]), allow_sending_without_reply=True
            )
        if not message.attachments:
            sent = await self._asked(bot.send_message(text=message.text, **fields))
        else:
            (file,) = message.attachments
            given = self._telegram.InputFile(file.data, filename=file.name)
            if file.content_type in _PHOTOS:
                sent = await self._asked(bot.send_photo(photo=given, **fields))
            else:
                sent = await self._asked(bot.send_document(document=given, **fields))
        return f"{sent.chat.id}/{sent.message_id}"

    async def typing(self, place: Place) -> None:
        bot = await self._open()
        await self._asked(bot.send_chat_action(action="typing", **self._place(place)))

    def _place(self, place: Place) -> dict[str, Any]:
        chat, _, thread = place.peer.partition("/")
        fields: dict[str, Any] = {"chat_id": chat if chat.startswith("@") else _number(chat)}
        if thread:
            fields["message_thread_id"] = _number(thread)
        return fields

    async def _asked(self, request: Any, *, gone: bool = False) -> Any:
        """Return Telegram's response to a request. Raises DeliveryError.

        `gone`: a 404 means that the requested object is missing, not that the token is invalid.
        """
        try:
            return await request
        except self._telegram.error.TelegramError as error:
            if gone and isinstance(error, self._telegram.error.InvalidToken):
                raise Undeliverable("it is gone") from None
            raise self._worded(error) from None

    def _worded(self, error: Any) -> DeliveryError:
        """Convert a library error to a DeliveryError.

        The library does not retry, so the error describes the only attempt.
        """
        errors = self._telegram.error
        text = f"{error}".replace(self.settings.token, "***")
        if isinstance(error, errors.RetryAfter):
            after = error.retry_after
            return TryLater(text, float(after if isinstance(after, int | float) else after.total_seconds()))
        if isinstance(error, errors.BadRequest | errors.Forbidden | errors.ChatMigrated):
            return Undeliverable(text)
        cause = type(error.__cause__).__name__
        if cause in ("ConnectError", "ConnectTimeout", "PoolTimeout"):
            return TryLater(f"the service cannot be reached: {text}")
        lost = error.__cause__ is not None and not isinstance(error.__cause__, errors.TelegramError)
        if lost or isinstance(error, errors.TimedOut) or "Gateway Time" in text:
            return Unsure(f"the connection broke: {text}")
        return TryLater(text)  # a Telegram failure, or a token that the owner can correct

    async def close(self) -> None:
        bot, self._bot = self._bot, None
        if bot is not None:
            with contextlib.suppress(Exception):
                await bot.shutdown()


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise Undeliverable(f"{text!r} is not an id of Telegram: a number, or @name for a channel") from None


CHANNEL = ChannelKind(TelegramSettings, TelegramChannel)
