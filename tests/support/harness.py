"""Real processes and real sockets for the tests: a gateway, plug-in nodes, a plain node, and an HTTP client."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import websockets

from tests.support.fork_server import FARHAND, ForkedProcess, start_process

ROOT = Path(__file__).resolve().parents[2]
SHARED_TOKEN = "shared-node-token"
# The shortest limit of any wait for something that has to happen, in seconds.
PATIENCE = 60.0


def free_port() -> int:
    """A port below the ephemeral range: no outgoing connection takes it while a gateway is being restarted."""
    while True:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Answer:
    """An HTTP response, read whole."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    def json(self) -> Any:
        return json.loads(self.body)

    def __repr__(self) -> str:
        return f"<{self.status} {self.body[:300]!r}>"


class GatewayProcess:
    """`farhand gateway` (or `up`) in a process of its own; use as a context manager."""

    def __init__(
        self,
        home: Path,
        *arguments: str,
        command: str = "gateway",
        port: int | None = None,
        env: dict[str, str | None] | None = None,
    ) -> None:
        """`env` adds to the environment; None takes a variable out of it."""
        self.home = home
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.ws_url = f"ws://127.0.0.1:{self.port}/v1/nodes/ws"
        self.arguments = arguments
        self._command = [*FARHAND, command, "--port", str(self.port), *arguments]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SA_NODE", "FARHAND_"))}
        wanted = {**clean, "FARHAND_HOME": str(home), "SA_NODE_TOKEN": SHARED_TOKEN, **(env or {})}
        self.environment = {name: value for name, value in wanted.items() if value is not None}
        self.process: subprocess.Popen[str] | ForkedProcess | None = None
        self.log = home.parent / f"{home.name}.log"

    def __enter__(self) -> GatewayProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, *, wait: bool = True) -> None:
        self.home.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = start_process(
                self._command,
                self.environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        line = self.process.stdout.readline()
        if "farhand ready on" not in line:
            raise AssertionError(f"the gateway did not start: {line!r}\n{self.log.read_text()[-3000:]}")

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            status = self.process.wait(60)
        except subprocess.TimeoutExpired:
            (self.home / "show-tasks").touch()  # siege_gateway.py writes to the log where it stands
            time.sleep(3)
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()
        return status

    def kill(self) -> None:
        """SIGKILL the gateway alone, as a crash would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)
        if self.process.stdout is not None:
            self.process.stdout.close()

    @property
    def token(self) -> str:
        return (self.home / "token").read_text().strip()

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        token: str | None = "owner",
        timeout: float = PATIENCE,
    ) -> Answer:
        """One HTTP request. `token="owner"` sends the owner's, None sends none."""
        sent: dict[str, str] = {}
        if token is not None:
            sent["Authorization"] = f"Bearer {self.token if token == 'owner' else token}"
        data: bytes | None = None
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            sent["Content-Type"] = "application/json"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, data, {**sent, **(headers or {})})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def sign_in(self) -> dict[str, str]:
        """The headers with which a signed-in console page authenticates."""
        path = self.request("POST", "/v1/signin", {}).json()["path"]
        answer = self.request("GET", path, token=None)
        assert answer.status == 303, answer
        page = answer.headers["location"].partition("#page=")[2]
        return {"Cookie": answer.headers["set-cookie"].partition(";")[0], "X-Farhand-Page": page}

    def upgrade(self, query: str = "", headers: dict[str, str] | None = None) -> Answer:
        """The HTTP answer to a WebSocket upgrade of the node socket; 101 when it was let in."""
        wanted = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
            **(headers or {}),
        }
        return self.request("GET", f"/v1/nodes/ws{query and '?'}{query}", token=None, headers=wanted)

    def get(self, path: str, **options: Any) -> Any:
        answer = self.request("GET", path, **options)
        assert answer.status == 200, answer
        return answer.json()

    def invoke(self, tool: str, args: Any = None, **options: Any) -> Any:
        """`POST /v1/tools/invoke`; keyword arguments become fields of the body."""
        headers = options.pop("headers", None)
        timeout = options.pop("timeout", PATIENCE)
        answer = self.request(
            "POST", "/v1/tools/invoke", {"tool": tool, "args": args, **options}, headers=headers, timeout=timeout
        )
        assert answer.status == 200, answer
        return answer.json()

    async def ainvoke(self, tool: str, args: Any = None, **options: Any) -> Any:
        return await asyncio.to_thread(self.invoke, tool, args, **options)

    def wait_for_node(self, node_id: str, *, online: bool = True, seconds: float = PATIENCE) -> Any:
        """The node's entry once it is (or is no longer) connected."""

        def found() -> Any:
            for node in self.get("/v1/nodes")["nodes"]:
                if node["node_id"] == node_id and node["online"] is online:
                    return node
            return None

        return wait_until(found, seconds, f"node {node_id} online={online}")


