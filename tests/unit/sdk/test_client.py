"""The client against a gateway that knows only the six messages of the plug-in guide."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import sys
import threading
import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from farhand.sdk import (
    MAX_TOOL_RESPONSE_BYTES,
    Cancelled,
    CancelToken,
    Failed,
    InvalidArgs,
    NodeClient,
    NodeInfo,
    NotAllowed,
    NotFound,
    ReconnectBackoff,
    ReconnectExhausted,
    Refused,
    Shutdown,
    Timeout,
    ToolContext,
    ToolRegistry,
)
from tests.unit.sdk.wire import (
    AT_ONCE,
    PLAIN,
    RESUMING,
    FakeGateway,
    RawGateway,
    Served,
    asynchronous,
    serving,
    ws_frame,
)

# Longer than any test: a client that reconnects within it did not wait.
SLOW = ReconnectBackoff(initial_delay=20, max_delay=20)


async def echo(ctx: ToolContext, args: Any) -> Any:
    """Give the arguments back."""
    return args


def echo_registry() -> ToolRegistry:
    return ToolRegistry().register("test.echo", echo)


class Gate:
    """A tool that waits until let go, and counts."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.ended: list[str] = []
        self.contexts: dict[str, ToolContext] = {}
        self.most = 0
        self.go = asyncio.Event()
        self.arrived = asyncio.Event()

    async def call(self, ctx: ToolContext, args: Any) -> Any:
        self.started.append(ctx.request_id)
        self.contexts[ctx.request_id] = ctx
        self.most = max(self.most, len(self.started) - len(self.ended))
        self.arrived.set()
        try:
            going = asyncio.ensure_future(self.go.wait())
            stopped = asyncio.ensure_future(ctx.cancel.cancelled())
            try:
                await asyncio.wait({going, stopped}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                going.cancel()
                stopped.cancel()
            if ctx.cancel.is_cancelled():
                raise Cancelled(f"stopped: {ctx.cancel.reason}")
            return args
        finally:
            self.ended.append(ctx.request_id)


# -- hello and the upgrade --------------------------------------------------------------------------------


@asynchronous
async def test_the_hello() -> None:
    registry = echo_registry().register("test.deep.tool", echo)
    info = NodeInfo("mac-01", "Steph's Mac", "macos", "0.2.0", ["home"])
    async with FakeGateway() as gateway, serving(gateway.url, registry, node_info=info, token="s3 cret&"):
        peer = await gateway.accept()
        assert list(peer.hello)[:4] == ["type", "protocol_version", "node", "capabilities"]
        extras = peer.hello.pop("farhand")
        assert peer.hello == {
            "type": "node_hello",
            "protocol_version": 1,
            "node": {
                "id": "mac-01",
                "name": "Steph's Mac",
                "node_type": "macos",
                "version": "0.2.0",
                "tags": ["home"],
            },
            "capabilities": ["test", "test.deep"],
        }
        assert extras["features"] == ["cancel", "resume", "tools", "freeze", "progress"]
        assert [tool["name"] for tool in extras["tools"]] == ["test.deep.tool", "test.echo"]
        assert extras["max_request_bytes"] == 256 * 1024
        assert extras["resume"].keys() == {"boot"}
        assert peer.path == "/v1/nodes/ws?token=s3%20cret%26&node_id=mac-01"
        assert peer.headers["Authorization"] == "Bearer s3 cret&"
        assert "Sec-WebSocket-Extensions" not in peer.headers
        assert "Sec-WebSocket-Protocol" not in peer.headers


@asynchronous
async def test_a_node_without_tags_and_token() -> None:
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry(), token=""):
        peer = await gateway.accept()
        assert "tags" not in peer.hello["node"]
        assert peer.path == "/v1/nodes/ws?node_id=probe1"
        assert "Authorization" not in peer.headers


@asynchronous
async def test_the_token_may_stay_out_of_the_address() -> None:
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry(), token="secret", token_in_query=False):
        peer = await gateway.accept()
        assert peer.path == "/v1/nodes/ws?node_id=probe1"
        assert peer.headers["Authorization"] == "Bearer secret"


@asynchronous
async def test_the_token_goes_into_the_address_only_for_a_gateway_that_reads_it_there() -> None:
    async with FakeGateway() as gateway:
        gateway.refusals.append((401, "invalid or missing node token"))
        async with serving(gateway.url, echo_registry(), token="secret", token_in_query=None):
            peer = await gateway.accept()
            assert peer.path == "/v1/nodes/ws?token=secret&node_id=probe1"
            assert gateway.paths == ["/v1/nodes/ws?node_id=probe1", "/v1/nodes/ws?token=secret&node_id=probe1"]


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (401, "invalid or missing node token", {"X-Request-Id": "1"}),  # Farhand
        (401, "please sign in", {}),  # a proxy
        (403, "invalid or missing node token", {}),
    ],
)
def test_the_token_stays_out_of_the_address_for_all_others(status: int, body: str, headers: dict[str, str]) -> None:
    @asynchronous
    async def run() -> None:
        async with FakeGateway() as gateway:
            gateway.refusals += [(status, body)] * 3
            gateway.refusal_headers = headers
            client = NodeClient(gateway.url, "secret", node_id="probe1", token_in_query=None)
            with pytest.raises(Refused):
                await client.run(echo_registry())
            assert gateway.paths == ["/v1/nodes/ws?node_id=probe1"]

    run()


def test_the_token_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SA_NODE_TOKEN", "from-env")

    @asynchronous
    async def run() -> None:
        async with FakeGateway() as gateway, serving(gateway.url, echo_registry()):
            peer = await gateway.accept()
            assert peer.path == "/v1/nodes/ws?token=from-env&node_id=probe1"

    run()


@pytest.mark.parametrize(
    ("host", "hint"), [("gateway.invalid", "check the gateway's address"), ("127.0.0.1", "check the port")]
)
def test_a_gateway_that_cannot_be_reached_is_named_with_a_remedy(host: str, hint: str) -> None:
    client = NodeClient(f"ws://{host}:1/v1/nodes/ws", "t", reconnect_backoff=ReconnectBackoff(0.01, 0.01, 1, 1))
    with pytest.raises(ReconnectExhausted, match=hint):
        asyncio.run(client.run(ToolRegistry()))


@asynchronous
async def test_a_name_with_several_addresses_is_tried_in_turn() -> None:
    """`localhost` is ::1 first on many machines, and a gateway listens on 127.0.0.1."""
    async with FakeGateway() as gateway, serving(gateway.url.replace("127.0.0.1", "localhost"), echo_registry()):
        peer = await gateway.accept()
        assert peer.headers["Host"] == f"localhost:{gateway.port}"
        assert (await peer.call("test.echo", 1))["result"] == 1


