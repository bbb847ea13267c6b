"""Chat services for the contract suite of channels: each can be written to, read, made to fail, stopped and started."""

from __future__ import annotations

import asyncio
import base64
import email.message
import email.utils
import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

from farhand.gateway.messaging.channel import (
    Channel,
    DeliveryError,
    PostedChannel,
    TryLater,
    Undeliverable,
)
from farhand.protocol.errors import InvalidArgs, NotAllowed, ToolError
from farhand.store.tables.outbox import Place
from tests.support.channel_servers import (
    Answer,
    DiscordServer,
    SignalServer,
    TelegramServer,
    WebhookReceiver,
    WhatsAppServer,
)
from tests.support.harness import wait_until
from tests.support.mail_server import DOMAIN, PASSWORD, MailServer

FILE = ("note.txt", "text/plain", b"some bytes")


class ChannelDouble:
    """A chat service as the contract suite uses it; also the description of what the service can do."""

    kind: str
    # Whether people can write to the agent.
    receives = True
    # Whether it posts to the gateway, so that the channel has no connection of its own to recover.
    posts = False
    # Whether it can be stopped, and then no longer receives or sends.
    stops = True
    # What a message that the service rejects permanently, limits or loses is reported as; None if it cannot happen.
    refused: type[DeliveryError] | None = Undeliverable
    limited: type[DeliveryError] | None = TryLater
    loses = True
    # Whether messages may have files; if not, they are refused.
    files = True
    # Whether the service has events that are not messages of a person.
    noisy = True
    # A recipient, and an id that the service does not know; None if every text is an id.
    peer = "7"
    bad_peer: str | None = None
    # What must not occur in errors.
    secret = "no secret"

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the service for good."""

    def settings(self) -> dict[str, Any]:
        """Return the table `[channels.NAME]`."""
        return {}

    async def write(self, channel: Channel, text: str, file: tuple[str, str, bytes] | None = None) -> None:
        """Write to the agent as `peer`; a service that posts does so until the post is accepted."""
        raise NotImplementedError

    async def noise(self, channel: Channel) -> None:
        """Send events that are not messages of a person, and malformed ones."""

    def sent(self) -> list[tuple[str, str, list[bytes]]]:
        """Return what the agent sent: to whom, the text, the files."""
        raise NotImplementedError

    def refuse(self) -> None:
        """Reject the next message permanently."""

    def limit(self) -> None:
        """Reject the next message because there are too many."""

    def lose(self) -> None:
        """Hang up in the middle of the next message."""

    def stop(self) -> None:
        raise NotImplementedError

    def start(self) -> None:
        raise NotImplementedError

    def place(self, peer: str | None = None) -> Place:
        return Place(self.kind, "default", self.peer if peer is None else peer)


class _HttpDouble(ChannelDouble):
    service: Any

    def __enter__(self) -> Any:
        self.service.up()
        return self

    def close(self) -> None:
        self.service.__exit__()

    def stop(self) -> None:
        self.service.down()

    def start(self) -> None:
        self.service.up()


class TelegramDouble(_HttpDouble):
    kind = "telegram"
    bad_peer = "../alice"
    secret = TelegramServer.TOKEN

    def __init__(self) -> None:
        self.service = TelegramServer()

    def settings(self) -> dict[str, Any]:
        return {"token": self.service.TOKEN, "url": self.service.url}

    async def write(self, channel: Channel, text: str, file: tuple[str, str, bytes] | None = None) -> None:
        if file is None:
            self.service.write(7, text)
            return
        self.service.files["f1"] = file[2]
        document = {"file_id": "f1", "file_unique_id": "u1", "file_name": file[0], "mime_type": file[1]}
        self.service.write(7, "", caption=text, document=document)

    async def noise(self, channel: Channel) -> None:
        self.service.write(7, "odd", chat={"nothing": 1})
        self.service.write(7, "", document={"file_id": "gone"})

    def sent(self) -> list[tuple[str, str, list[bytes]]]:
        return [(one.to, one.text, [one.more["file"][1]] if "file" in one.more else []) for one in self.service.said]

    def refuse(self) -> None:
        said = {"ok": False, "error_code": 403, "description": f"Forbidden: blocked {self.secret}"}
        self.service.failures.append((403, said))

    def limit(self) -> None:
        said = {"ok": False, "error_code": 429, "description": "Too Many Requests", "parameters": {"retry_after": 7}}
        self.service.failures.append((429, said))

    def lose(self) -> None:
        self.service.failures.append(None)


class SignalDouble(_HttpDouble):
    kind = "signal"
    peer = "+15551112222"

    def __init__(self) -> None:
        self.service = SignalServer()

    def settings(self) -> dict[str, Any]:
        return {"number": self.service.NUMBER, "url": self.service.url}

    async def write(self, channel: Channel, text: str, file: tuple[str, str, bytes] | None = None) -> None:
        files = []
        if file is not None:
            self.service.files["a1"] = file[2]
            files = [{"id": "a1", "filename": file[0], "contentType": file[1], "size": len(file[2])}]
        self.service.write(self.peer, text, attachments=files)

    async def noise(self, channel: Channel) -> None:
        self.service.raw("nonsense")
        self.service.raw({"envelope": {"source": self.peer, "receiptMessage": {}}})
        self.service.write(self.service.NUMBER, "the agent's own words")

    def sent(self) -> list[tuple[str, str, list[bytes]]]:
        return [
            (
                one.to,
                one.text,
                [base64.b64decode(url.partition("base64,")[2]) for url in one.more.get("attachments", [])],
            )
            for one in self.service.said
        ]

    def refuse(self) -> None:
        self.service.errors.append({"code": -1, "message": "Unregistered user"})

    def limit(self) -> None:
        self.service.errors.append({"code": -5, "message": "Rate limit reached"})

    def lose(self) -> None:
        self.service.failures.append(None)


class DiscordDouble(_HttpDouble):
    kind = "discord"
    peer = "31"
    bad_peer = "alice"
    secret = DiscordServer.TOKEN

    def __init__(self) -> None:
        self.service = DiscordServer()

    def settings(self) -> dict[str, Any]:
        return {"token": self.service.TOKEN, "url": self.service.url}

    async def write(self, channel: Channel, text: str, file: tuple[str, str, bytes] | None = None) -> None:
        files = []
        if file is not None:
            self.service.files[file[0]] = file[2]
            url = f"{self.service.url}/cdn/{file[0]}"
            files = [{"id": "5", "filename": file[0], "url": url, "size": len(file[2]), "content_type": file[1]}]
        self.service.write(self.peer, text, attachments=files)

    async def noise(self, channel: Channel) -> None:
        self.service.write("33", "a bot", bot=True)
        self.service.write(self.peer, "odd", mentions=[5])

    def stop(self) -> None:
        super().stop()
        self.service.cut()

    def sent(self) -> list[tuple[str, str, list[bytes]]]:
        return [
            (one.to.removeprefix("9"), one.text, [one.more["file"][1]] if one.more.get("file") else [])
            for one in self.service.said
        ]

    def refuse(self) -> None:
        self.service.failures.append((403, {"message": "Cannot send messages to this user", "code": 50007}))

    def limit(self) -> None:
        limit = {"message": "You are being rate limited.", "retry_after": 600.0, "global": False}
        headers = {"content-type": "application/json", "retry-after": "600", "x-ratelimit-scope": "user"}
        self.service.failures.append((429, limit, headers))

    def lose(self) -> None:
        self.service.failures.append(None)


class _PostingDouble(_HttpDouble):
    """A service that posts to the gateway, which passes the posts to the channel's handler."""

    posts = True

    def encode(self, text: str, file: tuple[str, str, bytes] | None) -> tuple[dict[bytes, bytes], bytes]:
        raise NotImplementedError

    async def write(self, channel: Channel, text: str, file: tuple[str, str, bytes] | None = None) -> None:
        headers, body = self.encode(text, file)
        await self.post(channel, headers, body)

    async def post(self, channel: Channel, headers: dict[bytes, bytes], body: bytes) -> None:
        assert isinstance(channel, PostedChannel)
        handler = channel.post_handler()
        while True:
            try:
                await handler.receive(headers, body)
                return
            except (InvalidArgs, NotAllowed):
                return
            except ToolError:
                await asyncio.sleep(0.01)

    async def noise(self, channel: Channel) -> None:
        headers, body = self.encode("hello", None)
        await self.post(channel, headers, body + b" ")  # not what was signed
        await self.post(channel, {}, body)