def wait_until(condition: Any, seconds: float = PATIENCE, what: str = "condition") -> Any:
    """Return the first true value of `condition()`. Fails after `seconds`, or `PATIENCE` if that is longer.

    A limit here is there to end a test that hangs, not to measure: how quick a machine is says nothing about the code.
    """
    seconds = max(seconds, PATIENCE)
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not become true within {seconds} s")
        time.sleep(0.02)


class PluginProcess:
    """A plug-in script in a process of its own; `source` is Python that uses `farhand.sdk`."""

    def __init__(self, source: str | Path, folder: Path, env: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.script = source if isinstance(source, Path) else folder / f"plugin-{id(self):x}.py"
        if isinstance(source, str):
            self.script.write_text(source)
        self._env = {**os.environ, **env}
        self._log = folder / f"{self.script.stem}.log"
        self.process: subprocess.Popen[bytes] | ForkedProcess | None = None

    def __enter__(self) -> PluginProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = start_process([sys.executable, str(self.script)], self._env, stderr=log, stdout=log)

    def stop(self, number: int = signal.SIGTERM) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(60)


class PlainNode:
    """A peer that knows only the six messages of the plug-in guide, frame by frame."""

    def __init__(self, socket_: Any) -> None:
        self.socket = socket_

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(
        cls,
        gateway: GatewayProcess,
        node_id: str = "plain",
        capabilities: list[str] | None = None,
        *,
        token: str = SHARED_TOKEN,
        hello: bool = True,
        port: int | None = None,
    ) -> AsyncIterator[PlainNode]:
        """`port` goes through a proxy that listens there."""
        address = gateway.ws_url if port is None else f"ws://127.0.0.1:{port}/v1/nodes/ws"
        url = f"{address}?token={token}&node_id={node_id}"
        limits: dict[str, Any] = {"max_size": None, "max_queue": None, "close_timeout": 2}
        async with websockets.connect(url, ping_interval=None, compression=None, **limits) as socket_:
            node = cls(socket_)
            if hello:
                await node.send(hello_frame(node_id, capabilities or ["test"]))
                welcome = await node.receive()
                assert welcome["type"] == "gateway_welcome", welcome
            yield node

    async def send(self, message: Any) -> None:
        await self.socket.send(message if isinstance(message, str | bytes) else json.dumps(message))

    async def receive(self, kind: str | None = None, seconds: float = PATIENCE) -> Any:
        """The next message, or the next of this type."""
        async with asyncio.timeout(seconds):
            while True:
                message = json.loads(await self.socket.recv())
                if kind is None or message["type"] == kind:
                    return message

    async def answer(self, request: Any, result: Any) -> None:
        await self.send({"type": "tool_response", "request_id": request["request_id"], "ok": True, "result": result})


def hello_frame(node_id: str, capabilities: list[str], **more: Any) -> dict[str, Any]:
    return {
        "type": "node_hello",
        "protocol_version": 1,
        "node": {"id": node_id, "name": node_id, "node_type": "test", "version": "0.2.1"},
        "capabilities": capabilities,
        **more,
    }


class Proxy:
    """A TCP proxy in front of a gateway whose links can be cut, frozen and held off; use as a context manager."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.url = f"ws://127.0.0.1:{self.port}/v1/nodes/ws"
        # To and from the target.
        self._flowing = (threading.Event(), threading.Event())
        self.thaw()
        self._refusing = False
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        # Seconds that each MiB takes, as on a slow line.
        self.pace = 0.0
        # Bytes that went from the gateway to clients of this proxy.
        self.carried = 0

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.thaw()
        self.cut()

    def cut(self, *, refuse: bool = False) -> None:
        """Break every link. With `refuse`, new ones are broken at once until `admit`."""
        with self._lock:
            self._refusing = refuse
            sockets, self._sockets = self._sockets, []
        for one in sockets:
            _reset(one)

    def admit(self) -> None:
        self._refusing = False

    def freeze(self, *ways: int) -> None:
        """Every link stays open and carries nothing any more, as when a cable is pulled.

        `ways`: 0 to the target, 1 from it; by default both.
        """
        for way in ways or (0, 1):
            self._flowing[way].clear()

    def thaw(self) -> None:
        for way in self._flowing:
            way.set()

    def spoiled(self, data: bytes) -> bytes:
        """What becomes of bytes on their way; here, nothing."""
        return data

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            with self._lock:
                if self._refusing:
                    _reset(client)
                    continue
                try:
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    _reset(client)
                    continue
                self._sockets += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._carry, args=(source, sink, source is server), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        try:
            while data := source.recv(65536):
                self._flowing[counts].wait()
                self.carried += len(data) * counts
                if self.pace:
                    time.sleep(self.pace * len(data) / (1024 * 1024))
                sink.sendall(self.spoiled(data))
            self._flowing[counts].wait()
        except OSError:
            pass
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class FilesProxy(Proxy):
    """Tells connections to the files socket from those to the node socket."""

    FIRST = b"GET /v1/nodes/files "

    def __init__(self, port: int, *, refusing: bool = False) -> None:
        super().__init__(port)
        # Connections to the files socket are broken at once.
        self.refusing = refusing
        self.tried = 0
        # Bytes that the node sent to the files socket.
        self.moved = 0
        # They go no further, and the connection stays open, as where a box on the way has forgotten it.
        self.swallowing = False
        self._files: list[socket.socket] = []

    def asked(self, head: bytes) -> None:
        """Request the files socket."""

    def cut_files(self) -> None:
        for one in self._files:
            _reset(one)
        self._files.clear()

    def _carry(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        if not counts and source.recv(len(self.FIRST), socket.MSG_PEEK | socket.MSG_WAITALL) == self.FIRST:
            self.tried += 1
            self.asked(source.recv(4096, socket.MSG_PEEK))
            if self.refusing:
                _reset(source)
                _reset(sink)
                return
            self._files += [source, sink]
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    self.moved += len(data)
                    if self.pace:
                        time.sleep(self.pace * len(data) / (1024 * 1024))
                    if not self.swallowing:
                        sink.sendall(self.spoiled(data))
            for one in (source, sink):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            return
        super()._carry(source, sink, counts)


class TwoNodes:
    """A gateway and two nodes, `left` and `right`, each behind a proxy that can cut its link."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.gateway = stack.enter_context(GatewayProcess(folder / "home"))
        self.proxies = [FilesProxy(self.gateway.port) for _ in range(2)]
        self.left, self.right = (
            stack.enter_context(behind(stack.enter_context(proxy), self.gateway, folder / name, name))
            for name, proxy in zip(("left", "right"), self.proxies, strict=True)
        )

    def end_of(self, transfer_id: str) -> Any:
        def over() -> Any:
            found = self.gateway.get(f"/v1/transfers/{transfer_id}")
            return found if found["state"] != "running" else None

        return wait_until(over, 90, f"the end of transfer {transfer_id}")


def behind(proxy: Proxy, gateway: GatewayProcess, folder: Path, node_id: str) -> NodeProcess:
    """A node that reaches the gateway through a proxy."""
    return NodeProcess(gateway, folder, node_id, url=f"http://127.0.0.1:{proxy.port}")


def _reset(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.shutdown(socket.SHUT_RDWR)
    one.close()


@contextlib.contextmanager
def running(*processes: PluginProcess) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.enter_context(process)
        yield


PLUGIN_NODE = ROOT / "tests" / "support" / "plugin_node.py"


class Plugin(PluginProcess):
    """`plugin_node.py` joined to a gateway: its tools are `<node id>.echo`, `.effect`, `.hold`, `.blob` …"""

    def __init__(
        self, gateway: GatewayProcess, folder: Path, node_id: str, *, url: str | None = None, **env: str
    ) -> None:
        self.gateway = gateway
        self.node_id = node_id
        self.folder = folder / node_id
        settings = {
            "SA_GATEWAY_WS_URL": url or gateway.ws_url,
            "SA_NODE_TOKEN": SHARED_TOKEN,
            "SA_NODE_ID": node_id,
            "PREFIX": node_id,
            "FOLDER": str(self.folder),
            **env,
        }
        super().__init__(PLUGIN_NODE, self.folder, settings)

    def __enter__(self) -> Plugin:
        self.start()
        try:
            wait_until(lambda: self.ended or self._joined(), 30, f"node {self.node_id} online")
            assert not self.ended, f"the plug-in did not start:\n{self._log.read_text()[-3000:]}"
        except BaseException:
            self.stop()
            raise
        return self

    @property
    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def _joined(self) -> bool:
        nodes = self.gateway.get("/v1/nodes")["nodes"]
        return any(node["node_id"] == self.node_id and node["online"] for node in nodes)

    def steps(self, call_id: str) -> list[str]:
        """What the plug-in noted about a call, in order."""
        log = self.folder / "log"
        lines = log.read_text().split("\n") if log.exists() else []
        return [word for word, _, noted in (line.partition(" ") for line in lines) if noted == call_id]

    def started(self, count: int = 0, seconds: float = 15) -> list[str]:
        """The ids of the calls that started, in order, once there are at least `count`."""
        wait_until(lambda: len(self._started()) >= count, seconds, f"{count} started calls")
        return self._started()

    def _started(self) -> list[str]:
        log = self.folder / "log"
        lines = log.read_text().split("\n") if log.exists() else []
        return [line.partition(" ")[2] for line in lines if line.startswith("start ")]

    def release(self, name: str) -> None:
        (self.folder / name).touch()


class NodeProcess:
    """`farhand node` in a process of its own, joined to a gateway; use as a context manager.

    Whatever it and its commands left running is gone when the block ends.
    """

    def __init__(
        self,
        gateway: GatewayProcess,
        folder: Path,
        node_id: str,
        *arguments: str,
        url: str | None = None,
        state: Path | None = None,
        env: dict[str, str | None] | None = None,
    ) -> None:
        """`url` leads through a proxy, `state` is the node's --home; `env` as for `GatewayProcess`."""
        self.gateway = gateway
        self.node_id = node_id
        self.workspace = folder / "workspace"
        self.user_home = folder / "user"
        self.state = state or folder / "state"
        for path in (self.workspace, self.user_home):
            path.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"{node_id}.log"
        self._command = [*FARHAND, "node", "--gateway", url or gateway.url, "--id", node_id]
        self._command += ["--home", str(self.state), "--workspace", str(self.workspace), *arguments]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SA_", "FARHAND_", "BASH_ENV"))}
        self._mark = f"TEST_NODE={uuid.uuid4()}"
        wanted = {**clean, "HOME": str(self.user_home), "SHELL": "/bin/bash", "SA_NODE_TOKEN": SHARED_TOKEN}
        wanted |= dict([self._mark.split("=")]) | (env or {})
        self._env = {name: value for name, value in wanted.items() if value is not None}
        self.process: subprocess.Popen[bytes] | ForkedProcess | None = None

    def __enter__(self) -> NodeProcess:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop()
        end_marked(self._mark)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self, *, wait: bool = True) -> None:
        """Start it (again), and wait until this life of it has joined."""
        before = self._connected_at() if wait else None
        with self.log.open("ab") as log:
            self.process = start_process(self._command, self._env, stdin=subprocess.DEVNULL, stderr=log)
        if wait:
            wait_until(
                lambda: self._ended() or self._connected_at() not in (None, before), 30, f"{self.node_id} online"
            )
            assert not self._ended(), f"the node did not start:\n{self.log.read_text()[-3000:]}"

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(60)
            raise

    def kill(self) -> None:
        """SIGKILL the node program alone, as a crash would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)

    def restart(self) -> None:
        self.kill()
        self.start()

    def ok(self, tool: str, args: Any = None, **options: Any) -> Any:
        """The result of a call that succeeds."""
        answer = self.gateway.invoke(f"{self.node_id}__{tool}", args, **options)
        assert answer["ok"] is True, answer
        return answer["result"]

    def fails(self, tool: str, args: Any, kind: str, **options: Any) -> str:
        """The message of a call that fails with this kind."""
        answer = self.gateway.invoke(f"{self.node_id}__{tool}", args, **options)
        assert answer["ok"] is False and "result" not in answer, answer
        assert answer["error"]["kind"] == kind, answer
        return str(answer["error"]["message"])

    def begin(self, tool: str, args: Any, **options: Any) -> str:
        """Make a call in the background; return its id."""
        answer = self.gateway.invoke(f"{self.node_id}__{tool}", args, background=True, **options)
        assert answer["state"] == "running", answer
        return str(answer["request_id"])

    def end_of(self, call_id: str, seconds: float = 30) -> Any:
        """The record of a call once it has ended."""

        def over() -> Any:
            found = self.gateway.get(f"/v1/calls/{call_id}")
            return found if found["state"] != "running" else None

        return wait_until(over, seconds, f"the end of call {call_id}")

    def _ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def _connected_at(self) -> int | None:
        for node in self.gateway.get("/v1/nodes")["nodes"]:
            if node["node_id"] == self.node_id and node["online"]:
                return int(node["connected_at"])
        return None


def marked(mark: str) -> list[int]:
    """Every process with `mark` in its arguments or its environment, zombies left out."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{name}/cmdline").read_bytes() + b"\0" + Path(f"/proc/{name}/environ").read_bytes()
                if mark.encode() in words:
                    found.append(int(name))
    return found


def end_marked(mark: str) -> None:
    """SIGKILL what is `marked`, until nothing is."""

    def none_left() -> bool:
        left = marked(mark)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    wait_until(none_left, 10, f"the end of everything with {mark}")