def test_an_address_that_does_not_answer_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name has an IPv6 address first, on a line whose IPv6 leads nowhere."""
    monkeypatch.setattr("farhand.sdk.connection.CONNECT_SECONDS", 4.0)
    known = socket.getaddrinfo

    @asynchronous
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf, contextlib.ExitStack() as waiting:
            for _ in range(3):  # clients that connect now are not answered at all
                client = waiting.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(deaf.getsockname())
            async with FakeGateway() as gateway:

                def both(host: str, *more: Any, **options: Any) -> Any:
                    if host != "gateway.test":
                        return known(host, *more, **options)
                    places = [deaf.getsockname(), ("127.0.0.1", gateway.port)]
                    return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", place) for place in places]

                monkeypatch.setattr(socket, "getaddrinfo", both)
                url = gateway.url.replace("127.0.0.1", "gateway.test")
                async with serving(url, echo_registry()):
                    peer = await gateway.accept()
                    assert (await peer.call("test.echo", 1))["result"] == 1

    run()


@asynchronous
async def test_a_token_beyond_ascii_connects() -> None:
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry(), token="Schlüssel"):
        peer = await gateway.accept()
        assert peer.path == "/v1/nodes/ws?token=Schl%C3%BCssel&node_id=probe1"
        assert (await peer.call("test.echo", 1))["result"] == 1


def test_the_token_is_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(1)

    @asynchronous
    async def run() -> None:
        async with FakeGateway() as gateway, serving(gateway.url, echo_registry(), token="hush-hush"):
            gateway.refusals = [(503, "later")]
            peer = await gateway.accept()
            await peer.call("test.echo", 1)
            peer.cut()
            await gateway.accept()
        with pytest.raises(ReconnectExhausted) as caught:
            backoff = ReconnectBackoff(0.01, 0.01, 1, 1)
            await NodeClient(gateway.url, "hush-hush", reconnect_backoff=backoff).run(echo_registry())
        assert "hush-hush" not in str(caught.value)

    run()
    assert any("connecting again" in record.getMessage() for record in caplog.records)
    # The server of this test logs what it receives; only what the node's own process would log counts.
    ours = [record for record in caplog.records if record.name.startswith(("farhand", "picows", "asyncio"))]
    assert ours
    assert not [record for record in ours if "hush-hush" in record.getMessage()]


# -- the heartbeat ----------------------------------------------------------------------------------------


@asynchronous
async def test_the_first_ping_comes_at_once_and_carries_the_time() -> None:
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry(), heartbeat_interval=1000):
        peer = await gateway.accept()
        ping = await peer.receive()
        assert ping.keys() == {"type", "timestamp"}
        assert ping["type"] == "ping"
        assert abs(ping["timestamp"] - time.time() * 1000) < 60_000
        assert isinstance(ping["timestamp"], int)


@asynchronous
async def test_pings_come_at_every_interval() -> None:
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry(), heartbeat_interval=0.2):
        peer = await gateway.accept()
        stamps = []
        for _ in range(4):
            ping = await peer.receive("ping")
            stamps.append(ping["timestamp"])
            await peer.send({"type": "pong", "timestamp": ping["timestamp"]})
        gaps = [later - earlier for earlier, later in itertools.pairwise(stamps)]
        assert min(gaps) >= 150, "no flood"


@asynchronous
async def test_a_ping_is_answered_with_its_own_timestamp() -> None:
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry()):
        peer = await gateway.accept()
        for stamp in (0, 1708099200000, -(2**63), 2**63 - 1):
            await peer.send({"type": "ping", "timestamp": stamp})
            assert await peer.receive("pong") == {"type": "pong", "timestamp": stamp}


@asynchronous
async def test_a_ping_of_the_websocket_itself_is_answered() -> None:
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry()):
        peer = await gateway.accept()
        async with asyncio.timeout(60):
            await (await peer.connection.ping(b"are you there"))


def test_a_link_whose_pings_stay_unanswered_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farhand.sdk.client.PONG_SECONDS", 0.3)  # else this test would take fifteen seconds

    @asynchronous
    async def run() -> None:
        async with RawGateway() as gateway, serving(gateway.url, echo_registry(), heartbeat_interval=0.1):
            deaf = await gateway.accept()
            await deaf.upgrade()
            await deaf.receive("node_hello")
            deaf.write(ws_frame(json.dumps(PLAIN)))
            await deaf.receive("ping")
            again = await gateway.accept()  # a new connection, though the old one was never closed
            assert await deaf.at_end()
            await again.upgrade()
            await again.receive("node_hello")
            again.hang_up()

    run()


def test_a_link_with_any_traffic_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farhand.sdk.client.PONG_SECONDS", 1.5)

    @asynchronous
    async def run() -> None:
        async with FakeGateway() as gateway, serving(gateway.url, echo_registry(), heartbeat_interval=0.1):
            peer = await gateway.accept()
            for number in range(22):  # far longer than PONG_SECONDS, and never a pong
                assert (await peer.call("test.echo", number, f"r{number}"))["result"] == number
                await asyncio.sleep(0.1)
            assert gateway.upgrades == 1

    run()


# -- tools ------------------------------------------------------------------------------------------------


@asynchronous
async def test_handshake_and_round_trip() -> None:
    registry = echo_registry()

    @registry.tool("test.panic")
    async def panic(ctx: ToolContext) -> None:
        raise RuntimeError("the roof is on fire")

    async with FakeGateway() as gateway, serving(gateway.url, registry):
        peer = await gateway.accept()
        assert await peer.call("test.echo", {"x": 1}) == {
            "type": "tool_response",
            "request_id": "r",
            "ok": True,
            "result": {"x": 1},
        }
        assert await peer.call("test.nothing", request_id="r2") == {
            "type": "tool_response",
            "request_id": "r2",
            "ok": False,
            "error": {"kind": "not_found", "message": "unknown tool: test.nothing"},
        }
        failed = await peer.call("test.panic", {}, "r3")
        assert failed["ok"] is False
        assert "result" not in failed
        assert failed["error"]["kind"] == "failed"
        assert "panic" in failed["error"]["message"]
        assert "the roof is on fire" in failed["error"]["message"]
        assert (await peer.call("Test.ECHO", [1], "r4"))["result"] == [1]
        assert (await peer.call("test.echo", None, "r5")) == {
            "type": "tool_response",
            "request_id": "r5",
            "ok": True,
            "result": None,
        }


@asynchronous
async def test_the_context() -> None:
    seen: list[ToolContext] = []

    async def look(ctx: ToolContext, args: Any) -> Any:
        seen.append(ctx)
        return None

    async with FakeGateway() as gateway, serving(gateway.url, ToolRegistry().register("test.look", look)):
        peer = await gateway.accept()
        await peer.call("Test.Look", {}, "id-1", session_key="sess-1")
        await peer.call("test.look", {}, "id-2", session_key=None)
        await peer.send({"type": "tool_request", "request_id": "id-3", "tool": "test.look"})
        await peer.receive("tool_response")
    assert [(ctx.request_id, ctx.tool_name, ctx.session_key) for ctx in seen] == [
        ("id-1", "Test.Look", "sess-1"),
        ("id-2", "test.look", None),
        ("id-3", "test.look", None),
    ]
    assert not any(ctx.cancel.is_cancelled() for ctx in seen)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidArgs("m ü"), "invalid_args"),
        (NotAllowed("m ü"), "not_allowed"),
        (Failed("m ü"), "failed"),
        (Timeout("m ü"), "timeout"),
        (Cancelled("m ü"), "cancelled"),
        (NotFound("m ü"), "not_found"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@asynchronous
async def test_each_tool_error_becomes_its_kind(error: Exception, kind: str) -> None:
    async def fail(ctx: ToolContext, args: Any) -> Any:
        raise error

    async with FakeGateway() as gateway, serving(gateway.url, ToolRegistry().register("test.fail", fail)):
        peer = await gateway.accept()
        assert (await peer.call("test.fail"))["error"] == {"kind": kind, "message": "m ü"}


class Panic(BaseException):
    """As an extension in Rust raises it: not an Exception."""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("cannot be shown")


@pytest.mark.parametrize(
    "error",
    [
        KeyError("x"),
        AssertionError(),
        RecursionError("deep"),
        StopIteration(1),
        ExceptionGroup("several", [ValueError("a")]),
        asyncio.CancelledError(),
        TimeoutError(),
        SystemExit(3),
        Panic("called `Option::unwrap()` on a `None` value"),
        Unprintable(),
        OSError(2, "no such file", "caf\udce9.txt"),
        Failed("caf\udce9.txt"),
        Failed(OSError("caf\udce9.txt")),
    ],
    ids=lambda error: f"{type(error).__name__}-{error.args!r:.20}",
)
def test_whatever_a_tool_raises_is_answered_and_the_node_lives_on(error: BaseException) -> None:
    @asynchronous
    async def run() -> None:
        async def fail(ctx: ToolContext, args: Any) -> Any:
            raise error

        registry = echo_registry().register("test.fail", fail)
        async with FakeGateway() as gateway, serving(gateway.url, registry, max_concurrent_tools=1):
            peer = await gateway.accept()
            response = await peer.call("test.fail")
            assert response["ok"] is False
            assert response["error"]["kind"] in ("failed", "cancelled")
            assert (await peer.call("test.echo", 5, "after"))["result"] == 5

    run()


def test_ctrl_c_in_a_tool_ends_the_program() -> None:
    async def interrupt(ctx: ToolContext, args: Any) -> Any:
        raise KeyboardInterrupt

    async def main() -> None:
        async with FakeGateway() as gateway, serving(gateway.url, ToolRegistry().register("test.interrupt", interrupt)):
            peer = await gateway.accept()
            await peer.call("test.interrupt")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())


@pytest.mark.parametrize(
    "error",
    [SystemExit(3), StopIteration(), KeyError("x"), asyncio.CancelledError(), Panic("x")],
    ids=repr,
)
def test_whatever_a_plain_function_raises_is_answered(error: BaseException) -> None:
    registry = echo_registry()

    @registry.tool("test.raise")
    def leave(ctx: ToolContext) -> None:
        raise error

    @asynchronous
    async def run() -> None:
        async with FakeGateway() as gateway, serving(gateway.url, registry):
            peer = await gateway.accept()
            assert (await peer.call("test.raise"))["error"]["kind"] in ("failed", "cancelled")
            assert (await peer.call("test.echo", 5, "after"))["result"] == 5

    run()


@pytest.mark.parametrize(
    "value",
    [object(), {1, (2,)}, "lone \ud800", float("nan"), 1 << 80, b"bytes"],
    ids=lambda value: type(value).__name__,
)
def test_any_result_is_answered(value: Any) -> None:
    """A value JSON has no word for fails the call; it never goes unanswered."""

    @asynchronous
    async def run() -> None:
        async def give(ctx: ToolContext, args: Any) -> Any:
            return value

        async with FakeGateway() as gateway, serving(gateway.url, echo_registry().register("test.give", give)):
            peer = await gateway.accept()
            response = await peer.call("test.give")
            assert response["ok"] or response["error"]["kind"] == "failed"
            assert (await peer.call("test.echo", 5, "after"))["result"] == 5

    run()


@asynchronous
async def test_arguments_and_results_of_every_shape_come_back_alike() -> None:
    values = [None, True, 0, -5, 1.5, "", 'ünï ☃ 😀 \x00\x1f"\\', [], {}, [[[]]], {"": {"a": [1, {"b": None}]}}]
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry()):
        peer = await gateway.accept()
        for number, value in enumerate(values):
            assert (await peer.call("test.echo", value, f"r{number}"))["result"] == value


@asynchronous
async def test_a_result_the_guides_parser_cannot_read_is_a_failure_of_the_call() -> None:
    """The original drops such a response in silence, and its caller would wait for the whole deadline."""
    results: dict[str, Any] = {"long": 10**400, "deep": json.loads("[" * 127 + "]" * 127), "fine": 10**300}
    registry = ToolRegistry()

    @registry.tool("test.result")
    async def result(ctx: ToolContext, name: str) -> Any:
        return results[name]

    async with FakeGateway() as gateway, serving(gateway.url, registry):
        peer = await gateway.accept()
        assert (await peer.call("test.result", {"name": "fine"}, "r0"))["result"] == 10**300
        for name, reason in {"long": "out of range", "deep": "nested deeper than 126 levels"}.items():
            answer = await peer.call("test.result", {"name": name}, name)
            assert answer["ok"] is False and answer["error"]["kind"] == "failed"
            assert reason in answer["error"]["message"]


@asynchronous
async def test_a_plain_function_runs_in_a_thread_and_does_not_hold_up_the_link() -> None:
    registry = ToolRegistry()
    release = threading.Event()

    @registry.tool("test.block")
    def block(ctx: ToolContext) -> int:
        assert release.wait(20)
        return threading.get_ident()

    async with FakeGateway() as gateway, serving(gateway.url, registry):
        peer = await gateway.accept()
        await peer.request("r", "test.block")
        await peer.round_trip()  # the loop is free while the function blocks
        release.set()
        assert (await peer.receive("tool_response"))["result"] != threading.get_ident()


@asynchronous
async def test_as_many_plain_functions_run_at_once_as_the_client_takes() -> None:
    registry = ToolRegistry()
    all_there = threading.Barrier(16)

    @registry.tool("test.meet")
    def meet(ctx: ToolContext) -> str:
        all_there.wait(8)
        return "met"

    async with FakeGateway() as gateway, serving(gateway.url, registry):
        peer = await gateway.accept()
        for number in range(16):
            await peer.request(f"r{number}", "test.meet")
        assert [(await peer.receive("tool_response")).get("result") for _ in range(16)] == ["met"] * 16


@asynchronous
async def test_plain_functions_that_do_not_stop_hold_up_no_other() -> None:
    registry = ToolRegistry()
    release = threading.Event()

    @registry.tool("test.block")
    def block(ctx: ToolContext) -> None:
        release.wait(20)

    @registry.tool("test.quick")
    def quick(ctx: ToolContext) -> str:
        return "quick"

    async with FakeGateway() as gateway, serving(gateway.url, registry):
        peer = await gateway.accept(RESUMING)
        for number in range(16):
            await peer.request(f"r{number}", "test.block")
        for number in range(16):
            await peer.send({"type": "tool_cancel", "request_id": f"r{number}"})
        for _ in range(16):
            assert (await peer.receive("tool_response"))["error"]["kind"] == "cancelled"
        assert (await peer.call("test.quick", request_id="after"))["result"] == "quick"
        release.set()


PLUG_IN = """
import asyncio, contextlib, signal, sys, threading
from farhand.sdk import NodeClient, Shutdown, ToolContext, ToolRegistry

