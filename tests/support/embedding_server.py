"""An embedding server that speaks `/v1/embeddings` over HTTP; what it says of a text can be computed by a test."""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# Words of one meaning have one dimension; every other word shares the last eight.
CONCEPTS = {
    "wifi": 0, "wireless": 0, "network": 0, "password": 1, "log": 1, "credential": 1,
    "deploy": 2, "ship": 2, "release": 2, "cat": 3, "pet": 3, "kitten": 3, "birthday": 4, "born": 4,
}  # fmt: skip
DIMENSIONS = 16


def vector(text: str) -> list[float]:
    """A bag of concepts: texts are alike when they speak of the same things in whatever words."""
    values = [0.0] * DIMENSIONS
    for word in re.findall(r"\w+", text.lower()):
        place = CONCEPTS.get(word)
        if place is None:
            values[8 + hashlib.blake2b(word.encode(), digest_size=1).digest()[0] % 8] += 0.1
        else:
            values[place] += 1.0
    length = math.sqrt(sum(value * value for value in values)) or 1.0
    return [value / length or 0.0 for value in values] if any(values) else [1.0, *values[1:]]


class EmbeddingServer:
    """Use as a context manager. `answer` may be replaced by a function of the request's body: (status, reply)."""

    def __init__(self) -> None:
        # Everything it was given to embed, in order.
        self.texts: list[str] = []
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        self.answer: Callable[[Any], tuple[int, Any]] = self.embeddings
        # Cleared: requests are taken and not answered.
        self.hold = threading.Event()
        self.hold.set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.paths.append(self.path)
                server.keys.append(self.headers["Authorization"])
                server.texts += body["input"]
                server.hold.wait(60)
                status, reply = server.answer(body)
                data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    pass

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> EmbeddingServer:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.hold.set()
        self._server.shutdown()
        self._server.server_close()

    def embeddings(self, body: Any) -> tuple[int, Any]:
        data = [{"object": "embedding", "index": n, "embedding": vector(text)} for n, text in enumerate(body["input"])]
        return 200, {"object": "list", "model": body["model"], "data": data[::-1]}
