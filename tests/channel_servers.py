"""Chat services over real sockets, as far as the adapters use them. Each keeps what it was told."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.harness import free_port


class Request:
    """One HTTP request as it came in."""

    def __init__(self, method: str, target: str, headers: dict[str, str], body: bytes) -> None:
        parts = urlsplit(target)
        self.method = method
        self.path = parts.path
        self.query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]] | None
"""Status, body (bytes, or an object sent as JSON), headers. None: the connection is closed without a word."""


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

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(self.command, self.path, headers, body)
                with service.lock:
                    service.requests.append(request)
                answer = service.answer(request)
                if answer is None:
                    self.close_connection = True
                    return
                status, value, *more = answer
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
        self.taken: list[Any] = []
        """Bodies of the posts that were answered with 2xx."""

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