registry = ToolRegistry()

@registry.tool("test.block")
def block(ctx: ToolContext) -> None:
    threading.Event().wait()

async def main() -> None:
    shutdown = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, shutdown.set)
    with contextlib.suppress(Shutdown):
        await NodeClient(sys.argv[1]).run(registry, shutdown)

asyncio.run(main())
"""


@asynchronous
async def test_the_program_ends_although_a_plain_function_does_not() -> None:
    async with FakeGateway() as gateway:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", PLUG_IN, gateway.url)
        try:
            peer = await gateway.accept()
            await peer.request("r", "test.block")
            await peer.round_trip()
            process.terminate()
            assert (await peer.receive("tool_response"))["error"]["kind"] == "cancelled"
            assert await asyncio.wait_for(process.wait(), 15) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


# -- how many at once -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [None, 1, 3])
@asynchronous
async def test_concurrency_is_limited_and_the_rest_waits(cap: int | None) -> None:
    gate = Gate()
    options = {} if cap is None else {"max_concurrent_tools": cap}
    expected = 16 if cap is None else cap
    async with FakeGateway() as gateway, serving(gateway.url, ToolRegistry().register("test.gate", gate), **options):
        peer = await gateway.accept()
        ids = [f"r{number}" for number in range(expected + 10)]
        for request_id in ids:
            await peer.request(request_id, "test.gate", request_id)
        await peer.round_trip()
        assert gate.started == ids[:expected]
        gate.go.set()
        answers = [await peer.receive("tool_response") for _ in ids]
        assert {answer["request_id"]: answer["result"] for answer in answers} == {i: i for i in ids}
        assert gate.most == expected
        assert gate.started == ids, "first come, first served"


@asynchronous
async def test_beyond_the_queue_a_call_is_refused_as_busy() -> None:
    gate = Gate()
    registry = ToolRegistry().register("test.gate", gate)
    async with FakeGateway() as gateway, serving(gateway.url, registry, max_concurrent_tools=2):
        peer = await gateway.accept()
        await peer.request("r0", "test.gate")
        sent = 1
        while True:
            await peer.request(f"r{sent}", "test.gate")
            sent += 1
            assert sent < 1000, "the queue has no end"
            if answers := await peer.quiet():
                break
        (busy,) = answers
        assert busy["request_id"] == f"r{sent - 1}"
        assert busy["error"]["kind"] == "failed"
        assert "busy" in busy["error"]["message"]
        gate.go.set()
        answers = [await peer.receive("tool_response") for _ in range(sent - 1)]
        assert all(answer["ok"] for answer in answers)
        assert len(gate.started) == sent - 1
        assert f"r{sent - 1}" not in gate.started
        await peer.call("test.gate", request_id="later")


# -- sizes ------------------------------------------------------------------------------------------------


@asynchronous
async def test_a_request_that_is_too_long_is_answered() -> None:
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry(), max_request_bytes=1000):
        peer = await gateway.accept()
        frame = {"type": "tool_request", "request_id": "r", "tool": "test.echo", "args": ""}
        spare = 1000 - len(json.dumps(frame))
        assert (await peer.call("test.echo", "x" * spare))["ok"] is True
        refused = await peer.call("test.echo", "x" * (spare + 1), "s")
        assert refused["error"]["kind"] == "invalid_args"
        assert "1001 bytes" in refused["error"]["message"]
        assert "1000" in refused["error"]["message"]
        counted = await peer.call("test.echo", "é" * 600, "t")
        assert counted["ok"] is False, "bytes count, not characters"
        assert (await peer.call("test.echo", 5, "after"))["result"] == 5


@asynchronous
async def test_the_default_limit_is_256_kib() -> None:
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry()):
        peer = await gateway.accept()
        assert (await peer.call("test.echo", "x" * (255 * 1024)))["ok"] is True
        assert (await peer.call("test.echo", "x" * (256 * 1024), "s"))["error"]["kind"] == "invalid_args"
        assert (await peer.call("test.echo", "x" * (20 * 1024 * 1024), "t"))["error"]["kind"] == "invalid_args"


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


@asynchronous
async def test_the_default_limit_of_a_result_is_1_mib() -> None:
    async def letters(ctx: ToolContext, args: Any) -> Any:
        return "x" * args

    async with FakeGateway() as gateway, serving(gateway.url, ToolRegistry().register("test.letters", letters)):
        peer = await gateway.accept()
        whole = await peer.call("test.letters", 1024 * 1024 - 2)
        assert whole["result"] == "x" * (1024 * 1024 - 2)
        cut = await peer.call("test.letters", 1024 * 1024 - 1, "s")
        assert cut["ok"] is True
        assert cut["result"]["_truncated"] is True
        assert cut["result"]["_original_bytes"] == 1024 * 1024 + 1


@asynchronous
async def test_a_plain_gateway_gets_results_of_4_mib_at_most() -> None:
    """The guide's limit holds where the gateway has announced no other."""

    async def letters(ctx: ToolContext, args: Any) -> Any:
        return "x" * args

    registry = ToolRegistry().register("test.letters", letters)
    async with FakeGateway() as gateway, serving(gateway.url, registry, max_response_bytes=64 * 1024 * 1024):
        peer = await gateway.accept()
        whole = await peer.call("test.letters", MAX_TOOL_RESPONSE_BYTES - 2)
        assert whole["result"] == "x" * (MAX_TOOL_RESPONSE_BYTES - 2)
        cut = await peer.call("test.letters", MAX_TOOL_RESPONSE_BYTES - 1, "s")
        assert cut["result"]["_original_bytes"] == MAX_TOOL_RESPONSE_BYTES + 1
        assert len(compact(cut)) <= MAX_TOOL_RESPONSE_BYTES


