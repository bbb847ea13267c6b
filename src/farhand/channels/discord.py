"""Connect to Discord with hikari (the extra `discord`): receive from the gateway socket, send over HTTP.

The library resumes a lost socket where it broke off, so no message is missed in between. Messages are handled one at a
time, in order of arrival, and each is retried until it is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
from functools import partial
from typing import Any, Final

from farhand.channels.http_client import Service, read_failure
from farhand.channels.library import load
from farhand.channels.retry import fetch_file, until_stored
from farhand.gateway.messaging.channel import (
    Attachment,
    ChannelKind,
    ChannelSettings,
    Incoming,
    Outgoing,
    Take,
    TryLater,
    Undeliverable,
    Unsure,
)
from farhand.store.tables.outbox import Place

log = logging.getLogger(__name__)

# Server messages, direct messages, message content.
INTENTS: Final = 1 << 9 | 1 << 12 | 1 << 15
LONGEST_WAIT: Final = 60.0
MOST_WAITING: Final = 1000
# The library waits out rate limits shorter than this. A rate-limited request was not executed.
LONGEST_LIMIT: Final = 20.0
LARGEST_FILE: Final = 25 * 1024 * 1024


class DiscordSettings(ChannelSettings, kw_only=True):
    token: str
    url: str = "https://discord.com/api/v10"


class DiscordChannel:
    longest_text = 2000
    files_apart = True
    repeatable = False
    trouble = ""

    def __init__(self, settings: DiscordSettings) -> None:
        self.settings = settings
        self._hikari: Any = None
        self._app: Any = None
        self._rest: Any = None
        self._opening = asyncio.Lock()
        self._files = Service("")
        # The direct message channel of each user.
        self._direct: dict[str, str] = {}
        self._me = ""

    async def _open(self) -> Any:
        """Return the library's HTTP client.

        Its own retries are off, because Discord would post a repeated message twice.
        """
        async with self._opening:
            if self._rest is None:
                self._hikari = await load("hikari")
                timeouts = self._hikari.impl.HTTPTimeoutSettings(request_socket_connect=10.0, request_socket_read=30.0)
                self._app = self._hikari.RESTApp(
                    url=self.settings.url.rstrip("/"),
                    max_retries=0,
                    max_rate_limit=LONGEST_LIMIT,
                    http_settings=self._hikari.impl.HTTPSettings(timeouts=timeouts),
                )
                await self._app.start()
                self._rest = self._app.acquire(self.settings.token, "Bot")
                self._rest.start()
        return self._rest

    # -- in ---------------------------------------------------------------------------------------------

    async def run(self, take: Take) -> None:
        await self._open()
        said: asyncio.Queue[dict[str, Any]] = asyncio.Queue(MOST_WAITING)
        taking = asyncio.get_running_loop().create_task(self._take_all(said, take))
        wait = 1.0
        try:
            while True:
                bot = self._listener(said)
                try:
                    await bot.start(check_for_updates=False)
                    wait, self.trouble = 1.0, ""
                    await bot.join()
                except (self._hikari.HikariError, OSError, TimeoutError, KeyError, ValueError) as error:
                    self.trouble = str(error)
                    log.warning("failed to connect to Discord; retrying in %g s: %s", wait, error)
                finally:
                    with contextlib.suppress(self._hikari.HikariError, OSError):
                        await bot.close()
                await asyncio.sleep(wait * random.uniform(0.8, 1.2))  # noqa: S311
                wait = min(LONGEST_WAIT, wait * 2)
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)

    def _listener(self, said: asyncio.Queue[dict[str, Any]]) -> Any:
        """Return the library's gateway socket client, which puts received messages into `said`."""
        hikari = self._hikari
        bot = hikari.GatewayBot(
            self.settings.token,
            banner=None,
            logs=None,
            suppress_optimization_warning=True,
            intents=hikari.Intents(INTENTS),
            auto_chunk_members=False,
            cache_settings=hikari.impl.CacheSettings(components=hikari.api.CacheComponents.NONE),
            rest_url=self.settings.url.rstrip("/"),
        )

        async def heard(event: Any) -> None:
            if event.name == "READY":
                self._me = event.payload["user"]["id"]
            elif event.name == "MESSAGE_CREATE":
                await said.put(dict(event.payload))

        bot.subscribe(hikari.ShardPayloadEvent, heard)
        return bot

    async def _take_all(self, said: asyncio.Queue[dict[str, Any]], take: Take) -> None:
        while True:
            data = await said.get()
            try:
                if not data["author"].get("bot"):
                    await until_stored(partial(self._take, data, take), "Discord")
            except (AttributeError, KeyError, TypeError) as error:
                log.warning("skipped a malformed Discord message: %r", error)

    async def _take(self, data: dict[str, Any], take: Take) -> None:
        author = data["author"]
        direct = not data.get("guild_id")
        text = data.get("content") or ""
        mentioned = any(one.get("id") == self._me for one in data.get("mentions", []))
        for form in (f"<@{self._me}>", f"<@!{self._me}>"):
            text = text.replace(form, "")
        if direct:
            self._direct[author["id"]] = data["channel_id"]
        await take(
            Incoming(
                id=data["id"],
                peer=author["id"] if direct else data["channel_id"],
                peer_kind="dm" if direct else "channel",
                sender=author["id"],
                sender_name=author.get("global_name") or author.get("username") or "",
                text=text.strip(),
                fetch=partial(self._attachments, data.get("attachments", [])),
                mentioned=mentioned or (data.get("referenced_message") or {}).get("author", {}).get("id") == self._me,
            )
        )

    async def _attachments(self, files: list[dict[str, Any]]) -> list[Attachment]:
        found = [await fetch_file(partial(self._fetch, file), "Discord") for file in files]
        return [file for file in found if file is not None]

    async def _fetch(self, file: dict[str, Any]) -> Attachment:
        content = await self._files.fetch(file["url"], largest=LARGEST_FILE)
        return Attachment(file["filename"], file.get("content_type") or "application/octet-stream", content)

    # -- out --------------------------------------------------------------------------------------------

    async def send(self, message: Outgoing) -> str | None:
        rest = await self._open()
        channel = await self._channel(message.place)
        more: dict[str, Any] = {}
        if message.reply_to:
            more |= {"reply": _number(message.reply_to), "reply_must_exist": False}
        if message.attachments:
            (file,) = message.attachments
            more["attachment"] = self._hikari.Bytes(file.data, file.name, mimetype=file.content_type)
        sent = await self._asked(
            rest.create_message(
                channel,
                message.text or self._hikari.UNDEFINED,
                nonce=hashlib.sha256(message.id.encode()).hexdigest()[:25],
                mentions_everyone=False,
                user_mentions=False,
                role_mentions=False,
                **more,
            )
        )
        return str(sent.id)

    async def typing(self, place: Place) -> None:
        rest = await self._open()
        await self._asked(rest.trigger_typing(await self._channel(place)))

    async def _channel(self, place: Place) -> int:
        peer = _number(place.peer)
        if place.peer_kind != "dm":
            return peer
        if place.peer not in self._direct:
            rest = await self._open()
            opened = await self._asked(rest.create_dm_channel(peer))
            self._direct[place.peer] = str(opened.id)
        return int(self._direct[place.peer])

    async def _asked(self, request: Any) -> Any:
        """Return Discord's response to a request. Raises DeliveryError."""
        errors = self._hikari.errors
        try:
            return await request
        except errors.RateLimitTooLongError as error:
            raise TryLater(str(error), float(error.retry_after)) from None
        except errors.HTTPResponseError as error:
            raise read_failure(int(error.status), f"{int(error.status)}: {error.message or error}") from None
        except errors.HTTPError as error:
            cause = type(error.__cause__).__name__
            if "Connector" in cause or cause == "ConnectionTimeoutError":
                raise TryLater(f"the service cannot be reached: {error}") from None
            raise Unsure(f"the connection broke: {cause} {error}") from None

    async def close(self) -> None:
        rest, self._rest = self._rest, None
        if rest is not None:
            await rest.close()
            await self._app.close()
        await self._files.close()


def _number(text: str) -> int:
    if not text.isdecimal():
        raise Undeliverable(f"{text!r} is not an id of Discord: a number")
    return int(text)


CHANNEL = ChannelKind(DiscordSettings, DiscordChannel)
