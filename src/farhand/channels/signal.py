"""Connect to Signal through the signal-cli daemon (`signal-cli -a NUMBER daemon --http`): events in, JSON-RPC out."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import uuid
from functools import partial
from typing import Any, Final

import msgspec

from farhand.channels.http_client import Service
from farhand.channels.retry import fetch_file, until_stored
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
)
from farhand.store.tables.outbox import Place

log = logging.getLogger(__name__)

LONGEST_WAIT: Final = 10.0
LARGEST_FILE: Final = 8 * 1024 * 1024
PLACEHOLDER: Final = "\ufffc"
# Permanent signal-cli errors: the number does not exist, or the request is invalid.
_REFUSED: Final = (-1, -32600, -32601, -32602, -32700)


class SignalSettings(ChannelSettings, kw_only=True):
    # The agent's own number, as registered with signal-cli.
    number: str
    url: str = "http://127.0.0.1:8080"


class SignalChannel:
    longest_text = 2000
    files_apart = True
    repeatable = False
    trouble = ""

    def __init__(self, settings: SignalSettings) -> None:
        self.settings = settings
        self._service = Service(settings.url)

    # -- in ---------------------------------------------------------------------------------------------

    async def run(self, take: Take) -> None:
        wait = 1.0
        while True:
            try:
                path = f"/api/v1/events?account={self.settings.number.replace('+', '%2B')}"
                async with await self._service.stream(path) as response:
                    if response.status_code != 200:
                        raise TryLater(f"signal-cli answered {response.status_code}")
                    wait, self.trouble = 1.0, ""
                    async for line in response.aiter_lines():
                        if line.startswith("data:"):
                            await self._take(take, line[5:])
                log.info("signal-cli closed the stream of events")
            except (DeliveryError, self._service.broken) as error:
                self.trouble = str(error)
                log.warning("failed to read from signal-cli; retrying in %g s: %s", wait, error)
            await asyncio.sleep(wait)
            wait = min(LONGEST_WAIT, wait * 2)

    async def _take(self, take: Take, data: str) -> None:
        try:
            event = msgspec.json.decode(data)
            await until_stored(partial(self._read, take, event), "Signal")
        except (msgspec.DecodeError, AttributeError, KeyError, TypeError) as error:
            log.warning("skipped a malformed signal-cli event: %r", error)

    async def _read(self, take: Take, event: dict[str, Any]) -> None:
        event = event.get("params", event)
        envelope = event.get("envelope", event)
        said = envelope.get("dataMessage")
        source = envelope.get("sourceNumber") or envelope.get("sourceUuid") or envelope.get("source")
        if not isinstance(said, dict) or not source or source == self.settings.number:
            return
        group = (said.get("groupInfo") or {}).get("groupId")
        text, mentioned = self._words(said)
        await take(
            Incoming(
                id=f"{said.get('timestamp') or envelope.get('timestamp')}:{source}",
                peer=group or source,
                peer_kind="group" if group else "dm",
                sender=source,
                sender_name=envelope.get("sourceName") or "",
                text=text,
                fetch=partial(self._files, said, group, source),
                mentioned=mentioned or (said.get("quote") or {}).get("authorNumber") == self.settings.number,
            )
        )

    def _words(self, said: dict[str, Any]) -> tuple[str, bool]:
        text = said.get("message") or ""
        mentioned = False
        for mention in said.get("mentions") or []:
            own = mention.get("number") == self.settings.number
            mentioned = mentioned or own
            text = text.replace(PLACEHOLDER, "" if own else f"@{mention.get('name') or mention.get('number')}", 1)
        return text.strip(), mentioned

    async def _files(self, said: dict[str, Any], group: str | None, source: str) -> list[Attachment]:
        where = {"groupId": group} if group else {"recipient": source}
        found = [await fetch_file(partial(self._file, file, where), "Signal") for file in said.get("attachments") or []]
        return [file for file in found if file is not None]

    async def _file(self, file: dict[str, Any], where: dict[str, str]) -> Attachment:
        if (file.get("size") or 0) > LARGEST_FILE:
            raise Undeliverable(f"the file has {file['size']} bytes, the limit is {LARGEST_FILE}")
        answer = await self._call("getAttachment", {"id": file["id"], **where})
        content = answer.get("data") if isinstance(answer, dict) else answer
        try:
            data = base64.b64decode(content or "", validate=True)
        except binascii.Error as error:
            raise Undeliverable(f"the file is not base64: {error}") from None
        return Attachment(file.get("filename") or file["id"], file.get("contentType") or "", data)

    # -- out --------------------------------------------------------------------------------------------

    async def send(self, message: Outgoing) -> str | None:
        fields: dict[str, Any] = {**self._place(message.place), "message": message.text}
        if message.reply_to and ":" in message.reply_to:
            moment, _, author = message.reply_to.partition(":")
            if moment.isdecimal():
                fields |= {"quoteTimestamp": int(moment), "quoteAuthor": author}
        if message.attachments:
            fields["attachments"] = [_data_url(file) for file in message.attachments]
        answer = await self._call("send", fields)
        sent_at = answer.get("timestamp") if isinstance(answer, dict) else None
        return f"{sent_at}:{self.settings.number}" if sent_at else None

    async def typing(self, place: Place) -> None:
        await self._call("sendTyping", self._place(place))

    def _place(self, place: Place) -> dict[str, Any]:
        return {"recipient": [place.peer]} if place.peer_kind == "dm" else {"groupId": place.peer}

    async def _call(self, method: str, fields: dict[str, Any]) -> Any:
        asked = {
            "jsonrpc": "2.0",
            "id": str(uuid.uuid4()),
            "method": method,
            "params": {"account": self.settings.number, **fields},
        }
        answer = await self._service.call("POST", "/api/v1/rpc", json=asked, seconds=60.0)
        if not isinstance(answer, dict):
            raise Undeliverable(f"signal-cli answered {method} with something that is not JSON-RPC")
        if error := answer.get("error"):
            text = f"signal-cli: {str(error.get('message'))[:300]}"
            raise Undeliverable(text) if error.get("code") in _REFUSED else TryLater(text)
        return answer.get("result")

    async def close(self) -> None:
        await self._service.close()


def _data_url(file: Attachment) -> str:
    name = file.name.replace(";", "_").replace(",", "_")
    return f"data:{file.content_type};filename={name};base64,{base64.b64encode(file.data).decode()}"


CHANNEL = ChannelKind(SignalSettings, SignalChannel)
