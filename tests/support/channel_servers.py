"""Chat services over real sockets, as far as the adapters use them. Each keeps what it received."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.server
import json
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import websockets.exceptions
import websockets.sync.server

from tests.support.harness import GatewayProcess, free_port


class Request:
    """One HTTP request as it came in."""

    def __init__(self, method: str, target: str, headers: dict[str, str], body: bytes) -> None:
        parts = urlsplit(target)
        self.method = method
        self.path = unquote(parts.path)
        self.query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def fields(self) -> dict[str, Any]:
        """The parameters, as JSON or as a form whose values are JSON where they are no text."""
        kind = self.headers.get("content-type", "")
        if "json" in kind:
            return dict(self.json)
        if "multipart" in kind:
            return {name: _plain(value.decode()) for name, (file, value) in read_form(self).items() if not file}
        return {name: _plain(values[-1]) for name, values in parse_qs(self.body.decode()).items()}


# Status, body (bytes, an object sent as JSON, or pieces as they come), headers. None: close the connection.
Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]] | None


def _plain(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, str) else value


class HttpService:
    """Answers by `answer`, which subclasses define; can go down and come back on the same port."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.requests: list[Request] = []
        self.lock = threading.Lock()
        self._server: http.server.ThreadingHTTPServer | None = None

    def __enter__(self) -> Any:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def answer(self, request: Request) -> Answer:
        raise NotImplementedError

    def up(self) -> None:
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _body(self) -> bytes:
                if self.headers.get("transfer-encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("content-length") or 0))
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)

            def _serve(self) -> None:
                body = self._body()
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(self.command, self.path, headers, body)
                with service.lock:
                    service.requests.append(request)
                answer = service.answer(request)
                if answer is None:
                    self.close_connection = True
                    return
                status, value, *more = answer
                if isinstance(value, Iterator):
                    self.send_response(status)
                    self.send_header("content-type", "text/event-stream")
                    self.end_headers()
                    self.close_connection = True
                    with contextlib.suppress(OSError):
                        for piece in value:
                            self.wfile.write(piece)
                            self.wfile.flush()
                    return
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("content-length", str(len(data)))
                    for name, text in (more[0] if more else {"content-type": "application/json"}).items():
                        self.send_header(name, text)
                    self.end_headers()
                    self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def handle_error(self, *_: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def down(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class WebhookReceiver(HttpService):
    """A program that is posted messages. `script` answers instead of 200 while it has something to say."""

    def __init__(self, script: Callable[[Request], Answer | str] | None = None) -> None:
        super().__init__()
        self._script = script
        # Bodies of the posts that were answered with 2xx.
        self.taken: list[Any] = []

    def answer(self, request: Request) -> Answer:
        answer = self._script(request) if self._script else "take"
        if answer == "take":
            with self.lock:
                self.taken.append(request.json)
            return 200, {"ok": True}
        assert not isinstance(answer, str)
        return answer

    @property
    def texts(self) -> list[str]:
        return [one["text"] for one in self.taken]


class Said:
    """A message that a service was given."""

    def __init__(self, to: str, text: str, more: dict[str, Any]) -> None:
        self.to = to
        self.text = text
        self.more = more


class TelegramServer(HttpService):
    """The Bot API: getMe, getUpdates (held until there is something), sendMessage, files, typing."""

    TOKEN = "12345:telegram-token"

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Said] = []
        self.typed: list[str] = []
        self.files: dict[str, bytes] = {}
        # Answers to the next messages, instead of taking them.
        self.failures: list[Answer] = []
        self._updates: list[dict[str, Any]] = []
        self._number = 100

    def write(self, sender: int, text: str, *, chat: dict[str, Any] | None = None, **more: Any) -> None:
        """Let a person write to the bot."""
        with self.lock:
            self._number += 1
            who = {"id": sender, "is_bot": False, "first_name": f"P{sender}"}
            where = chat or {"id": sender, "type": "private"}
            message = {"message_id": self._number, "date": 1_800_000_000, "from": who, "chat": where}
            self._updates.append({"update_id": self._number, "message": {**message, "text": text, **more}})

    def answer(self, request: Request) -> Answer:
        if request.path.startswith(f"/file/bot{self.TOKEN}/"):
            data = self.files.get(request.path.rpartition("/")[2])
            return (404, {}) if data is None else (200, data)
        if not request.path.startswith(f"/bot{self.TOKEN}/"):
            return 401, {"ok": False, "error_code": 401, "description": "Unauthorized"}
        method = request.path.rpartition("/")[2]
        if method in ("sendMessage", "sendDocument", "sendPhoto") and self.failures:
            return self.failures.pop(0)
        return 200, {"ok": True, "result": getattr(self, f"_{method}")(request)}

    def _getMe(self, request: Request) -> Any:  # noqa: N802
        return {"id": 999, "is_bot": True, "first_name": "Farhand", "username": "farhand_bot"}

    def _getUpdates(self, request: Request) -> Any:  # noqa: N802
        offset = request.fields.get("offset", 0)
        end = time.monotonic() + min(2, request.fields.get("timeout", 0))
        while True:
            with self.lock:
                self._updates = [one for one in self._updates if one["update_id"] >= offset]
                if self._updates or time.monotonic() > end:
                    return list(self._updates)
            time.sleep(0.02)

    def _getFile(self, request: Request) -> Any:  # noqa: N802
        name = request.fields["file_id"]
        return {"file_id": name, "file_unique_id": f"u{name}", "file_path": f"documents/{name}"}

    def _sendChatAction(self, request: Request) -> Any:  # noqa: N802
        self.typed.append(str(request.fields["chat_id"]))
        return True

    def _sendMessage(self, request: Request) -> Any:  # noqa: N802
        asked = {**request.fields, "text": str(request.fields["text"])}
        assert len(asked["text"].encode("utf-16-le")) // 2 <= 4096
        return self._keep(Said(str(asked["chat_id"]), asked["text"], asked))

    def _sendDocument(self, request: Request) -> Any:  # noqa: N802
        fields = read_form(request)
        return self._keep(Said(fields["chat_id"][1].decode(), "", {"file": _file_in(fields)}))

    def _sendPhoto(self, request: Request) -> Any:  # noqa: N802
        fields = read_form(request)
        return self._keep(Said(fields["chat_id"][1].decode(), "", {"file": _file_in(fields)}))

    def _keep(self, said: Said) -> Any:
        with self.lock:
            self.said.append(said)
            self._number += 1
            chat = {"id": int(said.to), "type": "private"}
            return {"message_id": self._number, "date": 1_800_000_000, "chat": chat, "text": said.text}


class SignalServer(HttpService):
    """The HTTP daemon of signal-cli: server-sent events, and JSON-RPC."""

    NUMBER = "+15550000000"

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Said] = []
        self.typed: list[str] = []
        self.files: dict[str, bytes] = {}
        self.errors: list[dict[str, Any]] = []
        # Answers to the next messages, instead of taking them.
        self.failures: list[Answer] = []
        self._events: queue.Queue[bytes] = queue.Queue()
        self._number = 1_700_000_000_000

    def write(self, source: str, message: str, **more: Any) -> None:
        self._number += 1
        said = {"timestamp": self._number, "message": message, **more}
        envelope = {"sourceNumber": source, "sourceName": f"Name {source[-2:]}", "dataMessage": said}
        self.raw({"envelope": {**envelope, "timestamp": self._number}, "account": self.NUMBER})

    def raw(self, event: Any) -> None:
        self._events.put(b"event:receive\ndata:" + json.dumps(event).encode() + b"\n\n")

    def _stream(self) -> Iterator[bytes]:
        yield b":\n\n"
        while self._server is not None:
            with contextlib.suppress(queue.Empty):
                yield self._events.get(timeout=0.1)

    def answer(self, request: Request) -> Answer:
        if request.path == "/api/v1/events":
            assert request.query["account"] == self.NUMBER
            return 200, self._stream()
        asked = request.json
        assert request.path == "/api/v1/rpc" and asked["jsonrpc"] == "2.0"
        params = asked["params"]
        assert params["account"] == self.NUMBER
        result: Any = {}
        to = params.get("groupId") or (params.get("recipient") or [""])[0]
        if asked["method"] == "send":
            if self.failures:
                return self.failures.pop(0)
            if self.errors:
                return 200, {"jsonrpc": "2.0", "id": asked["id"], "error": self.errors.pop(0)}
            self._number += 1
            self.said.append(Said(to, params["message"], params))
            result = {"timestamp": self._number, "results": [{"type": "SUCCESS"}]}
        elif asked["method"] == "sendTyping":
            self.typed.append(to)
        elif asked["method"] == "getAttachment":
            result = {"data": base64.b64encode(self.files[params["id"]]).decode()}
        return 200, {"jsonrpc": "2.0", "id": asked["id"], "result": result}