@asynchronous
async def test_no_response_is_longer_than_the_gateway_takes() -> None:
    async def give(ctx: ToolContext, args: Any) -> Any:
        return "x" * args

    async def fail(ctx: ToolContext, args: Any) -> Any:
        raise Failed("x" * args)

    registry = ToolRegistry().register("test.give", give).register("test.fail", fail)
    welcome = {**PLAIN, "farhand": {"features": [], "max_response_bytes": LIMIT}}
    async with FakeGateway() as gateway, serving(gateway.url, registry):
        peer = await gateway.accept(welcome)
        spare = LIMIT - len(compact({"type": "tool_response", "request_id": "r1", "ok": True, "result": ""}))
        assert (await peer.call("test.give", spare, "r1"))["result"] == "x" * spare
        for request_id, tool, size in [
            ("r2", "test.give", spare + 1),
            ("r3", "test.give", 9000),
            ("r4", "test.fail", 9000),
        ]:
            answer = await peer.call(tool, size, request_id)
            assert len(compact(answer)) <= LIMIT
            if tool == "test.give":
                assert answer["result"]["_truncated"] is True
                assert answer["result"]["_original_bytes"] == size + 2


LIMIT = 400
VALUES = [
    {"s": "a" * 1500},
    "ü" * 500,
    "☃" * 500,
    "😀" * 500,
    '"' * 500,
    "\\" * 500,
    "\x00\x01\n\t" * 200,
    ['\\"ü😀\n'] * 100,
    {"ключ" * 50: ["値" * 100]},
    list(range(400)),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: compact(value)[:12].decode(errors="ignore"))
