"""`farhand node` with a SerialAgent gateway, which reads a node's token only from the URL."""

from __future__ import annotations

import asyncio
import http
import json
import os
import sys
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

TOKEN = "its-token"


def test_a_node_is_let_in_by_a_gateway_that_reads_the_token_in_the_address(tmp_path: Path) -> None:
    """I12: the token was in the header alone, so the original never let the node in."""

    def refuse(_: ServerConnection, request: Request) -> Response | None:
        if parse_qs(urlsplit(request.path).query).get("token") == [TOKEN]:
            return None
        body = b"invalid or missing node token"
        headers = Headers([("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))])
        return Response(401, http.HTTPStatus(401).phrase, headers, body)

    async def scenario() -> str:
        hello: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def gateway(connection: ServerConnection) -> None:
            said = str(await connection.recv())
            if not hello.done():
                hello.set_result(said)
            welcome = {"type": "gateway_welcome", "protocol_version": 1, "gateway_version": "0.1.0"}
            await connection.send(json.dumps(welcome))
            await connection.wait_closed()

        async with serve(gateway, "127.0.0.1", 0, process_request=refuse, compression=None) as server:
            port = server.sockets[0].getsockname()[1]
            clean = {name: value for name, value in os.environ.items() if not name.startswith(("SA_", "FARHAND_"))}
            node = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "farhand", "node", "--gateway", f"http://127.0.0.1:{port}", "--id", "n"),
                *("--home", str(tmp_path)),
                env={**clean, "SA_NODE_TOKEN": TOKEN},
                stderr=asyncio.subprocess.PIPE,
            )
            ended = asyncio.create_task(node.communicate())
            await asyncio.wait({hello, ended}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            if node.returncode is None:
                node.terminate()
            said = (await ended)[1].decode()
            assert hello.done(), f"the node did not get in: {said}"
            return hello.result()

    said = json.loads(asyncio.run(scenario()))
    assert (said["type"], said["node"]["id"]) == ("node_hello", "n")