class WhatsAppServer(HttpService):
    """The Graph API as far as messages and media go; `post` is what Meta posts to the gateway."""

    PHONE, TOKEN, APP_SECRET, VERIFY = "1066", "graph-token", "app-secret", "verify-me"

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Said] = []
        self.typed: list[str] = []
        self.files: dict[str, bytes] = {}
        self.uploads: dict[str, tuple[str, bytes]] = {}
        # Answers to the next messages, instead of taking them.
        self.failures: list[Answer] = []

    def answer(self, request: Request) -> Answer:
        if request.headers.get("authorization") != f"Bearer {self.TOKEN}":
            return 401, {"error": {"code": 190, "message": "Invalid OAuth access token"}}
        if request.path.startswith("/lookaside/"):
            return 200, self.files[request.path.rpartition("/")[2]]
        if request.method == "GET":
            name = request.path.strip("/")
            found = {"url": f"{self.url}/lookaside/{name}", "mime_type": "image/png", "id": name}
            return 200, {**found, "sha256": "0" * 64, "file_size": 4, "messaging_product": "whatsapp"}
        if request.path == f"/{self.PHONE}/media":
            fields = read_form(request)
            assert fields["messaging_product"][1] == b"whatsapp"
            self.uploads[f"up{len(self.uploads)}"] = fields["file"]
            return 200, {"id": f"up{len(self.uploads) - 1}"}
        asked = request.json
        assert request.path == f"/{self.PHONE}/messages" and asked["messaging_product"] == "whatsapp"
        if asked.get("status") == "read":
            self.typed.append(asked["message_id"])
            return 200, {"success": True}
        if self.failures:
            return self.failures.pop(0)
        self.said.append(Said(asked["to"], (asked.get("text") or {}).get("body", ""), asked))
        who = [{"input": asked["to"], "wa_id": asked["to"]}]
        sent = [{"id": f"wamid.out{len(self.said)}", "message_status": "accepted"}]
        return 200, {"messaging_product": "whatsapp", "contacts": who, "messages": sent}

    def post(self, gateway: GatewayProcess, *messages: dict[str, Any], secret: str = APP_SECRET) -> Any:
        headers, body = self.notification(*messages, secret=secret)
        named = {name.decode(): value.decode() for name, value in headers.items()}
        return gateway.request("POST", "/hooks/whatsapp", body, token=None, headers=named)

    def notification(self, *messages: dict[str, Any], secret: str = APP_SECRET) -> tuple[dict[bytes, bytes], bytes]:
        """Headers and body of what Meta posts."""
        value = {
            "messaging_product": "whatsapp",
            "metadata": {"phone_number_id": self.PHONE},
            "contacts": [{"wa_id": one["from"], "profile": {"name": "Wanda"}} for one in messages],
            "messages": list(messages),
        }
        change = {"field": "messages", "value": value}
        body = json.dumps({"object": "whatsapp_business_account", "entry": [{"id": "1", "changes": [change]}]}).encode()
        signature = "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
        return {b"x-hub-signature-256": signature.encode()}, body