@asynchronous
async def test_a_long_result_is_cut_on_a_character_and_stays_under_the_limit(value: Any) -> None:
    async def give(ctx: ToolContext, args: Any) -> Any:
        return value

    async with (
        FakeGateway() as gateway,
        serving(gateway.url, ToolRegistry().register("test.give", give), max_response_bytes=LIMIT),
    ):
        peer = await gateway.accept()
        for length in range(12):  # every alignment of the cut, by the length of the id
            await peer.request("r" * (length + 1), "test.give")
            frame = ""
            while '"tool_response"' not in frame:
                received = await peer.connection.recv()
                assert isinstance(received, str)
                frame = received
            assert len(frame.encode()) <= LIMIT
            response = json.loads(frame)
            result = response["result"]
            assert response["ok"] is True
            assert result.keys() == {"_truncated", "_original_bytes", "partial"}
            assert result["_truncated"] is True
            text = compact(value).decode()
            assert result["_original_bytes"] == len(text.encode())
            assert text.startswith(result["partial"])
            escaped = len(json.dumps(text[len(result["partial"])], ensure_ascii=False).encode()) - 2
            assert len(frame.encode()) + escaped > LIMIT, "as much as fits is sent"


@asynchronous
async def test_a_limit_too_small_even_for_the_notice_still_gets_an_answer() -> None:
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry(), max_response_bytes=1):
        peer = await gateway.accept()
        assert (await peer.call("test.echo", 5))["result"] == 5
        assert (await peer.call("test.echo", "long", "s"))["result"] == {
            "_truncated": True,
            "_original_bytes": 6,
            "partial": "",
        }


@asynchronous
async def test_a_long_error_message_stays_under_the_limit() -> None:
    async def fail(ctx: ToolContext, args: Any) -> Any:
        raise NotAllowed("ü\n" * 5000)

    async with (
        FakeGateway() as gateway,
        serving(gateway.url, ToolRegistry().register("test.fail", fail), max_response_bytes=1000),
    ):
        peer = await gateway.accept()
        response = await peer.call("test.fail")
        assert response["error"]["kind"] == "not_allowed"
        assert response["error"]["message"].startswith("ü\nü\n")
        assert len(compact(response)) <= 1000


# -- frames that are no message ---------------------------------------------------------------------------

JUNK: list[str | bytes] = [
    "",
    "hello?",
    "{",
    "[]",
    "null",
    '{"type":"PING","timestamp":1}',
    '{"type":"goodbye"}',
    '{"type":"ping","timestamp":"1"}',
    '{"type":"tool_request","request_id":7,"tool":"test.echo"}',
    '{"type":"tool_request","request_id":"x","request_id":"y","tool":"test.echo"}',
    '{"type":"tool_response","request_id":"x","ok":true}',
    '{"type":"gateway_welcome","gateway_version":"9","protocol_version":2}',
    '{"type":"node_hello","node":{"id":"a","name":"b","node_type":"c","version":"d"},"capabilities":[]}',
    '{"type":"pong","timestamp":1}',
    '{"type":"tool_request","request_id":"x","tool":"test.echo","args":' + "[" * 50_000,
    b"",
    b"\x00\xff garbage",
    b'{"type":"tool_request","request_id":"binary","tool":"test.echo","args":1}',
    b'{"type":"ping","timestamp":1}',
]


@asynchronous
async def test_junk_and_binary_frames_are_ignored_and_the_connection_stays() -> None:
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry()):
        peer = await gateway.accept()
        for frame in JUNK:
            await peer.send(frame)
        assert await peer.quiet() == []
        assert (await peer.call("test.echo", 5))["result"] == 5
        assert gateway.upgrades == 1


@asynchronous
async def test_junk_before_the_welcome_is_ignored_and_nothing_is_served() -> None:
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry()):
        peer = await gateway.accept(welcome=None)
        for frame in JUNK:
            if "gateway_welcome" not in str(frame):
                await peer.send(frame)
        await peer.request("early", "test.echo")
        await peer.send(b'{"type":"gateway_welcome","gateway_version":"binary"}')
        await peer.send(PLAIN)
        assert await peer.quiet() == []
        assert (await peer.call("test.echo", 5))["result"] == 5


@asynchronous
async def test_text_that_is_not_utf8_does_not_end_the_service() -> None:
    async with RawGateway() as gateway, serving(gateway.url, echo_registry()):
        peer = await gateway.accept()
        await peer.upgrade()
        await peer.receive("node_hello")
        peer.write(ws_frame(json.dumps(PLAIN)))
        peer.write(ws_frame(b'{"type":"tool_request","request_id":"bad","tool":"test.echo","args":"\xff"}'))
        peer.write(ws_frame('{"type":"tool_request","request_id":"good","tool":"test.echo","args":1}'))
        assert (await peer.receive("tool_response"))["request_id"] == "good"
        peer.hang_up()


@asynchronous
async def test_a_message_in_fragments_is_one_message() -> None:
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry()):
        peer = await gateway.accept()
        frame = json.dumps(
            {"type": "tool_request", "request_id": "r", "tool": "test.echo", "args": "ü☃😀" * 50}, ensure_ascii=False
        ).encode()
        pieces = [frame[start : start + 7] for start in range(0, len(frame), 7)]  # characters are cut, too
        await peer.connection.send(pieces, text=True)
        assert (await peer.receive("tool_response"))["result"] == "ü☃😀" * 50
        await peer.connection.send([b'{"type":"tool_request",', b'"request_id":"b","tool":"test.echo"}'])
        assert await peer.quiet() == [], "a fragmented binary message is still binary"


@asynchronous
async def test_a_fragmented_message_counts_as_a_whole_against_the_limit() -> None:
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry(), max_request_bytes=1000):
        peer = await gateway.accept()
        frame = json.dumps({"type": "tool_request", "request_id": "r", "tool": "test.echo", "args": "x" * 2000})
        await peer.connection.send([frame[start : start + 100] for start in range(0, len(frame), 100)])
        assert (await peer.receive("tool_response"))["error"]["kind"] == "invalid_args"


@asynchronous
async def test_control_frames_may_come_between_fragments() -> None:
    async with RawGateway() as gateway, serving(gateway.url, echo_registry()):
        peer = await gateway.accept()
        await peer.upgrade()
        await peer.receive("node_hello")
        peer.write(ws_frame(json.dumps(PLAIN)))
        peer.write(ws_frame('{"type":"tool_request","request_id":"r",', fin=False))
        peer.write(ws_frame(b"beat", 9))
        peer.write(ws_frame(b"", 10))
        peer.write(ws_frame('"tool":"test.echo","args":1}', 0))
        assert (await peer.receive("tool_response"))["result"] == 1
        peer.hang_up()


@asynchronous
async def test_a_request_in_the_same_segment_as_the_welcome() -> None:
    async with RawGateway() as gateway, serving(gateway.url, echo_registry()):
        peer = await gateway.accept()
        await peer.upgrade()
        await peer.receive("node_hello")
        request = '{"type":"tool_request","request_id":"r","tool":"test.echo","args":{"x":1}}'
        peer.write(ws_frame(json.dumps(PLAIN)) + ws_frame(request))
        assert (await peer.receive("tool_response"))["result"] == {"x": 1}
        peer.hang_up()


@asynchronous
async def test_a_gateway_that_welcomes_before_the_hello() -> None:
    async with RawGateway() as gateway, serving(gateway.url, echo_registry()):
        peer = await gateway.accept()
        await peer.upgrade(also=ws_frame(json.dumps(PLAIN)))
        assert (await peer.receive("node_hello"))["node"]["id"] == "probe1"
        peer.write(ws_frame('{"type":"tool_request","request_id":"r","tool":"test.echo","args":1}'))
        assert (await peer.receive("tool_response"))["result"] == 1
        peer.hang_up()


