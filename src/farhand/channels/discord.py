"""Discord: the gateway socket in, the HTTP interface out. Needs the extra `discord` (the library websockets).

A lost socket is resumed where it broke off, so that what was said meanwhile is heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import logging
import random
from typing import Any, Final

import msgspec

from farhand.channels.service import Service
from farhand.gateway.channel import Attachment, ChannelSettings, DeliveryError, Incoming, Outgoing, Refused, Take
from farhand.protocol.errors import ToolError
from farhand.store.outbox import Place

log = logging.getLogger("farhand.channels.discord")

INTENTS: Final = 1 << 9 | 1 << 12 | 1 << 15
"""Messages in servers, direct messages, what they say."""
LONGEST_WAIT: Final = 60.0
LARGEST_FILE: Final = 25 * 1024 * 1024
DISPATCH, HEARTBEAT, IDENTIFY, RESUME, RECONNECT, INVALID, HELLO, ACK = 0, 1, 2, 6, 7, 9, 10, 11


class DiscordSettings(ChannelSettings, kw_only=True):
    token: str
    url: str = "https://discord.com/api/v10"


class _Lost(Exception):
    """The socket has to be opened again."""


class DiscordChannel:
    longest_text = 2000
    files_apart = True
    repeatable = False

    def __init__(self, settings: DiscordSettings) -> None:
        self.settings = settings
        self._service = Service(settings.url, {"Authorization": f"Bot {settings.token}"})
        self._files = Service("")
        self._direct: dict[str, str] = {}
        """The direct channel of each person."""
        self._me = ""
        self._sequence: int | None = None
        self._session = ""
        self._resume_url = ""

    # -- in ---------------------------------------------------------------------------------------------

    async def run(self, take: Take) -> None:
        sockets = await asyncio.to_thread(importlib.import_module, "websockets")
        wait = 1.0
        while True:
            try:
                url = self._resume_url or (await self._service.call("GET", "/gateway/bot"))["url"]
                async with sockets.connect(f"{url}?v=10&encoding=json", max_size=None) as socket:
                    wait = 1.0
                    await self._listen(socket, take)
            except (DeliveryError, ToolError, OSError, _Lost, sockets.WebSocketException) as error:
                if getattr(getattr(error, "rcvd", None), "code", 0) in (4007, 4009):
                    self._forget_session()
                log.warning("Discord is not connected (again in %g s): %s", wait, error)
            await asyncio.sleep(wait * random.uniform(0.8, 1.2))  # noqa: S311
            wait = min(LONGEST_WAIT, wait * 2)

    async def _listen(self, socket: Any, take: Take) -> None:
        hello = await _receive(socket)
        beating = asyncio.get_running_loop().create_task(self._beat(socket, hello["d"]["heartbeat_interval"] / 1000))
        try:
            if self._session:
                known = {"token": self.settings.token, "session_id": self._session, "seq": self._sequence}
                await _send(socket, RESUME, known)
            else:
                properties = {"os": "linux", "browser": "farhand", "device": "farhand"}
                who = {"token": self.settings.token, "intents": INTENTS, "properties": properties}
                await _send(socket, IDENTIFY, who)
            while True:
                event = await _receive(socket)
                match event["op"]:
                    case 0:
                        await self._dispatch(event, take)
                        self._sequence = event["s"]
                    case 1:
                        await _send(socket, HEARTBEAT, self._sequence)
                    case 7:
                        raise _Lost("it asked to be connected again")
                    case 9:
                        if not event.get("d"):
                            self._forget_session()
                        raise _Lost("the session is over")
        finally:
            beating.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await beating

    def _forget_session(self) -> None:
        self._session, self._resume_url, self._sequence = "", "", None

    async def _beat(self, socket: Any, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            await _send(socket, HEARTBEAT, self._sequence)

    async def _dispatch(self, event: dict[str, Any], take: Take) -> None:
        data = event["d"]
        if event["t"] == "READY":
            self._me = data["user"]["id"]
            self._session = data["session_id"]
            self._resume_url = data.get("resume_gateway_url") or ""
        elif event["t"] == "MESSAGE_CREATE" and not data["author"].get("bot"):
            try:
                await self._take(data, take)
            except (AttributeError, KeyError, TypeError) as error:
                log.warning("a message of Discord was left out: %r", error)

    async def _take(self, data: dict[str, Any], take: Take) -> None:
        author = data["author"]
        direct = not data.get("guild_id")
        text = data.get("content") or ""
        mentioned = any(one.get("id") == self._me for one in data.get("mentions", []))
        for form in (f"<@{self._me}>", f"<@!{self._me}>"):
            text = text.replace(form, "")
        if direct:
            self._direct[author["id"]] = data["channel_id"]
        files = []
        for file in data.get("attachments", []):
            with contextlib.suppress(Refused):  # too large, or gone
                content = await self._files.fetch(file["url"], largest=LARGEST_FILE)
                files.append(
                    Attachment(file["filename"], file.get("content_type") or "application/octet-stream", content)
                )
        await take(
            Incoming(
                id=data["id"],
                peer=author["id"] if direct else data["channel_id"],
                peer_kind="dm" if direct else "channel",
                sender=author["id"],
                sender_name=author.get("global_name") or author.get("username") or "",
                text=text.strip(),
                attachments=tuple(files),
                mentioned=mentioned or (data.get("referenced_message") or {}).get("author", {}).get("id") == self._me,
            )
        )

    # -- out --------------------------------------------------------------------------------------------

    async def send(self, message: Outgoing) -> str | None:
        channel = await self._channel(message.place)
        fields: dict[str, Any] = {
            "content": message.text,
            "nonce": hashlib.sha256(message.id.encode()).hexdigest()[:25],
            "enforce_nonce": True,
            "allowed_mentions": {"parse": []},
        }
        if message.reply_to:
            fields["message_reference"] = {"message_id": message.reply_to, "fail_if_not_exists": False}
        if message.attachments:
            (file,) = message.attachments
            form = {"payload_json": msgspec.json.encode(fields).decode()}
            files = {"files[0]": (file.name, file.data, file.content_type)}
            answer = await self._service.call("POST", f"/channels/{channel}/messages", data=form, files=files)
        else:
            answer = await self._service.call("POST", f"/channels/{channel}/messages", json=fields)
        return str(answer["id"]) if isinstance(answer, dict) and "id" in answer else None

    async def typing(self, place: Place) -> None:
        await self._service.call("POST", f"/channels/{await self._channel(place)}/typing")

    async def _channel(self, place: Place) -> str:
        if not place.peer.isdecimal():
            raise Refused(f"{place.peer!r} is not an id of Discord: a number")
        if place.peer_kind != "dm":
            return place.peer
        if place.peer not in self._direct:
            opened = await self._service.call("POST", "/users/@me/channels", json={"recipient_id": place.peer})
            self._direct[place.peer] = str(opened["id"])
        return self._direct[place.peer]

    async def close(self) -> None:
        await self._service.close()
        await self._files.close()


async def _receive(socket: Any) -> dict[str, Any]:
    event = msgspec.json.decode(await socket.recv())
    if not isinstance(event, dict) or "op" not in event:
        raise _Lost("it sent something that is no event")
    return event


async def _send(socket: Any, op: int, data: Any) -> None:
    await socket.send(msgspec.json.encode({"op": op, "d": data}).decode())