class DiscordServer(HttpService):
    """The HTTP interface, and the gateway socket with identify, resume, heartbeats and compression."""

    ME = "4242"
    TOKEN = base64.b64encode(ME.encode()).decode() + ".discord.token"

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Said] = []
        self.typed: list[str] = []
        self.files: dict[str, bytes] = {}
        self.identified = 0
        self.resumed = 0
        # Answers to the next messages, instead of taking them.
        self.failures: list[Answer] = []
        self._events: list[dict[str, Any]] = []
        self._number = 10_000
        self._sockets: list[Any] = []
        self._gateway = websockets.sync.server.serve(self._converse, "127.0.0.1", 0)
        self.socket_url = f"ws://127.0.0.1:{self._gateway.socket.getsockname()[1]}"

    def up(self) -> None:
        super().up()
        threading.Thread(target=self._gateway.serve_forever, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.cut()
        self._gateway.shutdown()

    def cut(self) -> None:
        """Break the sockets."""
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.socket.shutdown(2)
        self._sockets.clear()

    def write(self, author: str, content: str, *, bot: bool = False, **more: Any) -> None:
        self._number += 1
        data = self._message(str(self._number), f"9{author}", {**_discord_user(author), "bot": bot}, content)
        with self.lock:
            event = {"op": 0, "t": "MESSAGE_CREATE", "s": len(self._events) + 2, "d": {**data, **more}}
            self._events.append(event)

    def _message(self, name: str, channel: str, author: dict[str, Any], content: str) -> dict[str, Any]:
        lists = {key: [] for key in ("mentions", "mention_roles", "attachments", "embeds", "components")}
        flags = {"tts": False, "mention_everyone": False, "pinned": False, "type": 0, "flags": 0}
        times = {"timestamp": "2026-11-16T08:00:00.000000+00:00", "edited_timestamp": None}
        return {"id": name, "channel_id": channel, "author": author, "content": content, **times, **lists, **flags}

    def _converse(self, socket: Any) -> None:
        self._sockets.append(socket)
        packer = zlib.compressobj() if "compress=zlib-stream" in socket.request.path else None

        def tell(event: dict[str, Any]) -> None:
            said = json.dumps(event)
            if packer is None:
                socket.send(said)
            else:
                socket.send(packer.compress(said.encode()) + packer.flush(zlib.Z_SYNC_FLUSH))

        with contextlib.suppress(OSError, websockets.exceptions.WebSocketException):
            tell({"op": 10, "d": {"heartbeat_interval": 200}})
            reported = None
            while True:
                with contextlib.suppress(TimeoutError):
                    said = json.loads(socket.recv(timeout=0.02))
                    if said["op"] == 1:
                        tell({"op": 11, "d": None})
                    elif said["op"] == 2:
                        assert said["d"]["token"] == self.TOKEN and said["d"]["intents"] & 1 << 15
                        self.identified += 1
                        tell({"op": 0, "t": "READY", "s": 1, "d": self._ready()})
                        reported = 0
                    elif said["op"] == 6:
                        assert said["d"]["session_id"] == "s1"
                        self.resumed += 1
                        reported = said["d"]["seq"] - 1
                        tell({"op": 0, "t": "RESUMED", "s": said["d"]["seq"], "d": {}})
                with self.lock:
                    due = [] if reported is None else self._events[reported:]
                for event in due:
                    tell(event)
                    assert reported is not None
                    reported += 1

    def _ready(self) -> dict[str, Any]:
        me = {**_discord_user(self.ME), "bot": True, "mfa_enabled": True, "verified": True, "flags": 0}
        session = {"session_id": "s1", "resume_gateway_url": self.socket_url}
        return {"v": 10, "user": me, "guilds": [], "application": {"id": self.ME, "flags": 0}, **session}

    def answer(self, request: Request) -> Answer:
        if request.path.startswith("/cdn/"):
            data = self.files.get(request.path.rpartition("/")[2])
            return (404, {}) if data is None else (200, data)
        if request.headers.get("authorization") != f"Bot {self.TOKEN}":
            return 401, {"message": "401: Unauthorized", "code": 0}
        if request.path == "/gateway/bot":
            limit = {"total": 1000, "remaining": 999, "reset_after": 0, "max_concurrency": 1}
            return 200, {"url": self.socket_url, "shards": 1, "session_start_limit": limit}
        if request.path == "/users/@me/channels":
            person = str(request.json["recipient_id"])
            there = {"id": f"9{person}", "type": 1, "last_message_id": None}
            return 200, {**there, "recipients": [_discord_user(person)]}
        _, _, channel, act = request.path.split("/")
        if act == "typing":
            self.typed.append(channel)
            return 204, b""
        form = read_form(request) if "multipart" in request.headers["content-type"] else None
        asked = json.loads(form["payload_json"][1]) if form else request.json
        content = asked.get("content", "")
        assert len(content) <= 2000 and len(asked["nonce"]) <= 25
        if self.failures:
            return self.failures.pop(0)
        self.said.append(Said(channel, content, {**asked, "file": _file_in(form) if form else None}))
        return 200, self._message(str(50_000 + len(self.said)), channel, _discord_user(self.ME), content)


def _discord_user(name: str) -> dict[str, Any]:
    nothing = {"discriminator": "0", "avatar": None, "public_flags": 0}
    return {"id": name, "username": f"user{name}", "global_name": f"U{name}", **nothing}


def read_form(request: Request) -> dict[str, tuple[str, bytes]]:
    """The fields of a multipart form: file name and content."""
    boundary = request.headers["content-type"].partition("boundary=")[2].strip('"').encode()
    fields = {}
    for part in request.body.split(b"--" + boundary)[1:-1]:
        head, _, content = part.strip(b"\r\n").partition(b"\r\n\r\n")
        disposition = head.decode()
        name = disposition.partition('name="')[2].partition('"')[0]
        fields[name] = (disposition.partition('filename="')[2].partition('"')[0], content)
    return fields


def _file_in(fields: dict[str, tuple[str, bytes]]) -> tuple[str, bytes]:
    """The one file of a form, which may be named by `attach://` in the field it is for."""
    (found,) = [field for field in fields.values() if field[0]]
    return found