# -- links that break -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "cut", "1001", "1011", "4000", "no code"])
@asynchronous
async def test_a_lost_link_is_made_again(how: str) -> None:
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry()):
        for number in range(3):
            peer = await gateway.accept()
            assert (await peer.call("test.echo", number, f"r{number}"))["result"] == number
            if how == "cut":
                peer.cut()
            elif how == "no code":
                peer.connection.protocol.send_close()
                peer.connection.send_data()
            else:
                await peer.close(1000 if how == "close" else int(how))
        last = await gateway.accept()
        assert (await last.call("test.echo", "still", "last"))["result"] == "still"


@asynchronous
async def test_a_dropped_link_is_not_made_again_at_once_but_after_the_delay() -> None:
    backoff = ReconnectBackoff(initial_delay=0.5, max_delay=0.5)
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry(), reconnect_backoff=backoff):
        peer = await gateway.accept()
        peer.cut()
        before = asyncio.get_running_loop().time()
        await gateway.accept()
        assert asyncio.get_running_loop().time() - before >= 0.45


@asynchronous
async def test_a_welcome_resets_the_count_of_attempts() -> None:
    backoff = ReconnectBackoff(initial_delay=0.01, max_delay=0.01, max_attempts=3)
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry(), reconnect_backoff=backoff):
        for _ in range(4):
            gateway.refusals = [(503, ""), (503, "")]
            peer = await gateway.accept()
            await peer.round_trip()
            peer.cut()
        await gateway.accept()


@asynchronous
async def test_attempts_run_out() -> None:
    backoff = ReconnectBackoff(initial_delay=0.01, max_delay=0.01, max_attempts=2)
    async with FakeGateway() as gateway:
        gateway.refusals = [(503, "starting")] * 10
        with pytest.raises(ReconnectExhausted, match=r"503.*starting") as caught:
            await NodeClient(gateway.url, reconnect_backoff=backoff).run(echo_registry())
        assert gateway.upgrades == 3
        assert caught.value.attempts == 2


@asynchronous
async def test_an_unreachable_gateway() -> None:
    async with RawGateway() as gateway:
        url = gateway.url
    with pytest.raises(ReconnectExhausted) as caught:
        await NodeClient(url, reconnect_backoff=ReconnectBackoff(0.01, 0.01, 1, 1)).run(echo_registry())
    assert caught.value.attempts == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: wrong\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n",
        b"\x00" * 100,
        b"HTTP/1.1 101 Switching",
    ],
    ids=["closed", "ssh", "200", "wrong key", "redirect", "zeros", "cut short"],
)
def test_something_else_than_a_gateway_is_tried_again(answer: bytes) -> None:
    @asynchronous
    async def run() -> None:
        backoff = ReconnectBackoff(0.01, 0.01, 1, 1)
        async with RawGateway() as gateway:
            running = asyncio.ensure_future(NodeClient(gateway.url, reconnect_backoff=backoff).run(echo_registry()))
            for _ in range(2):
                peer = await gateway.accept()
                await peer.reader.readuntil(b"\r\n\r\n")
                peer.write(answer)
                peer.writer.close()
            with pytest.raises(ReconnectExhausted):
                await running

    run()


@pytest.mark.parametrize(
    "bad",
    [ws_frame("x", 3), ws_frame("x", 11), b"\x81\xff" + b"\xff" * 8],
    ids=["unknown opcode", "unknown control", "a frame of 2^64 bytes"],
)
def test_a_gateway_that_breaks_the_websocket_rules_loses_the_link_only(bad: bytes) -> None:
    @asynchronous
    async def run() -> None:
        async with RawGateway() as gateway, serving(gateway.url, echo_registry()):
            peer = await gateway.accept()
            await peer.upgrade()
            await peer.receive("node_hello")
            peer.write(ws_frame(json.dumps(PLAIN)) + bad)
            assert await peer.at_end()
            again = await gateway.accept()
            await again.upgrade()
            await again.receive("node_hello")
            again.hang_up()

    run()


@pytest.mark.parametrize("status", [400, 401, 403, 404])
@asynchronous
async def test_a_refusal_that_a_retry_cannot_change_is_final(status: int) -> None:
    async with FakeGateway() as gateway:
        gateway.refusals = [(status, "invalid or missing node token")] * 5
        with pytest.raises(Refused, match=f"{status}.*invalid or missing node token"):
            await NodeClient(gateway.url, "wrong", reconnect_backoff=AT_ONCE).run(echo_registry())
        assert gateway.upgrades == 1


@pytest.mark.parametrize(("times", "ends"), [(4, False), (5, True)])
@asynchronous
async def test_after_a_welcome_only_repeated_refusals_are_final(times: int, ends: bool) -> None:
    """A garbled line, or a proxy that answers while the gateway restarts, does not end a node for good."""
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry()) as node:
        peer = await gateway.accept()
        gateway.refusals = [(401, "invalid or missing node token")] * times
        await peer.close(1011, "the gateway restarts")
        if ends:
            assert isinstance(await node.ending(), Refused)
        else:
            again = await gateway.accept()
            assert (await again.call("test.echo", 1))["result"] == 1
        assert gateway.upgrades == 1 + times + (not ends)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
@asynchronous
async def test_a_refusal_that_may_pass_is_tried_again(status: int) -> None:
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry()):
        gateway.refusals = [(status, "later"), (status, "")]
        peer = await gateway.accept()
        assert (await peer.call("test.echo", 1))["result"] == 1
        assert gateway.upgrades == 3


@pytest.mark.parametrize("version", [0, 2, 99])
@asynchronous
async def test_a_gateway_of_another_version_is_final(version: int) -> None:
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry()) as node:
        peer = await gateway.accept({**PLAIN, "protocol_version": version})
        error = await node.ending()
        assert isinstance(error, Refused)
        assert str(version) in str(error)
        await peer.ended()
        assert gateway.upgrades == 1


@pytest.mark.parametrize("code", [4400, 4401, 4403, 4406, 1002, 1008])
@asynchronous
async def test_a_close_before_the_welcome_that_means_no_is_final(code: int) -> None:
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry()) as node:
        peer = await gateway.accept(welcome=None)
        await peer.close(code, "we do not want you")
        error = await node.ending()
        assert isinstance(error, Refused)
        assert "we do not want you" in str(error)
        assert str(code) in str(error)


@asynchronous
async def test_a_close_before_the_welcome_that_says_nothing_is_tried_again() -> None:
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry()):
        await (await gateway.accept(welcome=None)).close(1000)
        (await gateway.accept(welcome=None)).cut()
        peer = await gateway.accept()
        assert (await peer.call("test.echo", 1))["result"] == 1


@asynchronous
async def test_a_token_revoked_while_connected_is_final() -> None:
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry()) as node:
        peer = await gateway.accept()
        await peer.close(4401, "this node's token was revoked")
        assert isinstance(await node.ending(), Refused)


@asynchronous
async def test_a_replaced_node_backs_off_instead_of_fighting() -> None:
    """Two programs with one id: each replaces the other, so each waits longer every time."""
    backoff = ReconnectBackoff(initial_delay=0.01, max_delay=60, backoff_factor=2, max_attempts=3)
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry(), reconnect_backoff=backoff) as node:
        for _ in range(4):
            peer = await gateway.accept()
            await peer.round_trip()
            await peer.close(4409, "a newer connection took over")
        error = await node.ending()
        assert isinstance(error, ReconnectExhausted), "a welcome does not reset the count of a replaced node"
        assert error.attempts == 3