class WebhookDouble(_PostingDouble):
    kind = "webhook"
    # The receiver may be corrected, so its refusals are repeated.
    refused = TryLater
    secret = "webhook-secret"

    def __init__(self) -> None:
        self._failures: list[Answer] = []
        self._number = 0
        self.service = WebhookReceiver(lambda _: self._failures.pop(0) if self._failures else "take")

    def settings(self) -> dict[str, Any]:
        return {"secret": self.secret, "url": f"{self.service.url}/messages"}

    def encode(self, text: str, file: tuple[str, str, bytes] | None) -> tuple[dict[bytes, bytes], bytes]:
        self._number += 1
        media = []
        if file is not None:
            media = [{"name": file[0], "contentType": file[1], "data": base64.b64encode(file[2]).decode()}]
        body = json.dumps({"id": f"m{self._number}", "sender": self.peer, "text": text, "media": media}).encode()
        digest = hmac.new(self.secret.encode(), body, hashlib.sha256).hexdigest()
        return {b"x-webhook-signature": f"sha256={digest}".encode()}, body

    def sent(self) -> list[tuple[str, str, list[bytes]]]:
        return [
            (one["to"], one["text"], [base64.b64decode(file["data"]) for file in one["media"]])
            for one in self.service.taken
        ]

    def refuse(self) -> None:
        self._failures.append((403, {"error": "no"}))

    def limit(self) -> None:
        self._failures.append((429, {}, {"retry-after": "7"}))

    def lose(self) -> None:
        self._failures.append(None)