def test_the_welcome_is_awaited_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farhand.sdk.client.HELLO_SECONDS", 0.2)  # the real ten seconds are checked in test_config

    @asynchronous
    async def run() -> None:
        async with FakeGateway() as gateway, serving(gateway.url, echo_registry()):
            silent = await gateway.accept(welcome=None)
            peer = await gateway.accept()
            await silent.ended()
            assert (await peer.call("test.echo", 1))["result"] == 1

    run()


def test_the_upgrade_is_awaited_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farhand.sdk.connection.CONNECT_SECONDS", 0.2)

    @asynchronous
    async def run() -> None:
        async with RawGateway() as gateway, serving(gateway.url, echo_registry()):
            silent = await gateway.accept()
            again = await gateway.accept()
            assert await silent.at_end()
            await again.upgrade()
            await again.receive("node_hello")
            again.hang_up()

    run()


@asynchronous
async def test_tools_in_flight_are_cancelled_when_a_plain_gateway_is_lost() -> None:
    gate = Gate()
    registry = echo_registry().register("test.gate", gate)
    async with FakeGateway() as gateway, serving(gateway.url, registry, max_concurrent_tools=1):
        peer = await gateway.accept()
        await peer.request("running", "test.gate")
        await peer.request("waiting", "test.gate")
        await peer.round_trip()
        peer.cut()
        again = await gateway.accept()
        assert again.hello["farhand"]["resume"].get("finished", []) == []
        assert (await again.call("test.echo", 1, "new"))["result"] == 1
        assert gate.started == ["running"], "what only waited never starts"
        assert gate.ended == ["running"]
        assert gate.contexts["running"].cancel.is_cancelled()
        assert "link" in gate.contexts["running"].cancel.reason
        assert await again.quiet() == [], "a plain gateway has forgotten those calls"


@asynchronous
async def test_a_tool_deaf_to_its_token_is_cancelled_after_the_grace() -> None:
    ended = asyncio.Event()
    started = asyncio.Event()

    async def deaf(ctx: ToolContext, args: Any) -> Any:
        started.set()
        try:
            await asyncio.sleep(1000)
        finally:
            ended.set()

    async with FakeGateway() as gateway, serving(gateway.url, echo_registry().register("test.deaf", deaf)):
        peer = await gateway.accept()
        await peer.request("r", "test.deaf")
        await started.wait()
        peer.cut()
        again = await gateway.accept()
        async with asyncio.timeout(60):
            await ended.wait()
        assert await again.quiet() == [], "its answer belongs to a connection that is gone"


# -- a request that comes twice ---------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["running", "waiting", "finished", "on the next link"])
@asynchronous
async def test_a_duplicate_request_of_a_plain_gateway_never_runs_twice(when: str) -> None:
    gate = Gate()
    registry = ToolRegistry().register("test.gate", gate)
    async with FakeGateway() as gateway, serving(gateway.url, registry, max_concurrent_tools=1):
        peer = await gateway.accept()
        if when == "waiting":
            await peer.request("before", "test.gate")
        await peer.request("r", "test.gate", 1)
        if when in ("finished", "on the next link"):
            gate.go.set()
            first = await peer.receive("tool_response")
            if when == "on the next link":
                peer.cut()
                peer = await gateway.accept()
        await peer.request("r", "test.gate", "something else")
        if when in ("running", "waiting"):
            assert await peer.quiet() == []
            gate.go.set()
            answers = [await peer.receive("tool_response") for _ in range(1 if when == "running" else 2)]
            assert answers[-1]["result"] == 1
        else:
            assert await peer.receive("tool_response") == first, "the same answer again"
        assert await peer.quiet() == []
        assert gate.started.count("r") == 1


@asynchronous
async def test_a_call_that_ended_with_its_link_is_reported_and_not_run_again() -> None:
    gate = Gate()
    async with FakeGateway() as gateway, serving(gateway.url, ToolRegistry().register("test.gate", gate)):
        peer = await gateway.accept()
        await peer.request("r", "test.gate")
        await gate.arrived.wait()
        peer.cut()
        again = await gateway.accept()
        answer = await again.call("test.gate")
        assert answer["error"]["kind"] == "cancelled"
        assert "link" in answer["error"]["message"]
        assert gate.started == ["r"]


@asynchronous
async def test_a_duplicate_whose_answer_is_no_longer_kept_fails_and_does_not_run() -> None:
    ran: list[str] = []

    async def letters(ctx: ToolContext, args: Any) -> Any:
        ran.append(ctx.request_id)
        return "x" * args

    async with FakeGateway() as gateway, serving(gateway.url, ToolRegistry().register("test.letters", letters)):
        peer = await gateway.accept()
        ids = [f"r{number}" for number in range(6)]
        for request_id in ids:
            await peer.call("test.letters", 1_000_000, request_id)
        assert (await peer.call("test.letters", 1, "r5"))["result"] == "x" * 1_000_000
        assert (await peer.call("test.letters", 1, "r0"))["error"] == {
            "kind": "failed",
            "message": "call r0 was run before; its result is no longer kept",
        }
        assert ran == ids


@asynchronous
async def test_a_call_that_was_refused_may_be_asked_for_again() -> None:
    registry = ToolRegistry()
    async with FakeGateway() as gateway, serving(gateway.url, registry):
        peer = await gateway.accept()
        assert (await peer.call("test.echo", 1))["error"]["kind"] == "not_found"
        registry.register("test.echo", echo)
        assert (await peer.call("test.echo", 1))["result"] == 1


# -- the end ----------------------------------------------------------------------------------------------


@asynchronous
async def test_shutdown_cancels_tools_answers_and_closes() -> None:
    gate = Gate()
    registry = ToolRegistry().register("test.gate", gate)
    async with FakeGateway() as gateway, serving(gateway.url, registry, max_concurrent_tools=1) as node:
        peer = await gateway.accept()
        await peer.request("running", "test.gate")
        await peer.request("waiting", "test.gate")
        await gate.arrived.wait()
        await peer.round_trip()
        node.shutdown.set()
        answers = {}
        for _ in range(2):
            answer = await peer.receive("tool_response")
            answers[answer["request_id"]] = answer["error"]
        assert {error["kind"] for error in answers.values()} == {"cancelled"}
        assert "shutting down" in answers["running"]["message"]
        assert await peer.ended() == 1001
        assert isinstance(await node.ending(), Shutdown)
        assert gate.started == gate.ended == ["running"]


@asynchronous
async def test_shutdown_ends_even_a_deaf_tool() -> None:
    started = asyncio.Event()
    ended = asyncio.Event()

    async def deaf(ctx: ToolContext, args: Any) -> Any:
        started.set()
        try:
            await asyncio.sleep(1000)
        finally:
            ended.set()

    async with FakeGateway() as gateway, serving(gateway.url, ToolRegistry().register("test.deaf", deaf)) as node:
        peer = await gateway.accept()
        await peer.request("r", "test.deaf")
        await started.wait()
        node.shutdown.set()
        assert (await peer.receive("tool_response"))["error"]["kind"] == "cancelled"
        assert isinstance(await node.ending(), Shutdown)
        assert ended.is_set()