class WhatsAppDouble(_PostingDouble):
    kind = "whatsapp"
    peer = "+491701234567"
    secret = WhatsAppServer.TOKEN

    def __init__(self) -> None:
        self.service = WhatsAppServer()
        self._number = 0

    def settings(self) -> dict[str, Any]:
        service = self.service
        keys = {"phone_id": service.PHONE, "token": service.TOKEN, "app_secret": service.APP_SECRET}
        return {**keys, "verify_token": service.VERIFY, "url": service.url}

    def encode(self, text: str, file: tuple[str, str, bytes] | None) -> tuple[dict[bytes, bytes], bytes]:
        self._number += 1
        message: dict[str, Any] = {"from": self.peer[1:], "id": f"wamid.{self._number}", "type": "text"}
        if file is None:
            message["text"] = {"body": text}
        else:
            self.service.files["m1"] = file[2]
            document = {"id": "m1", "mime_type": file[1], "filename": file[0], "caption": text}
            message |= {"type": "document", "document": document}
        return self.service.notification(message)

    def sent(self) -> list[tuple[str, str, list[bytes]]]:
        found = []
        for one in self.service.said:
            media = one.more.get("document") or one.more.get("image")
            found.append((f"+{one.to}", one.text, [self.service.uploads[media["id"]][1]] if media else []))
        return found

    def refuse(self) -> None:
        error = {"code": 131026, "message": "Message undeliverable", "error_data": {"details": "no"}}
        self.service.failures.append((400, {"error": error}))

    def limit(self) -> None:
        self.service.failures.append((429, {"error": {"code": 130429, "message": "Rate limit hit"}}))

    def lose(self) -> None:
        self.service.failures.append(None)


class EmailDouble(ChannelDouble):
    """A real mail server; it neither limits nor loses messages."""

    kind = "email"
    limited = None
    loses = False
    stops = False
    peer = f"ann@{DOMAIN}"
    bad_peer = "not an address"
    secret = PASSWORD
    server: MailServer
    _box = 0

    def __init__(self) -> None:
        # Tests share the server: each writes to an address of its own.
        EmailDouble._box += 1
        self._agent = f"agent{EmailDouble._box}@{DOMAIN}"
        self.peer = f"ann{EmailDouble._box}@{DOMAIN}"

    def settings(self) -> dict[str, Any]:
        where = {"imap_host": "localhost", "imap_port": self.server.imap_port, "smtp_port": self.server.smtp_port}
        trust = {"ca_file": str(self.server.ca_file), "password": PASSWORD}
        return {"address": self._agent, **where, **trust, "poll_seconds": 3600.0}

    async def write(self, channel: Channel, text: str, file: tuple[str, str, bytes] | None = None) -> None:
        await asyncio.to_thread(self._write, text, file)

    def _write(self, text: str, file: tuple[str, str, bytes] | None, **headers: str) -> None:
        mail = email.message.EmailMessage()
        mail["From"], mail["To"] = self.peer, self._agent
        mail["Message-ID"] = email.utils.make_msgid(domain=DOMAIN)
        for name, value in headers.items():
            mail[name.replace("_", "-")] = value
        mail.set_content(text)
        if file is not None:
            mail.add_attachment(file[2], maintype="application", subtype="octet-stream", filename=file[0])
        self.server.hand_over(mail)
        # The server may deliver mails in another order than it accepts them.
        box = self._agent.partition("@")[0]
        arrived = lambda: any(one["Message-ID"] == mail["Message-ID"] for one in self.server.inbox(box))  # noqa: E731
        wait_until(arrived, 60, "the mail in the agent's mailbox")

    async def noise(self, channel: Channel) -> None:
        await asyncio.to_thread(lambda: self._write("automatic", None, Auto_Submitted="auto-replied"))

    def sent(self) -> list[tuple[str, str, list[bytes]]]:
        return [
            (
                str(mail["To"]),
                str(mail.get_body(("plain",)).get_content()).replace("\r\n", "\n").removesuffix("\n"),
                [file.get_payload(decode=True) for file in mail.iter_attachments()],
            )
            for mail in self.server.inbox(self.peer.partition("@")[0])
        ]

    def refuse(self) -> None:
        self.peer = "ann@elsewhere.invalid"


class NotebookDouble(ChannelDouble):
    """The file of the channel in `examples/plugin_package`."""

    kind = "notebook"
    files = False
    receives = False
    noisy = False
    refused = limited = None
    loses = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "notebook"
        self.start()

    def settings(self) -> dict[str, Any]:
        return {"path": str(self._folder / "notes")}

    def sent(self) -> list[tuple[str, str, list[bytes]]]:
        lines = [json.loads(line) for line in (self._folder / "notes").read_text().splitlines()]
        return [(one["to"], one["text"], []) for one in lines]

    def stop(self) -> None:
        self._folder.rename(self._folder.with_suffix(".away"))

    def start(self) -> None:
        away = self._folder.with_suffix(".away")
        away.rename(self._folder) if away.exists() else self._folder.mkdir()


class ConsoleDouble(ChannelDouble):
    """The gateway itself: messages stay in the outbox, so there is nothing to read here."""

    kind = "console"
    receives = False
    noisy = False
    stops = False
    refused = limited = None
    loses = False

    def sent(self) -> list[tuple[str, str, list[bytes]]]:
        return []