@asynchronous
async def test_a_request_that_comes_during_the_shutdown_does_not_run() -> None:
    ran: list[str] = []
    started, stopping, release = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow_to_stop(ctx: ToolContext, args: Any) -> Any:
        ran.append(ctx.request_id)
        started.set()
        await ctx.cancel.cancelled()
        stopping.set()
        await release.wait()
        raise Cancelled("at last")

    registry = ToolRegistry().register("test.slow", slow_to_stop)
    async with FakeGateway() as gateway, serving(gateway.url, registry) as node:
        peer = await gateway.accept()
        await peer.request("first", "test.slow")
        await started.wait()
        node.shutdown.set()
        await stopping.wait()
        refused = await peer.call("test.slow", None, "second")
        assert refused["error"]["kind"] == "cancelled"
        release.set()
        assert (await peer.receive("tool_response"))["request_id"] == "first"
        assert isinstance(await node.ending(), Shutdown)
    assert ran == ["first"]


@asynchronous
async def test_shutdown_before_the_first_connection() -> None:
    async with FakeGateway() as gateway:
        shutdown = asyncio.Event()
        shutdown.set()
        with pytest.raises(Shutdown):
            await NodeClient(gateway.url).run(echo_registry(), shutdown)


@asynchronous
async def test_shutdown_while_waiting_to_reconnect_ends_at_once() -> None:
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry(), reconnect_backoff=SLOW) as node:
        peer = await gateway.accept()
        peer.cut()
        await asyncio.sleep(0.1)
        assert not node.task.done()
        node.shutdown.set()
        assert isinstance(await node.ending(), Shutdown)


@asynchronous
async def test_shutdown_while_waiting_for_the_welcome() -> None:
    async with FakeGateway() as gateway, serving(gateway.url, echo_registry()) as node:
        peer = await gateway.accept(welcome=None)
        node.shutdown.set()
        assert isinstance(await node.ending(), Shutdown)
        await peer.ended()


@asynchronous
async def test_shutdown_while_waiting_for_the_upgrade_leaves_no_socket_behind() -> None:
    async with RawGateway() as gateway, serving(gateway.url, echo_registry()) as node:
        peer = await gateway.accept()
        await peer.reader.readuntil(b"\r\n\r\n")
        node.shutdown.set()
        assert isinstance(await node.ending(), Shutdown)
        assert await peer.at_end()


@asynchronous
async def test_shutdown_is_final_even_if_the_gateway_does_not_close() -> None:
    async with RawGateway() as gateway, serving(gateway.url, echo_registry()) as node:
        peer = await gateway.accept()
        await peer.upgrade()
        await peer.receive("node_hello")
        peer.write(ws_frame(json.dumps(PLAIN)))
        await peer.receive("ping")
        node.shutdown.set()
        opcode, payload = await peer.read_frame()
        assert opcode == 8
        assert int.from_bytes(payload[:2]) == 1001
        peer.write(ws_frame("x", 3))  # not a goodbye, and against the rules
        assert isinstance(await node.ending(), Shutdown)
        assert await peer.at_end()


@pytest.mark.parametrize("moment", ["connected", "welcome", "upgrade", "backoff", "tool"])
@asynchronous
async def test_cancelling_the_task_cleans_up(moment: str) -> None:
    gate = Gate()
    registry = ToolRegistry().register("test.gate", gate)
    async with FakeGateway() as gateway, RawGateway() as raw:
        url = raw.url if moment == "upgrade" else gateway.url
        node = Served(NodeClient(url, reconnect_backoff=SLOW), registry)
        ends = []
        if moment == "upgrade":
            silent = await raw.accept()
            await silent.reader.readuntil(b"\r\n\r\n")
            ends.append(silent.at_end())
        else:
            peer = await gateway.accept(None if moment == "welcome" else PLAIN)
            if moment == "tool":
                await peer.request("r", "test.gate")
                await gate.arrived.wait()
            elif moment == "backoff":
                peer.cut()
                await asyncio.sleep(0.1)
            ends.append(peer.ended())
        node.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(60):
                await node.task
        await asyncio.gather(*ends)
        assert gate.started == gate.ended


@asynchronous
async def test_spawn_gives_a_task_of_this_loop() -> None:
    async with FakeGateway() as gateway:
        shutdown = asyncio.Event()
        task = NodeClient(gateway.url).spawn(echo_registry(), shutdown)
        assert isinstance(task, asyncio.Task)
        peer = await gateway.accept()
        assert (await peer.call("test.echo", 1))["result"] == 1
        shutdown.set()
        with pytest.raises(Shutdown):
            await task
        assert await peer.ended() == 1001


@asynchronous
async def test_one_client_serves_again_after_a_shutdown() -> None:
    async with FakeGateway() as gateway:
        client = NodeClient(gateway.url)
        boots = []
        for _ in range(2):
            shutdown = asyncio.Event()
            task = client.spawn(echo_registry(), shutdown)
            peer = await gateway.accept()
            boots.append(peer.hello["farhand"]["resume"]["boot"])
            assert (await peer.call("test.echo", 1))["result"] == 1
            shutdown.set()
            with pytest.raises(Shutdown):
                await task
        assert boots[0] != boots[1]


@asynchronous
async def test_without_an_event_only_cancelling_ends_it() -> None:
    async with FakeGateway() as gateway:
        task = asyncio.ensure_future(NodeClient(gateway.url).run(echo_registry()))
        peer = await gateway.accept()
        assert (await peer.call("test.echo", 1))["result"] == 1
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()


# -- any result, any limit --------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.text(),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(), inner, max_size=8),
    max_leaves=40,
)


def test_any_result_under_any_limit() -> None:
    """One connection for all examples: every result comes whole, or as a true beginning of itself."""
    current: list[Any] = [None]

    async def give(ctx: ToolContext, args: Any) -> Any:
        return current[0]

    async def exchange(limit: int, value: Any) -> tuple[int, Any]:
        current[0] = value
        registry = ToolRegistry().register("test.give", give)
        async with FakeGateway() as gateway, serving(gateway.url, registry, max_response_bytes=limit):
            peer = await gateway.accept()
            await peer.request("r", "test.give")
            while True:
                frame = await peer.connection.recv()
                assert isinstance(frame, str)
                if json.loads(frame)["type"] == "tool_response":
                    return len(frame.encode()), json.loads(frame)["result"]

    @given(st.integers(150, 300), values)
    @example(150, "\\" * 400)
    @example(151, "\\" * 400)
    def check(limit: int, value: Any) -> None:
        size, result = asyncio.run(exchange(limit, value))
        text = compact(value).decode()
        if len(text.encode()) <= limit:
            assert result == value
            return
        assert size <= limit
        assert result["_original_bytes"] == len(text.encode())
        assert text.startswith(result["partial"])

    check()


@pytest.mark.parametrize("early", [True, False])
def test_a_cancel_token_shuts_the_client_down(early: bool) -> None:
    async def run() -> None:
        shutdown = CancelToken()
        client = NodeClient("ws://127.0.0.1:9/v1/nodes/ws", "token", node_info=NodeInfo("n", "n", "test", "1"))
        if early:
            shutdown.cancel("before the start")
        running = client.spawn(ToolRegistry(), shutdown)
        await asyncio.sleep(0)
        shutdown.cancel("enough")
        with pytest.raises(Shutdown):
            await asyncio.wait_for(running, 30)

    asyncio.run(run())
